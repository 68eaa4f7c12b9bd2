"""Shard of a cache in one memory, which is reserved for all tokens at once."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial as partial_of
from typing import Any, Self

import torch
from torch import Tensor

from attnmesh.cache.block_cyclic import BlockCyclic
from attnmesh.cache.cache_config import CacheConfig
from attnmesh.cache.cache_shard import CacheShard
from attnmesh.cache.frozen_piece import FrozenPiece, join_slots
from attnmesh.core.storage import empty_rows, width_in_memory
from attnmesh.core.turns import Turn
from attnmesh.kernels.cache_view import FORGOTTEN_BLOCKS, LENGTH, LENGTH_AND_USED, USED
from attnmesh.kernels.native.append import native_append
from attnmesh.kernels.padding import Padding
from attnmesh.mesh.axes import Axis
from attnmesh.runtime.memory import with_huge_pages
from attnmesh.runtime.tensors import Tensors
from attnmesh.runtime.unbroken import Action

SLACK = 2
"""Tokens by which a prefill shard may exceed an even share: each of a zigzag's two chunks is rounded up."""


def usual_slots(config: CacheConfig, turn: Turn) -> int:
    """Return the slots of a rank for tokens that are spread as the ranks' shares."""
    share = turn.share(config.kept) + turn.width + SLACK
    return min(config.capacity, share if config.mask is None else share + turn.width + spare_slots(config, turn))


SPARE_PARTS = 8
"""Parts of a window, one of which is spare: a token moves about eight times, and the memory is an eighth larger."""


