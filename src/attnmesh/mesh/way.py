"""One way to run attention."""

from typing import NamedTuple

from attnmesh.core.layout import Layout
from attnmesh.mesh.shapes import Shape


class Way(NamedTuple):
    """One way to run attention: mesh shape, tile of the mesh per host, token layout and exchange.

    `exchange` is "bulk", "pipelined" or "ring"; in decoding it is "tree", "direct", "gather" or "allreduce".
    """

    shape: Shape
    tile: Shape
    layout: Layout
    exchange: str
