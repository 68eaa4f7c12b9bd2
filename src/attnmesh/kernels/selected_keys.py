"""Attention of each query to the keys that are selected for it.

Some kernels read keys and values in place. Elsewhere they are gathered for a tile of queries, and attended by the
formula (`dense.py`). Tiles have a bounded number of elements, so memory does not grow with queries times selected keys.
Query heads that share a key head share what is gathered. The backward pass gathers too, and adds gradients to the keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.core.mask import Mask
from attnmesh.core.partial import Partial, identity, merge_partials, sum_dtype
from attnmesh.core.scaling import Scaling
from attnmesh.core.selection import Selection
from attnmesh.core.storage import columns_of, storage_of
from attnmesh.kernels.choice import best_kernel
from attnmesh.kernels.dense import attend_dense, backward_dense
from attnmesh.kernels.kernel import Kernel, KernelRequest
from attnmesh.kernels.rectangles import BackwardInputs, Gradients, tile_elements
from attnmesh.runtime.memo import index_on

MAX_PROGRAMS = (1 << 16) - 1
"""Queries times key heads of a launch on a GPU at most: the limit of the third dim of a grid."""


@dataclass(frozen=True)
class SelectedKeys:
    """The selected keys of some queries, among the keys that are here."""

    selection: Selection
    first: Tensor
    """(queries,), first position that each query sees under the mask."""
    last: Tensor
    """(queries,), last position that each query sees under the mask."""
    positions: Tensor | None = None
    """(keys,), ascending positions of the keys that are here, each once; None for 0, 1, 2, ..."""
    key_lengths: Tensor | None = None
    """(batch,), real keys of each sequence."""

    @staticmethod
    def of(
        selection: Selection, mask: Mask, queries: Tensor, keys: Tensor | None, key_lengths: Tensor | None
    ) -> "SelectedKeys":
        """Return the selected keys of queries under a mask. Positions of keys are ascending, and on the CPU."""
        device = selection.indices.device
        first, last = mask.bounds(index_on(queries, device))
        in_order = keys is None or not len(keys) or int(keys[-1]) == len(keys) - 1
        positions = None if keys is None or in_order else index_on(keys, device)
        return SelectedKeys(selection, first, last, positions, None if key_lengths is None else key_lengths.to(device))

    def select_heads(self, heads: slice) -> "SelectedKeys":
        """Return the selected keys of some key heads."""
        return replace(self, selection=self.selection.of_heads(heads))

    def select_queries(self, queries: slice) -> "SelectedKeys":
        """Return the selected keys of some queries."""
        selection = Selection(self.selection.indices[:, :, queries], self.selection.block)
        return replace(self, selection=selection, first=self.first[queries], last=self.last[queries])

    def find(self, sequence: int, head: int, queries: slice, keys: slice, count: int) -> tuple[Tensor, Tensor]:
        """Return where some selected keys of some queries stand among the `count` keys here, and which are hidden."""
        positions = self.selection.positions(self.selection.indices[sequence, head, queries], keys)
        seen = (positions >= self.first[queries, None]) & (positions <= self.last[queries, None])
        if self.key_lengths is not None:
            seen &= positions < self.key_lengths[sequence]
        if self.positions is None:
            slots = positions
            seen &= slots < count
        else:
            slots = torch.searchsorted(self.positions, positions).clamp_(max=count - 1)
            seen &= self.positions[slots] == positions
        if slots.is_cpu:  # seen keys come first, in order of memory, and no more than are seen are read
            slots = slots.masked_fill_(~seen, count).sort(-1).values[:, : int(seen.sum(-1).max())]
            seen = slots < count
        # A seen key is read in place of each hidden one, whose numbers may not be finite.
        seen_slot = slots.masked_fill(~seen, 0).amax(-1, keepdim=True) if slots.numel() else slots
        return torch.where(seen, slots, seen_slot), ~seen


class SelectedTile(NamedTuple):
    """Some queries of a sequence, some key heads, and the keys of these heads that the queries read."""

    sequence: int
    heads: slice
    """Key heads."""
    queries: slice
    indices: Tensor
    """(queries, keys), where each key to read is among all keys."""
    hidden: Tensor
    """(queries, keys), True for keys that the query does not see."""

    def gather(self, x: Tensor) -> Tensor:
        """Return the tile's keys or values, (heads * queries, keys, width)."""
        index = self.indices.flatten()
        heads = x[self.sequence, self.heads]
        gathered = x.new_empty(len(heads), len(index), x.shape[-1])
        for head, into in zip(heads, gathered, strict=True):
            torch.index_select(head, 0, index, out=into)
        return gathered.view(-1, self.indices.shape[1], x.shape[-1])

    def view(self, x: Tensor, kv_heads: int) -> Tensor:
        """Return the tile's part of a tensor of queries as a view, (heads, queries, query heads of a key head, ...)."""
        part: Tensor = x[self.sequence].unflatten(0, (kv_heads, -1))[self.heads, :, self.queries]
        return part.transpose(1, 2)

    def copy_of(self, x: Tensor, kv_heads: int) -> Tensor:
        """Return the part in the dtype of sums, as a copy, (heads * queries, query heads of a key head, width)."""
        part = self.view(x, kv_heads)
        return part.to(sum_dtype(x.dtype)).reshape(-1, part.shape[2], x.shape[-1])

    def merge_into_total(self, part: Partial, total: Partial, kv_heads: int) -> None:
        """Merge the tile's partial, (heads, queries, query heads of a key head, ...), into that of all queries."""
        whole = Partial(self.view(total.out, kv_heads), self.view(total.lse, kv_heads))
        shaped = Partial(part.out.reshape(whole.out.shape), part.lse.reshape(whole.lse.shape))
        for into, merged in zip(whole, merge_partials([whole, shaped]), strict=True):
            into.copy_(merged)

    def mask(self) -> Tensor:
        """Return which keys are hidden, (heads * queries, 1, keys)."""
        return self.hidden.repeat(self.heads.stop - self.heads.start, 1).unsqueeze(1)


