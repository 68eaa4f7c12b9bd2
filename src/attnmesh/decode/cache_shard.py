"""Per-rank shard of one layer's cache, and the block-cyclic assignment of tokens to ranks.

Memory for all tokens is reserved at once; the number of tokens present is a tensor on the device.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnmesh.comm.counters import Tensors
from attnmesh.comm.p2p import meta_like, swap
from attnmesh.core.digest import hash_each
from attnmesh.decode.cache_config import Sizes
from attnmesh.errors import LayoutError, ShapeError
from attnmesh.kernels.cache_view import CacheView, Padding
from attnmesh.mesh.axes import Axis, Mesh


@dataclass(frozen=True)
class BlockCyclic:
    """Assignment of blocks of `block` tokens to `ranks` ranks, round robin."""

    block: int
    ranks: int

    def owner(self, tokens: Tensor) -> Tensor:
        """Return the rank of each token.

        >>> import torch
        >>> BlockCyclic(block=2, ranks=2).owner(torch.arange(7))
        tensor([0, 0, 1, 1, 0, 0, 1])
        """
        return tokens // self.block % self.ranks

    def slot(self, tokens: Tensor) -> Tensor:
        """Return each token's slot in the shard of its rank."""
        return tokens // (self.block * self.ranks) * self.block + tokens % self.block

    def count(self, rank: int, length: int) -> int:
        """Return how many of the first `length` tokens a rank holds.

        >>> [BlockCyclic(block=2, ranks=2).count(rank, 7) for rank in range(2)]
        [4, 3]
        """
        rounds, rest = divmod(length, self.block * self.ranks)
        return rounds * self.block + min(max(rest - rank * self.block, 0), self.block)


@dataclass(frozen=True)
class TokenCounts:
    """Tokens per rank: `initial` for the first `start` tokens, block-cyclic from there on."""

    block_cyclic: BlockCyclic
    start: int
    initial: tuple[int, ...]

    def counts(self, length: int) -> list[int]:
        """Return how many of the first `length` tokens each rank holds.

        >>> TokenCounts(BlockCyclic(block=2, ranks=2), start=3, initial=(3, 0)).counts(7)
        [5, 2]
        """
        count = self.block_cyclic.count
        return [n + count(rank, length) - count(rank, self.start) for rank, n in enumerate(self.initial)]

    def with_shards(self, length: int, table: Sequence[Sequence[int]]) -> "TokenCounts":
        """Return the counts after `append_shard` to `length` tokens; rows are (tokens, rank, _, block-cyclic)."""
        if not self.start and all(block_cyclic for *_, block_cyclic in table):
            return self
        counts = self.counts(length)
        for count, rank, *_ in table:
            counts[rank] += count
        return TokenCounts(self.block_cyclic, length + sum(row[0] for row in table), tuple(counts))

    def check(self, subject: str, length: int, slots: int) -> None:
        """Raise unless the fullest rank holds `length` tokens in `slots`; block-cyclic tokens always fit."""
        fullest = max(self.counts(length)) if self.start else 0
        if fullest > slots:
            given = f"{fullest} tokens on a rank of {slots} slots"
            fix = f"call cache.reserve({fullest * len(self.initial)}) on every rank, or prefill in even shards"
            raise ShapeError(subject, "tokens spread evenly over the ranks", given, fix)


def check_cover(total: int, start: int, more: int) -> None:
    """Raise unless `total` is the position sum of `start` to `start + more - 1`, each on exactly one rank."""
    if (total - position_sum(torch.arange(start, start + more))) % 2**64:
        expected = f"positions from {start} to {start + more - 1}, each on one rank"
        fix = "pass layout.positions(length, shards, index), counted from the cache's length"
        raise LayoutError("append_shard", expected, f"{more} positions with gaps or repeats", fix)


def position_sum(positions: Tensor) -> int:
    """Return a sum of hashes, modulo 2^64, that distinguishes sets of positions."""
    return int(hash_each(positions + 1).sum())


def stored(k: Tensor, v: Tensor | None) -> Tensors:
    """Return the tensors of new tokens that a cache stores."""
    return (k,) if v is None else (k, v)


