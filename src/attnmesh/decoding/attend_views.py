"""Attention of a step of decoding to the keys on this rank: of a cache, of a cache for each row, or of some of one."""

from collections.abc import Sequence

import torch
from torch import Tensor

from attnmesh.core.band import Band
from attnmesh.core.logits import Logits
from attnmesh.core.partial import Partial, identity, merge_unchecked, sum_dtype, with_sinks
from attnmesh.core.selection import Selection
from attnmesh.core.storage import columns_of
from attnmesh.decoding.decode_step import DecodeStep
from attnmesh.decoding.selected_tokens import attend_selection
from attnmesh.kernels.blocks import CacheLaunch, Kernel, Need
from attnmesh.kernels.cache_view import CacheView, DecodeQuery, Padding
from attnmesh.kernels.choice import choose
from attnmesh.kernels.driver import visible_counts
from attnmesh.kernels.stacked_merge import by_residue, copy_into, merge_along_tree
from attnmesh.kernels.stored import CacheKernel
from attnmesh.kernels.triton_runtime import interpreted


def chosen_kernel(q: Tensor, view: CacheView, step: DecodeStep) -> Kernel:
    """Return the kernel of a step. That of selected tokens is the reference."""
    return choose(Need.of_cache(q, view, step.logits), step.kernel if step.index_block is None else "reference")


def attend_views(
    query: DecodeQuery, views: Sequence[CacheView], kernel: CacheLaunch, selected: Selection | None = None
) -> Partial:
    """Return the partial over one cache of all rows, or the tokens selected of it, or over a cache for each row."""
    if selected is not None and isinstance(kernel, Kernel):
        return attend_selection(query, views[0], selected, kernel)
    if len(views) == 1:
        return attend_cache(query, views[0], kernel)
    rows = [attend_cache(query.row(number), view, kernel) for number, view in enumerate(views)]
    return query.into or Partial(*(torch.cat(x) for x in zip(*rows, strict=True)))


def attend_cache(query: DecodeQuery, view: CacheView, kernel: CacheLaunch) -> Partial:
    """Return the partial in float32 or wider, written to `query.into` if that is given."""
    if isinstance(kernel, Kernel) and not kernel.reads_cache:
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
