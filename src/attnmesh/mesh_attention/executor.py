"""Run a schedule, forward and backward: swap tokens for heads, gather queries and keys, attend, and all the way back.

One loop serves every exchange. Keys that arrive at once are one step, and keys that travel round a ring are several.
Heads travel all together or in groups. The next exchange is always under way while a kernel runs. So the code says when
an exchange begins and when it is awaited:

- A call begins an exchange, and returns the function that awaits it (`FinishTensors`).
- A generator yields once for each exchange of its own that is under way. `next` awaits it, and goes on to the next one.
- `del` frees tensors before the next ones arrive: without it a frame would hold both.

Queries travel along the keys axis, to the ranks that hold other keys for them; keys along the queries axis (see
`mesh/axes.py`). Tensors have the shapes of `HeadTensors`. Their tokens are a rank's own before a swap in and after a
swap out, those of its chunk between these, and gathered ones in a kernel.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from attnmesh.comm.p2p import Channel, Returned, put_back, select_tokens
from attnmesh.core.partial import Partial, identity, merge_into, merge_partials, sum_dtype, with_sinks
from attnmesh.kernels.driver import attend_visible, backward_visible
from attnmesh.kernels.rectangles import BackwardInputs, Gradients
from attnmesh.mesh.schedule import GatherStep, HeadGroup
from attnmesh.mesh_attention.head_swap import FinishSwap, HeadTensors, empty_tokens
from attnmesh.mesh_attention.task import Task, TaskStep
from attnmesh.runtime.memo import index_on
from attnmesh.runtime.ranges import ATTENTION_RANGE, MERGE_RANGE, is_profiled, profiled_as
from attnmesh.runtime.tensors import Tensors, empty_length_major, length_major

FinishTensors = Callable[[], Tensors]
"""Awaits an exchange under way, and returns what has arrived."""

Accumulate = Callable[[Returned, Tensors], None]
"""Adds or merges results for this rank's tokens into tensors of its chunk."""

EXHAUSTED = object()
"""Stands for the end of an iterator."""


@dataclass(frozen=True)
class GroupUnderWay:
    """One group of heads under way: tensors of gathered queries, and keys and values by step."""

    group: HeadGroup
    finish_queries: FinishTensors
    kv_by_step: Iterator[Tensors]


def run_task(q: Tensor, kv: Tensors, task: Task, sinks: Tensor | None, other_partial: Partial | None = None) -> Tensor:
    """Return the output of a task, merged with `other_partial`. It has no gradients."""
    partial = forward(q, kv, task, sinks)
    if other_partial is not None:
        partial = merge_partials([partial, other_partial])
    return length_major(partial.out, q.dtype)


def forward(
    q: Tensor, kv: Tensors, task: Task, sinks: Tensor | None = None, own_heads: HeadTensors | None = None
) -> Partial:
    """Return the partial of this rank's queries over all keys. It has the sinks, and its out is in q's dtype.

    `kv` are this rank's keys and values, or its latents. `own_heads`, if it is given, is memory for q, k and v of this
    rank's heads, which the backward pass takes.

        first group     swap in   gather    attend    return    swap out
        second group              swap in   gather    attend    return    swap out

    Memory for the results of all groups is taken at the first swap out. What a group gathered is freed before that.
    """

    def swap_in(group: HeadGroup) -> FinishSwap:
        into = None if own_heads is None else task.heads_of(group, own_heads)
        return task.along_heads.swap_in(HeadTensors((q,), kv), group, into)

    value_dim = kv[-1].shape[-1] if task.projection is None else task.projection.value_dim
    mesh, schedule = task.spec.mesh, task.schedule
    dtype = sum_dtype(q.dtype)
    total: Partial | None = None

    def swap_out(partial: Partial, group: HeadGroup) -> Iterator[None]:
        nonlocal total
        out, lse = with_sinks(partial, None if sinks is None else sinks[group[mesh.heads.index].q_heads])
        results = HeadTensors((out.to(q.dtype), lse))
        del partial, out, lse
        if total is None:
            total = Partial(empty_length_major(q, value_dim), q.new_empty(q.shape[:-1], dtype=dtype))
        yield from task.along_heads.swap_out(results, HeadTensors(total), group)

    pending = PendingReturns()
    for gathered in _gathered_groups(swap_in, task):
        own_partial = partial = _forward_heads(gathered, task)
        returning: Iterable[None] = ()
        some_see_no_key = len(schedule.query_step.keep) < schedule.chunk.queries
        if mesh.keys.size > 1 or some_see_no_key:  # else the partial is whole, and of this rank's queries alone
            batch, heads, _, width = partial.out.shape
            own_partial = identity(q.new_empty(batch, heads, schedule.chunk.queries, 0), width, dtype)
            returning = _return_results(partial, schedule.query_step, task.query_channel, _merge_returned, own_partial)
        # `swap_out` begins once `returning` has ended: until then parts from other ranks are merged into `own_partial`.
        pending.add(chain(returning, swap_out(own_partial, gathered.group)))
        del own_partial, partial, returning
    pending.finish()
    assert total is not None  # every schedule has a group
    return total


