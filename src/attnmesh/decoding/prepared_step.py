"""Prepared steps: what was checked and chosen for steps of one signature, and how they run.

A step attends this rank's keys, merges the partial with those of the other ranks, and returns the output. Steps differ
in how ranks merge, and so in how they find out whether their calls are equal:

    LoneStep        there are no other ranks
    HostMergedStep  ranks of one host merge natively, and compare their calls by that merge
    AgreedStep      all others: a `MergeAgreement` is around the merge

`known_steps.py` finds the prepared step of a call.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial as partial_of
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnmesh.cache.cache_config import CacheConfig
from attnmesh.cache.call_checks import needs_cpu
from attnmesh.comm.host_merge import HostMerge, agreed_host_merge
from attnmesh.comm.message import NO_MESSAGE, BlankMessage, blank_message
from attnmesh.comm.mismatch import call_checksum, call_digest
from attnmesh.comm.rank_merge import RequestedMerge
from attnmesh.core.partial import Partial, sum_dtype, with_sinks
from attnmesh.decoding.step_agreement import ask_in_step, fields_of_step, gather_heads, merge_agreement_for
from attnmesh.decoding.step_arguments import PartsToCompare, StepInputs, StepSpec
from attnmesh.guard.merge_agreement import MergeDescription
from attnmesh.kernels.cache_runs import CachedAttention
from attnmesh.kernels.cache_view import LENGTH, CacheView, DecodeQuery
from attnmesh.runtime.ranges import ATTENTION, MERGE, is_profiled, profiled_as

Verdict = bool | Tensor | None
"""Result of the comparison of calls in a merge: if equal, True or a checksum whose sum is 0. None on one rank."""


@dataclass(eq=False)
class PreparedStep:
    """Steps of one signature on caches of one size: their options, the launches of a kernel, and what ranks compare."""

    spec: StepSpec
    attention: CachedAttention
    blank_message: Callable[[], BlankMessage] | None
    """Returns memory that the kernel writes its partial into; None where the kernel allocates its own."""
    facts: tuple[Any, ...]
    """Options, dtypes and shapes of the call. Ranks compare their hash."""
    config: CacheConfig | None
    """None in a graph, which has no caches."""
    refuses_graphs: bool
    """True where the CPU reads what is on the device, which no CUDA graph can hold."""
    output_heads: slice | None = None
    """Heads of the output in a merged partial; None for all."""

    is_alone: ClassVar[bool] = False

    def run(self, inputs: StepInputs, checked: bool | None) -> Tensor:
        """Return the output, or raise the same error on all ranks if their calls differ.

        Calls that differ and are not compared give NaN.
        """
        raise NotImplementedError

    def merge(self, partial: Partial, blank: BlankMessage, parts: PartsToCompare) -> tuple[Partial, Verdict]:
        """Return the partial of all ranks, and the verdict on their calls."""
        raise NotImplementedError

    def compute(self, inputs: StepInputs, views: Sequence[CacheView] | None = None) -> tuple[Tensor, Verdict]:
        """Return the output, and the verdict of `merge`. The output is NaN if the ranks' calls differ.

        Call with `inputs` for which `find_step` has found this step, or for which it was prepared after their checks.
        `views` are given in a graph, which has no caches. The CPU reads nothing of a device.
        """
        spec = self.spec
        if views is None:
            views = []
            for cache in inputs.caches:
                views.append(cache.local_shards.own.view)
        of_rank = inputs if spec.heads_axis.size == 1 else inputs.of_own_heads(spec)
        q, _, sinks, key_lengths, selected, other_partial, _ = of_rank  # as in `find_step`
        blank = NO_MESSAGE if self.blank_message is None else self.blank_message()
        # The first rank adds the sinks; a reproducible step adds them after the merge, on any number of ranks.
        added = sinks if spec.token_axis.index == 0 and not spec.reproducible else None
        block = spec.block if spec.reproducible else None
        lengths = None if key_lengths is None else key_lengths.to(q.device)
        query = DecodeQuery(
            q, spec.mask, spec.scaling, spec.capacity, added, block, blank.partial, lengths, other_partial
        )
        attend = profiled_as(ATTENTION, self.attention.attend) if is_profiled() else self.attention.attend
        partial = attend(query, views, selected)
        verdict: Verdict = None
        if not self.is_alone:
            partial, verdict = self.merge(partial, blank, inputs.parts_to_compare(self.facts, views))
        out = partial.out if self.output_heads is None else partial.out[:, self.output_heads]
        if spec.reproducible:
            if sinks is not None and spec.output == "heads":
                sinks = sinks[spec.token_axis.slice_of(len(sinks))]
            # Merging with an empty partial turns -0.0 into 0.0, and more ranks mean more empty partials.
            out = with_sinks(partial, sinks).out + 0.0
        out = out.to(q.dtype).contiguous()
        if lengths is not None:  # NaN for lengths that the cache does not have
            wrong = (lengths < 0) | (lengths > views[0].device_counts[LENGTH])
            out = out.masked_fill(wrong[:, None, None, None], torch.nan)
        if spec.heads_axis.size > 1:
            assert isinstance(verdict, Tensor)  # ranks along a heads axis merge in a `TransportMergedStep`
            out, verdict = gather_heads(out, verdict, spec, inputs.q.shape[1])
        return out, verdict


class LoneStep(PreparedStep):
    """A step of a rank without others."""

    is_alone = True

    def run(self, inputs: StepInputs, checked: bool | None) -> Tensor:
        """Return the output. There is nothing to compare."""
        return self.compute(inputs)[0]


@dataclass(eq=False, kw_only=True)
class HostMergedStep(PreparedStep):
    """A step of ranks that share a host, whose native library merges, and says whether their calls are equal."""

    host_merge: HostMerge

    def run(self, inputs: StepInputs, checked: bool | None) -> Tensor:
        """Return the output, or raise. An agreement is made only to raise: it takes longer than the merge."""
        try:
            out, is_equal = self.compute(inputs)
        except Exception as error:
            merge_agreement_for(inputs.caches, self.spec, checked).raise_through_merge(error)
        if not is_equal and checked is not False:
            fields = partial_of(fields_of_step, inputs, self.spec)
            merge_agreement_for(inputs.caches, self.spec, checked).raise_unequal(fields)
        return out

    def merge(self, partial: Partial, blank: BlankMessage, parts: PartsToCompare) -> tuple[Partial, bool]:
        """Merge all ranks' partials into this rank's, inside its message. Return it, and whether calls are equal."""
        assert blank.message is not None
        merge = profiled_as(MERGE, self.host_merge.run) if is_profiled() else self.host_merge.run
        is_equal = merge(blank.message, call_digest(*parts))
        if not is_equal:
            partial.out.fill_(torch.nan)
        return partial, is_equal


@dataclass(eq=False, kw_only=True)
class TransportMergedStep(PreparedStep):
    """A step with an agreement around its merge."""

    rank_merge: RequestedMerge
    is_asynchronous: bool
    """True where the CPU waits for nothing of a device."""

    def run(self, inputs: StepInputs, checked: bool | None) -> Tensor:
        """Return the output, or raise. It is NaN if this rank asked the others about a new call, and not all asked."""
        q, spec = inputs.q, self.spec
        fields, ask = partial_of(fields_of_step, inputs, spec), None
        if self.is_asynchronous:
            ask = partial_of(ask_in_step, spec, q.new_empty(0), q.shape, spec.value_dim)
        description = MergeDescription(self.facts, fields, ask)
        agreement = merge_agreement_for(inputs.caches, spec, checked)
        if not agreement.compare_before_merge(description):
            return q.new_full(spec.output_shape(q), torch.nan)
        try:
            out, checksum = self.compute(inputs)
        except Exception as error:
            agreement.raise_through_merge(error)
        assert isinstance(checksum, Tensor)
        agreement.check_merged(description, checksum)
        return out

    def merge(self, partial: Partial, blank: BlankMessage, parts: PartsToCompare) -> tuple[Partial, Tensor]:
        """Return all ranks' partial, and the checksum of their calls. Its sum is 0 if these are equal."""
        return self.rank_merge.run(partial, call_checksum(*parts, partial.lse, blank.checksum), blank.message)


