"""Shards on one rank: its own, and copies of shards of another host, so that a lost rank loses no tokens."""

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial

import torch
from torch import Tensor

from attnmesh.cache.block_cyclic import TokenCounts
from attnmesh.cache.cache_config import CacheConfig
from attnmesh.cache.cache_shard import CacheShard, usual_slots
from attnmesh.cache.frozen_piece import FrozenPiece
from attnmesh.cache.window import WindowStart, first_needed
from attnmesh.comm.p2p import Channel, meta_like
from attnmesh.comm.topology import agreed_hosts, dist_all_gather_ints
from attnmesh.core.mask import Mask
from attnmesh.errors import KernelError, ShapeError
from attnmesh.guard.agreement import is_capturing, may_compare
from attnmesh.mesh.axes import Axis
from attnmesh.mesh.shares import checked_shares
from attnmesh.runtime.tensors import Tensors


class LocalShards:
    """Shards of a cache on this rank: its own, and copies of other ranks' shards.

    Tokens are counted in several places. This class alone writes its counts, and a shard those of its own::

        count                 of which tokens                        who reads it
        shard.device_counts   those of all ranks, and of the shard   kernels, and the CPU if the shard is there
        cpu_length            those of all ranks                     the CPU, which would wait for a GPU
        rank_counts           those of each rank, up to any length   the same, and checks of room on other ranks
        shard.used_at_most    those of the shard                     `CacheShard.make_room`, if the cache forgets

    An append or a truncation writes `device_counts` first and then the others, so that all agree. A graph's replay
    writes `device_counts` alone: `cpu_length` and `used_at_most` lag behind them. `in_graphs` is true from the capture
    on, and `length` asks the device, until `leave_graphs` corrects `cpu_length`. `used_at_most` is corrected when the
    shard moves its tokens or loses some. Where the shard is on the CPU, `length` always asks it, and `check_fits`
    corrects `cpu_length`. `rank_counts` holds for any length while tokens lie block-cyclic. Ranks agree on new ones
    when tokens do not.
    """

    def __init__(self, axis: Axis, copies: int, make: Callable[[int], CacheShard]) -> None:
        """Make the shards, so that `copies` ranks hold each token."""
        keepers = keepers_by_rank(agreed_hosts(axis), copies) if copies > 1 else {}
        self.axis = axis
        self.keepers = keepers.get(axis.index, [])
        """Ranks that keep copies of the own shard."""
        self.own = make(axis.index)
        self.copy_shards = {index: make(index) for index in keepers if axis.index in keepers[index]}
        """Copies of other ranks' shards, by index along the tokens axis."""
        self.rank_counts = TokenCounts(self.own.block_cyclic, 0, (0,) * axis.size)
        self.cpu_length = 0
        """Tokens on all ranks, without those that graphs append."""
        self.in_graphs = False
        """True if a graph holds an append: the CPU does not see its replays."""
        self.forked = False
        """True if other caches may share memory with this one. All ranks say the same, also one that shares none."""
        self.first_query = 0
        """The cache serves this query and all later ones. Tokens that none of these sees may be forgotten."""

    @property
    def all(self) -> list[CacheShard]:
        """The own shard, then the copies."""
        return [self.own, *self.copy_shards.values()]

    def clone(self) -> "LocalShards":
        """Return a copy with tensors of its own."""
        other = self._with(lambda shard: shard.clone())
        other.forked = False
        return other

    def fork(self) -> "LocalShards":
        """Return shards that share the memory of whole blocks with these."""
        self.forked = self.forget_mask is None
        return self._with(lambda shard: shard.fork())

    def _with(self, change: Callable[[CacheShard], CacheShard]) -> "LocalShards":
        """Return a copy with `change(shard)` in place of each shard."""
        other = copy(self)
        other.own, other.copy_shards = (
            change(self.own),
            {index: change(shard) for index, shard in self.copy_shards.items()},
        )
        return other

    def join_pieces(self) -> CacheShard:
        """Copy what forks share, and return the own shard, with all of its tokens in one memory of its own."""
        own, *_ = [shard.join_pieces() for shard in self.all]
        self.forked = False
        return own

    def replace_own(self, shard: CacheShard) -> None:
        """Let another shard of this rank's tokens be the own one."""
        self.own, self.cpu_length = shard, shard.length

    @property
    def length(self) -> int:
        """Cached tokens on all ranks. The CPU counts them where it would wait for a GPU, unless a graph appends."""
        return self.own.length if self.own.device.type != "cuda" or self.in_graphs else self.cpu_length

    def length_and_used(self, shard: CacheShard) -> tuple[int, int] | None:
        """Return the counts of tokens: on all ranks, and in a shard. None where the device alone knows them."""
        if torch.compiler.is_compiling():
            return None
        if shard.device.type != "cuda":
            length, used, *_ = shard.device_counts.tolist()
            return length, used
        if self.in_graphs or is_capturing(shard.device):
            return None
        if self.forget_mask is not None:
            return self.cpu_length, shard.used_at_most
        return self.cpu_length, self.rank_counts.by_rank(self.cpu_length)[shard.index] - shard.earlier_tokens

    def adopt_counts(self, rank_counts: TokenCounts) -> None:
        """Count each rank's tokens as all ranks have reported them."""
        self.rank_counts = rank_counts

    def set_length(self, length: int) -> None:
        """Count `length` tokens on all ranks, as the ranks have agreed and the shards have them."""
        self.cpu_length = length

    def leave_graphs(self) -> None:
        """Let the CPU count tokens again: no graph appends any more."""
        if self.in_graphs:
            self.cpu_length, self.in_graphs = self.own.length, False

    def check_room(self, subject: str, row: int, new_count: int) -> None:
        """Raise unless a row of `new_count` tokens fits. Counts of ranks are read only where there may be no room."""
        if self.length + new_count > self.own.config.capacity or self.rank_counts.start:
            self.check_fits(f"{subject} k of row {row}", new_count)

    def check_fits(self, subject: str, new_count: int, rank_counts: TokenCounts | None = None) -> None:
        """Raise, before anything is written, unless `new_count` tokens fit the capacity, and each rank.

        `rank_counts` are those after the call, or None if the call does not change them.
        """
        if torch.compiler.is_compiling():
            return
        capacity = self.own.config.capacity
        unsure = self.in_graphs or self.cpu_length + new_count > capacity
        if self.own.device.type != "cuda" or (unsure and may_compare(self.own.device)):
            self.cpu_length = self.length
        if self.cpu_length + new_count > capacity:
            given = f"{self.cpu_length} tokens and {new_count} more in a cache of {capacity}"
            fix = f"call cache.reserve({self.cpu_length + new_count}) on every rank"
            raise ShapeError(subject, "room for the new tokens", given, fix)
        if self.forget_mask is None:  # the shards of a cache that forgets grow
            turns = self.own.block_cyclic.turns  # earlier pieces of a rank lie in some of its slots
            counts = self.rank_counts if rank_counts is None else rank_counts
            counts.check(subject, self.cpu_length + new_count, lambda rank: usual_slots(self.own.config, turns[rank]))

    def check_unpadded(self, subject: str, token_mask: Tensor | None) -> None:
        """Raise if a cache in a folder, or in two memories, gets padding."""
        is_hot = self.own.config.hot is not None
        if token_mask is None or not (is_hot or self.own.is_in_files) or bool(token_mask.all()):
            return
        expected, fix = "sequences without padding in a folder", "give each sequence a folder of its own"
        if is_hot:
            expected, fix = "sequences without padding beside hot=", "give each sequence a cache of its own"
        raise KernelError(f"{subject} token_mask", expected, "a mask", fix)

    def check_length(self, length: int, before: int) -> None:
        """Raise unless `before` tokens can be truncated to `length`."""
        if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= before:
            given, fix = f"{length!r} of type {type(length).__name__}", f"pass an int that is no more than {before}"
            raise ShapeError("truncate", f"a length from 0 to {before}", given, fix)
        if length and not self.serves(length):
            expected = f"0, or at least {self.first_query}: the cache has forgotten what earlier tokens see"
            fix = (
                f"make the cache with keep={before - length} or more, counted from the longest length; or truncate to 0"
            )
            raise ShapeError("truncate", expected, f"{length} of {before} tokens", fix)

    def try_append(self, new: Tensors) -> bool:
        """Add new tokens that fit, or return False. They are the same on every rank, and of a known signature."""
        shard = self.own
        length_and_used = self.length_and_used(shard)
        new_count = new[0].shape[2]
        if length_and_used is None or not new_count or length_and_used[0] + new_count > shard.config.capacity:
            return False
        if shard.padding is not None or self.rank_counts.start:
            return False
        if self.copy_shards or shard.config.mask is not None:
            self.append(new, None)
            return True
        if not shard.try_append_run(new, new_count, *length_and_used):
            return False
        self.cpu_length = length_and_used[0] + new_count
        return True

    def append(self, new: Tensors, token_mask: Tensor | None) -> None:
        """Add new tokens that are the same on every rank."""
        new_count = new[0].shape[2]
        if self.forget_mask is None:
            for shard in self.all:
                shard.append(new, token_mask, self.length_and_used(shard))
        else:
            start, first_query = self.cpu_length, self._first_query_after(new_count, new_count)
            for shard in self.all:
                own_count = shard.turn.count(start + new_count) - shard.turn.count(start)
                if shard.make_room(own_count, partial(self._first_needed, first_query)):
                    self.first_query = first_query  # not at the end alone: what comes next may find no memory
                shard.append(new, token_mask, self.length_and_used(shard))
            self.first_query = first_query
        self._advance(new_count)

    def append_at(self, new: Tensors, tokens: Tensor, new_count: int, token_mask: Tensor | None, queries: int) -> None:
        """Add this rank's tokens with its heads, and send copies; all ranks together add `new_count`.

        The last `queries` of all tokens may be decoded before the next append.
        """
        first = 0
        if self.forget_mask is None:
            self.own.append_at(new, tokens, new_count, token_mask)
        else:
            first_query = self._first_query_after(new_count, queries)
            first = self._first_needed(first_query, token_mask, new_count)
            if skips := first > self.cpu_length:
                kept = tokens >= first
                new = tuple(x[:, :, kept] for x in new)
                tokens = tokens[kept]
            if self.own.make_room(len(tokens), lambda: first, forget=skips):
                self.first_query = first_query  # as in `append`
            self.own.append_at(new, tokens, new_count, token_mask)
            self.first_query = first_query
        self._advance(new_count)
        self._send_copies(new, tokens, new_count, token_mask, first)

    def append_blocks(self, piece: FrozenPiece | None, new: Tensors, tokens: Tensor, new_count: int) -> None:
        """Add the tokens of a piece, which stays shared, and copies of `new` after it, to an empty cache.

        All ranks together add `new_count` tokens, which lie block-cyclic.
        """
        self.own.append_at(new, tokens, new_count, None)
        if piece is not None:
            try:
                self.own.put_before(piece)
            except BaseException:  # there may be no memory, and the cache is empty still
                self.own.truncate(0)
                raise
            self.forked = True
        self.cpu_length += new_count

    def _advance(self, new_count: int) -> None:
        if may_compare(self.own.device):
            self.cpu_length += new_count
        else:  # a graph is made, not run
            self.in_graphs = True

    def _send_copies(self, new: Tensors, tokens: Tensor, new_count: int, token_mask: Tensor | None, first: int) -> None:
        """Send this rank's new tokens to its keepers, and add the tokens received to the copies.

        Collective along the tokens axis, if the cache has copies.
        """
        if not self.keepers and not self.copy_shards:
            return
        counts = [row[0] for row in dist_all_gather_ints([len(tokens)], [self.axis])]
        sends = dict.fromkeys(self.keepers, (*new, tokens))
        receives = {
            index: (*(meta_like(x, counts[index]) for x in new), meta_like(tokens, counts[index], 0))
            for index in self.copy_shards
        }
        received = Channel(self.axis, tokens.device).begin_messages(sends, receives, "copying")()
        for index, shard in self.copy_shards.items():
            *copied, token_index = received[index]
            if self.forget_mask is not None:
                shard.make_room(len(token_index), lambda: first, forget=first > shard.length)
            shard.append_at(tuple(copied), token_index, new_count, token_mask)

    def truncate(self, length: int, table: Sequence[Sequence[int]]) -> None:
        """Remove the tokens from `length` on. Rows of `table` are (rank, its tokens before `length`)."""
        for shard in self.all:
            shard.truncate(length)
        if length < self.rank_counts.start:
            kept = sorted(set(map(tuple, table)))  # ranks along the heads axis hold the same tokens
            self.rank_counts = TokenCounts(self.own.block_cyclic, length, tuple(count for _, count in kept))
        self.cpu_length, self.first_query = length, min(self.first_query, length)

    def grow(self, config: CacheConfig) -> None:
        """Reserve memory for a larger capacity. A shard that already has it stays as it is."""
        for shard in self.all[::-1]:  # the own shard last: its config is the cache's
            if config.capacity > shard.config.capacity:
                shard.grow(config)

    def prepare(self, length: int, start: WindowStart) -> None:
        """Make room at block-cyclic slots for the tokens from `start.first_token` up to `length`."""
        self.first_query = start.first_query
        if self.forget_mask is not None:
            count = self.own.turn.count
            self.own.make_room(count(length) - count(start.first_token), lambda: start.first_token)

    def mark_present(self, length: int, token_mask: Tensor | None, first: int = 0) -> None:
        """Mark the tokens that `prepare` made room for as present, once written, and send copies."""
        shard = self.own
        used = shard.mark_present(length, token_mask, first)
        new = tuple(x[:, :, :used] for x in shard.kv_tensors)
        self._send_copies(new, shard.token_index[:used], length, token_mask, first)
        self.cpu_length = length

    @property
    def forget_mask(self) -> Mask | None:
        """The mask by which tokens are forgotten, or None."""
        return self.own.config.mask

    def serves(self, query: int) -> bool:
        """Return whether all tokens that queries from token `query` on see are cached."""
        if self.forget_mask is None or query >= self.first_query:
            return True
        first_seen = 0 if self.own.padding is not None else self.forget_mask.first_seen(query)
        return self.forget_mask.first_seen(self.first_query) <= first_seen

    def first_token(self) -> int:
        """Return the first token that is needed."""
        return self._first_needed(self.first_query)

    @property
    def window_start(self) -> WindowStart:
        """The first token that is needed, and the first query that can be decoded."""
        return WindowStart(self.first_token(), self.first_query)

    def _first_query_after(self, new_count: int, queries: int) -> int:
        """Return the first query to serve after an append: no later than the last `queries`, or those after a cut."""
        past = max(queries, self.own.config.keep + 1)
        return max(self.first_query, self.cpu_length + new_count - past)

    def _first_needed(self, first_query: int, token_mask: Tensor | None = None, new_count: int = 0) -> int:
        """Return the first token that `first_query` needs, after `new_count` new tokens with this mask."""
        if self.forget_mask is None:
            return 0
        shard, length, real = self.own, self.cpu_length, None
        if shard.padding is not None or token_mask is not None:
            real = torch.ones(shard.config.batch, length + new_count, dtype=torch.bool, device=shard.device)
            if shard.padding is not None:
                real[:, :length] = shard.padding.token_mask[:, :length]
            if token_mask is not None:
                real[:, length:] = token_mask.to(shard.device)
        return first_needed(self.forget_mask, first_query, shard.config.block, real)


