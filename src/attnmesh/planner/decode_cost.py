"""Predicted cost of a decode step: attention of each rank, one merge, and an all-gather of split heads."""

from math import ceil

import torch

from attnmesh.core.layout import Striped
from attnmesh.mesh.cluster import Cluster
from attnmesh.mesh.merge_cost import MergeGroup, Payload, add_tree, agree_cost
from attnmesh.mesh.merges import MERGES
from attnmesh.mesh.prices import Candidate, Cost
from attnmesh.planner.selected import Selected
from attnmesh.planner.workload import Workload

CANDIDATE_BYTES = 8
"""Bytes of a candidate: its score and its index."""


def decode_cost(candidate: Candidate, workload: Workload, cluster: Cluster) -> Cost:
    """Return the cost of one layer's step. Selected tokens are taken to lie on all ranks alike."""
    shape, tile, device = candidate.shape, candidate.tile, cluster.device
    group = MergeGroup(shape.queries * shape.keys, tile.queries * tile.keys, shape.heads, tile.heads)
    queries = workload.q_len or 1
    rows = queries * workload.batch * workload.q_heads / shape.heads
    total = Cost()
    seen, reads = _most_seen(candidate, workload, queries, group.ranks), 1
    if workload.selected is not None:  # each query reads its own
        seen, reads = min(seen, ceil(workload.selected.tokens / group.ranks)), queries
    read = reads * seen / workload.kept * workload.kept_bytes / workload.layers / shape.heads / device.memory_rate
    products = 2 * rows * seen * sum(workload.decoded) / device.forward_rate
    total.add_stage("kernel", device.call + max(read, products))
    merge = MERGES[candidate.exchange]
    if merge.is_collective:
        agree_cost(candidate, cluster, total)
    if group.ranks > 1:
        merge.price(group, Payload(rows * workload.wide, workload.decoded[1]), cluster, total)
    if shape.heads > 1:
        _gather_heads(candidate, rows * workload.values * workload.item, cluster, total)
    return total


def selection_cost(candidate: Candidate, workload: Workload, selected: Selected, cluster: Cluster) -> Cost:
    """Return the cost of one indexer's step: each rank scores its index keys, and candidates merge along the tree."""
    group = MergeGroup(candidate.shape.ranks, candidate.tile.ranks)
    total, device, queries = Cost(), cluster.device, workload.q_len or 1
    keys = workload.batch * _most_seen(candidate, workload, queries, group.ranks)
    read = keys * selected.index_dim * workload.item / device.memory_rate
    products = 2 * queries * selected.index_heads * keys * selected.index_dim / device.forward_rate
    total.add_stage("score", device.call + max(read, products))
    message = workload.batch * queries * selected.heads * selected.k * CANDIDATE_BYTES
    add_tree("candidates", group, message, cluster, total)
    return total


def _most_seen(candidate: Candidate, workload: Workload, queries: int, ranks: int) -> int:
    """Return the most tokens of one rank that the new queries see. The cache is block-cyclic."""
    first, _ = workload.mask.bounds(torch.tensor([max(0, workload.length - queries)]))
    seen, block = workload.length - int(first), candidate.layout.block if isinstance(candidate.layout, Striped) else 1
    return min(seen, ceil(ceil(seen / block) / ranks) * block)


def _gather_heads(candidate: Candidate, size: float, cluster: Cluster, total: Cost) -> None:
    """Add an all-gather of heads, after a short message that compares the calls."""
    heads, near = candidate.shape.heads, candidate.tile.heads
    link, ranks = (cluster.between if near < heads else cluster.inside), candidate.shape.ranks
    transfer = max((heads - 1) * size / link.rate, (heads - near) * size * candidate.tile.ranks / link.host_rate)
    waits = link.merge_latency + link.latency + 2 * (heads - 2) * link.message
    total.add_stage("heads", 2 * cluster.device.call + waits + transfer)
    total.add_traffic(ranks * (near - 1) * size, ranks * (heads - near) * size, 2 * ranks * (heads - near))
