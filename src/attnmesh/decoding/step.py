"""A decode step as an operator of PyTorch: the attention to the keys on this rank, and one merge across ranks."""

from collections.abc import Sequence
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from attnmesh.comm.message import PartialMessage, call_checksum, question_like
from attnmesh.comm.p2p import all_to_all_bytes, swap_tokens
from attnmesh.comm.rank_merge import merge_ranks
from attnmesh.comm.shared_memory import DIFFERENT, CallsDifferError
from attnmesh.core.logits import Logits
from attnmesh.core.mask import Mask
from attnmesh.core.partial import Partial, identity, merge_unchecked, sum_dtype, with_sinks
from attnmesh.core.selection import Selection
from attnmesh.core.storage import columns_of
from attnmesh.decoding.runs import RunKernel, Visible, attend_caches
from attnmesh.kernels.blocks import Kernel
from attnmesh.kernels.cache_view import CacheView, DecodeQuery, Padding
from attnmesh.kernels.driver import choose_for_view
from attnmesh.kernels.stacked_merge import copy_into
from attnmesh.kernels.triton import Triton
from attnmesh.kernels.triton_runtime import interpreted
from attnmesh.mesh.axes import Axis, group_named
from attnmesh.runtime.ranges import ATTENTION, is_profiled, named
from attnmesh.runtime.world import cached_per_world, decode_cached


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

    def encode(self) -> tuple[str, list[int]]:
        """Return the step as names and numbers, which the schema of an operator can carry."""
        names = [self.heads.group_name, self.tokens.group_name, self.merge, self.output, self.kernel]
        axes = [self.heads.size, self.heads.index, self.tokens.size, self.tokens.index]
        sizes = [self.block, self.capacity, self.value_dim]
        numbers = [*axes, *sizes, int(self.reproducible), self.index_block or 0, *self.mask.encode()]
        return ",".join([*names, *map(repr, self.logits)]), numbers

    @staticmethod
    def decode(names: str, numbers: Sequence[int]) -> "DecodeStep":
        """Return the step that `encode` wrote."""
        return decode_cached(_decode_step, names, numbers)

    def output_shape(self, q: Tensor) -> tuple[int, ...]:
        """Return the shape of the output on this rank."""
        heads = q.shape[1]
        for axis in (self.heads, self.tokens) if self.output == "heads" else ():
            share = axis.share_of(heads)
            heads = share.stop - share.start
        return q.shape[0], heads, q.shape[2], self.value_dim


@cached_per_world(1024)
def _decode_step(names: str, numbers: tuple[int, ...]) -> DecodeStep:
    heads, tokens, merge, output, kernel, scale, softcap = names.split(",")
    axes = Axis(numbers[0], numbers[1], group_named(heads)), Axis(numbers[2], numbers[3], group_named(tokens))
    block, capacity, value_dim, reproducible, index_block, *mask = numbers[4:]
    logits = Logits(float(scale), float(softcap))
    sizes, wanted = (block, capacity, value_dim), Mask.decode(mask)
    return DecodeStep(*axes, *sizes, wanted, logits, merge, output, bool(reproducible), kernel, index_block or None)


