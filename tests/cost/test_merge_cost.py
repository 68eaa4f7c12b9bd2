"""Prices of merges: their messages are counted one by one, and their seconds are those of the slowest link."""

from itertools import pairwise, product

import pytest

import attnmesh as am
from attnmesh.cost.candidate_mesh import Cost
from attnmesh.cost.merge_cost import (
    MergeGroup,
    MessageSize,
    PricedRound,
    add_all_to_all,
    add_collective,
    add_tree,
    tree_rounds,
)
from attnmesh.cost.rates import Device, Link
from attnmesh.mesh.reduction_tree import reduction_rounds

pytestmark = pytest.mark.quick

INSIDE, BETWEEN = Link(1e-6, 1e9, 4e9), Link(1e-3, 1e6, 2e6, message=1e-4)
CLUSTER = am.Cluster("by hand", 4, 4, Device(1e12, 1e12, 1e12, 1e9, call=1e-5), INSIDE, BETWEEN)
GROUPS = [MergeGroup(2, 1), MergeGroup(4, 2), MergeGroup(8, 4), MergeGroup(4, 4), MergeGroup(4, 1, 3, 3)]


def test_a_message_has_the_columns_of_out_one_of_lse_and_a_checksum() -> None:
    assert MessageSize(column_bytes=4.0 * 32, columns=128).size == 32 * 4 * (128 + 1) + 8


def test_a_tree_merges_inside_hosts_first() -> None:
    assert tree_rounds(4, 2) == (PricedRound(1, 4, 0, 0), PricedRound(1, 0, 4, 2))
    assert tree_rounds(8, 2) == (PricedRound(1, 8, 0, 0), PricedRound(1, 0, 8, 2), PricedRound(1, 0, 8, 2))
    # Of three ranks two exchange first; then the third sends to both, and one of them to it.
    assert tree_rounds(6, 3) == (PricedRound(1, 4, 0, 0), PricedRound(2, 6, 0, 0), PricedRound(1, 0, 6, 3))


@pytest.mark.parametrize("ranks_per_host", range(1, 8))
@pytest.mark.parametrize("hosts", range(1, 8))
def test_messages_of_a_tree_are_counted_one_by_one(hosts: int, ranks_per_host: int) -> None:
    ranks = hosts * ranks_per_host
    by_rank = reduction_rounds(
        [list(range(ranks))[start : start + ranks_per_host] for start in range(0, ranks, ranks_per_host)]
    )
    pairs = [(rank, peer) for rank, rounds in by_rank.items() for one in rounds for peer in one.send]
    between = sum(a // ranks_per_host != b // ranks_per_host for a, b in pairs)
    rounds = tree_rounds(ranks, ranks_per_host) if ranks > 1 else ()
    assert sum(one.between_messages for one in rounds) == between
    assert sum(one.inside_messages for one in rounds) == len(pairs) - between
    if hosts & (hosts - 1) == 0:  # otherwise one half of the hosts may still be inside while the other is between
        assert not any(one.inside_messages and one.between_messages for one in rounds)


def hosts_of(group: MergeGroup) -> list[int]:
    """Return the host of each rank of a group."""
    return [rank // group.ranks_per_host for rank in range(group.ranks)]


@pytest.mark.parametrize("group", GROUPS)
def test_messages_from_each_to_each_are_counted_one_by_one(group: MergeGroup) -> None:
    total, hosts = Cost(), hosts_of(group)
    add_all_to_all("merge", group, 100.0, CLUSTER, total)
    away = sum(a != b for a, b in product(hosts, repeat=2)) * group.groups
    near = group.ranks * (group.ranks - 1) * group.groups - away
    assert (total.inside, total.between, total.messages) == (100.0 * near, 100.0 * away, away)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("passes", [1, 2])
def test_parts_of_a_ring_are_counted_one_by_one(group: MergeGroup, passes: int) -> None:
    total, hosts = Cost(), hosts_of(group)
    add_collective("ring", group, 100.0, passes, CLUSTER, total)
    steps = passes * (group.ranks - 1) * group.groups
    crossing = sum(a != b for a, b in pairwise([*hosts, hosts[0]]))
    assert (total.inside, total.between) == (100.0 * steps * (group.ranks - crossing), 100.0 * steps * crossing)


def test_seconds_are_those_of_the_slowest_link() -> None:
    """Two hosts of two ranks: a round inside, then one in which two ranks of a host send 1,000 bytes each."""
    total = Cost()
    add_tree("merge", MergeGroup(4, 2), 1000.0, CLUSTER, total)
    assert total.parts == {"merge": pytest.approx((1e-6 + 1e-6 + 1e-5) + (1e-3 + 1e-3 + 1e-5))}
    total = Cost()
    add_all_to_all("merge", MergeGroup(4, 2), 1000.0, CLUSTER, total)
    # Of the three messages that a rank receives two wait for their own start; four leave each host.
    assert total.seconds == pytest.approx(1e-3 + 2 * 1e-4 + 4 * 1000 / 2e6 + 1e-5)
