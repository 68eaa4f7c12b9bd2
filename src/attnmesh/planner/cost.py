"""Predicted cost of attention before it runs: seconds, bytes over each class of links, and memory per rank.

Seconds add up over *stages*, in the order of the executor. An exchange takes one latency, and then as long as its
busiest rank or host link needs to send or to receive. An exchange beside a kernel costs what the kernel does not hide.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch

from attnmesh.core.layout import Zigzag
from attnmesh.core.mask import Full
from attnmesh.mesh.schedule import EXCHANGES, Exchange, Problem
from attnmesh.planner.candidate import Candidate, Cost, index_memory, rank_memory
from attnmesh.planner.cluster import Cluster
from attnmesh.planner.decode_cost import agree_cost, decode_cost, selection_cost
from attnmesh.planner.hardware import Device, Link
from attnmesh.planner.recurrent_cost import recurrent_cost
from attnmesh.planner.traffic import SAMPLE, Flow, Load, Pairs, PlannedTraffic, traffic
from attnmesh.planner.workload import Workload

COPIES, SUM_COPIES = 4.0, 3.0
"""Bytes read or written for each byte that a rank exchanges, and for each byte of a sum to which a ring step adds."""


def cost(candidate: Candidate, workload: Workload, cluster: Cluster) -> Cost:
    """Return the cost of all layers of a workload, run as the candidate says."""
    decodes, selecting = workload.phase == "decode", workload.selecting
    price = decode_cost if decodes else _attention_cost
    total = Cost(memory=workload.kept_bytes / candidate.shape.ranks if decodes else rank_memory(candidate, workload))
    if selecting:
        total.add(price(candidate, workload, cluster).of_layers(selecting))
        total.add(index_cost(candidate, workload, cluster))
        workload = replace(workload, selected=None)
    if workload.layers > selecting:
        total.add(price(candidate, workload, cluster).of_layers(workload.layers - selecting))
    if workload.recurrent:
        recurrent_cost(candidate, workload, cluster).add_to(total)
    return total


def index_cost(candidate: Candidate, workload: Workload, cluster: Cluster) -> Cost:
    """Return the cost of all indexers: scores, and candidates in decoding; else index keys, which go to all ranks."""
    selected = workload.selected
    if selected is None:
        return Cost()
    if workload.phase == "decode":
        total = selection_cost(candidate, workload, selected, cluster)
    else:
        job, total = _job(candidate._replace(exchange="bulk"), workload, cluster), Cost()
        pairs, width = workload.batch * job.traffic.pairs.most, selected.index_heads * selected.index_dim
        whole = _job(job.candidate, replace(workload, mask=Full()), cluster).traffic.columns
        keys = Transfer(whole, workload.batch * selected.index_dim * workload.item)
        total.add_stage("index keys", job.exchanged([keys], total).seconds)
        total.add_stage("score", cluster.device.call + 2 * pairs * width / cluster.device.forward_rate)
    total = total.of_layers(workload.indexers)
    total.memory = index_memory(candidate.shape, workload)
    return total


def _job(candidate: Candidate, workload: Workload, cluster: Cluster) -> "_Job":
    layout, length = candidate.layout, workload.length
    problem = Problem(workload.mask, candidate.shape, layout, layout, length, length)
    return _Job(candidate, workload, cluster, EXCHANGES[candidate.exchange], traffic(problem, candidate.tile))


def _attention_cost(candidate: Candidate, workload: Workload, cluster: Cluster) -> Cost:
    job, total = _job(candidate, workload, cluster), Cost()
    agree_cost(candidate, cluster, total)
    if workload.latent is not None and workload.phase == "prefill":
        total.add_stage("kernel", _expansion(candidate, workload, cluster.device))
    for one in _passes(workload, cluster.device):
        _add_pass(job, one, total)
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


class Transfer(NamedTuple):
    """An exchange of tokens of `size` bytes each, made `times` times."""

    flow: Flow
    size: float
    times: int = 1


class Pass(NamedTuple):
    """Bytes per token of each exchange, of the swaps before and after attention first, and multiply-adds per pair."""

    swaps: tuple[float, float]
    rows: float
    keys: float
    keys_back: float
    back: float
    rate: float
    products: int
    columns: int  # of the result per query


@dataclass(frozen=True)
class _Job:
    """A candidate on a cluster, where ranks may share processor cores.

    With `alone` 1, as in all presets, computing and communicating overlap fully. Shared cores change two terms:

    - Kernel: cores that one rank leaves idle speed up the others. So the average rank's work counts, not the busiest's.
      Ranks that receive their tokens sooner also compute sooner.
    - Waiting: the core work of an exchange slows the kernel beside it.

    On 156 plans measured on shared cores (`benchmarks/results/plan-*.json`), 99% of the predicted times are within 25%.
    Without these terms 77% are.
    """

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
    def copy_rate(self) -> float:
        """Bytes/s that copies read and write."""
        return self.cluster.device.copy_rate or self.cluster.device.memory_rate

    def share(self, ranks: int = 1) -> float:
        """Return the most heads that so many ranks along the heads axis have, of all. Shares may differ by one head."""
        heads = self.workload.travelling[0]
        size, more = divmod(heads, self.candidate.shape.heads)
        return (ranks * size + min(ranks, more)) / heads

    @property
    def swap(self) -> Flow:
        """All-to-all of the heads axis: every other rank receives its heads of a rank's tokens."""
        shape, tile = self.candidate.shape, self.candidate.tile
        tokens = self.workload.length / shape.ranks
        lines, host_lines = shape.ranks / shape.heads, tile.ranks / tile.heads
        inside, between = (
            Load(peers * tokens * lines, peers * tokens, peers * tokens * host_lines, peers * lines)
            for peers in (tile.heads - 1, shape.heads - tile.heads)
        )
        return Flow(inside, between, shape.heads - 1)

    def kernel(self, pairs: Pairs, one: Pass, head_start: float = 0.0) -> float:
        """Return the seconds of kernels and their launches. A zigzag shard has two runs of queries, so two kernels.

        Each query reads the keys that it selects.
        """
        pair = 2 * one.products * self.workload.batch * self.workload.q_heads / one.rate
        if self.workload.selected is not None:
            pair = max(pair, (one.keys + one.keys_back) / self.cluster.device.memory_rate)
        pairs = self._attended(pairs)
        blocks = 2 if isinstance(self.candidate.layout, Zigzag) else 1
        shares = self.share(), 1 / self.candidate.shape.heads
        most, mean = (pair * n * share for n, share in zip(pairs, shares, strict=True))
        launches = self.groups * blocks * self.cluster.device.call + (blocks - 1) * self.sum(one.columns)
        return max(mean - head_start, most / self.cluster.device.alone) + launches

    def _attended(self, pairs: Pairs) -> Pairs:
        """Return the pairs that remain where queries select their keys: per query no more than it selects."""
        work = self.workload
        if work.selected is None:
            return pairs
        some = pairs.times(attended_share(work, work.selected.tokens))
        most = work.length / self.candidate.shape.queries * work.selected.tokens
        return some._replace(most=min(some.most, most))

    def waiting(self, exchange: ExchangeTime, kernel: float) -> float:
        """Return the seconds that an exchange adds to the kernel beside it."""
        return max((1 - 1 / self.cluster.device.alone) * exchange.on_cores, exchange.seconds - kernel)

    def sum(self, columns: int) -> float:
        """Return the seconds of adding results of `columns` columns to a running sum."""
        shape, work = self.candidate.shape, self.workload
        tokens = work.batch * work.length / shape.queries
        return SUM_COPIES * tokens * work.q_heads * self.share() * columns * work.wide / self.copy_rate

    def exchanged(self, transfers: Iterable[Transfer], total: Cost) -> ExchangeTime:
        """Return the time of transfers that run together, and add their traffic to `total`."""
        transfers = list(transfers)
        for flow, size, times in transfers:
            messages = flow.between.messages * self.candidate.shape.heads * self.groups * times
            total.add_traffic(flow.inside.total * size * times, flow.between.total * size * times, messages)
        peers = sum(flow.peers for flow, _, _ in transfers)
        moved = latency = 0.0
        busiest, evenly = [], []
        for name in ("inside", "between"):
            link = getattr(self.cluster, name)
            loads = [(getattr(flow, name), flow.peers, size) for flow, size, _ in transfers]
            busiest.append(self._transfer_time(link, loads))
            evenly.append(
                self._transfer_time(link, [(self._average(load), peers, size) for load, peers, size in loads])
            )
            if busiest[-1]:
                latency = max(latency, link.latency + (peers - 1) * link.message)
                moved += sum([load.rank * size for load, _, size in loads]) * self.share()
        if moved:
            latency += self.cluster.device.call  # packing and unpacking
        core_work = latency + COPIES * moved / self.copy_rate
        head_start = max(busiest) - max(evenly)
        return ExchangeTime(core_work + max(busiest), core_work + busiest[0], latency, head_start)

    def _average(self, load: Load) -> Load:
        """Return the load of an average rank and an average host."""
        shape, tile = self.candidate.shape, self.candidate.tile
        lines = shape.queries * shape.keys
        return load._replace(rank=load.total / lines, host=load.total / lines * tile.queries * tile.keys)

    def _transfer_time(self, link: Link, loads: Iterable[tuple[Load, int, float]]) -> float:
        """Return the seconds of the busiest rank, the busiest host or the busiest pair of ranks: the longest."""
        rank = host = pair = 0.0
        for load, peers, size in loads:
            rank += load.rank * size * self.share()
            host += load.host * size * self.share(self.candidate.tile.heads)
            pair += load.rank * size * self.share() / max(1, peers)
        return max(rank / link.rate, host / link.host_rate, pair / (link.peer_rate or link.rate))


