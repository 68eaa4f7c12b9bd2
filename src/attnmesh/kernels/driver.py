"""The interface of a kernel, and the loop that runs a kernel over the blocks of a problem, forward and backward.

A kernel attends one block. The loop merges the partials and sums the gradients, in float32 or wider. So kernels do not
depend on masks, layouts or positions.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from attnmesh.core.logits import Logits
from attnmesh.core.mask import Band, Mask
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
    """Tensors for the backward pass: out and lse over *all* keys, and the gradient of out."""

    out: Tensor
    lse: Tensor
    dout: Tensor

    def rows(self, queries: slice) -> "SavedForward":
        """Return the tensors of some of the queries."""
        return SavedForward(*(x[:, :, queries] for x in (self.out, self.lse, self.dout)))

    def sequences(self, some: slice) -> "SavedForward":
        """Return the tensors of some sequences."""
        return SavedForward(*(x[some] for x in (self.out, self.lse, self.dout)))


class Kernel(Protocol):
    """Attention over one block on one device. q, k and v are those of the block; heads may be grouped."""

    @property
    def name(self) -> str:
        """The kernel's name, as in `kernel=`."""
        ...

    def unsupported_reason(self, q: Tensor, k: Tensor, v: Tensor, capped: bool = False) -> str | None:
        """Return why the kernel does not support such tensors, with capped logits or not, or None if it does."""
        ...

    def cut(self, band: Band, q: Tensor, k: Tensor, v: Tensor) -> list[Block]:
        """Return the blocks into which such a problem is cut for this kernel."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, block: Block, logits: Logits) -> Partial:
        """Return the block's partial."""
        ...

    def backward(self, q: Tensor, k: Tensor, v: Tensor, saved: SavedForward, block: Block, logits: Logits) -> Gradients:
        """Return the block's share of the gradients. Weights are `e^(logit - lse)`, with the lse over all keys."""
        ...


class CacheKernel(ABC):
    """A kernel that also attends to a cache in place, and reads its length on the device."""

    @abstractmethod
    def attend_cache(self, query: DecodeQuery, view: CacheView) -> Partial:
        """Return the partial of the last queries; NaN if there are more tokens than capacity or fewer than queries."""


Counts = Sequence[int] | None
"""Keys that each sequence of a batch can see, of the first ones; None for all keys."""


def visible_counts(positions: Tensor, key_lengths: Tensor | None) -> list[int] | None:
    """Return how many of ascending key positions are below each sequence's number of real keys."""
    if key_lengths is None:
        return None
    found: list[int] = torch.searchsorted(positions, key_lengths.to(positions.device)).tolist()
    return found


def _sequences(counts: Sequence[int]) -> list[tuple[slice, int]]:
    """Return runs of sequences with one count."""
    edges = [0, *(i for i in range(1, len(counts)) if counts[i] != counts[i - 1]), len(counts)]
    return [(slice(start, stop), counts[start]) for start, stop in pairwise(edges)]


def forward(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, band: Band | None, logits: Logits, counts: Counts = None
) -> Partial:
    """Return attention over the band, in q's dtype or wider; empty rows give the identity `(0, -inf)`.

    Without a band every row sees every key.
    """
    if counts:
        parts = [
            forward(kernel, q[some], k[some], v[some], (band or _full(q, k)).first(count), logits)
            for some, count in _sequences(counts)
        ]
        return parts[0] if len(parts) == 1 else Partial(*(torch.cat(x) for x in zip(*parts, strict=True)))
    whole = Block(slice(0, q.shape[2]), slice(0, k.shape[2]))
    blocks = ([whole] if band is None else kernel.cut(band, q, k, v)) if q.shape[0] else []
    sign, logits = logits.positive()  # kernels need a positive scale: they scale after adding -inf
    q = q if sign == 1 else q * sign
    with _without_autocast(q):
        if _is_one_block(blocks, q, k):
            return _attend(kernel, q, k, v, blocks[0], logits)
        return _merged(kernel, q, k, v, blocks, logits)


