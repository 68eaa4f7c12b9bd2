"""Schedules: the tokens that each rank sends and receives, computed from mask, layouts and mesh, without a device.

The pair of a query chunk at (r1, c1) and a key chunk at (r2, c2) is computed at (r1, c2): every pair exactly once, for
any mesh. Rank (r, c) attends the queries at r, of all ranks with its r, over the keys at c, of all ranks with its c. Of
these it receives the queries that see one of the keys, and the keys that one of the queries sees. Under a full mask
these are all queries and keys; under a window, few neighbours'.

A chunk is the tokens of all ranks at one (r, c), along the heads axis, sorted by position. These ranks swap tokens for
heads: each gets its heads of the whole chunk. Keys arrive in `key_steps`: all at once, or one step after another around
a ring. In a ring each rank forwards the keys that later ranks need. Their gradients travel with them, and return to the
owner from the last rank.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.core.band import Band
from attnmesh.core.layout import Layout
from attnmesh.core.mask import Mask
from attnmesh.errors import check_choice
from attnmesh.mesh.shapes import Shape, even_slice


class ExchangeMode(NamedTuple):
    """How keys are exchanged: in a ring or at once; all heads together, or by groups, overlapped with computation.

    Rings overlap by themselves, but not the swap of tokens for heads. So with a heads axis they run by groups.
    """

    ring: bool = False
    by_heads: bool = False

    def head_groups(self, shape: Shape, kv_heads: int) -> int:
        """Return the number of head groups: 1 where all heads go together, and at most the key heads of a rank.

        With R / 2 groups, a group of gathered keys takes as much memory as two shards, as a ring does. The first and
        last exchanges are not hidden, so there are at least 4 groups, 6 with a heads axis.
        """
        by_groups = self.by_heads or (self.ring and shape.heads > 1)
        least_groups = 6 if shape.heads > 1 else 4
        groups = max(least_groups, shape.queries // 2, shape.keys // 2) if by_groups else 1
        return min(groups, -(-kv_heads // shape.heads))


EXCHANGE_MODES = {"bulk": ExchangeMode(), "pipelined": ExchangeMode(by_heads=True), "ring": ExchangeMode(ring=True)}
"""Values of `exchange=`, beside "auto"."""


def check_exchange(subject: str, exchange: str) -> None:
    """Raise unless exchange is "auto" or a key of `EXCHANGE_MODES`."""
    check_choice(subject, exchange, ("auto", *EXCHANGE_MODES))


class HeadSlices(NamedTuple):
    """Some key heads, and the query heads that share them."""

    q_heads: slice
    kv_heads: slice


HeadGroup = tuple[HeadSlices, ...]
"""Heads that are attended together: those of each rank along the heads axis."""


def groups_of_heads(q_heads: int, kv_heads: int, ranks: int, groups: int) -> tuple[HeadGroup, ...]:
    """Return `groups` groups of heads. A rank along the heads axis has none in some groups if it has fewer key heads.

    >>> [[heads.kv_heads for heads in group] for group in groups_of_heads(6, 3, 2, 2)]
    [[slice(0, 1, None), slice(2, 2, None)], [slice(1, 2, None), slice(2, 3, None)]]
    """
    heads_per_kv = q_heads // kv_heads

    def heads(rank: int, group: int) -> HeadSlices:
        mine = even_slice(kv_heads, ranks, rank)
        count = mine.stop - mine.start
        start, stop = (mine.start + edge * count // groups for edge in (group, group + 1))
        return HeadSlices(slice(start * heads_per_kv, stop * heads_per_kv), slice(start, stop))

    return tuple(tuple(heads(rank, group) for rank in range(ranks)) for group in range(groups))


IndicesByPeer = tuple[tuple[int, Tensor], ...]
"""Pairs of a peer and the ascending indices of tokens for it. Peers without tokens are left out."""


@dataclass(frozen=True)
class GatherStep:
    """One exchange of one rank along an axis, and the return of results to the owners of the tokens."""

    send: IndicesByPeer
    """Indices into the tokens before this step."""
    receive: tuple[tuple[int, int], ...]
    """Pairs of a peer and a number of tokens."""
    keep: Tensor
    """Indices into the tokens before this step."""
    permutation: Tensor | None
    """Sorts kept tokens and then received ones by position; None if they are sorted."""
    positions: Tensor
    """Positions of the tokens after this step."""
    return_to: IndicesByPeer
    """Indices into the tokens after this step, per owner, without tokens that are forwarded."""
    return_from: IndicesByPeer
    """Indices into this rank's chunk, per rank that returns their results."""


