"""Predicted cost of attention before it runs: seconds, bytes over each class of links, and memory per rank.

Seconds add up over *stages*, in the order of the executor. An exchange takes one latency, and then as long as its
busiest rank or host link needs to send or to receive. An exchange beside a kernel costs what the kernel does not hide.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from attnmesh.core.layout import Zigzag
from attnmesh.mesh.schedule import EXCHANGES, Exchange, Problem
from attnmesh.planner.candidate import Candidate, Cost
from attnmesh.planner.cluster import Cluster
from attnmesh.planner.decode_cost import agree_cost, decode_cost
from attnmesh.planner.hardware import Link
from attnmesh.planner.memory import rank_memory
from attnmesh.planner.traffic import Flow, Load, Pairs, PlannedTraffic, traffic
from attnmesh.planner.workload import Workload

COPIES, SUM_COPIES = 4.0, 3.0
"""Bytes read or written for each byte that a rank exchanges, and for each byte of a sum to which a ring step adds."""


def cost(candidate: Candidate, workload: Workload, cluster: Cluster) -> Cost:
    """Return the cost of all layers of a workload, run as the candidate says."""
    price = decode_cost if workload.phase == "decode" else _attention_cost
    return price(candidate, workload, cluster).of_layers(workload.layers)


def _attention_cost(candidate: Candidate, workload: Workload, cluster: Cluster) -> Cost:
    layout, length = candidate.layout, workload.length
    problem = Problem(workload.mask, candidate.shape, layout, layout, length, length)
    job = _Job(candidate, workload, cluster, EXCHANGES[candidate.exchange], traffic(problem, candidate.tile))
    total = Cost(memory=rank_memory(candidate, workload))
    agree_cost(candidate, cluster, total)
    _forward(job, total)
    if workload.phase == "training":
        _backward(job, total)
    return total


class ExchangeTime(NamedTuple):
    """Seconds of an exchange, and its parts that the cost model treats apart."""

    seconds: float
    on_cores: float  # latency, copies and transfers inside hosts: the work of a rank's own core, if it has no GPU
    latency: float  # independent of the number of bytes
    head_start: float  # how much sooner than the busiest rank an average rank is done

    def of_group(self, groups: int) -> "ExchangeTime":
        """Return the time of one of `groups` groups of heads."""
        latency = self.latency
        seconds, on_cores = (latency + (x - latency) / groups for x in (self.seconds, self.on_cores))
        return ExchangeTime(seconds, on_cores, latency, self.head_start / groups)


class SharedCores(NamedTuple):
    """Model of ranks that share processor cores; without sharing it is max(compute, communication).

    A rank computes `alone` times as fast while the other ranks rest. In all presets `alone` is 1; `Cluster.measure`
    measures it. Sharing changes two terms:

    - Kernel: cores that one rank leaves idle speed up the others. So the average rank's work counts, not the busiest's.
      Ranks that receive their tokens sooner also compute sooner.
    - Waiting: the core work of an exchange slows the kernel beside it.

    The plain model is clearly worse where ranks share cores, on 156 measured plans of prefill and training
    (`benchmarks/results/plan-*.json`). It predicts 77% of the times within 25%; this model predicts 99%. Its pick takes
    more than 1.10 times as long as the best plan in 6 of 18 workloads; this model's pick never does.
    """

    alone: float

    def kernel(self, most: float, mean: float, head_start: float) -> float:
        """Return the seconds of a kernel: `most` of the busiest rank, `mean` on average, when all ranks compute."""
        return max(mean - head_start, most / self.alone)

    def waiting(self, exchange: ExchangeTime, kernel: float) -> float:
        """Return the seconds that an exchange adds to the kernel beside it."""
        return max((1 - 1 / self.alone) * exchange.on_cores, exchange.seconds - kernel)


class Transfer(NamedTuple):
    """An exchange of tokens of `size` bytes each, made `times` times."""

    flow: Flow
    size: float
    times: int = 1


@dataclass(frozen=True)
class _Job:
    candidate: Candidate
    workload: Workload
    cluster: Cluster
    exchange: Exchange
    traffic: PlannedTraffic

    @property
    def groups(self) -> int:
        """Groups of heads, which run one after the other."""
        return self.exchange.head_groups(self.candidate.shape, self.workload.travelling[0])

    @property
    def cores(self) -> SharedCores:
        """The model of kernels and of exchanges beside them."""
        return SharedCores(self.cluster.device.alone)

    @property
    def copy_rate(self) -> float:
        """Bytes/s that copies read and write."""
        return self.cluster.device.copy_rate or self.cluster.device.memory_rate

    def kernel(self, pairs: Pairs, rate: float, products: int, columns: int, head_start: float = 0.0) -> float:
        """Return the seconds of kernels and of their launches, for `products` multiply-adds per pair.

        `columns` are those of the result per query. A zigzag shard has two runs of queries, so two kernels.
        """
        heads = self.workload.batch * self.workload.q_heads / self.candidate.shape.heads
        blocks = 2 if isinstance(self.candidate.layout, Zigzag) else 1
        most, mean = (2 * products * number * heads / rate for number in pairs)
        launches = self.groups * blocks * self.cluster.device.call + (blocks - 1) * self._sum(columns)
        return self.cores.kernel(most, mean, head_start) + launches

    def expansion(self, latent: tuple[int, int], rate: float) -> float:
        """Return the seconds of projecting the latents of a column to keys and values."""
        work, (rank, rotated) = self.workload, latent
        tokens = work.batch * work.length / self.candidate.shape.keys
        return 2 * tokens * rank * work.q_heads * (work.head_dim - rotated + work.values) / rate

    def ring_kernels(self, rate: float, products: int, columns: int) -> list[float]:
        """Return the seconds of each ring step. All steps but the first add to a running sum."""
        steps = [self.kernel(pairs, rate, products, columns) for pairs in self.traffic.steps]
        return [steps[0], *(step + self._sum(columns) for step in steps[1:])]

    def _sum(self, columns: int) -> float:
        """Return the seconds of adding results of `columns` columns to a running sum."""
        shape, work = self.candidate.shape, self.workload
        tokens = work.batch * work.length / shape.queries / shape.heads
        return SUM_COPIES * tokens * work.q_heads * columns * work.wide / self.copy_rate

    def exchanged(self, transfers: Iterable[Transfer], total: Cost) -> ExchangeTime:
        """Return the time of transfers that run together, and add their traffic to `total`."""
        transfers = list(transfers)
        for flow, size, times in transfers:
            messages = flow.between.messages * self.candidate.shape.heads * self.groups * times
            total.add_traffic(flow.inside.total * size * times, flow.between.total * size * times, messages)
        peers = sum(flow.peers for flow, _, _ in transfers)
        evenly = moved = latency = inside_time = between_time = 0.0
        for link, inside in ((self.cluster.inside, True), (self.cluster.between, False)):
            loads = [(flow.inside if inside else flow.between, flow.peers, size) for flow, size, _ in transfers]
            busiest = sum([load.rank * size for load, _, size in loads])
            if not busiest:
                continue
            seconds = self._transfer_time(link, loads)
            inside_time, between_time = (seconds, between_time) if inside else (inside_time, seconds)
            latency = max(latency, link.latency + (peers - 1) * link.message)
            average = [(self._average(load), peers, size) for load, peers, size in loads]
            evenly = max(evenly, self._transfer_time(link, average))
            moved += busiest / self.candidate.shape.heads
        if moved:
            latency += self.cluster.device.call  # packing and unpacking
        longest, core_work = max(inside_time, between_time), latency + COPIES * moved / self.copy_rate
        return ExchangeTime(core_work + longest, core_work + inside_time, latency, longest - evenly)

    def _average(self, load: Load) -> Load:
        """Return the load of an average rank and an average host."""
        shape, tile = self.candidate.shape, self.candidate.tile
        lines = shape.queries * shape.keys
        return load._replace(rank=load.total / lines, host=load.total / lines * tile.queries * tile.keys)

    def _transfer_time(self, link: Link, loads: Iterable[tuple[Load, int, float]]) -> float:
        """Return the seconds of the busiest rank, the busiest host or the busiest pair of ranks: the longest."""
        shape, tile = self.candidate.shape, self.candidate.tile
        rank = host = pair = 0.0
        for load, peers, size in loads:
            rank += load.rank * size / shape.heads
            host += load.host * size / shape.heads * tile.heads
            pair += load.rank * size / shape.heads / max(1, peers)
        return max(rank / link.rate, host / link.host_rate, pair / (link.peer_rate or link.rate))


def _forward(job: _Job, total: Cost) -> None:
    """Add the forward pass: queries along rows, keys along columns, the kernel, partials back along rows."""
    work, moves, groups = job.workload, job.traffic, job.groups
    q, k = work.batch * work.q_heads, work.batch * work.travelling[0] * work.travelling[1]
    width = work.head_dim + work.values
    rows = Transfer(moves.rows, q * work.head_dim * work.item)
    keys = Transfer(moves.columns, k * work.item)
    back = Transfer(moves.rows, q * (work.values + 1) * work.wide)
    rate = job.cluster.device.forward_rate
    _add_head_swaps(job, (q * work.head_dim + k, q * work.values), total)
    if work.latent is not None and work.phase == "prefill":
        total.add_stage("kernel", job.expansion(work.latent, rate))
    if job.exchange.ring:
        hop = job.exchanged([Transfer(moves.hop, keys.size, job.candidate.shape.queries - 1)], total)
        total.add_stage("gather", job.exchanged([rows], total).seconds)
        steps = job.ring_kernels(rate, width, work.values)
        _add_ring(job, steps, [hop] * (len(steps) - 1), total)
    else:
        gather = job.exchanged([rows, keys], total).of_group(groups)
        total.add_stage("gather", gather.seconds)
        kernel = job.kernel(moves.pairs, rate, width, work.values, gather.head_start)
        _add_groups(job, kernel, _both_ways(job, rows, back, keys), total)
    total.add_stage("give back", job.exchanged([back], total).of_group(groups).seconds)


def _backward(job: _Job, total: Cost) -> None:
    """Add the backward pass: queries and their gradients along rows, keys along columns, the kernel, gradients back."""
    work, moves, groups = job.workload, job.traffic, job.groups
    q, k = work.batch * work.q_heads, work.batch * work.kv_heads
    width = work.head_dim + work.values
    rows = Transfer(moves.rows, q * (width * work.item + 2 * work.wide))
    keys, keys_back = Transfer(moves.columns, k * width * work.item), Transfer(moves.columns, k * width * work.wide)
    back = Transfer(moves.rows, q * work.head_dim * work.wide)
    rate, products = job.cluster.device.backward_rate, 3 * work.head_dim + 2 * work.values
    _add_head_swaps(job, (q * work.values, q * work.head_dim + k * width), total)
    if job.exchange.ring:
        steps = job.ring_kernels(rate, products, work.head_dim)
        further = len(steps) - 1
        hops = Transfer(moves.hop, keys.size, further), Transfer(moves.hop_back, keys_back.size, further)
        keys_hop, gradients_hop = (job.exchanged([hop], total) for hop in hops)
        total.add_stage("gather", job.exchanged([rows], total).seconds)
        # Keys travel during each step but the last. The gradients of step 2 travel during step 3, and so on.
        overlapped = [keys_hop, keys_hop, *[job.exchanged(hops, Cost())] * (further - 2), gradients_hop]
        _add_ring(job, steps, overlapped[: further + (further > 1)], total)
        total.add_stage("give back", gradients_hop.seconds if further else 0.0)
    else:
        gather = job.exchanged([rows, keys], total).of_group(groups)
        total.add_stage("gather", gather.seconds)
        kernel = job.kernel(moves.pairs, rate, products, work.head_dim, gather.head_start)
        _add_groups(job, kernel, _both_ways(job, rows, back, keys), total)
        total.add_stage("give back", job.exchanged([keys_back], total).seconds)
    total.add_stage("give back", job.exchanged([back], total).of_group(groups).seconds)


def _add_groups(job: _Job, kernel: float, overlapped: ExchangeTime, total: Cost) -> None:
    """Add groups of heads. Beside each group's kernel run the next group's gather and the last group's return."""
    total.add_stage("kernel", kernel)
    waiting = job.cores.waiting(overlapped.of_group(job.groups), kernel / job.groups)
    total.add_stage("waiting", (job.groups - 1) * waiting)


