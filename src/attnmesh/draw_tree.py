"""The tree of a merge as a picture: who hears whom, round by round, read off the rounds that the ranks run."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attnmesh.errors import MeshError
from attnmesh.tree import tree

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
