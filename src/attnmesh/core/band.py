"""Bands: masks applied to the positions of some queries and keys."""

from dataclasses import dataclass

import torch
from torch import Tensor

from attnmesh.core.mask import Mask


@dataclass(frozen=True)
class Band:
    """A run of key indices per query: query i sees the keys j with `low[i] <= j < high[i]`."""

    low: Tensor
    """(queries,)."""
    high: Tensor
    """(queries,)."""

    @staticmethod
    def of(mask: Mask, q_positions: Tensor, k_positions: Tensor | int) -> "Band":
        """Return the band of a mask over ascending positions. An int n stands for the key positions 0..n-1."""
        first, last = mask.bounds(q_positions)
        if isinstance(k_positions, int):
            return Band(first.clamp(max=k_positions), (last + 1).clamp(0, k_positions))
        return Band(torch.searchsorted(k_positions, first), torch.searchsorted(k_positions, last, right=True))

    def select_heads(self, heads: slice) -> "Band":
        """Return the band of some key heads, which is that of all."""
        return self

    def select_queries(self, start: int, stop: int, key: int) -> "Band":
        """Return the band of the queries from start to stop, with key indices relative to `key`."""
        return Band(self.low[start:stop] - key, self.high[start:stop] - key)

    def within(self, start: int, stop: int) -> "Band":
        """Return the band over the keys from start to stop alone, which count from 0."""
        return Band((self.low - start).clamp(0, stop - start), (self.high - start).clamp(0, stop - start))

    def first(self, keys: int) -> "Band":
        """Return the band over the first `keys` keys alone."""
        return Band(self.low, self.high.clamp(max=keys))

    def visible(self, keys: int) -> Tensor:
        """Return the dense mask, (queries, keys)."""
        index = torch.arange(keys, device=self.low.device)
        return (self.low[:, None] <= index) & (index < self.high[:, None])
