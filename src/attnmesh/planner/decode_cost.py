"""Predicted cost of a decode step: attention of each rank, one merge, and an all-gather of split heads.

Beside attention, of all layers: their weights, which each rank reads whole or in part, and the outputs that ranks with
a part of them exchange.
"""

from math import ceil
from typing import NamedTuple

import torch

from attnmesh.comm.merges import MERGES, Pattern
from attnmesh.cost.agreement_cost import add_agreement
from attnmesh.cost.candidate_mesh import CandidateMesh, Cost
from attnmesh.cost.cluster import Cluster
from attnmesh.cost.merge_cost import MergeGroup, MessageSize, add_tree, tree_rounds
from attnmesh.planner.rank_bytes import turns_of
from attnmesh.planner.selected import Selected
from attnmesh.planner.workload import Workload

CANDIDATE_BYTES = 8
"""Bytes of a candidate: its score and its index."""

OUTPUT_BYTES = 4
"""Bytes of an output that ranks exchange, in float32."""

SMALL_CALLS = 29
"""Operations of a layer of Llama beside linear layers and attention: norms, rotations, an activation, sums."""

MERGE_CALLS = 16
"""Operations that write, read and merge messages of hosts on CPUs. Inside a host one native call does."""

FLOPS = 2
"""Operations of a weight and a token."""


