"""A decode step as an operator of PyTorch: the attention to the keys on this rank, and one merge across ranks."""

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from attnmesh.comm.message import PartialMessage, call_checksum, question_like
from attnmesh.comm.p2p import swap_tokens
from attnmesh.comm.rank_merge import highest_checksum, merge_ranks
from attnmesh.core.partial import Partial, identity, merge_unchecked, sum_dtype, with_sinks
from attnmesh.core.selection import Selection, Visible
from attnmesh.decoding.attend_views import attend_views, chosen_kernel
from attnmesh.decoding.decode_step import DecodeStep
from attnmesh.decoding.selected_tokens import selection_of_rank
from attnmesh.kernels.blocks import CacheLaunch, Kernel
from attnmesh.kernels.cache_view import CacheView, DecodeQuery, Padding
from attnmesh.kernels.stacked_merge import copy_into
from attnmesh.runtime.operators import operator
from attnmesh.runtime.ranges import ATTENTION, is_profiled, named


def run_step(
    q: Tensor,
    views: Sequence[CacheView],
    sinks: Tensor | None,
    step: DecodeStep,
    call_number: int,
    visible: Visible | None = None,
    further: Partial | None = None,
    launch: CacheLaunch | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return this rank's output, and the merged checksum of the call if there are other ranks.

    `views` is the cache of all rows of q, or a cache for each row. `further` is the partial of keys that are not in the
    cache. `launch` is that of a known kind. The output is NaN if the ranks' calls differ. The host reads nothing of a
    device.
    """
    key_lengths, selected = (None, None) if visible is None else visible[3:]
    view, state, heads = views[0], _state_of(views), step.heads.share_of(q.shape[1])
    rank_q, alone, block = q[:, heads], step.tokens.size == 1, step.block if step.reproducible else None
    kernel = chosen_kernel(q, view, step) if launch is None else launch
    shape, dtype = (*rank_q.shape[:-1], view.value_dim), sum_dtype(q.dtype)
    message, checksum, into = None, None, None
    in_place = not isinstance(kernel, Kernel) or kernel.reads_cache
    if in_place and not alone:  # the kernel writes into the message
        form = PartialMessage(shape, dtype, dtype)
        message = form.blank(q.device)
        checksum, into = form.places(message)
    elif in_place and not step.reproducible:
        into = Partial(q.new_empty(shape), q.new_empty(shape[:-1], dtype=dtype))
    # The first rank adds the sinks; a reproducible step adds them after the merge, on any number of ranks.
    rank_sinks = sinks[heads] if sinks is not None and step.tokens.index == 0 and not step.reproducible else None
    on_device = key_lengths is not None and key_lengths.device.type != "cpu"
    key_lengths = None if key_lengths is None else key_lengths.to(q.device)
    query = DecodeQuery(rank_q, step.mask, step.logits, step.capacity, rank_sinks, block, into, key_lengths)
    some = None if selected is None else selection_of_rank(selected, step.heads)
    attend = named(ATTENTION, attend_views) if is_profiled() else attend_views
    partial = attend(query, views, kernel, some)
    if further is not None:
        partial = copy_into(merge_unchecked([partial, further]), into)
    if not alone or step.heads.size > 1:
        counted = key_lengths if on_device else None  # else part of the number
        indices = None if selected is None else selected.indices
        tensors = [x for x in (q, sinks, counted, indices) if x is not None]
        checksum = call_checksum(tensors, call_number, state, partial.lse, checksum)
        partial, checksum = _merge(partial, checksum, step, message)
    if step.reproducible:
        partial = _finish_reproducible(partial, sinks if sinks is None else sinks[heads], step)
    out = partial.out.to(q.dtype).contiguous()
    if key_lengths is not None:  # NaN where no such number of keys is cached
        wrong = (key_lengths < 0) | (key_lengths > view.state[0])
        out = out.masked_fill(wrong[:, None, None, None], torch.nan)
    return (out, None) if checksum is None else _gather_heads(out, checksum, step, q.shape[1])


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
    how = step.tokens, step.merge, step.output
    return merge_ranks(partial, checksum, *how, canonical=step.reproducible, message=message)


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


def _fake_output(q: Tensor, *rest: Any) -> Tensor:
    *_, names, numbers = rest
    return q.new_empty(DecodeStep.decode(names, numbers).output_shape(q))


@operator("decode", _fake_output)
def decode_op(
    q: Tensor,
    cache: Sequence[Tensor],
    sinks: Tensor | None,
    key_lengths: Tensor | None,
    indices: Tensor | None,
    names: str,
    numbers: Sequence[int],
) -> Tensor:
    """Run a step inside a graph, which cannot raise: all ranks get NaN if their calls differ."""
    view = view_of(cache, (step := DecodeStep.decode(names, numbers)).value_dim)
    call_number = crc32(f"{numbers[4:]} {names.split(',')[2:]}".encode())
    selected = None if indices is None else Selection(indices, step.index_block or 1)
    visible = Visible(step.mask, key_lengths=key_lengths, selected=selected)
    out, _ = run_step(q, [view], sinks, step, call_number, visible)
    return torch.where(view.state[0] <= step.capacity, out, torch.nan)


def tensors_of(view: CacheView) -> list[Tensor]:
    """Return a view of a cache as the list of tensors that the operator takes."""
    return [*view[:4], *(view.padding or ())]


def view_of(tensors: Sequence[Tensor], value_dim: int) -> CacheView:
    """Return the view that `tensors_of` took apart."""
    keys, values, token_index, state, *padding = tensors
    return CacheView(keys, values, token_index, state, Padding(*padding) if padding else None, value_dim)


def _state_of(views: Sequence[CacheView]) -> Tensor:
    """Return the lengths of caches as one number, which differs if two of them change places."""
    return sum((row * view.state[:1] for row, view in enumerate(views[1:], 2)), start=views[0].state)
