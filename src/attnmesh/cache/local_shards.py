"""Shards on one rank: its own, and copies of shards of another host, so that a lost rank loses no tokens."""

from collections.abc import Callable, Sequence
from copy import copy
from enum import Enum
from typing import assert_never

import torch
from torch import Tensor

from attnmesh.cache.block_cyclic import TokenCounts
from attnmesh.cache.cache_config import CacheConfig
from attnmesh.cache.cache_shard import CacheShard, usual_slots
from attnmesh.cache.frozen_piece import FrozenPiece
from attnmesh.cache.window import WindowStart, first_needed
from attnmesh.checks.argument_checks import transpose_hint_first
from attnmesh.comm.p2p import Channel, meta_like
from attnmesh.comm.topology import agreed_hosts, dist_all_gather_ints
from attnmesh.core.mask import Mask
from attnmesh.errors import KernelError, LayoutError, ShapeError
from attnmesh.guard.agreement import is_capturing, may_compare
from attnmesh.kernels.cache_view import LENGTH
from attnmesh.mesh.axes import Axis
from attnmesh.mesh.shares import check_shares
from attnmesh.runtime.tensors import Tensors


class StepFault(Enum):
    """Why the shards of a cache cannot serve a step of decoding as they are."""

    LENGTH = "there are fewer tokens than queries, or more than the capacity"
    FORGOTTEN = "the queries see tokens that the cache has forgotten"
    # Of a reproducible step, which merges the blocks of one tensor along one tree:
    LAYOUT = "its tokens are no blocks in turn"
    SHARES = "the blocks of a rank are no subtree of the tree"
    TIERS = "two kernels read its tokens"
    SHARED = "other caches share some of its blocks, which can be copied"


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

    def step_fault(self, queries: int | None, *, reproducible: bool) -> StepFault | None:
        """Return why a step of `queries` queries cannot be served, or None. A graph passes None: it reads no length.

        New steps and known steps both call this function, so all reasons of these shards belong here.
        """
        shard = self.own
        config = shard.config
        if reproducible:
            if shard.padding is not None or self.rank_counts.start:
                return StepFault.LAYOUT
            if not shard.block_cyclic.is_even:
                return StepFault.SHARES
            if config.hot is not None and shard.device.type != "cpu":
                return StepFault.TIERS
        if queries is not None:
            length = self.cpu_length
            if shard.device.type != "cuda" or (self.in_graphs and not is_capturing(shard.device)):
                length = shard.device_counts.tolist()[LENGTH]
            if not queries <= length <= config.capacity:
                return StepFault.LENGTH
            if config.mask is not None and not self.serves(length - queries):
                return StepFault.FORGOTTEN
        return StepFault.SHARED if reproducible and self.forked else None

    def check_step(self, subject: str, of_row: str, q: Tensor, *, in_graph: bool, reproducible: bool) -> None:
        """Raise unless a step of the queries `q` can be served, at once or after shared blocks are copied."""
        queries = q.shape[2]
        fault = self.step_fault(None if in_graph else queries, reproducible=reproducible)
        if fault is None or fault is StepFault.SHARED:
            return
        own, config = self.own, self.own.config
        match fault:
            case StepFault.LENGTH:
                length = self.length  # in a capture of a graph no other fault may read it
                given = f"{queries} queries and {length} of {config.capacity} tokens in the cache"
                fits = queries % config.kv_heads == 0 and q.shape[1] <= length <= config.capacity
                fix = transpose_hint_first(f"append before {subject}", fits)
                raise ShapeError(f"{subject} q{of_row}", "as many queries as tokens in the cache, or fewer", given, fix)
            case StepFault.FORGOTTEN:
                length = self.length
                seen = f"queries of token {self.first_query} and later ones"
                expected = f"{seen}: the cache has forgotten what earlier tokens see"
                given = f"queries of the tokens from {length - queries} to {length - 1}"
                fix = "decode after each append, or pass queries= to append_shard"
                fix = fix if length > self.first_query else "append the next token first"
                raise ShapeError(f"{subject} q{of_row}", expected, given, fix)
            case StepFault.LAYOUT:
                given = "a padded batch" if own.padding is not None else "tokens in the layout of a sharded prefill"
                fix = "fill it with append, or prefill in cache.layout"
                raise LayoutError(f"{subject} reproducible{of_row}", "a cache with block-cyclic tokens", given, fix)
            case StepFault.SHARES:
                check_even_shares(f"{subject} reproducible", own.block_cyclic.shares, even=False)
            case StepFault.TIERS:
                given, fix = f"hot={config.hot} on {own.device.type}", 'leave one of them out, or pass device="cpu"'
                raise KernelError(f"{subject} reproducible", "keys that one kernel reads", given, fix)
            case _:
                assert_never(fault)

    def check_room(self, subject: str, row: int, new_count: int) -> None:
        """Raise unless a row of `new_count` tokens fits. Counts of ranks are read only where there may be no room."""
        if self.length + new_count > self.own.config.capacity or self.rank_counts.start:
            self.check_fits(f"{subject} k of row {row}", new_count, self.rank_counts)

    def check_fits(self, subject: str, new_count: int, rank_counts: TokenCounts) -> None:
        """Raise, before anything is written, unless `new_count` tokens fit the capacity, and each rank."""
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
            rank_counts.check(subject, self.cpu_length + new_count, self._slots)

    def _slots(self, rank: int) -> int:
        """Return the slots of a rank of a cache that keeps every token, earlier pieces included."""
        return usual_slots(self.own.config, self.own.block_cyclic.turns[rank])

    def check_unpadded(self, subject: str, token_mask: Tensor | None) -> None:
        """Raise if a cache in a folder, or in two memories, gets padding."""
        is_hot = self.own.config.hot is not None
        if token_mask is None or not (is_hot or self.own.is_in_files) or bool(token_mask.all()):
            return
        expected, fix = "sequences without padding in a folder", "give each sequence a folder of its own"
        if is_hot:
            expected, fix = "sequences without padding beside hot=", "give each sequence a cache of its own"
        raise KernelError(f"{subject} token_mask", expected, "a mask", fix)

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

    def first_token(self, token_mask: Tensor | None = None, new_count: int = 0) -> int:
        """Return the first token that is needed, after `new_count` tokens with this mask."""
        if self.forget_mask is None:
            return 0
        shard, length, real = self.own, self.cpu_length, None
        if shard.padding is not None or token_mask is not None:
            real = torch.ones(shard.config.batch, length + new_count, dtype=torch.bool, device=shard.device)
            if shard.padding is not None:
                real[:, :length] = shard.padding.token_mask[:, :length]
            if token_mask is not None:
                real[:, length:] = token_mask.to(shard.device)
        return first_needed(self.forget_mask, self.first_query, shard.config.block, real)

    @property
    def window_start(self) -> WindowStart:
        """The first token that is needed, and the first query that can be decoded."""
        return WindowStart(self.first_token(), self.first_query)

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
        start = self.cpu_length
        may_forget = self.forget_mask is not None
        first_query, forgets = self.first_query, False
        if may_forget:
            self._move_first_query(new_count, new_count)
        try:
            for shard in self.all:
                own_count = 0
                if may_forget:
                    own_count = shard.turn.count(start + new_count) - shard.turn.count(start)
                    forgets |= shard.make_room(own_count, self.first_token)
                shard.append(new, token_mask, self.length_and_used(shard))
                if may_forget:
                    shard.count_used(own_count)
        except RuntimeError:  # no memory: if no token was forgotten, all queries so far are served still
            self.first_query = self.first_query if forgets else first_query
            raise
        self._advance(new_count)

    def append_at(self, new: Tensors, tokens: Tensor, new_count: int, token_mask: Tensor | None, queries: int) -> None:
        """Add this rank's tokens with its heads, and send copies; all ranks together add `new_count`.

        The last `queries` of all tokens may be decoded before the next append.
        """
        first = 0
        first_query, forgets = self.first_query, False
        try:
            if self.forget_mask is not None:
                self._move_first_query(new_count, queries)
                first = self.first_token(token_mask, new_count)
                if skips := first > self.cpu_length:
                    kept = tokens >= first
                    new = tuple(x[:, :, kept] for x in new)
                    tokens = tokens[kept]
                forgets = self.own.make_room(len(tokens), lambda: first, forget=skips)
            self.own.append_at(new, tokens, new_count, token_mask)
        except RuntimeError:  # as in `append`
            self.first_query = self.first_query if forgets else first_query
            raise
        if self.forget_mask is not None:
            self.own.count_used(len(tokens))
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

    def adopt_counts(self, rank_counts: TokenCounts) -> None:
        """Count each rank's tokens as all ranks have reported them."""
        self.rank_counts = rank_counts

    def set_length(self, length: int) -> None:
        """Count `length` tokens on all ranks, as the ranks have agreed and the shards have them."""
        self.cpu_length = length

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
        new = tuple(x[:, :, :used] for x in shard.stored)
        self._send_copies(new, shard.token_index[:used], length, token_mask, first)
        self.cpu_length = length

    def _move_first_query(self, new_count: int, queries: int) -> None:
        """Let tokens be forgotten that neither the last `queries` nor queries after a truncation see."""
        past = max(queries, self.own.config.keep + 1)
        self.first_query = max(self.first_query, self.cpu_length + new_count - past)

    def _advance(self, new_count: int) -> None:
        if may_compare(self.own.device):
            self.cpu_length += new_count
        else:  # a graph is made, not run
            self.in_graphs = True

    def leave_graphs(self) -> None:
        """Let the CPU count tokens again: no graph appends any more."""
        if self.in_graphs:
            self.cpu_length, self.in_graphs = self.own.length, False

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
            if self.forget_mask is not None:
                shard.count_used(len(token_index))


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


def check_placement(subject: str, copies: object, shares: object, ranks: int) -> tuple[float, ...] | None:
    """Return the shares, None for even ones and for "auto". Raise unless tokens can be placed on `ranks` ranks."""
    check_copies(copies, ranks)
    return check_shares(subject, shares, ranks)


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
