"""A plan as one page: hosts, ranks, heads and tokens are changed by hand, and the schemes' curves follow.

The cost model is asked here alone, for each point of a grid; the page holds the answers and draws them.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

from attnmesh.planner.cluster import Cluster
from attnmesh.planner.hardware import NOWHERE
from attnmesh.planner.plan import Plan
from attnmesh.planner.schemes import SCHEMES, best_by_scheme, doubling, lengths, told_cluster, told_workload
from attnmesh.planner.workload import Workload

HOSTS, RANKS, GROUPS = 64, 8, (1, 2, 4, 8, 16)
"""Up to how many hosts, and ranks a host, the page goes at least; and how many query heads share a key head."""

Point = tuple[int, int, int, int]
"""Key heads, ranks a host, hosts, tokens."""


@dataclass(frozen=True)
class Grid:
    """The points of a page: each of these with each of those."""

    kv_heads: tuple[int, ...]
    ranks: tuple[int, ...]
    hosts: tuple[int, ...]
    lengths: tuple[int, ...]

    def points(self) -> Iterator[Point]:
        """All of them, the length changing fastest."""
        return product(self.kv_heads, self.ranks, self.hosts, self.lengths)

    def __len__(self) -> int:
        return len(self.kv_heads) * len(self.ranks) * len(self.hosts) * len(self.lengths)


def grid_of(workload: Workload, cluster: Cluster, hosts: int = HOSTS) -> Grid:
    """What a page for these shows: both are points of it.

    >>> import attnmesh as am
    >>> grid_of(am.Workload(8, 4, 128, 30_000), am.Cluster.preset("a100x4"), hosts=8)
    Grid(kv_heads=(1, 2, 4, 8), ranks=(1, 2, 4), hosts=(1, 2, 4, 8, 16), lengths=(8192, 30000, 32768))
    """
    kv_heads = {workload.q_heads // group for group in GROUPS if workload.q_heads % group == 0} | {workload.kv_heads}
    ranks = {n for n in doubling(cluster.ranks) if n <= RANKS} | {cluster.ranks}
    many = {1} if cluster.between == NOWHERE else {*doubling(max(hosts, cluster.hosts)), cluster.hosts}
    sets = (kv_heads, ranks, many, lengths(workload.length))
    return Grid(*(tuple(sorted(each)) for each in sets))


def write_report(file: Path, workload: Workload, cluster: Cluster, say: Callable[[str], None]) -> None:
    """Write the page to a file."""
    file.write_text(page(workload, cluster, grid_of(workload, cluster), say), encoding="utf-8")


def page(workload: Workload, cluster: Cluster, grid: Grid, say: Callable[[str], None] = lambda _: None) -> str:
    """The page as HTML, with all that it needs inside."""
    table = json.dumps(data(workload, cluster, grid, say), separators=(",", ":")).replace("<", "\\u003c")
    template = files("attnmesh.cli").joinpath("plan_page.html").read_text(encoding="utf-8")
    return template.replace('{"data": "goes here"}', table)


def data(workload: Workload, cluster: Cluster, grid: Grid, say: Callable[[str], None]) -> dict[str, Any]:
    """What the page knows: of each point the schemes, the fastest first, and the best plan in plain words."""
    names: dict[str, int] = {}
    points: dict[Point, list[list[float]]] = {}
    reasons: dict[Point, str] = {}
    # As many devices after one another: what travels between them is counted once.
    for number, point in enumerate(sorted(grid.points(), key=lambda point: point[1] * point[2]), 1):
        say(f"pricing point {number:,} of {len(grid):,} of the page")
        kv_heads, ranks, hosts, length = point
        found = best_by_scheme(replace(workload, kv_heads=kv_heads, length=length), cluster.sized(hosts, ranks))
        points[point] = [_figures(one, names) for one in found.values()]
        reasons[point] = next(iter(found.values())).explain() if found else ""
    return {
        "cluster": cluster.name,
        "titles": [told_cluster(cluster), told_workload(workload)],
        "memory": cluster.device.memory,
        "sources": dict(cluster.sources),
        "q_heads": workload.q_heads,
        "axes": {"kv": grid.kv_heads, "ranks": grid.ranks, "hosts": grid.hosts, "length": grid.lengths},
        "start": {"kv": workload.kv_heads, "ranks": cluster.ranks, "hosts": cluster.hosts, "length": workload.length},
        "schemes": [[name, line.colour, line.dashed] for name, line in SCHEMES.items()],
        "names": list(names),
        "points": [points[point] for point in grid.points()],
        "reasons": [reasons[point] for point in grid.points()],
    }


def _figures(one: Plan, names: dict[str, int]) -> list[float]:
    """Of one plan: the numbers of its scheme and of its name, seconds, bytes between hosts and inside, and memory."""
    named = names.setdefault(one.name, len(names))
    figures = one.seconds, one.bytes.between, one.bytes.inside, one.memory
    return [list(SCHEMES).index(one.known_as), named, *(_short(x) for x in figures)]


def _short(value: float) -> float:
    """Six digits: a page shows three."""
    short = float(f"{value:.6g}")
    return int(short) if short.is_integer() else short
