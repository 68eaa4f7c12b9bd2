"""Figures of the documentation: the rank that computes each pair of query and key, and the messages of a merge tree.

`benchmarks/figures.py` draws those that the pages show.
"""

import colorsys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnmesh.core.candidates import best_candidates, pack_candidates, unpack_candidates
from attnmesh.core.layout import Layout, Packed, check_layout
from attnmesh.core.mask import Mask, check_mask
from attnmesh.errors import LayoutError, MeshError, check_count
from attnmesh.mesh.reduction_tree import reduction_rounds
from attnmesh.mesh.schedule import Problem, make_schedule
from attnmesh.mesh.shapes import Shape

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI, SIDE = 110, 432
"""Resolution, and the width of a panel's pairs in pixels: a multiple of many token counts."""

BAR, GAP = 12, 5
"""Pixels: width of the bar that shows the holder of each token, and its distance from the pairs."""

LEFT, RIGHT, TOP, BOTTOM, LINE = 66, 16, 66, 56, 22
"""Pixels: the margins of a panel, and the height of a line of the legend."""

HUES = (0.58, 0.07, 0.42, 0.90, 0.75, 0.16)
"""Hues by r. Blue and orange come first, since they can be told apart with any colour vision."""

CAPTION = """Rank (r, c) computes the pairs of a query that ranks (r, ·) hold and a key that ranks (·, c) hold.
Bars: the holder of each query (left) and of each key (top)."""


INK, FAINT, UNSEEN = "#2b3038", "#626a75", (0.945, 0.950, 0.957)

RANK_LINE, INSIDE_HOST, BETWEEN_HOSTS = "#c9ced6", "#2f7fc1", "#d9772b"


def pairs_of_ranks(problem: Problem) -> Tensor:
    """Return the rank that computes each pair, (queries, keys): `r * C + c` for rank (r, c), -1 for invisible pairs.

    >>> import attnmesh as am
    >>> pairs_of_ranks(Problem(am.Causal(), am.Shape(1, 2, 2), am.Contiguous(), am.Contiguous(), 4, 4))
    tensor([[ 0, -1, -1, -1],
            [ 0,  1, -1, -1],
            [ 2,  3,  2, -1],
            [ 2,  3,  2,  3]])
    """
    ranks = torch.full((problem.length, problem.key_length), -1)
    for rank, queries, keys, visible in computed_blocks(problem):
        ranks[queries[:, None], keys] += (rank + 1) * visible
    return ranks


