"""`make figures`: the figures that README and the pages of docs/ show, each drawn from the library's own values.

Other commands draw what needs a trace or a cluster: `python -m benchmarks.timelines` and `python -m benchmarks plot`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from attnmesh.core.layout import Contiguous, Layout, Packed, Striped, Zigzag
from attnmesh.core.mask import Causal, Documents, Spans, Window
from attnmesh.mesh.shapes import Shape
from benchmarks.mesh_figures import draw_mesh, draw_selection, draw_tree
from benchmarks.rank_figures import (
    draw_data_context,
    draw_folder,
    draw_joint,
    draw_keys_tp,
    draw_prefill_decode,
    draw_shards,
    draw_tiers,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOCUMENTS, MESH = (23, 9, 4, 3, 3, 2, 2, 2), Shape(1, 2, 2)

PACKED: list[Layout] = [Zigzag(), Packed(DOCUMENTS, MESH)]

FIGURES: dict[str, Callable[[], "Figure"]] = {
    "packed": lambda: draw_mesh(Causal() & Documents(DOCUMENTS), MESH, PACKED, sum(DOCUMENTS)),
    "packed-shards": lambda: draw_shards(DOCUMENTS, MESH),
    "causal-2x2": lambda: draw_mesh(Causal(), MESH, [Zigzag(), Striped()], 48),
    "layouts": lambda: draw_mesh(Causal(), MESH, [Contiguous(), Zigzag(), Striped()], 32),
    "window": lambda: draw_mesh(Window(9), Shape(1, 4, 1), [Contiguous(), Zigzag()], 48),
    "images": lambda: draw_mesh(Spans([(6, 18), (27, 39)]), MESH, [Zigzag()], 48),
    "selection": draw_selection,
    "tree-7": lambda: draw_tree([[0, 1, 2, 3, 4, 5, 6]]),
    "tree-hosts": lambda: draw_tree([[0, 1, 2, 3], [4, 5, 6, 7]]),
    "keys-tp": draw_keys_tp,
    "prefill-decode": draw_prefill_decode,
    "data-context": draw_data_context,
    "joint": draw_joint,
    "folder": draw_folder,
    "tiers": draw_tiers,
}
"""Figures by the names of their files."""


def draw_pages(folder: Path) -> None:
    """Draw all figures into a folder."""
    for name, draw in FIGURES.items():
        draw().savefig(folder / f"{name}.png", metadata={"Software": None})


if __name__ == "__main__":
    draw_pages(Path(__file__).parents[1] / "docs" / "figures")
