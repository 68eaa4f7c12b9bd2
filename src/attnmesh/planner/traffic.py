"""How many tokens travel, and over which links: counted for all ranks at once, from the problem that a schedule is of.

A host holds a *tile* of the mesh, so many ranks along each axis; which tile it is decides what has to leave a host:

        1x4x4 on hosts of 4        tile 1x2x2       tile 1x1x4        ranks with the same letter share a host
                                   a a b b          a a a a           queries go along rows, keys along columns
                                   a a b b          b b b b
                                   c c d d          c c c c
                                   c c d d          d d d d

A long problem is counted on a shorter one of the same proportions.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.core.layout import Contiguous, Layout, Zigzag
from attnmesh.core.mask import FAR, Mask
from attnmesh.mesh.schedule import Problem
from attnmesh.mesh.shapes import Shape

SAMPLE = 4096
"""Tokens up to which a problem is counted as it is, if it is for no more ranks than have 16 of them each."""


class Load(NamedTuple):
    """Tokens that one exchange moves over a class of links: in all, the most in or out of a rank or host; messages."""

    total: float = 0.0
    rank: float = 0.0
    host: float = 0.0
    messages: float = 0.0


class Flow(NamedTuple):
    """An exchange by class of links, and to how many others a rank sends."""

    inside: Load
    between: Load
    peers: int


class Pairs(NamedTuple):
    """Pairs of a query and a key that the busiest rank attends, and ranks on average."""

    most: float
    mean: float

    def times(self, number: float) -> "Pairs":
        """So many times as many."""
        return Pairs(number * self.most, number * self.mean)


@dataclass(frozen=True)
class PlannedTraffic:
    """What a pass over a queries x keys mesh moves, in tokens, and what it attends."""

    rows: Flow
    both_ways: Flow  # along rows, there and back at the same time
    columns: Flow
    hop: Flow  # of a ring, one step, on average
    hop_back: Flow  # of the gradients made there, on with their keys or home
    pairs: Pairs
    steps: tuple[Pairs, ...]  # of a ring


def tiles(shape: Shape, ranks: int) -> Iterator[Shape]:
    """What a host of so many ranks can hold of a mesh.

    >>> [tuple(tile) for tile in tiles(Shape(1, 4, 4), 4)]
    [(1, 1, 4), (1, 2, 2), (1, 4, 1)]
    """
    for h in _divisors(math.gcd(ranks, shape.heads)):
        for r in _divisors(math.gcd(ranks // h, shape.queries)):
            c, rest = divmod(ranks, h * r)
            if rest == 0 and shape.keys % c == 0:
                yield Shape(h, r, c)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def placed(shape: Shape, tile: Shape) -> Tensor:
    """The rank at each place (h, r, c) of a mesh whose hosts hold such tiles: ranks of a host follow each other."""
    grid = torch.arange(shape.ranks).reshape([n // t for n, t in zip(shape, tile, strict=True)] + list(tile))
    return grid.permute(0, 3, 1, 4, 2, 5).reshape(tuple(shape))


@lru_cache(maxsize=4096)
def traffic(problem: Problem, tile: Shape) -> PlannedTraffic:
    """What moves in a problem on hosts of such tiles."""
    near, further = cut(problem)
    short, scale = shortened(near)
    moved = _moved(short, tile)
    flows = {name: _scaled(getattr(moved, name), scale) for name in FLOWS}
    longer = _width(near.mask) / _width(short.mask) if _reach(near.mask) < FAR else scale
    pairs = further * scale * longer
    return PlannedTraffic(
        **flows, pairs=moved.pairs.times(pairs), steps=tuple(step.times(pairs) for step in moved.steps)
    )


FLOWS = ("rows", "both_ways", "columns", "hop", "hop_back")


def _scaled(flow: Flow, scale: float) -> Flow:
    def longer(load: Load) -> Load:
        return load._replace(total=load.total * scale, rank=load.rank * scale, host=load.host * scale)

    return Flow(longer(flow.inside), longer(flow.between), flow.peers)


@lru_cache(maxsize=4096)
def _moved(problem: Problem, tile: Shape) -> PlannedTraffic:
    rows, columns, passed, pairs = _counted(problem)
    _, across, down = tile
    size = problem.shape.queries
    source = torch.arange(size)
    # What was passed on at step t is held by the rank t after its source; it came from the rank before that.
    at = [(source + t) % size for t in range(size + 1)]
    onward = [_along(passed[:, :, t], at[t - 1], at[t], across) for t in range(1, size)]
    further = [*passed.unbind(2)[2:], torch.zeros_like(passed[:, :, 0])][: size - 1]
    back = [
        _and(_along(on, at[t], at[t + 1], across), _along(passed[:, :, t] - on, at[t], source, across))
        for t, on in zip(range(1, size), further, strict=True)
    ]
    whole, steps = pairs.sum(1), [pairs[source, (source - t) % size] for t in range(size)]
    return PlannedTraffic(
        rows=_flow([_lines(rows, down)], tile),
        both_ways=_flow([_lines(rows + rows.mT, down)], tile),
        columns=_flow([_lines(columns, across, columns=True)], tile),
        hop=_flow(onward, tile),
        hop_back=_flow(back, tile),
        pairs=Pairs(float(whole.max()), float(whole.mean())),
        steps=tuple(Pairs(float(step.max()), float(step.mean())) for step in steps),
    )


def cut(problem: Problem) -> tuple[Problem, float]:
    """Of short windows or documents so few that what crosses the edges of runs is as much as of all; how many times."""
    reach = _reach(problem.mask)
    length = 4 * problem.shape.ranks * max(reach, 1)
    in_runs = all(isinstance(layout, Contiguous | Zigzag) for layout in (problem.layout, problem.key_layout))
    if reach >= FAR or problem.length <= length or problem.length != problem.key_length or not in_runs:
        return problem, 1.0
    ends = tuple(end for end in problem.mask.ends if end < length)
    mask = replace(problem.mask, ends=(*ends, length)) if problem.mask.ends else problem.mask
    return replace(problem, mask=mask, length=length, key_length=length), problem.length / length


def _reach(mask: Mask) -> int:
    """How far a query sees, in a window or in its document."""
    return min(max(mask.left, mask.right), _longest(mask))


def _width(mask: Mask) -> float:
    """Positions that a query sees at the most."""
    return min(mask.left + mask.right + 1.0, _longest(mask))


def _longest(mask: Mask) -> int:
    """Tokens of the longest document."""
    return max((stop - start for start, stop in pairwise((0, *mask.ends))), default=FAR)


def shortened(problem: Problem) -> tuple[Problem, float]:
    """A problem of the same proportions that is quick to count, and how many times longer the given one is."""
    ranks = problem.shape.ranks
    most = max(SAMPLE, (16 if _reach(problem.mask) >= FAR else 64) * ranks)
    longest = max(problem.length, problem.key_length)
    if longest <= most:
        return problem, 1.0
    scale = longest / (most // (2 * ranks) * 2 * ranks)

    def shorter(tokens: int) -> int:
        return tokens if tokens >= FAR else round(tokens / scale)

    ends = sorted({max(1, shorter(end)) for end in problem.mask.ends})
    mask = Mask(shorter(problem.mask.left), shorter(problem.mask.right), tuple(ends))
    length, key_length = shorter(problem.length), shorter(problem.key_length)
    return replace(problem, mask=mask, length=length, key_length=key_length), scale


@lru_cache(maxsize=512)
def _counted(problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens (row, from, to) of queries, (column, from, to) and (column, source, step) of keys.

    And pairs by (row, source, column).

    A query sees one run of positions. So what a row sees is a union of runs, and what a query sees of a column a
    difference of two counts.
    """
    _, rows, columns = problem.shape
    q_chunk, k_chunk = _owners(problem, queries=True), _owners(problem, queries=False)
    first, last = problem.mask.bounds(torch.arange(problem.length))
    stop = (last + 1).clamp(max=problem.key_length)
    first = torch.minimum(first, stop)
    edges = torch.zeros(rows, problem.key_length + 1)
    for bound, sign in ((first, 1.0), (stop, -1.0)):
        edges.index_put_((q_chunk // columns, bound), torch.tensor(sign), accumulate=True)
    seeing = edges.cumsum(1)[:, :-1]  # (row, key)
    seen = seeing > 0.5
    before = torch.zeros(columns, problem.key_length + 1)
    before[k_chunk % columns, torch.arange(1, problem.key_length + 1)] = 1.0
    before = before.cumsum(1)
    visible = before[:, stop] - before[:, first]  # (column, query)
    pairs = torch.zeros(rows, rows * columns).index_add_(1, k_chunk, seeing).unflatten(1, (rows, columns))
    sent = _by_chunk(visible > 0.5, q_chunk, problem.shape).permute(1, 2, 0)
    brought = _by_chunk(seen, k_chunk, problem.shape).permute(2, 1, 0)
    return sent, brought, _passed(seen, k_chunk, problem.shape), pairs


def _owners(problem: Problem, *, queries: bool) -> Tensor:
    """For each position the chunk, r * C + c, that holds it."""
    layout, length = (problem.layout, problem.length) if queries else (problem.key_layout, problem.key_length)
    return _shards(layout, length, problem.shape.ranks) % (problem.shape.queries * problem.shape.keys)


@lru_cache(maxsize=64)
def _shards(layout: Layout, length: int, ranks: int) -> Tensor:
    """For each position the shard that holds it."""
    owners = torch.empty(length, dtype=torch.long)
    for shard in range(ranks):
        owners[layout.positions(length, ranks, shard)] = shard
    return owners


def _by_chunk(wanted: Tensor, chunk: Tensor, shape: Shape) -> Tensor:
    """How many tokens of each chunk are wanted: (by whom, row, column)."""
    counts = torch.zeros(wanted.shape[0], shape.queries * shape.keys).index_add_(1, chunk, wanted.float())
    return counts.reshape(-1, shape.queries, shape.keys)


def _passed(seen: Tensor, chunk: Tensor, shape: Shape) -> Tensor:
    """Round a ring: (column, source, step), what the rank so many steps on still gets, for itself or for others."""
    passed = torch.empty(shape.keys, shape.queries, shape.queries)
    for source in range(shape.queries):
        tokens = (chunk // shape.keys == source).nonzero().flatten()
        needed = seen[:, tokens].roll(-source, 0).flip(0).float().cummax(0).values.flip(0)  # (step, token)
        columns = torch.zeros(shape.queries, shape.keys).index_add_(1, chunk[tokens] % shape.keys, needed)
        passed[:, source] = columns.T
    return passed


class Moved(NamedTuple):
    """One exchange by rank, (r, c): out of it and into it inside its host, and between hosts; and to how many peers."""

    inside: Tensor  # (out, in or messages out, r, c)
    between: Tensor
    peers: int


def _lines(counts: Tensor, tile: int, *, columns: bool = False) -> Moved:
    """Of tokens (line, from, to), all but those that stay."""
    size = counts.shape[1]
    host = torch.arange(size) // tile
    near = host[:, None] == host
    moving = counts * (1 - torch.eye(size))
    ways = [torch.stack((x.sum(2), x.sum(1), (x > 0.5).float().sum(2))) for x in (moving * near, moving * ~near)]
    inside, between = (x.mT if columns else x for x in ways)
    return Moved(inside, between, size - 1)


def _along(held: Tensor, source: Tensor, target: Tensor, tile: int) -> Moved:
    """Of tokens (column, number), each from one place in the column to another."""
    near = source // tile == target // tile

    def way(some: Tensor) -> Tensor:
        moving = held * some
        sides = ((source, moving), (target, moving), (source, (moving > 0.5).float()))
        return torch.stack([torch.zeros_like(held).index_copy_(1, place, x) for place, x in sides]).mT

    return Moved(way(near), way(~near), 1)


def _and(one: Moved, other: Moved) -> Moved:
    """Two exchanges at the same time."""
    return Moved(one.inside + other.inside, one.between + other.between, one.peers)


def _flow(exchanges: list[Moved], tile: Shape) -> Flow:
    """The average of several exchanges, each over when its busiest rank or host is done."""
    if not exchanges:
        return Flow(Load(), Load(), 0)
    inside, between = (
        _load(torch.stack([getattr(moved, way) for moved in exchanges]), tile) for way in ("inside", "between")
    )
    return Flow(inside, between, exchanges[0].peers)


def _load(both: Tensor, tile: Shape) -> Load:
    """Of (exchange, (out, in or messages), r, c)."""
    both, messages = both[:, :2], both[:, 2].sum((1, 2)).mean()
    hosts = both.unflatten(2, (-1, tile.queries)).unflatten(4, (-1, tile.keys)).sum((3, 5))
    total, rank, host = both[:, 0].sum((1, 2)), both.flatten(1).amax(1), hosts.flatten(1).amax(1)
    return Load(float(total.mean()), float(rank.mean()), float(host.mean()), float(messages))
