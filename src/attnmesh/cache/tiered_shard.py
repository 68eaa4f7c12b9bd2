"""Shard of a cache in two memories: the newest tokens on the device, older ones on the CPU, in memory or in files.

        token      0 ............ 63 | 64 ....... 95
        cold       in CPU memory, or in files      | may have copies of hot tokens, once `flush` was called
        hot                            on the device

The cold tier is an ordinary shard on the CPU. Its tokens before those of the hot tier are earlier pieces of the cache.
Where the hot tier is full, its oldest blocks move to the cold tier in one copy.
"""

from collections.abc import Sequence
from errno import ENOENT
from functools import partial as partial_of
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.cache.cache_config import CacheConfig
from attnmesh.cache.cache_shard import CacheShard
from attnmesh.cache.frozen_piece import FrozenPiece
from attnmesh.cache.memory_shard import MemoryShard
from attnmesh.cache.ordered_shard import Fail, OrderedShard
from attnmesh.core.turns import Turn
from attnmesh.errors import KernelError, StoreError
from attnmesh.kernels.cache_view import LENGTH, CacheView
from attnmesh.runtime.tensors import Tensors
from attnmesh.runtime.unbroken import Action, unbroken

LEAVING_PARTS = 4
"""A quarter of the hot tokens leave together. More parts would make more moves, of fewer tokens each."""


def hot_tokens(config: CacheConfig, turn: Turn) -> int:
    """Return how many of a rank's newest tokens stay on the device: whole blocks."""
    assert config.hot is not None
    return _in_blocks(turn.share(min(config.hot, config.capacity)), config.block)