class SharedLayers(NamedTuple):
    """The linear layers of a model that the ranks of a host can compute together, in steps of few tokens."""

    weight_bytes: int
    """Bytes of the weights of these layers."""
    outputs: tuple[int, ...]
    """Outputs of each call. Layers of one input are one call."""
    most_tokens: int
    """Most tokens of a step."""
    most_ranks: int
    """Most ranks of a host."""
    board_bytes: int
    """Most bytes of outputs that a rank writes between two exchanges."""

    def exchanges(self, ranks: int, tokens: int) -> int:
        """Return the exchanges of a step. Outputs that do not fit the boards go piece by piece.

        >>> SharedLayers(0, (100, 4000), 32, 15, 4096).exchanges(2, 1)
        3
        """
        piece = ranks * (self.board_bytes // OUTPUT_BYTES // tokens)
        return sum(ceil(outputs / piece) for outputs in self.outputs)


class Experts(NamedTuple):
    """The experts of a model, of which a token reads those that it chooses."""

    weight_bytes: int
    """Bytes of all experts."""
    per_layer: int
    """Experts of a layer."""
    per_token: int
    """Experts of a layer that a token chooses."""
    shareable_layers: int = 0
    """Layers whose experts the ranks of a host can compute together."""

    @property
    def token_bytes(self) -> float:
        """Bytes of the experts that one token chooses."""
        return self.weight_bytes * self.per_token / self.per_layer

    def read_bytes(self, tokens: int, ranks: int = 1) -> float:
        """Return the bytes that the busiest of `ranks` ranks reads, as expected of tokens that choose at random.

        >>> Experts(800, 8, 2).read_bytes(1), Experts(800, 8, 2).read_bytes(2), Experts(800, 8, 2).read_bytes(2, 2)
        (200.0, 350.0, 200.0)
        """
        distinct = round(self.per_layer * (1 - (1 - self.per_token / self.per_layer) ** tokens), 9)
        return self.weight_bytes / self.per_layer * (distinct if ranks == 1 else ceil(distinct / ranks))


def add_weights(
    read_bytes: float, used_bytes: float, tokens: int, itemsize: int, cluster: Cluster, total: Cost
) -> None:
    """Add the time of weights: `read_bytes` are read once, and `used_bytes` are multiplied with each token."""
    product_seconds = FLOPS * tokens * used_bytes / itemsize / cluster.device.forward_rate
    total.add_stage("weights", max(read_bytes / cluster.device.memory_rate, product_seconds))


def add_small_calls(layers: int, cluster: Cluster, total: Cost) -> None:
    """Add the time of what else a layer computes, on CPUs. On GPUs it depends on who launches it, and is left out."""
    if cluster.on_cpus:
        total.add_stage("rest", layers * SMALL_CALLS * cluster.device.call)


def add_outputs(shared: SharedLayers, ranks: int, tokens: int, cluster: Cluster, total: Cost) -> None:
    """Add the exchanges of outputs. Ranks of a host read those of the others from shared memory; hosts send them."""
    if cluster.hosts > 1:
        for outputs in shared.outputs:
            price = Cost()
            message = MessageSize(OUTPUT_BYTES * tokens * outputs / ranks, 0)
            MERGES["direct"].price(MergeGroup(ranks, cluster.ranks), message, cluster, price)
            total.add_stage("outputs", price.seconds)
            total.add_traffic(price.inside, price.between, price.messages)
        return
    exchanges = shared.exchanges(ranks, tokens)
    device = cluster.device
    received = OUTPUT_BYTES * tokens * sum(shared.outputs) * (ranks - 1) / ranks
    waits = exchanges * cluster.inside.merge_latency
    total.add_stage("outputs", waits + received / (device.copy_rate or device.memory_rate))
    total.add_traffic(ranks * received, 0, 0)


def add_results(experts: Experts, ranks: int, size: float, cluster: Cluster, total: Cost) -> None:
    """Add the exchanges of experts' results, `size` bytes a layer: short messages, of many small calls."""
    device = cluster.device
    layers = experts.shareable_layers
    received = size * (ranks - 1) / ranks
    link = cluster.inside if cluster.hosts == 1 else cluster.between
    rate = (device.copy_rate or device.memory_rate) if cluster.hosts == 1 else link.rate
    total.add_stage("results", layers * (MERGE_CALLS * device.call + link.merge_latency + received / rate))
    sent_bytes = layers * ranks * received
    total.add_traffic(sent_bytes * (cluster.hosts == 1), sent_bytes * (cluster.hosts > 1), 0)


def decode_cost(candidate: CandidateMesh, workload: Workload, cluster: Cluster) -> Cost:
    """Return the cost of one layer's step. Selected tokens are taken to lie on all ranks alike."""
    shape, tile, device = candidate.shape, candidate.tile, cluster.device
    group = MergeGroup(shape.queries * shape.keys, tile.queries * tile.keys, shape.heads, tile.heads)
    queries = workload.q_len or 1
    rows = queries * workload.batch * workload.q_heads / shape.heads
    total = Cost()
    tokens = _most_seen(candidate, workload, cluster)
    reads = 1
    if workload.selected is not None:  # each query reads its own
        tokens = min(tokens, ceil(workload.selected.tokens / group.ranks))
        reads = queries
    read_seconds = (
        reads * tokens / workload.kept * workload.kept_bytes / workload.layers / shape.heads / device.memory_rate
    )
    product_seconds = 2 * rows * tokens * sum(workload.cached_widths) / device.forward_rate
    total.add_stage("kernel", device.call + max(read_seconds, product_seconds))
    merge = MERGES[candidate.exchange_or_merge]
    if not merge.detects_mismatch:
        add_agreement(candidate, cluster, total)
    if group.ranks > 1:
        merge.price(group, MessageSize(rows * workload.sum_itemsize, workload.cached_widths[1]), cluster, total)
        total.add_stage("merge", device.wait)
        if cluster.on_cpus and group.ranks > group.ranks_per_host:
            rounds = tree_rounds(group.ranks, group.ranks_per_host)
            leaving_rounds = sum(merge_round.between_messages > 0 for merge_round in rounds)
            times = leaving_rounds if merge.pattern is Pattern.ROUNDS else 1
            total.add_stage("merge", times * (MERGE_CALLS - 1) * device.call)
    if shape.heads > 1:
        _gather_heads(candidate, rows * workload.value_width * workload.itemsize, cluster, total)
    return total


def selection_cost(candidate: CandidateMesh, workload: Workload, selected: Selected, cluster: Cluster) -> Cost:
    """Return the cost of one indexer's step: each rank scores its index keys, and candidates merge along the tree."""
    group = MergeGroup(candidate.shape.ranks, candidate.tile.ranks)
    total = Cost()
    device = cluster.device
    queries = workload.q_len or 1
    keys = workload.batch * _most_seen(candidate, workload, cluster)
    read_seconds = keys * selected.index_dim * workload.itemsize / device.memory_rate
    product_seconds = 2 * queries * selected.index_heads * keys * selected.index_dim / device.forward_rate
    total.add_stage("score", device.call + max(read_seconds, product_seconds))
    message = workload.batch * queries * selected.heads * selected.k * CANDIDATE_BYTES
    add_tree("candidates", group, message, cluster, total)
    return total


def _most_seen(candidate: CandidateMesh, workload: Workload, cluster: Cluster) -> int:
    """Return the tokens that the new queries see on the rank that takes longest, at the rate of the slowest rank."""
    first_key, _ = workload.mask.bounds(torch.tensor([max(0, workload.length - (workload.q_len or 1))], device="cpu"))
    tokens = workload.length - int(first_key)
    shape = candidate.shape
    turns = turns_of(candidate)
    slower = [min(cluster.rates) / rate for rate in cluster.rates] if shape.heads == 1 and cluster.rates else []
    by_rank = zip(turns, slower or [1.0] * len(turns), strict=True)
    return ceil(max(min(tokens, ceil(tokens / turn.period) * turn.width) * times for turn, times in by_rank))


def _gather_heads(candidate: CandidateMesh, size: float, cluster: Cluster, total: Cost) -> None:
    """Add an all-gather of heads, after a short message that compares the calls."""
    heads, heads_per_host = candidate.shape.heads, candidate.tile.heads
    link = cluster.between if heads_per_host < heads else cluster.inside
    ranks = candidate.shape.ranks
    transfer = max(
        (heads - 1) * size / link.rate, (heads - heads_per_host) * size * candidate.tile.ranks / link.host_rate
    )
    waits = link.merge_latency + link.latency + 2 * (heads - 2) * link.message
    total.add_stage("heads", 2 * cluster.device.call + waits + transfer)
    total.add_traffic(
        ranks * (heads_per_host - 1) * size,
        ranks * (heads - heads_per_host) * size,
        2 * ranks * (heads - heads_per_host),
    )
