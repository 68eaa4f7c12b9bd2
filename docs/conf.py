"""The configuration of Sphinx. The figures of the pages are drawn while they are built."""

import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

import attnmesh as am

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.mesh_figures import draw_mesh, draw_tree

project = "attnmesh"
author = "the attnmesh developers"
release = am.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"attnmesh {release}"
html_math_renderer = "mathml"
exclude_patterns = ["_build"]
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
default_role = "code"

FIGURES = Path(__file__).parent / "_figures"


def draw() -> None:
    """Draw the figures of the pages."""
    FIGURES.mkdir(exist_ok=True)
    figures = {
        "layouts": draw_mesh(am.Causal(), am.Shape(1, 2, 2), [am.Contiguous(), am.Zigzag(), am.Striped()], 32),
        "window": draw_mesh(am.Window(9), am.Shape(1, 4, 1), [am.Contiguous(), am.Zigzag()], 48),
        "tree-7": draw_tree([[0, 1, 2, 3, 4, 5, 6]]),
        "tree-hosts": draw_tree([[0, 1, 2, 3], [4, 5, 6, 7]]),
    }
    for name, figure in figures.items():
        figure.savefig(FIGURES / f"{name}.png")


def inline_formula(page: Any, node: nodes.math) -> None:
    """Write a formula as MathML, which browsers render without a script and without a network."""
    page.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def block_formula(page: Any, node: nodes.math_block) -> None:
    """Write a formula on lines of its own."""
    page.body.append(f'<div class="formula">{tex2mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Any) -> None:
    """Register the renderer of formulas."""
    app.add_html_math_renderer("mathml", (inline_formula, None), (block_formula, None))


draw()
