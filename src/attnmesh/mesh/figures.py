"""Figures of a mesh: which rank computes which pair of query and key, and who sends to whom in a tree."""

import colorsys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnmesh.core.layout import Layout, check_layout
from attnmesh.core.mask import Mask, check_mask
from attnmesh.errors import LayoutError, MeshError, ShapeError
from attnmesh.mesh.schedule import Problem, schedule
from attnmesh.mesh.shapes import Shape

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

from attnmesh.mesh.reduction_tree import tree

if TYPE_CHECKING:
    from matplotlib.figure import Figure


DPI, SIDE = 110, 432
"""At this resolution the pairs of a panel are so many pixels wide, and each token a whole number of them, if it can."""


BAR, GAP = 12, 5
"""Pixels: how wide the bar is that tells who holds a token, and how far it is from the pairs."""


LEFT, RIGHT, TOP, BOTTOM, LINE = 66, 16, 66, 56, 22
"""Pixels round a panel, and of a line of the legend."""


HUES = (0.58, 0.07, 0.42, 0.90, 0.75, 0.16)
"""Of the rows: blue and orange first, which every eye tells apart."""


CAPTION = """A pair is computed in its query's row and its key's column.
Bars: the holder of each query (left) and of each key (top)."""


INK, FAINT, UNSEEN = "#2b3038", "#626a75", (0.945, 0.950, 0.957)


def pairs_of_ranks(problem: Problem) -> Tensor:
    """The rank that computes each pair, (queries, keys): `r * C + c` for rank (r, c), and -1 where nobody looks.

    >>> import attnmesh as am
    >>> pairs_of_ranks(Problem(am.Causal(), am.Shape(1, 2, 2), am.Contiguous(), am.Contiguous(), 4, 4))
    tensor([[ 0, -1, -1, -1],
            [ 0,  1, -1, -1],
            [ 2,  3,  2, -1],
            [ 2,  3,  2,  3]])
    """
    owners = torch.full((problem.length, problem.key_length), -1)
    for rank, queries, keys, visible in computed(problem):
        owners[queries[:, None], keys] += (rank + 1) * visible
    return owners


def computed(problem: Problem) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """What each rank computes, step by step: its number, positions of queries and of keys, and which pairs of them."""
    for r in range(problem.shape.queries):
        for c in range(problem.shape.keys):
            plan = schedule(problem, r, c, ring=False)
            for step, band in zip(plan.steps, plan.bands, strict=True):
                visible = band.visible(len(step.positions))
                yield r * problem.shape.keys + c, plan.row.positions, step.positions, visible


def draw_mesh(mask: Mask, shape: Shape, layouts: Sequence[Layout], length: int) -> "Figure":
    """A panel for each layout: queries down, keys across, each visible pair in the colour of the rank that computes it.

    The bars along a panel tell who holds each query and each key. Ranks in line along the heads axis share a colour,
    as they compute the same pairs for different heads. Needs matplotlib: `pip install 'attnmesh[plot]'`.
    """
    from matplotlib.figure import Figure

    _check(mask, shape, layouts, length)
    panel, lines = LEFT + BAR + GAP + SIDE + RIGHT, _lines(shape, len(layouts))
    width, height = panel * len(layouts), TOP + BAR + GAP + SIDE + BOTTOM + LINE * (lines + 3)
    figure = Figure((width / DPI, height / DPI), dpi=DPI, facecolor="white")
    for number, layout in enumerate(layouts):
        side, left = BAR + GAP + SIDE, number * panel + LEFT
        axes = figure.add_axes((left / width, (height - TOP - side) / height, side / width, side / height))
        _panel(axes, Problem(mask, shape, layout, layout, length, length))
    _legend(figure, shape, len(layouts))
    return figure