def spare_slots(config: CacheConfig, turn: Turn) -> int:
    """Return the slots that are free after tokens were forgotten, so that few tokens are moved per new one."""
    return max(turn.width, config.kept * turn.width // turn.period // SPARE_PARTS)


def allocated_slots(slots: int, block: int) -> int:
    """Return how many slots are allocated: `slots`, and at least one more, in whole blocks for `KVCache.pages`."""
    return -(-(slots + 1) // block) * block


def shard_bytes(config: CacheConfig, turn: Turn, head_ranks: int, device: torch.device) -> int:
    """Return the bytes of keys and values of one rank's shard of this configuration."""
    slot_count = allocated_slots(usual_slots(config, turn), config.block)
    dtype = config.row_dtype
    width = sum(width_in_memory(width, dtype, device) for width in config.row_widths)
    return slot_count * config.batch * (config.kv_heads // head_ranks) * width * dtype.itemsize


class MemoryShard(CacheShard):
    """Tokens of one rank on its device. Forks share whole blocks of them as `earlier_pieces`."""

    def __init__(
        self,
        config: CacheConfig,
        heads_axis: Axis,
        block_cyclic: BlockCyclic,
        device: torch.device,
        index: int,
        memory: tuple[list[Tensor], Tensor] | None = None,
    ) -> None:
        """Make a shard without tokens.

        `memory` are keys and values, and the token of each slot, to be moved by `resize`; None reserves the usual one.
        """
        super().__init__(config, heads_axis, block_cyclic, device, index)
        self.slots = self._usual_slots(config)
        with torch.inference_mode(False):  # tensors that can be written to in any mode
            self.kv_tensors, self.token_index = self._allocate() if memory is None else memory
        self.has_spare = False  # a long append has made the shard larger than it has to be

    def _allocate(self) -> tuple[list[Tensor], Tensor]:
        """Return memory for the keys and values of all slots, and for the token in each."""
        # The extra slot takes writes of other ranks' tokens, so that no step asks the device which rank owns a token.
        config = self.config
        slot_count = allocated_slots(self.slots, config.block)
        shape = config.batch, config.kv_heads // self.heads_axis.size, slot_count
        make = partial_of(empty_rows, dtype=config.row_dtype, device=self.device)
        kv_tensors = [with_huge_pages(make((*shape, width)), 2) for width in config.row_widths]
        return kv_tensors, torch.zeros(slot_count, dtype=torch.int64, device=self.device)

    def _usual_slots(self, config: CacheConfig) -> int:
        return usual_slots(config, self.turn)

    def append_own(self, new: Tensors, token_mask: Tensor | None, length_and_used: tuple[int, int] | None) -> None:
        """Add this rank's share of the new tokens; `new` has all tokens and heads.

        `length_and_used` are the tokens so far, on all ranks and on this one; None where the device alone knows them.
        """
        new_count = new[0].shape[2]
        plain = new_count > 0 and self.padding is None and token_mask is None  # all ranks record padding
        if length_and_used is None or not plain or not self.try_append_run(new, new_count, *length_and_used):
            self._append_by_device(new, new_count, token_mask)

    def _write_run(self, new: Sequence[Tensor], new_count: int, length: int, used: int) -> None:
        """Write new tokens after those in the shard. They have this rank's heads."""
        if self.device.type == "cuda" or not native_append(self.kv_tensors, new, self.token_index, self.device_counts):
            for x, tensor in zip(self.kv_tensors, new, strict=True):
                x[:, :, used : used + new_count] = tensor
            torch.arange(length, length + new_count, out=self.token_index[used : used + new_count])
            self.device_counts[LENGTH_AND_USED].add_(new_count)

    def _append_by_device(self, new: Tensors, new_count: int, token_mask: Tensor | None) -> None:
        """Add this rank's share of the new tokens, padded or not, wherever they lie. The CPU reads no count."""
        length, used = self.device_counts[LENGTH_AND_USED].unbind()
        offsets = torch.arange(new_count, device=self.device)
        indices = length + offsets
        alone = self.turn.width == self.turn.period
        if alone:  # saves a few small kernels in a step of a graph
            slots = (used + offsets).clamp(max=self.slots)
        else:
            is_own = self.turn.holds(indices) & (indices < self.config.capacity)
            slots = torch.where(is_own, used + is_own.cumsum(0) - 1, self.slots).clamp(max=self.slots)
        rows = [*map(self.config.rows_of, self.own_heads(new))]
        self._write_slots(rows, indices, slots)
        self._pad(indices, slots, new_count, token_mask)
        if alone:
            self.device_counts[LENGTH_AND_USED].add_(new_count)
            self.device_counts[USED].clamp_(max=self.slots)
        else:
            self.device_counts[LENGTH_AND_USED] += torch.stack((torch.full_like(length, new_count), is_own.sum()))

    def append_rows_at(self, new: Tensors, indices: Tensor, new_count: int, token_mask: Tensor | None) -> None:
        """Add rows of the given tokens with this rank's heads; all ranks together add `new_count`."""
        order = indices.argsort()
        slots = self.used_slots + torch.arange(len(order), device=self.device)
        self._write_slots([x.index_select(2, order) for x in new], indices[order], slots)
        self._pad(indices[order], slots, new_count, token_mask)
        self.device_counts[LENGTH_AND_USED] += torch.tensor([new_count, len(order)], device=self.device)

    def _write_slots(self, new: Sequence[Tensor], indices: Tensor, slots: Tensor) -> None:
        """Write rows of tokens with this rank's heads into slots."""
        for x, tensor in zip(self.kv_tensors, new, strict=True):
            x.index_copy_(2, slots, tensor)
        self.token_index.index_copy_(0, slots, indices)

    def _pad(self, indices: Tensor, slots: Tensor, new_count: int, token_mask: Tensor | None) -> None:
        """Record which of `new_count` new tokens are padding, before the length includes them."""
        if token_mask is None and self.padding is None:
            return
        length = self.device_counts[LENGTH]
        config = self.config
        self.padding = self.padding or Padding.none(config.batch, config.capacity, self.token_index, length)
        all_real = torch.ones(config.batch, new_count, dtype=torch.bool, device=self.device)
        self.padding.add(
            length, all_real if token_mask is None else token_mask.to(self.device), indices - length, slots
        )

    def mark_present(self, length: int, token_mask: Tensor | None, oldest: int) -> int:
        """Mark the tokens from `oldest` up to `length` as present. Return how many of them this rank holds."""
        gone = self.turn.count(oldest)
        used = self.turn.count(length) - gone
        counts = [length, used, gone // self.config.block][: len(self.device_counts)]
        self.device_counts.copy_(torch.tensor(counts, device="cpu"))
        if token_mask is not None:
            zero = torch.zeros_like(self.device_counts[LENGTH])
            slots = torch.arange(used, device=self.device)
            self.padding = Padding.none(self.config.batch, self.config.capacity, self.token_index, zero)
            self.padding.add(zero, token_mask.to(self.device), self.token_index[:used], slots)
        return used

    def actions_to_truncate(self, length: int) -> list[Action]:
        """Return actions that remove the tokens from `length` on."""
        count = self.count_before(length)
        actions = list[Action]()
        if count < self.earlier_tokens:
            actions.append(partial_of(vars(self).update, self._unshared(count)))
            count %= self.config.block  # those of the block that is copied
        else:
            count -= self.earlier_tokens
        if self.padding is not None:
            actions.append(partial_of(self._cut_padding, length))
        return [*actions, partial_of(self._set_counts, length, count)]

    def _cut_padding(self, length: int) -> None:
        assert self.padding is not None
        self.padding.cut(length)

    def _set_counts(self, length: int, used: int) -> None:
        """Set the counts of tokens, on all ranks and in this shard."""
        self.device_counts[LENGTH], self.device_counts[USED] = length, used
        if not length:
            self.device_counts[FORGOTTEN_BLOCKS:].zero_()

    def actions_to_reorder(self, index: Tensor) -> list[Action]:
        """Return actions that replace sequence b by sequence `index[b]`; the batch may change."""
        padding = self.padding and self.padding.reordered(index)
        fields = {"_viewed": None, "padding": padding, "earlier_pieces": self._reordered_pieces(index)}
        if len(index) == self.config.batch:
            return [*self._actions_in_place(index), partial_of(vars(self).update, fields)]
        with torch.inference_mode(False):
            blank = [empty_rows((len(index), *x.shape[1:]), x.dtype, x.device) for x in self.kv_tensors]
            for x, new in zip(self.kv_tensors, blank, strict=True):
                torch.index_select(x, 0, index, out=new)
        return [partial_of(vars(self).update, fields, kv_tensors=blank, config=replace(self.config, batch=len(index)))]

    def _reordered_pieces(self, index: Tensor) -> tuple[FrozenPiece, ...]:
        """Return the earlier pieces with sequence `index[b]` in place of b."""
        return tuple(piece.reordered(index, self.config.block) for piece in self.earlier_pieces)

    def _actions_in_place(self, index: Tensor) -> list[Action]:
        """Return actions that reorder as many sequences in their own memory. The temporary copy is one head."""
        used = self.used_slots
        actions = list[Action]()
        copied = self.kv_tensors[0].new_empty(len(index) * used * max(x.shape[3] for x in self.kv_tensors))
        for x in self.kv_tensors:
            rows = copied[: len(index) * used * x.shape[3]].view(len(index), used, x.shape[3])
            for head in x[:, :, :used].unbind(1):
                actions += [partial_of(_select, head, index, rows), partial_of(_write, head, rows)]
        return actions

    def grow(self, config: CacheConfig) -> None:
        """Reserve memory for a larger capacity, copying one tensor at a time."""
        self.resize(config, max(self.slots, self._usual_slots(config) - self.earlier_tokens))

    def actions_to_make_room(
        self, used: int, new_count: int, find_oldest: Callable[[], int], *, forget: bool = False
    ) -> list[Action]:
        """Return actions that make room for `new_count` tokens after `used` ones. None are needed if there is room.

        They forget the tokens before token `find_oldest()`.
        """
        if not (forget or self.has_spare or used + new_count > self.slots):
            return []
        start = find_oldest()
        gone = self.count_before(start)
        needed = self.used_slots - gone + new_count
        usual = self._usual_slots(self.config)
        spare = spare_slots(self.config, self.turn)
        slots = usual if needed <= usual else needed + spare
        fields = self._resized(self.config, slots, gone)
        fields["device_counts"][FORGOTTEN_BLOCKS:].fill_(self.turn.count(start) // self.config.block)
        return [partial_of(vars(self).update, fields, has_spare=slots > usual and new_count > spare)]

    def put_before(self, piece: FrozenPiece) -> None:
        """Put a piece with this rank's tokens before those in the shard, which needs as many slots less."""
        self.resize(self.config, self.slots - piece.token_count, 0, (), (piece,))

    def resize(
        self,
        config: CacheConfig,
        slots: int,
        forgotten: int = 0,
        before: Sequence[FrozenPiece] = (),
        earlier_pieces: tuple[FrozenPiece, ...] | None = None,
    ) -> None:
        """Move the tokens after the first `forgotten` to new memory, behind those of `before`, tensor by tensor.

        A save may read the old memory. `earlier_pieces` are those of the shard afterwards; None keeps them.
        """
        # In one call: where an allocation fails, or Ctrl-C comes, the shard has its old memory.
        vars(self).update(self._resized(config, slots, forgotten, before, earlier_pieces))

    def _resized(
        self,
        config: CacheConfig,
        slots: int,
        forgotten: int = 0,
        before: Sequence[FrozenPiece] = (),
        earlier_pieces: tuple[FrozenPiece, ...] | None = None,
    ) -> dict[str, Any]:
        """Return the fields that `resize` changes, with what they are afterwards."""
        used = self.used_slots
        slot_count = allocated_slots(slots, config.block)
        self._viewed = None  # the view would keep the old memory
        with torch.inference_mode(False):
            indices_before = [piece.indices for piece in before]
            token_index = join_slots([*indices_before, self.token_index[forgotten:used]], 0, slot_count)
            padding = self.padding
            device_counts = self.device_counts.clone()
            if padding is not None:
                positions = [self._view_of(piece).positions()[:, :-1] for piece in before]
                padding = padding.resized(
                    config.capacity, join_slots([*positions, padding.positions[:, forgotten:used]], 1, slot_count)
                )
            # Where no token moves to another slot, tensors are replaced one by one: that takes less memory.
            in_place = slot_count >= len(self.token_index) and not (forgotten or before)
            kv_tensors = self.kv_tensors if in_place else [*self.kv_tensors]
            rows_before = [piece.rows for piece in before]
            for index, old in enumerate(self.kv_tensors):
                parts = [rows[index] for rows in rows_before]
                kv_tensors[index] = join_slots([*parts, old[:, :, forgotten:used]], 2, slot_count)
        device_counts[USED] = used - forgotten + sum(piece.token_count for piece in before)
        return {
            "kv_tensors": kv_tensors,
            "token_index": token_index,
            "padding": padding,
            "device_counts": device_counts,
            "earlier_pieces": self.earlier_pieces if earlier_pieces is None else earlier_pieces,
            "config": config,
            "slots": slots,
        }

    def fork(self) -> Self:
        """Return a shard of the same tokens, which shares whole blocks of slots and copies the rest."""
        if self.config.mask is None:  # a cache that forgets copies its window instead
            self._share()
        return self._copy()

    def clone(self) -> Self:
        """Return a copy with tensors of its own."""
        other = copy(self)
        other.join_pieces()
        return other._copy()

    def _copy(self) -> Self:
        """Return a shard with copies of this shard's own tokens, and the same earlier pieces."""
        other = copy(self)
        used = self.used_slots
        with torch.inference_mode(False):
            other.kv_tensors = [join_slots([x[:, :, :used]], 2, x.shape[2]) for x in self.kv_tensors]
            other.token_index, other.device_counts = self.token_index.clone(), self.device_counts.clone()
            other.padding = None if self.padding is None else Padding(*(x.clone() for x in self.padding))
        return other

    def _share(self) -> None:
        """Move whole blocks of slots to an earlier piece. The shard then writes to the slots after them alone."""
        whole_slots = self.used_slots // self.config.block * self.config.block
        if not whole_slots:
            return
        positions = None if self.padding is None else self.padding.positions
        piece = FrozenPiece(self.kv_tensors, self.token_index, positions).part(0, whole_slots)
        kv_tensors = [x[:, :, whole_slots:] for x in self.kv_tensors]
        token_index = self.token_index[whole_slots:]
        padding = self.padding and self.padding._replace(positions=self.padding.positions[:, whole_slots:])
        with torch.inference_mode(False):
            device_counts = self.device_counts - torch.tensor([0, whole_slots], device=self.device)
        # Assigned last, in one call: Ctrl-C between would leave tokens both in the piece and in the shard.
        vars(self).update(
            kv_tensors=kv_tensors,
            token_index=token_index,
            padding=padding,
            device_counts=device_counts,
            earlier_pieces=(*self.earlier_pieces, piece),
            slots=self.slots - whole_slots,
        )

    def _unshared(self, kept: int | None = None) -> dict[str, Any]:
        """Return fields by which this shard has copies of earlier pieces in its own memory, before the tokens there.

        With `kept` keep this rank's first `kept` tokens, which end in an earlier piece, and copy the block alone in
        which they end. Two pieces of 8 tokens, in blocks of 4:

                                 a piece  | another piece              | own memory
            tokens of this rank  0 ...  7 | 8 ... 11   12 13    14 15  | 16 ... 18
            kept=None            copied   | copied     copied   copied | stay
            kept=14              shared   | shared     copied   gone   | gone
        """
        earlier_tokens = self.earlier_tokens
        copied_from, copied_to, gone_slots = 0, earlier_tokens, 0
        if kept is not None:
            copied_from = kept // self.config.block * self.config.block
            copied_to = kept
            gone_slots = self.used_slots
        shared, copied = list[FrozenPiece](), list[FrozenPiece]()
        piece_start = 0
        for piece in self.earlier_pieces:
            first, stop = (min(max(token - piece_start, 0), piece.token_count) for token in (copied_from, copied_to))
            if first:
                shared.append(piece.part(0, first))
            if first < stop:
                copied.append(piece.part(first, stop))
            piece_start += piece.token_count
        slots = self.slots + earlier_tokens - copied_from
        return self._resized(self.config, slots, gone_slots, copied, tuple(shared))

    def join_pieces(self) -> CacheShard:
        """Copy the earlier pieces to one memory, slot after slot, and return the shard that has it: this one."""
        if self.earlier_pieces:
            vars(self).update(self._unshared())
        return self


def _select(x: Tensor, index: Tensor, rows: Tensor) -> None:
    """Copy the sequences of `index` to `rows`."""
    torch.index_select(x, 0, index, out=rows)


def _write(x: Tensor, rows: Tensor) -> None:
    """Replace all sequences by `rows`."""
    x.copy_(rows)
