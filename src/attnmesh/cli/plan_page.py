"""The page of `attnmesh plan --report`: sliders for hosts, ranks, heads and tokens, and the schemes' curves.

The cost model runs here, for each point of a grid. The page holds the results and draws them.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from attnmesh.cli.scheme_curves import SCHEME_STYLES, curve_lengths, powers_of_two_to
from attnmesh.cost.cluster import Cluster
from attnmesh.cost.rates import NO_LINK
from attnmesh.planner.plan import Plan
from attnmesh.planner.schemes import best_by_scheme
from attnmesh.planner.workload import Workload

HOSTS = 64
"""Hosts up to which the hosts slider goes at least."""

MAX_SLIDER_RANKS = 8
"""Largest power of two of the ranks-per-host slider. It also has the cluster's own number, and none above it."""

GROUP_SIZES = (1, 2, 4, 8, 16)
"""Query heads per key head."""

Point = tuple[int, int, int, int]
"""Key heads, ranks a host, hosts, tokens."""


class PagePoints(NamedTuple):
    """The points of a page are all combinations of these values; the length changes fastest."""

    kv_heads: tuple[int, ...]
    ranks: tuple[int, ...]
    hosts: tuple[int, ...]
    lengths: tuple[int, ...]


def grid_of(workload: Workload, cluster: Cluster) -> PagePoints:
    """Return the grid of a page. The given workload and cluster are a point of it.

    >>> import attnmesh as am
    >>> grid_of(am.Workload(8, 4, 128, 30_000), am.Cluster.preset("rtx4090"))
    PagePoints(kv_heads=(1, 2, 4, 8), ranks=(1, 2), hosts=(1, 2, 4, 8, 16, 32, 64), lengths=(8192, 30000, 32768))
    """
    kv_heads = {workload.q_heads // group for group in GROUP_SIZES if workload.q_heads % group == 0} | {
        workload.kv_heads
    }
    ranks = {n for n in powers_of_two_to(cluster.ranks) if n <= MAX_SLIDER_RANKS} | {cluster.ranks}
    counts = {1} if cluster.between == NO_LINK else {*powers_of_two_to(max(HOSTS, cluster.hosts)), cluster.hosts}
    sets = (kv_heads, ranks, counts, curve_lengths(workload.length))
    return PagePoints(*(tuple(sorted(points)) for points in sets))


def write_report(file: Path, workload: Workload, cluster: Cluster, status: Callable[[str], None]) -> None:
    """Write the page to a file."""
    file.write_text(page(workload, cluster, grid_of(workload, cluster), status), encoding="utf-8")


def page(workload: Workload, cluster: Cluster, grid: PagePoints, status: Callable[[str], None] = lambda _: None) -> str:
    """Return the page as one self-contained HTML file."""
    table = json.dumps(page_data(workload, cluster, grid, status), separators=(",", ":")).replace("<", "\\u003c")
    template = files("attnmesh.cli").joinpath("plan_page.html").read_text(encoding="utf-8")
    return template.replace('{"data": "goes here"}', table)


def page_data(workload: Workload, cluster: Cluster, grid: PagePoints, status: Callable[[str], None]) -> dict[str, Any]:
    """Return the data of the page: per point, the schemes sorted by time and the explanation of the best plan."""
    names: dict[str, int] = {}
    all_points: list[Point] = list(product(*grid))
    points: dict[Point, list[list[float]]] = {}
    reasons: dict[Point, str] = {}
    # Sorted by devices, so that points with the same number share the cached traffic.
    for number, point in enumerate(sorted(all_points, key=lambda point: point[1] * point[2]), 1):
        status(f"pricing point {number:,} of {len(all_points):,} of the page")
        kv_heads, ranks, hosts, length = point
        schemes = best_by_scheme(replace(workload, kv_heads=kv_heads, length=length), cluster.sized(hosts, ranks))
        points[point] = [_figures(plan, names) for plan in schemes.values()]
        reasons[point] = next(iter(schemes.values())).explain() if schemes else ""
    return {
        "cluster": cluster.name,
        "titles": [cluster.title, workload.title],
        "memory": cluster.device.memory,
        "sources": dict(cluster.sources),
        "q_heads": workload.q_heads,
        "axes": {"kv": grid.kv_heads, "ranks": grid.ranks, "hosts": grid.hosts, "length": grid.lengths},
        "start": {"kv": workload.kv_heads, "ranks": cluster.ranks, "hosts": cluster.hosts, "length": workload.length},
        "schemes": [[name, style.colour, style.dashed] for name, style in SCHEME_STYLES.items()],
        "names": list(names),
        "points": [points[point] for point in all_points],
        "reasons": [reasons[point] for point in all_points],
    }


def _figures(plan: Plan, names: dict[str, int]) -> list[float]:
    """Return the indices of a plan's scheme and name, its seconds, bytes between and inside hosts, and memory."""
    name_index = names.setdefault(plan.name, len(names))
    figures = plan.seconds, plan.bytes.between, plan.bytes.inside, plan.memory
    return [list(SCHEME_STYLES).index(plan.known_as), name_index, *(_short(x) for x in figures)]


def _short(value: float) -> float:
    """Return a value rounded to six digits; the page shows three."""
    short = float(f"{value:.6g}")
    return int(short) if short.is_integer() else short
