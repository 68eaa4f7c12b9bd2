"""The documentation: what is drawn in it the library draws, while it is built."""

from pathlib import Path

import attnmesh as am
from attnmesh.mesh.figures import draw_mesh, draw_tree

project = "attnmesh"
author = "the attnmesh developers"
release = am.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"attnmesh {release}"
exclude_patterns = ["_build"]
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
default_role = "code"

FIGURES = Path(__file__).parent / "_figures"


def draw() -> None:
    """The figures of the pages."""
    FIGURES.mkdir(exist_ok=True)
    figures = {
        "layouts": draw_mesh(am.Causal(), am.Shape(1, 2, 2), [am.Contiguous(), am.Zigzag(), am.Striped()], 32),
        "window": draw_mesh(am.Window(9), am.Shape(1, 4, 1), [am.Contiguous(), am.Zigzag()], 48),
        "tree-7": draw_tree([[0, 1, 2, 3, 4, 5, 6]]),
        "tree-hosts": draw_tree([[0, 1, 2, 3], [4, 5, 6, 7]]),
    }
    for name, figure in figures.items():
        figure.savefig(FIGURES / f"{name}.png")


draw()
