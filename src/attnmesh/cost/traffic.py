"""Tokens that attention sends over each class of links, counted for all ranks at once from its `Problem`.

A host holds a *tile* of the mesh: a number of ranks along each axis. The tile decides which tokens leave a host:

        1x4x4 on hosts of 4        tile 1x2x2       tile 1x1x4        ranks with the same letter share a host
                                   a a b b          a a a a           queries go from left to right, keys up and down
                                   a a b b          b b b b
                                   c c d d          c c c c
                                   c c d d          d d d d

A long problem is counted on a shorter one: of fewer windows, of fewer turns of blocks, or with the same proportions.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.core.layout import Contiguous, Layout, Packed, Striped, Zigzag
from attnmesh.core.mask import FAR
from attnmesh.mesh.schedule import Problem
from attnmesh.mesh.shapes import Shape

SAMPLE_TOKENS = 4096
"""Tokens up to which a problem is counted at full length. More ranks raise it, to 16 tokens per rank."""

MOST_TURN_TOKENS = 16 * SAMPLE_TOKENS
"""Tokens of the turns on which a problem is counted, at most. Of longer windows the blocks are a small part."""


class Load(NamedTuple):
    """Tokens of one exchange over a class of links: in total, and the most into or out of one rank or one host."""

    total: float = 0.0
    rank: float = 0.0
    host: float = 0.0
    messages: float = 0.0


class Flow(NamedTuple):
    """One exchange over both classes of links. A rank sends to `peers` other ranks."""

    inside: Load
    between: Load
    peers: int


class Pairs(NamedTuple):
    """Query-key pairs that the busiest rank attends, and that ranks attend on average."""

    most: float
    mean: float

    def times(self, number: float) -> "Pairs":
        """Return both counts times `number`."""
        return Pairs(number * self.most, number * self.mean)


@dataclass(frozen=True)
class PlannedTraffic:
    """Tokens that a pass over a queries x keys mesh sends, and the query-key pairs that it attends."""

    queries: Flow
    both_ways: Flow
    """Queries, and results for the queries of other ranks, which return at the same time."""
    keys: Flow
    hop: Flow
    """Keys of one step of a ring, on average."""
    hop_back: Flow
    """Gradients of one step of a ring, which go on with their keys, or back to the ranks of their keys."""
    pairs: Pairs
    steps: tuple[Pairs, ...]
    """Pairs of each step of a ring."""


def tiles(shape: Shape, ranks: int) -> Iterator[Shape]:
    """Yield the tiles of a mesh that a host of `ranks` ranks can hold.

    >>> [tuple(tile) for tile in tiles(Shape(1, 4, 4), 4)]
    [(1, 1, 4), (1, 2, 2), (1, 4, 1)]
    """
    for h in divisors(math.gcd(ranks, shape.heads)):
        for r in divisors(math.gcd(ranks // h, shape.queries)):
            c, remainder = divmod(ranks, h * r)
            if remainder == 0 and shape.keys % c == 0:
                yield Shape(h, r, c)


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, the smallest first."""
    return [n for n in range(1, number + 1) if number % n == 0]


@lru_cache(maxsize=4096)
def planned_traffic(problem: Problem, tile: Shape) -> PlannedTraffic:
    """Return the traffic of a problem on hosts that each hold a tile."""
    near, repeats = crop(problem)
    sample, scale = fewer_turns(near) or downscale(near)
    sampled = _count_exchanges(sample, tile)
    flows = {name: _scale(getattr(sampled, name), scale) for name in FLOWS}
    wider = _width(near) / _width(sample) if near.mask.max_distance < FAR else scale
    pairs = repeats * scale * wider
    steps = tuple(step.times(pairs) for step in sampled.steps)
    return PlannedTraffic(**flows, pairs=sampled.pairs.times(pairs), steps=steps)


FLOWS = ("queries", "both_ways", "keys", "hop", "hop_back")


def _scale(flow: Flow, scale: float) -> Flow:
    """Return the flow of a problem that is `scale` times as long. The number of messages stays."""
    loads = flow.inside, flow.between
    inside, between = (Load(x.total * scale, x.rank * scale, x.host * scale, x.messages) for x in loads)
    return Flow(inside, between, flow.peers)


