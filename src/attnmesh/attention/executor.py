"""Run a schedule, forward and backward: gather queries and keys, attend, return results to their owners.

One loop serves every exchange. Keys that arrive at once are one step, and keys that travel round a ring are several.
Heads travel all together or in groups. The next exchange is always under way while a kernel runs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from attnmesh.attention.latent import Projection
from attnmesh.comm.p2p import gather, return_to_owners
from attnmesh.core.logits import Logits
from attnmesh.core.mask import Band
from attnmesh.core.partial import Partial, identity, merge_unchecked, sum_dtype
from attnmesh.kernels.blocks import BackwardInputs, Gradients, Kernel
from attnmesh.kernels.driver import Counts
from attnmesh.kernels.driver import backward as kernel_backward
from attnmesh.kernels.driver import forward as kernel_forward
from attnmesh.mesh.axes import Axis, Mesh
from attnmesh.mesh.schedule import Schedule, Step
from attnmesh.runtime.counters import Tensors
from attnmesh.runtime.kept import on_device

Returned = list[tuple[Tensor, Tensors]]
"""Results for this rank's tokens: the indices of some tokens, and the results for them."""


@dataclass(frozen=True)
class Task:
    """This rank's schedule, with the mesh, kernel and logits to run it."""

    mesh: Mesh
    schedule: Schedule
    head_groups: int
    kernel: Kernel
    logits: Logits
    counts: Sequence[Counts]  # of the keys of each step
    projection: Projection | None = None
    """Projection of latents, where these travel instead of keys and values."""

    def attend(self, q: Tensor, kv: Tensors, band: Band, counts: Counts) -> Partial:
        """Return the partial of queries over keys and values, or over latents."""
        if self.projection is not None:
            return self.projection.attend(self.kernel, q, kv[0], band, self.logits, counts)
        return kernel_forward(self.kernel, q, kv[0], kv[1], band, self.logits, counts)


@dataclass(frozen=True)
class Arrivals:
    """One group of heads under way: tensors of the row's queries, and the column's keys and values by step."""

    heads: slice  # key heads; the query heads that share them travel with them
    queries: Callable[[], Tensors]
    kv_by_step: Iterator[Tensors]


def forward(q: Tensor, kv: Tensors, task: Task) -> Partial:
    """Return the partial of this rank's queries over the keys of all ranks, in float32 or wider.

    `kv` are this rank's keys and values, or its latents.
    """
    step = task.schedule.query_step
    if task.head_groups == 1 and not (step.send or step.receive) and len(step.keep) == q.shape[2]:  # no query travels
        (arrivals,) = _arrivals((q,), kv, task)
        return _attend_heads(arrivals, task)
    value_dim = kv[-1].shape[-1] if task.projection is None else task.projection.value_dim
    total = identity(q, value_dim, sum_dtype(q.dtype))
    returns = PendingReturns(_merge_in)
    for arrivals in _arrivals((q,), kv, task):
        mine = tuple(x[:, _query_heads(arrivals.heads, q, kv[0])] for x in total)
        returns.add(_attend_heads(arrivals, task), step, task.mesh.row, mine)
    returns.finish()
    return total


def _attend_heads(arrivals: "Arrivals", task: Task) -> Partial:
    """Return the partial of the row's queries over the column's keys, for one group of heads."""
    (q,) = arrivals.queries()
    total: Partial | None = None
    for band, counts in zip(task.schedule.bands, task.counts, strict=True):
        kv = next(arrivals.kv_by_step)
        out, lse = task.attend(q, kv, band, counts)
        del kv  # else it would live until the next keys have arrived
        partial = Partial(out.to(lse.dtype), lse)
        total = partial if total is None else merge_unchecked([total, partial])
    assert total is not None  # every schedule has a step
    return total


def backward(q: Tensor, k: Tensor, v: Tensor, saved: BackwardInputs, task: Task) -> Gradients:
    """Return the gradients of this rank's q, k and v, in float32 or wider."""
    delta = (saved.out.to(sum_dtype(q.dtype)) * saved.dout).sum(-1)
    own = Gradients(*(torch.zeros_like(x, dtype=sum_dtype(x.dtype)) for x in (q, k, v)))
    returns = PendingReturns(_add_in)
    for arrivals in _arrivals((q, saved.dout, saved.lse, delta), (k, v), task):
        mine = own.q[:, _query_heads(arrivals.heads, q, k)], own.k[:, arrivals.heads], own.v[:, arrivals.heads]
        dq = _backward_heads(arrivals, task, returns, mine[1:])
        returns.add((dq,), task.schedule.query_step, task.mesh.row, mine[:1])
    returns.finish()
    return own


