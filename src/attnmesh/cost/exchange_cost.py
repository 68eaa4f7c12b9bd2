"""Predicted cost of one layer of attention on a mesh, and the exchange that takes least: behind `exchange="auto"`.

Seconds add up over *stages*, in the order of the executor. An exchange takes one latency, and then as long as its
busiest rank or host link needs to send or to receive. An exchange beside a kernel costs what the kernel does not hide.
"""

from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch

from attnmesh.core.layout import Contiguous, Layout, Packed, Striped, Zigzag
from attnmesh.core.mask import Mask
from attnmesh.cost.agreement_cost import add_agreement
from attnmesh.cost.candidate_mesh import CandidateMesh, Cost
from attnmesh.cost.cluster import Cluster
from attnmesh.cost.rates import Device, Link
from attnmesh.cost.traffic import SAMPLE_TOKENS, Flow, Load, Pairs, PlannedTraffic, planned_traffic
from attnmesh.mesh.schedule import EXCHANGE_MODES, ExchangeMode, Problem
from attnmesh.mesh.shapes import Shape

MEMORY_SHARE = 1 / 8
"""Share of a rank's memory up to which the fastest exchange is taken, and not the one that needs least memory.

The rest is for weights and activations. A higher one is faster, and runs out of memory sooner.
"""

COPIES, SUM_COPIES = 4.0, 3.0
"""Bytes read or written for each byte that a rank exchanges, and for each byte of a sum to which a ring step adds.

A byte that is exchanged is packed and unpacked, each by a read and a write. For a sum two are read and one is written.
"""

SHORT_RUN = 128
"""Tokens up to which runs are attended several at once."""

EXPANDED_BYTES = 1 << 28
"""Bytes of keys and values that a rank expands from latents at once. More are fewer launches, and take more memory."""


@dataclass(frozen=True)
class LayerWork:
    """Attention of one layer: heads, tokens and columns, of all ranks together."""

    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    _: KW_ONLY
    length: int
    itemsize: int
    """Bytes of an element of q, k and v."""
    mask: Mask
    batch: int = 1
    backward: bool = True
    """True if gradients follow: then keys and values travel, also those of latents."""
    latent: tuple[int, int] | None = None
    """Columns of a latent that are projected, and its rotated ones. Latents travel if no gradients follow."""
    selected: int | None = None
    """Keys that each query selects; None for all that it sees."""

    @property
    def sum_itemsize(self) -> int:
        """Bytes of an element of partials and gradients, which are summed in float32 or wider."""
        return max(4, self.itemsize)

    @property
    def travelling_heads(self) -> int:
        """Key heads that travel. Latents are one head, but with gradients they are expanded first."""
        return self.kv_heads if self.latent is None or self.backward else 1

    @property
    def travelling_width(self) -> int:
        """Columns of a key head that travels, those of its value included."""
        return self.head_dim + self.value_dim if self.latent is None or self.backward else sum(self.latent)


def fastest_candidate(candidates: Iterable[CandidateMesh], work: LayerWork, cluster: Cluster) -> CandidateMesh:
    """Return the fastest candidate within `MEMORY_SHARE`, or if none is the one that needs least memory."""
    memory = {candidate: layer_memory(candidate, work) for candidate in candidates}
    fitting = [candidate for candidate in memory if memory[candidate] <= MEMORY_SHARE * cluster.device.memory]
    fastest = min(fitting, key=lambda candidate: attention_seconds(candidate, work, cluster), default=None)
    return fastest or min(memory, key=lambda candidate: memory[candidate])


def balanced_layouts(mask: Mask, shape: Shape) -> list[Layout]:
    """Return balanced layouts for uneven masks and documents, and the contiguous one."""
    packed: list[Layout] = [Packed(mask.documents, shape)] if len(mask.documents) > 1 else []
    return [*packed, *([] if mask.is_symmetric else [Zigzag()]), Contiguous()]


def attention_seconds(candidate: CandidateMesh, work: LayerWork, cluster: Cluster) -> float:
    """Return the seconds of one layer on a candidate mesh."""
    return sum(attention_cost(candidate, work, cluster).parts.values())


def attention_cost(candidate: CandidateMesh, work: LayerWork, cluster: Cluster) -> Cost:
    """Return the cost of one layer, without its memory."""
    job = LayerJob.of(candidate, work, cluster)
    total = Cost()
    add_agreement(candidate, cluster, total)
    if work.latent is not None and not work.backward:
        total.add_stage("kernel", _expansion(candidate, work, cluster.device))
    for one_pass in _passes(work, cluster.device):
        _add_pass(job, one_pass, total)
    return total