def new_prepared_step(
    q: Tensor,
    view: CacheView,
    spec: StepSpec,
    facts: tuple[Any, ...],
    config: CacheConfig | None = None,
    *,
    is_asynchronous: bool = False,
) -> PreparedStep:
    """Return the prepared step of queries like `q`: the launches of a kernel, and the merge."""
    attention = spec.attention_for(q, view)
    blank = None if attention.in_place_kernel is None else _blank_in_place(q, spec)
    refuses_graphs = attention.in_place_kernel is None or (config is not None and needs_cpu(config, q.shape[2]))
    if spec.token_axis.size == spec.heads_axis.size == 1:
        return LoneStep(spec, attention, blank, facts=facts, config=config, refuses_graphs=refuses_graphs)
    if blank is None and (host_merge := _host_merge_of(q, spec)) is not None:
        return HostMergedStep(
            spec,
            attention,
            host_merge.blank_message,
            facts=facts,
            config=config,
            refuses_graphs=refuses_graphs,
            output_heads=host_merge.heads_of_output(spec.output),
            host_merge=host_merge,
        )
    return TransportMergedStep(
        spec,
        attention,
        blank,
        facts=facts,
        config=config,
        refuses_graphs=refuses_graphs,
        rank_merge=spec.rank_merge,
        is_asynchronous=is_asynchronous,
    )


def _host_merge_of(q: Tensor, spec: StepSpec) -> HostMerge | None:
    """Return the native merge of queries like `q`; None unless all ranks share a host with the native library."""
    axis = spec.token_axis
    may_merge_natively = (
        axis.size > 1 and spec.heads_axis.size == 1 and q.device.type == "cpu" and not spec.reproducible
    )
    if not may_merge_natively or sum_dtype(q.dtype) != torch.float32:
        return None
    return agreed_host_merge(axis, (*q.shape[:-1], spec.value_dim), spec.rank_merge.agreed_merge(q.device))


def _blank_in_place(q: Tensor, spec: StepSpec) -> Callable[[], BlankMessage] | None:
    """Return a function that takes memory for the partial of a kernel that reads the cache.

    The memory is in a message if other ranks merge with this one. A rank alone takes the partial without a message, or
    nothing for a reproducible step, which merges blocks into new memory.
    """
    heads = spec.heads_axis.slice_of(q.shape[1])
    shape = q.shape[0], heads.stop - heads.start, q.shape[2], spec.value_dim
    dtype = sum_dtype(q.dtype)
    if spec.token_axis.size > 1:
        return partial_of(blank_message, shape, dtype, q.device)
    return None if spec.reproducible else partial_of(_blank_partial, shape, q.dtype, dtype, q.device)


def _blank_partial(
    shape: Sequence[int], dtype: torch.dtype, lse_dtype: torch.dtype, device: torch.device
) -> BlankMessage:
    out, lse = torch.empty(shape, dtype=dtype, device=device), torch.empty(shape[:-1], dtype=lse_dtype, device=device)
    return BlankMessage(None, None, Partial(out, lse))
