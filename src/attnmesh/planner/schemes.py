"""The best plan of each published scheme."""

from collections.abc import Iterable, Mapping
from itertools import cycle
from typing import NamedTuple

from attnmesh.errors import ClusterError
from attnmesh.mesh.cluster import Cluster
from attnmesh.mesh.merges import MERGES
from attnmesh.planner.plan import Plan, plan
from attnmesh.planner.workload import Workload


class CurveStyle(NamedTuple):
    """Colour and dashes of a scheme's curve."""

    colour: str
    dashed: bool = False


COLOURS = ("#3b7dd8", "#e07b2a", "#2e9e6b", "#c2408f")
"""Colours of the merges' schemes, in order of their records; further ones take them again."""

MERGED = dict(zip(dict.fromkeys(merge.known_as for merge in MERGES.values()), cycle(COLOURS), strict=False))

SCHEMES = {
    "one device": CurveStyle("#8a8f98"),
    "Ring Attention": CurveStyle("#3b7dd8"),
    "KV all-gather": CurveStyle("#e07b2a"),
    "query all-gather": CurveStyle("#a8862a"),
    "Ulysses": CurveStyle("#2e9e6b"),
    "USP": CurveStyle("#c2408f"),
    "ATTENTION2D": CurveStyle("#d64545"),
    "rectangular 2D": CurveStyle("#8463d1"),
    "heads x queries x keys": CurveStyle("#1795a6"),
    **{name: CurveStyle(colour) for name, colour in MERGED.items()},
    **{f"{name} with split heads": CurveStyle(colour, dashed=True) for name, colour in MERGED.items()},
}
"""All values of `Plan.known_as`, in the order of figures: training, then decoding."""

Schemes = Mapping[str, Plan]
"""The best plan by scheme, fastest first."""


def best_by_scheme(workload: Workload, cluster: Cluster) -> Schemes:
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


def lengths(length: int) -> list[int]:
    """Return the lengths of a curve: 8,192 times powers of 4 until beyond `length`, and `length`.

    >>> lengths(100_000)
    [8192, 32768, 100000, 131072]
    """
    powers = [8192]
    while powers[-1] < length:
        powers.append(4 * powers[-1])
    return sorted({*powers, length})


def doubling(limit: int) -> list[int]:
    """Return powers of 2 up to `limit`, and `limit`.

    >>> doubling(12)
    [1, 2, 4, 8, 12]
    """
    return sorted({*(1 << n for n in range(limit.bit_length())), limit})
