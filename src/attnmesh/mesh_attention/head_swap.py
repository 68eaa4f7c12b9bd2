"""Tokens swapped for heads along the heads axis, and heads for tokens."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.comm.p2p import Channel, meta_like, select_tokens
from attnmesh.mesh.schedule import HeadGroup, HeadSlices, Schedule
from attnmesh.runtime.memo import index_on
from attnmesh.runtime.tensors import Tensors


class HeadTensors(NamedTuple):
    """Tensors of tokens: those that have query heads, and those that have key heads."""

    query_tensors: Tensors
    """(batch, heads, tokens, width) each, or without a width, as an lse."""
    key_tensors: Tensors = ()
    """(batch, kv_heads, tokens, width) each. Latents have no heads: they are (batch, 1, tokens, width)."""

    def some_heads(self, heads: HeadSlices) -> "HeadTensors":
        """Return some of the heads, as views where these are not all."""
        views: tuple[list[Tensor], list[Tensor]] = [], []
        for some, tensors, part in zip(views, self, heads, strict=True):
            for x in tensors:
                some.append(x if part.stop - part.start >= x.shape[1] else x[:, part])
        return HeadTensors(*map(tuple, views))


FinishSwap = Callable[[], HeadTensors]
"""Awaits a swap under way, and returns what has arrived."""


@dataclass(frozen=True)
class HeadAllToAll:
    """All-to-alls along the heads axis."""

    channel: Channel
    schedule: Schedule

    def swap_in(self, tensors: HeadTensors, group: HeadGroup, into: HeadTensors | None = None) -> FinishSwap:
        """Begin to swap tokens for this rank's heads of a group. The result is in `into`, or in new memory if None."""
        axis = self.channel.axis
        views = tensors.some_heads(group[axis.index])
        if axis.size == 1:
            return lambda: views
        queries = len(views.query_tensors)
        indices = [self.schedule.query_indices] * queries + [self.schedule.key_indices] * len(views.key_tensors)
        own = views.query_tensors + views.key_tensors
        shapes = [tuple(map(meta_like, own, map(len, slices))) for slices in zip(*indices, strict=True)]
        parts = [part.query_tensors + part.key_tensors for part in map(tensors.some_heads, group)]
        finish_exchange = self.channel.begin_all_to_all(parts, shapes)

        def finish() -> HeadTensors:
            if into is not None:
                chunk = into.query_tensors + into.key_tensors
            else:
                new = zip(own, indices, strict=True)
                chunk = tuple(empty_tokens(x, x.shape[1], sum(map(len, slices))) for x, slices in new)
            for rank, pieces in enumerate(finish_exchange()):
                for x, slices, piece in zip(chunk, indices, pieces, strict=True):
                    x.index_copy_(2, index_on(slices[rank], x.device), piece)
            return HeadTensors(chunk[:queries], chunk[queries:])

        return finish

    def swap_out(self, computed: HeadTensors, results: HeadTensors, group: HeadGroup) -> Iterator[None]:
        """Swap heads for tokens. Results for this rank's tokens are put in place.

        It yields while the exchange is under way.
        """
        views = [
            part.query_tensors + part.key_tensors for part in map(results.some_heads, group)
        ]  # a tuple for each rank
        arrived = [computed.query_tensors + computed.key_tensors]
        if self.channel.axis.size > 1:
            parts = []
            for q_indices, k_indices in zip(self.schedule.query_indices, self.schedule.key_indices, strict=True):
                keys = select_tokens(computed.key_tensors, k_indices) if computed.key_tensors else ()
                parts.append(select_tokens(computed.query_tensors, q_indices) + keys)
            finish = self.channel.begin_all_to_all(parts, views)
            del computed, arrived, parts
            yield
            arrived = finish()
        for targets, pieces in zip(views, arrived, strict=True):
            for x, piece in zip(targets, pieces, strict=True):
                x.copy_(piece)


def empty_tokens(x: Tensor, heads: int, tokens: int) -> Tensor:
    """Return an empty tensor like x of other heads and tokens. Its memory is in order (batch, length, heads, dim)."""
    order = (0, 2, 1, 3)[: x.ndim]
    return torch.empty_permuted((x.shape[0], heads, tokens, *x.shape[3:]), order, dtype=x.dtype, device=x.device)
