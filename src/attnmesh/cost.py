"""What a way of running attention costs: seconds, bytes over each class of links, and memory, before it is run.

Seconds are a sum of *stages*, in the order in which the executor goes through them. An exchange takes as long as its
busiest rank, or the busiest host's link, takes to send or to receive, and a message's latency; what is under way while
a kernel runs costs only what it takes longer than that.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil, log2
from typing import NamedTuple

from attnmesh.cluster import Cluster, Link
from attnmesh.layout import Layout
from attnmesh.mesh import Shape
from attnmesh.schedule import EXCHANGES, Exchange, Problem
from attnmesh.travel import Flow, Load, Travel, travel
from attnmesh.tree import Round, tree
from attnmesh.workload import Workload

PASSES = 4.0
"""Bytes of memory that are read or written for each byte that a rank sends or hears: packed, sent, put in order."""

MERGES = ("tree", "direct", "gather", "allreduce")


class Way(NamedTuple):
    """How to run attention: the mesh, what of it a host holds, how tokens lie and how they travel.

    `exchange` is "bulk", "pipelined" or "ring", and in decoding "tree", "direct", "gather" or "allreduce".
    """

    shape: Shape
    tile: Shape
    layout: Layout
    exchange: str


class Bytes(NamedTuple):
    """Bytes of all ranks over each class of links, in all layers."""

    inside: float = 0.0
    between: float = 0.0


@dataclass
class Cost:
    """What a way costs; `parts` are the seconds of each stage by name."""

    seconds: float = 0.0
    inside: float = 0.0
    between: float = 0.0
    memory: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)

    def spend(self, name: str, seconds: float) -> None:
        """Seconds of one more stage."""
        self.seconds += seconds
        self.parts[name] = self.parts.get(name, 0.0) + seconds


class Sent(NamedTuple):
    """An exchange of tokens of so many bytes each; `times` it happens."""

    flow: Flow
    size: float
    times: int = 1


def cost(way: Way, workload: Workload, cluster: Cluster) -> Cost:
    """What a workload costs so."""
    spent = _decode(way, workload, cluster) if workload.phase == "decode" else _attention(way, workload, cluster)
    for name in spent.parts:
        spent.parts[name] *= workload.layers
    spent.seconds, spent.inside, spent.between = (
        workload.layers * x for x in (spent.seconds, spent.inside, spent.between)
    )
    return spent


# --- prefill and training ---


def _attention(way: Way, workload: Workload, cluster: Cluster) -> Cost:
    exchange = EXCHANGES[way.exchange]
    job = _Job(way, workload, cluster, exchange, _travel(way, workload))
    spent = Cost(memory=_memory(way, workload, exchange))
    spent.spend("agree", sum(_collective(n, 1, way, cluster) for n in way.shape if n > 1))
    _forward(job, spent)
    if workload.phase == "training":
        _backward(job, spent)
    return spent


@dataclass(frozen=True)
class _Job:
    way: Way
    workload: Workload
    cluster: Cluster
    exchange: Exchange
    moves: Travel

    @property
    def groups(self) -> int:
        """Groups of heads that go one after the other."""
        return self.exchange.head_groups(self.way.shape, self.workload.kv_heads)

    def kernel(self, rate: float, products: int) -> float:
        """Seconds of one rank's kernels, and of starting them; `products` of a row and a column for each pair."""
        work = self.workload
        heads = work.batch * work.q_heads / self.way.shape.heads
        calls = self.groups * (self.way.shape.queries if self.exchange.ring else 1)
        return 2 * products * self.moves.pairs * heads / rate + calls * self.cluster.device.call

    def exchanged(self, sent: Iterable[Sent], spent: Cost) -> float:
        """Seconds of exchanges that are under way together, their bytes counted."""
        sent = list(sent)
        for flow, size, times in sent:
            spent.inside += flow.inside.total * size * times
            spent.between += flow.between.total * size * times
        messages = sum(flow.peers for flow, _, _ in sent)
        classes = [
            (self.cluster.inside, [(flow.inside, flow.peers, size) for flow, size, _ in sent]),
            (self.cluster.between, [(flow.between, flow.peers, size) for flow, size, _ in sent]),
        ]
        used = [each for each in classes if any(load.rank for load, _, _ in each[1])]
        latency = max((link.latency + (messages - 1) * link.message for link, _ in used), default=0.0)
        moved = sum(load.rank * size for _, loads in used for load, _, size in loads) / self.way.shape.heads
        copies = PASSES * moved / (self.cluster.device.copy_rate or self.cluster.device.memory_rate)
        return latency + max((self._wire(*each) for each in used), default=0.0) + copies

    def _wire(self, link: Link, loads: Iterable[tuple[Load, int, float]]) -> float:
        """Seconds until the busiest rank, the busiest host, and the slowest pair have had all."""
        rank = host = pair = 0.0
        for load, peers, size in loads:
            rank += load.rank * size / self.way.shape.heads
            host += load.host * size / self.way.shape.heads * self.way.tile.heads
            pair += load.rank * size / self.way.shape.heads / max(1, peers)
        return max(rank / link.rate, host / link.host_rate, pair / (link.peer_rate or link.rate))