def _check(mask: Mask, shape: Shape, layouts: Sequence[Layout], length: int) -> None:
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ShapeError("draw_mesh length", "a whole number, 1 or more", repr(length), "count the tokens to draw")
    if not isinstance(shape, Shape) or min(shape) < 1:
        raise MeshError("draw_mesh shape", "a Shape of 1 or more each way", repr(shape), "pass Shape(1, 2, 2)")
    if not isinstance(layouts, Sequence) or not layouts:
        raise LayoutError("draw_mesh layouts", "a layout or more", repr(layouts), "pass a list, as in [Zigzag()]")
    for layout in layouts:
        check_layout("draw_mesh layouts", layout)
    check_mask("draw_mesh", mask, length)


def _panel(axes: "Axes", problem: Problem) -> None:
    owners, length = pairs_of_ranks(problem), problem.length
    palette = torch.tensor([*_colours(problem.shape), UNSEEN])  # -1 is the last
    bar, gap = (pixels * length / SIDE for pixels in (BAR, GAP))
    axes.imshow(palette[owners].numpy(), extent=(0, length, length, 0))
    holders = palette[_holders(problem)]
    axes.imshow(holders[:, None].numpy(), extent=(-gap - bar, -gap, length, 0))
    axes.imshow(holders[None].numpy(), extent=(0, length, -gap, -gap - bar))
    if length <= SIDE // 6:  # lines between tokens, where there is room for them
        lines = range(1, length)
        axes.hlines(lines, -gap - bar, length, colors="white", linewidth=72 / DPI)
        axes.vlines(lines, -gap - bar, length, colors="white", linewidth=72 / DPI)
    axes.set(xlim=(-gap - bar, length), ylim=(length, -gap - bar), aspect="auto")
    _write(axes, problem, owners)


