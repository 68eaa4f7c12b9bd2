"""What the papers ran and the library does not: seconds from a cluster's constants, each as one formula.

p ranks, on each a shard of S bytes of keys and values; `link` is the slowest class of links that a step crosses.
"""

from dataclasses import replace

from attnmesh.comm.merges import MERGES
from attnmesh.cost.candidate_mesh import CandidateMesh
from attnmesh.cost.cluster import Cluster
from attnmesh.cost.merge_cost import MergeGroup, MessageSize
from attnmesh.cost.rates import BOUNDLESS, Link
from attnmesh.planner.workload import Workload
from attnmesh.planner.workload_cost import cost

HALF, FLOAT = 2, 4


def crossed(cluster: Cluster) -> Link:
    """The links that decide: those between hosts, if there are several."""
    return cluster.between if cluster.hosts > 1 else cluster.inside


def attended(cluster: Cluster, shard: float) -> float:
    """One query against a shard: call + S / memory rate."""
    return cluster.device.call + shard / cluster.device.memory_rate


def hop(cluster: Cluster, shard: float) -> float:
    """One step round the ring, each rank to its neighbour alone: latency + S / rate to one peer."""
    link = crossed(cluster)
    return link.latency + shard / min(link.rate, link.host_rate, link.peer_rate or link.rate)


def ring_decode(cluster: Cluster, shard: float) -> float:
    """Keys and values go round, each shard is attended, the next under way: a + (p - 1) max(a, hop)."""
    attend = attended(cluster, shard)
    return attend + (cluster.world - 1) * max(attend, hop(cluster, shard))


def algorithm_3(cluster: Cluster, shard: float, heads: int, width: int) -> float:
    """A shard attended, then three all-reduces: of the maximum, the numerator, the denominator."""
    line, payload = MergeGroup(cluster.world, cluster.ranks), MessageSize(heads * FLOAT, width)
    return attended(cluster, shard) + MERGES["allreduce"].seconds(line, payload, cluster)


def ring_memory(tokens: int, hidden: int) -> float:
    """Bytes of a rank, 4 t d + 2 d numbers: its shard and the one that comes."""
    return HALF * (4 * tokens * hidden + 2 * hidden)


def tree_memory(tokens: int, hidden: int, heads: int) -> float:
    """Bytes of a rank, 2 t d + 2 d + 2 heads numbers: its shard and a partial."""
    return HALF * (2 * tokens * hidden + 2 * hidden + 2 * heads)


def tree_volume(ranks: int, hidden: int, heads: int) -> float:
    """Bytes that a rank sends in a step, 2 (p - 1) / p (d + 2 heads) numbers."""
    return HALF * 2 * (ranks - 1) / ranks * (hidden + 2 * heads)


def sequential(candidate: CandidateMesh, workload: Workload, cluster: Cluster) -> float:
    """A ring that computes, then sends: seconds of its kernels, and of all else on devices that compute in no time."""
    at_once = replace(cluster.device, forward_rate=BOUNDLESS, backward_rate=BOUNDLESS, call=0.0)
    sent = cost(candidate, workload, replace(cluster, device=at_once)).seconds
    return cost(candidate, workload, cluster).parts["kernel"] + sent
