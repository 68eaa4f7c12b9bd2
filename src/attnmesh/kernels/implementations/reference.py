"""The reference kernel: attention by its formula, in plain PyTorch, on any device, in any dtype, under any soft cap.

A tile of logits stays in a core's cache from its product to its weights. Query heads that share a key head are rows of
one matrix. No element depends on the memory beside it, so a share of the heads gives the same bits as all heads.
`torch.exp2` would break this, since it computes the last elements of a tensor another way. `torch.exp` does not.
"""

import torch
from torch import Tensor

from attnmesh.core.partial import Partial, sum_dtype
from attnmesh.core.scaling import Scaling, bias_columns
from attnmesh.kernels.dense import attend_dense, backward_dense, widen
from attnmesh.kernels.kernel import Kernel, KernelRequest
from attnmesh.kernels.rectangles import (
    BackwardInputs,
    Gradients,
    Rectangle,
    attend_rectangles,
    backward_rectangles,
    cut_into_tiles,
)

TILE_HEADS = 8
"""Key heads of a tile, of one or several sequences. The number is fixed: a batch does not change the sizes of tiles."""

TILE_ROWS = 128
"""Rows of a tile: queries times the query heads that share a key head."""

TILE_LOGITS = TILE_ROWS * 512
"""Logits of a tile per key head: fewer rows take more keys."""


class Reference(Kernel):
    """Dense within a tile: memory for logits does not grow with the problem.

    `positions` are those of queries and of keys, for a bias by distance.
    """

    name, made_for, priority, adds_bias = "reference", "calls that no other serves", 2, True

    def __init__(self, positions: tuple[Tensor, Tensor] | None = None) -> None:
        self.positions = positions

    def unsupported_reason(self, request: KernelRequest) -> str | None:
        """Return None: all tensors are supported."""
        return None

    def with_positions(self, queries: Tensor, keys: Tensor) -> "Reference":
        """Return the kernel for a bias by distance between these positions."""
        return Reference((queries.cpu().sort().values, keys.cpu().sort().values))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rectangle: Rectangle, scaling: Scaling) -> Partial:
        """Return the rectangle's partial, merged from those of its tiles."""

        def attend_tile(q: Tensor, k: Tensor, v: Tensor, tile: Rectangle) -> Partial:
            hidden = _hidden(tile, q, k)
            columns = self._columns(rectangle, tile, q, k)
            heads = zip(*(x.split(TILE_HEADS) for x in (_pack(q, k), k.flatten(0, 1), v.flatten(0, 1))), strict=True)
            partials = [attend_dense(rows, keys, values, hidden, scaling, columns) for rows, keys, values in heads]
            out, lse = (torch.cat(x) for x in zip(*partials, strict=True))
            return Partial(out.reshape(*q.shape[:-1], -1), lse.reshape(q.shape[:-1]))

        return attend_rectangles(attend_tile, q, k, v, _tiles(rectangle, q, k))

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, inputs: BackwardInputs, rectangle: Rectangle, scaling: Scaling
    ) -> Gradients:
        """Return the gradients, summed over the rectangle's tiles."""

        def backward_tile(q: Tensor, k: Tensor, v: Tensor, inputs: BackwardInputs, tile: Rectangle) -> Gradients:
            hidden = _hidden(tile, q, k)
            columns = self._columns(rectangle, tile, q, k)
            row_tensors = (_pack(x, k) for x in (q, inputs.lse.unsqueeze(-1), inputs.dout, delta[:, :, tile.queries]))
            heads = zip(*(x.split(TILE_HEADS) for x in (k.flatten(0, 1), v.flatten(0, 1), *row_tensors)), strict=True)
            parts = [
                backward_dense(rows, keys, values, more, hidden, scaling, columns)
                for keys, values, rows, *more in heads
            ]
            gradients = (torch.cat(x) for x in zip(*parts, strict=True))
            return Gradients(*(dx.reshape(x.shape) for dx, x in zip(gradients, (q, k, v), strict=True)))

        delta = (inputs.out.to(sum_dtype(q.dtype)) * inputs.dout).sum(-1, keepdim=True)
        return backward_rectangles(backward_tile, q, k, v, inputs, _tiles(rectangle, q, k))

    def _columns(self, rectangle: Rectangle, tile: Rectangle, q: Tensor, k: Tensor) -> Tensor | None:
        """Return the column of the bias that each key of a tile takes, (rows, keys).

        A key without a bias takes the column after the last. Return None if no key has one.
        """
        if self.positions is None:
            return None
        starts, parts = (rectangle.queries.start, rectangle.keys.start), (tile.queries, tile.keys)
        queries, keys = (
            positions[start + part.start : start + part.stop]
            for positions, start, part in zip(self.positions, starts, parts, strict=True)
        )
        distance, none = queries[:, None] - keys, bias_columns(q, k.shape[-1])
        near = (distance >= 0) & (distance < none)
        if not bool(near.any()):
            return None
        return distance.where(near, none).repeat(q.shape[1] // k.shape[1], 1).to(q.device)


KERNEL = Reference()


def _tiles(rectangle: Rectangle, q: Tensor, k: Tensor) -> list[Rectangle]:
    group = q.shape[1] // k.shape[1]
    queries = max(1, TILE_ROWS // group)
    return cut_into_tiles(rectangle.bounds(), queries, max(1, TILE_LOGITS // (group * min(queries, q.shape[2]))))


def _hidden(tile: Rectangle, q: Tensor, k: Tensor) -> Tensor | None:
    """Return which pairs of row and key are not visible; None if all are visible."""
    if tile.band is None:
        return None
    return ~tile.visible().repeat(q.shape[1] // k.shape[1], 1).to(q.device)


def _pack(x: Tensor, k: Tensor) -> Tensor:
    """Return (batch * kv_heads, group * length, dim): the query heads that share a key head as rows of one head."""
    return widen(x).reshape(x.shape[0] * k.shape[1], -1, x.shape[-1])
