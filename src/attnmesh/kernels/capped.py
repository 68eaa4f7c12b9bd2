"""Attention with soft-capped logits on the CPU, in PyTorch operations: PyTorch's flash attention has no soft cap.

A tile of logits stays in the cache from its product to its weights. Query heads that share a key head are rows of one
matrix. No element depends on the memory beside it, so a share of the heads gives the same bits as all heads.
`torch.exp2` would break this, since it computes the last elements of a tensor another way. `torch.exp` does not.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.core.logits import Logits
from attnmesh.core.partial import Partial, sum_dtype
from attnmesh.kernels.blocks import BackwardInputs, Block, Gradients

HEADS = 8
"""Key heads of a tile, of one or several sequences. The number is fixed: a batch does not change the sizes of tiles."""

ROWS = 128
"""Rows of a tile: queries times the query heads that share a key head."""

AREA = ROWS * 512
"""Logits of a tile per key head: fewer rows take more keys."""

CONVERTED_KEYS = 1024
"""The most keys of a tile that are converted to float32."""

SMALL = 0.35
"""Size up to which `x + x * p(x * x)` is tanh(x) in float32; `TAYLOR` are the coefficients of p without a constant."""

TAYLOR = (-0.3333321807416144, 0.13316219962652273, -0.05017072210863177)


LOW_CAP, LOW_CAP_OF_HALF = 4.0, 256.0
"""Soft caps up to which an error of tanh of 1e-7 is a rounding of the logits, of float32 and of half precision."""


class Step(NamedTuple):
    """Keys of a tile, and the pairs of (row, key) that are not visible; None if all are visible."""

    keys: slice
    hidden: Tensor | None


def attend_capped(q: Tensor, k: Tensor, v: Tensor, block: Block, logits: Logits) -> Partial:
    """Return the block's partial. Logits are bounded, so that the least peak is finite and no row needs -inf."""
    out, lse = q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=sum_dtype(q.dtype))
    queries, outs, lses = (_by_key_head(x, k) for x in (q, out, lse.unsqueeze(-1)))
    keys, values, cap = _flat(k), _flat(v), logits.softcap
    tiles = Tiles(q, k, v, block, cap)
    for heads, rows, steps in tiles.loop():
        x = _rows_of(queries, heads, rows).mul_(logits.scale / cap)
        peak = x.new_full((*x.shape[:2], 1), -cap)
        total, sums = torch.zeros_like(peak), x.new_zeros((*x.shape[:2], v.shape[-1]))
        for run, hidden in steps:
            products = tiles.product(x, tiles.converted(keys, heads, run, 0), 0)
            visible = products if hidden is None else products.masked_fill(hidden, -torch.inf)
            top = visible.amax(-1, keepdim=True).tanh_().mul_(cap)
            new_peak = torch.maximum(peak, top)
            weights = tiles.tanh(products)
            torch.add(-new_peak, weights, alpha=cap, out=weights).exp_()
            if hidden is not None:
                weights.masked_fill_(hidden, 0.0)
            decay = torch.exp(peak.sub_(new_peak))
            total.mul_(decay).add_(weights.sum(-1, keepdim=True))
            sums.mul_(decay).baddbmm_(weights, tiles.converted(values, heads, run, 1))
            peak = new_peak
        _write(outs, heads, rows, sums.div_(total.masked_fill(total == 0, 1.0)))
        _write(lses, heads, rows, peak.add_(total.log()))
    return Partial(out, lse)


def backward_capped(q: Tensor, k: Tensor, v: Tensor, saved: BackwardInputs, block: Block, logits: Logits) -> Gradients:
    """Return the block's share of the gradients, in float32 or wider. `dlogit` has the factor `1 - tanh^2` more."""
    dq, dk, dv = (torch.zeros(x.shape, dtype=sum_dtype(x.dtype)) for x in (q, k, v))
    delta = (saved.out.to(dq.dtype) * saved.dout).sum(-1, keepdim=True)
    lse = saved.lse.to(dq.dtype).unsqueeze(-1)
    queries, dout, delta, lse, dqs = (_by_key_head(x, k) for x in (q, saved.dout, delta, lse, dq))
    keys, values, dks, dvs = (_flat(x) for x in (k, v, dk, dv))
    tiles, cap = Tiles(q, k, v, block, logits.softcap), logits.softcap
    for heads, rows, steps in tiles.loop():
        scaled = _rows_of(queries, heads, rows).mul_(logits.scale)
        x = scaled / cap
        arriving, shares, peak = (_rows_of(each, heads, rows) for each in (dout, delta, lse))
        total = torch.zeros_like(x)
        for run, hidden in steps:
            some_keys = tiles.converted(keys, heads, run, 0)
            tanh = tiles.tanh(tiles.product(x, some_keys, 0))
            weights = torch.add(-peak, tanh, alpha=cap, out=tiles.buffer(3, tanh.shape)).exp_()
            if hidden is not None:
                weights.masked_fill_(hidden, 0.0)
            dvs[heads, run].baddbmm_(weights.mT, arriving)
            dlogits = tiles.product(arriving, tiles.converted(values, heads, run, 1), 1).sub_(shares).mul_(weights)
            torch.ops.aten.tanh_backward.grad_input(dlogits, tanh, grad_input=dlogits)
            total.baddbmm_(dlogits, some_keys)
            dks[heads, run].baddbmm_(dlogits.mT, scaled)  # of x, products would be denormal under a large cap
        _write(dqs, heads, rows, total.mul_(logits.scale))
    return Gradients(dq, dk, dv)