def computed_blocks(problem: Problem) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Yield for each step of each rank: the rank, the positions of queries and of keys, and the visible pairs."""
    for r in range(problem.shape.queries):
        for c in range(problem.shape.keys):
            plan = make_schedule(problem, r, c, ring=False)
            for step, band in zip(plan.key_steps, plan.bands, strict=True):
                visible = band.visible(len(step.positions))
                yield r * problem.shape.keys + c, plan.query_step.positions, step.positions, visible


def draw_mesh(mask: Mask, shape: Shape, layouts: Sequence[Layout], length: int) -> "Figure":
    """Return a figure with one panel per layout. Each visible pair has the colour of the rank that computes it.

    Queries are rows, keys are columns. The bars show the rank that holds each query and each key. Ranks along the heads
    axis share a colour, since they compute the same pairs for different heads. Needs matplotlib:
    `pip install 'attnmesh[plot]'`.
    """
    from matplotlib.figure import Figure

    check_count("draw_mesh length", length, "count the tokens to draw")
    if not isinstance(shape, Shape) or min(shape) < 1:
        raise MeshError("draw_mesh shape", "a Shape of 1 or more each way", repr(shape), "pass Shape(1, 2, 2)")
    if not isinstance(layouts, Sequence) or not layouts:
        raise LayoutError("draw_mesh layouts", "a layout or more", repr(layouts), "pass a list, as in [Zigzag()]")
    for layout in layouts:
        check_layout("draw_mesh layouts", layout)
    check_mask("draw_mesh", mask, length)
    panel, lines = LEFT + BAR + GAP + SIDE + RIGHT, _lines(shape, len(layouts))
    width, height = panel * len(layouts), TOP + BAR + GAP + SIDE + BOTTOM + LINE * (lines + 3)
    figure = Figure((width / DPI, height / DPI), dpi=DPI, facecolor="white")
    for number, layout in enumerate(layouts):
        side, left = BAR + GAP + SIDE, number * panel + LEFT
        axes = figure.add_axes((left / width, (height - TOP - side) / height, side / width, side / height))
        _panel(axes, Problem(mask, shape, layout, layout, length, length))
    _legend(figure, shape, len(layouts))
    return figure


def _panel(axes: "Axes", problem: Problem) -> None:
    owners, length = pairs_of_ranks(problem), problem.length
    palette = torch.tensor([*_colours(problem.shape), UNSEEN])  # -1 is the last
    bar, gap = (pixels * length / SIDE for pixels in (BAR, GAP))
    axes.imshow(palette[owners].numpy(), extent=(0, length, length, 0))
    holders = palette[_holders(problem)]
    axes.imshow(holders[:, None].numpy(), extent=(-gap - bar, -gap, length, 0))
    axes.imshow(holders[None].numpy(), extent=(0, length, -gap, -gap - bar))
    if length <= SIDE // 6:  # lines between tokens, if tokens are wide enough
        lines = range(1, length)
        axes.hlines(lines, -gap - bar, length, colors="white", linewidth=72 / DPI)
        axes.vlines(lines, -gap - bar, length, colors="white", linewidth=72 / DPI)
    axes.set(xlim=(-gap - bar, length), ylim=(length, -gap - bar), aspect="auto")
    _write(axes, problem, owners)


def _write(axes: "Axes", problem: Problem, owners: Tensor) -> None:
    """Add the title, the balance of work, and the labels of the axes."""
    layout = problem.layout
    title = f"Packed({len(layout.documents)} documents)" if isinstance(layout, Packed) else repr(layout)
    axes.set_title(title, loc="left", pad=24, fontsize=12, fontweight="bold", color=INK)
    balance = _balance(owners, problem.shape)
    axes.annotate(balance, (0, 1), (0, 9), "axes fraction", "offset points", fontsize=9, color=FAINT)
    indices = range(0, problem.length, max(1, problem.length // 4))
    ticks, labels = [token + 0.5 for token in indices], [str(token) for token in indices]
    axes.set_xticks(ticks, labels)
    axes.set_yticks(ticks, labels)
    axes.set_xlabel("key", fontsize=10, color=INK)
    axes.set_ylabel("query", fontsize=10, color=INK)
    axes.tick_params(length=0, labelsize=9, labelcolor=FAINT)
    axes.spines[:].set_visible(False)


def _balance(owners: Tensor, shape: Shape) -> str:
    """Return the work of the busiest rank relative to the mean, and for few ranks each rank's share of the pairs."""
    ranks = shape.queries * shape.keys
    counts = owners[owners >= 0].bincount(minlength=ranks)
    shares = ", ".join(f"{100 * share:.1f}" for share in (counts / counts.sum()).tolist())
    busiest = f"busiest rank {int(counts.max()) * ranks / int(counts.sum()):.2f} of the mean"
    return f"shares {shares} %; {busiest}" if ranks <= 6 else busiest


def _holders(problem: Problem) -> Tensor:
    """Return the rank that holds each token."""
    holders = torch.empty(problem.length, dtype=torch.long)
    for r in range(problem.shape.queries):
        for c in range(problem.shape.keys):
            holders[problem.query_positions(r, c)] = r * problem.shape.keys + c
    return holders


def _colours(shape: Shape) -> list[tuple[float, float, float]]:
    """Return a colour per rank: the hue of its r, in the shade of its c."""
    _, query_ranks, key_ranks = shape
    hues = HUES if query_ranks <= len(HUES) else [r / query_ranks for r in range(query_ranks)]
    shades = [0.46 + 0.34 * (c + 0.5 * (key_ranks == 1)) / max(key_ranks - 1, 1) for c in range(key_ranks)]
    return [colorsys.hls_to_rgb(hues[r], shade, 0.69) for r in range(query_ranks) for shade in shades]