def _passes(work: Workload, device: Device) -> Iterator[Pass]:
    """Yield the forward pass, and the backward pass in training. Partials and gradients are wide."""
    q, k = work.batch * work.q_heads, work.batch * work.travelling[0] * work.travelling[1]
    width = work.head_dim + work.values
    keys, values = k * work.item, q * work.values * work.item
    absorbed = work.selected is not None and work.latent is not None and work.phase == "prefill"
    yield Pass(
        swaps=(q * work.head_dim * work.item + keys, values + q * work.wide),
        rows=q * work.head_dim * work.item,
        keys=keys,
        keys_back=0,
        back=q * (work.values + 1) * work.wide,
        rate=device.forward_rate,
        products=sum(work.decoded) if absorbed else width,
        columns=work.values,
    )
    if work.phase == "training":
        yield Pass(
            swaps=(values + 2 * q * work.wide, q * work.head_dim * work.item + keys),
            rows=q * (width * work.item + 2 * work.wide),
            keys=keys,
            keys_back=k * work.wide,
            back=q * work.head_dim * work.wide,
            rate=device.backward_rate,
            products=3 * work.head_dim + 2 * work.values,
            columns=work.head_dim,
        )


def _expansion(candidate: Candidate, work: Workload, device: Device) -> float:
    """Return the seconds of projecting the latents of a column to keys and values, or queries that select latents."""
    rank, rotated = work.latent or (0, 0)
    tokens = work.batch * work.length / (candidate.shape.keys if work.selected is None else candidate.shape.queries)
    return 2 * tokens * rank * work.q_heads * (work.head_dim - rotated + work.values) / device.forward_rate


