"""Shards on one rank: its own, and copies of shards of another host, so that a lost rank loses no tokens."""

from collections.abc import Callable, Sequence
from copy import copy

import torch
from torch import Tensor

from attnmesh.comm.counters import Tensors
from attnmesh.comm.p2p import all_gather_ints, exchange_messages, meta_like
from attnmesh.comm.topology import hosts
from attnmesh.decode.cache_config import Sizes
from attnmesh.decode.cache_shard import CacheShard, TokenCounts
from attnmesh.errors import ShapeError
from attnmesh.kernels.cache_view import CacheView, Padding
from attnmesh.mesh.axes import Axis


class Shards:
    """This rank's `own` shard, and `copies` of other ranks' shards by index along the tokens axis.

    `keepers` are the ranks that keep copies of the own shard.
    """

    def __init__(self, axis: Axis, copies: int, make: Callable[[int], CacheShard]) -> None:
        """Make the shards, so that `copies` ranks hold each token."""
        keepers = keepers_by_rank(hosts(axis), copies) if copies > 1 else {}
        self.axis, self.keepers = axis, keepers.get(axis.index, [])
        self.own = make(axis.index)
        self.copies = {index: make(index) for index in keepers if axis.index in keepers[index]}
        self.counts = TokenCounts(self.own.block_cyclic, 0, (0,) * axis.size)
        self.known_length = 0  # a lower bound: the host does not see what a replayed graph appends

    @property
    def all(self) -> list[CacheShard]:
        """The own shard, then the copies."""
        return [self.own, *self.copies.values()]

    def clone(self) -> "Shards":
        """Return a copy with tensors of its own."""
        other = copy(self)
        other.own, other.copies = self.own.clone(), {index: shard.clone() for index, shard in self.copies.items()}
        return other

    def holds(self, tokens: int) -> bool:
        """Return True if at least `tokens` are cached within the capacity. Wait for the GPU only if unsure."""
        length = self.known_length if self.own.device.type == "cuda" else self.own.length
        if not tokens <= length <= self.own.sizes.capacity:
            length = self.own.length
        return tokens <= length <= self.own.sizes.capacity

    def check_fits(self, subject: str, more: int, counts: TokenCounts) -> None:
        """Raise, before anything is written, unless `more` tokens fit the capacity and, as `counts`, every rank."""
        capacity = self.own.sizes.capacity
        if self.own.device.type != "cuda" or self.known_length + more > capacity:
            self.known_length = self.own.length
        if self.known_length + more > capacity:
            given = f"{self.known_length} tokens and {more} more in a cache of {capacity}"
            fix = f"call cache.reserve({self.known_length + more}) on every rank"
            raise ShapeError(subject, "room for the new tokens", given, fix)
        counts.check(subject, self.known_length + more, self.own.slots)

    def append(self, new: Tensors, token_mask: Tensor | None) -> None:
        """Add new tokens that are the same on every rank."""
        self._advance(new[0].shape[2])
        for shard in self.all:
            shard.append(new, token_mask)

    def append_at(self, new: Tensors, tokens: Tensor, more: int, token_mask: Tensor | None) -> None:
        """Add this rank's tokens with its heads, and send copies; all ranks together add `more`."""
        self._advance(more)
        self.own.append_at(new, tokens, more, token_mask)
        self._exchange(new, tokens, more, token_mask)

    def truncate(self, length: int, table: Sequence[Sequence[int]]) -> None:
        """Remove the tokens from `length` on; rows are (rank, tokens before `length`)."""
        if length < self.counts.start:
            kept = sorted(set(map(tuple, table)))  # ranks along the heads axis hold the same tokens
            self.counts = TokenCounts(self.own.block_cyclic, length, tuple(count for _, count in kept))
        for shard in self.all:
            shard.truncate(length)
        self.known_length = length

    def grow(self, sizes: Sizes) -> None:
        """Reserve memory for a larger capacity. A shard that already has it stays as it is."""
        for shard in self.all[::-1]:  # the own shard last: its sizes are the cache's
            if sizes.capacity > shard.sizes.capacity:
                shard.grow(sizes)

    def mark_present(self, length: int, token_mask: Tensor | None) -> None:
        """Mark the first `length` tokens as present, once written at their block-cyclic slots, and send copies."""
        own, used = self.own, self.own.mark_present(length, token_mask)
        new = tuple(x[:, :, :used] for x in own.stored)
        self._exchange(new, own.token_index[:used], length, token_mask)
        self.known_length = length

    def _advance(self, more: int) -> None:
        if not torch.compiler.is_compiling():
            self.known_length += more

    def _exchange(self, new: Tensors, tokens: Tensor, more: int, token_mask: Tensor | None) -> None:
        """Send this rank's new tokens to its keepers, and add the tokens received to the copies."""
        if not self.keepers and not self.copies:
            return
        counts = [row[0] for row in all_gather_ints([len(tokens)], [self.axis])]
        sends = dict.fromkeys(self.keepers, (*new, tokens))
        wanted = {
            index: (*(meta_like(x, counts[index]) for x in new), meta_like(tokens, counts[index], 0))
            for index in self.copies
        }
        received = exchange_messages(sends, wanted, self.axis, tokens.device, "copying")()
        for index, shard in self.copies.items():
            *copied, token_index = received[index]
            shard.append_at(tuple(copied), token_index, more, token_mask)


