"""Prepared steps: what was checked and chosen for steps of one signature, and how they run.

A step attends this rank's keys, merges the partial with those of the other ranks, and makes the output of it. Steps
differ in how ranks merge, and so in how they find out whether their calls are equal:

    LoneStep        there are no other ranks
    HostMergedStep  ranks of one host merge natively, and compare their calls by that merge
    AgreedStep      all others: a `MergeAgreement` is around the merge

A known step runs `find_step`, `run` and `compute`, whose loops over caches are inlined for speed. A call of a function
takes about 0.05 us, and a step on a short cache about 15 us (by `timeit`). `tests/tools/test_walk.py` counts calls.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnmesh.cache.cache_config import CacheConfig
from attnmesh.comm.host_merge import HostMerge, host_merge_for
from attnmesh.comm.message import NO_MESSAGE, BlankMessage, blank_message
from attnmesh.comm.mismatch import call_checksum
from attnmesh.comm.rank_merge import RequestedMerge
from attnmesh.core.partial import Partial, sum_dtype, with_sinks
from attnmesh.decoding.step_agreement import agreement_on, ask_in_step, compared_fields, runs_on_device
from attnmesh.decoding.step_arguments import CheckedStep, Compared, StepInputs, gather_heads
from attnmesh.guard.agreement import is_capturing
from attnmesh.guard.merge_agreement import MergeDescription
from attnmesh.kernels.cache_runs import CachedAttention
from attnmesh.kernels.cache_view import LENGTH, CacheView, DecodeQuery
from attnmesh.kernels.traced import are_plain
from attnmesh.runtime.memo import Memo
from attnmesh.runtime.ranges import ATTENTION, MERGE, is_profiled, profiled_as

Verdict = bool | Tensor | None
"""The finding of a merge on the ranks' calls: whether they are equal, or a checksum. None without other ranks."""


@dataclass(eq=False)
class PreparedStep:
    """Steps of one signature on caches of one size: their options, the launches of a kernel, and what ranks compare."""

    step: CheckedStep
    attention: CachedAttention
    blank_message: Callable[[], BlankMessage] | None  # None where a kernel takes memory itself
    compared_facts: tuple[Any, ...]  # compared by their hash
    sizes: CacheConfig | None  # None in a graph, which has no caches
    output_heads: slice | None = None  # heads of the output in a merged partial; None for all

    is_alone: ClassVar[bool] = False

    def run(self, inputs: StepInputs, checked: bool | None) -> Tensor:
        """Return the output, or raise the same error on all ranks if their calls differ.

        Calls that differ and are not compared give NaN.
        """
        raise NotImplementedError

    def merge(self, partial: Partial, blank: BlankMessage, compared: Compared) -> tuple[Partial, Verdict]:
        """Return the partial of all ranks, and what the merge has found of their calls."""
        raise NotImplementedError

    def compute(self, inputs: StepInputs, views: Sequence[CacheView] | None = None) -> tuple[Tensor, Verdict]:
        """Return the output, and what `merge` has found of the calls. The output is NaN if the ranks' calls differ.

        `inputs` are of this step: `find_step` has found it for them, or they were checked and it was prepared for them.
        `views` are given in a graph, which has no caches. The CPU reads nothing of a device.
        """
        step = self.step
        if views is None:
            views = []
            for cache in inputs.caches:
                views.append(cache.shards.own.view)
        of_rank = inputs if step.head_axis.size == 1 else inputs.of_own_heads(step)
        q, _, sinks, key_lengths, selected, other_partial, _ = of_rank
        blank = NO_MESSAGE if self.blank_message is None else self.blank_message()
        # The first rank adds the sinks; a reproducible step adds them after the merge, on any number of ranks.
        added = sinks if step.token_axis.index == 0 and not step.reproducible else None
        block = step.block if step.reproducible else None
        lengths = None if key_lengths is None else key_lengths.to(q.device)
        query = DecodeQuery(
            q, step.mask, step.scaling, step.capacity, added, block, blank.partial, lengths, other_partial
        )
        attend = profiled_as(ATTENTION, self.attention.attend) if is_profiled() else self.attention.attend
        partial = attend(query, views, selected)
        verdict: Verdict = None
        if not self.is_alone:
            partial, verdict = self.merge(partial, blank, inputs.compared(self.compared_facts, views))
        out = self.finish(partial, query, sinks, views)
        if step.head_axis.size == 1:
            return out, verdict
        assert isinstance(verdict, Tensor)  # no other kind of step has a heads axis
        return gather_heads(out, verdict, step, inputs.q.shape[1])

    def finish(self, partial: Partial, query: DecodeQuery, sinks: Tensor | None, views: Sequence[CacheView]) -> Tensor:
        """Return the output of a merged partial. `sinks` are those of this rank's heads."""
        step = self.step
        out = partial.out if self.output_heads is None else partial.out[:, self.output_heads]
        if step.reproducible:
            if sinks is not None and step.output == "heads":
                sinks = sinks[step.token_axis.slice_of(len(sinks))]
            # Merging with an empty partial turns -0.0 into 0.0, and more ranks mean more empty partials.
            out = with_sinks(partial, sinks).out + 0.0
        out = out.to(query.q.dtype).contiguous()
        if query.key_lengths is not None:  # NaN where no such number of keys is cached
            wrong = (query.key_lengths < 0) | (query.key_lengths > views[0].device_counts[LENGTH])
            out = out.masked_fill(wrong[:, None, None, None], torch.nan)
        return out


