"""Per-rank shard of one layer's cache.

Memory for all tokens is reserved at once; the number of tokens present is a tensor on the device.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attnmesh.cache.block_cyclic import BlockCyclic
from attnmesh.cache.cache_config import CacheConfig
from attnmesh.cache.frozen_piece import FrozenPiece, join_slots
from attnmesh.core.storage import empty_rows, width_in_memory
from attnmesh.core.turns import Turn
from attnmesh.kernels.cache_view import FORGOTTEN_BLOCKS, LENGTH, LENGTH_AND_USED, USED, CacheView
from attnmesh.kernels.native.append import native_append
from attnmesh.kernels.padding import Padding
from attnmesh.mesh.axes import Axis
from attnmesh.runtime.memory import with_huge_pages
from attnmesh.runtime.tensors import Tensors

SLACK = 2
"""Tokens by which a prefill shard may exceed an even share: each of a zigzag's two chunks is rounded up."""


def usual_slots(config: CacheConfig, turn: Turn) -> int:
    """Return the slots of a rank for tokens that are spread as the ranks' shares."""
    share = turn.share(config.kept) + turn.width + SLACK
    return min(config.capacity, share if config.mask is None else share + turn.width + spare_slots(config, turn))


def spare_slots(config: CacheConfig, turn: Turn) -> int:
    """Return the slots that are free after tokens were forgotten, so that few tokens are moved per new one."""
    return max(turn.width, config.kept * turn.width // turn.period // 8)


def allocated_slots(slots: int, block: int) -> int:
    """Return how many slots are allocated: `slots`, and at least one more, in whole blocks for `KVCache.pages`."""
    return -(-(slots + 1) // block) * block


def shard_bytes(config: CacheConfig, turn: Turn, head_ranks: int, device: torch.device) -> int:
    """Return the bytes of keys and values of one rank's shard of this configuration."""
    slot_count = allocated_slots(usual_slots(config, turn), config.block)
    dtype = config.row_dtype
    width = sum(width_in_memory(width, dtype, device) for width in config.row_widths)
    return slot_count * config.batch * (config.kv_heads // head_ranks) * width * dtype.itemsize


NEWEST_TOKENS = 16
"""Newest tokens that `count_before` looks at first: a rejected speculation takes back fewer."""


class CacheShard:
    """Keys and values of one rank's tokens and heads; `index` is the rank's index along the tokens axis.

    `kv_tensors` are the keys, and the values if they are separate. In a forked cache, in files and in two tiers,
    `earlier_pieces` have the first tokens and `kv_tensors` those after them. `TieredShard` has its tokens in two
    memories, and `store.folder_shard.FolderShard` in files.
    """

    kv_tensors: list[Tensor]
    earlier_pieces: tuple[FrozenPiece, ...] = ()
    is_in_files = False
    _viewed: tuple[list[Tensor], tuple[FrozenPiece, ...], CacheView] | None = None
    """The last view, and `kv_tensors` and `earlier_pieces` of which it was made; None where these may have changed."""

    def __init__(
        self, config: CacheConfig, heads_axis: Axis, block_cyclic: BlockCyclic, device: torch.device, index: int
    ) -> None:
        self.config, self.heads_axis, self.index, self.device = config, heads_axis, index, device
        self.block_cyclic = block_cyclic
        self.turn = block_cyclic.turns[index]
        self.slots = self._usual_slots(config)
        with torch.inference_mode(False):  # tensors that can be written to in any mode
            self.kv_tensors, self.token_index = self._allocate()
            last = USED if config.mask is None else FORGOTTEN_BLOCKS
            self.device_counts = torch.zeros(last + 1, dtype=torch.int64, device=device)
        self.padding: Padding | None = None
        self.has_spare = False  # a long append has made the shard larger than it has to be

    def _allocate(self) -> tuple[list[Tensor], Tensor]:
        """Return memory for the keys and values of all slots, and for the token in each."""
        # The extra slot takes writes of other ranks' tokens, so that no step asks the device which rank owns a token.
        config = self.config
        slot_count = allocated_slots(self.slots, config.block)
        shape = config.batch, config.kv_heads // self.heads_axis.size, slot_count
        make = partial(empty_rows, dtype=config.row_dtype, device=self.device)
        kv_tensors = [with_huge_pages(make((*shape, width)), 2) for width in config.row_widths]
        return kv_tensors, torch.zeros(slot_count, dtype=torch.int64, device=self.device)

    def _usual_slots(self, config: CacheConfig) -> int:
        return usual_slots(config, self.turn)

    @property
    def length(self) -> int:
        """Cached tokens on all ranks."""
        return int(self.device_counts.tolist()[LENGTH])

    @property
    def used_slots(self) -> int:
        """Cached tokens on this rank, without those of earlier pieces."""
        return int(self.device_counts.tolist()[USED])

    @property
    def earlier_tokens(self) -> int:
        """Cached tokens on this rank in the earlier pieces."""
        return sum(piece.token_count for piece in self.earlier_pieces)

    @property
    def token_bytes(self) -> int:
        """Bytes of the cached tokens on this rank, earlier pieces included."""
        own_bytes = sum(x[:, :, : self.used_slots].nbytes for x in self.kv_tensors)
        return own_bytes + sum(piece.nbytes for piece in self.earlier_pieces)

    @property
    def token_mask(self) -> Tensor | None:
        """Mask of the tokens on all ranks, False for padding, (batch, length); None without padding."""
        return None if self.padding is None else self.padding.token_mask[:, : self.length]

    def count_before(self, length: int) -> int:
        """Return how many of the first `length` tokens this rank holds."""
        used = self.used_slots
        earlier = sum(int(torch.searchsorted(piece.token_index[:-1], length)) for piece in self.earlier_pieces)
        newest = self.token_index[max(used - NEWEST_TOKENS, 0) : used].tolist()
        if newest and newest[0] < length:  # as where few are taken back
            return earlier + used - len(newest) + bisect_left(newest, length)
        return earlier + int(torch.searchsorted(self.token_index[:used], length))

    @property
    def view(self) -> CacheView:
        """View of this shard for kernels. It is made anew once the shard has other memory."""
        kv_tensors, earlier_pieces, view = self._viewed or (None, None, None)
        fits = kv_tensors is self.kv_tensors and earlier_pieces is self.earlier_pieces
        if view is None or not fits or view.token_index is not self.token_index or view.padding is not self.padding:
            view = self.new_view()
            self._viewed = self.kv_tensors, self.earlier_pieces, view
        elif view.device_counts is not self.device_counts:
            view = view._replace(device_counts=self.device_counts)
            self._viewed = self.kv_tensors, self.earlier_pieces, view
        for piece in view.earlier_pieces:
            self._copy_length_to(piece)
        return view

    def new_view(self) -> CacheView:
        """Return a view that the shard does not keep: a graph needs one of its own."""
        rows = self.config.keys_and_values(self.kv_tensors)
        pieces = tuple(map(self._view_of, self.earlier_pieces))
        return CacheView(*rows, self.token_index, self.device_counts, self.padding, self.config.value_dim, pieces)

    def _view_of(self, piece: FrozenPiece) -> CacheView:
        """Return the view of an earlier piece. Its queries are the last ones of this cache."""
        rows = self.config.keys_and_values(piece.kv_tensors)
        padding = None
        if self.padding is not None:
            positions = piece.token_index.expand(self.config.batch, -1) if piece.positions is None else piece.positions
            padding = self.padding._replace(positions=positions)
        with torch.inference_mode(False):
            length = self.device_counts[LENGTH]
            device_counts = torch.stack((length, torch.full_like(length, piece.token_count)))
        return CacheView(*rows, piece.token_index, device_counts, padding, self.config.value_dim, file=piece.file)

    def _copy_length_to(self, piece: CacheView) -> None:
        """Let the view of an earlier piece have the number of tokens on all ranks."""
        piece.device_counts[LENGTH].copy_(self.device_counts[LENGTH])

    def append(self, new: Tensors, token_mask: Tensor | None, length_and_used: tuple[int, int] | None) -> None:
        """Add this rank's share of the new tokens; `new` has all tokens and heads.

        `length_and_used` are the tokens so far, on all ranks and on this one; None where the device alone knows them.
        """
        new_count = new[0].shape[2]
        plain = new_count > 0 and self.padding is None and token_mask is None  # all ranks record padding
        if length_and_used is None or not plain or not self.try_append_run(new, new_count, *length_and_used):
            self._append_by_device(new, new_count, token_mask)

    def try_append_run(self, new: Tensors, new_count: int, length: int, used: int) -> bool:
        """Add new tokens that fit, or return False. Tokens that one rank owns take one copy of each tensor.

        `length` and `used` are the tokens so far, on all ranks and on this one. Of each `period` tokens `width` are of
        this rank. New tokens lie in one of four ways, counted from its first one:

            |<- width ->|                      | next round
            |<------------ period ------------>|
               new                               written
                             new                 skipped: other ranks hold them
                      new                        in parts: some are written, and some skipped
                                              new  in parts, too
        """
        start, width, period = self.turn
        offset = (length - start) % period
        stop = offset + new_count
        if length + new_count > self.config.capacity:
            return False
        if offset >= width and stop <= period:
            self._skip_run(new_count, length, used)
            return True
        if stop > width and width < period:
            return self._try_append_parts(new, new_count, length, used)
        if used + new_count > self.slots:
            return False
        rows = new if self.heads_axis.size == 1 else self.own_heads(new)
        if self.config.storage is not None:
            rows = [*map(self.config.rows_of, rows)]
        self._write_run(rows, new_count, length, used)
        return True

    def _try_append_parts(self, new: Tensors, new_count: int, length: int, used: int) -> bool:
        """Add new tokens that several ranks own: first those up to the end of a run, then those after it.

        Call with tokens that fit the capacity and lie in parts, as `try_append_run` draws them. Return False in files,
        and for more tokens than a run has, or than this rank has slots for.
        """
        start, width, period = self.turn
        count = self.turn.count
        offset = (length - start) % period
        first = (width if offset < width else period) - offset
        own_count = count(length + new_count) - count(length)
        if new_count > width or self.is_in_files or used + own_count > self.slots:  # a file takes all at once, or none
            return False
        after = used + first if offset < width else used
        head, tail = (tuple(x[:, :, some] for x in new) for some in (slice(first), slice(first, None)))
        # Room for both was checked above, so neither can return False after the other has written.
        return self.try_append_run(head, first, length, used) and self.try_append_run(
            tail, new_count - first, length + first, after
        )

    def _skip_run(self, new_count: int, length: int, used: int) -> None:
        """Count new tokens that other ranks hold."""
        self.device_counts[LENGTH].add_(new_count)

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
        tokens = length + offsets
        alone = self.turn.width == self.turn.period
        if alone:  # saves a few small kernels in a step of a graph
            slots = (used + offsets).clamp(max=self.slots)
        else:
            is_own = self.turn.holds(tokens) & (tokens < self.config.capacity)
            slots = torch.where(is_own, used + is_own.cumsum(0) - 1, self.slots).clamp(max=self.slots)
        rows = [*map(self.config.rows_of, self.own_heads(new))]
        self._write(rows, tokens, slots)
        self._pad(tokens, slots, new_count, token_mask)
        if alone:
            self.device_counts[LENGTH_AND_USED].add_(new_count)
            self.device_counts[USED].clamp_(max=self.slots)
        else:
            self.device_counts[LENGTH_AND_USED] += torch.stack((torch.full_like(length, new_count), is_own.sum()))

    def own_heads(self, new: Tensors) -> list[Tensor]:
        """Return this rank's heads of tensors with all heads."""
        return [x.chunk(self.heads_axis.size, 1)[self.heads_axis.index] for x in new]

    def append_at(self, new: Tensors, tokens: Tensor, new_count: int, token_mask: Tensor | None) -> None:
        """Add rows of the given tokens with this rank's heads; all ranks together add `new_count`."""
        order = tokens.argsort()
        slots = self.used_slots + torch.arange(len(order), device=self.device)
        self._write([x.index_select(2, order) for x in new], tokens[order], slots)
        self._pad(tokens[order], slots, new_count, token_mask)
        self.device_counts[LENGTH_AND_USED] += torch.tensor([new_count, len(order)], device=self.device)

    def _write(self, new: Sequence[Tensor], tokens: Tensor, slots: Tensor) -> None:
        """Write rows of tokens with this rank's heads into slots."""
        for x, tensor in zip(self.kv_tensors, new, strict=True):
            x.index_copy_(2, slots, tensor)
        self.token_index.index_copy_(0, slots, tokens)

    def _pad(self, tokens: Tensor, slots: Tensor, new_count: int, token_mask: Tensor | None) -> None:
        """Record which of `new_count` new tokens are padding, before the length includes them."""
        if token_mask is None and self.padding is None:
            return
        length = self.device_counts[LENGTH]
        config = self.config
        self.padding = self.padding or Padding.none(config.batch, config.capacity, self.token_index, length)
        all_real = torch.ones(config.batch, new_count, dtype=torch.bool, device=self.device)
        self.padding.add(length, all_real if token_mask is None else token_mask.to(self.device), tokens - length, slots)

    def mark_present(self, length: int, token_mask: Tensor | None, first: int) -> int:
        """Mark the tokens from `first` up to `length` as present. Return how many of them this rank holds."""
        gone = self.turn.count(first)
        used = self.turn.count(length) - gone
        counts = [length, used, gone // self.config.block][: len(self.device_counts)]
        self.device_counts.copy_(torch.tensor(counts, device="cpu"))
        if token_mask is not None:
            zero = torch.zeros_like(self.device_counts[LENGTH])
            slots = torch.arange(used, device=self.device)
            self.padding = Padding.none(self.config.batch, self.config.capacity, self.token_index, zero)
            self.padding.add(zero, token_mask.to(self.device), self.token_index[:used], slots)
        return used

    def truncate(self, length: int) -> None:
        """Remove the tokens from `length` on."""
        count = self.count_before(length)
        if count < self.earlier_tokens:
            self._unshare(count)
        if self.padding is not None:  # after `_unshare`, which may find no memory for the cut block
            self.padding.cut(length, self.length)
        self.device_counts[LENGTH], self.device_counts[USED] = length, count - self.earlier_tokens
        if not length:
            self.device_counts[FORGOTTEN_BLOCKS:].zero_()

    def reorder(self, index: Tensor) -> None:
        """Replace sequence b by sequence `index[b]`; the batch may change."""
        used, self._viewed = self.used_slots, None
        padding = self.padding and self.padding.reordered(index)
        earlier_pieces = tuple(piece.reordered(index, self.config.block) for piece in self.earlier_pieces)
        if len(index) != self.config.batch:
            with torch.inference_mode(False):
                blank = (empty_rows((len(index), *x.shape[1:]), x.dtype, x.device) for x in self.kv_tensors)
                self.kv_tensors = [
                    torch.index_select(x, 0, index, out=new) for x, new in zip(self.kv_tensors, blank, strict=True)
                ]
            self.config = replace(self.config, batch=len(index))
        else:
            for head in range(self.kv_tensors[0].shape[1]):  # the temporary copy is one head
                for x in self.kv_tensors:
                    x[:, head, :used] = x[:, head, :used].index_select(0, index)
        self.padding, self.earlier_pieces = padding, earlier_pieces

    def grow(self, config: CacheConfig) -> None:
        """Reserve memory for a larger capacity, copying one tensor at a time."""
        self.resize(config, max(self.slots, self._usual_slots(config) - self.earlier_tokens))

    def make_room(self, used: int, new_count: int, first: Callable[[], int], *, forget: bool = False) -> bool:
        """Make room for `new_count` tokens beside `used` ones. Where needed, forget those before token `first()`.

        Return True if the shard has other memory now.
        """
        if not (forget or self.has_spare or used + new_count > self.slots):
            return False
        start = first()
        gone = self.count_before(start)
        needed = self.used_slots - gone + new_count
        usual = self._usual_slots(self.config)
        spare = spare_slots(self.config, self.turn)
        self.resize(self.config, usual if needed <= usual else needed + spare, gone)
        self.has_spare = self.slots > usual and new_count > spare
        self.device_counts[FORGOTTEN_BLOCKS:].fill_(self.turn.count(start) // self.config.block)
        return True

    def put_before(self, piece: FrozenPiece) -> None:
        """Let a piece have this rank's tokens before those in the shard, which needs as many slots less."""
        self.resize(self.config, self.slots - piece.token_count)
        self.earlier_pieces = (piece,)

    def resize(self, config: CacheConfig, slots: int, forgotten: int = 0, before: Sequence[FrozenPiece] = ()) -> None:
        """Move the tokens after the first `forgotten` to new memory, behind those of `before`, tensor by tensor.

        A save may read the old memory.
        """
        used = self.used_slots
        slot_count = allocated_slots(slots, config.block)
        self._viewed = None  # the view would keep the old memory
        with torch.inference_mode(False):
            indices = [piece.token_index[:-1] for piece in before]
            token_index = join_slots([*indices, self.token_index[forgotten:used]], 0, slot_count)
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
            for index, old in enumerate(self.kv_tensors):
                parts = [piece.kv_tensors[index][:, :, :-1] for piece in before]
                kv_tensors[index] = join_slots([*parts, old[:, :, forgotten:used]], 2, slot_count)
        # Assigned last: where an allocation above fails, the shard keeps working at its old capacity.
        self.kv_tensors, self.config, self.slots = kv_tensors, config, slots
        self.token_index, self.padding, self.device_counts = token_index, padding, device_counts
        self.device_counts[USED] = used - forgotten + sum(piece.token_count for piece in before)

    def fork(self) -> "CacheShard":
        """Return a shard of the same tokens, which shares whole blocks of slots and copies the rest."""
        if self.config.mask is None:  # a cache that forgets copies its window instead
            self._share()
        return self._copy()

    def clone(self) -> "CacheShard":
        """Return a copy with tensors of its own."""
        other = copy(self)
        other._unshare()
        return other._copy()

    def _copy(self) -> "CacheShard":
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
        self.earlier_pieces = (*self.earlier_pieces, piece)
        self.kv_tensors = [x[:, :, whole_slots:] for x in self.kv_tensors]
        self.token_index = self.token_index[whole_slots:]
        self.padding = self.padding and self.padding._replace(positions=self.padding.positions[:, whole_slots:])
        self.slots -= whole_slots
        with torch.inference_mode(False):
            self.device_counts = self.device_counts - torch.tensor([0, whole_slots], device=self.device)

    def _unshare(self, kept: int | None = None) -> None:
        """Copy earlier pieces to this shard's own memory, before the tokens there.

        With `kept` keep this rank's first `kept` tokens, which end in an earlier piece, and copy the block alone in
        which they end. Two pieces of 8 tokens, in blocks of 4:

                                 a piece  | another piece              | own memory
            tokens of this rank  0 ...  7 | 8 ... 11   12 13    14 15  | 16 ... 18
            _unshare()           copied   | copied     copied   copied | stay
            _unshare(kept=14)    shared   | shared     copied   gone   | gone
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
        if copied_from < earlier_tokens:
            self.resize(self.config, self.slots + earlier_tokens - copied_from, gone_slots, copied)
            self.earlier_pieces = tuple(shared)

    def join_pieces(self) -> "CacheShard":
        """Copy the earlier pieces to one memory, slot after slot, and return the shard that has it: this one."""
        self._unshare()
        return self