class CacheProperties:
    """Read-only properties of a cache, from the shards that this rank keeps."""

    shards: Shards

    @property
    def shard(self) -> CacheShard:
        """This rank's own shard."""
        return self.shards.own

    @property
    def sizes(self) -> Sizes:
        """Sizes of this layer over all ranks."""
        return self.shard.sizes

    @property
    def keys(self) -> Tensor:
        """This rank's keys, (batch, heads, slots, dim), of which the first `used` slots hold tokens."""
        return self.shard.keys

    @property
    def values(self) -> Tensor:
        """This rank's values, in the slots of its keys."""
        return self.shard.values

    @property
    def padding(self) -> Padding | None:
        """Padding of the batch, or None if all tokens are real."""
        return self.shard.padding

    @property
    def held(self) -> CacheView:
        """View of this rank's shard for kernels."""
        return self.shard.held

    @property
    def length(self) -> int:
        """Cached tokens per sequence on all ranks, padding included."""
        return self.shard.length

    @property
    def used(self) -> int:
        """Cached tokens per sequence on this rank."""
        return self.shard.used

    @property
    def lengths(self) -> Tensor:
        """Real tokens of each sequence on all ranks, (batch,)."""
        length = self.shard.state[0].expand(self.sizes.batch)
        return (length if self.padding is None else self.padding.lengths).clone()

    @property
    def is_block_cyclic(self) -> bool:
        """True if all tokens lie where the block-cyclic layout puts them, as after `append` alone."""
        return self.shards.counts.start == 0

    def holds(self, tokens: int) -> bool:
        """Return True if at least `tokens` are cached within the capacity."""
        return self.shards.holds(tokens)


def keepers_by_rank(hosts: Sequence[Sequence[int]], copies: int) -> dict[int, list[int]]:
    """Return the ranks that keep copies of each rank's shard: one per next host. On too few hosts, the next ranks.

    >>> keepers_by_rank([[0, 1], [2, 3]], 2), keepers_by_rank([[0, 1, 2]], 2)
    ({0: [2], 1: [3], 2: [0], 3: [1]}, {0: [1], 1: [2], 2: [0]})
    """
    groups = hosts if len(hosts) >= copies else [[rank] for host in hosts for rank in host]
    keepers: dict[int, list[int]] = {}
    for number, group in enumerate(groups):
        others = [groups[(number + step) % len(groups)] for step in range(1, copies)]
        keepers |= {rank: [other[place % len(other)] for other in others] for place, rank in enumerate(group)}
    return keepers


def check_copies(copies: object, ranks: int) -> None:
    """Raise unless each of `copies` copies fits on a rank of its own."""
    if isinstance(copies, bool) or not isinstance(copies, int) or not 1 <= copies <= ranks:
        fix = f"pass copies={ranks}, or use more ranks along queries and keys"
        raise ShapeError("KVCache copies", f"1 to {ranks}, the ranks that tokens are sharded over", repr(copies), fix)
