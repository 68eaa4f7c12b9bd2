"""A decode step as an operator of PyTorch: the local attention, and one merge across ranks."""

from collections.abc import Sequence
from zlib import crc32

import torch
from torch import Tensor

from attnmesh.comm.merge_ranks import merge_ranks
from attnmesh.comm.message import PartialMessage, call_checksum
from attnmesh.comm.p2p import all_to_all_bytes, swap
from attnmesh.comm.topology import mailboxes_of
from attnmesh.core.partial import Partial, sum_dtype, with_sinks
from attnmesh.decode.local import attend_cache
from attnmesh.decode.step import DecodeStep
from attnmesh.kernels.cache_view import CacheKernel, CacheView, DecodeQuery, Padding
from attnmesh.kernels.driver import choose_for_cache
from attnmesh.mesh.axes import Axis


def run_step(
    q: Tensor, cache: CacheView, sinks: Tensor | None, step: DecodeStep, call: int
) -> tuple[Tensor, Tensor | None]:
    """Return this rank's output, and the merged checksum of the call if there are other ranks."""
    heads = step.heads.share_of(q.shape[1])
    own, alone = q[:, heads], step.tokens.size == 1
    kernel = choose_for_cache(step.kernel, q, cache.keys, cache.values)
    form = PartialMessage((*own.shape[:-1], cache.values.shape[-1]), sum_dtype(q.dtype), sum_dtype(q.dtype))
    message, checksum, place = None, None, None
    if isinstance(kernel, CacheKernel) and not alone:  # the kernel writes into the message
        message = form.blank(q.device)
        checksum, place = form.places(message)
    elif isinstance(kernel, CacheKernel) and not step.reproducible:
        place = Partial(q.new_empty(form.shape), q.new_empty(form.shape[:-1], dtype=form.lse))
    # The first rank adds the sinks; a reproducible step adds them after the merge, on any number of ranks.
    own_sinks = sinks[heads] if sinks is not None and step.tokens.index == 0 and not step.reproducible else None
    block, merge = (step.block, "tree") if step.reproducible else (None, step.merge)
    partial = attend_cache(
        DecodeQuery(own, step.mask, step.scale, step.capacity, own_sinks, block, place), cache, kernel
    )
    if not alone or step.heads.size > 1:
        checksum = call_checksum([x for x in (q, sinks) if x is not None], call, cache.state, partial.lse, checksum)
        partial, checksum = merge_ranks(
            partial, checksum, step.tokens, merge, step.output, canonical=step.reproducible, message=message
        )
    if sinks is not None and step.reproducible:
        sinks = sinks[heads]
        partial = with_sinks(partial, sinks[step.tokens.share_of(len(sinks))] if step.output == "heads" else sinks)
    # Merging with an empty partial turns -0.0 into 0.0. More ranks mean more empty partials, so 0.0 is always added.
    out = partial.out + 0.0 if step.reproducible else partial.out
    out = out.to(q.dtype).contiguous()
    return (out, None) if checksum is None else _gather_heads(out, checksum, step)


def _gather_heads(out: Tensor, checksum: Tensor, step: DecodeStep) -> tuple[Tensor, Tensor]:
    """Return the output with the heads of all ranks along the heads axis, if their calls are equal."""
    axis = step.heads
    if axis.size == 1:
        return out, checksum
    checksum = highest_checksum(checksum, axis)
    if step.output == "heads" or (out.device.type == "cpu" and float(checksum.sum()) != 0):
        return out, checksum
    parts = swap([(out,)] * axis.size, [(out,)] * axis.size, axis)
    return torch.cat([part for (part,) in parts], 1), checksum


def highest_checksum(checksum: Tensor, axis: Axis) -> Tensor:
    """Return the maximum of the checksums of all ranks of an axis."""
    rows = all_to_all_bytes([checksum.view(torch.uint8)] * axis.size, axis, mailboxes_of(axis, checksum.device))
    return rows.view(checksum.dtype).amax(0)


def nan_unless_equal(out: Tensor, checksum: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the output, or NaN where the checksums of the ranks differ. The host reads nothing."""
    if out.shape != shape:  # ranks found that they differ before they exchanged heads
        return out.new_full(shape, torch.nan)
    return torch.where(checksum.sum() == 0, out, torch.nan)


@torch.library.custom_op("attnmesh::decode", mutates_args=())
def decode_op(q: Tensor, cache: Sequence[Tensor], sinks: Tensor | None, names: str, numbers: Sequence[int]) -> Tensor:
    """Run a step inside a graph, which cannot raise: all ranks get NaN if their calls differ."""
    step, view = DecodeStep.decode(names, numbers), _view(cache)
    call = crc32(f"{numbers[4:]} {names.split(',')[2:]}".encode())
    out, checksum = run_step(q, view, sinks, step, call)
    out = out if checksum is None else nan_unless_equal(out, checksum, step.output_shape(q, view.values))
    return torch.where(view.state[0] <= step.capacity, out, torch.nan)


@decode_op.register_fake
def _(q: Tensor, cache: Sequence[Tensor], sinks: Tensor | None, names: str, numbers: Sequence[int]) -> Tensor:
    return q.new_empty(DecodeStep.decode(names, numbers).output_shape(q, cache[1]))


def tensors_of(view: CacheView) -> list[Tensor]:
    """Return a view of a cache as the list of tensors that the operator takes."""
    return [*view[:4], *(view.padding or ())]


def _view(tensors: Sequence[Tensor]) -> CacheView:
    keys, values, token_index, state, *padding = tensors
    return CacheView(keys, values, token_index, state, Padding(*padding) if padding else None)
