"""What a kernel is, and the one loop that drives every kernel over a problem's blocks, forward and backward.

A kernel attends one block. Here its partials are merged and its gradients summed, in float32 or wider, so no kernel
knows of masks, layouts or positions and no mask or layout knows of kernels.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from attnmesh.core.mask import Band
from attnmesh.core.partial import Partial, join, wide
from attnmesh.kernels.blocks import Block
from attnmesh.kernels.cache_view import CacheView, DecodeQuery


class Gradients(NamedTuple):
    """The gradients of q, k and v."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class SavedForward:
    """What the whole attention came to, as the backward pass needs it: its out and lse over *all* keys, and `dout`."""

    out: Tensor
    lse: Tensor
    dout: Tensor

    def rows(self, queries: slice) -> "SavedForward":
        """The same for some of the queries."""
        return SavedForward(*(x[:, :, queries] for x in (self.out, self.lse, self.dout)))


class Kernel(Protocol):
    """One device's attention over one block; q, k and v are the block's own rows and keys, heads may be grouped."""

    @property
    def name(self) -> str:
        """What `kernel=` calls it."""
        ...

    def unsupported_reason(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        """Why it cannot serve tensors like these, or None when it can."""
        ...

    def cut(self, band: Band, q: Tensor, k: Tensor, v: Tensor) -> list[Block]:
        """The blocks it wants such a problem cut into."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> Partial:
        """The block's partial."""
        ...

    def backward(self, q: Tensor, k: Tensor, v: Tensor, answer: SavedForward, block: Block, scale: float) -> Gradients:
        """The block's share of the gradients, given the answer over all keys: `p = e^(logit - lse)`."""
        ...


class CacheKernel(ABC):
    """A kernel that also attends to a cache where it lies, whose lengths are on the device: the host asks nothing."""

    @abstractmethod
    def attend_cache(self, question: DecodeQuery, slots: CacheView) -> Partial:
        """The partial of the last queries; NaN if the cache holds more than its capacity, or fewer than the queries."""


def forward(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, band: Band | None, scale: float) -> Partial:
    """Attention over the band, in q's dtype or wider; rows that see nothing give the identity `(0, -inf)`.

    Without a band every row sees every key: for a few rows that is one block, and need not be found out.
    """
    whole = Block(slice(0, q.shape[2]), slice(0, k.shape[2]))
    blocks = ([whole] if band is None else kernel.cut(band, q, k, v)) if q.shape[0] else []
    sign, scale = _positive(scale)
    q = q if sign == 1 else q * sign
    with _as_given(q):
        if _whole(blocks, q, k):
            return _attend(kernel, q, k, v, blocks[0], scale)
        return _merged(kernel, q, k, v, blocks, scale)


def backward(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, answer: SavedForward, band: Band, scale: float
) -> Gradients:
    """The gradients over the band, in the inputs' dtype or wider."""
    blocks = kernel.cut(band, q, k, v) if q.shape[0] else []
    sign, scale = _positive(scale)
    q = q if sign == 1 else q * sign
    with _as_given(q):
        if _whole(blocks, q, k):
            dq, dk, dv = kernel.backward(q, k, v, _seen(answer), blocks[0], scale)
        else:
            dq, dk, dv = _summed(kernel, q, k, v, _seen(answer), blocks, scale)
    return Gradients(dq if sign == 1 else dq * sign, dk, dv)


def _as_given(q: Tensor) -> AbstractContextManager[object]:
    """The dtype is the caller's: under autocast nothing here is to round further."""
    on = torch.is_autocast_enabled(q.device.type)
    return torch.autocast(q.device.type, enabled=False) if on else nullcontext()


def _seen(answer: SavedForward) -> SavedForward:
    """A row that saw nothing has lse -inf: measured from +inf all its weights are e^-inf = 0, and nothing is asked."""
    blind = answer.lse == -torch.inf
    lse, dout = answer.lse.masked_fill(blind, torch.inf), answer.dout.masked_fill(blind.unsqueeze(-1), 0.0)
    return SavedForward(answer.out, lse, dout)


def _merged(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, blocks: list[Block], scale: float) -> Partial:
    total = identity(q, v, wide(q.dtype) if _overlap(blocks) else q.dtype)
    fresh = 0  # rows from here on have no partial yet: blocks come in order of their first row
    for block in blocks:
        rows = Partial(*(x[:, :, block.queries] for x in total))
        partial = _attend(kernel, *_part(q, k, v, block), block, scale)
        if block.queries.start < fresh:
            partial = join([rows, partial])
        rows.out.copy_(partial.out)
        rows.lse.copy_(partial.lse)
        fresh = max(fresh, block.queries.stop)
    return total


def _summed(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, answer: SavedForward, blocks: list[Block], scale: float
) -> Gradients:
    total = Gradients(*(torch.zeros_like(x, dtype=wide(x.dtype)) for x in (q, k, v)))
    for block in blocks:
        part = kernel.backward(*_part(q, k, v, block), answer.rows(block.queries), block, scale)
        for grown, share in zip(_part(*total, block), part, strict=True):
            grown.add_(share)
    return total


def _positive(scale: float) -> tuple[int, float]:
    """The scale as a sign for q, 0 for none, and a positive size: kernels mask with -inf first and scale after."""
    return (0, 1.0) if scale == 0 else (1 if scale > 0 else -1, abs(scale))


def _attend(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> Partial:
    """The block's partial, with the identity in rows that see nothing, whatever the kernel says of those."""
    out, lse = kernel.attend(q, k, v, block, scale)
    blind = block.blind().to(out.device)
    if len(blind):
        out, lse = out.index_fill(2, blind, 0.0), lse.index_fill(2, blind, -torch.inf)
    return Partial(out, lse)


def _part(q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor, Tensor]:
    return q[:, :, block.queries], k[:, :, block.keys], v[:, :, block.keys]


def identity(q: Tensor, v: Tensor, dtype: torch.dtype) -> Partial:
    """The partial of queries that have seen nothing yet, its `out` in that dtype."""
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=dtype)
    return Partial(out, q.new_full(q.shape[:-1], -torch.inf, dtype=wide(q.dtype)))


def _whole(blocks: Sequence[Block], q: Tensor, k: Tensor) -> bool:
    """Whether one block is the whole problem: then nothing needs to be copied, merged or summed."""
    spans = [(block.queries, block.keys) for block in blocks]
    return spans == [(slice(0, q.shape[2]), slice(0, k.shape[2]))]


def _overlap(blocks: Sequence[Block]) -> bool:
    return any(after.queries.start < before.queries.stop for before, after in pairwise(blocks))
