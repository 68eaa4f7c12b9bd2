"""Who sends which tokens to whom: worked out from the mask, the layouts and the mesh alone, without a device.

The pair of a query chunk at (r1, c1) and a key chunk at (r2, c2) is computed at (r1, c2): every pair exactly once, for
any mesh. So rank (r, c) needs, from its row, the queries that see a key of its column, and from its column the keys
that a query of its row sees. Under a full mask that is all of them; under a window it may be a neighbour's alone.

A chunk is what the ranks of one (r, c) hold together along the heads axis, in order of position. Keys arrive in
`steps`: all at once, or step by step round a ring, each rank passing on what those behind it still need. Round a ring
gradients travel with the keys that they are of, and home from where these go no further.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.core.layout import Layout, decode_layout, encode_layout
from attnmesh.core.mask import Band, Mask
from attnmesh.errors import KernelError
from attnmesh.mesh.shapes import Shape


class Exchange(NamedTuple):
    """How keys travel: round a ring or at once, all heads together or group by group, the next under way meanwhile."""

    ring: bool = False
    by_heads: bool = False

    def head_groups(self, shape: Shape, kv_heads: int) -> int:
        """Groups of heads: enough that what one gathers is about what is in flight round a ring."""
        wanted = max(4, shape.queries // 2, shape.keys // 2) if self.by_heads else 1
        return min(wanted, kv_heads // shape.heads)


EXCHANGES = {"bulk": Exchange(), "pipelined": Exchange(by_heads=True), "ring": Exchange(ring=True)}


def check_exchange(subject: str, exchange: str) -> None:
    """Raise unless there is an exchange of that name, or one is to be chosen."""
    if not isinstance(exchange, str) or exchange not in ("auto", *EXCHANGES):
        raise KernelError(subject, f"one of auto, {', '.join(EXCHANGES)}", repr(exchange), 'leave it at "auto"')


Picks = tuple[tuple[int, Tensor], ...]
"""For each peer that is concerned, which tokens: indices, ascending."""


@dataclass(frozen=True)
class Step:
    """One exchange along an axis, as one rank sees it, and where the results of what it holds then belong."""

    send: Picks  # of the tokens held before this step
    receive: tuple[tuple[int, int], ...]  # from which peer how many
    keep: Tensor  # of the tokens held before, those that stay
    order: Tensor | None  # puts what stays and what arrives, in that order, in order of position; None if it is
    positions: Tensor  # of the tokens now held
    return_to: Picks  # of the tokens now held, whose they are, this rank's own among them; not of those passed on
    return_from: Picks  # of this rank's own chunk, what each peer now holds so, this rank itself among them


@dataclass(frozen=True)
class Schedule:
    """What one rank does: gather the queries of its row, and meet the keys of its column step by step."""

    row: Step
    steps: tuple[Step, ...]
    bands: tuple[Band, ...]  # of the row's queries over the keys of each step

    @property
    def travelling(self) -> tuple[Step | None, ...]:
        """For each step the one to which its gradients go on with their keys: those of the own keys need not go."""
        return (None, *self.steps[2:], None)[: len(self.steps)]


@dataclass(frozen=True)
class Problem:
    """All that a schedule depends on."""

    mask: Mask
    shape: Shape
    layout: Layout
    key_layout: Layout
    length: int
    key_length: int

    def encode(self) -> list[int]:
        """All but the shape as plain integers, as an operator's schema can carry it."""
        layouts = *encode_layout(self.layout), *encode_layout(self.key_layout)
        return [*layouts, self.length, self.key_length, *self.mask.encode()]

    @staticmethod
    def decode(shape: Shape, code: Sequence[int]) -> "Problem":
        """The problem that `encode` wrote."""
        layouts = decode_layout(code[:2]), decode_layout(code[2:4])
        return Problem(Mask.decode(code[6:]), shape, *layouts, code[4], code[5])

    def queries(self, r: int, c: int) -> Tensor:
        """The positions of the query chunk at (r, c), ascending."""
        return self._chunk(self.layout, self.length, r, c)

    def keys(self, r: int, c: int) -> Tensor:
        """The positions of the key chunk at (r, c), ascending."""
        return self._chunk(self.key_layout, self.key_length, r, c)

    def _chunk(self, layout: Layout, length: int, r: int, c: int) -> Tensor:
        shards = (self.shape.shard(h, r, c) for h in range(self.shape.heads))
        return torch.cat([layout.positions(length, self.shape.ranks, shard) for shard in shards]).sort().values

    def row_queries(self, r: int) -> Tensor:
        """The positions of all queries of a row."""
        return torch.cat([self.queries(r, c) for c in range(self.shape.keys)]).sort().values

    def column_keys(self, c: int) -> Tensor:
        """The positions of all keys of a column."""
        return torch.cat([self.keys(r, c) for r in range(self.shape.queries)]).sort().values


@lru_cache(maxsize=256)
def schedule(problem: Problem, r: int, c: int, ring: bool) -> Schedule:
    """The schedule of the ranks at (r, c)."""
    row = _row(problem, r, c)
    steps = tuple(_ring(problem, r, c) if ring else [_column(problem, r, c)])
    return Schedule(row, steps, tuple(Band.of(problem.mask, row.positions, step.positions) for step in steps))


