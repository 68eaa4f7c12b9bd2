"""Input of a kernel in a decode step: its queries, and the tensors of a rank's cache shard, on its device.

The number of tokens is in a tensor too, so that a kernel that reads them in place needs no value from the CPU.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.core.mask import Mask
from attnmesh.core.partial import Partial, sum_dtype
from attnmesh.core.scaling import Scaling
from attnmesh.core.storage import columns_of, storage_of
from attnmesh.kernels.padding import Padding
from attnmesh.runtime.mapped_file import MappedFile

LENGTH, USED, FORGOTTEN_BLOCKS = range(3)
"""Indices of `device_counts`: tokens of all ranks, tokens in the slots, and, if the cache forgets, forgotten blocks."""

LENGTH_AND_USED = slice(USED + 1)
"""The first two entries of `device_counts`, which each cache has."""

NOWHERE = 2**63 - 1
"""Position of a slot without a token, which no query sees."""


@dataclass(eq=False, slots=True)
class DecodeQuery:
    """The queries of a decode step, and the options of its attention."""

    q: Tensor
    """(batch, heads, queries, dim)."""
    mask: Mask
    scaling: Scaling
    capacity: int
    sinks: Tensor | None = None
    """(heads,)."""
    partial_block: int | None = None
    """Slots per block; each block gives one partial, and these are merged along a tree."""
    into: Partial | None = None
    """Tensors for the result."""
    key_lengths: Tensor | None = None
    """(batch,), real keys per sequence."""
    other_partial: Partial | None = None
    """Attention of the queries over keys that are not in the cache."""

    def sequence(self, index: int) -> "DecodeQuery":
        """Return the query of one sequence, which has a cache of its own."""
        one = slice(index, index + 1)
        into, other_partial = (part and Partial(*(x[one] for x in part)) for part in (self.into, self.other_partial))
        key_lengths = None if self.key_lengths is None else self.key_lengths[one]
        return replace(self, q=self.q[one], into=into, key_lengths=key_lengths, other_partial=other_partial)


class CacheView(NamedTuple):
    """Slots for tokens, the first of which are used, in the order of their tokens."""

    keys: Tensor
    """(batch, kv_heads, slots, dim), or rows of `core.storage`."""
    values: Tensor
    """(batch, kv_heads, slots, value_dim), or rows: those of the keys if values are a prefix of them."""
    token_index: Tensor
    """(slots,), the token in each slot."""
    device_counts: Tensor
    """(2 or 3,), by `LENGTH`, `USED` and `FORGOTTEN_BLOCKS`."""
    padding: Padding | None
    value_dim: int
    earlier_pieces: "tuple[CacheView, ...]" = ()
    """Earlier tokens of this rank, in memory or files of their own."""
    file: MappedFile | None = None
    """File whose bytes the slots are."""

    def positions(self) -> Tensor:
        """Return the position of each slot's token in its sequence, (1 or batch, slots), -1 for padding."""
        return self.token_index[None] if self.padding is None else self.padding.positions

    @property
    def unscaled(self) -> tuple[Tensor, Tensor]:
        """Keys and values without the scales of rows in 8 bits, which follow them in memory."""
        return self.keys[..., : columns_of(self.keys)], self.values[..., : self.value_dim]

    def attended(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return keys and values for the choice of a kernel: of rows in 8 bits only shape and dtype count."""
        if storage_of(self.keys) is None:
            return self.keys, self.values
        *shape, _ = self.keys.shape
        like = torch.empty(1, dtype=sum_dtype(dtype), device=self.keys.device)
        return like.expand(*shape, columns_of(self.keys)), like.expand(*shape, self.value_dim)

    def without_free_slots(self) -> "CacheView":
        """Return the slots that hold tokens, without those of earlier pieces.

        On a device all slots stay: the CPU would wait to read how many hold tokens. Free slots are at `NOWHERE`.
        """
        if self.device_counts.is_cpu:
            used = int(self.device_counts.tolist()[USED])
            padding = self.padding and self.padding._replace(positions=self.padding.positions[:, :used])
            tensors = self.keys[:, :, :used], self.values[:, :, :used], self.token_index[:used]
            return CacheView(*tensors, self.device_counts, padding, self.value_dim)
        is_used = torch.arange(self.keys.shape[2], device=self.device_counts.device) < self.device_counts[USED]
        padding = self.padding and self.padding._replace(positions=self.padding.positions.where(is_used, NOWHERE))
        return self._replace(token_index=self.token_index.where(is_used, NOWHERE), padding=padding, earlier_pieces=())

    def count_used_slots(self) -> int:
        """Return how many slots hold tokens, without those of earlier pieces. The CPU waits for the device."""
        return int(self.device_counts[USED])

    @property
    def cpu_part(self) -> "CacheView | None":
        """View of the earlier tokens that are in CPU memory, where the slots are on a device; None without any."""
        if not self.earlier_pieces or self.keys.is_cpu:
            return None
        pieces = [piece for piece in self.earlier_pieces if piece.keys.is_cpu]
        return pieces[-1]._replace(earlier_pieces=tuple(pieces[:-1])) if pieces else None

    @property
    def device_part(self) -> "CacheView":
        """The view without what is in CPU memory."""
        return self._replace(earlier_pieces=tuple(piece for piece in self.earlier_pieces if not piece.keys.is_cpu))

    def first(self, slots: int) -> "CacheView":
        """Return the first `slots` slots as used, and the slot after them, without padding."""
        keys, values, index = (
            self.keys[:, :, : slots + 1],
            self.values[:, :, : slots + 1],
            self.token_index[: slots + 1],
        )
        length = self.device_counts[LENGTH]
        device_counts = torch.stack((length, torch.full_like(length, slots)))
        return CacheView(keys, values, index, device_counts, None, self.value_dim, file=self.file)

    def bounds(self, queries: int, mask: Mask) -> tuple[Tensor, Tensor]:
        """Return the first and the last position that each of the last `queries` tokens sees, (1 or batch, queries)."""
        length = self.device_counts[LENGTH]
        indices = (length - queries + torch.arange(queries, device=self.device_counts.device)).clamp(min=0)
        if self.padding is None:
            return mask.bounds(indices[None])
        real, positions = self.padding.last(indices)
        first, last = mask.bounds(positions)
        return first, last.masked_fill(~real, -1)
