"""Prepared steps: what was checked and chosen for steps of one signature, and how they run.

All steps `compute` alike. Ranks of one host that merge natively compare their calls by that merge (`HostMerge`). All
others have a `MergeAgreement` around it.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from attnmesh.cache.cache_config import CacheSizes
from attnmesh.comm.host_merge import HostMerge, host_merge_for
from attnmesh.comm.message import blank_message, call_checksum
from attnmesh.comm.rank_merge import chosen_merge, merge_ranks
from attnmesh.core.partial import Partial, sum_dtype, with_sinks
from attnmesh.decoding.decode_step import DecodeStep, StepInputs, gather_heads, of_own_heads
from attnmesh.decoding.step_agreement import agreement_on, ask_in_step, compared_fields, runs_on_device
from attnmesh.errors import RankFailure
from attnmesh.guard.agreement import MergeCall, hash_of_call, is_capturing
from attnmesh.kernels.cache_runs import CachedAttention
from attnmesh.kernels.cache_view import CacheView, DecodeQuery
from attnmesh.kernels.traced import are_plain
from attnmesh.runtime.memo import Memo
from attnmesh.runtime.ranges import ATTENTION, MERGE, in_range, is_profiled

CALLS_DIFFER = torch.ones(2, dtype=torch.float32, device="cpu")
"""Checksum of calls that a merge on the CPU has found to differ."""


class PreparedStep(NamedTuple):
    """Steps of one signature on caches of one size: their options, the launches of a kernel, and the merge of ranks."""

    step: DecodeStep
    attention: CachedAttention
    host_merge: HostMerge | None  # None unless all ranks share a host whose native library merges
    output_heads: slice | None  # heads of that merge's output; None for all
    is_alone: bool  # True where there are no other ranks
    sizes: CacheSizes | None = None
    stays_on_device: bool = False  # True where the CPU waits for nothing of a device
    compared_facts: tuple[Any, ...] = ()  # what ranks compare of each call, by its hash

    def run(self, inputs: StepInputs, checked: bool | None) -> Tensor:
        """Return the output, or raise the same error on all ranks if their calls differ.

        Calls that differ and are not compared give NaN.
        """
        q, caches, _, key_lengths, *_ = inputs
        step, views, values = self.step, [], []
        for cache in caches:
            views.append(cache.shards.own.view)
            values.append(cache.history_checksum)
        if self.is_alone:
            return self.compute(inputs, views, 0)[0]
        # Lengths on a GPU are part of the checksum instead: to read them here, the CPU would wait for it.
        if key_lengths is not None and key_lengths.device.type == "cpu":
            values += key_lengths.tolist()
        if self.host_merge is None:
            ask = None
            if self.stays_on_device:
                like = q.new_empty(0), q.shape, caches[0].sizes.value_dim
                ask = functools.partial(ask_in_step, step, *like)
            fields = functools.partial(compared_fields, inputs, step)
            call = MergeCall(self.compared_facts, fields, tuple(values), ask)
            agreement = agreement_on(caches, step, checked)
            if (call_hash := agreement.begin(call)) is None:
                return q.new_full(step.output_shape(q), torch.nan)
            with agreement:
                out, merged_checksum = self.compute(inputs, views, call_hash)
            agreement.compare(call, cast(Tensor, merged_checksum))
            return out
        try:  # without an agreement, which takes longer to make than to hash the call
            call_hash = hash_of_call(self.compared_facts, *values)
            out, checksum = self.compute(inputs, views, call_hash)
        except RankFailure:
            raise
        except Exception as error:
            agreement_on(caches, step, checked).fail(error)
        if checksum is CALLS_DIFFER and checked is not False:
            agreement_on(caches, step, checked).raise_unequal(functools.partial(compared_fields, inputs, step))
        return out

    def compute(self, inputs: StepInputs, views: Sequence[CacheView], call_hash: int) -> tuple[Tensor, Tensor | None]:
        """Return this rank's output, and the checksum that the merge has found of the ranks' calls.

        The sum of the checksum is 0 if the calls are equal. It is None if `host_merge` has compared them and they are,
        or if there are no other ranks. The output is NaN if the calls differ. `views` is the cache of all rows of q, or
        a cache for each row. The CPU reads nothing of a device.
        """
        q, _, sinks, key_lengths, selected, other_keys = inputs
        step = self.step
        own_q, own_sinks, own_selected = q, sinks, selected  # those of this rank's heads
        if step.head_axis.size > 1:
            own_q, own_sinks, own_selected = of_own_heads(step, q, sinks, selected)
        message = checksum = into = None
        if self.host_merge is not None:
            message = self.host_merge.blank()
            into = self.host_merge.partial_in(message)
        elif self.attention.in_place_kernel is not None:
            message, checksum, into = self._message(own_q)
        # The first rank adds the sinks; a reproducible step adds them after the merge, on any number of ranks.
        added = own_sinks if step.token_axis.index == 0 and not step.reproducible else None
        partial_block = step.block if step.reproducible else None
        lengths = None if key_lengths is None else key_lengths.to(q.device)
        query = DecodeQuery(
            own_q, step.mask, step.scaling, step.capacity, added, partial_block, into, lengths, other_keys
        )
        attend = in_range(ATTENTION, self.attention.attend) if is_profiled() else self.attention.attend
        partial = attend(query, views, own_selected)
        if not self.is_alone:
            partial, checksum = self._merge(partial, inputs, views, call_hash, message, checksum)
        return self._finish(partial, checksum, inputs, own_sinks, lengths, views)

    def _merge(
        self,
        partial: Partial,
        inputs: StepInputs,
        views: Sequence[CacheView],
        call_hash: int,
        message: Tensor | None,
        checksum: Tensor | None,
    ) -> tuple[Partial, Tensor | None]:
        """Return the partial of all ranks, and the checksum of their calls; None if the CPU knows that they are equal.

        `message` holds the partial, where there is one, and `checksum` is a view of it.
        """
        q, _, sinks, key_lengths, selected, _ = inputs
        step, host_merge = self.step, self.host_merge
        tensors = [q] if sinks is None else [q, sinks]
        state = views[0].state
        if key_lengths is not None and key_lengths.device.type != "cpu":
            tensors.append(key_lengths)  # else part of the hash
        if selected is not None:
            tensors.append(selected.indices)
        for number, view in enumerate(views[1:], 2):  # a sum that tells when the lengths of two caches were swapped
            state = state + number * view.state[:1]
        if host_merge is not None and message is not None:
            merge = in_range(MERGE, host_merge.run) if is_profiled() else host_merge.run
            length = state.tolist()[0]  # tokens of the caches, which are compared too
            if merge(message, call_hash + length, tensors):
                return partial, None
            partial.out.fill_(torch.nan)
            return partial, CALLS_DIFFER
        checksum = call_checksum(tensors, call_hash, state, partial.lse, checksum)
        along = step.token_axis, step.merge, step.output
        return merge_ranks(partial, checksum, *along, reproducible=step.reproducible, message=message)

    def _finish(
        self,
        partial: Partial,
        checksum: Tensor | None,
        inputs: StepInputs,
        sinks: Tensor | None,
        lengths: Tensor | None,
        views: Sequence[CacheView],
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output of the merged partial, and the checksum of all ranks of both axes.

        `sinks` are those of this rank's heads, and `lengths` the real keys of each sequence, on the device.
        """
        q, step = inputs.q, self.step
        out = partial.out if self.output_heads is None else partial.out[:, self.output_heads]
        if step.reproducible:
            if sinks is not None and step.output == "heads":
                sinks = sinks[step.token_axis.slice_of(len(sinks))]
            # Merging with an empty partial turns -0.0 into 0.0, and more ranks mean more empty partials.
            out = with_sinks(partial, sinks).out + 0.0
        out = out.to(q.dtype).contiguous()
        if lengths is not None:  # NaN where no such number of keys is cached
            wrong = (lengths < 0) | (lengths > views[0].state[0])
            out = out.masked_fill(wrong[:, None, None, None], torch.nan)
        if checksum is not None and step.head_axis.size > 1:
            out, checksum = gather_heads(out, checksum, step, q.shape[1])
        return out, checksum

    def _message(self, q: Tensor) -> tuple[Tensor | None, Tensor | None, Partial | None]:
        """Return a message with its checksum and the partial in it, which a kernel that reads the cache writes.

        One rank has the partial alone; a reproducible one merges into new memory.
        """
        shape = (*q.shape[:-1], self.step.value_dim)
        dtype = sum_dtype(q.dtype)
        if self.step.token_axis.size > 1:
            return blank_message(shape, dtype, q.device)
        if self.step.reproducible:
            return None, None, None
        return None, None, Partial(q.new_empty(shape), q.new_empty(shape[:-1], dtype=dtype))