def _forward(job: _Job, spent: Cost) -> None:
    """Queries along rows, keys along columns, the kernel, partials back along rows."""
    work, moves, groups = job.workload, job.moves, job.groups
    q, k = work.batch * work.q_heads, work.batch * work.kv_heads
    width = work.head_dim + work.values
    rows = Sent(moves.rows, q * work.head_dim * work.item)
    keys = Sent(moves.columns, k * width * work.item)
    back = Sent(moves.rows, q * (work.values + 1) * work.wide)
    kernel = job.kernel(job.cluster.device.forward_rate, width)
    sizes = [k * work.head_dim, k * work.values, q * work.head_dim, q * work.values]
    spent.spend("heads", _swaps(job, [x * work.item for x in sizes], spent))
    if job.exchange.ring:
        hop = job.exchanged([Sent(moves.hop, keys.size, job.way.shape.queries - 1)], spent)
        spent.spend("gather", job.exchanged([rows], spent))
        _overlapped(spent, kernel / job.way.shape.queries, hop, job.way.shape.queries)
    else:
        gather = job.exchanged([rows, keys], spent)
        _in_groups(spent, groups, gather, kernel, _only(job, [back]))
    spent.spend("give back", job.exchanged([back], spent) / groups)


def _backward(job: _Job, spent: Cost) -> None:
    """Queries with their gradients along rows, keys along columns, the kernel, gradients of both back."""
    work, moves, groups = job.workload, job.moves, job.groups
    q, k = work.batch * work.q_heads, work.batch * work.kv_heads
    width = work.head_dim + work.values
    rows = Sent(moves.rows, q * (width * work.item + 2 * work.wide))
    keys, keys_back = Sent(moves.columns, k * width * work.item), Sent(moves.columns, k * width * work.wide)
    back = Sent(moves.rows, q * work.head_dim * work.wide)
    kernel = job.kernel(job.cluster.device.backward_rate, 3 * work.head_dim + 2 * work.values)
    sizes = [q * work.values, q * work.head_dim, k * work.head_dim, k * work.values]
    spent.spend("heads", _swaps(job, [x * work.item for x in sizes], spent))
    if job.exchange.ring:
        steps = job.way.shape.queries
        both = [Sent(moves.hop, keys.size, steps - 1), Sent(moves.hop_back, keys_back.size, steps - 1)]
        hop = job.exchanged(both, spent)
        spent.spend("gather", job.exchanged([rows], spent))
        _overlapped(spent, kernel / steps, hop, steps)
    else:
        gather = job.exchanged([rows, keys], spent)
        _in_groups(spent, groups, gather, kernel, _only(job, [back]))
        spent.spend("give back", job.exchanged([keys_back], spent))
    spent.spend("give back", job.exchanged([back], spent) / groups)


def _in_groups(spent: Cost, groups: int, gather: float, kernel: float, back: float) -> None:
    """While a group of heads is attended, the next one is under way, and what the last one made."""
    spent.spend("gather", gather / groups)
    spent.spend("kernel", kernel)
    spent.spend("waiting", (groups - 1) * max(0.0, (gather + back - kernel) / groups))


def _overlapped(spent: Cost, kernel: float, hop: float, steps: int) -> None:
    """Round a ring a chunk is under way while the last is attended."""
    spent.spend("kernel", steps * kernel)
    spent.spend("waiting", (steps - 1) * max(0.0, hop - kernel))


