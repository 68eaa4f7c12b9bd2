"""`python -m benchmarks plot`: predicted time against devices and tokens, and bytes per class of links, by scheme."""

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnmesh.cli.scheme_curves import SCHEME_STYLES, curve_lengths, powers_of_two_to
from attnmesh.cost.cluster import Cluster
from attnmesh.cost.rates import NO_LINK
from attnmesh.errors import ArgumentError
from attnmesh.planner.plan import Plan, plan
from attnmesh.planner.schemes import best_by_scheme, best_of
from attnmesh.planner.units import bytes_text, seconds_text
from attnmesh.planner.workload import Workload

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT, RULE = "#2b3038", "#626a75", "#e3e6ea"
SIDE = 0.045
"""Height of one line of a curve's label, as a share of the panel."""

MIN_DEVICES = 128
"""Devices to which curves go, or to the cluster's if it has more."""

Points = Mapping[str, Sequence[tuple[int, float]]]


def check_picture(file: Path) -> None:
    """Raise unless the file is named .png or .svg and matplotlib is installed."""
    if file.suffix.lower() not in (".png", ".svg"):
        raise ArgumentError("--plot", "a file named .png or .svg", repr(str(file)), "name it plan.png")
    import matplotlib  # noqa: F401


def write_plot(file: Path, workload: Workload, cluster: Cluster, status: Callable[[str], None]) -> None:
    """Write the figure to a file."""
    plans = plan(workload, cluster)
    status("pricing other numbers of devices")
    devices = curves(over_sizes(workload, cluster))
    status("pricing other lengths")
    tokens = curves(over_lengths(workload, cluster))
    status(f"drawing {file}")
    draw_plan(workload, cluster, best_of(plans), devices, tokens).savefig(file, dpi=150)


def sizes(cluster: Cluster) -> list[tuple[int, int]]:
    """Return the (hosts, ranks per host) of a curve: powers of 2 in one host, then whole hosts.

    >>> sizes(Cluster.preset("dgx-h100", hosts=12))
    [(1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (4, 8), (8, 8), (12, 8), (16, 8)]
    """
    one_host = {(1, ranks) for ranks in powers_of_two_to(cluster.ranks)}
    most_hosts = max(cluster.hosts, -(-MIN_DEVICES // cluster.ranks)) if cluster.between != NO_LINK else 1
    many_hosts = {(hosts, cluster.ranks) for hosts in {*powers_of_two_to(most_hosts), cluster.hosts}}
    return sorted(one_host | many_hosts)


def over_sizes(workload: Workload, cluster: Cluster) -> Iterator[tuple[int, dict[str, Plan]]]:
    """Yield numbers of devices and the schemes there."""
    for hosts, ranks in sizes(cluster):
        yield hosts * ranks, best_by_scheme(workload, cluster.sized(hosts, ranks))


def over_lengths(workload: Workload, cluster: Cluster) -> Iterator[tuple[int, dict[str, Plan]]]:
    """Yield lengths and the schemes there."""
    for length in curve_lengths(workload.length):
        yield length, best_by_scheme(replace(workload, length=length), cluster)


def curves(points: Iterable[tuple[int, dict[str, Plan]]]) -> dict[str, list[tuple[int, float]]]:
    """Return points (x, seconds) by scheme, ordered as `SCHEME_STYLES`, without those that do not fit the memory."""
    curve_points: dict[str, list[tuple[int, float]]] = {name: [] for name in SCHEME_STYLES}
    for x, schemes in points:
        for name, best in schemes.items():
            curve_points[name].append((x, best.seconds))
    return {name: points for name, points in curve_points.items() if points}


def draw_plan(workload: Workload, cluster: Cluster, best: dict[str, Plan], devices: Points, tokens: Points) -> "Figure":
    """Return a figure of three panels: time against devices, time against tokens, and bytes per class of links.

    Needs matplotlib: `pip install 'attnmesh[plot]'`.
    """
    from matplotlib.figure import Figure

    figure = Figure((17, 5.8), facecolor="white")
    plain: dict[str, Any] = {"va": "top", "parse_math": False}  # a dollar sign in a name starts no formula
    figure.text(0.05, 0.955, cluster.title, fontsize=15, fontweight="bold", color=INK, **plain)
    figure.text(0.05, 0.89, f"{workload.title}. {BEST}", fontsize=10.5, color=FAINT, **plain)
    over_devices, over_tokens, links = (
        figure.add_axes((left, 0.115, width, 0.655)) for left, width in ((0.05, 0.205), (0.4, 0.205), (0.8, 0.15))
    )
    _curves(over_devices, devices, "devices", cluster.world, f"time at {workload.length:,} tokens")
    _curves(over_tokens, tokens, "tokens", workload.length, f"time on {cluster.world} devices")
    _bars(links, best, "bytes of all ranks")
    return figure


BEST = "The best plan of each scheme, by the cost model; plans that do not fit the memory are left out."


def _curves(axes: "Axes", points: Points, unit: str, given: int, title: str) -> None:
    """Draw one curve per scheme, with its name at the end, and a vertical line at the given size."""
    from matplotlib.ticker import LogLocator

    _style(axes, title)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.axvline(given, color=RULE, linewidth=6, zorder=0)
    for name, curve in points.items():
        line = SCHEME_STYLES[name]
        style = "--" if line.dashed else "-"
        axes.plot(*zip(*curve, strict=True), style, marker="o", markersize=3.5, color=line.colour, label=name)
    axes.minorticks_off()
    axes.set_xticks(_ticks({x for curve in points.values() for x, _ in curve} | {given}))
    axes.xaxis.set_major_formatter(lambda value, _: _count(round(value)))
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high > 1e3 * low else (1.0, 2.0, 5.0), numticks=30))
    axes.yaxis.set_major_formatter(lambda value, _: seconds_text(value))
    axes.set_xlabel(unit, color=INK)
    axes.set_ylabel("seconds", color=INK)
    _label(axes, points)


