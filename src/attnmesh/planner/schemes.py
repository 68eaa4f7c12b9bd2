"""The best plan of each published scheme, also on other cluster sizes and at other lengths."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from attnmesh.errors import ClusterError
from attnmesh.planner.cluster import Cluster
from attnmesh.planner.hardware import NO_LINK
from attnmesh.planner.plan import Plan, plan
from attnmesh.planner.workload import Workload


class CurveStyle(NamedTuple):
    """Colour and dashes of a scheme's curve."""

    colour: str
    dashed: bool = False


MERGED = {
    "Tree Attention": "#3b7dd8",
    "Helix, DCP": "#e07b2a",
    "gathered partials": "#2e9e6b",
    "Tree Attention by all-reduces": "#c2408f",
}

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

MIN_DEVICES = 128
"""Curves go to this number of devices, or to the cluster's if it has more."""


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
    best: dict[str, Plan] = {}
    for one in plans:
        best.setdefault(one.known_as, one)
    return best


def sizes(cluster: Cluster) -> list[tuple[int, int]]:
    """Return the (hosts, ranks per host) of a curve: powers of 2 in one host, then whole hosts.

    >>> sizes(Cluster.preset("dgx-h100", hosts=12))
    [(1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (4, 8), (8, 8), (12, 8), (16, 8)]
    """
    one = {(1, ranks) for ranks in doubling(cluster.ranks)}
    most = max(cluster.hosts, -(-MIN_DEVICES // cluster.ranks)) if cluster.between != NO_LINK else 1
    more = {(hosts, cluster.ranks) for hosts in {*doubling(most), cluster.hosts}}
    return sorted(one | more)


def lengths(length: int) -> list[int]:
    """Return the lengths of a curve: 8,192 times powers of 4 until beyond `length`, and `length`.

    >>> lengths(100_000)
    [8192, 32768, 100000, 131072]
    """
    found = [8192]
    while found[-1] < length:
        found.append(4 * found[-1])
    return sorted({*found, length})


def doubling(most: int) -> list[int]:
    """Return powers of 2 up to `most`, and `most`.

    >>> doubling(12)
    [1, 2, 4, 8, 12]
    """
    return sorted({*(1 << n for n in range(most.bit_length())), most})


def over_sizes(workload: Workload, cluster: Cluster) -> Iterator[tuple[int, Schemes]]:
    """Yield numbers of devices and the schemes there."""
    for hosts, ranks in sizes(cluster):
        yield hosts * ranks, best_by_scheme(workload, cluster.sized(hosts, ranks))


def over_lengths(workload: Workload, cluster: Cluster) -> Iterator[tuple[int, Schemes]]:
    """Yield lengths and the schemes there."""
    for length in lengths(workload.length):
        yield length, best_by_scheme(replace(workload, length=length), cluster)


def curves(points: Iterable[tuple[int, Schemes]]) -> dict[str, list[tuple[int, float]]]:
    """Return points (x, seconds) by scheme, in the order of `SCHEMES`, without those that do not fit the memory."""
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in SCHEMES}
    for at, schemes in points:
        for name, best in schemes.items():
            found[name].append((at, best.seconds))
    return {name: points for name, points in found.items() if points}