def run_step(
    q: Tensor,
    views: Sequence[CacheView],
    sinks: Tensor | None,
    step: DecodeStep,
    call_number: int,
    key_lengths: Tensor | None = None,
    indices: Tensor | None = None,
    further: Partial | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return this rank's output, and the merged checksum of the call if there are other ranks.

    `views` is the cache of all rows of q, or a cache for each row. `further` is the partial of keys that are not in the
    cache. The output is NaN if the ranks' calls differ. The host reads nothing of a device.
    """
    view, state, heads = views[0], _state_of(views), step.heads.share_of(q.shape[1])
    rank_q, alone, block = q[:, heads], step.tokens.size == 1, step.block if step.reproducible else None
    kernel = choose_for_view(step.kernel if indices is None else "reference", q, view, step.logits.capped)
    shape, dtype = (*rank_q.shape[:-1], view.value_dim), sum_dtype(q.dtype)
    message, checksum, into = None, None, None
    if isinstance(kernel, Triton) and not alone:  # the kernel writes into the message
        form = PartialMessage(shape, dtype, dtype)
        message = form.blank(q.device)
        checksum, into = form.places(message)
    elif isinstance(kernel, Triton) and not step.reproducible:
        into = Partial(q.new_empty(shape), q.new_empty(shape[:-1], dtype=dtype))
    # The first rank adds the sinks; a reproducible step adds them after the merge, on any number of ranks.
    rank_sinks = sinks[heads] if sinks is not None and step.tokens.index == 0 and not step.reproducible else None
    on_device = key_lengths is not None and key_lengths.device.type != "cpu"
    key_lengths = None if key_lengths is None else key_lengths.to(q.device)
    query = DecodeQuery(rank_q, step.mask, step.logits, step.capacity, rank_sinks, block, into, key_lengths)
    some = None if indices is None else selection_of_rank(Selection(indices, step.index_block or 1), step.heads)
    attend = named(ATTENTION, attend_views) if is_profiled() else attend_views
    partial = attend(query, views, kernel, some)
    if further is not None:
        partial = copy_into(merge_unchecked([partial, further]), into)
    if not alone or step.heads.size > 1:
        counted = key_lengths if on_device else None  # else part of the number
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


def highest_checksum(checksum: Tensor, axis: Axis) -> Tensor:
    """Return the maximum of the checksums of all ranks of an axis."""
    try:
        rows = all_to_all_bytes([checksum.view(torch.uint8)] * axis.size, axis)
    except CallsDifferError:  # the ranks that compare their calls wait for this one
        return torch.full_like(checksum, DIFFERENT)
    return rows.view(checksum.dtype).amax(0)


@torch.library.custom_op("attnmesh::decode", mutates_args=())
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
    out, _ = run_step(q, [view], sinks, step, call_number, key_lengths, indices)
    return torch.where(view.state[0] <= step.capacity, out, torch.nan)


@decode_op.register_fake
def _(q: Tensor, *rest: Any) -> Tensor:
    *_, names, numbers = rest
    return q.new_empty(DecodeStep.decode(names, numbers).output_shape(q))


def tensors_of(view: CacheView) -> list[Tensor]:
    """Return a view of a cache as the list of tensors that the operator takes."""
    return [*view[:4], *(view.padding or ())]


def view_of(tensors: Sequence[Tensor], value_dim: int) -> CacheView:
    """Return the view that `tensors_of` took apart."""
    keys, values, token_index, state, *padding = tensors
    return CacheView(keys, values, token_index, state, Padding(*padding) if padding else None, value_dim)


def attend_views(
    query: DecodeQuery, views: Sequence[CacheView], kernel: Kernel, selected: Selection | None = None
) -> Partial:
    """Return the partial over one cache of all rows, or the tokens selected of it, or over a cache for each row."""
    if isinstance(kernel, Triton):
        rows = [query] if len(views) == 1 else map(query.row, range(len(views)))
        parts = [_attend_on_device(row, view, kernel) for row, view in zip(rows, views, strict=True)]
        return parts[0] if len(parts) == 1 else query.into or Partial(*(torch.cat(x) for x in zip(*parts, strict=True)))
    view, q = views[0], query.q
    by_distance = q.shape[-1] != columns_of(view.keys)
    visible = Visible(query.mask, query.key_lengths, selected, query.block, by_distance)
    run_kernel = RunKernel.of(kernel, q, (view.keys, view.values), query.logits, view.value_dim)
    result = attend_caches(q, views, visible, run_kernel, run_kernel.blank(q))
    return copy_into(with_sinks(result, query.sinks), query.into)


def selection_of_rank(selection: Selection, heads: Axis) -> Selection:
    """Return the selection of the heads of a rank, its own where each head has one."""
    return selection.of_heads(heads.share_of(selection.heads)) if selection.heads > 1 else selection


def _state_of(views: Sequence[CacheView]) -> Tensor:
    """Return the lengths of caches as one number, which differs if two of them change places."""
    return sum((row * view.state[:1] for row, view in enumerate(views[1:], 2)), start=views[0].state)


def _attend_on_device(query: DecodeQuery, view: CacheView, kernel: Triton) -> Partial:
    """Return the partial of the programs, which find the runs themselves: one launch for each piece of a cache."""
    if not view.shared:
        return kernel.attend_cache(query, view)
    plain = query._replace(sinks=None, into=None)
    result = merge_unchecked([kernel.attend_cache(plain, part) for part in (*view.shared, view)])
    return copy_into(with_sinks(result, query.sinks), query.into)


def reads_length_on_device(view: CacheView, kernel: str, dtype: torch.dtype) -> bool:
    """Return whether the kernel reads the number of tokens on the device, so that the host does not wait."""
    if view.keys.device.type == "cpu" and not interpreted():  # the common case, and every step comes here
        return False
    return isinstance(choose_for_view(kernel, view.attended(dtype)[0], view), Triton)