def _both_ways(job: _Job, rows: Transfer, back: Transfer, keys: Transfer) -> ExchangeTime:
    """Return the time of a gather and a return that run together. Other calls count their bytes."""
    rows_both_ways = Transfer(job.traffic.both_ways, (rows.size + back.size) / 2)
    return job.exchanged([rows_both_ways, keys], Cost())


def _add_ring(job: _Job, steps: Sequence[float], overlapped: Sequence[ExchangeTime], total: Cost) -> None:
    """Add the steps of a ring, and one exchange beside each step."""
    total.add_stage("kernel", sum(steps))
    total.add_stage("waiting", sum(job.cores.waiting(hop, step) for hop, step in zip(overlapped, steps, strict=False)))


def _add_head_swaps(job: _Job, widths: Sequence[float], total: Cost) -> None:
    """Add the all-to-alls of the heads axis that swap tokens for heads: elements per token, before and after."""
    shape, tile, workload = job.candidate.shape, job.candidate.tile, job.workload
    if shape.heads == 1:
        total.add_stage("heads", 0.0)
        return
    tokens = workload.length / shape.ranks  # every other rank of the heads axis receives its heads of these
    lines = shape.ranks / shape.heads, tile.ranks / tile.heads

    def load(peers: int) -> Load:
        return Load(peers * tokens * lines[0], peers * tokens, peers * tokens * lines[1], peers * lines[0])

    flow = Flow(load(tile.heads - 1), load(shape.heads - tile.heads), shape.heads - 1)
    total.add_stage("heads", sum(job.exchanged([Transfer(flow, x * workload.item)], total).seconds for x in widths))