class ChunkSize(NamedTuple):
    """Tokens of a rank's chunk."""

    queries: int
    keys: int


@dataclass(frozen=True)
class Schedule:
    """The schedule of one rank: gather the queries at r, then receive the keys at c in steps."""

    query_indices: tuple[Tensor, ...]
    """Indices into the chunk, of the queries that each rank along the heads axis holds."""
    key_indices: tuple[Tensor, ...]
    """Indices into the chunk, of the keys that each rank along the heads axis holds."""
    query_step: GatherStep
    key_steps: tuple[GatherStep, ...]
    bands: tuple[Band, ...]
    """Bands of the gathered queries over the keys of each step."""

    @cached_property
    def chunk(self) -> ChunkSize:
        """Size of this rank's chunk."""
        return ChunkSize(sum(map(len, self.query_indices)), sum(map(len, self.key_indices)))

    @property
    def gradient_steps(self) -> tuple[GatherStep | None, ...]:
        """For each step of the keys, the step with which its dk and dv are sent on.

        None at step 0, as a rank keeps dk and dv of its own keys, and at the last step, as they return to the owner.
        """
        return (None, *self.key_steps[2:], None)[: len(self.key_steps)]


@dataclass(frozen=True)
class Problem:
    """The values on which a schedule depends."""

    mask: Mask
    shape: Shape
    layout: Layout
    key_layout: Layout
    length: int
    key_length: int
    shard_by_place: tuple[int, ...] = ()
    """Shard of the rank at each place of the mesh; empty if the rank at place i holds shard i."""

    def to_code(self) -> list[int]:
        """Return all but the shape as integers, for the schema of an operator."""
        layouts = *self.layout.to_code(), *self.key_layout.to_code()
        lengths = self.length, self.key_length, len(self.shard_by_place)
        return [*layouts, *lengths, *self.shard_by_place, *self.mask.to_code()]

    @staticmethod
    def from_code(shape: Shape, code: Sequence[int]) -> "Problem":
        """Return the problem of a code from `to_code`."""
        layout, code = Layout.from_code(code)
        key_layout, (length, key_length, count, *rest) = Layout.from_code(code)
        return Problem(
            Mask.from_code(rest[count:]),
            shape,
            layout=layout,
            key_layout=key_layout,
            length=length,
            key_length=key_length,
            shard_by_place=tuple(rest[:count]),
        )

    def shard_at(self, place: int) -> int:
        """Return the number of the shard of the rank at a place of the mesh: the same, unless ranks are reordered."""
        return self.shard_by_place[place] if self.shard_by_place else place

    def query_positions(self, r: int, c: int) -> Tensor:
        """Return the positions of the query chunk at (r, c), ascending."""
        return torch.cat(self.shards(self.layout, self.length, r, c)).sort().values

    def key_positions(self, r: int, c: int) -> Tensor:
        """Return the positions of the key chunk at (r, c), ascending."""
        return torch.cat(self.shards(self.key_layout, self.key_length, r, c)).sort().values

    def shards(self, layout: Layout, length: int, r: int, c: int) -> list[Tensor]:
        """Return the positions that each rank along the heads axis has of the chunk at (r, c), in a layout."""
        indices = (self.shard_at(self.shape.shard(h, r, c)) for h in range(self.shape.heads))
        return [layout.positions(length, self.shape.ranks, index) for index in indices]

    def query_positions_at(self, r: int) -> Tensor:
        """Return the positions of the queries of all ranks at r, ascending."""
        return torch.cat([self.query_positions(r, c) for c in range(self.shape.keys)]).sort().values

    def key_positions_at(self, c: int) -> Tensor:
        """Return the positions of the keys of all ranks at c, ascending."""
        return torch.cat([self.key_positions(r, c) for r in range(self.shape.queries)]).sort().values