def attend_selected(
    q: Tensor, k: Tensor, v: Tensor, selected: SelectedKeys, scaling: Scaling, value_dim: int | None = None
) -> Partial:
    """Return attention over the selected keys, in float32 or wider; empty rows give the identity `(0, -inf)`.

    Keys and values may be in 8 bits, with `value_dim` columns of values.
    """
    width = v.shape[-1] if value_dim is None else value_dim
    total = identity(q, width, sum_dtype(q.dtype))
    numbers = k[..., : columns_of(k)], v[..., :width]  # scales follow in memory
    request = KernelRequest.of(q, *numbers, scaling)._replace(dtype=q.dtype, scattered=True)
    served = min(x.numel() for x in (q, *numbers)) > 0 and k.stride(-1) == v.stride(-1) == 1 and scaling.scale > 0
    if served and (reader := best_kernel(request)) is not None:
        tiles = _tiles(q, k, selected, _sizes_in_place(q, k, width))
        if all(_attend_in_place(reader, q, *numbers, tile, scaling, total) for tile in tiles):
            return total
        total = identity(q, width, sum_dtype(q.dtype))  # begun again: some number is not finite
    for tile in _tiles(q, k, selected, _sizes(q, k, v)):
        keys = _numbers(tile.gather(k), q.dtype)
        values = keys[..., :width] if _is_part(v, k) else _numbers(tile.gather(v), q.dtype)
        out, lse = attend_dense(tile.copy_of(q, k.shape[1]), keys, values, tile.mask(), scaling)
        out.masked_fill_(lse == -torch.inf, 0.0)
        tile.merge_into_total(Partial(out, lse.squeeze(-1)), total, k.shape[1])
    return total


def _attend_in_place(
    reader: Kernel, q: Tensor, k: Tensor, v: Tensor, tile: SelectedTile, scaling: Scaling, total: Partial
) -> bool:
    """Merge the tile's partial into the total. Return False if a number is not finite.

    The queries of the tile are a batch of the kernel, each with its own keys.
    """
    some_q = tile.view(q, k.shape[1]).transpose(0, 1).flatten(1, 2).unsqueeze(2)  # (queries, heads, 1, dim)
    keys, values = (x[tile.sequence, tile.heads].expand(len(some_q), -1, -1, -1) for x in (k, v))
    part = reader.attend_scattered(some_q, keys, values, tile.indices, tile.hidden, scaling)
    if part is None:
        return False
    heads = len(keys[0]), -1
    tile.merge_into_total(Partial(*(x.squeeze(2).unflatten(1, heads).transpose(0, 1) for x in part)), total, k.shape[1])
    return True


