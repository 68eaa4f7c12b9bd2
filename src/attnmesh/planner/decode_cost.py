"""What a decode step costs: the local attention of each rank, one merge, and with split heads what joins them again."""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from math import ceil, log2
from typing import NamedTuple

import torch

from attnmesh.core.digest import AGREEMENT_VALUES
from attnmesh.core.layout import Striped
from attnmesh.mesh.reduction_tree import Round, tree
from attnmesh.planner.candidate import Candidate, Cost
from attnmesh.planner.cluster import Cluster
from attnmesh.planner.workload import Workload

COLLECTIVE = ("gather", "allreduce")
"""Merges whose ranks cannot hear of a message that is not the one expected: they agree beforehand."""

MERGES = ("tree", "direct", *COLLECTIVE)


class Line(NamedTuple):
    """Ranks that merge: how many, how many of them share a host, how many such lines there are, and through a host."""

    ranks: int
    near: int
    lines: int = 1
    lines_a_host: int = 1


def decode_cost(way: Candidate, workload: Workload, cluster: Cluster) -> Cost:
    """What one layer's step costs; keys and values are those of all layers."""
    shape, tile, device = way.shape, way.tile, cluster.device
    line = Line(shape.queries * shape.keys, tile.queries * tile.keys, shape.heads, tile.heads)
    queries = workload.q_len or 1
    rows = queries * workload.batch * workload.q_heads / shape.heads
    spent = Cost(memory=workload.kept_bytes / shape.ranks)
    seen = _busiest(way, workload, queries, line.ranks)
    read = seen / workload.length * workload.kept_bytes / workload.layers / shape.heads / device.memory_rate
    products = 2 * rows * seen * (workload.head_dim + workload.values) / device.forward_rate
    spent.spend("kernel", device.call + max(read, products))
    if way.exchange in COLLECTIVE:
        agree_cost(way, cluster, spent)
    if line.ranks > 1:
        merge_cost(way.exchange, line, Payload(rows * workload.wide, workload.values), cluster, spent)
    if shape.heads > 1:
        _join_heads(way, rows * workload.values * workload.item, cluster, spent)
    return spent


def _busiest(way: Candidate, workload: Workload, queries: int, ranks: int) -> int:
    """Tokens that the last queries see of the rank that holds most of those: blocks are dealt in turn."""
    first, _ = workload.mask.bounds(torch.tensor([max(0, workload.length - queries)]))
    seen, block = workload.length - int(first), way.layout.block if isinstance(way.layout, Striped) else 1
    return min(seen, ceil(ceil(seen / block) / ranks) * block)


def _join_heads(way: Candidate, size: float, cluster: Cluster, spent: Cost) -> None:
    """Everyone's heads to everyone in line, after a word on whether all said the same."""
    heads, near = way.shape.heads, way.tile.heads
    link, ranks = (cluster.between if near < heads else cluster.inside), way.shape.ranks
    wires = max((heads - 1) * size / link.rate, (heads - near) * size * way.tile.ranks / link.host_rate)
    waits = link.merge_latency + link.latency + 2 * (heads - 2) * link.message
    spent.spend("heads", 2 * cluster.device.call + waits + wires)
    spent.send(ranks * (near - 1) * size, ranks * (heads - near) * size, 2 * ranks * (heads - near))