def _lines(shape: Shape, panels: int) -> int:
    """Return the number of lines of the legend: one for each r, or more if that is too long."""
    return -(-shape.queries * shape.keys // min(shape.keys, 4 * panels))


def _legend(figure: "Figure", shape: Shape, panels: int) -> None:
    from matplotlib.patches import Patch

    ranks = [f"rank ({r}, {c})" for r in range(shape.queries) for c in range(shape.keys)]
    patches = [Patch(color=colour, label=rank) for colour, rank in zip(_colours(shape), ranks, strict=True)]
    columns = min(shape.keys, 4 * panels)
    down = [patch for column in range(columns) for patch in patches[column::columns]]  # legends are filled by column
    left, bottom = LEFT / DPI / figure.get_figwidth(), LINE / DPI / figure.get_figheight()
    style = {"frameon": False, "fontsize": 9, "labelcolor": INK, "borderpad": 0, "borderaxespad": 0}
    style |= {"handlelength": 1.2, "columnspacing": 1.1, "handletextpad": 0.5}
    figure.legend(handles=down, ncols=columns, loc="lower left", bbox_to_anchor=(left, 3 * bottom), **style)
    figure.text(left, bottom, CAPTION, fontsize=9, color=FAINT, linespacing=1.5)


def tree_messages(hosts: Sequence[Sequence[int]]) -> list[list[tuple[int, int]]]:
    """Return the pairs (sender, receiver) of each round of the tree over the ranks of these hosts.

    >>> tree_messages([[0, 1], [2, 3]])
    [[(1, 0), (0, 1), (3, 2), (2, 3)], [(2, 0), (3, 1), (0, 2), (1, 3)]]
    """
    rounds = reduction_rounds(hosts)
    pairs: list[list[tuple[int, int]]] = [[] for _ in range(max(map(len, rounds.values())))]
    for rank, steps in sorted(rounds.items()):
        for number, step in enumerate(steps, start=len(pairs) - len(steps)):
            pairs[number].append((step.recv, rank))
    return pairs


def draw_tree(hosts: Sequence[Sequence[int]]) -> "Figure":
    """Return a figure with one line per rank and one column per round. Arrows are messages: orange between hosts.

    Needs matplotlib: `pip install 'attnmesh[plot]'`.
    """
    from matplotlib.figure import Figure

    ranks = [rank for host in hosts for rank in host]
    if sorted(ranks) != list(range(len(ranks))) or len(ranks) < 2:
        raise MeshError("draw_tree", "two ranks or more, each on one host", f"{hosts}", "list the ranks of each host")
    rounds, host_of = tree_messages(hosts), {rank: number for number, host in enumerate(hosts) for rank in host}
    y_of = {rank: -row - 0.6 * host_of[rank] for row, rank in enumerate(ranks)}
    figure = Figure((2.2 + 1.5 * len(rounds), 0.8 + 0.32 * len(ranks) + 0.2 * len(hosts)), dpi=110, facecolor="white")
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    axes.set_xlim(-1.2, len(rounds) + 0.2)
    axes.set_ylim(min(y_of.values()) - 0.8, 1.4)
    for rank, y in y_of.items():
        axes.plot((-0.4, len(rounds)), (y, y), color=RANK_LINE, linewidth=1, zorder=0)
        axes.text(-0.5, y, f"rank {rank}", ha="right", va="center", fontsize=8, color=INK)
    for number, pairs in enumerate(rounds):
        axes.text(number + 0.3, 0.9, f"round {number + 1}", ha="center", fontsize=8, color=INK)
        for sender, receiver in pairs:
            colour = INSIDE_HOST if host_of[sender] == host_of[receiver] else BETWEEN_HOSTS
            arrow = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.1, "shrinkA": 0, "shrinkB": 1}
            axes.annotate("", (number + 0.6, y_of[receiver]), (number, y_of[sender]), arrowprops=arrow)
    return figure


def draw_selection(ranks: int = 4, tokens: int = 32, k: int = 4) -> "Figure":
    """Return a figure of the best k tokens of random scores: those of each rank, and after each round of the tree.

    Numbers are tokens, in the colour of the rank that holds them, best first. Needs matplotlib.
    """
    from matplotlib.figure import Figure

    scores, holder = torch.rand(tokens, generator=torch.Generator().manual_seed(3)), torch.arange(tokens) // 4 % ranks
    mine = [
        best_candidates(pack_candidates(scores[holder == rank], (holder == rank).nonzero()[:, 0]), k)
        for rank in range(ranks)
    ]
    states, messages = [mine], tree_messages([[*range(ranks)]])
    for pairs in messages:
        before = states[-1]
        joined = {
            receiver: best_candidates(torch.cat((before[receiver], before[sender])), k) for sender, receiver in pairs
        }
        states.append([joined.get(rank, before[rank]) for rank in range(ranks)])
    figure = Figure((2.4 + 2.3 * len(messages), 0.7 + 0.5 * ranks), dpi=DPI, facecolor="white")
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    axes.set_xlim(-1.3, 0.4 + 2.3 * len(messages) + 1.1)
    axes.set_ylim(-ranks + 0.2, 1.2)
    for column, lists in enumerate(states):
        title = "best of each rank" if column == 0 else f"after round {column}"
        axes.text(2.3 * column + 0.55, 0.75, title, ha="center", fontsize=8, color=INK)
        for rank, candidates in enumerate(lists):
            if column == 0:
                axes.text(-0.3, -rank, f"rank {rank}", ha="right", va="center", fontsize=8, color=INK)
            for place, token in enumerate(unpack_candidates(candidates)[1].tolist()):
                colour = colorsys.hls_to_rgb(HUES[int(holder[token])], 0.42, 0.6)
                position, box = (
                    (2.3 * column + 0.36 * place, -rank),
                    {"boxstyle": "round,pad=0.25", "fc": colour, "ec": "none"},
                )
                axes.text(*position, f"{token:2d}", ha="center", va="center", fontsize=7, color="white", bbox=box)
    for column, pairs in enumerate(messages):
        for sender, receiver in pairs:
            arrow = {"arrowstyle": "-|>", "color": INSIDE_HOST, "linewidth": 1.1}
            start, stop = (2.3 * column + 1.3, -sender), (2.3 * column + 2.05, -receiver)
            axes.annotate("", stop, start, arrowprops=arrow)
    return figure
