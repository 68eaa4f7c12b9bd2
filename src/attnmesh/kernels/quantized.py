"""Attention to keys and values of a cache: plain ones at once, and those stored in 8 bits a tile at a time.

A kernel may read rows in 8 bits itself. For others a tile is read as numbers of float32 or wider, in which stored
values are exact. Partials of tiles merge.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.core.band import Band
from attnmesh.core.partial import Partial, identity, merge_partials, sum_dtype
from attnmesh.core.scaling import Scaling
from attnmesh.core.storage import Storage, columns_of, is_prefix, storage_of
from attnmesh.kernels.driver import KeyCounts, attend_visible
from attnmesh.kernels.kernel import Kernel
from attnmesh.kernels.rectangles import tile_elements
from attnmesh.kernels.selected_keys import SelectedKeys, attend_selected
from attnmesh.kernels.traced import without_autocast

QUANTIZED_TILE_KEYS = 512
"""Keys of a tile. It is the same for any number of heads and ranks, so that the bits of results are too."""


class QuantizedAttention(NamedTuple):
    """Attention to keys and values of a cache, by a kernel and with a scaling."""

    kernel: Kernel
    scaling: Scaling
    value_dim: int

    def with_positions(self, queries: Tensor, keys: Tensor) -> "QuantizedAttention":
        """Return the attention with a bias by distance between queries and keys at these positions."""
        return self._replace(kernel=self.kernel.with_positions(queries, keys))

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, band: Band | None, counts: KeyCounts = None) -> Partial:
        """Return the partial of the band, as `attend_visible` does. That of rows in 8 bits is in float32 or wider."""
        storage = storage_of(keys)
        if storage is None:
            return attend_visible(self.kernel, q, keys, values, band, self.scaling, counts)
        if (launched := self._launch(q, keys, values, band, counts)) is not None:
            return launched
        q = q.to(sum_dtype(q.dtype))
        elements = keys.shape[1] * min(QUANTIZED_TILE_KEYS, keys.shape[2]) * (columns_of(keys) + self.value_dim)
        most = max(1, tile_elements(q.device) // max(1, elements))
        total = identity(q, self.value_dim, q.dtype)
        for start in range(0, len(q), most):
            some = slice(start, start + most)
            part = self._attend_tiles(q[some], keys[some], values[some], band, counts and counts[some])
            for into, x in zip(total, part, strict=True):
                into[some] = x
        return total

    def attend_selected(self, q: Tensor, keys: Tensor, values: Tensor, selected: SelectedKeys) -> Partial:
        """Return the partial of selected keys, in float32 or wider for rows in 8 bits."""
        q = q if storage_of(keys) is None else q.to(sum_dtype(q.dtype))
        with without_autocast(q):
            return attend_selected(q, keys, values, selected, self.scaling, self.value_dim)

    def _launch(self, q: Tensor, keys: Tensor, values: Tensor, band: Band | None, counts: KeyCounts) -> Partial | None:
        """Return the partial of the kernel's launch, or None if it does not serve or a number is not finite."""
        if counts:
            assert band is not None
            sequences = [slice(index, index + 1) for index in range(len(q))]
            partials = [
                self._launch(q[x], keys[x], values[x], band.first(count), None)
                for x, count in zip(sequences, counts, strict=True)
            ]
            complete = [part for part in partials if part is not None]
            return Partial(*map(torch.cat, zip(*complete, strict=True))) if len(complete) == len(partials) else None
        numbers = keys[..., : columns_of(keys)], values[..., : self.value_dim]
        bound = self.kernel.bind(q, *numbers, self.scaling) if self.kernel.reads_8_bits else None
        if bound is None:
            return None
        q = q if q.stride(-1) == 1 else q.contiguous()
        into = bound.blank()
        bounds = band and Band(band.low.contiguous(), band.high.contiguous())
        return into if bound.attend(q, *numbers, into, bounds) else None

    def _attend_tiles(self, q: Tensor, keys: Tensor, values: Tensor, band: Band | None, counts: KeyCounts) -> Partial:
        """Return the merge of the partials of tiles of keys."""
        total = None
        storage = storage_of(keys)
        assert storage is not None
        for start in range(0, keys.shape[2], QUANTIZED_TILE_KEYS):
            stop = min(start + QUANTIZED_TILE_KEYS, keys.shape[2])
            inside = None
            if band is not None:
                inside = band.within(start, stop)
                if not bool((inside.low < inside.high).any()):
                    continue
            tile = _read(storage, keys[:, :, start:stop], values[:, :, start:stop], q.dtype, self.value_dim)
            tile_counts = counts and [min(max(count - start, 0), stop - start) for count in counts]
            part = attend_visible(self.kernel, q, *tile, inside, self.scaling, tile_counts)
            total = part if total is None else merge_partials([total, part])
        return identity(q, self.value_dim, q.dtype) if total is None else total


def _read(storage: Storage, keys: Tensor, values: Tensor, dtype: torch.dtype, value_dim: int) -> tuple[Tensor, Tensor]:
    """Return the numbers of rows; values that are the rows of keys are a prefix of them."""
    read = storage.dequantize(keys, dtype)
    return read, read[..., :value_dim] if is_prefix(values, keys) else storage.dequantize(values, dtype)