def _only(job: _Job, sent: Iterable[Sent]) -> float:
    """Seconds of exchanges whose bytes are counted elsewhere."""
    return job.exchanged(sent, Cost())


def _swaps(job: _Job, sizes: Iterable[float], spent: Cost) -> float:
    """Tokens for heads, one tensor after the other."""
    shape, tile, workload = job.way.shape, job.way.tile, job.workload
    if shape.heads == 1:
        return 0.0
    tokens = workload.length / shape.ranks  # of each, every other rank in line gets its share of the heads
    lines = shape.ranks / shape.heads, tile.ranks / tile.heads

    def load(peers: int) -> Load:
        return Load(peers * tokens * lines[0], peers * tokens, peers * tokens * lines[1])

    flow = Flow(load(tile.heads - 1), load(shape.heads - tile.heads), shape.heads - 1)
    return sum(job.exchanged([Sent(flow, size)], spent) for size in sizes)


def _travel(way: Way, workload: Workload) -> Travel:
    problem = Problem(workload.mask, way.shape, way.layout, way.layout, workload.length, workload.length)
    return _travelled(problem, way.tile)


_travelled = lru_cache(maxsize=4096)(travel)


def _collective(ranks: int, size: float, way: Way, cluster: Cluster) -> float:
    """Seconds of gathering short messages from so many ranks in line."""
    link = cluster.between if cluster.hosts > 1 else cluster.inside
    steps = ranks - 1 if cluster.short_collectives == "ring" else ceil(log2(ranks))
    return steps * (link.latency + size / link.rate)


def _memory(way: Way, workload: Workload, exchange: Exchange) -> float:
    """Bytes a rank: what all layers keep of its tokens, and what one exchange holds beside that."""
    tokens = workload.batch * workload.length / way.shape.ranks
    q, k, width = workload.q_heads, workload.kv_heads, workload.head_dim + workload.values
    kept = workload.layers * (q * (width * workload.item + workload.wide) + k * width * workload.item)
    most = held(way.shape, q, k, exchange) * workload.wide * width / 2
    return tokens * (kept + most)


def held(shape: Shape, q_heads: int, kv_heads: int, exchange: Exchange) -> float:
    """The most that the backward pass holds beyond its inputs, under a full mask with values as wide as keys.

    In elements of float32 for each token of a rank's shard and each column of a head. With f the share of the heads
    that go at once, q and k the heads here, C ranks along keys and R along queries (each term where its axis is > 1):

        gradients of the shard                q + 2k
        rows: q, dout, out                    f 3C q      out alone without a keys axis
        made by a kernel: dq, dk, dv          f (C q + 2R k)
        gathered keys and values              f 2R k      while the kernel runs, and C q of dout masked
        sent, coming and kept of dk and dv    f (4R - 2) k    after the kernel
        sent, coming and kept of dq           f (2C - 1) q    after that, while the next group's kernel runs
        the next group's gathers              f (2C q + 2R k)

    Not counted: what a heads axis swaps, and gathered tokens that are not in order and have to be put so.
    Round a ring R is 1 in what a kernel holds and makes, beside one chunk sent, one coming, and the same of its
    gradients, with dq growing from step to step.
    """
    _, rows, columns = shape
    q, k = q_heads, kv_heads  # a heads axis gives each rank fewer heads of as many more tokens
    groups = exchange.head_groups(shape, kv_heads)
    share = 1 / groups
    at_once = 1 if exchange.ring else rows
    own, row = q + 2 * k, share * columns * q
    standing = own + row * (3 if columns > 1 else 1)
    made, gathered = row + share * 2 * at_once * k, share * 2 * at_once * k if rows > 1 else 0
    back = share * (2 * columns - 1) * q if columns > 1 else 0
    coming = share * (2 * columns * q * (columns > 1) + 2 * rows * k * (rows > 1)) if groups > 1 else 0
    under_way = 0.0
    if exchange.ring and rows > 1:
        under_way = row + (8 * k if rows > 2 else 2 * k)
    moments = (
        standing + row + made + gathered + under_way + coming + (back if groups > 1 else 0),
        standing + made + coming + (share * (4 * rows - 2) * k if rows > 1 and not exchange.ring else 0),
        standing + row + coming + back,
    )
    return max(moments)


