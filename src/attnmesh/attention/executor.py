"""Runs a schedule: gather, attend, merge-scatter; and back. One loop for every exchange.

An exchange is a value: whether keys come at once or round a ring is the schedule's number of steps, and whether heads
go all together or group by group is a number too. What comes next is always under way while a kernel runs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from attnmesh.comm.counters import Tensors
from attnmesh.comm.p2p import gather, return_to_owners
from attnmesh.core.partial import Partial, join, wide
from attnmesh.kernels.driver import Gradients, Kernel, SavedForward, identity
from attnmesh.kernels.driver import backward as kernel_backward
from attnmesh.kernels.driver import forward as kernel_forward
from attnmesh.mesh.axes import Axis, Mesh
from attnmesh.mesh.schedule import Schedule, Step

Back = list[tuple[Tensor, Tensors]]
"""What came back: for which of this rank's tokens, and what."""


@dataclass(frozen=True)
class Task:
    """What to run, and with what."""

    mesh: Mesh
    schedule: Schedule
    head_groups: int
    kernel: Kernel
    scale: float


@dataclass(frozen=True)
class Arrivals:
    """One group of heads under way: the row's queries, and the column's keys and values step by step."""

    heads: slice  # of the keys; the query heads are those that share them
    rows: Callable[[], Tensors]
    keys: Iterator[Tensors]


def forward(q: Tensor, k: Tensor, v: Tensor, task: Task) -> Partial:
    """The partial of this rank's queries over the keys of all ranks, in float32 or wider."""
    own = identity(q, v, wide(q.dtype))
    returns = PendingReturns(_merge_in)
    for arrivals in _arrivals((q,), k, v, task):
        mine = tuple(x[:, _shared(arrivals.heads, q, k)] for x in own)
        returns.add(_attended(arrivals, task), task.schedule.row, task.mesh.keys, mine)
    returns.finish()
    return own


def _attended(arrivals: "Arrivals", task: Task) -> Partial:
    """The partial of the row's queries over the column's keys, for one group of heads."""
    (rows,) = arrivals.rows()
    total: Partial | None = None
    for band in task.schedule.bands:
        keys, values = next(arrivals.keys)
        out, lse = kernel_forward(task.kernel, rows, keys, values, band, task.scale)
        del keys, values  # or they would live until the next ones have come
        partial = Partial(out.to(lse.dtype), lse)
        total = partial if total is None else join([total, partial])
    assert total is not None  # every schedule has a step
    return total


def backward(q: Tensor, k: Tensor, v: Tensor, answer: SavedForward, task: Task) -> Gradients:
    """The gradients of this rank's q, k and v, from what it saved alone, in float32 or wider."""
    delta = (answer.out.to(wide(q.dtype)) * answer.dout).sum(-1)
    own = Gradients(*(torch.zeros_like(x, dtype=wide(x.dtype)) for x in (q, k, v)))
    returns = PendingReturns(_add_in)
    for arrivals in _arrivals((q, answer.dout, answer.lse, delta), k, v, task):
        mine = own.q[:, _shared(arrivals.heads, q, k)], own.k[:, arrivals.heads], own.v[:, arrivals.heads]
        dq = _differentiated(arrivals, task, returns, mine[1:])
        returns.add((dq,), task.schedule.row, task.mesh.keys, mine[:1])
    returns.finish()
    return own


def _differentiated(arrivals: "Arrivals", task: Task, returns: "PendingReturns", mine: Tensors) -> Tensor:
    """The row's dq from the column's keys, for one group of heads; dk and dv go to their owners, into `mine`.

    Those of keys that travel on go with them, and grow on their way.
    """
    rows, dout, lse, delta = arrivals.rows()
    answer = SavedForward(_stand_in(dout, delta), lse, dout)
    dq: Tensor | None = None
    coming: Callable[[], Tensors] | None = None  # what the ranks before made for the keys of this step
    for band, step, onward in zip(task.schedule.bands, task.schedule.steps, task.schedule.travelling, strict=True):
        keys, values = next(arrivals.keys)
        part = kernel_backward(task.kernel, rows, keys, values, answer, band, task.scale)
        del keys, values  # or they would live until the next ones have come
        dq = part.q.to(delta.dtype) if dq is None else dq.add_(part.q)
        made = part.k.to(dq.dtype), part.v.to(dq.dtype)
        del part
        if coming is not None:
            _add(made, coming())
        returns.add(made, step, task.mesh.queries, mine)
        coming = None if onward is None else gather(made, onward, task.mesh.queries)
        del made
    assert dq is not None  # every schedule has a step
    return dq