def _write(axes: "Axes", problem: Problem, owners: Tensor) -> None:
    """Title, balance, and the numbers of some tokens."""
    axes.set_title(repr(problem.layout), loc="left", pad=24, fontsize=12, fontweight="bold", color=INK)
    balance = _balance(owners, problem.shape)
    axes.annotate(balance, (0, 1), (0, 9), "axes fraction", "offset points", fontsize=9, color=FAINT)
    every = max(1, problem.length // 4)
    tokens = range(0, problem.length, every)
    ticks, labels = [token + 0.5 for token in tokens], [str(token) for token in tokens]
    axes.set_xticks(ticks, labels)
    axes.set_yticks(ticks, labels)
    axes.set_xlabel("key", fontsize=10, color=INK)
    axes.set_ylabel("query", fontsize=10, color=INK)
    axes.tick_params(length=0, labelsize=9, labelcolor=FAINT)
    axes.spines[:].set_visible(False)


def _balance(owners: Tensor, shape: Shape) -> str:
    """What share of the visible pairs each rank computes, where a line holds it, and what the busiest does."""
    ranks = shape.queries * shape.keys
    counts = owners[owners >= 0].bincount(minlength=ranks)
    shares = ", ".join(f"{100 * share:.1f}" for share in (counts / counts.sum()).tolist())
    busiest = f"busiest rank {int(counts.max()) * ranks / int(counts.sum()):.2f} of the mean"
    return f"shares {shares} %; {busiest}" if ranks <= 6 else busiest


def _holders(problem: Problem) -> Tensor:
    """Which rank holds each token."""
    holders = torch.empty(problem.length, dtype=torch.long)
    for r in range(problem.shape.queries):
        for c in range(problem.shape.keys):
            holders[problem.queries(r, c)] = r * problem.shape.keys + c
    return holders


def _colours(shape: Shape) -> list[tuple[float, float, float]]:
    """Rank after rank: the hue of its row, in the shade of its column."""
    _, rows, columns = shape
    hues = HUES if rows <= len(HUES) else [r / rows for r in range(rows)]
    shades = [0.46 + 0.34 * (c + 0.5 * (columns == 1)) / max(columns - 1, 1) for c in range(columns)]
    return [colorsys.hls_to_rgb(hues[r], shade, 0.69) for r in range(rows) for shade in shades]


def _lines(shape: Shape, panels: int) -> int:
    """Lines of the legend: a row of the mesh each, unless it is longer than there is room for."""
    return -(-shape.queries * shape.keys // min(shape.keys, 4 * panels))


def _legend(figure: "Figure", shape: Shape, panels: int) -> None:
    from matplotlib.patches import Patch

    ranks = [f"rank ({r}, {c})" for r in range(shape.queries) for c in range(shape.keys)]
    patches = [Patch(color=colour, label=rank) for colour, rank in zip(_colours(shape), ranks, strict=True)]
    columns = min(shape.keys, 4 * panels)
    down = [patch for column in range(columns) for patch in patches[column::columns]]  # as a legend is filled
    left, bottom = LEFT / DPI / figure.get_figwidth(), LINE / DPI / figure.get_figheight()
    style = {
        "frameon": False,
        "fontsize": 9,
        "labelcolor": INK,
        "borderpad": 0,
        "borderaxespad": 0,
        "handlelength": 1.2,
        "columnspacing": 1.1,
        "handletextpad": 0.5,
    }
    figure.legend(handles=down, ncols=columns, loc="lower left", bbox_to_anchor=(left, 3 * bottom), **style)
    figure.text(left, bottom, CAPTION, fontsize=9, color=FAINT, linespacing=1.5)


INK, FAINT, NEAR, FAR = "#2b3038", "#c9ced6", "#2f7fc1", "#d9772b"


def heard(hosts: Sequence[Sequence[int]]) -> list[list[tuple[int, int]]]:
    """For each round the pairs (speaker, hearer) of the tree over these hosts' ranks.

    >>> heard([[0, 1], [2, 3]])
    [[(1, 0), (0, 1), (3, 2), (2, 3)], [(2, 0), (3, 1), (0, 2), (1, 3)]]
    """
    rounds = tree(hosts)
    pairs: list[list[tuple[int, int]]] = [[] for _ in range(max(map(len, rounds.values())))]
    for rank, steps in sorted(rounds.items()):
        for number, step in enumerate(steps, start=len(pairs) - len(steps)):
            pairs[number].append((step.hear, rank))
    return pairs


def draw_tree(hosts: Sequence[Sequence[int]]) -> "Figure":
    """A line a rank and a column a round: an arc from who speaks to who hears, blue in a host and orange between two.

    Needs matplotlib: `pip install 'attnmesh[plot]'`.
    """
    from matplotlib.figure import Figure

    ranks = [rank for host in hosts for rank in host]
    if sorted(ranks) != list(range(len(ranks))) or len(ranks) < 2:
        raise MeshError("draw_tree", "two ranks or more, each on one host", f"{hosts}", "list the ranks of each host")
    rounds, host_of = heard(hosts), {rank: number for number, host in enumerate(hosts) for rank in host}
    place = {rank: -row - 0.6 * host_of[rank] for row, rank in enumerate(ranks)}
    figure = Figure((2.2 + 1.5 * len(rounds), 0.8 + 0.32 * len(ranks) + 0.2 * len(hosts)), dpi=110, facecolor="white")
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    axes.set_xlim(-1.2, len(rounds) + 0.2)
    axes.set_ylim(min(place.values()) - 0.8, 1.4)
    for rank, y in place.items():
        axes.plot((-0.4, len(rounds)), (y, y), color=FAINT, linewidth=1, zorder=0)
        axes.text(-0.5, y, f"rank {rank}", ha="right", va="center", fontsize=8, color=INK)
    for number, pairs in enumerate(rounds):
        axes.text(number + 0.3, 0.9, f"round {number + 1}", ha="center", fontsize=8, color=INK)
        for speaker, hearer in pairs:
            colour = NEAR if host_of[speaker] == host_of[hearer] else FAR
            arrow = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.1, "shrinkA": 0, "shrinkB": 1}
            axes.annotate("", (number + 0.6, place[hearer]), (number, place[speaker]), arrowprops=arrow)
    return figure