def _row(problem: Problem, r: int, c: int) -> Step:
    """Queries come to the keys: along a row, those that see a key of the column they come to."""
    chunks = [problem.queries(r, peer) for peer in range(problem.shape.keys)]
    mine = [_seeing(problem.mask, chunks[c], problem.column_keys(peer)) for peer in range(problem.shape.keys)]
    theirs = [_seeing(problem.mask, chunk, problem.column_keys(c)) for chunk in chunks]
    return _at_once(chunks, c, mine, theirs)


def _column(problem: Problem, r: int, c: int) -> Step:
    """Keys come to the queries: along a column, those that a query of the row they come to sees."""
    chunks = [problem.keys(peer, c) for peer in range(problem.shape.queries)]
    mine = [_seen(problem.mask, problem.row_queries(peer), chunks[r]) for peer in range(problem.shape.queries)]
    theirs = [_seen(problem.mask, problem.row_queries(r), chunk) for chunk in chunks]
    return _at_once(chunks, r, mine, theirs)


def _at_once(chunks: list[Tensor], me: int, mine: list[Tensor], theirs: list[Tensor]) -> Step:
    """Everything in one exchange: `mine[p]` of my tokens go to p, `theirs[p]` of p's come to me."""
    peers = [peer for peer in range(len(chunks)) if peer != me]
    sources = [me, *peers]
    positions = torch.cat([chunks[peer][theirs[peer]] for peer in sources])
    order = positions.argsort()
    places, start = order.argsort(), 0  # where each token, as it came, stands in order
    owners = []
    for peer in sources:
        owners.append((peer, places[start : start + len(theirs[peer])]))
        start += len(theirs[peer])
    return Step(
        send=_picks((peer, mine[peer]) for peer in peers),
        receive=tuple((peer, len(theirs[peer])) for peer in peers if len(theirs[peer])),
        keep=theirs[me],
        order=None if bool((order.diff() == 1).all()) else order,
        positions=positions[order],
        return_to=_picks(owners),
        return_from=_picks((peer, mine[peer]) for peer in sources),
    )


def _ring(problem: Problem, r: int, c: int) -> Iterator[Step]:
    """Round the column: at step t a rank holds what is still needed of the chunk of the rank t before it."""
    size = problem.shape.queries
    chunks = [problem.keys(peer, c) for peer in range(size)]
    rows = [problem.row_queries(peer) for peer in range(size)]
    passed = [_passed_on(problem.mask, chunk, rows[source:] + rows[:source]) for source, chunk in enumerate(chunks)]
    ending = [_ending(steps) for steps in passed]
    nothing = torch.empty(0, dtype=torch.long)
    before, after = (r - 1) % size, (r + 1) % size
    for t in range(size):
        source, holder = (r - t) % size, (r + t) % size
        held = passed[source][t]
        # What goes on to the next rank, counted among the tokens held at the step before.
        onward = _among(passed[(r - t + 1) % size][t], passed[(r - t + 1) % size][t - 1]) if t else nothing
        yield Step(
            send=_picks([(after, onward)]),
            receive=((before, len(held)),) if t and len(held) else (),
            keep=nothing if t else held,
            order=None,
            positions=chunks[source][held],
            return_to=_picks([(source, _among(ending[source][t], held))]),
            return_from=_picks([(holder, ending[r][t])]),
        )


def _passed_on(mask: Mask, keys: Tensor, rows: list[Tensor]) -> list[Tensor]:
    """For each step from its owner on, the keys of a chunk that the row there, or one behind it, needs."""
    needed = torch.zeros(len(keys), dtype=torch.bool)
    steps = []
    for row in reversed(rows):
        needed = needed.index_fill(0, _seen(mask, row, keys), True)
        steps.append(needed.nonzero().flatten())
    return [torch.arange(len(keys)), *steps[::-1][1:]]


def _ending(passed: list[Tensor]) -> list[Tensor]:
    """For each step those of what is held that go no further; a rank's own stay with it."""
    further = [passed[0][:0], *passed[2:], passed[0][:0]]
    return [held[torch.isin(held, on, invert=True)] for held, on in zip(passed, further, strict=False)]


def _seeing(mask: Mask, queries: Tensor, keys: Tensor) -> Tensor:
    """Which of the queries see any of the keys; both ascending."""
    band = Band.of(mask, queries, keys)
    return (band.high > band.low).nonzero().flatten()


def _seen(mask: Mask, queries: Tensor, keys: Tensor) -> Tensor:
    """Which of the keys any of the queries sees; both ascending."""
    band = Band.of(mask, queries, keys)
    rows = band.high > band.low
    change = torch.zeros(len(keys) + 1, dtype=torch.long)
    for bound, sign in ((band.low, 1), (band.high, -1)):
        change.index_add_(0, bound[rows], torch.full_like(bound[rows], sign))
    return (change.cumsum(0)[:-1] > 0).nonzero().flatten()


def _among(some: Tensor, all_of: Tensor) -> Tensor:
    """Where some indices stand in a longer ascending list of them."""
    return torch.searchsorted(all_of, some)


def _picks(pairs: Iterable[tuple[int, Tensor]]) -> Picks:
    """Those of any tokens; peers that get the same tokens share one tensor, so that they are packed once."""
    distinct: list[Tensor] = []
    picks = []
    for peer, tokens in pairs:
        if len(tokens):
            known = next((other for other in distinct if torch.equal(other, tokens)), tokens)
            distinct += [known] if known is tokens else []
            picks.append((peer, known))
    return tuple(picks)
