"""A decode step as an operator of PyTorch: the local attention, and one merge across ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from attnmesh.comm.merge import PartialMessage, call_checksum, merged_across
from attnmesh.comm.p2p import all_to_all_bytes, swap
from attnmesh.comm.topology import mailboxes_of
from attnmesh.core.mask import Mask
from attnmesh.core.partial import Partial, wide, with_sinks
from attnmesh.decode.local import attend_held
from attnmesh.kernels.cache_view import CacheView, DecodeQuery, Padding
from attnmesh.kernels.driver import CacheKernel
from attnmesh.kernels.select import choose_for_cache
from attnmesh.mesh.axes import Axis, group_named


@dataclass(frozen=True)
class Step:
    """All of a step that is not a tensor."""

    heads: Axis
    tokens: Axis
    block: int
    capacity: int
    mask: Mask
    scale: float
    merge: str
    output: str
    reproducible: bool
    kernel: str


def or_nan(out: Tensor, checksum: Tensor, shape: tuple[int, ...], *, merged: bool = False) -> Tensor:
    """The output; NaN if the ranks were not asked the same, which the merge may have seen to."""
    if out.shape != shape:  # ranks found out before they had all heads
        return out.new_full(shape, torch.nan)
    return out if merged else torch.where(checksum.sum() == 0, out, torch.nan)


def run_step(q: Tensor, held: CacheView, sinks: Tensor | None, step: Step, call: int) -> tuple[Tensor, Tensor | None]:
    """This rank's output, and if there are others a checksum of what all ranks were asked."""
    heads = step.heads.share_of(q.shape[1])
    own = q[:, heads]
    kernel, alone = choose_for_cache(step.kernel, q, held.keys, held.values), step.tokens.size == 1
    silent = isinstance(kernel, CacheKernel)
    form = PartialMessage((*own.shape[:-1], held.values.shape[-1]), wide(q.dtype), wide(q.dtype))
    message, checksum, place = None, None, None
    if silent and not alone:  # what is made is made where it is sent from
        message = form.blank(q.device)
        checksum, place = form.places(message)
    elif silent and not step.reproducible:
        place = Partial(q.new_empty(form.shape), q.new_empty(form.shape[:-1], dtype=form.lse))
    # A sink is the first rank's to add; to have the same bits on any number of ranks, it comes last of all.
    first = sinks[heads] if sinks is not None and step.tokens.index == 0 and not step.reproducible else None
    block, how = (step.block, "tree") if step.reproducible else (None, step.merge)
    question = DecodeQuery(own, step.mask, step.scale, step.capacity, first, block, place)
    mine = attend_held(question, held, kernel)
    if not alone or step.heads.size > 1:
        checksum = call_checksum([x for x in (q, sinks) if x is not None], call, held.state, mine.lse, checksum)
        mine, checksum = merged_across(
            mine, checksum, step.tokens, how, step.output, canonical=step.reproducible, message=message
        )
    if sinks is not None and step.reproducible:
        sinks = sinks[heads]
        mine = with_sinks(mine, sinks[step.tokens.share_of(len(sinks))] if step.output == "heads" else sinks)
    out = mine.out + 0.0 if step.reproducible else mine.out  # merges with nothing, of which 8 ranks have more
    out = out.to(q.dtype).contiguous()  # than one, may turn a -0.0 into 0.0
    return (out, None) if checksum is None else _all_heads(out, checksum, step)


def _all_heads(out: Tensor, checksum: Tensor, step: Step) -> tuple[Tensor, Tensor]:
    """Along the heads axis, the outputs of all ranks in line, if all are to have them and have been asked the same."""
    axis = step.heads
    if axis.size == 1:
        return out, checksum
    checksum = highest_checksum(checksum, axis)
    if step.output == "heads" or (out.device.type == "cpu" and float(checksum.sum()) != 0):
        return out, checksum
    everyone = swap([(out,)] * axis.size, [(out,)] * axis.size, axis)
    return torch.cat([theirs for (theirs,) in everyone], 1), checksum


def highest_checksum(checksum: Tensor, axis: Axis) -> Tensor:
    """The maximum of the checksums of all ranks in line."""
    rows = all_to_all_bytes([checksum.view(torch.uint8)] * axis.size, axis, mailboxes_of(axis, checksum.device))
    return rows.view(checksum.dtype).amax(0)


@torch.library.custom_op("attnmesh::decode", mutates_args=())
def decode_op(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    columns: Tensor,
    state: Tensor,
    real: Tensor | None,
    places: Tensor | None,
    lengths: Tensor | None,
    sinks: Tensor | None,
    numbers: Sequence[int],
    names: str,
    scale: float,
) -> Tensor:
    """As an operator, so that a step is one graph. It cannot raise from a graph: where ranks disagree, all get NaN."""
    step = _named(numbers, names, scale)
    padding = None if real is None or places is None or lengths is None else Padding(real, places, lengths)
    call = crc32(f"{numbers[4:]} {names.split(',')[2:]} {scale}".encode())
    out, checksum = run_step(q, CacheView(keys, values, columns, state, padding), sinks, step, call)
    out = out if checksum is None else or_nan(out, checksum, output_shape(q, values, step))
    return torch.where(state[0] <= step.capacity, out, torch.nan)


@decode_op.register_fake
def _(q: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(output_shape(q, values, _named(*rest[-3:])))


def output_shape(q: Tensor, values: Tensor, step: Step) -> tuple[int, ...]:
    """That of a step's output on this rank."""
    heads = q.shape[1]
    for axis in (step.heads, step.tokens) if step.output == "heads" else ():
        part = axis.share_of(heads)
        heads = part.stop - part.start
    return q.shape[0], heads, q.shape[2], values.shape[-1]


def _named(numbers: Sequence[int], names: str, scale: float) -> Step:
    """The step that an operator's schema has carried."""
    heads, tokens, how, output, kernel = names.split(",")
    axes = Axis(numbers[0], numbers[1], group_named(heads)), Axis(numbers[2], numbers[3], group_named(tokens))
    mask = Mask.decode(numbers[7:])
    return Step(*axes, numbers[4], numbers[5], mask, scale, how, output, bool(numbers[6]), kernel)
