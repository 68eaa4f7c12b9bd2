"""Shard of a cache in two memories: the newest tokens on the device, older ones on the CPU, in memory or in files.

        token      0 ............ 63 | 64 ....... 95
        old        in CPU memory, or in files      | may have copies of hot tokens, once `flush` was called
        hot                            on the device

The old tier is an ordinary shard on the CPU. What it has of the first tokens are pieces of the cache, as blocks that
forks share. Where the hot tier is full, its oldest blocks move there in one copy.
"""

from collections.abc import Callable, Iterator, Sequence
from errno import ENOENT
from functools import partial

import torch
from torch import Tensor

from attnmesh.cache.cache_config import CacheSizes
from attnmesh.cache.cache_shard import CacheShard, assigned
from attnmesh.cache.ordered_shard import Fail, OrderedShard
from attnmesh.cache.shared_blocks import SharedBlocks
from attnmesh.core.turns import Turn
from attnmesh.errors import KernelError, StoreError
from attnmesh.kernels.cache_view import CacheView
from attnmesh.mesh.axes import Mesh
from attnmesh.runtime.tensors import Tensors
from attnmesh.runtime.unbroken import unbroken

MOVED = 4
"""Part of the hot tokens that leave together: few moves, of few tokens each."""


def shards_in_memory(
    sizes: CacheSizes, mesh: Mesh, device: torch.device, shares: Sequence[float] | str | None
) -> Callable[[int], CacheShard]:
    """Return what makes a shard in memory, on the CPU where the newest tokens alone are on the device.

    All ranks call it at once, as `assigned`.
    """
    memory = device if sizes.hot is None else torch.device("cpu")
    return partial(CacheShard, sizes, mesh.heads, assigned(sizes, mesh, device, shares), memory)


def in_tiers(
    make: Callable[[int], CacheShard], sizes: CacheSizes, device: torch.device, fail: Fail
) -> Callable[[int], CacheShard]:
    """Return what makes a shard whose older tokens are in one that `make` returns, if the newest are apart."""
    return make if sizes.hot is None else lambda index: TieredShard(make(index), sizes, device, fail)


def hot_tokens(sizes: CacheSizes, turn: Turn) -> int:
    """Return how many of a rank's newest tokens stay on the device: whole blocks."""
    assert sizes.hot is not None
    return _in_blocks(turn.share(min(sizes.hot, sizes.capacity)), sizes.block)


