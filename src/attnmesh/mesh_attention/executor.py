"""Run a schedule, forward and backward: swap tokens for heads, gather queries and keys, attend, and all the way back.

One loop serves every exchange. Keys that arrive at once are one step, and keys that travel round a ring are several.
Heads travel all together or in groups. The next exchange is always under way while a kernel runs. So the code says when
an exchange begins and when it is awaited:

- A call begins an exchange, and returns the function that awaits it (`FinishTensors`).
- A generator yields once for each exchange of its own that is under way. `next` awaits it, and goes on to the next one.
- `del` frees tensors before the next ones arrive: without it a frame would hold both.

Queries travel along the keys axis, to the ranks that hold other keys for them; keys along the queries axis (see
`mesh/axes.py`).
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from attnmesh.comm.p2p import begin_all_to_all, begin_gather, begin_return, is_run, meta_like, taken
from attnmesh.core.band import Band
from attnmesh.core.partial import Partial, identity, merge_into, sum_dtype, with_sinks
from attnmesh.core.scaling import Scaling
from attnmesh.kernels.driver import KeyCounts, attend_band, backward_band
from attnmesh.kernels.kernel import Kernel
from attnmesh.kernels.rectangles import BackwardInputs, Gradients
from attnmesh.kernels.selected_keys import SelectedKeys
from attnmesh.mesh.axes import Axis, Mesh
from attnmesh.mesh.schedule import GatherStep, HeadGroup, HeadSlices, Schedule
from attnmesh.mesh_attention.latents import Projection
from attnmesh.runtime.memo import on_device
from attnmesh.runtime.ranges import ATTENTION, MERGE, is_profiled, profiled_as
from attnmesh.runtime.tensors import Tensors, empty_length_major

Returned = list[tuple[Tensor, Tensors]]
"""Results for this rank's tokens: the indices of some tokens, and the results for them."""

FinishTensors = Callable[[], Tensors]
"""Awaits an exchange under way, and returns what has arrived."""

Accumulate = Callable[[Returned, Tensors], None]
"""Adds or merges results for this rank's tokens into tensors of its chunk."""

DONE = object()
"""Stands for the end of an iterator."""


@dataclass(frozen=True)
class Task:
    """This rank's schedule, with the mesh, the kernel of each step and the scaling to run it."""

    mesh: Mesh
    schedule: Schedule
    groups: Sequence[HeadGroup]
    kernels: Sequence[Kernel]
    scaling: Scaling
    counts: Sequence[KeyCounts]  # real keys of each sequence, by step
    projection: Projection | None = None
    """Projection of latents, where these travel instead of keys and values."""
    selected: Sequence[SelectedKeys] = ()
    """Selected keys of each step, where queries do not attend to all that they see."""

    @functools.cached_property
    def one_at_a_time(self) -> bool:
        """True if heads go in one group. Then no two exchanges along an axis are under way at once, but a ring's."""
        return len(self.groups) == 1

    @functools.cached_property
    def head_all_to_all(self) -> "HeadAllToAll":
        """Exchange of tokens for heads, and back."""
        return HeadAllToAll(self.mesh.heads, self.schedule, self.one_at_a_time)

    def bands(self, group: HeadGroup) -> Sequence[Band | SelectedKeys]:
        """Return the keys that gathered queries attend in each step. They are of a group of heads."""
        if not self.selected:
            return self.schedule.bands
        heads = group[self.mesh.heads.index].kv_heads
        return [keys.of_heads(heads) for keys in self.selected]

    def attend(self, kernel: Kernel, q: Tensor, kv: Tensors, band: Band | SelectedKeys, counts: KeyCounts) -> Partial:
        """Return the partial over keys and values, or over latents."""
        if self.projection is not None:
            return self.projection.attend(kernel, q, kv[0], band, self.scaling, counts)
        return attend_band(kernel, q, kv[0], kv[1], band, self.scaling, counts)

    def heads_of(self, group: HeadGroup, saved_qkv: Tensors) -> Tensors:
        """Return a group's heads of q, k and v, as views. `saved_qkv` has this rank's heads of all groups."""
        first, heads = self.groups[0][self.mesh.heads.index], group[self.mesh.heads.index]
        within = (slice(x.start - y.start, x.stop - y.start) for x, y in zip(heads, first, strict=True))
        return some_heads(saved_qkv, 1, HeadSlices(*within))


@dataclass(frozen=True)
class GatheredGroup:
    """One group of heads under way: tensors of gathered queries, and keys and values by step."""

    group: HeadGroup
    finish_queries: FinishTensors
    kv_by_step: Iterator[Tensors]