@lru_cache(maxsize=256)
def make_schedule(problem: Problem, r: int, c: int, ring: bool) -> Schedule:
    """Return the schedule of the ranks at (r, c)."""
    query_step = _query_step(problem, r, c)
    key_steps = tuple(_ring_steps(problem, r, c) if ring else [_key_step(problem, r, c)])
    bands = tuple(Band.of(problem.mask, query_step.positions, step.positions) for step in key_steps)
    layouts = (problem.layout, problem.length), (problem.key_layout, problem.key_length)
    query_indices, key_indices = (_indices_by_rank(problem.shards(*layout, r, c)) for layout in layouts)
    return Schedule(query_indices, key_indices, query_step=query_step, key_steps=key_steps, bands=bands)


def _indices_by_rank(shards: list[Tensor]) -> tuple[Tensor, ...]:
    """Return where the positions of each shard stand among those of all, in order."""
    indices: tuple[Tensor, ...] = torch.cat(shards).argsort().argsort().split([len(shard) for shard in shards])
    return indices


def _query_step(problem: Problem, r: int, c: int) -> GatherStep:
    """Return the exchange of queries between the ranks at r. A query goes to each rank that has a key it sees."""
    chunks = [problem.query_positions(r, peer) for peer in range(problem.shape.keys)]
    sent = [_queries_that_see(problem.mask, chunks[c], problem.key_positions_at(peer)) for peer in range(len(chunks))]
    received = [_queries_that_see(problem.mask, chunk, problem.key_positions_at(c)) for chunk in chunks]
    return _exchange_at_once(chunks, c, sent, received)


def _key_step(problem: Problem, r: int, c: int) -> GatherStep:
    """Return the exchange of keys between the ranks at c. A key goes to each rank that has a query which sees it."""
    chunks = [problem.key_positions(peer, c) for peer in range(problem.shape.queries)]
    sent = [_keys_seen_by(problem.mask, problem.query_positions_at(peer), chunks[r]) for peer in range(len(chunks))]
    received = [_keys_seen_by(problem.mask, problem.query_positions_at(r), chunk) for chunk in chunks]
    return _exchange_at_once(chunks, r, sent, received)


def _exchange_at_once(chunks: list[Tensor], rank: int, sent: list[Tensor], received: list[Tensor]) -> GatherStep:
    """Return the step that sends `sent[p]` of the rank's tokens to p, and receives `received[p]` of p's tokens."""
    peers = [peer for peer in range(len(chunks)) if peer != rank]
    owners = [rank, *peers]
    positions = torch.cat([chunks[owner][received[owner]] for owner in owners])
    permutation = positions.argsort()
    # Where the tokens of each owner stand once all are sorted.
    indices = permutation.argsort().split([len(received[owner]) for owner in owners])
    return GatherStep(
        send=_indices_by_peer((peer, sent[peer]) for peer in peers),
        receive=tuple((peer, len(received[peer])) for peer in peers if len(received[peer])),
        keep=received[rank],
        permutation=None if bool((permutation.diff() == 1).all()) else permutation,
        positions=positions[permutation],
        return_to=_indices_by_peer(zip(owners, indices, strict=True)),
        return_from=_indices_by_peer((owner, sent[owner]) for owner in owners),
    )