class LoneStep(PreparedStep):
    """A step of a rank without others."""

    is_alone = True

    def run(self, inputs: StepInputs, checked: bool | None) -> Tensor:
        """Return the output."""
        return self.compute(inputs)[0]


@dataclass(eq=False, kw_only=True)
class HostMergedStep(PreparedStep):
    """A step of ranks that share a host, whose native library merges, and says whether their calls are equal."""

    host_merge: HostMerge

    def run(self, inputs: StepInputs, checked: bool | None) -> Tensor:
        """Return the output, or raise. An agreement takes longer to make than to merge: it is made to raise alone."""
        try:
            out, is_equal = self.compute(inputs)
        except Exception as error:
            agreement_on(inputs.caches, self.step, checked).raise_through_merge(error)
        if not is_equal and checked is not False:
            fields = functools.partial(compared_fields, inputs, self.step)
            agreement_on(inputs.caches, self.step, checked).raise_unequal(fields)
        return out

    def merge(self, partial: Partial, blank: BlankMessage, compared: Compared) -> tuple[Partial, bool]:
        """Return all ranks' partial, and whether their calls are equal. It is merged in its message."""
        tensors, call_hash, device_counts = compared
        assert blank.message is not None
        merge = profiled_as(MERGE, self.host_merge.run) if is_profiled() else self.host_merge.run
        is_equal = merge(blank.message, call_hash + device_counts.tolist()[LENGTH], tensors)
        if not is_equal:
            partial.out.fill_(torch.nan)
        return partial, is_equal


@dataclass(eq=False, kw_only=True)
class AgreedStep(PreparedStep):
    """A step with an agreement around its merge."""

    rank_merge: RequestedMerge
    stays_on_device: bool  # True where the CPU waits for nothing of a device

    def run(self, inputs: StepInputs, checked: bool | None) -> Tensor:
        """Return the output, or raise. NaN if this rank asked the others about a new call and not all ranks did."""
        q, step = inputs.q, self.step
        fields, ask = functools.partial(compared_fields, inputs, step), None
        if self.stays_on_device:
            ask = functools.partial(ask_in_step, step, q.new_empty(0), q.shape, step.value_dim)
        description = MergeDescription(self.compared_facts, fields, ask)
        agreement = agreement_on(inputs.caches, step, checked)
        if not agreement.compare_before_merge(description):
            return q.new_full(step.output_shape(q), torch.nan)
        try:
            out, checksum = self.compute(inputs)
        except Exception as error:
            agreement.raise_through_merge(error)
        assert isinstance(checksum, Tensor)
        agreement.check_merged(description, checksum)
        return out

    def merge(self, partial: Partial, blank: BlankMessage, compared: Compared) -> tuple[Partial, Tensor]:
        """Return all ranks' partial, and the checksum of their calls. Its sum is 0 if these are equal."""
        return self.rank_merge.run(partial, call_checksum(*compared, partial.lse, blank.checksum), blank.message)


