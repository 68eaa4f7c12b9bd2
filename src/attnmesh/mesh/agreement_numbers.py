"""The all-gather by which ranks compare their calls: how many numbers each rank sends, and what that costs."""

from attnmesh.mesh.cluster import Cluster
from attnmesh.mesh.merge_cost import MergeGroup, add_collective
from attnmesh.mesh.way import Cost, Way

PAYLOAD_SIZE = 4
"""int64 values of a rank's payload. The number is fixed, so that any two calls match."""

VALUES = 2 + PAYLOAD_SIZE
"""int64 values of a rank. The first two are a hash of its call, and whether this is an error."""


def add_agreement(way: Way, cluster: Cluster, total: Cost) -> None:
    """Add the all-gathers that compare the calls of all ranks, one per mesh axis."""
    size = 8.0 * VALUES
    for ranks, ranks_per_host in reversed(tuple(zip(way.shape, way.tile, strict=True))):
        if ranks > 1:
            group = MergeGroup(ranks, ranks_per_host, way.shape.ranks // ranks, way.tile.ranks // ranks_per_host)
            add_collective("agree", group, size, 1, cluster, total)
            size *= ranks
