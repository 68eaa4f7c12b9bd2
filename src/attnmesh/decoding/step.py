"""A decode step as an operator of PyTorch: the attention to the keys on this rank, and one merge across ranks."""

from collections.abc import Sequence
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from attnmesh.comm.message import PartialMessage, call_checksum, question_like
from attnmesh.comm.p2p import swap_tokens
from attnmesh.comm.rank_merge import highest_checksum, merge_ranks
from attnmesh.core.band import Band
from attnmesh.core.logits import Logits
from attnmesh.core.mask import Mask
from attnmesh.core.partial import Partial, identity, merge_unchecked, sum_dtype, with_sinks
from attnmesh.core.selection import Selection
from attnmesh.core.storage import columns_of
from attnmesh.decoding.selected_tokens import attend_selected, selection_of_rank
from attnmesh.kernels.blocks import Kernel, Need
from attnmesh.kernels.cache_view import CacheView, DecodeQuery, Padding
from attnmesh.kernels.choice import choose
from attnmesh.kernels.driver import visible_counts
from attnmesh.kernels.stacked_merge import by_residue, copy_into, merge_along_tree
from attnmesh.kernels.stored import CacheKernel
from attnmesh.kernels.triton_runtime import interpreted
from attnmesh.mesh.axes import Axis, group_named
from attnmesh.runtime.operators import operator
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
    kernel = choose(Need.of_cache(q, view, step.logits), step.kernel if indices is None else "reference")
    shape, dtype = (*rank_q.shape[:-1], view.value_dim), sum_dtype(q.dtype)
    message, checksum, into = None, None, None
    if kernel.reads_cache and not alone:  # the kernel writes into the message
        form = PartialMessage(shape, dtype, dtype)
        message = form.blank(q.device)
        checksum, into = form.places(message)
    elif kernel.reads_cache and not step.reproducible:
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
    out, _ = run_step(q, [view], sinks, step, call_number, key_lengths, indices)
    return torch.where(view.state[0] <= step.capacity, out, torch.nan)


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
    if selected is not None:
        return attend_selected(query, views[0], selected, kernel)
    if len(views) == 1:
        return attend_cache(query, views[0], kernel)
    rows = [attend_cache(query.row(number), view, kernel) for number, view in enumerate(views)]
    return query.into or Partial(*(torch.cat(x) for x in zip(*rows, strict=True)))


def _state_of(views: Sequence[CacheView]) -> Tensor:
    """Return the lengths of caches as one number, which differs if two of them change places."""
    return sum((row * view.state[:1] for row, view in enumerate(views[1:], 2)), start=views[0].state)


def attend_cache(query: DecodeQuery, view: CacheView, kernel: Kernel) -> Partial:
    """Return the partial in float32 or wider, written to `query.into` if that is given."""
    if not kernel.reads_cache:
        run = CacheKernel(kernel, query.logits, view.value_dim)
        result = _merge_blocks([_attend_tokens(run, query, part) for part in (*view.shared, view)], query)
    elif view.shared:
        plain = query._replace(sinks=None, into=None)
        result = merge_unchecked([kernel.attend_cache(plain, part) for part in (*view.shared, view)])
    else:
        return kernel.attend_cache(query, view)
    return copy_into(with_sinks(result, query.sinks), query.into)


def _merge_blocks(stacks: Sequence[Partial], query: DecodeQuery) -> Partial:
    """Return the merge of the parts of a cache: along the tree over blocks, if each part is a stack of blocks."""
    if query.block is None:
        return stacks[0] if len(stacks) == 1 else merge_unchecked(stacks)
    out, lse = (torch.cat(x) for x in zip(*stacks, strict=True))
    return merge_along_tree(Partial(out, lse)) if len(lse) else identity(query.q, out.shape[-1], lse.dtype)


def reads_length_on_device(view: CacheView, kernel: str, dtype: torch.dtype) -> bool:
    """Return whether the kernel reads the number of tokens on the device, so that the host does not wait."""
    if view.keys.device.type == "cpu" and not interpreted():  # the common case, and every step comes here
        return False
    need = Need.of_cache(view.attended(dtype)[0], view, Logits(1.0))
    return choose(need, kernel).reads_cache