def find_step(
    inputs: StepInputs, options: tuple[Any, ...], checked: object, prepared: Memo[PreparedStep]
) -> tuple[tuple[Any, ...] | None, PreparedStep | None]:
    """Return the signature of a call, all that its checks depend on but for its caches, and its step if it is prepared.

    `prepared` is the memo that keeps prepared steps. The signature is None for calls that are checked each time.
    """
    q, caches, sinks, key_lengths, selected, other_keys = inputs
    first = caches[0]
    if key_lengths is not None or selected is not None or other_keys is not None:
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
    for cache in caches:  # in place: a function of it would be one more frame of each step
        shards, shard = cache.shards, cache.shards.own
        length = shards.known_length if on_gpu else shard.state.tolist()[0]
        if (
            # A cache of other sizes, or without room:
            (sizes is not shard.sizes and (count == 1 or sizes is None or sizes.layer_sizes != shard.sizes.layer_sizes))
            or not rows <= length <= shard.sizes.capacity <= step.capacity
            or (shard.sizes.mask is not None and not shards.serves(length - rows))  # forgotten keys
            or (shard.sizes.hot is not None and is_capturing(shard.device))  # such a call is refused
            or (step.reproducible and (shard.padding is not None or shards.counts.start or shards.forked))
            or (step.reproducible and not shard.block_cyclic.is_even)  # its blocks are no subtrees of one tree
        ):
            return signature, None
    return signature, prepared_step