def agree_cost(way: Candidate, cluster: Cluster, spent: Cost) -> None:
    """What each rank says of its call to all, along one axis after the other."""
    size = 8.0 * AGREEMENT_VALUES
    for ranks, near in reversed(tuple(zip(way.shape, way.tile, strict=True))):
        if ranks > 1:
            line = Line(ranks, near, way.shape.ranks // ranks, way.tile.ranks // near)
            spent.spend("agree", _collective(line, size, 1, cluster, spent) + cluster.device.call)
            size *= ranks


CHECKSUM_BYTES = 8.0
"""Bytes that ride along in each message, and tell ranks that all do the same."""

SEGMENTS, NUMBER = 2, 4
"""Messages in which gloo sends each part that goes round a ring, unless they are of less than a number of 4 bytes."""


class Payload(NamedTuple):
    """A partial on its way: bytes of one number for each row, and how many columns of them."""

    row: float
    columns: int

    @property
    def size(self) -> float:
        """`out`, `lse` and the checksum."""
        return self.row * (self.columns + 1) + CHECKSUM_BYTES


def merge_cost(how: str, line: Line, payload: Payload, cluster: Cluster, spent: Cost) -> None:
    """One merge; to merge what has come is a few small operations, reckoned as a call of the device."""
    here = cluster.device.call
    if how == "tree":
        for turn in rounds_of(line.ranks, line.near):
            spent.spend("merge", _turn(turn, line, payload.size, cluster, spent) + here)
    elif how == "direct":
        spent.spend("merge", _direct(line, payload.size, cluster, spent) + here)
    elif how == "gather":
        spent.spend("merge", _collective(line, payload.size, 1, cluster, spent) + here)
    else:  # maximum, numerator and denominator, each there and back
        for part in (payload.row + CHECKSUM_BYTES, payload.row * payload.columns, payload.row):
            spent.spend("merge", _collective(line, part / line.ranks, 2, cluster, spent) + here)


def merge_seconds(how: str, line: Line, payload: Payload, cluster: Cluster) -> float:
    """Seconds of one merge."""
    spent = Cost()
    merge_cost(how, line, payload, cluster, spent)
    return spent.seconds


def _direct(line: Line, size: float, cluster: Cluster, spent: Cost) -> float:
    """Every rank to every other at once."""
    near, away, ranks = line.near - 1, line.ranks - line.near, line.lines * line.ranks
    link = cluster.between if away else cluster.inside
    spent.send(ranks * near * size, ranks * away * size, ranks * away)
    wires = max((away or near) * size / link.rate, away * line.near * line.lines_a_host * size / link.host_rate)
    return link.merge_latency + (line.ranks - 2) * link.message + wires


def _collective(line: Line, size: float, turns: int, cluster: Cluster, spent: Cost) -> float:
    """A collective of the backend: a part of so many bytes from rank to rank, so many times round.

    A word has to pass every link on its way, after the first of which each is a step; a backend that has trees takes
    them for what goes round twice.
    """
    hosts = line.ranks // line.near
    steps, crossing = turns * (line.ranks - 1), hosts if hosts > 1 else 0
    link, inside = (cluster.between if crossing else cluster.inside), cluster.inside.collective_step
    parts = line.lines * steps
    messages = min(SEGMENTS, size / NUMBER) * parts * crossing
    spent.send(parts * (line.ranks - crossing) * size, parts * crossing * size, messages)
    by_tree = turns > 1 and cluster.short_collectives == "tree"
    away = turns * (ceil(log2(hosts)) if by_tree else hosts - 1) * cluster.between.collective_step
    near = turns * (line.near - 1) * (1 if by_tree else hosts) * inside
    first = max(0.0, link.merge_latency - link.collective_step)
    return first + away + near + steps * size / link.rate


class Turn(NamedTuple):
    """One round of a tree: messages of the busiest rank, of all, out of the busiest host; and over which links."""

    most: int
    messages: int
    host: int
    between: bool


@lru_cache(maxsize=256)
def rounds_of(ranks: int, near: int) -> tuple[Turn, ...]:
    """The rounds of the tree that ranks of hosts alike climb, from the tree itself."""
    whole = tree([list(range(start, start + near)) for start in range(0, ranks, near)])
    return tuple(_turns(whole, near))


def _turns(whole: Mapping[int, list[Round]], near: int) -> Iterator[Turn]:
    for index in range(max(map(len, whole.values()))):
        sent = {rank: rounds[index].send for rank, rounds in whole.items() if index < len(rounds)}
        hosts: dict[int, int] = {}
        for rank, peers in sent.items():
            hosts[rank // near] = hosts.get(rank // near, 0) + sum(peer // near != rank // near for peer in peers)
        yield Turn(max(map(len, sent.values())), sum(map(len, sent.values())), max(hosts.values()), any(hosts.values()))


def _turn(turn: Turn, line: Line, size: float, cluster: Cluster, spent: Cost) -> float:
    link = cluster.between if turn.between else cluster.inside
    messages = line.lines * turn.messages
    spent.send(messages * size * (not turn.between), messages * size * turn.between, messages * turn.between)
    wires = max(turn.most * size / link.rate, turn.host * line.lines_a_host * size / link.host_rate)
    return link.merge_latency + (turn.most - 1) * link.message + wires