def keepers_by_rank(hosts: Sequence[Sequence[int]], copies: int) -> dict[int, list[int]]:
    """Return the ranks that keep copies of each rank's shard: one per next host. On too few hosts, the next ranks.

    >>> keepers_by_rank([[0, 1], [2, 3]], 2), keepers_by_rank([[0, 1, 2]], 2)
    ({0: [2], 1: [3], 2: [0], 3: [1]}, {0: [1], 1: [2], 2: [0]})
    """
    groups = hosts if len(hosts) >= copies else [[rank] for host in hosts for rank in host]
    keepers: dict[int, list[int]] = {}
    for place, group in enumerate(groups):
        next_groups = [groups[(place + step) % len(groups)] for step in range(1, copies)]
        keepers |= {rank: [other[index % len(other)] for other in next_groups] for index, rank in enumerate(group)}
    return keepers


def checked_placement(subject: str, copies: object, shares: object, ranks: int) -> tuple[float, ...] | None:
    """Return the shares, None for even ones and for "auto". Raise unless tokens can be placed on `ranks` ranks."""
    check_copies(copies, ranks)
    return checked_shares(subject, shares, ranks)


def check_even_shares(subject: str, shares: object, *, even: bool) -> None:
    """Raise unless each rank holds every n-th block, so that its blocks are one subtree of the tree over blocks."""
    if not even:
        fix = "leave shares= out, or reproducible=True"
        raise KernelError(subject, "even shares, whose blocks are subtrees of one tree", f"shares={shares}", fix)


def check_copies(copies: object, ranks: int) -> None:
    """Raise unless each of `copies` copies fits on a rank of its own."""
    if isinstance(copies, bool) or not isinstance(copies, int) or not 1 <= copies <= ranks:
        fix = f"pass copies={ranks}, or use more ranks along queries and keys"
        raise ShapeError("KVCache copies", f"1 to {ranks}, the ranks that tokens are sharded over", repr(copies), fix)