def _in_blocks(tokens: int, block: int) -> int:
    return -(-tokens // block) * block


class TieredShard(OrderedShard):
    """Tokens of one rank: `stored` are the hot ones, `shared` those of the `old` tier before them."""

    def __init__(self, old: CacheShard, sizes: CacheSizes, device: torch.device, fail: Fail) -> None:
        super().__init__(sizes, old.heads, old.block_cyclic, device, old.index)
        self.fail = fail
        self.old, self.is_in_files = old, old.is_in_files
        self.known_length = 0  # the CPU counts tokens of all ranks, and in `filled` those in the hot tier
        self.warm()

    def _usual_slots(self, sizes: CacheSizes) -> int:
        stay = hot_tokens(sizes, self.turn)
        return stay + _in_blocks(stay // MOVED, sizes.block) + sizes.block

    @property
    def length(self) -> int:
        """Cached tokens on all ranks."""
        return self.known_length

    @property
    def used(self) -> int:
        """Tokens in the hot tier."""
        return self.filled

    @property
    def old_tokens(self) -> int:
        """Tokens that the old tier has, copies of hot ones included."""
        return self.old.shared_tokens + self.old.used

    @property
    def _old_pieces(self) -> list[SharedBlocks]:
        """All tokens that the old tier has."""
        old, used = self.old, self.old.used
        index = old.token_index[: used + 1]
        index = index if len(index) > used else torch.cat((index, index[-1:]))  # one more slot, as in all blocks
        newest = SharedBlocks([x[:, :, : used + 1] for x in old.stored], index, None)
        return [*old.shared, newest] if used else [*old.shared]

    def warm(self) -> None:
        """Let the hot tier have the newest tokens of the old one, in whole blocks, as after an open or a cut."""
        count, block = self.old_tokens, self.sizes.block
        cold = max(0, count - hot_tokens(self.sizes, self.turn)) // block * block
        start = 0
        self._count(self.old.length, count - cold)
        for blocks in self._old_pieces:
            first, stop = (min(max(slot - start, 0), blocks.used) for slot in (cold, count))
            to = slice(start + first - cold, start + stop - cold)
            if first < stop:
                for x, row in zip(self.stored, blocks.stored, strict=True):
                    x[:, :, to] = row[:, :, first:stop]
                self.token_index[to] = blocks.token_index[first:stop]
            start += blocks.used
        self._show(cold)

    def _count(self, length: int, used: int) -> None:
        """Set how many tokens there are, on all ranks and in the hot tier."""
        self.known_length, self.filled = length, used
        self.state[0], self.state[1] = length, used

    def _show(self, cold: int) -> None:
        """Let the first tokens of the old tier be pieces of the cache."""
        pieces = list[SharedBlocks]()
        start = 0
        for blocks in self._old_pieces:
            count = min(cold - start, blocks.used)
            if count > 0:
                pieces.append(blocks if count == blocks.used else blocks.part(0, count))
            start += blocks.used
        self.shared = tuple(pieces)

    def _view(self, blocks: SharedBlocks) -> CacheView:
        """Return the view of a piece of the old tier, whose numbers are in CPU memory."""
        rows = self.sizes.keys_and_values(blocks.stored)
        with torch.inference_mode(False):
            state = torch.tensor([self.known_length, blocks.used], device="cpu")
        return CacheView(*rows, blocks.token_index, state, None, self.sizes.value_dim, file=blocks.file)

    def _set_length(self, piece: CacheView) -> None:
        piece.state[0] = self.known_length

    def append_run(self, new: Tensors, new_count: int, length: int, used: int) -> bool:
        """Add new tokens of which this rank owns all or none, if none has to leave; else return False."""
        if self._leaving(own_count := self.turn.count(length + new_count) - self.turn.count(length)):
            return False
        try:
            if not super().append_run(new, new_count, length, used):
                return False
            self.known_length, self.filled = length + new_count, used + own_count
        except BaseException:  # Ctrl-C, after the device has counted them
            self._count(length, used)
            raise
        return True

    def append(self, new: Tensors, token_mask: Tensor | None, counts: tuple[int, int] | None) -> None:
        """Add this rank's share of the new tokens; `new` has all tokens and heads."""
        new_count = new[0].shape[2]
        if not new_count or not self.append_run(new, new_count, self.length, self.used):
            super().append(new, token_mask, counts)

    def _leaving(self, new_count: int) -> int:
        """Return how many tokens leave the hot tier for so many new ones, which may leave at once: whole blocks."""
        total = self.used + new_count
        block = self.sizes.block
        return 0 if total <= self.slots else (total - hot_tokens(self.sizes, self.turn)) // block * block

    def _add(self, rows: Sequence[Tensor], tokens: Tensor, length: int) -> None:
        """Add rows of this rank's tokens, after which there are `length` on all ranks. All are added, or none."""
        used = self.used
        length_before = self.length
        steps = list[Callable[[], None]]()
        if leaving := self._leaving(len(tokens)):
            at_once = max(0, leaving - used)  # new ones that do not stay
            following = torch.cat((self.token_index[leaving:used][:1].cpu(), tokens[at_once:]))
            cold_rows = [x[:, :, : min(leaving, used)] for x in self.stored]
            if at_once:
                pairs = zip(cold_rows, rows, strict=True)
                cold_rows = [torch.cat((x, row[:, :, :at_once]), 2) for x, row in pairs]
            cold_tokens = torch.cat((self.token_index[: min(leaving, used)].cpu(), tokens[:at_once]))
            alone = self.heads.size == 1 and self.turn.period == self.turn.width
            retry = f"append again from token {length_before} on: the cache has those before" if alone else ""
            self._give(cold_rows, cold_tokens, int(following[0]) if len(following) else length, retry)
            steps += [*self._shift(leaving), partial(self._show, self.shared_tokens + leaving)]
            rows = [row[:, :, at_once:] for row in rows]
            tokens = tokens[at_once:]
            used = max(0, used - leaving)
        stop = used + len(tokens)
        steps += [partial(self._put, rows, tokens, used), partial(self._count, length, stop)]
        try:
            unbroken(steps)
        except BaseException:
            self.truncate(length_before)
            raise

    def _put(self, rows: Sequence[Tensor], tokens: Tensor, start: int) -> None:
        """Write rows of tokens to the hot tier."""
        stop = start + len(tokens)
        for x, row in self._beside(rows):
            x[:, :, start:stop] = row
        self.token_index[start:stop] = tokens

    def _beside(self, rows: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the memory of keys and of values, each with rows for it."""
        return zip(self.stored, rows, strict=True)

    def _shift(self, count: int) -> list[Callable[[], None]]:
        """Return steps that move the tokens after the first `count` to the front, so many at a time.

        No step writes what it reads.
        """
        left = self.used - count
        return [partial(self._move, start, min(start + count, left), count) for start in range(0, left, count)]

    def _move(self, start: int, stop: int, count: int) -> None:
        """Move the tokens that are `count` slots after these to them."""
        for x in (*self.stored, self.token_index[None, None]):
            x[:, :, start:stop] = x[:, :, start + count : stop + count]

    def _give(self, rows: Sequence[Tensor], tokens: Tensor, length: int, retry: str) -> None:
        """Let the old tier have these rows after those that are cold: with them it has all before `length`.

        Rows are those of the hot tier, and new ones after them. Where this raises, the cache is as it was, and `retry`
        is what can be done once there is space. It is empty where other ranks have done their part.
        """
        if self.old.length > self.length:  # an append has failed
            self.old.truncate(self.length)
        written = self.old_tokens - self.shared_tokens
        if written >= len(tokens) and self.old.length >= length:
            return
        new_count = max(0, length - self.old.length)
        try:
            self.old.append_at(tuple(x[:, :, written:].cpu() for x in rows), tokens[written:], new_count, None)
        except StoreError as error:
            subject, expected, given, _ = error.args
            is_gone = isinstance(error.__cause__, OSError) and error.__cause__.errno == ENOENT
            if is_gone or not retry:
                raise
            raise StoreError(subject, expected, given, f"free space there, and {retry}") from error

    def flush(self) -> None:
        """Let the old tier have copies of all hot tokens, which stay hot."""
        rows = [x[:, :, : self.used] for x in self.stored]
        self._give(rows, self.token_index[: self.used].cpu(), self.length, "flush again: the cache has all its tokens")

    def moved(self, device: torch.device, fail: Fail) -> "TieredShard":
        """Return a shard of the same tokens, with the newest on another device."""
        self.flush()
        return TieredShard(self.old, self.sizes, device, fail)

    def whole(self) -> CacheShard:
        """Return the shard on the CPU, with all tokens."""
        old = self.old.whole()  # refused in files, before anything is written
        self.flush()
        self._show(self.shared_tokens)
        return old

    def truncate(self, length: int) -> None:
        """Remove the tokens from `length` on."""
        count = self.count_before(length)
        cold = self.shared_tokens
        steps = list[Callable[[], None]]()
        if length < self.old.length:
            steps += [partial(self.old.truncate, length), partial(self._show, min(cold, count))]
        unbroken([*steps, self.warm if count < cold else partial(self._count, length, count - cold)])

    def mark_present(self, length: int, token_mask: Tensor | None, first: int) -> int:
        """Mark the tokens up to `length`, which a load has written to the old tier, as present."""
        used = self.old.mark_present(length, token_mask, first)
        self.warm()
        return used

    def grow(self, sizes: CacheSizes) -> None:
        """Reserve memory for a larger capacity."""
        self.old.grow(sizes)
        self.resize(sizes, max(self.slots, self._usual_slots(sizes)))
        self._show(self.shared_tokens)

    def reorder(self, index: Tensor) -> None:
        """Replace sequence b by sequence `index[b]`; the batch may change."""
        if self.is_in_files:  # refused before anything changes, unless each sequence stays
            self.old.reorder(index.cpu())
        cold, self.shared = self.shared_tokens, ()
        try:
            super().reorder(index)
            if not self.is_in_files:
                self.old.reorder(index.cpu())
        finally:  # there may be no memory: the cold tokens are tokens of the cache still
            self._show(cold)

    def fork(self) -> "TieredShard":
        """Return a shard of the same tokens, which shares the old tier's whole blocks, and copies the hot tier."""
        return self._with_old(self.old.fork())

    def clone(self) -> "TieredShard":
        """Return a copy with tensors of its own."""
        return self._with_old(self.old.clone())

    def _with_old(self, old: CacheShard) -> "TieredShard":
        """Return a copy with another old tier, of the same tokens."""
        other = self._copy()
        cold = self.shared_tokens
        assert isinstance(other, TieredShard)
        other.old, other.is_in_files = old, old.is_in_files
        self._show(cold)
        other._show(cold)
        return other

    def unshare(self, tokens: int | None = None) -> None:
        """Refuse to bring all tokens to the device."""
        expected, fix = "a call that reads tokens where they are", "make the cache without hot="
        raise KernelError("KVCache hot", expected, "one that needs all keys on the device", fix)