def swap_tokens_for_heads(new: Tensors, positions: Tensor, counts: Sequence[int], mesh: Mesh) -> tuple[Tensors, Tensor]:
    """Return this rank's heads of the tokens of all ranks along the heads axis; `counts` are tokens per shard."""
    axis, shape = mesh.heads, mesh.shape
    if axis.size == 1:
        return new, positions
    sends = [(*part, positions) for part in zip(*(x.chunk(axis.size, 1) for x in new), strict=True)]
    shards = [shape.shard(h, mesh.queries.index, mesh.keys.index) for h in range(axis.size)]
    wanted = [tuple(meta_like(x, counts[shard], 2 if x.ndim == 4 else 0) for x in sends[0]) for shard in shards]
    received = zip(*swap(sends, wanted, axis), strict=True)
    *heads, positions = (torch.cat(x, dim=-2 if x[0].ndim == 4 else 0) for x in received)
    return tuple(heads), positions


SLACK = 2
"""Tokens by which a prefill shard may exceed an even share: each of a zigzag's two chunks is rounded up."""


class CacheShard:
    """Keys and values of one rank's tokens and heads; `index` is the rank's index along the tokens axis.

    `stored` has the keys, and the values unless they are the first columns of the keys.
    """

    stored: list[Tensor]

    def __init__(self, sizes: Sizes, heads: Axis, ranks: int, device: torch.device, index: int) -> None:
        self.sizes, self.heads, self.index, self.device = sizes, heads, index, device
        self.block_cyclic = BlockCyclic(sizes.block, ranks)
        self.slots = self._slots(sizes.capacity)
        # The extra slot takes writes of other ranks' tokens, so that no step asks the device which rank owns a token.
        shape = sizes.batch, sizes.kv_heads // heads.size, self.slots + 1
        with torch.inference_mode(False):  # tensors that can be written to in any mode
            self.stored = [torch.empty(*shape, width, dtype=sizes.dtype, device=device) for width in sizes.widths]
            self.token_index = torch.zeros(self.slots + 1, dtype=torch.int64, device=device)  # the token in each slot
            self.state = torch.zeros(2, dtype=torch.int64, device=device)  # tokens on all ranks, tokens on this rank
        self.padding: Padding | None = None

    @property
    def keys(self) -> Tensor:
        """Keys, (batch, heads, slots, head_dim)."""
        return self.stored[0]

    @property
    def values(self) -> Tensor:
        """Values, (batch, heads, slots, value_dim)."""
        return self.stored[1] if len(self.stored) > 1 else self.keys[..., : self.sizes.value_dim]

    @property
    def length(self) -> int:
        """Cached tokens on all ranks."""
        return int(self.state.tolist()[0])

    @property
    def used(self) -> int:
        """Cached tokens on this rank."""
        return int(self.state.tolist()[1])

    @property
    def held(self) -> CacheView:
        """View of this shard for kernels."""
        return CacheView(self.keys, self.values, self.token_index, self.state, self.padding)

    @property
    def token_mask(self) -> Tensor | None:
        """Mask of the tokens on all ranks, False for padding, (batch, length); None without padding."""
        return None if self.padding is None else self.padding.token_mask[:, : self.length]

    def append(self, new: Tensors, token_mask: Tensor | None) -> None:
        """Add this rank's share of the new tokens; `new` has all tokens and heads."""
        more = new[0].shape[2]
        if self._owns_none(more, token_mask):
            self.state[0] += more
            return
        length, used = self.state.unbind()
        tokens = length + torch.arange(more, device=self.device)
        mine = (self.block_cyclic.owner(tokens) == self.index) & (tokens < self.sizes.capacity)
        slots = torch.where(mine, used + mine.cumsum(0) - 1, self.slots).clamp(max=self.slots)
        self._write([x.chunk(self.heads.size, 1)[self.heads.index] for x in new], tokens, slots)
        self._pad(tokens, slots, more, token_mask)
        self.state += torch.stack((torch.full_like(length, more), mine.sum()))

    def append_at(self, new: Tensors, tokens: Tensor, more: int, token_mask: Tensor | None) -> None:
        """Add the given tokens with this rank's heads; all ranks together add `more`."""
        order = tokens.argsort()
        slots = self.used + torch.arange(len(order), device=self.device)
        self._write([x.index_select(2, order) for x in new], tokens[order], slots)
        self._pad(tokens[order], slots, more, token_mask)
        self.state += torch.tensor([more, len(order)], device=self.device)

    def count_before(self, length: int) -> int:
        """Return how many of the first `length` tokens this rank holds."""
        return int(torch.searchsorted(self.token_index[: self.used], length))

    def truncate(self, length: int) -> None:
        """Remove the tokens from `length` on."""
        if self.padding is not None:
            self.padding.cut(length, self.length)
        self.state.copy_(torch.tensor([length, self.count_before(length)]))

    def grow(self, sizes: Sizes) -> None:
        """Reserve memory for a larger capacity, copying one tensor at a time."""
        used, slots = self.used, self._slots(sizes.capacity)
        with torch.inference_mode(False):
            token_index = torch.nn.functional.pad(self.token_index, (0, slots + 1 - len(self.token_index)))
            padding = None if self.padding is None else self.padding.grown(sizes.capacity, slots + 1)
            for number, old in enumerate(self.stored):
                new = old.new_empty(*old.shape[:2], slots + 1, old.shape[3])
                new[:, :, :used] = old[:, :, :used]
                self.stored[number] = new
        # Assigned last: where an allocation above fails, the shard keeps working at its old capacity.
        self.sizes, self.slots, self.token_index, self.padding = sizes, slots, token_index, padding

    def reorder(self, index: Tensor) -> None:
        """Replace sequence b by sequence `index[b]`; the batch may change."""
        used = self.used
        if len(index) != self.sizes.batch:
            with torch.inference_mode(False):
                self.stored = [x.index_select(0, index) for x in self.stored]
            self.sizes = replace(self.sizes, batch=len(index))
        else:
            for head in range(self.keys.shape[1]):  # the temporary copy is one head
                for x in self.stored:
                    x[:, head, :used] = x[:, head, :used].index_select(0, index)
        if self.padding is not None:
            self.padding = self.padding.reordered(index)

    def mark_present(self, length: int, token_mask: Tensor | None) -> int:
        """Mark the first `length` tokens as present. Return how many of them this rank holds."""
        used = self.block_cyclic.count(self.index, length)
        self.state.copy_(torch.tensor([length, used]))
        if token_mask is not None:
            zero, slots = torch.zeros_like(self.state[0]), torch.arange(used, device=self.device)
            self.padding = Padding.none(self.sizes.batch, self.sizes.capacity, self.token_index, zero)
            self.padding.add(zero, token_mask.to(self.device), self.token_index[:used], slots)
        return used

    def clone(self) -> "CacheShard":
        """Return a copy with tensors of its own."""
        other = copy(self)
        with torch.inference_mode(False):
            other.stored = [x.clone() for x in self.stored]
            other.token_index, other.state = self.token_index.clone(), self.state.clone()
            if self.padding is not None:
                other.padding = Padding(*(x.clone() for x in self.padding))
        return other

    def _slots(self, capacity: int) -> int:
        """Return the slots per rank for a capacity."""
        return min(capacity, -(-capacity // self.block_cyclic.ranks) + self.sizes.block + SLACK)

    def _owns_none(self, more: int, token_mask: Tensor | None) -> bool:
        """Return True if another rank owns all new tokens. Return False where only a GPU holds the answer."""
        if torch.compiler.is_compiling() or self.device.type == "cuda" or not more:
            return False
        if self.padding is not None or token_mask is not None:  # every rank records padding
            return False
        length = self.length
        first, last = length // self.sizes.block, (length + more - 1) // self.sizes.block
        return first == last and first % self.block_cyclic.ranks != self.index

    def _write(self, new: Sequence[Tensor], tokens: Tensor, slots: Tensor) -> None:
        """Write tokens with this rank's heads into slots."""
        for x, tensor in zip(self.stored, new, strict=True):
            x.index_copy_(2, slots, tensor)
        self.token_index.index_copy_(0, slots, tokens)

    def _pad(self, tokens: Tensor, slots: Tensor, more: int, token_mask: Tensor | None) -> None:
        """Record which of `more` new tokens are padding, before the length includes them."""
        if token_mask is None and self.padding is None:
            return
        length, sizes = self.state[0], self.sizes
        self.padding = self.padding or Padding.none(sizes.batch, sizes.capacity, self.token_index, length)
        all_real = torch.ones(sizes.batch, more, dtype=torch.bool, device=self.device)
        self.padding.add(length, all_real if token_mask is None else token_mask.to(self.device), tokens - length, slots)