def backward_selected(
    q: Tensor, k: Tensor, v: Tensor, inputs: BackwardInputs, selected: SelectedKeys, scaling: Scaling
) -> Gradients:
    """Return the gradients over the selected keys, in float32 or wider. Empty rows have lse +inf and dout 0."""
    # Gradients are added to memory in order: with other strides that takes ten times as long.
    total = Gradients(*(x.new_zeros(x.shape, dtype=sum_dtype(x.dtype)) for x in (q, k, v)))
    kv_heads = k.shape[1]
    delta = (inputs.out.to(sum_dtype(q.dtype)) * inputs.dout).sum(-1, keepdim=True)
    for tile in _tiles(q, k, selected, _sizes(q, k, v)):
        saved_parts = [tile.copy_of(x, kv_heads) for x in (inputs.lse.unsqueeze(-1), inputs.dout, delta)]
        hidden = tile.mask()
        part = backward_dense(tile.copy_of(q, kv_heads), tile.gather(k), tile.gather(v), saved_parts, hidden, scaling)
        nothing = hidden.all(-1, keepdim=True)  # a query that sees no key has gathered any one, with any numbers
        part.q.masked_fill_(nothing, 0.0)
        part.k.masked_fill_(nothing, 0.0)
        into = tile.view(total.q, kv_heads)
        into.add_(part.q.view(into.shape))
        index = tile.indices.flatten()
        for kv_total, kv_part in ((total.k, part.k), (total.v, part.v)):
            by_head = kv_part.view(tile.heads.stop - tile.heads.start, len(index), -1)
            for head, gradients in zip(kv_total[tile.sequence, tile.heads], by_head, strict=True):
                head.index_add_(0, index, gradients)
    return total


def without_faulty(out: Tensor, selected: Selection, length: int | None = None) -> Tensor:
    """Return `out` with NaN where a row of indices is faulty. On a CPU and outside of graphs, rows were checked."""
    if out.is_cpu and not torch.compiler.is_compiling():
        return out
    return nan_where_faulty(out, selected, length)


def nan_where_faulty(out: Tensor, selected: Selection, length: int | Tensor | None) -> Tensor:
    """Return `out` with NaN where a row of indices is faulty, of `length` keys, or of any number if that is None.

    The CPU reads no value of a tensor.
    """
    faulty = selected.faulty(length).repeat_interleave(out.shape[1] // selected.heads, 1)
    return out.masked_fill(faulty.unsqueeze(-1), torch.nan)


def _sizes(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int]:
    """Return the most queries, heads, and queries times heads times keys of a tile whose keys are gathered."""
    most = tile_elements(q.device) // (k.shape[-1] + v.shape[-1] + q.shape[1] // k.shape[1])
    return most, most, max(1, most)


def _sizes_in_place(q: Tensor, k: Tensor, width: int) -> tuple[int, int, int]:
    """Return the most queries, heads, and queries times heads times keys of a tile whose keys are read in place."""
    most = tile_elements(q.device)
    queries = min(most // (q.shape[1] * width), MAX_PROGRAMS // k.shape[1])  # their outputs are no more elements
    # On a GPU indices and their search take memory.
    return queries, k.shape[1], most if q.is_cpu else most // width


def _tiles(q: Tensor, k: Tensor, selected: SelectedKeys, sizes: tuple[int, int, int]) -> Iterator[SelectedTile]:
    """Yield tiles that cover all queries, key heads and selected keys, with keys to read."""
    most_queries, most_heads, most_keys = sizes
    selection = selected.selection
    key_count, shared = selection.indices.shape[-1] * selection.block, k.shape[1] // selection.heads
    keys = min(most_keys, key_count)
    heads = max(1, min(shared, most_heads, most_keys // keys))
    queries = max(1, min(most_queries, most_keys // (keys * heads)))
    for sequence in range(len(q)):
        for group in range(selection.heads):
            for query in range(0, q.shape[2] if k.shape[2] else 0, queries):
                tile_queries = slice(query, min(query + queries, q.shape[2]))
                for key in range(0, key_count, keys):
                    keys_of_tile = slice(key, min(key + keys, key_count))
                    slots, hidden = selected.find(sequence, group, tile_queries, keys_of_tile, k.shape[2])
                    for head in range(group * shared, (group + 1) * shared, heads) if slots.numel() else ():
                        tile_heads = slice(head, min(head + heads, (group + 1) * shared))
                        yield SelectedTile(sequence, tile_heads, tile_queries, slots, hidden)


def _numbers(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return keys or values as numbers."""
    storage = storage_of(x)
    return x if storage is None else storage.dequantize(x, sum_dtype(dtype))


def _is_part(v: Tensor, k: Tensor) -> bool:
    """Return True if values are the first columns of keys, as those of latents."""
    return v.data_ptr() == k.data_ptr() and v.stride() == k.stride() and v.shape[-1] <= k.shape[-1]
