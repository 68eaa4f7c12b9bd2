"""Predicted cost of what merges are made of."""

from collections import Counter
from functools import lru_cache
from itertools import groupby
from math import ceil, log2
from typing import NamedTuple

from attnmesh.cost.candidate_mesh import Cost
from attnmesh.cost.cluster import Cluster
from attnmesh.mesh.reduction_tree import reduction_rounds

CHECKSUM_BYTES = 8.0
"""Bytes of the call checksum in each message."""

RING_SEGMENTS, ELEMENT = 2, 4
"""Messages in which gloo sends each part of a ring collective, and the bytes of the least: one element."""


class MergeGroup(NamedTuple):
    """Ranks that merge with each other. `groups` of them merge at the same time."""

    ranks: int
    ranks_per_host: int
    """Ranks of the group on each of its hosts."""
    groups: int = 1
    groups_per_host: int = 1


class MessageSize(NamedTuple):
    """The message of one partial: bytes of a column, which has a number for each row, and the columns of `out`."""

    column_bytes: float
    columns: int

    @property
    def size(self) -> float:
        """Bytes of `out`, `lse` and the checksum."""
        return self.column_bytes * (self.columns + 1) + CHECKSUM_BYTES


TYPICAL_MESSAGE = MessageSize(128.0, 128)
"""Message by which "auto" chooses, 32 rows of 128 columns: a rank whose call fails does not know the real size."""


def all_reduce_seconds(group: MergeGroup, size: float, cluster: Cluster) -> float:
    """Return the seconds of an all-reduce of `size` bytes."""
    total = Cost()
    add_collective("all-reduce", group, size / group.ranks, 2, cluster, total)
    return total.seconds


def add_all_to_all(stage: str, group: MergeGroup, size: float, cluster: Cluster, total: Cost) -> None:
    """Add a merge of messages of `size` bytes from every rank to every other at once."""
    near, away, ranks = group.ranks_per_host - 1, group.ranks - group.ranks_per_host, group.groups * group.ranks
    link = cluster.between if away else cluster.inside
    total.add_traffic(ranks * near * size, ranks * away * size, ranks * away)
    leaving = away * group.ranks_per_host * group.groups_per_host * size
    transfer = max((away or near) * size / link.rate, leaving / link.host_rate)
    waits = link.merge_latency + (group.ranks - 2) * link.message
    total.add_stage(stage, waits + transfer + cluster.device.call)


def add_collective(stage: str, group: MergeGroup, size: float, passes: int, cluster: Cluster, total: Cost) -> None:
    """Add a ring collective.

    Parts of `size` bytes go round the ring `passes` times: once in an all-gather, twice in an all-reduce.
    The first link costs a latency, each further link a step. Some backends all-reduce short messages by a tree.
    One rank of each group on a host sends to the next host, over links that all groups share.
    """
    hosts = group.ranks // group.ranks_per_host
    steps = passes * (group.ranks - 1)
    crossing = hosts if hosts > 1 else 0
    link = cluster.between if crossing else cluster.inside
    inside = cluster.inside.collective_step
    parts = group.groups * steps
    messages = min(RING_SEGMENTS, size / ELEMENT) * parts * crossing
    total.add_traffic(parts * (group.ranks - crossing) * size, parts * crossing * size, messages)
    by_tree = passes > 1 and cluster.short_collectives == "tree"
    away = passes * (ceil(log2(hosts)) if by_tree else hosts - 1) * cluster.between.collective_step
    near = passes * (group.ranks_per_host - 1) * (1 if by_tree else hosts) * inside
    start_up = max(0.0, link.merge_latency - link.collective_step)
    leaving = group.groups_per_host * size if crossing else 0
    transfer = steps * max(size / link.rate, leaving / link.host_rate)
    total.add_stage(stage, start_up + away + near + transfer + cluster.device.call)


class PricedRound(NamedTuple):
    """Messages of one round of a tree merge."""

    rank_messages: int
    """Messages that the busiest rank sends."""
    inside_messages: int
    """Messages of all ranks inside their hosts."""
    between_messages: int
    """Messages of all ranks between hosts."""
    leaving_messages: int
    """Messages that leave the busiest host."""


@lru_cache(maxsize=256)
def tree_rounds(ranks: int, ranks_per_host: int) -> tuple[PricedRound, ...]:
    """Return the rounds of the reduction tree of `ranks` ranks, `ranks_per_host` of them on each host.

    Every rank takes part in the last round. One without a peer, as the third of a host of three, begins a round later.
    """
    host_of = [rank // ranks_per_host for rank in range(ranks)]
    by_rank = reduction_rounds([[*group] for _, group in groupby(range(ranks), host_of.__getitem__)])
    rounds = []
    for left in range(max(map(len, by_rank.values())), 0, -1):
        sends = {rank: own_rounds[-left].send for rank, own_rounds in by_rank.items() if left <= len(own_rounds)}
        hosts = [(host_of[sender], host_of[receiver]) for sender, peers in sends.items() for receiver in peers]
        leaving = Counter(sender for sender, receiver in hosts if sender != receiver)
        between = leaving.total()
        most = max(map(len, sends.values()))
        rounds.append(PricedRound(most, len(hosts) - between, between, max(leaving.values(), default=0)))
    return tuple(rounds)


def _round(tree_round: PricedRound, group: MergeGroup, size: float, cluster: Cluster, total: Cost) -> float:
    """Return the seconds of one round of a tree merge, and add its traffic."""
    link = cluster.between if tree_round.between_messages else cluster.inside
    inside, between = group.groups * tree_round.inside_messages, group.groups * tree_round.between_messages
    total.add_traffic(inside * size, between * size, between)
    transfer = max(
        tree_round.rank_messages * size / link.rate,
        tree_round.leaving_messages * group.groups_per_host * size / link.host_rate,
    )
    return link.merge_latency + (tree_round.rank_messages - 1) * link.message + transfer


def add_tree(stage: str, group: MergeGroup, size: float, cluster: Cluster, total: Cost) -> None:
    """Add a merge along the tree, of a message of `size` bytes in each round."""
    for tree_round in tree_rounds(group.ranks, group.ranks_per_host):
        total.add_stage(stage, _round(tree_round, group, size, cluster, total) + cluster.device.call)