def _in_blocks(tokens: int, block: int) -> int:
    return -(-tokens // block) * block


class TierCounts(NamedTuple):
    """Tokens of a shard in two memories, as the CPU counts them."""

    length: int
    """Tokens on all ranks."""
    hot: int
    """Those of this shard in the hot tier."""


class TieredShard(OrderedShard, MemoryShard):
    """Tokens of one rank: `kv_tensors` are the hot ones, `earlier_pieces` those of the `cold` tier before them."""

    unpadded = ("sequences without padding beside hot=", "give each sequence a cache of its own")

    def __init__(self, cold: CacheShard, config: CacheConfig, device: torch.device, fail: Fail) -> None:
        super().__init__(config, cold.heads_axis, cold.block_cyclic, device, cold.index)
        self.fail = fail
        self.cold = cold
        self.counts = TierCounts(0, 0)
        self.refill_hot()

    def _usual_slots(self, config: CacheConfig) -> int:
        stay = hot_tokens(config, self.turn)
        return stay + _in_blocks(stay // LEAVING_PARTS, config.block) + config.block

    @property
    def outlives_process(self) -> bool:
        """True if the cold tier, to which hot tokens move, does."""
        return self.cold.outlives_process

    def check_in_one_memory(self, subject: str) -> None:
        """Refuse the tokens of two memories."""
        raise KernelError(subject, "a cache in one memory", f"hot={self.config.hot}", "make the cache without hot=")

    def check_order(self, index: Tensor) -> None:
        """Raise unless the cold tier can put the sequences in this order."""
        self.cold.check_order(index)

    def check_in_graph(self, subject: str) -> None:
        """Raise unless a compiled step can read the cold tier."""
        self.cold.check_in_graph(subject)

    @property
    def length(self) -> int:
        """Cached tokens on all ranks."""
        return self.counts.length

    @property
    def used_slots(self) -> int:
        """Tokens in the hot tier."""
        return self.counts.hot

    @property
    def cold_tokens(self) -> int:
        """Tokens that the cold tier has, copies of hot ones included."""
        return self.cold.earlier_tokens + self.cold.used_slots

    @property
    def _cold_pieces(self) -> list[FrozenPiece]:
        """All tokens that the cold tier has."""
        cold, used = self.cold, self.cold.used_slots
        index = cold.token_index[: used + 1]
        index = index if len(index) > used else torch.cat((index, index[-1:]))  # one more slot, as in all pieces
        newest = FrozenPiece([x[:, :, : used + 1] for x in cold.kv_tensors], index, None)
        return [*cold.earlier_pieces, newest] if used else [*cold.earlier_pieces]

    def refill_hot(self) -> None:
        """Let the hot tier have the newest tokens of the cold one, in whole blocks, as after an open or a cut."""
        count, block = self.cold_tokens, self.config.block
        cold_count = max(0, count - hot_tokens(self.config, self.turn)) // block * block
        start = 0
        self._set_counts(self.cold.length, count - cold_count)
        for piece in self._cold_pieces:
            first, stop = (min(max(slot - start, 0), piece.token_count) for slot in (cold_count, count))
            to = slice(start + first - cold_count, start + stop - cold_count)
            if first < stop:
                for x, row in zip(self.kv_tensors, piece.kv_tensors, strict=True):
                    x[:, :, to] = row[:, :, first:stop]
                self.token_index[to] = piece.token_index[first:stop]
            start += piece.token_count
        self._set_cold_count(cold_count)

    def _set_counts(self, length: int, used: int) -> None:
        """Set the counts of tokens, on all ranks and in the hot tier."""
        self.counts = TierCounts(length, used)
        super()._set_counts(length, used)

    def _set_cold_count(self, cold_count: int) -> None:
        """Let the first `cold_count` tokens of the cold tier be the earlier pieces."""
        pieces = list[FrozenPiece]()
        start = 0
        for piece in self._cold_pieces:
            count = min(cold_count - start, piece.token_count)
            if count > 0:
                pieces.append(piece if count == piece.token_count else piece.part(0, count))
            start += piece.token_count
        self.earlier_pieces = tuple(pieces)

    def _view_of(self, piece: FrozenPiece) -> CacheView:
        """Return the view of a piece of the cold tier, whose numbers are in CPU memory."""
        rows = self.config.keys_and_values(piece.kv_tensors)
        with torch.inference_mode(False):
            counts = torch.tensor([self.length, piece.token_count], device="cpu")
        return CacheView(*rows, piece.token_index, counts, None, self.config.value_dim, file=piece.file)

    def _copy_length_to(self, piece: CacheView) -> None:
        piece.device_counts[LENGTH] = self.length

    def try_append_run(self, new: Tensors, new_count: int, length: int, used: int) -> bool:
        """Add new tokens of which this rank owns all or none, if none has to leave. Otherwise return False."""
        if self._count_leaving(own_count := self.turn.count(length + new_count) - self.turn.count(length)):
            return False
        try:
            if not super().try_append_run(new, new_count, length, used):
                return False
            self.counts = TierCounts(length + new_count, used + own_count)
        except BaseException:  # Ctrl-C, after the device has counted them
            self._set_counts(length, used)
            raise
        return True

    def append_own(self, new: Tensors, token_mask: Tensor | None, length_and_used: tuple[int, int] | None) -> None:
        """Add this rank's share of the new tokens; `new` has all tokens and heads."""
        new_count = new[0].shape[2]
        if not new_count or not self.try_append_run(new, new_count, self.length, self.used_slots):
            super().append_own(new, token_mask, length_and_used)

    def _count_leaving(self, new_count: int) -> int:
        """Return how many tokens `new_count` new ones drive out, in whole blocks. Some may be new ones themselves."""
        total = self.used_slots + new_count
        block = self.config.block
        return 0 if total <= self.slots else (total - hot_tokens(self.config, self.turn)) // block * block

    def _append_rows(self, new_rows: Sequence[Tensor], indices: Tensor, length: int) -> None:
        """Add rows of this rank's tokens, all of them or none. Then there are `length` tokens on all ranks."""
        used = self.used_slots
        length_before = self.length
        actions = list[Action]()
        if leaving := self._count_leaving(len(indices)):
            at_once = max(0, leaving - used)  # new ones that do not stay
            following = torch.cat((self.token_index[leaving:used][:1].cpu(), indices[at_once:]))
            leaving_rows = [x[:, :, : min(leaving, used)] for x in self.kv_tensors]
            if at_once:
                pairs = zip(leaving_rows, new_rows, strict=True)
                leaving_rows = [torch.cat((x, new[:, :, :at_once]), 2) for x, new in pairs]
            leaving_indices = torch.cat((self.token_index[: min(leaving, used)].cpu(), indices[:at_once]))
            alone = self.heads_axis.size == 1 and self.turn.period == self.turn.width
            retry = f"append again from token {length_before} on: the cache has those before" if alone else ""
            self._append_cold(leaving_rows, leaving_indices, int(following[0]) if len(following) else length, retry)
            actions += [*self._shift(leaving), partial_of(self._set_cold_count, self.earlier_tokens + leaving)]
            new_rows = [new[:, :, at_once:] for new in new_rows]
            indices = indices[at_once:]
            used = max(0, used - leaving)
        stop = used + len(indices)
        actions += [partial_of(self._write_hot, new_rows, indices, used), partial_of(self._set_counts, length, stop)]
        try:
            unbroken(actions)
        except BaseException:
            self.truncate(length_before)
            raise

    def _write_hot(self, new_rows: Sequence[Tensor], indices: Tensor, start: int) -> None:
        stop = start + len(indices)
        for x, new in zip(self.kv_tensors, new_rows, strict=True):
            x[:, :, start:stop] = new
        self.token_index[start:stop] = indices

    def _shift(self, count: int) -> list[Action]:
        """Return actions that move the tokens after the first `count` to the front, `count` at a time.

        No action writes what it reads.
        """
        left = self.used_slots - count
        return [partial_of(self._move, start, min(start + count, left), count) for start in range(0, left, count)]

    def _move(self, start: int, stop: int, count: int) -> None:
        """Move the tokens of slots `start + count` to `stop + count` to slots `start` to `stop`."""
        for x in (*self.kv_tensors, self.token_index[None, None]):
            x[:, :, start:stop] = x[:, :, start + count : stop + count]

    def _append_cold(self, rows: Sequence[Tensor], indices: Tensor, length: int, retry: str) -> None:
        """Append rows to the cold tier, which then has all of this rank's tokens before `length`.

        The rows are those of the hot tier, and new ones after them. The cold tier may have the first of them already.
        Where this raises, the cache is as it was. `retry` tells the user what to do once there is space; it is empty if
        other ranks have done their part.
        """
        if self.cold.length > self.length:  # an append has failed
            self.cold.truncate(self.length)
        written = self.cold_tokens - self.earlier_tokens
        if written >= len(indices) and self.cold.length >= length:
            return
        new_count = max(0, length - self.cold.length)
        try:
            self.cold.append_rows_at(tuple(x[:, :, written:].cpu() for x in rows), indices[written:], new_count, None)
        except StoreError as error:
            subject, expected, given, _ = error.args
            is_full = isinstance(error.__cause__, OSError) and error.__cause__.errno != ENOENT
            if not is_full or not retry:
                raise
            raise StoreError(subject, expected, given, f"free space there, and {retry}") from error

    def flush(self) -> None:
        """Let the cold tier have copies of all hot tokens, which stay hot."""
        rows = [x[:, :, : self.used_slots] for x in self.kv_tensors]
        indices = self.token_index[: self.used_slots].cpu()
        self._append_cold(rows, indices, self.length, "flush again: the cache has all its tokens")

    def with_hot_on(self, device: torch.device, fail: Fail) -> "TieredShard":
        """Return a shard of the same tokens, with the newest on another device."""
        self.flush()
        return TieredShard(self.cold, self.config, device, fail)

    def join_pieces(self) -> CacheShard:
        """Copy the hot tokens to the cold tier, in one memory with its own, and return the shard that has it."""
        cold = self.cold.join_pieces()  # refused in files, before anything is written
        self.flush()
        self._set_cold_count(self.earlier_tokens)
        return cold

    def actions_to_truncate(self, length: int) -> list[Action]:
        """Return actions that remove the tokens from `length` on."""
        count = self.count_before(length)
        cold_count = self.earlier_tokens
        actions = list[Action]()
        if length < self.cold.length:
            cut_cold = partial_of(self.cold.actions_to_truncate, length)
            actions += [cut_cold, partial_of(self._set_cold_count, min(cold_count, count))]
        keep_hot = partial_of(self._set_counts, length, count - cold_count)
        return [*actions, self.refill_hot if count < cold_count else keep_hot]

    def mark_present(self, length: int, token_mask: Tensor | None, oldest: int) -> int:
        """Mark the tokens up to `length`, which a load has written to the cold tier, as present."""
        used = self.cold.mark_present(length, token_mask, oldest)
        self.refill_hot()
        return used

    def grow(self, config: CacheConfig) -> None:
        """Reserve memory for a larger capacity."""
        self.cold.grow(config)
        self.resize(config, max(self.slots, self._usual_slots(config)))
        self._set_cold_count(self.earlier_tokens)

    def actions_to_reorder(self, index: Tensor) -> list[Action]:
        """Return actions that replace sequence b by sequence `index[b]`; the batch may change."""
        actions = [*super().actions_to_reorder(index), *self.cold.actions_to_reorder(index.cpu())]
        return [*actions, partial_of(self._set_cold_count, self.earlier_tokens)]

    def _reordered_pieces(self, index: Tensor) -> tuple[FrozenPiece, ...]:
        """Return none, until the cold tier is reordered: its memory is that of the pieces."""
        return ()

    def fork(self) -> "TieredShard":
        """Return a shard of the same tokens, which shares the cold tier's whole blocks, and copies the hot tier."""
        return self._with_cold(self.cold.fork())

    def clone(self) -> "TieredShard":
        """Return a copy with tensors of its own."""
        return self._with_cold(self.cold.clone())

    def _with_cold(self, cold: CacheShard) -> "TieredShard":
        """Return a copy with another cold tier, of the same tokens."""
        other = self._copy()
        cold_count = self.earlier_tokens
        other.cold = cold
        self._set_cold_count(cold_count)
        other._set_cold_count(cold_count)
        return other
