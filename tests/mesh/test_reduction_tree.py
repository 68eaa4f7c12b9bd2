"""The tree, for any number of ranks and hosts, without a device."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnmesh.mesh.reduction_tree import bit_reversed, reduction_rounds

pytestmark = pytest.mark.quick


def contributions_by_round(hosts: list[list[int]]) -> dict[int, list[frozenset[int]]]:
    """Return the contributions that each rank has merged after each of its rounds."""
    rounds = reduction_rounds(hosts)
    held = {rank: [frozenset([rank])] for rank in rounds}
    waiting = dict.fromkeys(rounds, 0)
    sent: dict[tuple[int, int], list[frozenset[int]]] = {}
    while any(waiting[rank] < len(rounds[rank]) for rank in rounds):
        before = dict(waiting)
        for rank, count in before.items():
            if count < len(rounds[rank]):
                step = rounds[rank][count]
                for peer in step.send:
                    if held[rank][-1] not in sent.setdefault((rank, peer), []):
                        sent[rank, peer].append(held[rank][-1])
        for rank, count in before.items():
            if count < len(rounds[rank]) and (letters := sent.get((rounds[rank][count].recv, rank))):
                received = letters.pop(0)
                assert not received & held[rank][-1], "a partial that is merged twice would count twice"
                held[rank].append(held[rank][-1] | received)
                waiting[rank] += 1
        assert waiting != before, "all wait for each other"
    return held


@pytest.mark.parametrize("ranks", range(1, 34))
def test_every_rank_receives_every_partial_once_in_few_rounds(ranks: int) -> None:
    held = contributions_by_round([list(range(ranks))])
    for steps in held.values():
        assert steps[-1] == frozenset(range(ranks))
        assert len(steps) - 1 <= (ranks - 1).bit_length()


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_ranks_merge_inside_hosts_before_between_them(sizes: list[int]) -> None:
    ranks = iter(range(sum(sizes)))
    hosts = [[next(ranks) for _ in range(size)] for size in sizes]
    held = contributions_by_round(hosts)
    for host in hosts:
        inside = {frozenset(host)}
        for rank in host:
            assert held[rank][-1] == frozenset(range(sum(sizes)))
            crossing = [after for after in held[rank] if not after <= frozenset(host)]
            assert inside <= set(held[rank]), "a host is merged before it sends to another"
            assert len(crossing) <= (len(hosts) - 1).bit_length()


def test_each_aligned_run_of_bit_reversed_ranks_has_one_residue() -> None:
    for ranks in (1, 2, 4, 8, 16):
        order = bit_reversed(ranks)
        assert sorted(order) == list(range(ranks))
        for size in (2, 4, 8):
            for start in range(0, ranks, size) if size <= ranks else ():
                assert len({rank % (ranks // size) for rank in order[start : start + size]}) == 1