def forward(q: Tensor, kv: Tensors, task: Task, sinks: Tensor | None = None, saved_qkv: Tensors = ()) -> Partial:
    """Return the partial of this rank's queries over all keys. It has the sinks, and its out is in q's dtype.

    `kv` are this rank's keys and values, or its latents. `saved_qkv`, if it is given, is memory for q, k and v of this
    rank's heads, which the backward pass takes.

        first group     swap in   gather    attend    return    swap out
        second group              swap in   gather    attend    return    swap out

    Memory for the results of all groups is taken at the first swap out. What a group gathered is freed before that.
    """

    def swap_in(group: HeadGroup) -> FinishTensors:
        into = task.heads_of(group, saved_qkv) if saved_qkv else ()
        return task.head_all_to_all.swap_in((q, *kv), group, into, query_tensors=1)

    value_dim = kv[-1].shape[-1] if task.projection is None else task.projection.value_dim
    schedule = task.schedule
    dtype = sum_dtype(q.dtype)
    total: Partial | None = None

    def swap_out(partial: Partial, group: HeadGroup) -> Iterator[None]:
        nonlocal total
        out, lse = with_sinks(partial, None if sinks is None else sinks[group[task.mesh.heads.index].q_heads])
        results = out.to(q.dtype), lse
        del partial, out, lse
        if total is None:
            total = Partial(empty_length_major(q, value_dim), q.new_empty(q.shape[:-1], dtype=dtype))
        yield from task.head_all_to_all.swap_out(results, total, group, query_tensors=2)

    pending = PendingReturns()
    for gathered in _gathered_groups(swap_in, task):
        own_partial = partial = _attend_heads(gathered, task)
        returning: Iterable[None] = ()
        some_see_no_key = len(schedule.query_step.keep) < schedule.chunk.queries
        if task.mesh.keys.size > 1 or some_see_no_key:  # else the partial is whole, and of this rank's queries alone
            batch, heads, _, width = partial.out.shape
            own_partial = identity(q.new_empty(batch, heads, schedule.chunk.queries, 0), width, dtype)
            returning = _return_results(
                partial, schedule.query_step, task.mesh.keys, _merge_returned, own_partial, task.one_at_a_time
            )
        # `swap_out` begins once `returning` has ended: until then parts from other ranks are merged into `own_partial`.
        pending.add(chain(returning, swap_out(own_partial, gathered.group)))
        del own_partial, partial, returning
    pending.finish()
    assert total is not None  # every schedule has a group
    return total


def _attend_heads(gathered: GatheredGroup, task: Task) -> Partial:
    """Return the partial of gathered queries over gathered keys. It is of one group of heads."""
    (q,) = gathered.finish_queries()
    total: Partial | None = None
    attend = profiled_as(ATTENTION, task.attend) if is_profiled() else task.attend
    merge = profiled_as(MERGE, merge_into) if is_profiled() else merge_into
    for kernel, band, counts in zip(task.kernels, task.bands(gathered.group), task.counts, strict=True):
        kv = next(gathered.kv_by_step)
        out, lse = attend(kernel, q, kv, band, counts)
        del kv  # else it would live until the next keys have arrived
        partial = Partial(out.to(lse.dtype), lse)
        if total is None:
            total = partial
        else:
            merge(total, partial)
    assert total is not None  # every schedule has a step
    return total


def _return_results(
    results: Tensors, step: GatherStep, axis: Axis, accumulate: Accumulate, totals: Tensors, one_at_a_time: bool
) -> Iterator[None]:
    """Return results to their owners. Results for this rank's tokens are combined into `totals` when they arrive."""
    finish = begin_return(results, step, axis, one_at_a_time=one_at_a_time)
    del results
    if axis.size > 1:
        yield
    accumulate = profiled_as(MERGE, accumulate) if is_profiled() else accumulate
    accumulate(finish(), totals)