def layer_memory(candidate: CandidateMesh, work: LayerWork, key_layers: int = 1, query_layers: int = 1) -> float:
    """Return the bytes per rank: keys of `key_layers` layers, queries of `query_layers`, and the peak of one exchange.

    The peak is that of the backward pass, which is an upper bound for the forward pass. Latents are expanded in parts.
    """
    tokens = work.batch * work.length / candidate.shape.ranks
    q, k = work.q_heads, work.travelling_heads
    width = work.head_dim + work.value_dim
    queries, keys = q * (width * work.itemsize + work.sum_itemsize), k * work.travelling_width * work.itemsize
    mode = EXCHANGE_MODES[candidate.exchange_or_merge]
    peak = peak_activations(candidate.shape, q, k, mode) * work.sum_itemsize * width / 2
    expanded = EXPANDED_BYTES if work.latent is not None and not work.backward else 0
    return tokens * (key_layers * keys + query_layers * queries + peak) + expanded


class TransferTime(NamedTuple):
    """Seconds of an exchange, and its parts that the cost model treats apart."""

    seconds: float
    on_cores: float
    """Latency, copies and transfers inside hosts: the work of a rank's own core, if it has no GPU."""
    latency: float
    """Independent of the number of bytes."""
    head_start: float
    """How much sooner than the busiest rank an average rank is done."""

    def of_group(self, groups: int) -> "TransferTime":
        """Return the time of one of `groups` groups of heads."""
        latency = self.latency
        seconds, on_cores = (latency + (x - latency) / groups for x in (self.seconds, self.on_cores))
        return TransferTime(seconds, on_cores, latency, self.head_start / groups)


class Transfer(NamedTuple):
    """An exchange of tokens of `size` bytes each, made `times` times."""

    flow: Flow
    size: float
    times: int = 1


class Pass(NamedTuple):
    """One pass of a layer: what it sends for each token, and what it computes for each pair."""

    head_bytes: tuple[float, float]
    """Bytes that change ranks along the heads axis, before and after attention."""
    query_bytes: float
    """Bytes of queries."""
    key_bytes: float
    """Bytes of keys and values."""
    key_gradient_bytes: float
    """Bytes of the gradients of keys and values, which return to the ranks of the keys."""
    result_bytes: float
    """Bytes of results, which return to the ranks of their queries."""
    rate: float
    """Operations a second."""
    products: int
    """Multiply-adds for each pair."""
    width: int
    """Columns of the result per query."""


