"""The heads axis: ranks swap tokens for heads before attention, and back after it, one group of heads at a time.

Before it a rank holds all heads of its own tokens. After it a rank holds its heads of the whole chunk, the tokens of
all ranks along the axis in order of position. Of the tensors that travel together the first are of queries, the others
of keys.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnmesh.comm.p2p import begin_swap, meta_like, taken
from attnmesh.mesh.axes import Axis
from attnmesh.mesh.schedule import HeadGroup, Heads, Schedule
from attnmesh.runtime.caches import on_device
from attnmesh.runtime.counters import Tensors


def some_heads(tensors: Tensors, queries: int, heads: Heads) -> Tensors:
    """Return some of the heads, as views where these are not all."""
    found = []
    for index, x in enumerate(tensors):
        some = heads.queries if index < queries else heads.keys
        found.append(x if some.stop - some.start >= x.shape[1] else x[:, some])
    return tuple(found)


@dataclass(frozen=True)
class HeadSwaps:
    """Swaps along the heads axis. With `in_turn` no other exchange along it begins before one has ended."""

    axis: Axis
    schedule: Schedule
    in_turn: bool

    def to_heads(self, tensors: Tensors, queries: int, group: HeadGroup, into: Tensors = ()) -> Callable[[], Tensors]:
        """Begin to swap tokens for this rank's heads of a group. The result is in `into`, or else in new memory."""
        mine = some_heads(tensors, queries, group[self.axis.index])
        if self.axis.size == 1:
            return lambda: mine
        shares = [self.schedule.query_shares] * queries + [self.schedule.key_shares] * (len(tensors) - queries)
        wanted = [tuple(map(meta_like, mine, map(len, places))) for places in zip(*shares, strict=True)]  # by rank
        parts = [some_heads(tensors, queries, heads) for heads in group]
        finish = begin_swap(parts, wanted, self.axis, in_turn=self.in_turn)

        def finished() -> Tensors:
            whole = into or tuple(
                empty_tokens(x, x.shape[1], sum(map(len, places))) for x, places in zip(mine, shares, strict=True)
            )
            for rank, pieces in enumerate(finish()):
                for x, places, piece in zip(whole, shares, pieces, strict=True):
                    x.index_copy_(2, on_device(places[rank], x.device), piece)
            return whole

        return finished

    def to_tokens(self, made: Tensors, results: Tensors, queries: int, group: HeadGroup) -> Iterator[None]:
        """Swap heads for tokens: put results for this rank's tokens in place.

        It yields while the exchange is under way.
        """
        places = [some_heads(results, queries, heads) for heads in group]  # by rank
        arrived = [made]
        if self.axis.size > 1:
            parts = []
            for q_tokens, k_tokens in zip(self.schedule.query_shares, self.schedule.key_shares, strict=True):
                keys = taken(made[queries:], k_tokens) if len(made) > queries else ()
                parts.append(taken(made[:queries], q_tokens) + keys)
            finish = begin_swap(parts, places, self.axis, in_turn=self.in_turn)
            del made, arrived, parts
            yield
            arrived = finish()
        for mine, pieces in zip(places, arrived, strict=True):
            for x, piece in zip(mine, pieces, strict=True):
                x.copy_(piece)


def empty_tokens(x: Tensor, heads: int, tokens: int) -> Tensor:
    """Return an empty tensor like x with other heads and tokens, in memory order (batch, length, heads, dim)."""
    order = (0, 2, 1, 3)[: x.ndim]
    return torch.empty_permuted((x.shape[0], heads, tokens, *x.shape[3:]), order, dtype=x.dtype, device=x.device)