def _ring_steps(problem: Problem, r: int, c: int) -> Iterator[GatherStep]:
    """Yield the steps of a ring of the ranks at c. At step t a rank holds needed keys of the rank t before it.

    Six tokens on three ranks, where a query sees 3 tokens back. Rank 2 gets token 1 of rank 0 from rank 1:

    >>> from attnmesh.core.layout import Contiguous
    >>> problem = Problem(Mask(3, 0), Shape(1, 3, 1), Contiguous(), Contiguous(), 6, 6)
    >>> for r in range(3):
    ...     print(r, [step.positions.tolist() for step in _ring_steps(problem, r, 0)])
    0 [[0, 1], [], []]
    1 [[2, 3], [0, 1], []]
    2 [[4, 5], [2, 3], [1]]
    """
    size = problem.shape.queries
    chunks = [problem.key_positions(peer, c) for peer in range(size)]
    queries = [problem.query_positions_at(peer) for peer in range(size)]
    held_by_step = [
        _held_at_steps(problem.mask, chunk, queries[owner:] + queries[:owner]) for owner, chunk in enumerate(chunks)
    ]
    nothing = torch.empty(0, dtype=torch.long, device="cpu")
    before, after = (r - 1) % size, (r + 1) % size
    for t in range(size):
        owner, last_reader = (r - t) % size, (r + t) % size
        keys = held_by_step[owner][t]
        sent_owner = (owner + 1) % size  # the next rank gets what this one held before
        forwarded = torch.searchsorted(*held_by_step[sent_owner][t - 1 : t + 1]) if t else nothing
        yield GatherStep(
            send=_indices_by_peer([(after, forwarded)]),
            receive=((before, len(keys)),) if t and len(keys) else (),
            keep=nothing if t else keys,
            permutation=None,
            positions=chunks[owner][keys],
            return_to=_indices_by_peer([(owner, torch.searchsorted(keys, _not_forwarded(held_by_step[owner], t)))]),
            return_from=_indices_by_peer([(last_reader, _not_forwarded(held_by_step[r], t))]),
        )


def _held_at_steps(mask: Mask, keys: Tensor, queries_by_step: list[Tensor]) -> list[Tensor]:
    """Return for each step the keys of a chunk that the queries of this step or of a later one see.

    >>> queries_by_step = [torch.tensor([0, 1]), torch.tensor([2, 3]), torch.tensor([4, 5])]
    >>> [keys.tolist() for keys in _held_at_steps(Mask(3, 0), torch.tensor([0, 1]), queries_by_step)]
    [[0, 1], [0, 1], [1]]
    """
    is_needed = torch.zeros(len(keys), dtype=torch.bool, device="cpu")
    steps: list[Tensor] = []
    for queries in reversed(queries_by_step[1:]):
        if steps and len(steps[-1]) == len(keys):  # and so are they at all steps before
            steps.append(steps[-1])
            continue
        is_needed = is_needed.index_fill(0, _keys_seen_by(mask, queries, keys), True)
        steps.append(is_needed.nonzero().flatten())
    return [torch.arange(len(keys), device="cpu"), *reversed(steps)]


def _not_forwarded(held_keys: list[Tensor], step: int) -> Tensor:
    """Return the keys that are not forwarded at a step. The owner keeps all its keys at step 0.

    >>> held_keys = [torch.tensor([0, 1]), torch.tensor([0, 1]), torch.tensor([1])]
    >>> [_not_forwarded(held_keys, step).tolist() for step in range(3)]
    [[0, 1], [0], [1]]
    """
    keys = held_keys[step]
    if step in (0, len(held_keys) - 1):
        return keys
    return keys[torch.isin(keys, held_keys[step + 1], invert=True)]


def _queries_that_see(mask: Mask, queries: Tensor, keys: Tensor) -> Tensor:
    """Return the indices of queries that see any of the keys; both ascending."""
    band = Band.of(mask, queries, keys)
    return (band.high > band.low).nonzero().flatten()


def _keys_seen_by(mask: Mask, queries: Tensor, keys: Tensor) -> Tensor:
    """Return the indices of keys that any of the queries sees; both ascending."""
    band = Band.of(mask, queries, keys)
    sees_any = band.high > band.low
    change = torch.zeros(len(keys) + 1, dtype=torch.long, device="cpu")
    for bound, sign in ((band.low, 1), (band.high, -1)):
        change.index_add_(0, bound[sees_any], torch.full_like(bound[sees_any], sign))
    return (change.cumsum(0)[:-1] > 0).nonzero().flatten()


def _indices_by_peer(pairs: Iterable[tuple[int, Tensor]]) -> IndicesByPeer:
    """Return the pairs with tokens. Equal selections share one tensor, so that they are packed once."""
    distinct: list[Tensor] = []
    selections = []
    for peer, indices in pairs:
        if len(indices):
            shared = next((other for other in distinct if torch.equal(other, indices)), indices)
            distinct += [shared] if shared is indices else []
            selections.append((peer, shared))
    return tuple(selections)