class Tiles:
    """The tiles of a block, and memory for one tile at a time, since new memory costs more than its use."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, block: Block, softcap: float) -> None:
        self.group, self.count, self.dtype = q.shape[1] // k.shape[1], k.shape[0] * k.shape[1], sum_dtype(q.dtype)
        bounds = block.bounds()
        self.low, self.high = bounds.low.clamp(min=0), bounds.high.clamp(max=k.shape[2])
        self.queries = max(1, (ROWS if k.dtype == self.dtype else 2 * ROWS) // self.group)  # to convert keys less often
        rows = self.group * min(self.queries, q.shape[2])
        self.keys = max(1, min(AREA // rows, k.shape[2], k.shape[2] if k.dtype == self.dtype else CONVERTED_KEYS))
        heads = min(HEADS, self.count)
        self.is_low = softcap <= (LOW_CAP if q.dtype == torch.float32 else LOW_CAP_OF_HALF)
        self.taylor = torch.tensor(TAYLOR, dtype=self.dtype)
        self.logits = torch.empty(4, heads * rows * self.keys, dtype=self.dtype)
        sizes = (0 if x.dtype == self.dtype else heads * self.keys * x.shape[3] for x in (k, v))
        self.copies = [torch.empty(size, dtype=self.dtype) for size in sizes]

    def loop(self) -> Iterator[tuple[slice, slice, list[Step]]]:
        """Yield heads, queries and the steps over the keys that any of these queries sees."""
        queries = [slice(start, start + self.queries) for start in range(0, len(self.low), self.queries)]
        steps = [self._steps(rows) for rows in queries]
        for head in range(0, self.count, HEADS):
            for rows, some in zip(queries, steps, strict=True):
                yield slice(head, head + HEADS), rows, some

    def _steps(self, rows: slice) -> list[Step]:
        """Return the steps of some queries, with edges where all of them begin and end to see a key."""
        low, high = self.low[rows], self.high[rows]
        start, first, last, stop = int(low.min()), int(low.max()), int(high.min()), int(high.max())
        steps = []
        inner = {min(max(edge, start), stop) for edge in (first, last)}
        edges = sorted({start, stop, *inner}) if start < stop else []
        for left, right in pairwise(edges):
            for begin in range(left, right, self.keys):
                end = min(begin + self.keys, right)
                hidden = None
                if begin < first or end > last:
                    index = torch.arange(begin, end)
                    hidden = ((index < low[:, None]) | (index >= high[:, None])).repeat(self.group, 1)
                steps.append(Step(slice(begin, end), hidden))
        return steps

    def buffer(self, number: int, shape: torch.Size) -> Tensor:
        """Return one of four tensors of a tile's shape."""
        return self.logits[number, : shape.numel()].view(shape)

    def converted(self, x: Tensor, heads: slice, keys: slice, number: int) -> Tensor:
        """Return keys or values of some heads, in float32 or wider."""
        part = x[heads, keys]
        return part if part.dtype == self.dtype else self.copies[number][: part.numel()].view(part.shape).copy_(part)

    def product(self, rows: Tensor, keys: Tensor, number: int) -> Tensor:
        """Return the products of rows and keys, in the buffer of that number."""
        return torch.bmm(rows, keys.mT, out=self.buffer(number, torch.Size((*rows.shape[:2], keys.shape[1]))))

    def tanh(self, x: Tensor) -> Tensor:
        """Return tanh of buffer 0, in buffer 0 or 2; the others are overwritten. `torch.tanh` takes twice as long.

        Large values are `1 - 2 / (1 + e^2x)`. Small ones take a polynomial too, if the cap is large: each value is in
        one of two parts and 0 in the other, so that it does not depend on the other values of its tile.
        """
        square, result = self.buffer(1, x.shape), self.buffer(2, x.shape)
        if x.dtype == torch.float64:
            torch.tanh(x, out=result)
            return result
        if self.is_low:
            return _large_tanh(x)
        low, high = x.aminmax()
        large: Tensor | None = None
        if not max(-float(low), float(high)) <= SMALL:  # also where one is NaN
            large = self.buffer(3, x.shape)
            torch.ops.aten.hardshrink.out(x.clamp_(-10.0, 10.0), SMALL, out=large)
            x.sub_(large)
        torch.mul(x, x, out=square)
        torch.add(self.taylor[1], square, alpha=TAYLOR[2], out=result)
        torch.addcmul(self.taylor[0], result, square, out=result).mul_(square)
        torch.addcmul(x, x, result, out=result)
        return result if large is None else result.add_(_large_tanh(large))


def _large_tanh(x: Tensor) -> Tensor:
    """Replace x by tanh(x), with an error of float32's rounding of 1."""
    return x.mul_(2.0).exp_().add_(1.0).reciprocal_().mul_(-2.0).add_(1.0)


def _flat(x: Tensor) -> Tensor:
    """Return (batch * heads, tokens, dim)."""
    return x.reshape(-1, *x.shape[2:])


def _by_key_head(x: Tensor, k: Tensor) -> Tensor:
    """Return (batch * key heads, group, tokens, dim)."""
    return x.reshape(-1, x.shape[1] // k.shape[1], *x.shape[2:])


def _rows_of(x: Tensor, heads: slice, rows: slice) -> Tensor:
    """Return a copy of a tile's rows in float32 or wider, (heads, group * queries, dim)."""
    part = x[heads, :, rows]
    return part.to(sum_dtype(x.dtype), copy=True, memory_format=torch.contiguous_format).flatten(1, 2)


def _write(x: Tensor, heads: slice, rows: slice, tile: Tensor) -> None:
    """Write a tile's rows to a tensor of `_by_key_head`."""
    part = x[heads, :, rows]
    part.copy_(tile.view(part.shape))
