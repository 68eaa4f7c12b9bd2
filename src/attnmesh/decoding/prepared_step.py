"""Prepared steps: what was checked and chosen for steps of one signature, and how they run.

A step has three parts: `attend` this rank's keys, `merge` the partial with those of the other ranks, and `finish` the
output. `run` takes them in order, and `step_op.py` does in a graph. Steps differ in how ranks merge, and so in how they
find out whether their calls are equal:

    LoneStep             there are no other ranks
    HostMergedStep       ranks of one host merge natively, and compare their calls by that merge
    TransportMergedStep  all others: a `MergeAgreement` is around the merge

`known_steps.py` finds the prepared step of a call.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial as partial_of
from typing import Any

import torch
from torch import Tensor

from attnmesh.cache.cache_config import CacheConfig
from attnmesh.cache.call_checks import needs_cpu
from attnmesh.comm.host_merge import HostMerge, agreed_host_merge
from attnmesh.comm.message import NO_MESSAGE, BlankMessage, blank_message
from attnmesh.comm.mismatch import call_checksum
from attnmesh.comm.rank_merge import RequestedMerge
from attnmesh.core.partial import Partial, sum_dtype, with_sinks
from attnmesh.core.scaling import Scaling
from attnmesh.decoding.step_agreement import ask_in_step, fields_of_step, gather_heads, merge_agreement_for
from attnmesh.decoding.step_arguments import StepInputs, StepSpec
from attnmesh.guard.merge_agreement import MergeDescription
from attnmesh.kernels.cache_runs import CachedAttention
from attnmesh.kernels.cache_view import LENGTH, CacheView, DecodeQuery
from attnmesh.kernels.native.native_digest import digest_of_call
from attnmesh.runtime.ranges import ATTENTION_RANGE, MERGE_RANGE, is_profiled, profiled_as


@dataclass(eq=False)
class PreparedStep:
    """Steps of one signature on caches of one size: their options, the launches of a kernel, and what ranks compare."""

    spec: StepSpec
    scaling: Scaling
    """The spec's, made once."""
    attention: CachedAttention
    hashed_values: tuple[Any, ...]
    """Options, dtypes and shapes of the call. Ranks compare their hash."""
    config: CacheConfig | None
    """None in a graph, which has no caches."""
    checked: bool | None
    """The call's `checked`; False in a graph, which cannot raise."""
    refuses_graphs: bool
    """True where the CPU reads what is on the device, which no CUDA graph can hold."""
    take_memory: Callable[[], BlankMessage] | None
    """Returns memory that the kernel writes its partial into; None where the kernel allocates its own."""

    def run(self, inputs: StepInputs) -> Tensor:
        """Return the output, or raise the same error on all ranks if their calls differ.

        Calls that differ and are not compared give NaN. Call with `inputs` for which `find_step` has found this step,
        or for which it was prepared after their checks.
        """
        raise NotImplementedError

    def attend(self, inputs: StepInputs, views: Sequence[CacheView]) -> tuple[Partial, BlankMessage]:
        """Return the partial over this rank's keys, and the message that has it, or `NO_MESSAGE`.

        `inputs` have the heads of this rank. The CPU reads nothing of a device.
        """
        spec = self.spec
        options = spec.options
        q, sinks, lengths = inputs.q, inputs.sinks, inputs.key_lengths
        blank = NO_MESSAGE if self.take_memory is None else self.take_memory()
        if sinks is not None and (options.reproducible or spec.token_axis.index > 0):
            sinks = None  # the first rank adds them; `finish` does in a reproducible step, on any number of ranks
        query = DecodeQuery(
            q,
            options.mask,
            self.scaling,
            spec.capacity,
            sinks=sinks,
            partial_block=spec.block if options.reproducible else None,
            into=blank.partial,
            key_lengths=None if lengths is None else lengths.to(q.device),
            other_partial=inputs.other_partial,
        )
        attend = profiled_as(ATTENTION_RANGE, self.attention.attend) if is_profiled() else self.attention.attend
        return attend(query, views, inputs.selected), blank

    def merge(
        self, partial: Partial, blank: BlankMessage, inputs: StepInputs, views: Sequence[CacheView]
    ) -> tuple[Partial, Tensor | None]:
        """Return the merge of all ranks' partials, and of their checksums if a transport merges.

        `inputs` have all heads: ranks compare them.
        """
        raise NotImplementedError

    def finish(self, merged: Partial, inputs: StepInputs, views: Sequence[CacheView]) -> Tensor:
        """Return the output of this rank's heads. `inputs` are those of `attend`."""
        spec = self.spec
        q, sinks, key_lengths = inputs.q, inputs.sinks, inputs.key_lengths
        out = merged.out
        if spec.options.reproducible:
            if sinks is not None and spec.options.output == "heads":
                sinks = sinks[spec.token_axis.slice_of(len(sinks))]
            # Merging with an empty partial turns -0.0 into 0.0, and more ranks mean more empty partials.
            out = with_sinks(merged, sinks).out + 0.0
        out = out.to(q.dtype).contiguous()
        if key_lengths is not None and (q.is_cpu or not key_lengths.is_cpu):
            # NaN for lengths that the cache does not have. The checks have read those of the CPU.
            lengths = key_lengths.to(q.device)
            wrong = (lengths < 0) | (lengths > views[0].device_counts[LENGTH])
            out = out.masked_fill(wrong[:, None, None, None], torch.nan)
        return out