def _forward_heads(gathered: GroupUnderWay, task: Task) -> Partial:
    """Return the partial of one group of heads: of gathered queries over gathered keys."""
    (q,) = gathered.finish_queries()
    total: Partial | None = None
    attend = profiled_as(ATTENTION_RANGE, _attend_step) if is_profiled() else _attend_step
    merge = profiled_as(MERGE_RANGE, merge_into) if is_profiled() else merge_into
    for step in task.steps_of(gathered.group):
        kv = next(gathered.kv_by_step)
        out, lse = attend(task, step, q, kv)
        del kv  # otherwise it would live until the next keys have arrived
        partial = Partial(out.to(lse.dtype), lse)
        if total is None:
            total = partial
        else:
            merge(total, partial)
    assert total is not None  # every schedule has a step
    return total


def _attend_step(task: Task, step: TaskStep, q: Tensor, kv: Tensors) -> Partial:
    """Return the partial over keys and values, or over latents."""
    if task.projection is not None:
        return task.projection.attend(step.kernel, q, kv[0], step.visible_keys, task.spec.scaling, step.counts)
    return attend_visible(step.kernel, q, kv[0], kv[1], step.visible_keys, task.spec.scaling, step.counts)


def _return_results(
    results: Tensors, step: GatherStep, channel: Channel, accumulate: Accumulate, totals: Tensors
) -> Iterator[None]:
    """Return results to their owners. Results for this rank's tokens are combined into `totals` when they arrive."""
    finish = channel.begin_return(results, step)
    del results
    if channel.axis.size > 1:
        yield
    accumulate = profiled_as(MERGE_RANGE, accumulate) if is_profiled() else accumulate
    accumulate(finish(), totals)


def backward(own_heads: HeadTensors, inputs: BackwardInputs, task: Task) -> Gradients:
    """Return the gradients of this rank's q, k and v. `own_heads` are those of its chunk's tokens."""
    (q,), kv = own_heads
    schedule = task.schedule
    delta = (inputs.out.to(sum_dtype(q.dtype)) * inputs.dout).sum(-1)
    key_heads = task.groups[-1][-1].kv_heads.stop  # key heads of all ranks: the last group of the last rank ends there
    keys = len(schedule.key_indices[task.spec.mesh.heads.index])
    total: HeadTensors | None = None

    def swap_in(group: HeadGroup) -> FinishSwap:
        finish = task.along_heads.swap_in(HeadTensors((inputs.dout, inputs.lse, delta)), group)
        some_q, some_kv = task.heads_of(group, own_heads)
        return lambda: HeadTensors(some_q + finish().query_tensors, some_kv)

    def swap_out(own: Gradients, group: HeadGroup) -> Iterator[None]:
        nonlocal total
        gradients = HeadTensors((own.q.to(q.dtype),), (own.k.to(q.dtype), own.v.to(q.dtype)))
        del own
        if total is None:  # as in `forward`
            dq = empty_length_major(inputs.dout, q.shape[3])
            total = HeadTensors((dq,), tuple(empty_tokens(x, key_heads, keys) for x in kv))
        yield from task.along_heads.swap_out(gradients, total, group)

    pending = PendingReturns()
    for gathered in _gathered_groups(swap_in, task):
        heads = task.heads_of(gathered.group, own_heads)
        own = Gradients(*(torch.zeros_like(x, dtype=delta.dtype) for x in heads.query_tensors + heads.key_tensors))
        dq = _backward_heads(gathered, task, pending, (own.k, own.v))
        returning = _return_results((dq,), schedule.query_step, task.query_channel, _add_returned, (own.q,))
        pending.add(chain(returning, swap_out(own, gathered.group)))  # in this order, as in `forward`
        del dq, own, returning
    pending.finish()
    assert total is not None  # every schedule has a group
    return Gradients(*total.query_tensors, *total.key_tensors)


def _backward_heads(gathered: GroupUnderWay, task: Task, pending: "PendingReturns", own_kv: Tensors) -> Tensor:
    """Return dq of one group of heads: of gathered queries over gathered keys.

    dk and dv return to the owners of their keys, where they are added to `own_kv`. Gradients of keys that travel on
    travel with them, and each rank adds its part.
    """
    q, dout, lse, delta = gathered.finish_queries()
    inputs = BackwardInputs(_equivalent_out(dout, delta), lse, dout)
    dq: Tensor | None = None
    finish_earlier: FinishTensors | None = None  # gradients that earlier ranks computed for the keys of this step
    attend_backward = profiled_as(ATTENTION_RANGE, backward_visible) if is_profiled() else backward_visible
    for step in task.steps_of(gathered.group):
        keys, values = next(gathered.kv_by_step)
        part = attend_backward(step.kernel, q, keys, values, inputs, step.visible_keys, task.spec.scaling, step.counts)
        del keys, values  # otherwise they would live until the next keys have arrived
        dq = part.q.to(delta.dtype) if dq is None else dq.add_(part.q)
        kv_gradients = part.k.to(dq.dtype), part.v.to(dq.dtype)
        del part
        if finish_earlier is not None:
            _add(kv_gradients, finish_earlier())
        pending.add(_return_results(kv_gradients, step.gather, task.kv_channel, _add_returned, own_kv))
        finish_earlier = None if step.onward is None else task.kv_channel.begin_gather(kv_gradients, step.onward)
        del kv_gradients
    assert dq is not None  # every schedule has a step
    return dq