def _backward_heads(arrivals: "Arrivals", task: Task, returns: "PendingReturns", mine: Tensors) -> Tensor:
    """Return the row's dq from the column's keys, for one group of heads.

    dk and dv return to the owners of their keys, where they are added to `mine`. Gradients of keys that travel on
    travel with them, and each rank adds its part.
    """
    q, dout, lse, delta = arrivals.queries()
    saved = BackwardInputs(_equivalent_out(dout, delta), lse, dout)
    dq: Tensor | None = None
    coming: Callable[[], Tensors] | None = None  # gradients that earlier ranks computed for the keys of this step
    schedule = task.schedule
    for band, counts, step, onward in zip(
        schedule.bands, task.counts, schedule.key_steps, schedule.gradient_steps, strict=True
    ):
        keys, values = next(arrivals.kv_by_step)
        part = kernel_backward(task.kernel, q, keys, values, saved, band, task.logits, counts)
        del keys, values  # else they would live until the next keys have arrived
        dq = part.q.to(delta.dtype) if dq is None else dq.add_(part.q)
        made = part.k.to(dq.dtype), part.v.to(dq.dtype)
        del part
        if coming is not None:
            _add(made, coming())
        returns.add(made, step, task.mesh.column, mine)
        coming = None if onward is None else gather(made, onward, task.mesh.column)
        del made
    assert dq is not None  # every schedule has a step
    return dq


class PendingReturns:
    """Results that return to their owners: at most one exchange is under way while the next results are computed."""

    def __init__(self, put: Callable[[Returned, Tensors], None]) -> None:
        self.put = put
        self.under_way: tuple[Callable[[], Returned], Tensors] | None = None

    def add(self, made: Tensors, step: Step, axis: Axis, mine: Tensors) -> None:
        """Begin to return results. Results for this rank's tokens are put into `mine` when they arrive."""
        self.finish()
        self.under_way = return_to_owners(made, step, axis), mine

    def finish(self) -> None:
        """Wait for the exchange under way."""
        if self.under_way is not None:
            coming, mine = self.under_way
            self.put(coming(), mine)
            self.under_way = None


def _arrivals(queries: Tensors, kv: Tensors, task: Task) -> Iterator[Arrivals]:
    """Yield one group of heads after the other. The exchanges of the next group begin before a group is attended."""

    def begin(heads: slice) -> Arrivals:
        some_queries, some_kv = queries, kv
        if heads.stop - heads.start < kv[0].shape[1]:
            q_heads = _query_heads(heads, queries[0], kv[0])
            some_queries, some_kv = tuple(x[:, q_heads] for x in queries), tuple(x[:, heads] for x in kv)
        coming = gather(some_queries, task.schedule.query_step, task.mesh.row)
        return Arrivals(heads, coming, _kv_by_step(some_kv, task))

    if task.head_groups == 1:
        yield begin(slice(0, kv[0].shape[1]))
        return
    edges = [group * kv[0].shape[1] // task.head_groups for group in range(task.head_groups + 1)]
    groups = [slice(start, stop) for start, stop in pairwise(edges) if start < stop]
    under_way = begin(groups[0])
    for following in groups[1:]:
        arrived, under_way = under_way, begin(following)
        yield arrived
    yield under_way


def _kv_by_step(kv: Tensors, task: Task) -> Iterator[Tensors]:
    """Return the keys and values by step. The first exchange begins at once, and each next one when a step arrives."""
    steps, axis = task.schedule.key_steps, task.mesh.column
    first = gather(kv, steps[0], axis)

    def arrivals() -> Iterator[Tensors]:
        finish = first
        for step in steps[1:]:
            held = finish()
            finish = gather(held, step, axis)
            yield held
            del held
        yield finish()

    return arrivals()


def _merge_in(parts: Returned, total: Tensors) -> None:
    """Merge partials of some of this rank's queries into the partial of all of them."""
    for tokens, part in parts:
        places = on_device(tokens, part[0].device)
        merged = merge_unchecked([Partial(*(x.index_select(2, places) for x in total)), Partial(*part)])
        for whole, some in zip(total, merged, strict=True):
            whole.index_copy_(2, places, some)


def _add_in(parts: Returned, totals: Tensors) -> None:
    for tokens, part in parts:
        for total, some in zip(totals, part, strict=True):
            total.index_add_(2, on_device(tokens, some.device), some)


def _add(sums: Tensors, more: Tensors) -> None:
    for some, other in zip(sums, more, strict=True):
        some.add_(other)


def _query_heads(heads: slice, q: Tensor, k: Tensor) -> slice:
    """Return the query heads that share some key heads."""
    group = q.shape[1] // k.shape[1]
    return slice(heads.start * group, heads.stop * group)


def _equivalent_out(dout: Tensor, delta: Tensor) -> Tensor:
    """Return an `out` with `sum(out * dout) = delta`, which is all that a kernel's backward reads of it.

    So only delta is sent, one value per row. The result is the projection of `out` on dout. It is no longer than `out`,
    so rounding it loses no more.
    """
    exact = dout.to(delta.dtype)
    size = exact.abs().amax(-1, keepdim=True)
    unit = exact / size.masked_fill(size == 0, 1.0)
    share = delta.unsqueeze(-1) / size.masked_fill(size == 0, 1.0) / unit.square().sum(-1, keepdim=True).clamp(min=1.0)
    return (unit * share).to(dout.dtype)