def backward(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    saved: SavedForward,
    band: Band,
    logits: Logits,
    counts: Counts = None,
) -> Gradients:
    """Return the gradients over the band, in the inputs' dtype or wider."""
    if counts:
        parts = [
            backward(kernel, q[some], k[some], v[some], saved.sequences(some), band.first(count), logits)
            for some, count in _sequences(counts)
        ]
        return parts[0] if len(parts) == 1 else Gradients(*(torch.cat(x) for x in zip(*parts, strict=True)))
    blocks = kernel.cut(band, q, k, v) if q.shape[0] else []
    sign, logits = logits.positive()  # kernels need a positive scale: they scale after adding -inf
    q = q if sign == 1 else q * sign
    saved = _without_empty_rows(saved)
    with _without_autocast(q):
        if _is_one_block(blocks, q, k):
            dq, dk, dv = kernel.backward(q, k, v, saved, blocks[0], logits)
        else:
            dq, dk, dv = _summed(kernel, q, k, v, saved, blocks, logits)
    return Gradients(dq if sign == 1 else dq * sign, dk, dv)


def _full(q: Tensor, k: Tensor) -> Band:
    """Return the band under which every row sees every key."""
    return Band.of(Mask(), torch.arange(q.shape[2]), k.shape[2])


def _without_autocast(q: Tensor) -> AbstractContextManager[object]:
    """Return a context without autocast, which would round more than the caller's dtype does."""
    on = torch.is_autocast_enabled(q.device.type)
    return torch.autocast(q.device.type, enabled=False) if on else nullcontext()


def _without_empty_rows(saved: SavedForward) -> SavedForward:
    """Return the tensors with lse +inf and dout 0 in empty rows, so that all their weights are e^-inf = 0."""
    empty = saved.lse == -torch.inf
    lse, dout = saved.lse.masked_fill(empty, torch.inf), saved.dout.masked_fill(empty.unsqueeze(-1), 0.0)
    return SavedForward(saved.out, lse, dout)


def _merged(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, blocks: list[Block], logits: Logits) -> Partial:
    overlap = any(after.queries.start < before.queries.stop for before, after in pairwise(blocks))
    total = identity(q, v, wide(q.dtype) if overlap else q.dtype)
    done = 0  # rows from here on have no partial yet: blocks are in order of their first row
    for block in blocks:
        rows = Partial(*(x[:, :, block.queries] for x in total))
        partial = _attend(kernel, *_part(q, k, v, block), block, logits)
        if block.queries.start < done:
            partial = join([rows, partial])
        rows.out.copy_(partial.out)
        rows.lse.copy_(partial.lse)
        done = max(done, block.queries.stop)
    return total


def _summed(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, saved: SavedForward, blocks: list[Block], logits: Logits
) -> Gradients:
    total = Gradients(*(torch.zeros_like(x, dtype=wide(x.dtype)) for x in (q, k, v)))
    for block in blocks:
        part = kernel.backward(*_part(q, k, v, block), saved.rows(block.queries), block, logits)
        for gradient, share in zip(_part(*total, block), part, strict=True):
            gradient.add_(share)
    return total


def _attend(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, block: Block, logits: Logits) -> Partial:
    """Return the block's partial, with the identity in empty rows, for which kernels differ."""
    out, lse = kernel.attend(q, k, v, block, logits)
    empty = block.empty_rows().to(out.device)
    if len(empty):
        out, lse = out.index_fill(2, empty, 0.0), lse.index_fill(2, empty, -torch.inf)
    return Partial(out, lse)


def _part(q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor, Tensor]:
    return q[:, :, block.queries], k[:, :, block.keys], v[:, :, block.keys]


def identity(q: Tensor, v: Tensor, dtype: torch.dtype) -> Partial:
    """Return the identity `(0, -inf)` for the queries, with `out` in the given dtype."""
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=dtype)
    return Partial(out, q.new_full(q.shape[:-1], -torch.inf, dtype=wide(q.dtype)))


def _is_one_block(blocks: Sequence[Block], q: Tensor, k: Tensor) -> bool:
    """Return True if one block is the whole problem, so that nothing is copied, merged or summed."""
    spans = [(block.queries, block.keys) for block in blocks]
    return spans == [(slice(0, q.shape[2]), slice(0, k.shape[2]))]
