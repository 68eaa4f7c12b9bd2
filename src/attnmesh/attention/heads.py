"""The heads axis: ranks swap tokens for heads before attention, and back after it, one group of heads at a time.

Before it a rank holds all heads of its own tokens. After it a rank holds its heads of the whole chunk, the tokens of
all ranks along the axis in order of position.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from attnmesh.comm.p2p import begin_swap, meta_like, taken
from attnmesh.mesh.axes import Axis
from attnmesh.mesh.schedule import HeadGroup, Heads, Schedule
from attnmesh.runtime.counters import Tensors
from attnmesh.runtime.kept import on_device

Pair = tuple[Tensors, Tensors]
"""Some tensors of queries, and some of keys."""


def heads_of(queries: Tensors, keys: Tensors, heads: Heads) -> Pair:
    """Return some of the heads, as views."""
    return tuple(x[:, heads.queries] for x in queries), tuple(x[:, heads.keys] for x in keys)


def within_share(group: HeadGroup, first: HeadGroup, axis: Axis) -> Heads:
    """Return where this rank's heads of a group stand among all its heads, which begin with the first group."""
    mine, (queries, keys) = group[axis.index], first[axis.index]
    places = zip(mine, (queries.start, keys.start), strict=True)
    return Heads(*(slice(heads.start - start, heads.stop - start) for heads, start in places))


def to_heads(
    queries: Tensors, keys: Tensors, group: HeadGroup, schedule: Schedule, axis: Axis, into: Tensors = ()
) -> Callable[[], Pair]:
    """Begin to swap tokens for this rank's heads of a group. The result is in `into`, or else in new memory."""
    parts = [heads_of(queries, keys, heads) for heads in group]
    mine = parts[axis.index]
    if axis.size == 1:
        return lambda: mine
    shares = [schedule.query_shares] * len(queries) + [schedule.key_shares] * len(keys)
    shapes = *mine[0], *mine[1]
    wanted = [tuple(map(meta_like, shapes, map(len, places))) for places in zip(*shares, strict=True)]  # by rank
    finish = begin_swap([(*q, *k) for q, k in parts], wanted, axis)

    def finished() -> Pair:
        pieces = list(zip(*finish(), strict=True))
        whole = []
        for index, (x, places) in enumerate(zip(shapes, shares, strict=True)):
            result = into[index] if into else empty_tokens(x, x.shape[1], sum(map(len, places)))
            for tokens, piece in zip(places, pieces[index], strict=True):
                result.index_copy_(2, on_device(tokens, x.device), piece)
            whole.append(result)
        return tuple(whole[: len(queries)]), tuple(whole[len(queries) :])

    return finished


def to_tokens(made: Pair, results: Pair, group: HeadGroup, schedule: Schedule, axis: Axis) -> Iterator[None]:
    """Swap heads for tokens: put results for this rank's tokens in place. It yields while the exchange is under way."""
    places = [heads_of(*results, heads) for heads in group]  # by rank
    arrived = [(*made[0], *made[1])]
    if axis.size > 1:
        shares = zip(schedule.query_shares, schedule.key_shares, strict=True)
        parts = [(*taken(made[0], q), *taken(made[1], k)) for q, k in shares]
        finish = begin_swap(parts, [(*q, *k) for q, k in places], axis)
        del made, parts, arrived
        yield
        arrived = finish()
    for (q, k), piece in zip(places, arrived, strict=True):
        for place, x in zip((*q, *k), piece, strict=True):
            place.copy_(x)


def empty_tokens(x: Tensor, heads: int, tokens: int) -> Tensor:
    """Return an empty tensor like x with other heads and tokens, in memory order (batch, length, heads, dim)."""
    order = (0, 2, 1, 3)[: x.ndim]
    return torch.empty_permuted((x.shape[0], heads, tokens, *x.shape[3:]), order, dtype=x.dtype, device=x.device)