def backward(saved_qkv: Tensors, saved: BackwardInputs, task: Task) -> Gradients:
    """Return the gradients of this rank's q, k and v. `saved_qkv` has its heads of them, of all tokens of its chunk."""
    q, *kv = saved_qkv
    schedule = task.schedule
    delta = (saved.out.to(sum_dtype(q.dtype)) * saved.dout).sum(-1)
    key_heads = task.groups[-1][-1].kv_heads.stop  # key heads of all ranks: the last group of the last rank ends there
    keys = len(schedule.key_indices[task.mesh.heads.index])
    total: Gradients | None = None

    def swap_in(group: HeadGroup) -> FinishTensors:
        finish = task.head_all_to_all.swap_in((saved.dout, saved.lse, delta), group, query_tensors=3)
        some_q, *some_kv = task.heads_of(group, saved_qkv)
        return lambda: (some_q, *finish(), *some_kv)

    def swap_out(own: Gradients, group: HeadGroup) -> Iterator[None]:
        nonlocal total
        gradients = tuple(x.to(q.dtype) for x in own)
        del own
        if total is None:  # as in `forward`
            dq = empty_length_major(saved.dout, q.shape[3])
            total = Gradients(dq, *(empty_tokens(x, key_heads, keys) for x in kv))
        yield from task.head_all_to_all.swap_out(gradients, total, group, query_tensors=1)

    pending = PendingReturns()
    for gathered in _gathered_groups(swap_in, task):
        own = Gradients(*(torch.zeros_like(x, dtype=delta.dtype) for x in task.heads_of(gathered.group, saved_qkv)))
        dq = _backward_heads(gathered, task, pending, own[1:])
        returning = _return_results(
            (dq,), schedule.query_step, task.mesh.keys, _add_returned, own[:1], task.one_at_a_time
        )
        pending.add(chain(returning, swap_out(own, gathered.group)))  # in this order, as in `forward`
        del dq, own, returning
    pending.finish()
    assert total is not None  # every schedule has a group
    return total


def _backward_heads(gathered: GatheredGroup, task: Task, pending: "PendingReturns", own_kv: Tensors) -> Tensor:
    """Return dq of gathered queries over gathered keys. It is of one group of heads.

    dk and dv return to the owners of their keys, where they are added to `own_kv`. Gradients of keys that travel on
    travel with them, and each rank adds its part.
    """
    q, dout, lse, delta = gathered.finish_queries()
    saved = BackwardInputs(_equivalent_out(dout, delta), lse, dout)
    dq: Tensor | None = None
    finish_earlier: FinishTensors | None = None  # gradients that earlier ranks computed for the keys of this step
    schedule = task.schedule
    bands = task.bands(gathered.group)
    attend_backward = profiled_as(ATTENTION, backward_band) if is_profiled() else backward_band
    steps = zip(task.kernels, bands, task.counts, schedule.key_steps, schedule.gradient_steps, strict=True)
    for kernel, band, counts, step, onward in steps:
        keys, values = next(gathered.kv_by_step)
        part = attend_backward(kernel, q, keys, values, saved, band, task.scaling, counts)
        del keys, values  # else they would live until the next keys have arrived
        dq = part.q.to(delta.dtype) if dq is None else dq.add_(part.q)
        kv_gradients = part.k.to(dq.dtype), part.v.to(dq.dtype)
        del part
        if finish_earlier is not None:
            _add(kv_gradients, finish_earlier())
        pending.add(_return_results(kv_gradients, step, task.mesh.queries, _add_returned, own_kv, task.one_at_a_time))
        finish_earlier = None if onward is None else begin_gather(kv_gradients, onward, task.mesh.queries)
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
            if next(result, DONE) is not DONE:  # its next exchange is under way
                self.under_way.append(result)

    def finish(self) -> None:
        """Wait until all results are with their owners."""
        while self.under_way:
            self.add()


def _gathered_groups(swap_in: Callable[[HeadGroup], FinishTensors], task: Task) -> Iterator[GatheredGroup]:
    """Yield one group of heads after the other. Exchanges of the next groups begin before a group is attended.

    first group     swap in   gather    attend
    second group              swap in   gather    attend
    third group                         swap in   gather    attend
    """
    has_heads_axis, has_gather = task.mesh.heads.size > 1, task.mesh.queries.size * task.mesh.keys.size > 1

    def stages(group: HeadGroup) -> Iterator[GatheredGroup | None]:
        finish_swap = swap_in(group)
        if has_heads_axis:
            yield None
        tensors = finish_swap()
        query_tensors = len(tensors) - (2 if task.projection is None else 1)
        finish_queries = begin_gather(
            tensors[:query_tensors], task.schedule.query_step, task.mesh.keys, one_at_a_time=task.one_at_a_time
        )
        kv_by_step = _kv_by_step(tensors[query_tensors:], task)
        del finish_swap, tensors
        if has_gather:
            yield None
        yield GatheredGroup(group, finish_queries, kv_by_step)

    under_way: list[Iterator[GatheredGroup | None]] = []
    for group in (*task.groups, *[None] * (has_heads_axis + has_gather)):  # None: all have begun
        if group is not None:
            under_way.append(stages(group))
        gathered = None
        for stage in reversed(under_way):  # the newest begins before others are awaited; the oldest arrives
            gathered = next(stage)
        if gathered is not None:
            del under_way[0]
            yield gathered


