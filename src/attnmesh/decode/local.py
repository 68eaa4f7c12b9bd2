"""The local part of a decode step: the partial of the last queries over the keys on this rank."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from attnmesh.core.mask import Band, Mask
from attnmesh.core.partial import Partial, join, wide, with_sinks
from attnmesh.kernels.cache_view import CacheView, DecodeQuery, Padding
from attnmesh.kernels.driver import CacheKernel, Kernel, forward, identity
from attnmesh.kernels.merge import copied, merged_along_tree
from attnmesh.kernels.select import choose_for_cache
from attnmesh.kernels.triton_runtime import interpreted

Run = Callable[..., Partial]
"""A kernel at a scale: (q, keys, values, band) -> the partial."""


def attend_cache(query: DecodeQuery, view: CacheView, kernel: Kernel) -> Partial:
    """Return the partial in float32 or wider, written to `query.into` if that is given."""
    if isinstance(kernel, CacheKernel):
        return kernel.attend_cache(query, view)
    run = partial(forward, kernel, scale=query.scale)
    found = _by_lengths(run, query.q, view, query.mask, query.block)
    return copied(with_sinks(found, query.sinks), query.into)


def on_device(q: Tensor, view: CacheView, kernel: str) -> bool:
    """Return whether the kernel reads the number of tokens on the device, so that the host does not wait."""
    if q.device.type == "cpu" and not interpreted():  # the common case, and every step comes here
        return False
    return isinstance(choose_for_cache(kernel, q, view.keys, view.values), CacheKernel)


def _by_lengths(run: Run, q: Tensor, view: CacheView, mask: Mask, block: int | None) -> Partial:
    """Return the partial of a kernel that takes the number of tokens from the host."""
    length, used = view.state.tolist()
    keys, values = (x.narrow(2, 0, used) for x in (view.keys, view.values))
    positions = torch.arange(length - q.shape[2], length)
    if view.padding is not None:
        return _padded(run, q, keys, values, view.padding, length, mask)
    if q.shape[2] == 1 and mask.left >= length - 1 and mask.longest >= length and block is None:
        return _widened(run(q, keys, values, None if used else Band.of(mask, positions, 0)))
    band = Band.of(mask, positions, used if used == length else view.token_index[:used].cpu())
    if block is not None:
        return _by_blocks(run, q, keys, values, band, block)
    return _widened(run(q, keys, values, band))


def _padded(run: Run, q: Tensor, keys: Tensor, values: Tensor, padding: Padding, length: int, mask: Mask) -> Partial:
    """Attend each sequence by itself. Padding cuts its keys into runs, mostly one, with positions of their own."""
    token_mask, places = padding.last(torch.arange(length - q.shape[2], length, device=q.device))
    places = places.cpu()
    parts = []
    for row in range(q.shape[0]):
        only, own = slice(row, row + 1), padding.places[row, : keys.shape[2]].cpu()
        total = identity(q[only], values[only], wide(q.dtype))
        for start, stop in _runs(own >= 0):
            band = Band.of(mask, places[row], own[start:stop])
            total = join([total, _widened(run(q[only], keys[only, :, start:stop], values[only, :, start:stop], band))])
        parts.append(total)
    out, lse = (torch.cat(x) for x in zip(*parts, strict=True))
    blind = ~token_mask[:, None]
    return Partial(out.masked_fill(blind.unsqueeze(-1), 0.0), lse.masked_fill(blind, -torch.inf))


def _runs(flags: Tensor) -> list[tuple[int, int]]:
    """Return (start, stop) of each run of True."""
    edges = torch.nn.functional.pad(flags.long(), (1, 1)).diff().nonzero().flatten().tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _by_blocks(run: Run, q: Tensor, keys: Tensor, values: Tensor, band: Band, block: int) -> Partial:
    """Return the merge, along the tree, of one partial per block. Blocks that every row sees whole take one call."""
    used, rows = keys.shape[2], q.shape[2]
    count = -(-used // block)
    out = q.new_zeros((count, *q.shape[:-1], values.shape[-1]), dtype=wide(q.dtype))
    lse = q.new_full((count, *q.shape[:-1]), -torch.inf, dtype=wide(q.dtype))
    first, last = -(-int(band.low[-1]) // block), int(band.high[0]) // block
    whole = range(first, max(first, last))
    full = Band(torch.zeros(rows, dtype=torch.long), torch.full((rows,), block))
    for row in range(q.shape[0] if whole else 0):
        # A view: (blocks, heads, tokens of a block, dim). One call for all sequences would have to copy the keys.
        blocks = (
            x[row, :, first * block : last * block].unflatten(1, (-1, block)).transpose(0, 1) for x in (keys, values)
        )
        own = q[row].expand(len(whole), *q.shape[1:])
        out[first:last, row], lse[first:last, row] = run(own, *blocks, full)
    for number in set(range(int(band.low[0]) // block, min(count, -(-int(band.high[-1]) // block)))) - set(whole):
        start, stop = number * block, min(used, (number + 1) * block)
        inside = Band(*((bound - start).clamp(0, stop - start) for bound in (band.low, band.high)))
        out[number], lse[number] = run(q, keys[:, :, start:stop], values[:, :, start:stop], inside)
    return merged_along_tree(Partial(out, lse)) if count else identity(q, values, wide(q.dtype))


def _widened(partial: Partial) -> Partial:
    return Partial(partial.out.to(partial.lse.dtype), partial.lse)