def prepare_step(
    inputs: StepInputs, step: DecodeStep, signature: tuple[Any, ...] | None, prepared: Memo[PreparedStep]
) -> PreparedStep:
    """Return the prepared step of a call that was checked, which `prepared` keeps if its signature is known."""
    q, caches, *_ = inputs
    first = caches[0]
    on_device = runs_on_device(first, step)
    if step.reproducible:
        for cache in caches:
            if cache.shards.forked and on_device:
                cache.shards.unshare()  # the kernel merges the blocks of one tensor
    prepared_step = new_prepared_step(q, first.shard.view, step)
    facts = inputs.compared_facts(step)
    prepared_step = prepared_step._replace(sizes=first.sizes, stays_on_device=on_device, compared_facts=facts)
    if signature is not None and not step.mask.ends:
        prepared.keep(signature, prepared_step)
    return prepared_step


def new_prepared_step(q: Tensor, view: CacheView, step: DecodeStep) -> PreparedStep:
    """Return what steps with such queries run: the launches of a kernel, and the merge."""
    attention = step.attention_for(q, view)
    axis = step.token_axis
    host_merge, heads = None, None
    may_merge_natively = axis.size > 1 and step.head_axis.size == 1 and q.device.type == "cpu" and not step.reproducible
    if may_merge_natively and attention.in_place_kernel is None and sum_dtype(q.dtype) == torch.float32:
        merge = chosen_merge(axis, step.merge, step.output, q.device)
        host_merge = host_merge_for(axis, (*q.shape[:-1], step.value_dim), merge)
        heads = None if host_merge is None else host_merge.heads_of_output(step.output)
    return PreparedStep(step, attention, host_merge, heads, is_alone=axis.size == step.head_axis.size == 1)
