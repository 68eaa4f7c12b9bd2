"""Shapes of a mesh: how many ranks stand along each axis, and what each shape sends."""

from typing import NamedTuple

from attnmesh.errors import MeshError

AXES = ("heads", "queries", "keys")


class Shape(NamedTuple):
    """How many ranks stand along each axis."""

    heads: int
    queries: int
    keys: int

    @property
    def ranks(self) -> int:
        """All ranks of the mesh."""
        return self.heads * self.queries * self.keys

    def shard(self, heads: int, queries: int, keys: int) -> int:
        """The number of the shard that the rank at this place holds."""
        return (heads * self.queries + queries) * self.keys + keys


class Elements(NamedTuple):
    """Elements that a rank receives along each axis, for each token of its shard and each column of a head."""

    heads: float
    queries: float
    keys: float


def elements(shape: Shape, q_heads: int, kv_heads: int, *, training: bool = True) -> Elements:
    """What a rank receives, under a full mask, with values as wide as keys: forward, or in training also backward.

    Queries and outputs go along the keys axis, and backward queries, outputs and the gradients of both; keys and values
    along the queries axis, and backward also their gradients; the heads axis swaps all of q, k, v and out, there and
    back.
    """
    q_times, k_times, swaps = (5, 6, 2) if training else (2, 2, 1)
    heads = swaps * (shape.heads - 1) / shape.heads * 2 * (q_heads + kv_heads)
    return Elements(heads, k_times * (shape.queries - 1) * kv_heads, q_times * (shape.keys - 1) * q_heads)


def mesh_shapes(ranks: int, q_heads: int, kv_heads: int, *, training: bool = True) -> list[Shape]:
    """All shapes that so many ranks and heads allow, that on which training or prefill sends least first."""
    check_heads("mesh_shape", ranks, q_heads, kv_heads)
    sizes = [n for n in range(1, ranks + 1) if ranks % n == 0]
    shapes = [Shape(h, r, ranks // h // r) for h in sizes if kv_heads % h == 0 for r in sizes if ranks // h % r == 0]
    return sorted(shapes, key=lambda shape: sum(elements(shape, q_heads, kv_heads, training=training)))


def check_heads(subject: str, ranks: int, q_heads: int, kv_heads: int) -> None:
    """Raise unless there are ranks, and heads that can be grouped."""
    counts = ranks, q_heads, kv_heads
    whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in counts)
    if not whole or q_heads % kv_heads:
        given = f"{ranks!r} ranks, {q_heads!r} query heads, {kv_heads!r} key heads"
        fix = "pass the model's head counts"
        raise MeshError(subject, "at least one of each, whole groups of heads", given, fix)


def mesh_shape(ranks: int, q_heads: int, kv_heads: int) -> Shape:
    """The shape on which training sends least: with grouped heads a square is seldom it.

    >>> mesh_shape(16, 9, 3), mesh_shape(64, 7, 1)
    (Shape(heads=1, queries=8, keys=2), Shape(heads=1, queries=16, keys=4))
    """
    return mesh_shapes(ranks, q_heads, kv_heads)[0]
