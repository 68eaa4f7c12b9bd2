"""The best plan of each published scheme."""

from collections.abc import Iterable

from attnmesh.cost.cluster import Cluster
from attnmesh.errors import ClusterError
from attnmesh.planner.plan import Plan, plan
from attnmesh.planner.workload import Workload


def best_by_scheme(workload: Workload, cluster: Cluster) -> dict[str, Plan]:
    """Return the best plan of each scheme, fastest first. The result is empty where nothing fits the memory.

    >>> import attnmesh as am
    >>> cluster = am.Cluster.preset("h100x1", hosts=8)
    >>> best = best_by_scheme(am.Workload(32, 8, 128, 1_000_000, phase="decode"), cluster)["Tree Attention"]
    >>> best.name
    '1x1x8 tree'
    >>> best_by_scheme(am.Workload(32, 8, 128, 10**12), cluster)
    {}
    """
    try:
        return best_of(plan(workload, cluster))
    except ClusterError:  # workload and cluster were checked before, so the workload does not fit
        return {}


def best_of(plans: Iterable[Plan]) -> dict[str, Plan]:
    """Return the first plan of each scheme, from plans sorted by time."""
    by_scheme: dict[str, Plan] = {}
    for proposal in plans:
        by_scheme.setdefault(proposal.known_as, proposal)
    return by_scheme