def find_step(
    inputs: StepInputs, options: tuple[Any, ...], checked: object, prepared: Memo[PreparedStep]
) -> tuple[tuple[Any, ...] | None, PreparedStep | None]:
    """Return the signature of a call, and its step if prepared. All checks depend on the signature and the caches.

    `inputs` have one cache or more, all of one mesh and one device, and `options` are `StepOptions`: all else may be
    wrong. `prepared` is the memo that keeps prepared steps of such caches. The signature is None for calls that are
    checked each time.
    """
    q, caches, sinks, key_lengths, selected, other_partial, _ = inputs
    first = caches[0]
    if key_lengths is not None or selected is not None or other_partial is not None:
        return None, None
    on_gpu = first.device.type == "cuda"
    count = len(caches)
    if not (are_plain(q, on_gpu=on_gpu) if sinks is None else are_plain(q, sinks, on_gpu=on_gpu)):
        return None, None
    sinks_kind = None if sinks is None else (sinks.shape, sinks.dtype)
    # Options of equal values may differ in type.
    signature = q.shape, count, q.dtype, sinks_kind, checked, type(checked), *options, *map(type, options)
    try:
        prepared_step = prepared.get(signature)
    except TypeError:  # an option has no hash
        return None, None
    if prepared_step is None:
        return signature, None
    step = prepared_step.step
    sizes = prepared_step.sizes
    rows = q.shape[2]
    for cache in caches:
        shards, shard = cache.shards, cache.shards.own
        own_sizes = shard.sizes
        if sizes is not own_sizes and (count == 1 or sizes is None or sizes.common_sizes != own_sizes.common_sizes):
            return signature, None  # the step is of caches of other sizes
        if not own_sizes.capacity <= step.capacity:
            return signature, None  # its kernel is bound to fewer slots
        length = shards.known_length if on_gpu else shard.device_counts.tolist()[LENGTH]
        if not rows <= length <= own_sizes.capacity:
            return signature, None  # there are more queries than tokens, or an append was too long
        if own_sizes.mask is not None and not shards.serves(length - rows):
            return signature, None  # the queries see tokens that the cache has forgotten
        if own_sizes.hot is not None and is_capturing(shard.device):
            return signature, None  # no CUDA graph can hold a step over two tiers
        if step.reproducible:
            if shard.padding is not None or shards.rank_counts.start or shards.forked:
                return signature, None  # its tokens are no blocks of one tensor, in turn
            if own_sizes.block != step.block:
                return signature, None  # rows have blocks of several sizes
            if not shard.block_cyclic.is_even:
                return signature, None  # the blocks of a rank are no subtree of the tree
    return signature, prepared_step


def prepare_step(
    inputs: StepInputs, step: CheckedStep, signature: tuple[Any, ...] | None, prepared: Memo[PreparedStep]
) -> PreparedStep:
    """Return the prepared step of a call that was checked, which `prepared` keeps if its signature is known."""
    q, caches = inputs.q, inputs.caches
    first = caches[0]
    stays_on_device = runs_on_device(first, step)
    if step.reproducible:
        for cache in caches:
            if cache.shards.forked and stays_on_device:
                cache.shards.whole()  # the kernel merges the blocks of one tensor
    facts = inputs.compared_facts(step)
    prepared_step = new_prepared_step(q, first.shard.view, step, facts, first.sizes, stays_on_device=stays_on_device)
    if signature is not None and not step.mask.depends_on_length:
        prepared.keep(signature, prepared_step)
    return prepared_step


def new_prepared_step(
    q: Tensor,
    view: CacheView,
    step: CheckedStep,
    facts: tuple[Any, ...],
    sizes: CacheConfig | None = None,
    *,
    stays_on_device: bool = False,
) -> PreparedStep:
    """Return what steps with such queries run: the launches of a kernel, and the merge."""
    attention = step.attention_for(q, view)
    blank = None if attention.in_place_kernel is None else _blank_in_place(q, step)
    if step.token_axis.size == step.head_axis.size == 1:
        return LoneStep(step, attention, blank, facts, sizes)
    if blank is None and (host_merge := _host_merge_of(q, step)) is not None:
        heads = host_merge.heads_of_output(step.output)
        return HostMergedStep(step, attention, host_merge.blank_message, facts, sizes, heads, host_merge=host_merge)
    return AgreedStep(step, attention, blank, facts, sizes, rank_merge=step.rank_merge, stays_on_device=stays_on_device)


def _host_merge_of(q: Tensor, step: CheckedStep) -> HostMerge | None:
    """Return the native merge of such steps; None unless all ranks share a host whose native library merges them."""
    axis = step.token_axis
    may_merge_natively = axis.size > 1 and step.head_axis.size == 1 and q.device.type == "cpu" and not step.reproducible
    if not may_merge_natively or sum_dtype(q.dtype) != torch.float32:
        return None
    return host_merge_for(axis, (*q.shape[:-1], step.value_dim), step.rank_merge.choose(q.device))


def _blank_in_place(q: Tensor, step: CheckedStep) -> Callable[[], BlankMessage] | None:
    """Return what takes memory for a kernel that reads the cache, in a message if others merge with this rank.

    One rank has the partial alone; a reproducible one merges into new memory.
    """
    heads = step.head_axis.slice_of(q.shape[1])
    shape = q.shape[0], heads.stop - heads.start, q.shape[2], step.value_dim
    dtype = sum_dtype(q.dtype)
    if step.token_axis.size > 1:
        return functools.partial(blank_message, shape, dtype, q.device)
    return None if step.reproducible else functools.partial(_blank_partial, shape, q.dtype, dtype, q.device)


def _blank_partial(
    shape: Sequence[int], dtype: torch.dtype, lse_dtype: torch.dtype, device: torch.device
) -> BlankMessage:
    out, lse = torch.empty(shape, dtype=dtype, device=device), torch.empty(shape[:-1], dtype=lse_dtype, device=device)
    return BlankMessage(None, None, Partial(out, lse))