@lru_cache(maxsize=256)
def attended_share(work: Workload, selected: int) -> float:
    """Return the keys that queries select over those that they see, counted on evenly spaced queries."""
    count = min(work.length, SAMPLE)
    first, last = work.mask.bounds(torch.arange(count) * work.length // count)
    seen = (last.clamp(max=work.length - 1) - first + 1).double()
    return float(seen.clamp(max=selected).sum() / seen.sum())


def _add_pass(job: _Job, one: Pass, total: Cost) -> None:
    """Add a pass: swap tokens for heads, queries along rows, keys along columns, the kernel, and all the way back.

    Beside each group's kernel run the exchanges of other groups, of which each is counted once elsewhere.
    """
    moves, groups = job.traffic, job.groups
    rows, back = Transfer(moves.rows, one.rows), Transfer(moves.rows, one.back)
    keys, keys_back = Transfer(moves.columns, one.keys), Transfer(moves.columns, one.keys_back)
    swaps = [Transfer(job.swap, size) for size in one.swaps]
    total.add_stage("heads", sum(job.exchanged([each], total).of_group(groups).seconds for each in swaps))
    if job.exchange.ring and job.candidate.shape.queries > 1:
        _add_ring(job, one, rows, total)
    else:
        gather = job.exchanged([rows, keys], total).of_group(groups)
        total.add_stage("gather", gather.seconds)
        kernel = job.kernel(moves.pairs, one, gather.head_start)
        total.add_stage("kernel", kernel)
        both_ways = Transfer(moves.both_ways, (one.rows + one.back) / 2)
        overlapped = job.exchanged([both_ways, keys, *swaps], Cost()).of_group(groups)
        total.add_stage("waiting", (groups - 1) * job.waiting(overlapped, kernel / groups))
        if one.keys_back:
            total.add_stage("give back", job.exchanged([keys_back], total).seconds)
    total.add_stage("give back", job.exchanged([back], total).of_group(groups).seconds)


def _add_ring(job: _Job, one: Pass, rows: Transfer, total: Cost) -> None:
    """Add a gather of queries and the steps of a ring, with one exchange beside each step.

    Beside all steps of a group, other groups are swapped, and their queries and results travel along rows.
    """
    steps = [job.kernel(pairs, one) for pairs in job.traffic.steps]
    steps = [steps[0], *(step + job.sum(one.columns) for step in steps[1:])]  # all but the first add to a running sum
    further, groups = len(steps) - 1, job.groups
    hops = [Transfer(job.traffic.hop, one.keys, further), Transfer(job.traffic.hop_back, one.keys_back, further)]
    hops = hops if one.keys_back else hops[:1]
    others = (1 - 1 / groups) / further
    swaps, rows_both = sum(one.swaps) * others, (one.rows + one.back) / 2 * others
    sides = [Transfer(job.swap, swaps), Transfer(job.traffic.both_ways, rows_both)]

    def beside(transfers: list[Transfer]) -> ExchangeTime:
        return job.exchanged([*transfers, *sides], Cost()).of_group(groups)

    job.exchanged(hops, total)
    keys_hop = beside(hops[:1])
    overlapped, last = [keys_hop] * further, 0.0
    if one.keys_back:
        # Keys travel during each step but the last. The gradients of step 2 travel during step 3, and so on.
        gradients_hop = beside(hops[1:])
        overlapped = [keys_hop, keys_hop, *[beside(hops)] * (further - 2), gradients_hop]
        overlapped, last = overlapped[: further + (further > 1)], gradients_hop.seconds
    waits = (job.waiting(hop, step / groups) for hop, step in zip(overlapped, steps, strict=False))
    total.add_stage("gather", job.exchanged([rows], total).of_group(groups).seconds)
    total.add_stage("kernel", sum(steps))
    total.add_stage("waiting", groups * sum(waits))
    total.add_stage("give back", groups * last)