class LoneStep(PreparedStep):
    """A step of a rank without others: there is nothing to compare, and nothing to merge."""

    def run(self, inputs: StepInputs) -> Tensor:
        """Return the output."""
        views = []  # made here and in other kinds of steps: a function for it would take 65 ns of each step
        for cache in inputs.caches:
            views.append(cache.local_shards.own.view)
        partial, _ = self.attend(inputs, views)
        return self.finish(partial, inputs, views)

    def merge(
        self, partial: Partial, blank: BlankMessage, inputs: StepInputs, views: Sequence[CacheView]
    ) -> tuple[Partial, None]:
        """Return the partial of this rank."""
        return partial, None


@dataclass(eq=False)
class HostMergedStep(PreparedStep):
    """A step of ranks that share a host, whose native library merges, and says whether their calls are equal."""

    host_merge: HostMerge
    output_heads: slice | None
    """Heads of the output in a merged partial; None for all."""

    def run(self, inputs: StepInputs) -> Tensor:
        """Return the output. An error of this rank is raised on all, and so are calls that differ.

        Of an error after the merge the others hear in their next merge.
        """
        try:
            views = []
            for cache in inputs.caches:
                views.append(cache.local_shards.own.view)
            partial, blank = self.attend(inputs, views)
            merged, _ = self.merge(partial, blank, inputs, views)
            return self.finish(merged, inputs, views)
        except Exception as error:
            merge_agreement_for(inputs.caches, self.spec.options, self.checked).raise_through_merge(error)

    def merge(
        self, partial: Partial, blank: BlankMessage, inputs: StepInputs, views: Sequence[CacheView]
    ) -> tuple[Partial, None]:
        """Merge all ranks' partials into this rank's, inside its message. Raise if their calls differ.

        An agreement is made only to raise: it takes longer than the merge.
        """
        assert blank.message is not None
        merge = profiled_as(MERGE_RANGE, self.host_merge.run) if is_profiled() else self.host_merge.run
        if not merge(blank.message, digest_of_call(*inputs.parts_to_compare(self.hashed_values, views))):
            if self.checked is not False:
                fields = partial_of(fields_of_step, inputs, self.spec)
                merge_agreement_for(inputs.caches, self.spec.options, self.checked).raise_unequal(fields)
            partial.out.fill_(torch.nan)
        heads = self.output_heads
        return partial if heads is None else Partial(partial.out[:, heads], partial.lse[:, heads]), None


