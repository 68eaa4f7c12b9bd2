"""Shapes of a mesh: the number of ranks along each axis, and the communication of each shape."""

from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.errors import MeshError, ShapeError

AXES = ("heads", "queries", "keys")
"""Names of a mesh's axes, from the outermost to the innermost."""


class Shape(NamedTuple):
    """Number of ranks along each axis.

    Args:
        heads: Ranks along the heads axis.
        queries: Ranks along the queries axis.
        keys: Ranks along the keys axis.

    >>> import attnmesh as am
    >>> am.Shape(1, 2, 4).ranks
    8
    """

    heads: int
    queries: int
    keys: int

    @property
    def ranks(self) -> int:
        """Number of ranks of the mesh."""
        return self.heads * self.queries * self.keys

    def shard(self, heads: int, queries: int, keys: int) -> int:
        """Return the index of the shard of the rank at these coordinates."""
        return (heads * self.queries + queries) * self.keys + keys


class Elements(NamedTuple):
    """Elements that a rank receives along each axis, per token of its shard and per column of a head."""

    heads: float
    queries: float
    keys: float


def elements(shape: Shape, q_heads: int, kv_heads: int, *, training: bool = True) -> Elements:
    """Return the elements that a rank receives under a full mask, forward, and in training also backward.

    Forward, queries and outputs travel along the keys axis, keys and values along the queries axis. Backward, their
    gradients travel too. Along the heads axis q, k, v and out are exchanged before and after. Values have the width of
    keys.
    """
    q_times, k_times, swaps = (5, 6, 2) if training else (2, 2, 1)
    heads = swaps * (shape.heads - 1) / shape.heads * 2 * (q_heads + kv_heads)
    return Elements(heads, k_times * (shape.queries - 1) * kv_heads, q_times * (shape.keys - 1) * q_heads)


def mesh_shapes(ranks: int, q_heads: int, kv_heads: int, *, training: bool = True) -> list[Shape]:
    """Return all shapes for a number of ranks and heads, sorted by communication in training or prefill."""
    check_heads("mesh_shape", ranks, q_heads, kv_heads)
    sizes = [n for n in range(1, ranks + 1) if ranks % n == 0]
    shapes = [Shape(h, r, ranks // h // r) for h in sizes if kv_heads % h == 0 for r in sizes if ranks // h % r == 0]
    return sorted(shapes, key=lambda shape: sum(elements(shape, q_heads, kv_heads, training=training)))


def check_heads(subject: str, ranks: int, q_heads: int, kv_heads: int) -> None:
    """Raise unless the counts are at least 1 and the heads can be grouped."""
    if not all(type(n) is int and n >= 1 for n in (ranks, q_heads, kv_heads)) or q_heads % kv_heads:
        given = f"{ranks!r} ranks, {q_heads!r} query heads, {kv_heads!r} key heads"
        fix = "pass the number of ranks and the model's head counts, as Python ints"
        raise MeshError(subject, "at least one of each, whole groups of heads", given, fix)


def check_heads_axis(subject: str, shape: Shape, kv_heads: int) -> None:
    """Raise unless each rank along the heads axis gets a key head in prefill and training."""
    if kv_heads < shape.heads:
        given = f"{kv_heads} key heads and a heads axis of {shape.heads}"
        fix = f"shorten it to at most {kv_heads} ranks, and give the others to the queries or the keys axis"
        raise ShapeError(subject, "at least one key head a rank of the heads axis", given, fix)


def even_slice(count: int, parts: int, index: int) -> slice:
    """Return slice `index` of `parts` slices of `count` heads or tokens. Sizes differ by one at most, larger first.

    >>> [even_slice(5, 3, index) for index in range(3)]
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    size, larger = divmod(count, parts)
    start = index * size + min(index, larger)
    return slice(start, start + size + (index < larger))


def share_evenly(parts: int, ranks: int) -> bool:
    """Return True if ranks hold whole parts, as heads: equally many each, or each part on equally many ranks.

    >>> [parts for parts in range(1, 13) if share_evenly(parts, 4)]
    [1, 2, 4, 8, 12]
    """
    return parts % ranks == 0 or ranks % parts == 0


def mesh_shape(ranks: int, q_heads: int, kv_heads: int) -> Shape:
    """Return the shape with the least communication in training. With grouped heads it is rarely square.

    Args:
        ranks: Number of ranks.
        q_heads: Query heads of the model.
        kv_heads: Key heads of the model; they divide the query heads.

    Raises:
        MeshError: If a count is less than 1, or the heads cannot be grouped.

    >>> import attnmesh as am
    >>> am.mesh_shape(16, 9, 3), am.mesh_shape(64, 7, 1)
    (Shape(heads=1, queries=8, keys=2), Shape(heads=1, queries=16, keys=4))
    """
    return mesh_shapes(ranks, q_heads, kv_heads)[0]


def rank_grid(shape: Shape, tile: Shape) -> Tensor:
    """Return the rank at each coordinate (h, r, c) of a mesh. Ranks of one host, which hold a tile, are consecutive."""
    grid = torch.arange(shape.ranks, device="cpu").reshape(
        [n // t for n, t in zip(shape, tile, strict=True)] + list(tile)
    )
    return grid.permute(0, 3, 1, 4, 2, 5).reshape(tuple(shape))