@lru_cache(maxsize=4096)
def _count_exchanges(problem: Problem, tile: Shape) -> PlannedTraffic:
    queries, keys, ring, pairs = count_tokens(problem)
    _, queries_tile, keys_tile = tile
    size = problem.shape.queries
    source = torch.arange(size, device="cpu")
    # At step t of a ring, the rank t after the source holds its tokens; they came from the rank before.
    holders = [(source + t) % size for t in range(size + 1)]
    onward = [_shift(ring[:, :, t], holders[t - 1], holders[t], queries_tile) for t in range(1, size)]
    further = [*ring.unbind(2)[2:], torch.zeros_like(ring[:, :, 0])][: size - 1]
    back = [
        _shift(on, holders[t], holders[t + 1], queries_tile)
        + _shift(ring[:, :, t] - on, holders[t], source, queries_tile)
        for t, on in zip(range(1, size), further, strict=True)
    ]
    rank_pairs = pairs.sum(1)
    steps = [pairs[source, (source - t) % size] for t in range(size)]
    return PlannedTraffic(
        queries=_flow([_lines(queries, keys_tile)], problem.shape.keys - 1, tile),
        both_ways=_flow([_lines(queries + queries.mT, keys_tile)], problem.shape.keys - 1, tile),
        keys=_flow([_lines(keys, queries_tile, by_c=True)], size - 1, tile),
        hop=_flow(onward, 1, tile),
        hop_back=_flow(back, 1, tile),
        pairs=Pairs(float(rank_pairs.max()), float(rank_pairs.mean())),
        steps=tuple(Pairs(float(step.max()), float(step.mean())) for step in steps),
    )


def crop(problem: Problem) -> tuple[Problem, float]:
    """Return a problem with fewer windows or documents, and the ratio of the lengths.

    As many tokens cross the edges between ranks as in the whole problem, where windows or documents are short.
    """
    distance = problem.mask.max_distance
    length = 4 * problem.shape.ranks * max(distance, 1)
    in_runs = all(isinstance(layout, Contiguous | Zigzag) for layout in (problem.layout, problem.key_layout))
    alike = not problem.mask.span_pairs and problem.length == problem.key_length and in_runs  # one part is as the next
    if distance >= FAR or problem.length <= length or not alike:
        return problem, 1.0
    mask = problem.mask.cropped(length)
    return replace(problem, mask=mask, length=length, key_length=length), problem.length / length


def _width(problem: Problem) -> float:
    """Return the most keys that a query sees; under a mask with spans, the average."""
    mask = problem.mask
    if not mask.span_pairs:
        return float(mask.max_keys_per_query)
    first, last = mask.bounds(torch.arange(problem.length, device="cpu"))
    return float((last.clamp(max=problem.key_length - 1) - first + 1).double().mean())


