"""Tensors of a rank's cache shard, on its device.

The number of tokens is in a tensor too, so that a kernel that reads them in place needs no value from the host.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnmesh.core.mask import Mask
from attnmesh.core.partial import Partial, sum_dtype
from attnmesh.core.scaling import Scaling
from attnmesh.core.storage import columns_of, storage_of
from attnmesh.runtime.mapped_file import MappedFile

NOWHERE = 2**63 - 1
"""Position of a slot without a token, which no query sees."""


class Padding(NamedTuple):
    """Padding of a batch: which tokens are real, and their positions. Updated in place as the cache grows."""

    token_mask: Tensor  # (batch, capacity), True for real tokens, of all ranks
    positions: Tensor  # (batch, slots), position of each slot's token in its sequence, -1 for padding
    lengths: Tensor  # (batch,), real tokens per sequence

    @staticmethod
    def none(batch: int, capacity: int, token_index: Tensor, length: Tensor) -> "Padding":
        """Return a padding where all tokens so far are real; `token_index` is the token in each slot."""
        with torch.inference_mode(False):  # tensors that can be written to in any mode
            everything = torch.ones(batch, capacity, dtype=torch.bool, device=token_index.device)
            return Padding(everything, token_index.expand(batch, -1).clone(), length.expand(batch).clone())

    def add(self, start: Tensor, real: Tensor, new: Tensor, slots: Tensor) -> None:
        """Add tokens from `start` on, with their mask `real`; the tokens `new` among them are in `slots`."""
        tokens = start + torch.arange(real.shape[1], device=real.device)
        self.token_mask.index_copy_(1, tokens, real)
        positions = torch.where(real, self.lengths[:, None] + real.cumsum(1) - 1, -1)
        self.positions.index_copy_(1, slots, positions.index_select(1, new))
        self.lengths.add_(real.sum(1))

    def last(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return which of these last tokens are real, and the position of each in its sequence."""
        real = self.token_mask.index_select(1, tokens)
        after = real.flip(1).cumsum(1).flip(1)  # real tokens from this one on
        return real, (self.lengths[:, None] - after).clamp(min=0)

    def cut(self, length: int, before: int) -> None:
        """Remove the tokens from `length` up to `before`."""
        self.lengths.sub_(self.token_mask[:, length:before].sum(1))
        self.token_mask[:, length:] = True

    def reordered(self, index: Tensor) -> "Padding":
        """Return a padding whose sequence b is the sequence `index[b]` of this one."""
        with torch.inference_mode(False):
            return Padding(*(each.index_select(0, index) for each in self))

    def resized(self, capacity: int, positions: Tensor) -> "Padding":
        """Return the padding with another capacity and other slots."""
        real = pad(self.token_mask, (0, capacity - self.token_mask.shape[1]), value=True)
        return Padding(real, positions, self.lengths)


class DecodeQuery(NamedTuple):
    """The queries of a decode step, and the options of its attention."""

    q: Tensor
    mask: Mask
    scaling: Scaling
    capacity: int
    sinks: Tensor | None = None
    partial_block: int | None = None  # slots per block; each block gives one partial, and these are merged along a tree
    into: Partial | None = None  # tensors for the result
    key_lengths: Tensor | None = None  # (batch,), real keys per sequence
    other_keys: Partial | None = None  # of keys that are not in the cache

    def sequence(self, index: int) -> "DecodeQuery":
        """Return the query of one sequence, which has a cache of its own."""
        one = slice(index, index + 1)
        into = None if self.into is None else Partial(*(x[one] for x in self.into))
        return self._replace(q=self.q[one], into=into)


class CacheView(NamedTuple):
    """Slots for tokens, the first of which are used, in the order of their tokens."""

    keys: Tensor  # (batch, kv_heads, slots, dim), or rows of `core.storage`
    values: Tensor  # (batch, kv_heads, slots, value_dim), or rows: those of the keys if values are a prefix of them
    token_index: Tensor  # (slots,), the token in each slot
    state: Tensor  # tokens of all ranks, tokens in these slots; of a cache that forgets, also the blocks forgotten
    padding: Padding | None
    value_dim: int
    shared: "tuple[CacheView, ...]" = ()  # earlier tokens of this rank, in memory that other caches read too
    file: MappedFile | None = None  # whose bytes the slots are

    def positions(self) -> Tensor:
        """Return the position of each slot's token in its sequence, (1 or batch, slots), -1 for padding."""
        return self.token_index[None] if self.padding is None else self.padding.positions

    @property
    def unscaled(self) -> tuple[Tensor, Tensor]:
        """Keys and values without the scales of rows in 8 bits, which follow them in memory."""
        return self.keys[..., : columns_of(self.keys)], self.values[..., : self.value_dim]

    def attended(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return keys and values as a kernel attends them, for its choice: of rows in 8 bits shape and dtype alone."""
        if storage_of(self.keys) is None:
            return self.keys, self.values
        *shape, _ = self.keys.shape
        like = torch.empty(1, dtype=sum_dtype(dtype), device=self.keys.device)
        return like.expand(*shape, columns_of(self.keys)), like.expand(*shape, self.value_dim)

    def held(self) -> "CacheView":
        """Return the slots that hold tokens, without those of `shared`.

        On a device all slots stay, for the host does not read how many hold tokens: the others are at `NOWHERE`.
        """
        if self.state.device.type == "cpu":
            used = int(self.state.tolist()[1])
            padding = self.padding and self.padding._replace(positions=self.padding.positions[:, :used])
            tensors = self.keys[:, :, :used], self.values[:, :, :used], self.token_index[:used]
            return CacheView(*tensors, self.state, padding, self.value_dim)
        held = torch.arange(self.keys.shape[2], device=self.state.device) < self.state[1]
        padding = self.padding and self.padding._replace(positions=self.padding.positions.where(held, NOWHERE))
        return self._replace(token_index=self.token_index.where(held, NOWHERE), padding=padding, shared=())

    @property
    def on_host(self) -> "CacheView | None":
        """View of the earlier tokens that are in host memory, where the slots are on a device; None without any."""
        if not self.shared or self.keys.device.type == "cpu":
            return None
        pieces = [piece for piece in self.shared if piece.keys.device.type == "cpu"]
        return pieces[-1]._replace(shared=tuple(pieces[:-1])) if pieces else None

    @property
    def on_device(self) -> "CacheView":
        """The view without what is in host memory."""
        return self._replace(shared=tuple(piece for piece in self.shared if piece.keys.device.type != "cpu"))

    def first(self, slots: int) -> "CacheView":
        """Return the first slots alone, and the one after them, without padding."""
        keys, values, index = (
            self.keys[:, :, : slots + 1],
            self.values[:, :, : slots + 1],
            self.token_index[: slots + 1],
        )
        state = torch.stack((self.state[0], torch.full_like(self.state[0], slots)))
        return CacheView(keys, values, index, state, None, self.value_dim, file=self.file)

    def bounds(self, rows: int, mask: Mask) -> tuple[Tensor, Tensor]:
        """Return the first and the last position that each of the last `rows` queries sees, (1 or batch, rows)."""
        tokens = (self.state[0] - rows + torch.arange(rows, device=self.state.device)).clamp(min=0)
        if self.padding is None:
            return mask.bounds(tokens[None])
        real, positions = self.padding.last(tokens)
        first, last = mask.bounds(positions)
        return first, last.masked_fill(~real, -1)
