"""The configuration of Sphinx."""

from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

import attnmesh as am

project = "attnmesh"
author = "the attnmesh developers"
copyright = f"2026, {author}"
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
