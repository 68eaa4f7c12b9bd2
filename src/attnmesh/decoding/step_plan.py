"""Plans of steps, by kind: one launch on the cache, and one native merge across ranks."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from attnmesh.cache.cache_config import Sizes
from attnmesh.cache.replicas import CacheProperties
from attnmesh.comm.host_merge import HostMerge, host_merge_for
from attnmesh.comm.rank_merge import chosen_merge
from attnmesh.core.partial import Partial, with_sinks
from attnmesh.decoding.runs import Run, RunKernel, Visible, attend_runs, runs_of_shard, runs_of_view
from attnmesh.decoding.step import DecodeStep
from attnmesh.kernels.driver import choose_for_view
from attnmesh.kernels.stacked_merge import copy_into
from attnmesh.kernels.traced import are_plain
from attnmesh.runtime.caches import Kinds


class StepPlan(NamedTuple):
    """The kernel and the native merge of ranks, for a kind of steps on caches of one size."""

    kernel: RunKernel
    visible: Visible
    in_order: bool
    step: DecodeStep
    sizes: Sizes
    call: tuple[Any, ...]  # the kind of the call, of which its number is made
    host_merge: HostMerge | None  # None on one rank
    heads: slice | None  # of the output; None for all

    def attend(
        self,
        q: Tensor,
        caches: Sequence[CacheProperties],
        sinks: Tensor | None,
        counts: Sequence[tuple[int, int]],
        into: Partial,
    ) -> Partial:
        """Return the partial of the keys on this rank, written to `into`.

        One cache has the keys of all rows, or each row of q has a cache. `counts` are the tokens of all ranks and of
        this one, of each cache.
        """
        runs, alone = list[Run](), self.step.tokens.size == 1
        for row, (cache, some) in enumerate(zip(caches, counts, strict=True)):
            shard, sequence = cache.shards.own, row if len(caches) > 1 else None
            if self.in_order and shard.padding is None:
                runs += runs_of_shard(shard, some, self.step.mask, q.shape[2], alone, sequence)
            else:
                runs += runs_of_view(shard.view, self.visible, q, sequence)
        attend_runs(self.kernel, q, runs, into)
        if sinks is None or self.step.tokens.index > 0:  # the first rank adds them
            return into
        return copy_into(with_sinks(into, sinks), None if self.host_merge is None else into)


def find_plan(
    kinds: Kinds[StepPlan], q: Tensor, caches: Sequence[CacheProperties], sinks: Tensor | None, options: tuple[Any, ...]
) -> tuple[StepPlan, list[tuple[int, int]]] | None:
    """Return the plan of a step, if its cache has one, and the tokens of all ranks and this one in each cache."""
    if not kinds or not (are_plain(q) if sinks is None else are_plain(q, sinks)):
        return None
    plan, counts = kinds.find(_kind(q, len(caches), sinks, options)), []
    if plan is None:
        return None
    for cache in caches:
        shard, sizes = cache.shards.own, plan.sizes
        if sizes is not shard.sizes and (len(caches) == 1 or sizes.kind != shard.sizes.kind):
            return None
        length, used = shard.state.tolist()[:2]
        if not q.shape[2] <= length <= shard.sizes.capacity:
            return None
        if sizes.mask is not None and not cache.shards.serves(length - q.shape[2]):
            return None
        counts.append((length, used))
    return plan, counts


def learn_plan(
    kinds: Kinds[StepPlan],
    q: Tensor,
    caches: Sequence[CacheProperties],
    sinks: Tensor | None,
    options: tuple[Any, ...],
    step: DecodeStep,
    call: tuple[Any, ...],
) -> bool:
    """Make the plan of a step that was checked. Return False if no launch serves it."""
    shard, mask, logits, axis, rows = caches[0].shards.own, step.mask, step.logits, step.tokens, q.shape[2]
    sizes = shard.sizes
    if not (are_plain(q) if sinks is None else are_plain(q, sinks)):
        return False
    if step.reproducible or (rows > 1 and axis.size > 1):
        return False
    kernel = choose_for_view(step.kernel, q, shard.view, logits.capped)
    view, visible = shard.view, Visible(mask)
    run_kernel = RunKernel.of(kernel, q, (view.keys, view.values), logits, sizes.value_dim)
    if run_kernel.whole is None:
        return False
    host_merge = None
    if axis.size > 1:
        how = chosen_merge(axis, step.merge, step.output, q.device)
        host_merge = host_merge_for(axis, (*q.shape[:-1], sizes.value_dim), how)
        if host_merge is None:
            return False
    heads = None if host_merge is None else host_merge.heads(step.output)
    kinds.keep(
        _kind(q, len(caches), sinks, options),
        StepPlan(run_kernel, visible, visible.in_order(rows), step, sizes, call, host_merge, heads),
    )
    return True


def _kind(q: Tensor, caches: int, sinks: Tensor | None, options: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return all that the checks of a step depend on, but for its caches."""
    more = None if sinks is None else (sinks.shape, sinks.dtype, sinks.layout)
    return q.shape, caches, q.dtype, more, *options, *map(type, options)  # options of equal values may differ in type
