"""What crosses ranks, and nothing else does: gather, give back, swap heads for tokens, and agree.

Each takes off at once and is finished by calling what it returns, so that a kernel can run meanwhile. All messages go
directly from rank to rank, all of an exchange at the same time, and only the tokens that a schedule names travel.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from attnmesh.mesh import Axis
from attnmesh.schedule import Step

Tensors = tuple[Tensor, ...]


@dataclass
class Traffic:
    """What a rank received: elements of q, k, v, out and their gradients; numbers a row (lse and the like); bytes."""

    vectors: int = 0
    scalars: int = 0
    bytes: int = 0


_traffic: ContextVar[Traffic | None] = ContextVar("attnmesh traffic", default=None)


@contextmanager
def counted() -> Iterator[Traffic]:
    """Count what this rank receives, in this thread, while the block runs."""
    traffic = Traffic()
    token = _traffic.set(traffic)
    try:
        yield traffic
    finally:
        _traffic.reset(token)


def gather(tensors: Tensors, step: Step, axis: Axis) -> Callable[[], Tensors]:
    """The tokens that a step brings, beside those that it keeps, in order of position: (batch, heads, tokens, ...)."""
    sends = {peer: tuple(take(x, tokens) for x in tensors) for peer, tokens in step.send}
    wanted = {peer: tuple(_some(x, count) for x in tensors) for peer, count in step.receive}
    finish = _trade(sends, wanted, axis)

    def finished() -> Tensors:
        arrived = finish()
        if not arrived:
            return tuple(_ordered(take(x, step.keep), step.order) for x in tensors)
        parts = [tuple(take(x, step.keep) for x in tensors), *(arrived[peer] for peer, _ in step.receive)]
        return tuple(_ordered(torch.cat(part, dim=2), step.order) for part in zip(*parts, strict=True))

    return finished


def give_back(tensors: Tensors, step: Step, axis: Axis) -> Callable[[], list[tuple[Tensor, Tensors]]]:
    """What was made for the tokens held goes to their owners: for this rank, which of its tokens, and what for them."""
    shares = {peer: tuple(take(x, tokens) for x in tensors) for peer, tokens in step.owners}
    mine = {axis.index: shares.pop(axis.index)} if axis.index in shares else {}
    wanted = {peer: tuple(_some(x, len(t)) for x in tensors) for peer, t in step.holders if peer != axis.index}
    finish = _trade(shares, wanted, axis)

    def finished() -> list[tuple[Tensor, Tensors]]:
        arrived = mine | finish()
        return [(tokens, arrived[peer]) for peer, tokens in step.holders]

    return finished


def swap(parts: Sequence[Tensors], wanted: Sequence[Tensors], axis: Axis) -> list[Tensors]:
    """All to all: `parts[p]` goes to rank p, and what comes from p is shaped like `wanted[p]`."""
    others = [peer for peer in range(axis.size) if peer != axis.index]
    finish = _trade({p: parts[p] for p in others}, {p: wanted[p] for p in others}, axis)
    arrived = {axis.index: parts[axis.index]} | finish()
    return [arrived[peer] for peer in range(axis.size)]


def share(numbers: Sequence[int], axes: Sequence[Axis], device: torch.device) -> list[list[int]]:
    """Every rank's numbers, by number of shard: `axes` from the outermost to the innermost."""
    table = torch.tensor([numbers], dtype=torch.int64, device=device)
    for axis in reversed(axes):
        if axis.group is not None:
            tables = [torch.empty_like(table) for _ in range(axis.size)]
            dist.all_gather(tables, table, group=axis.group)
            table = torch.cat(tables)
    rows: list[list[int]] = table.tolist()
    return rows


def take(x: Tensor, tokens: Tensor) -> Tensor:
    """Some of the tokens, by ascending indices: a view where they are one run."""
    if len(tokens) and int(tokens[-1]) - int(tokens[0]) == len(tokens) - 1:
        return x.narrow(2, int(tokens[0]), len(tokens))
    return x.index_select(2, tokens.to(x.device))


def _ordered(x: Tensor, order: Tensor | None) -> Tensor:
    return x if order is None else x.index_select(2, order.to(x.device))


def _trade(sends: dict[int, Tensors], wanted: dict[int, Tensors], axis: Axis) -> Callable[[], dict[int, Tensors]]:
    """Post all messages at once; finishing waits for them. `wanted` are empty tensors of the shapes that will come."""
    letters = {peer: _pack(tensors) for peer, tensors in sends.items()}
    boxes = {peer: [torch.empty_like(x) for x in _pack(tensors)] for peer, tensors in wanted.items()}
    posts = [
        dist.P2POp(dist.isend, x, group=axis.group, group_peer=peer) for peer, each in letters.items() for x in each
    ]
    posts += [
        dist.P2POp(dist.irecv, x, group=axis.group, group_peer=peer) for peer, each in boxes.items() for x in each
    ]
    works = dist.batch_isend_irecv(posts) if posts else []
    _count(wanted)

    def finished() -> dict[int, Tensors]:
        for work in works:
            work.wait()
        letters.clear()  # they had to live until they were sent
        return {peer: _unpack(boxes.pop(peer), tensors) for peer, tensors in wanted.items()}

    return finished


def _pack(tensors: Tensors) -> list[Tensor]:
    """One message for each dtype, as bytes: backends send those whatever they are of."""
    dtypes = dict.fromkeys(x.dtype for x in tensors)
    flat = [torch.cat([x.reshape(-1) for x in tensors if x.dtype == dtype]) for dtype in dtypes]
    return [x.view(torch.uint8) for x in flat if x.numel()]


def _unpack(messages: list[Tensor], shapes: Tensors) -> Tensors:
    dtypes = dict.fromkeys(x.dtype for x in shapes if x.numel())
    rest = {dtype: message.view(dtype) for dtype, message in zip(dtypes, messages, strict=True)}
    tensors = []
    for x in shapes:
        if x.numel():
            tensors.append(rest[x.dtype][: x.numel()].view(x.shape))
            rest[x.dtype] = rest[x.dtype][x.numel() :]
        else:
            tensors.append(x)
    return tuple(tensors)


def _some(x: Tensor, tokens: int) -> Tensor:
    return x.new_empty((*x.shape[:2], tokens, *x.shape[3:]))


def _count(wanted: dict[int, Tensors]) -> None:
    if (traffic := _traffic.get()) is not None:
        for x in (x for tensors in wanted.values() for x in tensors):
            traffic.vectors += x.numel() if x.ndim == 4 else 0
            traffic.scalars += x.numel() if x.ndim == 3 else 0
            traffic.bytes += x.numel() * x.element_size()
