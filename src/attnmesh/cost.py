"""What a way of running attention costs: seconds, bytes over each class of links, and memory, before it is run.

Seconds are a sum of *stages*, in the order in which the executor goes through them. An exchange takes as long as its
busiest rank, or the busiest host's link, takes to send or to receive, and a message's latency; what is under way while
a kernel runs costs only what it takes longer than that.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from attnmesh.cluster import Cluster
from attnmesh.cost_decode import agree_cost, decode_cost
from attnmesh.hardware import Link
from attnmesh.held import held
from attnmesh.layout import Zigzag
from attnmesh.schedule import EXCHANGES, Exchange, Problem
from attnmesh.travel import Flow, Load, Pairs, Travel, travel
from attnmesh.way import Cost, Way
from attnmesh.workload import Workload

PASSES, JOINS = 4.0, 3.0
"""Bytes of memory that are read or written for each byte that a rank sends or hears (packed, sent, put in order), and
for each byte of a sum that grows from step to step."""


class Sent(NamedTuple):
    """An exchange of tokens of so many bytes each; `times` it happens."""

    flow: Flow
    size: float
    times: int = 1


def cost(way: Way, workload: Workload, cluster: Cluster) -> Cost:
    """What a workload costs so."""
    one = decode_cost(way, workload, cluster) if workload.phase == "decode" else _attention(way, workload, cluster)
    return one.times(workload.layers)


def _attention(way: Way, workload: Workload, cluster: Cluster) -> Cost:
    exchange = EXCHANGES[way.exchange]
    job = _Job(way, workload, cluster, exchange, _travel(way, workload))
    spent = Cost(memory=_memory(way, workload, exchange))
    agree_cost(way, 4, cluster, spent)
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
        return self._attended(self.moves.pairs, rate, products)

    def steps(self, rate: float, products: int, columns: int) -> list[float]:
        """The same of each step of a ring, and of adding what further steps make, so many columns a row, to the sum."""
        tokens = self.workload.batch * self.workload.length / self.way.shape.queries / self.way.shape.heads
        join = JOINS * tokens * self.workload.q_heads * columns * self.workload.wide / self.copy_rate
        steps = [self._attended(pairs, rate, products) for pairs in self.moves.steps]
        return [steps[0], *(step + join for step in steps[1:])]

    def _attended(self, pairs: Pairs, rate: float, products: int) -> float:
        work = self.workload
        heads = work.batch * work.q_heads / self.way.shape.heads
        blocks = 2 if isinstance(self.way.layout, Zigzag) else 1  # an early and a late run of queries
        busiest = max(pairs.mean, pairs.most / self.cluster.device.alone)
        return 2 * products * busiest * heads / rate + self.groups * blocks * self.cluster.device.call

    @property
    def copy_rate(self) -> float:
        """Bytes a second that are read and written."""
        return self.cluster.device.copy_rate or self.cluster.device.memory_rate

    def exchanged(self, sent: Iterable[Sent], spent: Cost) -> float:
        """Seconds of exchanges that are under way together, their bytes counted."""
        sent = list(sent)
        for flow, size, times in sent:
            messages = flow.between.messages * self.way.shape.heads * self.groups * times
            spent.send(flow.inside.total * size * times, flow.between.total * size * times, messages)
        peers = sum(flow.peers for flow, _, _ in sent)
        latency = wire = moved = 0.0
        for link, inside in ((self.cluster.inside, True), (self.cluster.between, False)):
            loads = [(flow.inside if inside else flow.between, flow.peers, size) for flow, size, _ in sent]
            busiest = sum([load.rank * size for load, _, size in loads])
            if busiest:
                latency = max(latency, link.latency + (peers - 1) * link.message)
                wire = max(wire, self._wire(link, loads))
                moved += busiest / self.way.shape.heads
        return latency + wire + PASSES * moved / self.copy_rate

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
    rate = job.cluster.device.forward_rate
    spent.spend("heads", _swapped(job, q * work.head_dim + k * width, spent) + _swapped(job, q * work.values, spent))
    if job.exchange.ring:
        hop = job.exchanged([Sent(moves.hop, keys.size, job.way.shape.queries - 1)], spent)
        spent.spend("gather", job.exchanged([rows], spent))
        steps = job.steps(rate, width, work.values)
        _overlapped(spent, steps, [hop] * (len(steps) - 1))
    else:
        spent.spend("gather", job.exchanged([rows, keys], spent) / groups)
        _in_groups(spent, groups, job.kernel(rate, width), _both_ways(job, rows, back, keys))
    spent.spend("give back", job.exchanged([back], spent) / groups)


def _backward(job: _Job, spent: Cost) -> None:
    """Queries with their gradients along rows, keys along columns, the kernel, gradients of both back."""
    work, moves, groups = job.workload, job.moves, job.groups
    q, k = work.batch * work.q_heads, work.batch * work.kv_heads
    width = work.head_dim + work.values
    rows = Sent(moves.rows, q * (width * work.item + 2 * work.wide))
    keys, keys_back = Sent(moves.columns, k * width * work.item), Sent(moves.columns, k * width * work.wide)
    back = Sent(moves.rows, q * work.head_dim * work.wide)
    rate, products = job.cluster.device.backward_rate, 3 * work.head_dim + 2 * work.values
    spent.spend("heads", _swapped(job, q * work.values, spent) + _swapped(job, q * work.head_dim + k * width, spent))
    if job.exchange.ring:
        steps = job.steps(rate, products, work.head_dim)
        further = len(steps) - 1
        hops = Sent(moves.hop, keys.size, further), Sent(moves.hop_back, keys_back.size, further)
        there, back_home = (job.exchanged([hop], spent) for hop in hops)
        spent.spend("gather", job.exchanged([rows], spent))
        # Keys come during each step but the last; gradients of the second go on during the third.
        under_way = [there, there, *[job.exchanged(hops, Cost())] * (further - 2), back_home]
        _overlapped(spent, steps, under_way[: further + (further > 1)])
        spent.spend("give back", back_home if further else 0.0)
    else:
        spent.spend("gather", job.exchanged([rows, keys], spent) / groups)
        _in_groups(spent, groups, job.kernel(rate, products), _both_ways(job, rows, back, keys))
        spent.spend("give back", job.exchanged([keys_back], spent))
    spent.spend("give back", job.exchanged([back], spent) / groups)


def _in_groups(spent: Cost, groups: int, kernel: float, under_way: float) -> None:
    """While a group of heads is attended, the next one is under way, and what the last one made."""
    spent.spend("kernel", kernel)
    spent.spend("waiting", (groups - 1) * max(0.0, (under_way - kernel) / groups))


def _both_ways(job: _Job, rows: Sent, back: Sent, keys: Sent) -> float:
    """Seconds of what comes and what goes back at the same time; bytes are counted elsewhere."""
    return job.exchanged([Sent(job.moves.both_ways, (rows.size + back.size) / 2), keys], Cost())


def _overlapped(spent: Cost, steps: Sequence[float], under_way: Sequence[float]) -> None:
    """Round a ring something is under way during each step."""
    spent.spend("kernel", sum(steps))
    spent.spend("waiting", sum(max(0.0, hop - step) for hop, step in zip(under_way, steps, strict=False)))


def _swapped(job: _Job, numbers: float, spent: Cost) -> float:
    """Seconds of swapping tokens for heads, so many numbers of each."""
    shape, tile, workload = job.way.shape, job.way.tile, job.workload
    if shape.heads == 1:
        return 0.0
    tokens = workload.length / shape.ranks  # of each, every other rank in line gets its share of the heads
    lines = shape.ranks / shape.heads, tile.ranks / tile.heads

    def load(peers: int) -> Load:
        return Load(peers * tokens * lines[0], peers * tokens, peers * tokens * lines[1], peers * lines[0])

    flow = Flow(load(tile.heads - 1), load(shape.heads - tile.heads), shape.heads - 1)
    return job.exchanged([Sent(flow, numbers * workload.item)], spent)


def _travel(way: Way, workload: Workload) -> Travel:
    problem = Problem(workload.mask, way.shape, way.layout, way.layout, workload.length, workload.length)
    return _travelled(problem, way.tile)


_travelled = lru_cache(maxsize=4096)(travel)


def _memory(way: Way, workload: Workload, exchange: Exchange) -> float:
    """Bytes a rank: what all layers keep of its tokens, and what one exchange holds beside that, no less than forward.

    A prefill keeps the keys and values of all layers, training all that its backward pass needs.
    """
    tokens = workload.batch * workload.length / way.shape.ranks
    q, k, width = workload.q_heads, workload.kv_heads, workload.head_dim + workload.values
    queries, keys = q * (width * workload.item + workload.wide), k * width * workload.item
    kept = workload.layers * keys + queries * (workload.layers if workload.phase == "training" else 1)
    most = held(way.shape, q, k, exchange) * workload.wide * width / 2
    return tokens * (kept + most)
