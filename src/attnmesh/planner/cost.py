"""What a way of running attention costs: seconds, bytes over each class of links, and memory, before it is run.

Seconds are a sum of *stages*, in the order in which the executor goes through them. An exchange takes as long as its
busiest rank, or the busiest host's link, takes to send or to receive, and a message's latency; what is under way while
a kernel runs costs only what it takes longer than that.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from attnmesh.core.layout import Zigzag
from attnmesh.mesh.schedule import EXCHANGES, Exchange, Problem
from attnmesh.mesh.shapes import Shape
from attnmesh.planner.candidate import Candidate, Cost
from attnmesh.planner.cluster import Cluster
from attnmesh.planner.decode_cost import agree_cost, decode_cost
from attnmesh.planner.hardware import Link
from attnmesh.planner.memory import peak_activations
from attnmesh.planner.traffic import Flow, Load, Pairs, PlannedTraffic, traffic
from attnmesh.planner.workload import Workload

PASSES, JOINS = 4.0, 3.0
"""Bytes of memory that are read or written for each byte that a rank sends or hears (packed, sent, put in order), and
for each byte of a sum that grows from step to step."""


class Time(NamedTuple):
    """Seconds of an exchange; those of it that keep a rank's own core, if that does what no card does for it.

    `latency` is what it takes however little is sent, `early` how much sooner than the busiest an average rank has all:
    meanwhile it computes.
    """

    seconds: float
    own: float
    latency: float
    early: float

    def part(self, groups: int) -> "Time":
        """That of one of so many groups of heads."""
        latency = self.latency
        seconds, own = (latency + (x - latency) / groups for x in (self.seconds, self.own))
        return Time(seconds, own, latency, self.early / groups)


class Sent(NamedTuple):
    """An exchange of tokens of so many bytes each; `times` it happens."""

    flow: Flow
    size: float
    times: int = 1


def cost(way: Candidate, workload: Workload, cluster: Cluster) -> Cost:
    """What a workload costs so."""
    one = decode_cost(way, workload, cluster) if workload.phase == "decode" else _attention(way, workload, cluster)
    return one.times(workload.layers)


def _attention(way: Candidate, workload: Workload, cluster: Cluster) -> Cost:
    exchange = EXCHANGES[way.exchange]
    job = _Job(way, workload, cluster, exchange, _travel(way, workload))
    spent = Cost(memory=_memory(way, workload, exchange))
    agree_cost(way, cluster, spent)
    _forward(job, spent)
    if workload.phase == "training":
        _backward(job, spent)
    return spent


@dataclass(frozen=True)
class _Job:
    way: Candidate
    workload: Workload
    cluster: Cluster
    exchange: Exchange
    moves: PlannedTraffic

    @property
    def groups(self) -> int:
        """Groups of heads that go one after the other."""
        return self.exchange.head_groups(self.way.shape, self.workload.kv_heads)

    def kernel(self, rate: float, products: int, columns: int, early: float) -> float:
        """Seconds of one rank's kernels, and of starting them; `products` of a row and a column for each pair.

        Ranks that share cores take turns, and leave the later ones less when they begin `early`.
        """
        return self._attended(self.moves.pairs, rate, products, columns, early)

    def steps(self, rate: float, products: int, columns: int) -> list[float]:
        """The same of each step of a ring, and of adding what further steps make to the sum."""
        steps = [self._attended(pairs, rate, products, columns) for pairs in self.moves.steps]
        return [steps[0], *(step + self._join(columns) for step in steps[1:])]

    def _join(self, columns: int) -> float:
        """Seconds of adding what was made, so many columns a row, to what there is."""
        tokens = self.workload.batch * self.workload.length / self.way.shape.queries / self.way.shape.heads
        return JOINS * tokens * self.workload.q_heads * columns * self.workload.wide / self.copy_rate

    def _attended(self, pairs: Pairs, rate: float, products: int, columns: int, early: float = 0.0) -> float:
        work = self.workload
        heads = work.batch * work.q_heads / self.way.shape.heads
        blocks = 2 if isinstance(self.way.layout, Zigzag) else 1  # an early and a late run of queries
        most, mean = (2 * products * number * heads / rate for number in pairs)
        calls = self.groups * blocks * self.cluster.device.call + (blocks - 1) * self._join(columns)
        return max(mean - early, most / self.cluster.device.alone) + calls

    def beside(self, time: Time, kernel: float) -> float:
        """Seconds that an exchange takes longer than a kernel beside it; of shared cores it takes its part."""
        return max((1 - 1 / self.cluster.device.alone) * time.own, time.seconds - kernel)

    @property
    def copy_rate(self) -> float:
        """Bytes a second that are read and written."""
        return self.cluster.device.copy_rate or self.cluster.device.memory_rate

    def exchanged(self, sent: Iterable[Sent], spent: Cost) -> Time:
        """What exchanges take that are under way together, their bytes counted."""
        sent = list(sent)
        for flow, size, times in sent:
            messages = flow.between.messages * self.way.shape.heads * self.groups * times
            spent.send(flow.inside.total * size * times, flow.between.total * size * times, messages)
        peers = sum(flow.peers for flow, _, _ in sent)
        evenly = moved = latency = 0.0
        wires = {True: 0.0, False: 0.0}
        for link, inside in ((self.cluster.inside, True), (self.cluster.between, False)):
            loads = [(flow.inside if inside else flow.between, flow.peers, size) for flow, size, _ in sent]
            busiest = sum([load.rank * size for load, _, size in loads])
            if busiest:
                latency = max(latency, link.latency + (peers - 1) * link.message)
                wires[inside] = self._wire(link, loads)
                evenly = max(evenly, self._wire(link, [(self._even(load), peers, size) for load, peers, size in loads]))
                moved += busiest / self.way.shape.heads
        if moved:
            latency += self.cluster.device.call  # packing and unpacking
        wire, own = max(wires.values()), latency + PASSES * moved / self.copy_rate
        return Time(own + wire, own + wires[True], latency, wire - evenly)

    def _even(self, load: Load) -> Load:
        """What ranks and hosts move on average."""
        shape, tile = self.way.shape, self.way.tile
        lines = shape.queries * shape.keys
        return load._replace(rank=load.total / lines, host=load.total / lines * tile.queries * tile.keys)

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
        spent.spend("gather", job.exchanged([rows], spent).seconds)
        steps = job.steps(rate, width, work.values)
        _overlapped(job, steps, [hop] * (len(steps) - 1), spent)
    else:
        gather = job.exchanged([rows, keys], spent).part(groups)
        spent.spend("gather", gather.seconds)
        _in_groups(job, job.kernel(rate, width, work.values, gather.early), _both_ways(job, rows, back, keys), spent)
    spent.spend("give back", job.exchanged([back], spent).part(groups).seconds)


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
        spent.spend("gather", job.exchanged([rows], spent).seconds)
        # Keys come during each step but the last; gradients of the second go on during the third.
        under_way = [there, there, *[job.exchanged(hops, Cost())] * (further - 2), back_home]
        _overlapped(job, steps, under_way[: further + (further > 1)], spent)
        spent.spend("give back", back_home.seconds if further else 0.0)
    else:
        gather = job.exchanged([rows, keys], spent).part(groups)
        spent.spend("gather", gather.seconds)
        _in_groups(
            job, job.kernel(rate, products, work.head_dim, gather.early), _both_ways(job, rows, back, keys), spent
        )
        spent.spend("give back", job.exchanged([keys_back], spent).seconds)
    spent.spend("give back", job.exchanged([back], spent).part(groups).seconds)


def _in_groups(job: _Job, kernel: float, under_way: Time, spent: Cost) -> None:
    """While a group of heads is attended, the next one is under way, and what the last one made."""
    spent.spend("kernel", kernel)
    spent.spend("waiting", (job.groups - 1) * job.beside(under_way.part(job.groups), kernel / job.groups))


def _both_ways(job: _Job, rows: Sent, back: Sent, keys: Sent) -> Time:
    """What takes what comes and what goes back at the same time; bytes are counted elsewhere."""
    return job.exchanged([Sent(job.moves.both_ways, (rows.size + back.size) / 2), keys], Cost())


def _overlapped(job: _Job, steps: Sequence[float], under_way: Sequence[Time], spent: Cost) -> None:
    """Round a ring something is under way during each step."""
    spent.spend("kernel", sum(steps))
    spent.spend("waiting", sum(job.beside(hop, step) for hop, step in zip(under_way, steps, strict=False)))


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
    return job.exchanged([Sent(flow, numbers * workload.item)], spent).seconds


def _travel(way: Candidate, workload: Workload) -> PlannedTraffic:
    problem = Problem(workload.mask, way.shape, way.layout, way.layout, workload.length, workload.length)
    return traffic(problem, way.tile)


def min_memory(workload: Workload) -> float:
    """Bytes of all ranks together where they are many: of a ring, in which no rank holds more than a few shards."""
    if workload.phase == "decode":
        return workload.kept_bytes
    ring = Shape(1, 4, 1)
    return ring.ranks * _memory(Candidate(ring, Shape(1, 1, 1), Zigzag(), "ring"), workload, EXCHANGES["ring"])


def _memory(way: Candidate, workload: Workload, exchange: Exchange) -> float:
    """Bytes a rank: what all layers keep of its tokens, and what one exchange holds beside that, no less than forward.

    A prefill keeps the keys and values of all layers, training all that its backward pass needs.
    """
    tokens = workload.batch * workload.length / way.shape.ranks
    q, k, width = workload.q_heads, workload.kv_heads, workload.head_dim + workload.values
    queries, keys = q * (width * workload.item + workload.wide), k * width * workload.item
    kept = workload.layers * keys + queries * (workload.layers if workload.phase == "training" else 1)
    most = peak_activations(way.shape, q, k, exchange) * workload.wide * width / 2
    return tokens * (kept + most)
