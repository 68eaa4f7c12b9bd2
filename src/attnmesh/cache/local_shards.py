"""Shards on one rank: its own, and copies of shards of another host, so that a lost rank loses no tokens."""

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial as partial_of

import torch
from torch import Tensor

from attnmesh.cache.block_cyclic import RankCounts
from attnmesh.cache.cache_config import CacheConfig
from attnmesh.cache.cache_shard import CacheShard
from attnmesh.cache.frozen_piece import FrozenPiece
from attnmesh.cache.memory_shard import usual_slots
from attnmesh.cache.token_counter import TokenCounter
from attnmesh.cache.window import WindowStart, oldest_kept_token
from attnmesh.comm.p2p import Channel, meta_like
from attnmesh.comm.topology import agreed_hosts, dist_all_gather_ints
from attnmesh.core.mask import Mask
from attnmesh.errors import InputError, ShapeError
from attnmesh.guard.agreement import is_capturing, may_compare
from attnmesh.mesh.axes import Axis
from attnmesh.runtime.unbroken import Action, unbroken


class LocalShards:
    """Shards of a cache on this rank: its own, and copies of other ranks' shards.

    Its methods keep the `counter` equal to what the shards have. These add tokens:

        call of KVCache   here                   of each shard    tokens
        append, again     try_append_plain       try_append_run   of a known signature; or False: `append` follows
        append            append                 append_own       equal on all ranks, of which a rank keeps its own
        append_shard      append_rows_at         append_rows_at   this rank's alone, at any positions, then copies
        append_pages      append_shared_blocks   append_rows_at   of an engine's pool, whose last blocks are copied

    A cache with a `forget_mask` first makes room in each shard, which may forget tokens for it.

    With copies or a `forget_mask`, `try_append_plain` calls `append_own`. In memory `append_own` tries `try_append_run`
    first, and then lets the device find the slots. In two memories it tries that too, and then moves tokens to the cold
    tier by its `append_rows_at`. In files it writes rows piece by piece.
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
        self.counter = TokenCounter(self.own.block_cyclic, [axis.index, *self.copy_shards])
        self.forked = False
        """True if other caches may share memory with this one. All ranks say the same, also one that shares none."""
        self.oldest_query = 0
        """The cache serves this query and all later ones. Tokens that none of these sees may be forgotten."""

    @property
    def shards(self) -> list[CacheShard]:
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
        other.counter = self.counter.clone()
        return other

    def join_pieces(self) -> CacheShard:
        """Copy what forks share, and return the own shard, with all of its tokens in one memory of its own."""
        own, *_ = [shard.join_pieces() for shard in self.shards]
        self.forked = False
        return own

    def replace_own(self, shard: CacheShard) -> None:
        """Let another shard of this rank's tokens be the own one."""
        self.own = shard
        self.counter.set_length(shard.length)

    @property
    def length(self) -> int:
        """Cached tokens on all ranks. The CPU counts them where it would wait for a GPU, unless a graph appends."""
        return self.counter.length_in(self.own)

    def leave_graphs(self) -> None:
        """Let the CPU count tokens again: no graph appends any more."""
        if self.counter.in_graphs:
            self.counter.leave_graphs(self.own.length)

    # --- checks, before anything is written ---

    def check_row_fits(self, subject: str, row: int, new_count: int) -> None:
        """Raise unless a row of `new_count` tokens fits. Counts of ranks are read only where there may be no room."""
        if self.length + new_count > self.own.config.capacity or self.counter.rank_counts.start:
            self.check_fits(f"{subject} k of row {row}", new_count)

    def check_fits(self, subject: str, new_count: int, rank_counts: RankCounts | None = None) -> None:
        """Raise, before anything is written, unless `new_count` tokens fit the capacity, and each rank.

        `rank_counts` are those after the call, or None if the call does not change them.
        """
        if torch.compiler.is_compiling():
            return
        capacity = self.own.config.capacity
        # In a capture the CPU may not wait for the tokens that other graphs have appended.
        length = self.counter.length if is_capturing(self.own.device) else self.length
        if length + new_count > capacity:
            given = f"{length} tokens and {new_count} more in a cache of {capacity}"
            fix = f"call cache.reserve({length + new_count}) on every rank; a ShardedCache grows without capacity="
            raise ShapeError(subject, "room for the new tokens", given, fix)
        if self.forget_mask is None:  # the shards of a cache that forgets grow
            turns = self.own.block_cyclic.turns  # earlier pieces of a rank lie in some of its slots
            counts = self.counter.rank_counts if rank_counts is None else rank_counts
            counts.check(subject, length + new_count, lambda rank: usual_slots(self.own.config, turns[rank]))

    def check_in_graph(self, subject: str) -> None:
        """Raise unless a compiled step can read the tokens, in one piece."""
        self.own.check_in_graph(subject)
        if self.forked:
            self.own.raise_in_pieces(subject, "a forked cache")

    def check_truncation(self, length: int, before: int) -> None:
        """Raise unless `before` tokens can be truncated to `length`."""
        if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= before:
            given, fix = f"{length!r} of type {type(length).__name__}", f"pass an int that is no more than {before}"
            raise ShapeError("truncate", f"a length from 0 to {before}", given, fix)
        if length and not self.serves(length):
            expected = f"0, or at least {self.oldest_query}: the cache has forgotten what earlier tokens see"
            fix = (
                f"make the cache with keep={before - length} or more, counted from the longest length; or truncate to 0"
            )
            raise ShapeError("truncate", expected, f"{length} of {before} tokens", fix)

    # --- tokens come and go ---

    def try_append_plain(self, new: tuple[Tensor, ...]) -> bool:
        """Add new tokens that fit, or return False. They are the same on every rank, and of a known signature."""
        shard, counter = self.own, self.counter
        length_and_used = counter.length_and_used(shard)
        new_count = new[0].shape[2]
        if length_and_used is None or not new_count or length_and_used[0] + new_count > shard.config.capacity:
            return False
        if shard.padding is not None or counter.rank_counts.start:
            return False
        if self.copy_shards or shard.config.mask is not None:
            counter.set_length(length_and_used[0])
            self._append_or_restore(partial_of(self._append_to_each, new, None))
            return True
        try:
            if not shard.try_append_run(new, new_count, *length_and_used):
                return False
            counter.length = length_and_used[0] + new_count  # as `set_length`, whose call would take time in each step
        except BaseException as error:
            self._take_back(length_and_used[0], error)
            raise
        return True

    def append(self, new: tuple[Tensor, ...], token_mask: Tensor | None) -> None:
        """Add new tokens that are the same on every rank."""
        self._recount()
        self._append_or_restore(partial_of(self._append_to_each, new, token_mask))

    def _append_or_restore(self, append: Callable[[], None]) -> None:
        """Add tokens by `append`. If an error or Ctrl-C breaks it off, all shards have the tokens before again."""
        length, rank_counts, oldest_query = self.counter.length, self.counter.rank_counts, self.oldest_query
        memory = [shard.token_index for shard in self.shards]
        try:
            append()
        except BaseException as error:
            if all(index is shard.token_index for index, shard in zip(memory, self.shards, strict=True)):
                self.oldest_query = oldest_query  # none has forgotten tokens
            self.counter.set_rank_counts(rank_counts)
            self._take_back(length, error)
            raise

    def _take_back(self, length: int, error: BaseException) -> None:
        """Remove the tokens from `length` on, after an error or Ctrl-C in an append, which this CPU may not count.

        In an error of files or of a colder memory, a shard has decided which tokens it has.
        """
        if not isinstance(error, InputError) and may_compare(self.own.device):
            unbroken([*self._actions_to_cut(length), partial_of(self.counter.set_length, length)])

    def _append_to_each(self, new: tuple[Tensor, ...], token_mask: Tensor | None) -> None:
        """Add new tokens after those that are counted."""
        new_count = new[0].shape[2]
        if self.forget_mask is None:
            for shard in self.shards:
                shard.append_own(new, token_mask, self.counter.length_and_used(shard))
        else:
            start, oldest_query = self.counter.length, self._oldest_query_after(new_count, new_count)
            for shard in self.shards:
                own_count = shard.turn.count(start + new_count) - shard.turn.count(start)
                self._make_room(shard, own_count, partial_of(self.oldest_kept_token, oldest_query), oldest_query)
                shard.append_own(new, token_mask, self.counter.length_and_used(shard))
                self.counter.add_slots(shard, own_count)
            self.oldest_query = oldest_query
        self._advance(new_count)

    def append_rows_at(
        self,
        new: tuple[Tensor, ...],
        indices: Tensor,
        new_count: int,
        token_mask: Tensor | None,
        queries: int,
        rank_counts: RankCounts,
    ) -> None:
        """Add this rank's tokens with its heads, and send copies; all ranks together add `new_count`.

        Then they have `rank_counts`. The last `queries` of all tokens may be decoded before the next append.
        """
        self._recount()

        def append_all() -> None:
            self._append_rows_to_each(new, indices, new_count, token_mask, queries)
            self.counter.set_rank_counts(rank_counts)

        self._append_or_restore(append_all)

    def _append_rows_to_each(
        self, new: tuple[Tensor, ...], indices: Tensor, new_count: int, token_mask: Tensor | None, queries: int
    ) -> None:
        """Add this rank's tokens, and those of other ranks to the copies."""
        oldest = 0
        if self.forget_mask is None:
            self.own.append_rows_at(new, indices, new_count, token_mask)
        else:
            oldest_query = self._oldest_query_after(new_count, queries)
            oldest = self.oldest_kept_token(oldest_query, token_mask, new_count)
            if skips := oldest > self.counter.length:
                kept = indices >= oldest
                new = tuple(x[:, :, kept] for x in new)
                indices = indices[kept]
            self._make_room(self.own, len(indices), lambda: oldest, oldest_query, forget=skips)
            self.own.append_rows_at(new, indices, new_count, token_mask)
            self.counter.add_slots(self.own, len(indices))
            self.oldest_query = oldest_query
        self._advance(new_count)
        self._send_copies(new, indices, new_count, token_mask, oldest)

    def append_shared_blocks(
        self, piece: FrozenPiece | None, new: tuple[Tensor, ...], indices: Tensor, new_count: int
    ) -> None:
        """Add the tokens of a piece, which stays shared, and copies of `new` after it, to an empty cache.

        All ranks together add `new_count` tokens, which lie block-cyclic.
        """
        self._append_or_restore(partial_of(self._append_blocks, piece, new, indices, new_count))

    def _append_blocks(
        self, piece: FrozenPiece | None, new: tuple[Tensor, ...], indices: Tensor, new_count: int
    ) -> None:
        """Do the work of `append_shared_blocks`."""
        self.own.append_rows_at(new, indices, new_count, None)
        if piece is not None:
            self.own.put_before(piece)
            self.forked = True
        self.counter.add_tokens(new_count)

    def _recount(self) -> None:
        """Count anew: graphs may have appended tokens, or on a CPU an error may have ended an append."""
        if may_compare(self.own.device):
            self.counter.set_length(self.length)

    def _advance(self, new_count: int) -> None:
        if may_compare(self.own.device):
            self.counter.add_tokens(new_count)
        else:  # a graph is made, not run
            self.counter.enter_graphs()

    def actions_to_truncate(self, length: int, table: Sequence[Sequence[int]]) -> list[Action]:
        """Return actions that remove the tokens from `length` on. Rows of `table` are (rank, its tokens before it)."""
        count = partial_of(self.counter.truncate, length, table)
        lower = partial_of(setattr, self, "oldest_query", min(self.oldest_query, length))
        return [*self._actions_to_cut(length), count, lower]

    def _actions_to_cut(self, length: int) -> list[Action]:
        """Return actions that remove the tokens from `length` on from each shard."""
        actions = [action for shard in self.shards for action in shard.actions_to_truncate(length)]
        recounted = self.shards if self.forget_mask is not None else ()
        recounts = [partial_of(self.counter.recount_slots, shard) for shard in recounted]
        return [*actions, *recounts]

    def actions_to_reorder(self, index: Tensor) -> list[Action]:
        """Return actions that replace sequence b by sequence `index[b]`; the batch may change."""
        return [action for shard in self.shards for action in shard.actions_to_reorder(index)]

    def grow(self, config: CacheConfig) -> None:
        """Reserve memory for a larger capacity. A shard that already has it stays as it is."""
        for shard in self.shards[::-1]:  # the own shard last: its config is the cache's
            if config.capacity > shard.config.capacity:
                shard.grow(config)

    def make_room_to_load(self, length: int, start: WindowStart) -> None:
        """Make room at block-cyclic slots for the tokens from `start.oldest_kept_token` up to `length`."""
        self.oldest_query = start.oldest_query
        if self.forget_mask is not None:
            count, oldest = self.own.turn.count, start.oldest_kept_token
            self._make_room(self.own, count(length) - count(oldest), lambda: oldest, self.oldest_query)

    def mark_present(self, length: int, token_mask: Tensor | None, oldest: int = 0) -> None:
        """Mark the tokens that `make_room_to_load` made room for as present, once written, and send copies."""
        shard = self.own
        used = shard.mark_present(length, token_mask, oldest)
        self.counter.recount_slots(shard)
        new = tuple(x[:, :, :used] for x in shard.kv_tensors)
        self._send_copies(new, shard.token_index[:used], length, token_mask, oldest)
        self.counter.set_length(length)

    # --- copies ---

    def _send_copies(
        self, new: tuple[Tensor, ...], indices: Tensor, new_count: int, token_mask: Tensor | None, oldest: int
    ) -> None:
        """Send this rank's new tokens to its keepers, and add the tokens received to the copies.

        Collective along the tokens axis, if the cache has copies.
        """
        if not self.keepers and not self.copy_shards:
            return
        counts = [row[0] for row in dist_all_gather_ints([len(indices)], [self.axis])]
        sends = dict.fromkeys(self.keepers, (*new, indices))
        receives = {
            index: (*(meta_like(x, counts[index]) for x in new), meta_like(indices, counts[index], 0))
            for index in self.copy_shards
        }
        received = Channel(self.axis, indices.device).begin_messages(sends, receives, "copying")()
        for index, shard in self.copy_shards.items():
            *copied, token_index = received[index]
            if self.forget_mask is not None:
                self._make_room(
                    shard, len(token_index), lambda: oldest, self.oldest_query, forget=oldest > shard.length
                )
            shard.append_rows_at(tuple(copied), token_index, new_count, token_mask)
            if self.forget_mask is not None:
                self.counter.add_slots(shard, len(token_index))

    # --- a cache that forgets, by the mask of its config ---

    @property
    def forget_mask(self) -> Mask | None:
        """The mask by which tokens are forgotten, or None."""
        return self.own.config.mask

    def serves(self, query: int) -> bool:
        """Return whether all tokens that queries from token `query` on see are cached."""
        if self.forget_mask is None or query >= self.oldest_query:
            return True
        first_seen = 0 if self.own.padding is not None else self.forget_mask.first_seen(query)
        return self.forget_mask.first_seen(self.oldest_query) <= first_seen

    @property
    def window_start(self) -> WindowStart:
        """The oldest token that is kept, and the oldest query that can be decoded."""
        return WindowStart(self.oldest_kept_token(self.oldest_query), self.oldest_query)

    def oldest_kept_token(self, oldest_query: int, token_mask: Tensor | None = None, new_count: int = 0) -> int:
        """Return the oldest token that `oldest_query` needs, after `new_count` new tokens with this mask."""
        if self.forget_mask is None:
            return 0
        shard, length, real = self.own, self.length, None
        if shard.padding is not None or token_mask is not None:
            real = torch.ones(shard.config.batch, length + new_count, dtype=torch.bool, device=shard.device)
            if shard.padding is not None:
                real[:, :length] = shard.padding.token_mask[:, :length]
            if token_mask is not None:
                real[:, length:] = token_mask.to(shard.device)
        return oldest_kept_token(self.forget_mask, oldest_query, shard.config.block, real)

    def _oldest_query_after(self, new_count: int, queries: int) -> int:
        """Return the oldest query to serve after an append: no later than the last `queries`, or those after a cut."""
        past = max(queries, self.own.config.keep + 1)
        return max(self.oldest_query, self.counter.length + new_count - past)

    def _make_room(
        self,
        shard: CacheShard,
        new_count: int,
        find_oldest: Callable[[], int],
        oldest_query: int,
        *,
        forget: bool = False,
    ) -> None:
        """Let a shard have room for `new_count` tokens. Where needed, it forgets those before token `find_oldest()`.

        It then serves no query before `oldest_query`, even if what comes next finds no memory, or Ctrl-C comes.
        """
        used = self.counter.used_in(shard)
        if actions := shard.actions_to_make_room(used, new_count, find_oldest, forget=forget):
            forgets = partial_of(setattr, self, "oldest_query", oldest_query)
            unbroken([*actions, forgets, partial_of(self.counter.recount_slots, shard)])


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