def _kv_by_step(kv: Tensors, task: Task) -> Iterator[Tensors]:
    """Return the keys and values by step. The first exchange begins at once, and each next one when a step arrives.

    A ring's first step is this rank's own keys, which arrive without an exchange. It is taken here, so that the
    exchange of the second step begins at once too.
    """
    steps, axis = task.schedule.key_steps, task.mesh.queries
    first = begin_gather(kv, steps[0], axis, one_at_a_time=task.one_at_a_time)

    def arrivals() -> Iterator[Tensors]:
        finish = first
        for step in steps[1:]:
            arrived = finish()
            finish = begin_gather(arrived, step, axis)
            yield arrived
            del arrived
        yield finish()

    by_step = arrivals()
    return by_step if len(steps) == 1 else chain([next(by_step)], by_step)


def _merge_returned(parts: Returned, total: Tensors) -> None:
    """Merge partials of some queries into the partial of all. All are this rank's."""
    for tokens, part in parts:
        merged = taken(total, tokens)
        merge_into(Partial(*merged), Partial(*part))
        if is_run(tokens):
            continue  # they were taken as views
        for into, x in zip(total, merged, strict=True):
            into.index_copy_(2, on_device(tokens, x.device), x)


def _add_returned(parts: Returned, totals: Tensors) -> None:
    for tokens, part in parts:
        for total, x in zip(totals, part, strict=True):
            total.index_add_(2, on_device(tokens, x.device), x)


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


# --- the heads axis ---


def some_heads(tensors: Tensors, query_tensors: int, heads: HeadSlices) -> Tensors:
    """Return some of the heads, as views where these are not all. The first `query_tensors` have query heads."""
    views = []
    for index, x in enumerate(tensors):
        head_slice = heads.q_heads if index < query_tensors else heads.kv_heads
        views.append(x if head_slice.stop - head_slice.start >= x.shape[1] else x[:, head_slice])
    return tuple(views)


@dataclass(frozen=True)
class HeadAllToAll:
    """All-to-alls along the heads axis. With `one_at_a_time` no other exchange along it begins before one has ended."""

    axis: Axis
    schedule: Schedule
    one_at_a_time: bool

    def swap_in(self, tensors: Tensors, group: HeadGroup, into: Tensors = (), *, query_tensors: int) -> FinishTensors:
        """Begin to swap tokens for this rank's heads of a group. The result is in `into`, or else in new memory.

        The first `query_tensors` have query heads.
        """
        views = some_heads(tensors, query_tensors, group[self.axis.index])
        if self.axis.size == 1:
            return lambda: views
        key_tensors = len(tensors) - query_tensors
        indices = [self.schedule.query_indices] * query_tensors + [self.schedule.key_indices] * key_tensors
        shapes = [tuple(map(meta_like, views, map(len, slices))) for slices in zip(*indices, strict=True)]
        parts = [some_heads(tensors, query_tensors, heads) for heads in group]
        finish = begin_all_to_all(parts, shapes, self.axis, one_at_a_time=self.one_at_a_time)

        def finished() -> Tensors:
            chunk = into or tuple(
                empty_tokens(x, x.shape[1], sum(map(len, slices))) for x, slices in zip(views, indices, strict=True)
            )
            for rank, pieces in enumerate(finish()):
                for x, slices, piece in zip(chunk, indices, pieces, strict=True):
                    x.index_copy_(2, on_device(slices[rank], x.device), piece)
            return chunk

        return finished

    def swap_out(self, computed: Tensors, results: Tensors, group: HeadGroup, *, query_tensors: int) -> Iterator[None]:
        """Swap heads for tokens. Results for this rank's tokens are put in place.

        It yields while the exchange is under way.
        """
        views = [some_heads(results, query_tensors, heads) for heads in group]  # one tuple for each rank
        arrived = [computed]
        if self.axis.size > 1:
            parts = []
            for q_tokens, k_tokens in zip(self.schedule.query_indices, self.schedule.key_indices, strict=True):
                keys = taken(computed[query_tensors:], k_tokens) if len(computed) > query_tensors else ()
                parts.append(taken(computed[:query_tensors], q_tokens) + keys)
            finish = begin_all_to_all(parts, views, self.axis, one_at_a_time=self.one_at_a_time)
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
