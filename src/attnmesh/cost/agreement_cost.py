"""The all-gather by which ranks compare their calls: how many numbers each rank sends, and what that costs."""

from attnmesh.cost.candidate_mesh import CandidateMesh, Cost
from attnmesh.cost.cluster import Cluster
from attnmesh.cost.merge_cost import MergeGroup, add_collective

PAYLOAD_SIZE = 4
"""int64 values of a rank's payload. The number is fixed, so that any two calls match."""

SENT_VALUES = 2 + PAYLOAD_SIZE
"""int64 values that a rank sends: a hash of its call or of its error, which of the two it is, and its payload."""


def add_agreement(candidate: CandidateMesh, cluster: Cluster, total: Cost) -> None:
    """Add the all-gathers that compare the calls of all ranks, one per mesh axis."""
    size = 8.0 * SENT_VALUES
    for ranks, ranks_per_host in reversed(tuple(zip(candidate.shape, candidate.tile, strict=True))):
        if ranks > 1:
            group = MergeGroup(
                ranks, ranks_per_host, candidate.shape.ranks // ranks, candidate.tile.ranks // ranks_per_host
            )
            add_collective("agree", group, size, 1, cluster, total)
            size *= ranks
