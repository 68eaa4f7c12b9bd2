"""Prices of merges: their messages are counted one by one, and their seconds are those of the slowest link."""

from dataclasses import replace
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
    all_reduce_seconds,
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


def test_seconds_of_a_tree_are_those_of_the_busiest_rank_and_of_all_groups() -> None:
    """Of three ranks a host one sends two messages in the second round; in the last each of both groups sends three."""
    total = Cost()
    add_tree("merge", MergeGroup(6, 3, 2, 2), 1000.0, replace(CLUSTER, inside=replace(INSIDE, message=1e-7)), total)
    inside = (1e-6 + max(1e-6, 0)) + (1e-6 + 1e-7 + 2e-6)
    assert total.parts["merge"] == pytest.approx(inside + (1e-3 + 3 * 2 * 1000 / 2e6) + 3 * 1e-5)
    assert (total.inside, total.between, total.messages) == (2 * 10_000, 2 * 6000, 2 * 6)


@pytest.mark.parametrize(
    ("group", "away", "near"), [(MergeGroup(4, 2), 1, 2), (MergeGroup(6, 2), 2, 3), (MergeGroup(4, 4), 0, 3)]
)
def test_a_part_of_a_ring_goes_over_all_links_but_one(group: MergeGroup, away: int, near: int) -> None:
    """The first link costs a latency, each other one a step. Parts go all around twice in an all-reduce."""
    inside, between = replace(INSIDE, short=3e-6, step=2e-6), replace(BETWEEN, short=4e-3, step=3e-3)
    cluster = replace(CLUSTER, inside=inside, between=between, short_collectives="ring")
    for passes in (1, 2):
        total = Cost()
        add_collective("ring", group, 100.0, passes, cluster, total)
        first = 1e-3 if away else 1e-6
        sent = passes * (group.ranks - 1) * 100.0 / (1e6 if away else 1e9)
        assert total.seconds == pytest.approx(first + passes * (away * 3e-3 + near * 2e-6) + sent + 1e-5)


def test_short_all_reduces_go_up_and_down_a_tree() -> None:
    """Of four hosts of two: two rounds between hosts, and one inside each. An all-gather goes round the ring."""
    cluster = replace(CLUSTER, short_collectives="tree")
    ring, tree = Cost(), Cost()
    add_collective("ring", MergeGroup(8, 2), 8.0, 1, cluster, ring)
    add_collective("tree", MergeGroup(8, 2), 8.0, 2, cluster, tree)
    assert ring.seconds == pytest.approx(3 * 1e-3 + 4 * 1e-6 + 7 * 8 / 1e6 + 1e-5)
    assert tree.seconds == pytest.approx(2 * (2 * 1e-3 + 1e-6) + 14 * 8 / 1e6 + 1e-5)


def test_a_long_all_reduce_takes_the_time_of_its_bytes() -> None:
    """Each rank sends all but its own part, twice."""
    assert all_reduce_seconds(MergeGroup(4, 4), 4e9, CLUSTER) == pytest.approx(2 * 3 * 1e9 / 1e9, rel=1e-3)


def test_rings_share_the_links_between_hosts() -> None:
    """In each of 3 steps a rank of each of 3 groups sends to the next host."""
    total = Cost()
    add_collective("ring", MergeGroup(4, 2, 3, 3), 1e6, 1, CLUSTER, total)
    assert total.seconds == pytest.approx(3 * 3 * 1e6 / 2e6, rel=0.01)


def test_parts_of_a_ring_leave_hosts_in_two_messages_or_by_element() -> None:
    for size, messages in ((100.0, 2), (4.0, 1), (2.0, 0.5)):
        total = Cost()
        add_collective("ring", MergeGroup(4, 2), size, 1, CLUSTER, total)
        assert total.messages == messages * 3 * 2, "3 steps, in each of which 2 ranks send to another host"