# --- decoding ---


def _decode(way: Way, workload: Workload, cluster: Cluster) -> Cost:
    """The local attention of each rank over the keys that it keeps, and one merge."""
    shape, tile, device = way.shape, way.tile, cluster.device
    line, near = shape.queries * shape.keys, tile.queries * tile.keys
    rows = (workload.q_len or 1) * workload.batch * workload.q_heads / shape.heads
    kept = workload.kept_bytes / workload.layers / shape.ranks
    spent = Cost(memory=workload.kept_bytes / shape.ranks)
    seen = min(1.0, (min(workload.mask.left, workload.length) + (workload.q_len or 1)) / workload.length)
    products = 2 * rows * workload.length / line * (workload.head_dim + workload.values) / device.forward_rate
    spent.spend("kernel", device.call + seen * max(kept / device.memory_rate, products))
    size = rows * (workload.values + 1) * workload.wide + 2 * workload.wide
    spent.spend("merge", _merge(way.exchange, line, near, shape.ranks // line, tile, size, cluster, spent))
    if shape.heads > 1:
        link = cluster.between if tile.heads < shape.heads else cluster.inside
        whole = rows * workload.values * workload.item
        spent.spend("heads", link.merge_latency + (shape.heads - 1) * (link.message + whole / link.rate))
        for near_peers, name in ((tile.heads - 1, "inside"), (shape.heads - tile.heads, "between")):
            setattr(spent, name, getattr(spent, name) + shape.ranks * near_peers * whole)
    return spent


def _merge(
    how: str, ranks: int, near: int, lines: int, tile: Shape, size: float, cluster: Cluster, spent: Cost
) -> float:
    """Seconds of one merge of `ranks` in line, `near` of them on each host; as many lines merge as heads are split."""
    if ranks == 1:
        return 0.0
    here = cluster.device.call  # each merge of what has come is a few small operations
    if how == "tree":
        return sum(_round(one, tile.heads, size, lines, cluster, spent) + here for one in rounds_of(ranks, near))
    far = ranks > near
    link = cluster.between if far else cluster.inside
    latency = link.merge_latency
    per_rank = {"direct": ranks - 1, "gather": ranks - 1, "allreduce": 2 * (ranks - 1) / ranks}[how]
    away = (ranks - near) / (ranks - 1) * per_rank if how == "direct" else per_rank / near if far else 0.0
    spent.inside += lines * ranks * (per_rank - away) * size
    spent.between += lines * ranks * away * size
    wires = max(away * size / link.rate, away * size * near * tile.heads / link.host_rate)
    if how == "direct":
        return latency + (ranks - 2) * link.message + wires + here
    steps = ranks - 1 if cluster.short_collectives == "ring" else ceil(log2(ranks))
    if how == "gather":
        return steps * latency + wires + here
    return 6 * steps * latency + wires + 3 * here  # maximum, numerator, denominator: there and back


def merge_seconds(how: str, ranks: int, near: int, size: float, cluster: Cluster) -> float:
    """Seconds of one merge of messages of so many bytes by ranks in line, so many of them on each host."""
    return _merge(how, ranks, near, 1, Shape(1, near, 1), size, cluster, Cost())


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
    for index in range(max(map(len, whole.values()), default=0)):
        sent = {rank: rounds[index].send for rank, rounds in whole.items() if index < len(rounds)}
        hosts: dict[int, int] = {}
        for rank, peers in sent.items():
            hosts[rank // near] = hosts.get(rank // near, 0) + sum(peer // near != rank // near for peer in peers)
        between = any(hosts.values())
        yield Turn(max(map(len, sent.values())), sum(map(len, sent.values())), max(hosts.values()), between)


def _round(turn: Turn, heads: int, size: float, lines: int, cluster: Cluster, spent: Cost) -> float:
    link: Link = cluster.between if turn.between else cluster.inside
    spent.between += lines * turn.messages * size * turn.between
    spent.inside += lines * turn.messages * size * (not turn.between)
    wires = max(turn.most * size / link.rate, turn.host * heads * size / link.host_rate)
    return link.merge_latency + (turn.most - 1) * link.message + wires