class PendingReturns:
    """Results on their way to their owners: each goes on by one exchange when further results set out.

    >>> def results(name):                                                 # by two exchanges, as with two axes
    ...     for number in (1, 2):
    ...         print(name, number)
    ...         yield
    >>> pending = PendingReturns()
    >>> pending.add(results("a"))
    a 1
    >>> pending.add(results("b"))
    a 2
    b 1
    >>> pending.finish()
    b 2
    """

    def __init__(self) -> None:
        self.under_way: list[Iterator[None]] = []

    def add(self, *returns: Iterator[None]) -> None:
        """Await exchanges under way, and begin the next ones. Those of `returns` begin last."""
        going_on = (*self.under_way, *returns)
        self.under_way = []
        for result in going_on:
            if next(result, EXHAUSTED) is not EXHAUSTED:  # its next exchange is under way
                self.under_way.append(result)

    def finish(self) -> None:
        """Wait until all results are with their owners."""
        while self.under_way:
            self.add()


def _gathered_groups(swap_in: Callable[[HeadGroup], FinishSwap], task: Task) -> Iterator[GroupUnderWay]:
    """Yield one group of heads after the other. Exchanges of the next groups begin before a group is attended.

    first group     swap in   gather    attend
    second group              swap in   gather    attend
    third group                         swap in   gather    attend
    """
    mesh = task.spec.mesh
    has_heads_axis, has_gather = mesh.heads.size > 1, mesh.queries.size * mesh.keys.size > 1

    def stages(group: HeadGroup) -> Iterator[GroupUnderWay | None]:
        finish_swap = swap_in(group)
        if has_heads_axis:
            yield None
        tensors = finish_swap()
        finish_queries = task.query_channel.begin_gather(tensors.query_tensors, task.schedule.query_step)
        kv_by_step = _kv_by_step(tensors.key_tensors, task)
        del finish_swap, tensors
        if has_gather:
            yield None
        yield GroupUnderWay(group, finish_queries, kv_by_step)

    exchanges = has_heads_axis + has_gather  # of a group, each of which waits for a round
    pending: deque[Iterator[GroupUnderWay | None]] = deque()  # newest first
    for group in (*task.groups, *[None] * exchanges):
        if group is not None:
            pending.appendleft(stages(group))
        *_, oldest = [next(group_stages) for group_stages in pending]  # the newest sends before an older one is awaited
        if oldest is not None:
            pending.pop()
            yield oldest


def _kv_by_step(kv: Tensors, task: Task) -> Iterator[Tensors]:
    """Return the keys and values by step. The first exchange begins at once, and each next one when a step arrives.

    A ring's first step is this rank's own keys, which arrive without an exchange. It is taken here, so that the
    exchange of the second step begins at once too.
    """
    steps, channel = task.schedule.key_steps, task.kv_channel
    first = channel.begin_gather(kv, steps[0])

    def arrivals() -> Iterator[Tensors]:
        finish = first
        for step in steps[1:]:
            arrived = finish()
            finish = channel.begin_gather(arrived, step)
            yield arrived
            del arrived
        yield finish()

    by_step = arrivals()
    return by_step if len(steps) == 1 else chain([next(by_step)], by_step)


def _merge_returned(parts: Returned, total: Tensors) -> None:
    """Merge partials of some of this rank's queries into `total`, the partial of all of them."""
    for indices, part in parts:
        merged = select_tokens(total, indices)
        merge_into(Partial(*merged), Partial(*part))
        put_back(merged, indices, total)


def _add_returned(parts: Returned, totals: Tensors) -> None:
    for indices, part in parts:
        for total, x in zip(totals, part, strict=True):
            total.index_add_(2, index_on(indices, x.device), x)


def _add(sums: Tensors, terms: Tensors) -> None:
    for total, term in zip(sums, terms, strict=True):
        total.add_(term)


def _equivalent_out(dout: Tensor, delta: Tensor) -> Tensor:
    """Return an `out` with `sum(out * dout) = delta`, which is all that a kernel's backward reads of it.

    So only delta is sent, one value per query of a head. The result is the projection of `out` on dout. It is no longer
    than `out`, so rounding it loses no more.
    """
    exact = dout.to(delta.dtype)
    size = exact.abs().amax(-1, keepdim=True)
    unit = exact / size.masked_fill(size == 0, 1.0)
    factor = delta.unsqueeze(-1) / size.masked_fill(size == 0, 1.0) / unit.square().sum(-1, keepdim=True).clamp(min=1.0)
    return (unit * factor).to(dout.dtype)