def _attend_tokens(run: CacheKernel, query: DecodeQuery, view: CacheView) -> Partial:
    """Return the partial of a kernel that takes the number of tokens from the host; with `block` a stack of them."""
    q, mask, block = query.q, query.mask, query.block
    length, used, *forgotten = view.state.tolist()
    keys, values = (x.narrow(2, 0, used) for x in (view.keys, view.values))
    if view.padding is not None:
        return _attend_padded(run, query, keys, values, view.padding, length)
    if not used and block is None:
        return identity(q, run.value_dim, sum_dtype(q.dtype))
    sees_all = mask.left >= length - 1 and mask.longest >= length and query.key_lengths is None
    if sees_all and q.shape[2] == 1 and block is None and q.shape[-1] == columns_of(keys):
        return _widen(run(q, keys, values, None))
    queries, whole = torch.arange(length - q.shape[2], length), used == length
    own_positions = torch.arange(used) if whole else view.token_index[:used].cpu()
    run, band = run.at(q, keys, (queries, own_positions)), Band.of(mask, queries, used if whole else own_positions)
    if block is not None:
        return _attend_blocks(run, q, keys, values, band, block, *forgotten)
    return _widen(run(q, keys, values, band, counts=visible_counts(own_positions, query.key_lengths)))


def _attend_padded(
    run: CacheKernel, query: DecodeQuery, keys: Tensor, values: Tensor, padding: Padding, length: int
) -> Partial:
    """Attend each sequence by itself. Padding cuts its keys into runs, mostly one, with positions of their own."""
    q, lengths = query.q, query.key_lengths
    token_mask, q_positions = padding.last(torch.arange(length - q.shape[2], length, device=q.device))
    q_positions, partials = q_positions.cpu(), list[Partial]()
    for row in range(q.shape[0]):
        only, k_positions = slice(row, row + 1), padding.places[row, : keys.shape[2]].cpu()
        total = identity(q[only], run.value_dim, sum_dtype(q.dtype))
        for start, stop in _runs(k_positions >= 0):
            band = Band.of(query.mask, q_positions[row], k_positions[start:stop])
            counts = None if lengths is None else visible_counts(k_positions[start:stop], lengths[only])
            some_keys, some_values = (x[only, :, start:stop] for x in (keys, values))
            here = run.at(q, some_keys, (q_positions[row], k_positions[start:stop]))
            total = merge_unchecked([total, _widen(here(q[only], some_keys, some_values, band, counts=counts))])
        partials.append(total)
    out, lse = (torch.cat(x) for x in zip(*partials, strict=True))
    blind = ~token_mask[:, None]
    return Partial(out.masked_fill(blind.unsqueeze(-1), 0.0), lse.masked_fill(blind, -torch.inf))


def _runs(flags: Tensor) -> list[tuple[int, int]]:
    """Return (start, stop) of each run of True."""
    edges = torch.nn.functional.pad(flags.long(), (1, 1)).diff().nonzero().flatten().tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _attend_blocks(
    run: CacheKernel, q: Tensor, keys: Tensor, values: Tensor, band: Band, block: int, forgotten: int = 0
) -> Partial:
    """Return a stack of one partial per block. Blocks that every row sees whole take one call."""
    used, rows = keys.shape[2], q.shape[2]
    count = -(-used // block)
    out = q.new_zeros((count, *q.shape[:-1], run.value_dim), dtype=sum_dtype(q.dtype))
    lse = q.new_full((count, *q.shape[:-1]), -torch.inf, dtype=sum_dtype(q.dtype))
    first, last = -(-int(band.low[-1]) // block), int(band.high[0]) // block
    whole = range(first, max(first, last))
    full = Band(torch.zeros(rows, dtype=torch.long), torch.full((rows,), block))
    for row in range(q.shape[0] if whole else 0):
        # A view: (blocks, heads, tokens of a block, dim). One call for all sequences would have to copy the keys.
        some_keys, some_values = (
            x[row, :, first * block : last * block].unflatten(1, (-1, block)).transpose(0, 1) for x in (keys, values)
        )
        row_q = q[row].expand(len(whole), *q.shape[1:])
        out[first:last, row], lse[first:last, row] = run(row_q, some_keys, some_values, full)
    for number in set(range(int(band.low[0]) // block, min(count, -(-int(band.high[-1]) // block)))) - set(whole):
        start, stop = number * block, min(used, (number + 1) * block)
        inside = Band(*((bound - start).clamp(0, stop - start) for bound in (band.low, band.high)))
        out[number], lse[number] = run(q, keys[:, :, start:stop], values[:, :, start:stop], inside)
    partials = Partial(out, lse)
    return by_residue(partials, forgotten) if forgotten and count else partials


def _widen(partial: Partial) -> Partial:
    return Partial(partial.out.to(partial.lse.dtype), partial.lse)
