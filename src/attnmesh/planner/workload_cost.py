"""Predicted cost of attention before it runs: seconds, bytes over each class of links, and memory per rank."""

from dataclasses import replace

from attnmesh.core.mask import Full
from attnmesh.cost.candidate_mesh import CandidateMesh, Cost
from attnmesh.cost.cluster import Cluster
from attnmesh.cost.exchange_cost import LayerJob, Transfer, attention_cost
from attnmesh.planner.decode_cost import decode_cost, selection_cost
from attnmesh.planner.rank_bytes import cached_bytes, index_memory, rank_memory
from attnmesh.planner.recurrent_cost import recurrent_cost
from attnmesh.planner.workload import Workload


def cost(candidate: CandidateMesh, workload: Workload, cluster: Cluster) -> Cost:
    """Return the cost of all layers of a workload on a candidate mesh."""
    is_decode = workload.phase == "decode"
    selecting_layers = workload.selecting
    total = Cost(memory=max(cached_bytes(candidate, workload)) if is_decode else rank_memory(candidate, workload))
    if selecting_layers:
        total.add(_one_layer(candidate, workload, cluster).of_layers(selecting_layers))
        total.add(index_cost(candidate, workload, cluster))
        workload = replace(workload, selected=None)
    if workload.layers > selecting_layers:
        total.add(_one_layer(candidate, workload, cluster).of_layers(workload.layers - selecting_layers))
    if workload.recurrent:
        recurrent_cost(candidate, workload, cluster).add_to(total)
    return total


def _one_layer(candidate: CandidateMesh, workload: Workload, cluster: Cluster) -> Cost:
    if workload.phase == "decode":
        return decode_cost(candidate, workload, cluster)
    return attention_cost(candidate, workload.one_layer, cluster)


def index_cost(candidate: CandidateMesh, workload: Workload, cluster: Cluster) -> Cost:
    """Return the cost of all indexers: scores, and candidates in decoding, otherwise index keys for all ranks."""
    selected = workload.selected
    if selected is None:
        return Cost()
    if workload.phase == "decode":
        total = selection_cost(candidate, workload, selected, cluster)
    else:
        work = workload.one_layer
        total = Cost()
        job = LayerJob.of(candidate._replace(exchange_or_merge="bulk"), work, cluster)
        pairs, width = workload.batch * job.traffic.pairs.most, selected.index_heads * selected.index_dim
        flow = LayerJob.of(job.candidate, replace(work, mask=Full()), cluster).traffic.keys
        keys = Transfer(flow, workload.batch * selected.index_dim * workload.itemsize)
        total.add_stage("index keys", job.add_transfers([keys], total).seconds)
        total.add_stage("score", cluster.device.call + 2 * pairs * width / cluster.device.forward_rate)
    total = total.of_layers(workload.indexers)
    total.memory = index_memory(candidate.shape, workload)
    return total