@dataclass(eq=False)
class TransportMergedStep(PreparedStep):
    """A step with an agreement around its merge."""

    rank_merge: RequestedMerge
    send_question: Callable[[], Tensor] | None
    """Sends a question in messages of these steps. None where the CPU waits for the device: no question is sent."""

    def run(self, inputs: StepInputs) -> Tensor:
        """Return the output, or raise. It is NaN if this rank asked the others about a new call, and not all asked."""
        q, spec = inputs.q, self.spec
        description = MergeDescription(self.hashed_values, partial_of(fields_of_step, inputs, spec), self.send_question)
        agreement = merge_agreement_for(inputs.caches, spec.options, self.checked)
        if not agreement.compare_before_merge(description):
            return q.new_full(spec.output_shape(q), torch.nan)
        try:
            own_inputs = inputs.of_own_heads(spec)
            views = []
            for cache in inputs.caches:
                views.append(cache.local_shards.own.view)
            partial, blank = self.attend(own_inputs, views)
            merged, checksum = self.merge(partial, blank, inputs, views)
            out, checksum = gather_heads(self.finish(merged, own_inputs, views), checksum, spec, q.shape[1])
            agreement.check_merged(description, checksum)
            return out
        except Exception as error:
            agreement.raise_through_merge(error)

    def merge(
        self, partial: Partial, blank: BlankMessage, inputs: StepInputs, views: Sequence[CacheView]
    ) -> tuple[Partial, Tensor]:
        """Return all ranks' partial, and the checksum of their calls. Its sum is 0 if these are equal."""
        checksum = call_checksum(*inputs.parts_to_compare(self.hashed_values, views), partial.lse, blank.checksum)
        return self.rank_merge.run(partial, checksum, blank.message)


def new_prepared_step(
    q: Tensor,
    view: CacheView,
    spec: StepSpec,
    hashed_values: tuple[Any, ...],
    config: CacheConfig | None = None,
    *,
    checked: bool | None = False,
    is_asynchronous: bool = False,
) -> PreparedStep:
    """Return the prepared step of queries like `q`: the launches of a kernel, and the merge.

    Ranks agree on their merge in the first call. The defaults are those of a graph. `is_asynchronous` says that the CPU
    waits for nothing of a device.
    """
    attention = spec.attention_for(q, view)
    blank = None if attention.in_place_kernel is None else _blank_in_place(q, spec)
    refuses_graphs = attention.in_place_kernel is None or (config is not None and needs_cpu(config, q.shape[2]))
    common = spec, spec.scaling, attention, hashed_values, config, checked, refuses_graphs
    if spec.token_axis.size == spec.heads_axis.size == 1:
        return LoneStep(*common, blank)
    if blank is None and (host_merge := _host_merge_of(q, spec)) is not None:
        output_heads = host_merge.heads_of_output(spec.options.output)
        return HostMergedStep(*common, host_merge.blank_message, host_merge, output_heads)
    send_question = partial_of(ask_in_step, spec, q.new_empty(0), q.shape) if is_asynchronous else None
    return TransportMergedStep(*common, blank, spec.rank_merge, send_question)


def _host_merge_of(q: Tensor, spec: StepSpec) -> HostMerge | None:
    """Return the native merge of queries like `q`; None unless all ranks share a host with the native library."""
    axis = spec.token_axis
    may_merge_natively = axis.size > 1 and spec.heads_axis.size == 1 and q.is_cpu and not spec.options.reproducible
    if not may_merge_natively or sum_dtype(q.dtype) != torch.float32:
        return None
    return agreed_host_merge(axis, (*q.shape[:-1], spec.value_dim), spec.rank_merge.agreed_merge(q.device))


def _blank_in_place(q: Tensor, spec: StepSpec) -> Callable[[], BlankMessage] | None:
    """Return a function that takes memory for the partial of a kernel that reads the cache.

    The memory is in a message if other ranks merge with this one. A rank alone takes the partial without a message, or
    nothing for a reproducible step, which merges blocks into new memory.
    """
    own_heads = spec.heads_axis.slice_of(q.shape[1])
    shape = q.shape[0], own_heads.stop - own_heads.start, q.shape[2], spec.value_dim
    dtype = sum_dtype(q.dtype)
    if spec.token_axis.size > 1:
        return partial_of(blank_message, shape, dtype, q.device)
    return None if spec.options.reproducible else partial_of(_blank_partial, shape, q.dtype, dtype, q.device)


def _blank_partial(
    shape: Sequence[int], dtype: torch.dtype, lse_dtype: torch.dtype, device: torch.device
) -> BlankMessage:
    out, lse = torch.empty(shape, dtype=dtype, device=device), torch.empty(shape[:-1], dtype=lse_dtype, device=device)
    return BlankMessage(None, None, Partial(out, lse))
