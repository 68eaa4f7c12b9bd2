"""Shard of one layer's cache: what every kind of it has, and what callers may ask of it."""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from attnmesh.cache.block_cyclic import BlockCyclic
from attnmesh.cache.cache_config import CacheConfig
from attnmesh.cache.frozen_piece import FrozenPiece
from attnmesh.errors import KernelError
from attnmesh.kernels.cache_view import FORGOTTEN_BLOCKS, LENGTH, USED, CacheView
from attnmesh.kernels.padding import Padding
from attnmesh.mesh.axes import Axis
from attnmesh.runtime.tensors import Tensors
from attnmesh.runtime.unbroken import Action, unbroken

NEWEST_TOKENS = 16
"""Newest tokens that `count_before` looks at first: a rejected speculation takes back fewer."""


class CacheShard(ABC):
    """Keys and values of one rank's tokens and heads; `index` is the rank's index along the tokens axis.

    `kv_tensors` are the keys, and the values if they are separate. In a forked cache, in files and in two tiers,
    `earlier_pieces` have the first tokens and `kv_tensors` those after them. The number of tokens is a tensor on the
    device. A `MemoryShard` has its tokens in one memory, a `TieredShard` in two, and a `FolderShard` of `store` in
    files. Callers ask its methods what a shard can do, rather than of which kind it is.
    """

    kv_tensors: list[Tensor]
    token_index: Tensor
    slots: int
    earlier_pieces: tuple[FrozenPiece, ...] = ()
    _viewed: tuple[list[Tensor], tuple[FrozenPiece, ...], CacheView] | None = None
    """The last view, and `kv_tensors` and `earlier_pieces` of which it was made; None where these may have changed."""

    def __init__(
        self, config: CacheConfig, heads_axis: Axis, block_cyclic: BlockCyclic, device: torch.device, index: int
    ) -> None:
        self.config, self.heads_axis, self.index = config, heads_axis, index
        self.on_gpu = device.type == "cuda"
        """True where the CPU would wait to read how many tokens there are: callers count them there."""
        self.block_cyclic = block_cyclic
        self.turn = block_cyclic.turns[index]
        with torch.inference_mode(False):  # a tensor that can be written to in any mode
            last = USED if config.mask is None else FORGOTTEN_BLOCKS
            self.device_counts = torch.zeros(last + 1, dtype=torch.int64, device=device)
        self.device = self.device_counts.device
        """The device with its number, which the caller's may lack."""
        self.padding: Padding | None = None

    # --- each kind has these of its own ---

    @abstractmethod
    def append_own(self, new: Tensors, token_mask: Tensor | None, length_and_used: tuple[int, int] | None) -> None:
        """Add this rank's share of the new tokens; `new` has all tokens and heads.

        `length_and_used` are the tokens so far, on all ranks and on this one; None where the device alone knows them.
        """

    @abstractmethod
    def append_rows_at(self, new: Tensors, indices: Tensor, new_count: int, token_mask: Tensor | None) -> None:
        """Add rows of the given tokens with this rank's heads; all ranks together add `new_count`."""

    @abstractmethod
    def _write_run(self, new: Sequence[Tensor], new_count: int, length: int, used: int) -> None:
        """Write new tokens after those in the shard. They have this rank's heads."""

    @abstractmethod
    def actions_to_truncate(self, length: int) -> list[Action]:
        """Return actions that remove the tokens from `length` on. Files are cut before it returns."""

    @abstractmethod
    def actions_to_reorder(self, index: Tensor) -> list[Action]:
        """Return actions that replace sequence b by sequence `index[b]`; the batch may change."""

    @abstractmethod
    def grow(self, config: CacheConfig) -> None:
        """Reserve memory for a larger capacity."""

    @abstractmethod
    def fork(self) -> "CacheShard":
        """Return a shard of the same tokens, which shares what both can read and copies the rest."""

    @abstractmethod
    def clone(self) -> "CacheShard":
        """Return a copy with tensors of its own."""

    @abstractmethod
    def join_pieces(self) -> "CacheShard":
        """Copy all tokens to one memory, slot after slot, and return the shard that has it."""

    # --- each kind in memory has these too: callers do not ask them of files ---

    def actions_to_make_room(
        self, used: int, new_count: int, find_oldest: Callable[[], int], *, forget: bool = False
    ) -> list[Action]:
        """Return actions that make room for `new_count` tokens, in a cache that forgets."""
        raise NotImplementedError

    def put_before(self, piece: FrozenPiece) -> None:
        """Put a piece with this rank's tokens before those in the shard, after `check_in_one_memory`."""
        raise NotImplementedError

    def mark_present(self, length: int, token_mask: Tensor | None, oldest: int) -> int:
        """Mark the tokens from `oldest` up to `length`, which a load has written. Return how many it has."""
        raise NotImplementedError

    def with_hot_on(self, device: torch.device, fail: Callable[..., NoReturn]) -> "CacheShard":
        """Return a shard of the same tokens with the newest on another device, if it is of two memories."""
        raise NotImplementedError

    # --- a kind may override these ---

    @property
    def length(self) -> int:
        """Cached tokens on all ranks."""
        return int(self.device_counts.tolist()[LENGTH])

    @property
    def used_slots(self) -> int:
        """Cached tokens on this rank, without those of earlier pieces."""
        return int(self.device_counts.tolist()[USED])

    @property
    def outlives_process(self) -> bool:
        """True if another process finds the tokens once this one has ended."""
        return False

    def check_unpadded(self, subject: str, token_mask: Tensor | None) -> None:
        """Raise if new tokens are padded, and this kind of shard takes none that are."""

    def check_in_one_memory(self, subject: str) -> None:
        """Raise unless the tokens are in one memory, whose blocks an engine can read."""

    def check_in_graph(self, subject: str) -> None:
        """Raise unless a compiled step can read the tokens."""

    def raise_in_pieces(self, subject: str, given: str) -> NoReturn:
        """Raise for a cache in a graph, of which the kernel reads one piece."""
        raise KernelError(subject, "a cache of one piece in a graph", given, "decode with copy.deepcopy(cache)")

    def check_order(self, index: Tensor) -> None:
        """Raise unless the shard can put the sequences in this order."""

    def flush(self) -> None:
        """Let the colder memory of two have copies of all tokens."""

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

        Call with tokens that fit the capacity and lie in parts, as `try_append_run` draws them. Return False for more
        tokens than a run has, or than this rank has slots for.
        """
        start, width, period = self.turn
        count = self.turn.count
        offset = (length - start) % period
        head_count = (width if offset < width else period) - offset
        own_count = count(length + new_count) - count(length)
        if new_count > width or used + own_count > self.slots:
            return False
        after = used + head_count if offset < width else used
        head, tail = (tuple(x[:, :, some] for x in new) for some in (slice(head_count), slice(head_count, None)))
        # Room for both was checked above, so neither can return False after the other has written.
        return self.try_append_run(head, head_count, length, used) and self.try_append_run(
            tail, new_count - head_count, length + head_count, after
        )

    def _skip_run(self, new_count: int, length: int, used: int) -> None:
        """Count new tokens that other ranks hold."""
        self.device_counts[LENGTH].add_(new_count)

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

    # --- all kinds share these ---

    def truncate(self, length: int) -> None:
        """Remove the tokens from `length` on."""
        unbroken(self.actions_to_truncate(length))

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
        earlier = sum(int(torch.searchsorted(piece.indices, length)) for piece in self.earlier_pieces)
        newest = self.token_index[max(used - NEWEST_TOKENS, 0) : used].tolist()
        if newest and newest[0] < length:  # as where few are taken back
            return earlier + used - len(newest) + bisect_left(newest, length)
        return earlier + int(torch.searchsorted(self.token_index[:used], length))

    @property
    def view(self) -> CacheView:
        """View of this shard for kernels. It is made anew once the shard has other memory."""
        kv_tensors, earlier_pieces, view = self._viewed or (None, None, None)
        fits = kv_tensors is self.kv_tensors and earlier_pieces is self.earlier_pieces
        if view is None or not fits or view.padding is not self.padding:
            view = self.new_view()
            self._viewed = self.kv_tensors, self.earlier_pieces, view
        for piece in view.earlier_pieces:
            self._copy_length_to(piece)
        return view

    def new_view(self) -> CacheView:
        """Return a view that the shard does not keep: a graph needs one of its own."""
        rows = self.config.keys_and_values(self.kv_tensors)
        pieces = tuple(map(self._view_of, self.earlier_pieces))
        return CacheView(*rows, self.token_index, self.device_counts, self.padding, self.config.value_dim, pieces)

    def own_heads(self, new: Tensors) -> list[Tensor]:
        """Return this rank's heads of tensors with all heads."""
        return [x.chunk(self.heads_axis.size, 1)[self.heads_axis.index] for x in new]