def fewer_turns(problem: Problem) -> tuple[Problem, float] | None:
    """Return a problem with fewer turns of striped blocks, and the ratio of the lengths; None where that is too long.

    Each turn sends as the next one does. Blocks cannot shrink as windows do: many would be shorter than a token.
    """
    distance, layouts = problem.mask.max_distance, (problem.layout, problem.key_layout)
    blocks = [layout.turns(problem.shape.ranks)[0].period for layout in layouts if isinstance(layout, Striped)]
    if len(blocks) < 2 or distance >= FAR or problem.mask.span_pairs or problem.length != problem.key_length:
        return None
    period = math.lcm(*blocks)
    length = -(-max(SAMPLE_TOKENS, 16 * (distance + period)) // period) * period
    if length > MOST_TURN_TOKENS or length >= problem.length:
        return None
    sample = replace(problem, mask=problem.mask.cropped(length), length=length, key_length=length)
    return sample, problem.length / length


def downscale(problem: Problem) -> tuple[Problem, float]:
    """Return a shorter problem with the same proportions, and the ratio of the lengths."""
    ranks = problem.shape.ranks
    most_tokens = max(SAMPLE_TOKENS, (16 if problem.mask.max_distance >= FAR else 64) * ranks)
    longest = max(problem.length, problem.key_length)
    if longest <= most_tokens:
        return problem, 1.0
    scale = longest / (most_tokens // (2 * ranks) * 2 * ranks)

    def shorter(tokens: int) -> int:
        return tokens if tokens >= FAR else round(tokens / scale)

    def packed(layout: Layout) -> Layout:
        if not isinstance(layout, Packed):
            return layout
        edges = [shorter(end) for end in accumulate(layout.documents, initial=0)]
        return replace(layout, documents=tuple(stop - start for start, stop in pairwise(edges)))

    shorter_problem = Problem(
        problem.mask.scaled(shorter),
        problem.shape,
        layout=packed(problem.layout),
        key_layout=packed(problem.key_layout),
        length=shorter(problem.length),
        key_length=shorter(problem.key_length),
    )
    return shorter_problem, scale


@lru_cache(maxsize=512)
def count_tokens(problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return counts of queries (r, from, to), keys (c, from, to), ring keys (c, source, step), and pairs.

    Pairs are counted by (r, source, c). A query sees one run of positions. So the queries at r see a union of runs, and
    the keys at c that a query sees are a difference of two cumulative counts.
    """
    _, query_ranks, key_ranks = problem.shape
    ranks = problem.shape.ranks
    q_chunk = _shards(problem.layout, problem.length, ranks) % (query_ranks * key_ranks)  # r * C + c
    k_chunk = _shards(problem.key_layout, problem.key_length, ranks) % (query_ranks * key_ranks)
    start, last = problem.mask.bounds(torch.arange(problem.length, device="cpu"))
    stop = (last + 1).clamp(max=problem.key_length)
    start = torch.minimum(start, stop)
    edges = torch.zeros(query_ranks, problem.key_length + 1, dtype=torch.float32, device="cpu")
    for bound, sign in ((start, 1.0), (stop, -1.0)):
        edges.index_put_((q_chunk // key_ranks, bound), edges.new_tensor(sign), accumulate=True)
    seeing = edges.cumsum(1)[:, :-1]  # (r, key)
    is_seen = seeing > 0.5
    before = torch.zeros(key_ranks, problem.key_length + 1, dtype=torch.float32, device="cpu")
    before[k_chunk % key_ranks, torch.arange(1, problem.key_length + 1, device="cpu")] = 1.0
    before = before.cumsum(1)
    visible = before[:, stop] - before[:, start]  # (c, query)
    pairs = seeing.new_zeros(query_ranks, query_ranks * key_ranks).index_add_(1, k_chunk, seeing)
    pairs = pairs.unflatten(1, (query_ranks, key_ranks))
    queries = _by_chunk(visible > 0.5, q_chunk, problem.shape).permute(1, 2, 0)
    keys = _by_chunk(is_seen, k_chunk, problem.shape).permute(2, 1, 0)
    return queries, keys, _ring_tokens(is_seen, k_chunk, problem.shape), pairs


@lru_cache(maxsize=64)
def _shards(layout: Layout, length: int, ranks: int) -> Tensor:
    """Return the shard of each position."""
    owners = torch.empty(length, dtype=torch.long, device="cpu")
    for shard in range(ranks):
        owners[layout.positions(length, ranks, shard)] = shard
    return owners


def _by_chunk(wanted: Tensor, chunk: Tensor, shape: Shape) -> Tensor:
    """Return how many tokens of each chunk are wanted: (receiver, r, c)."""
    is_wanted = wanted.to(torch.float32)
    counts = is_wanted.new_zeros(wanted.shape[0], shape.queries * shape.keys).index_add_(1, chunk, is_wanted)
    return counts.reshape(-1, shape.queries, shape.keys)


def _ring_tokens(is_seen: Tensor, chunk: Tensor, shape: Shape) -> Tensor:
    """Return (c, source, step): tokens of `source` that the rank `step` steps on receives, to use or pass on."""
    counts = torch.empty(shape.keys, shape.queries, shape.queries, dtype=torch.float32, device="cpu")
    for source in range(shape.queries):
        indices = (chunk // shape.keys == source).nonzero().flatten()
        uses = is_seen[:, indices].roll(-source, 0).flip(0).to(counts.dtype)
        is_needed = uses.cummax(0).values.flip(0)  # (step, token)
        by_step = counts.new_zeros(shape.queries, shape.keys).index_add_(1, chunk[indices] % shape.keys, is_needed)
        counts[:, source] = by_step.T
    return counts


# An exchange is a tensor (inside or between hosts; tokens out, tokens in or messages out; r; c).


def _lines(counts: Tensor, tile: int, *, by_c: bool = False) -> Tensor:
    """Return the exchange of tokens (r or c, from, to) along one axis, without those that stay."""
    host = torch.arange(counts.shape[1], device="cpu") // tile
    near = host[:, None] == host
    moving = counts * (1 - torch.eye(len(host), dtype=counts.dtype, device="cpu"))
    parts = [torch.stack((x.sum(2), x.sum(1), (x > 0.5).float().sum(2))) for x in (moving * near, moving * ~near)]
    return torch.stack(parts).mT if by_c else torch.stack(parts)


def _shift(counts: Tensor, source: Tensor, target: Tensor, tile: int) -> Tensor:
    """Return the exchange of tokens (c, n), sent from `source[n]` to `target[n]` along the queries axis."""
    near = source // tile == target // tile
    loads = []
    for moving in (counts * near, counts * ~near):
        sides = ((source, moving), (target, moving), (source, (moving > 0.5).float()))
        loads.append(torch.stack([torch.zeros_like(counts).index_copy_(1, index, x) for index, x in sides]))
    return torch.stack(loads).mT


def _flow(exchanges: list[Tensor], peers: int, tile: Shape) -> Flow:
    """Return the average of several exchanges. Each ends when its busiest rank or host is done."""
    if not exchanges:
        return Flow(Load(), Load(), 0)
    inside, between = (_load(counts, tile) for counts in torch.stack(exchanges, 1))
    return Flow(inside, between, peers)


def _load(counts: Tensor, tile: Shape) -> Load:
    """Return the mean load of exchanges, from counts (exchange, (out, in, messages), r, c)."""
    counts, messages = counts[:, :2], counts[:, 2].sum((1, 2)).mean()
    hosts = counts.unflatten(2, (-1, tile.queries)).unflatten(4, (-1, tile.keys)).sum((3, 5))
    total = counts[:, 0].sum((1, 2))
    rank = counts.flatten(1).amax(1)
    host = hosts.flatten(1).amax(1)
    return Load(float(total.mean()), float(rank.mean()), float(host.mean()), float(messages))