class PendingReturns:
    """Results on their way back to their owners, at most one of them under way while the next is computed."""

    def __init__(self, put: Callable[[Back, Tensors], None]) -> None:
        self.put = put
        self.under_way: tuple[Callable[[], Back], Tensors] | None = None

    def add(self, made: Tensors, step: Step, axis: Axis, mine: Tensors) -> None:
        """Send back what was made; what others made for this rank's tokens is to be put into `mine`."""
        self.finish()
        self.under_way = return_to_owners(made, step, axis), mine

    def finish(self) -> None:
        """Wait for what is under way."""
        if self.under_way is not None:
            coming, mine = self.under_way
            self.put(coming(), mine)
            self.under_way = None


def _arrivals(rows: Tensors, k: Tensor, v: Tensor, task: Task) -> Iterator[Arrivals]:
    """Group after group of heads, the next one's exchanges under way before this one is attended."""

    def begin(heads: slice) -> Arrivals:
        shared = _shared(heads, rows[0], k)
        queries = gather(tuple(x[:, shared] for x in rows), task.schedule.row, task.mesh.keys)
        return Arrivals(heads, queries, _stream(k[:, heads], v[:, heads], task))

    edges = [group * k.shape[1] // task.head_groups for group in range(task.head_groups + 1)]
    groups = [slice(start, stop) for start, stop in pairwise(edges) if start < stop]
    under_way = begin(groups[0])
    for following in groups[1:]:
        arrived, under_way = under_way, begin(following)
        yield arrived
    yield under_way


def _stream(k: Tensor, v: Tensor, task: Task) -> Iterator[Tensors]:
    """The keys and values of each step, the first under way at once and the next whenever one has come."""
    steps, axis = task.schedule.steps, task.mesh.queries
    first = gather((k, v), steps[0], axis)

    def arrivals() -> Iterator[Tensors]:
        finish = first
        for step in steps[1:]:
            held = finish()
            finish = gather(held, step, axis)
            yield held
            del held
        yield finish()

    return arrivals()


def _merge_in(parts: Back, total: Tensors) -> None:
    """Merge what ranks of the row made, for some of this rank's queries each, into the partial for all of them."""
    for tokens, part in parts:
        places = tokens.to(part[0].device)
        merged = join([Partial(*(x.index_select(2, places) for x in total)), Partial(*part)])
        for whole, some in zip(total, merged, strict=True):
            whole.index_copy_(2, places, some)


def _add_in(parts: Back, totals: Tensors) -> None:
    for tokens, part in parts:
        for total, some in zip(totals, part, strict=True):
            total.index_add_(2, tokens.to(some.device), some)


def _add(sums: Tensors, more: Tensors) -> None:
    for some, other in zip(sums, more, strict=True):
        some.add_(other)


def _shared(heads: slice, q: Tensor, k: Tensor) -> slice:
    """The query heads that share some key heads."""
    group = q.shape[1] // k.shape[1]
    return slice(heads.start * group, heads.stop * group)


def _stand_in(dout: Tensor, delta: Tensor) -> Tensor:
    """An `out` with `sum(out * dout) = delta`, all that a backward pass asks of it: delta travels, out need not.

    It lies along dout and is never longer than the true one, so it can be rounded as well as that.
    """
    exact = dout.to(delta.dtype)
    size = exact.abs().amax(-1, keepdim=True)
    unit = exact / size.masked_fill(size == 0, 1.0)
    share = delta.unsqueeze(-1) / size.masked_fill(size == 0, 1.0) / unit.square().sum(-1, keepdim=True).clamp(min=1.0)
    return (unit * share).to(dout.dtype)