@dataclass(frozen=True)
class LayerJob:
    """A layer of attention on a candidate mesh of a cluster, where ranks may share processor cores.

    With `alone` 1, as in all presets, computing and communicating overlap fully. Shared cores change two terms:

    - Kernel: cores that one rank leaves idle speed up the others. So the average rank's work counts, not the busiest's.
      Ranks that receive their tokens sooner also compute sooner.
    - Waiting: the core work of an exchange slows the kernel beside it, by all of it where two ranks share a core.

    On 156 plans measured on shared cores (`benchmarks/results/plan-*.json`), 99% of the predicted times are within 25%.
    Without these terms 77% are.
    """

    candidate: CandidateMesh
    work: LayerWork
    cluster: Cluster
    mode: ExchangeMode
    traffic: PlannedTraffic

    @staticmethod
    def of(candidate: CandidateMesh, work: LayerWork, cluster: Cluster) -> "LayerJob":
        """Return the job of a layer, with its tokens counted."""
        layout, length = candidate.layout, work.length
        problem = Problem(
            work.mask, candidate.shape, layout=layout, key_layout=layout, length=length, key_length=length
        )
        mode = EXCHANGE_MODES[candidate.exchange_or_merge]
        return LayerJob(candidate, work, cluster, mode=mode, traffic=planned_traffic(problem, candidate.tile))

    @cached_property
    def groups(self) -> int:
        """Groups of heads, which run one after the other."""
        return self.mode.head_groups(self.candidate.shape, self.work.travelling_heads)

    @property
    def copy_rate(self) -> float:
        """Bytes/s that copies read and write."""
        return self.cluster.device.copy_rate or self.cluster.device.memory_rate

    def head_share(self, ranks: int = 1) -> float:
        """Return the most heads that `ranks` ranks along the heads axis have, over all. Ranks may differ by a head."""
        heads = self.work.travelling_heads
        size, larger = divmod(heads, self.candidate.shape.heads)
        return (ranks * size + min(ranks, larger)) / heads

    @cached_property
    def all_to_all_flow(self) -> Flow:
        """All-to-all of the heads axis: every other rank receives its heads of a rank's tokens."""
        shape, tile = self.candidate.shape, self.candidate.tile
        tokens = self.work.length / shape.ranks
        lines, host_lines = shape.ranks / shape.heads, tile.ranks / tile.heads
        inside, between = (
            Load(peers * tokens * lines, peers * tokens, peers * tokens * host_lines, peers * lines)
            for peers in (tile.heads - 1, shape.heads - tile.heads)
        )
        return Flow(inside, between, shape.heads - 1)

    def kernel_seconds(self, pairs: Pairs, one_pass: Pass, head_start: float = 0.0) -> float:
        """Return the seconds of kernels and their launches. Each query reads the keys that it selects."""
        pair = 2 * one_pass.products * self.work.batch * self.work.q_heads / one_pass.rate
        if self.work.selected is not None:
            pair = max(pair, (one_pass.key_bytes + one_pass.key_gradient_bytes) / self.cluster.device.memory_rate)
        pairs = self._attended(pairs)
        shares = self.head_share(), 1 / self.candidate.shape.heads
        most, mean = (pair * n * share for n, share in zip(pairs, shares, strict=True))
        device = self.cluster.device
        further = self.run_count - 1
        launches = self.groups * (device.call + further * (device.call if device.run is None else device.run))
        return (
            max(mean - head_start, most / device.alone) + launches + min(1, further) * self.sum_seconds(one_pass.width)
        )

    @cached_property
    def run_count(self) -> int:
        """Runs of consecutive tokens in a shard. Each is a kernel, and its results are merged with others."""
        if isinstance(self.candidate.layout, Striped):
            ranks = self.candidate.shape.ranks
            return -(-self.work.length // max(self.candidate.layout.turns(ranks)[0].period, ranks * SHORT_RUN))
        return 2 if isinstance(self.candidate.layout, Zigzag) else 1

    def _attended(self, pairs: Pairs) -> Pairs:
        """Return the pairs that remain where queries select their keys: per query no more than it selects."""
        work = self.work
        if work.selected is None:
            return pairs
        some = pairs.times(attended_share(work, work.selected))
        most = work.length / self.candidate.shape.queries * work.selected
        return some._replace(most=min(some.most, most))

    def waiting_seconds(self, transfer: TransferTime, kernel: float) -> float:
        """Return the seconds that an exchange adds to the kernel beside it."""
        return max(min(1.0, self.cluster.device.alone - 1) * transfer.on_cores, transfer.seconds - kernel)

    def sum_seconds(self, width: int) -> float:
        """Return the seconds of adding results of `width` columns to a running sum."""
        shape, work = self.candidate.shape, self.work
        tokens = work.batch * work.length / shape.queries
        return SUM_COPIES * tokens * work.q_heads * self.head_share() * width * work.sum_itemsize / self.copy_rate

    def add_transfers(self, transfers: Iterable[Transfer], total: Cost) -> TransferTime:
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
                moved += sum([load.rank * size for load, _, size in loads]) * self.head_share()
        if moved:
            latency += self.cluster.device.call  # packing and unpacking
        core_work = latency + COPIES * moved / self.copy_rate
        head_start = max(busiest) - max(evenly)
        return TransferTime(core_work + max(busiest), core_work + busiest[0], latency, head_start)

    def _average(self, load: Load) -> Load:
        """Return the load of an average rank and an average host."""
        shape, tile = self.candidate.shape, self.candidate.tile
        lines = shape.queries * shape.keys
        mean = load.total / lines
        return Load(load.total, mean, mean * tile.queries * tile.keys, load.messages)

    def _transfer_time(self, link: Link, loads: Iterable[tuple[Load, int, float]]) -> float:
        """Return the seconds of the busiest rank, the busiest host or the busiest pair of ranks: the longest."""
        rank = host = pair = 0.0
        rank_share, host_share = self.head_share(), self.head_share(self.candidate.tile.heads)
        for load, peers, size in loads:
            rank += load.rank * size * rank_share
            host += load.host * size * host_share
            pair += load.rank * size * rank_share / max(1, peers)
        return max(rank / link.rate, host / link.host_rate, pair / (link.peer_rate or link.rate))


def _passes(work: LayerWork, device: Device) -> Iterator[Pass]:
    """Yield the forward pass, and the backward pass in training. Partials and gradients are wide."""
    q, k = work.batch * work.q_heads, work.batch * work.travelling_heads * work.travelling_width
    width = work.head_dim + work.value_dim
    keys, values = k * work.itemsize, q * work.value_dim * work.itemsize
    latent = None if work.selected is None or work.backward else work.latent  # whose queries are absorbed
    yield Pass(
        head_bytes=(q * work.head_dim * work.itemsize + keys, values + q * work.sum_itemsize),
        query_bytes=q * work.head_dim * work.itemsize,
        key_bytes=keys,
        key_gradient_bytes=0,
        result_bytes=q * (work.value_dim + 1) * work.sum_itemsize,
        rate=device.forward_rate,
        products=width if latent is None else sum(latent) + latent[0],
        width=work.value_dim,
    )
    if work.backward:
        yield Pass(
            head_bytes=(values + 2 * q * work.sum_itemsize, q * work.head_dim * work.itemsize + keys),
            query_bytes=q * (width * work.itemsize + 2 * work.sum_itemsize),
            key_bytes=keys,
            key_gradient_bytes=k * work.sum_itemsize,
            result_bytes=q * work.head_dim * work.sum_itemsize,
            rate=device.backward_rate,
            products=3 * work.head_dim + 2 * work.value_dim,
            width=work.head_dim,
        )


def _expansion(candidate: CandidateMesh, work: LayerWork, device: Device) -> float:
    """Return the seconds of projecting the gathered latents to keys and values, or queries that select latents."""
    latent_rank, rotated = work.latent or (0, 0)
    tokens = work.batch * work.length / (candidate.shape.keys if work.selected is None else candidate.shape.queries)
    return 2 * tokens * latent_rank * work.q_heads * (work.head_dim - rotated + work.value_dim) / device.forward_rate


@lru_cache(maxsize=256)
def attended_share(work: LayerWork, selected: int) -> float:
    """Return the keys that queries select over those that they see, counted on evenly spaced queries."""
    count = min(work.length, SAMPLE_TOKENS)
    first, last = work.mask.bounds(torch.arange(count, device="cpu") * work.length // count)
    seen = (last.clamp(max=work.length - 1) - first + 1).double()
    return float(seen.clamp(max=selected).sum() / seen.sum())


def _add_pass(job: LayerJob, one_pass: Pass, total: Cost) -> None:
    """Add a pass: swap tokens for heads, gather queries and keys, the kernel, and all the way back.

    The exchanges of other groups run beside each group's kernel. They add waiting here, and no traffic: each exchange
    is counted once, with its own stage.
    """
    moves, groups = job.traffic, job.groups
    queries, back = Transfer(moves.queries, one_pass.query_bytes), Transfer(moves.queries, one_pass.result_bytes)
    keys, keys_back = Transfer(moves.keys, one_pass.key_bytes), Transfer(moves.keys, one_pass.key_gradient_bytes)
    swaps = [Transfer(job.all_to_all_flow, size) for size in one_pass.head_bytes]
    total.add_stage("heads", sum(job.add_transfers([swap], total).of_group(groups).seconds for swap in swaps))
    if job.mode.ring and job.candidate.shape.queries > 1:
        _add_ring(job, one_pass, queries, total)
    else:
        gather = job.add_transfers([queries, keys], total).of_group(groups)
        total.add_stage("gather", gather.seconds)
        kernel = job.kernel_seconds(moves.pairs, one_pass, gather.head_start)
        total.add_stage("kernel", kernel)
        both_ways = Transfer(moves.both_ways, (one_pass.query_bytes + one_pass.result_bytes) / 2)
        overlapped = job.add_transfers([both_ways, keys, *swaps], Cost()).of_group(groups)
        total.add_stage("waiting", (groups - 1) * job.waiting_seconds(overlapped, kernel / groups))
        if one_pass.key_gradient_bytes:
            total.add_stage("give back", job.add_transfers([keys_back], total).seconds)
    total.add_stage("give back", job.add_transfers([back], total).of_group(groups).seconds)


def _add_ring(job: LayerJob, one_pass: Pass, queries: Transfer, total: Cost) -> None:
    """Add a gather of queries and the steps of a ring, with one exchange beside each step.

    Beside all steps of a group, other groups are swapped, and their queries and results travel.
    """
    steps = [job.kernel_seconds(pairs, one_pass) for pairs in job.traffic.steps]
    # All steps but the first add to a running sum.
    steps = [steps[0], *(step + job.sum_seconds(one_pass.width) for step in steps[1:])]
    further = len(steps) - 1
    groups = job.groups
    hops = [
        Transfer(job.traffic.hop, one_pass.key_bytes, further),
        Transfer(job.traffic.hop_back, one_pass.key_gradient_bytes, further),
    ]
    hops = hops if one_pass.key_gradient_bytes else hops[:1]
    share = (1 - 1 / groups) / further
    swaps, both_ways = sum(one_pass.head_bytes) * share, (one_pass.query_bytes + one_pass.result_bytes) / 2 * share
    sides = [Transfer(job.all_to_all_flow, swaps), Transfer(job.traffic.both_ways, both_ways)]

    def beside(transfers: list[Transfer]) -> TransferTime:
        return job.add_transfers([*transfers, *sides], Cost()).of_group(groups)

    job.add_transfers(hops, total)
    keys_hop = beside(hops[:1])
    overlapped = [keys_hop] * further
    last_hop = 0.0
    if one_pass.key_gradient_bytes:
        # Keys travel during each step but the last. The gradients of step 2 travel during step 3, and so on.
        gradients_hop = beside(hops[1:])
        overlapped = [keys_hop, keys_hop, *[beside(hops)] * (further - 2), gradients_hop]
        overlapped = overlapped[: further + (further > 1)]
        last_hop = gradients_hop.seconds
    waits = (job.waiting_seconds(hop, step / groups) for hop, step in zip(overlapped, steps, strict=False))
    total.add_stage("gather", job.add_transfers([queries], total).of_group(groups).seconds)
    total.add_stage("kernel", sum(steps))
    total.add_stage("waiting", groups * sum(waits))
    total.add_stage("give back", groups * last_hop)


def peak_activations(shape: Shape, q_heads: int, kv_heads: int, mode: ExchangeMode) -> float:
    """Return the peak of the backward pass beyond its inputs, under a full mask, with values as wide as keys.

    The unit is float32 elements per token of a rank's shard and per column of a head. Let f be the share of the heads
    that are exchanged at once, q and k the head counts, C the ranks along keys and R the ranks along queries.
    Each term is counted where its axis is longer than 1:

        gradients of the shard                q + 2k, and with 3 groups or more f times that of the group
        gathered q, dout, out                 f 3C q      out alone without a keys axis
        made by a kernel: dq, dk, dv          f (C q + 2R k)
        gathered keys and values              f 2R k      while the kernel runs, and C q of dout masked
        sent, received and kept of dk, dv     f (4R - 2) k    after the kernel
        sent, received and kept of dq         f (2C - 1) q    after that, while the next group's kernel runs
        the next group's gathers              f (2C q + 2R k)

    Of 2 groups the first has no return beside it, and the second no gathers. Buffers of the heads axis, and copies that
    put gathered tokens in order, are not counted.
    In a ring, R is 1 for the tensors that a kernel reads and writes. It also holds one chunk being sent, one being
    received, and the same of their gradients, while dq is summed over the steps.
    """
    _, query_ranks, key_ranks = shape
    q, k = q_heads, kv_heads  # a heads axis divides the heads and multiplies the tokens, so the product stays
    groups = mode.head_groups(shape, kv_heads)
    share = 1 / groups
    at_once = 1 if mode.ring else query_ranks
    gathered_q = share * key_ranks * q
    standing = (q + 2 * k) * (1 + share * (groups > 2)) + gathered_q * (3 if key_ranks > 1 else 1)
    gradients = gathered_q + share * 2 * at_once * k
    gathered_kv = share * 2 * at_once * k if query_ranks > 1 else 0
    back = share * (2 * key_ranks - 1) * q if key_ranks > 1 else 0
    arriving = 2 * key_ranks * q * (key_ranks > 1) + 2 * query_ranks * k * (query_ranks > 1)
    coming = share * arriving if groups > 1 else 0
    in_flight = 0.0
    if mode.ring and query_ranks > 1:
        in_flight = gathered_q + share * (8 * k if query_ranks > 2 else 2 * k)
    exchanged = {1: 0, 2: max(coming, back)}.get(groups, coming + back)
    kept_kv = share * (4 * query_ranks - 2) * k if query_ranks > 1 and not mode.ring else 0
    moments = (
        standing + gathered_q + gradients + gathered_kv + in_flight + exchanged,
        standing + gradients + coming + kept_kv,
        standing + gathered_q + coming + back,
    )
    return max(moments)
