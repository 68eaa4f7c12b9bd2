"""A decode step: the attention to the keys on this rank, and one merge across ranks.

What is chosen for a kind of steps is a plan: the kernel, what queries see, and the merge.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnmesh.cache.cache import KVCache
from attnmesh.cache.cache_config import Sizes
from attnmesh.comm.host_merge import HostMerge, host_merge_for
from attnmesh.comm.message import PartialMessage, call_checksum, question_like
from attnmesh.comm.p2p import swap_tokens
from attnmesh.comm.rank_merge import chosen_merge, highest_checksum, merge_ranks
from attnmesh.core.logits import Logits
from attnmesh.core.mask import Mask
from attnmesh.core.partial import Partial, identity, merge_unchecked, sum_dtype, with_sinks
from attnmesh.core.selection import Selection
from attnmesh.core.storage import columns_of
from attnmesh.decoding.runs import DeviceKernel, Held, RunKernel, SeenKeys
from attnmesh.kernels.blocks import Need
from attnmesh.kernels.cache_view import CacheView
from attnmesh.kernels.choice import choose
from attnmesh.kernels.native.native_digest import digest_on_host
from attnmesh.kernels.stacked_merge import copy_into
from attnmesh.kernels.traced import are_plain
from attnmesh.mesh.axes import Axis
from attnmesh.runtime.ranges import ATTENTION, MERGE, is_profiled, named


class DecodeStep(NamedTuple):
    """Options of one step, and the axes and sizes of its cache."""

    heads: Axis
    tokens: Axis
    block: int
    capacity: int
    value_dim: int
    mask: Mask
    logits: Logits
    merge: str
    output: str
    reproducible: bool
    kernel: str
    index_block: int | None = None  # tokens that an index selects; None if nothing is selected

    @property
    def options(self) -> tuple[Any, ...]:
        """The values that the caller passes, which are equal on all ranks."""
        return self[5:]

    def output_shape(self, q: Tensor) -> tuple[int, ...]:
        """Return the shape of the output on this rank."""
        heads = q.shape[1]
        for axis in (self.heads, self.tokens) if self.output == "heads" else ():
            share = axis.share_of(heads)
            heads = share.stop - share.start
        return q.shape[0], heads, q.shape[2], self.value_dim


class Operands(NamedTuple):
    """Tensors of a step: queries, what the cache holds here, or a cache for each row, and what a call may pass too."""

    q: Tensor
    held: Sequence[Any]  # as the kernel takes it
    sinks: Tensor | None = None
    key_lengths: Tensor | None = None
    selection: Selection | None = None
    further: Partial | None = None


class StepPlan(NamedTuple):
    """What was chosen for a kind of steps that were checked."""

    step: DecodeStep
    kernel: RunKernel | DeviceKernel
    visible: SeenKeys
    is_alone: bool  # there are no other ranks
    merge: HostMerge | None  # None on one rank, and where no native call merges
    share: slice | None  # this rank's heads of the output of that merge, if they are not all
    sizes: Sizes | None = None  # None in a graph
    call: tuple[Any, ...] = ()  # the kind of the call, of which its number is made

    @staticmethod
    def of(step: DecodeStep, q: Tensor, view: CacheView) -> "StepPlan":
        """Return the plan of a step. The first one along an axis of CPUs is collective."""
        axis, merge = step.tokens, None
        fits = q.device.type == "cpu" and sum_dtype(q.dtype) == torch.float32 and not step.reproducible
        if axis.size > 1 and step.heads.size == 1 and fits:
            how = chosen_merge(axis, step.merge, step.output, q.device)
            merge = host_merge_for(axis, (*q.shape[:-1], step.value_dim), how)
        share = None if merge is None else merge.heads(step.output)
        return StepPlan(step, *kernel_of(step, q, view), axis.size == step.heads.size == 1, merge, share)

    @property
    def is_kept(self) -> bool:
        """Whether later steps of the kind need no check but of their lengths."""
        needs_checks = self.step.reproducible or self.step.mask.ends
        return not needs_checks and (self.is_alone or self.merge is not None) and isinstance(self.kernel, RunKernel)


def kernel_of(step: DecodeStep, q: Tensor, view: CacheView) -> tuple[RunKernel | DeviceKernel, SeenKeys]:
    """Return the kernel of a step, and what its queries see."""
    is_selected = step.index_block is not None
    kernel = choose(Need.of_cache(q, view, step.logits), "reference" if is_selected else step.kernel)
    by_distance = q.shape[-1] != columns_of(view.keys)
    visible = SeenKeys.of(step.mask, q.shape[2], step.block if step.reproducible else None, by_distance)
    if kernel.reads_cache:
        return DeviceKernel(kernel, step.logits, step.capacity), visible
    own_q, alone = q[:, step.heads.share_of(q.shape[1])], step.tokens.size == 1
    on_host = not is_selected or q.device.type == "cpu"  # few tokens are not worth a wait for a device
    return RunKernel.of(kernel, own_q, view, step.logits, alone=alone, on_host=on_host), visible


def find_plan(
    q: Tensor, caches: Sequence[KVCache], sinks: Tensor | None, options: tuple[Any, ...]
) -> tuple[StepPlan | None, Sequence[Held], tuple[Any, ...] | None]:
    """Return the plan of a step, if its cache has one, what each cache holds, and the kind, if it may have a plan."""
    if not (are_plain(q) if sinks is None else are_plain(q, sinks)):
        return None, (), None
    more = None if sinks is None else (sinks.shape, sinks.dtype, sinks.layout)
    kind = q.shape, len(caches), q.dtype, more, *options, *map(type, options)  # equal options may differ in type
    try:
        plan: StepPlan | None = caches[0].step_plans.get(kind)
    except TypeError:  # an option has no hash
        return None, (), None
    if plan is None or plan.sizes is None:
        return None, (), kind
    rows, sizes, alone, found = q.shape[2], plan.sizes, plan.step.tokens.size == 1, list[Held]()
    for cache in caches:
        shards = cache.shards
        shard = shards.own
        if sizes is not shard.sizes and (len(caches) == 1 or sizes.kind != shard.sizes.kind):
            return None, (), kind
        held = Held.of(shard, alone)
        first = held.length - rows
        if first < 0 or held.length > shard.sizes.capacity:
            return None, (), kind
        if sizes.mask is not None and first < shards.floor and not shards.serves(first):
            return None, (), kind
        found.append(held)
    return plan, found, kind


def run_step(plan: StepPlan, operands: Operands, number: int) -> tuple[Tensor, Tensor | bool | None]:
    """Return this rank's output, and the merged checksum of the call, or whether it cancels; None without other ranks.

    The output is NaN if the ranks' calls differ. The host reads nothing of a device.
    """
    q, held, sinks, key_lengths, selection, further = operands
    step, merge, visible, message, into, checksum = plan.step, plan.merge, plan.visible, None, None, None
    own_q, own_sinks, own, state = q, sinks, selection, held[0].state
    if step.heads.size > 1:
        heads = step.heads.share_of(q.shape[1])
        own_q, own_sinks = q[:, heads], None if sinks is None else sinks[heads]
        own = None if selection is None else selection_of_rank(selection, step.heads)
    if key_lengths is not None or selection is not None:
        lengths = None if key_lengths is None else key_lengths.to(q.device)
        visible = visible._replace(in_order=False, key_lengths=lengths, selection=own)
    if merge is not None:
        message = merge.blank()
        into = merge.places(message)
    elif step.tokens.size > 1 and isinstance(plan.kernel, DeviceKernel):  # it writes into the message
        form = PartialMessage((*own_q.shape[:-1], step.value_dim), torch.float32, torch.float32)
        message = form.blank(q.device)
        checksum, into = form.places(message)
    # The first rank adds the sinks; a reproducible step adds them after the merge, on any number of ranks.
    first_sinks = own_sinks if step.tokens.index == 0 and not step.reproducible else None
    attend = named(ATTENTION, plan.kernel.attend) if is_profiled() else plan.kernel.attend
    partial = attend(own_q, held, visible, into, first_sinks)
    if further is not None:
        partial = copy_into(merge_unchecked([partial, further]), into)
    found: Tensor | bool | None = None
    if merge is not None and message is not None:
        for row, each in enumerate(held, 1):
            number += row * each.length
        for x in (q, sinks, None if selection is None else selection.indices):
            number += 0 if x is None else digest_on_host(x)
        merged = named(MERGE, merge.run) if is_profiled() else merge.run
        found = merged(message, number)
        if plan.share is not None:
            partial = Partial(partial.out[:, plan.share], partial.lse[:, plan.share])
    elif not plan.is_alone:
        for row, each in enumerate(held[1:], 2):
            state = state + row * each.state[:1]
        counted = None if key_lengths is None or key_lengths.device.type == "cpu" else key_lengths  # else in the number
        given = (q, sinks, counted, None if selection is None else selection.indices)
        tensors = [x for x in given if x is not None]
        checksum = call_checksum(tensors, number, state, partial.lse, checksum)
        partial, found = _merge(partial, checksum, step, message)
    if step.reproducible:
        partial = _finish_reproducible(partial, own_sinks, step)
    out = partial.out.to(q.dtype).contiguous()
    if found is False:
        out.fill_(torch.nan)
    if visible.key_lengths is not None:  # NaN where no such number of keys is cached
        wrong = (visible.key_lengths < 0) | (visible.key_lengths > held[0].state[0])
        out = out.masked_fill(wrong[:, None, None, None], torch.nan)
    return _gather_heads(out, found, step, q.shape[1]) if isinstance(found, Tensor) else (out, found)


def ask_in_step(step: DecodeStep, like: Tensor, shape: Sequence[int], value_dim: int) -> Tensor:
    """Take part in a step with nothing to attend to, and a question for a checksum. Return the merged checksum.

    `like` and `shape` are those of the step's queries. The messages have the sizes that the other ranks expect.
    """
    heads = step.heads.share_of(shape[1])
    q = like.new_empty(1).expand(shape)[:, heads]
    nothing = identity(q, value_dim, sum_dtype(q.dtype))
    partial, checksum = _merge(nothing, question_like(nothing.lse), step)
    return _gather_heads(partial.out.to(q.dtype).contiguous(), checksum, step, shape[1])[1]


def _merge(
    partial: Partial, checksum: Tensor, step: DecodeStep, message: Tensor | None = None
) -> tuple[Partial, Tensor]:
    """Return the merge of the partials of all ranks, and the maximum of their checksums."""
    how, canonical = "tree" if step.reproducible else step.merge, step.reproducible
    return merge_ranks(partial, checksum, step.tokens, how, step.output, canonical=canonical, message=message)


def _finish_reproducible(partial: Partial, sinks: Tensor | None, step: DecodeStep) -> Partial:
    """Return the merged partial with the sinks of this rank's heads, and without -0.0.

    Merging with an empty partial turns -0.0 into 0.0, and more ranks mean more empty partials, so 0.0 is always added.
    """
    if sinks is not None and step.output == "heads":
        sinks = sinks[step.tokens.share_of(len(sinks))]
    out, lse = with_sinks(partial, sinks)
    return Partial(out + 0.0, lse)


def _gather_heads(out: Tensor, checksum: Tensor, step: DecodeStep, heads: int) -> tuple[Tensor, Tensor]:
    """Return the output with the heads of all ranks along the heads axis, or NaN if their calls differ."""
    axis = step.heads
    if axis.size == 1:
        return out, checksum
    checksum = highest_checksum(checksum, axis)
    if step.output != "heads":
        if out.device.type == "cpu" and float(checksum.sum()) != 0:  # shares may have other sizes, too
            return out.new_full((out.shape[0], heads, *out.shape[2:]), torch.nan), checksum
        out = torch.cat(swap_tokens([out] * axis.size, [out.shape[2]] * axis.size, axis), 1)
    return torch.where(checksum.sum() == 0, out, torch.nan), checksum


def selection_of_rank(selection: Selection, heads: Axis) -> Selection:
    """Return the selection of the heads of a rank, its own where each head has one."""
    return selection.of_heads(heads.share_of(selection.heads)) if selection.heads > 1 else selection