def _label(axes: "Axes", points: Points) -> None:
    """Write each curve's name to the right of the panel, near the end of the curve."""
    low, high = axes.get_ylim()
    axes.set_ylim(low, high)
    names = sorted(points, key=lambda name: (points[name][-1][1], name))
    texts = {name: _folded(name) for name in names}
    sizes = [SIDE * (1 + texts[name].count("\n")) + 0.012 for name in names]
    heights = [
        float(axes.transAxes.inverted().transform(axes.transData.transform(points[name][-1]))[1]) for name in names
    ]
    for name, height in zip(names, spread(heights, sizes), strict=True):
        axes.annotate(
            texts[name],
            points[name][-1],
            (1.09, height),
            "data",
            "axes fraction",
            {
                "arrowstyle": "-",
                "color": SCHEME_STYLES[name].colour,
                "linewidth": 0.6,
                "relpos": (0, 0.5),
                "shrinkA": 1,
                "shrinkB": 3,
            },
            va="center",
            fontsize=8.5,
            linespacing=1.05,
            color=SCHEME_STYLES[name].colour,
        )


def _folded(name: str) -> str:
    return textwrap.fill(name, 24, break_on_hyphens=False)


def spread(heights: Sequence[float], sizes: Sequence[float]) -> list[float]:
    """Return ascending places near the heights that do not overlap, within 0 to 1 if there is room.

    >>> [round(place, 2) for place in spread([0.5, 0.5, 0.98], [0.1, 0.1, 0.1])]
    [0.5, 0.6, 0.95]
    """
    places: list[float] = []
    bottom = 0.0
    for place, size in zip(heights, sizes, strict=True):
        places.append(max(place, bottom + size / 2))
        bottom = places[-1] + size / 2
    top = max(1.0, sum(sizes))
    for index in reversed(range(len(places))):
        places[index] = min(places[index], top - sizes[index] / 2)
        top = places[index] - sizes[index] / 2
    return places


def _ticks(numbers: Iterable[int]) -> list[int]:
    """Return the numbers to write on an axis, each at least 1.9 times the one before."""
    ticks: list[int] = []
    for number in sorted(numbers):
        if not ticks or number >= 1.9 * ticks[-1]:
            ticks.append(number)
    return ticks


def _bars(axes: "Axes", best: dict[str, Plan], title: str) -> None:
    """Draw two bars per scheme, the fastest scheme on top."""
    _style(axes, title)
    most_bytes = max((max(proposal.bytes) for proposal in best.values()), default=0.0) or 1.0
    for place, (name, proposal) in enumerate(best.items()):
        bars = ("between", proposal.bytes.between, -0.19, 1.0), ("inside", proposal.bytes.inside, 0.19, 0.4)
        for links, size, offset, alpha in bars:
            y = place + offset
            axes.barh(y, size, 0.36, color=SCHEME_STYLES[name].colour, alpha=alpha)
            style: dict[str, Any] = {"va": "center", "fontsize": 7.5, "color": FAINT}
            axes.annotate(f"{bytes_text(size)} {links}", (size, y), (4, 0), textcoords="offset points", **style)
    axes.set(ylim=(len(best) - 0.4, -0.6), xlim=(0, 1.5 * most_bytes))
    axes.set_yticks(range(len(best)), [_folded(name) for name in best])
    for label, name in zip(axes.get_yticklabels(), best, strict=True):
        label.set(color=SCHEME_STYLES[name].colour, fontsize=8.5)
    axes.locator_params("x", nbins=4)
    axes.xaxis.set_major_formatter(lambda value, _: bytes_text(value) if value else "0")
    axes.set_xlabel("bytes", color=INK)


def _style(axes: "Axes", title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(RULE)
    axes.tick_params(length=0, labelsize=8.5, labelcolor=FAINT)
    axes.grid(axis="both", color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)


def _count(number: int) -> str:
    """Return a number of tokens or devices with a unit.

    >>> [_count(number) for number in (128, 8192, 5_000_000)]
    ['128', '8Ki', '5M']
    """
    for size, unit in ((1 << 20, "Mi"), (1 << 10, "Ki")):
        if number % size == 0:
            return f"{number // size:,}{unit}"
    for size, unit in ((10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
