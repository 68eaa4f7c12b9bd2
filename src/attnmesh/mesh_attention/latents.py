"""Multi-head latent attention: one latent per token, from which every head's key and value are projected.

A latent is a row `[c, r]`: `latent_width` columns to project, and rotated columns that all heads share. Head h has the
key `[K_h c, r]` and the value `V_h c`. So a query `[p, s]` has the logit `p.K_h c + s.r = [K_h' p, s].[c, r]`.
Attention of the *absorbed* query `[K_h' p, s]` over latents gives a sum of `c`, which `V_h` projects to the output.

Absorbed queries suit decoding: they read one latent per token instead of a key and a value per head. With many queries
expanded keys take less work, for they are narrower.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.core.partial import Partial, sum_dtype
from attnmesh.core.scaling import Scaling
from attnmesh.cost.exchange_cost import EXPANDED_BYTES
from attnmesh.kernels.driver import KeyCounts, VisibleKeys, attend_visible
from attnmesh.kernels.kernel import Kernel
from attnmesh.kernels.selected_keys import SelectedKeys


@dataclass(frozen=True)
class Projection:
    """Matrices that project latents to keys and values."""

    keys: Tensor
    """(heads, key columns without the rotated ones, rank)."""
    values: Tensor
    """(heads, value columns, rank)."""

    @property
    def latent_width(self) -> int:
        """Columns of a latent that are projected."""
        return self.keys.shape[2]

    @property
    def value_dim(self) -> int:
        """Columns of a value."""
        return self.values.shape[1]

    def to(self, dtype: torch.dtype) -> "Projection":
        """Return the matrices in another dtype."""
        return Projection(self.keys.to(dtype), self.values.to(dtype))

    def absorb(self, q: Tensor) -> Tensor:
        """Return queries of latents, (batch, heads, length, rank + rotated columns)."""
        plain, rotated = q.tensor_split([self.keys.shape[1]], dim=-1)
        return torch.cat((torch.einsum("bhnd,hdl->bhnl", plain, self.keys), rotated), -1)

    def project(self, out: Tensor) -> Tensor:
        """Return values from sums of latents, (batch, heads, length, value columns)."""
        return torch.einsum("bhnl,hdl->bhnd", out, self.values)

    def expand(self, latents: Tensor, heads: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Return keys and values of some heads from latents, (batch, 1, tokens, rank + rotated columns)."""
        plain, rotated = latents[:, 0].tensor_split([self.latent_width], dim=-1)
        k, v = (torch.einsum("bnl,hdl->bhnd", plain, matrix[heads]) for matrix in (self.keys, self.values))
        return torch.cat((k, rotated.unsqueeze(1).expand(-1, k.shape[1], -1, -1)), -1), v

    def attend(
        self,
        kernel: Kernel,
        q: Tensor,
        latents: Tensor,
        visible_keys: VisibleKeys,
        scaling: Scaling,
        counts: KeyCounts = None,
    ) -> Partial:
        """Return attention over latents. Those of a band are expanded for a few heads at a time, selected ones not."""
        if isinstance(visible_keys, SelectedKeys):
            return self._attend_selected(kernel, q, latents, visible_keys, scaling)
        parts = []
        for heads in self._groups(q, latents):
            parts.append(
                attend_visible(kernel, q[:, heads], *self.expand(latents, heads), visible_keys, scaling, counts)
            )
        return Partial(*(torch.cat(x, 1) for x in zip(*parts, strict=True)))

    def _attend_selected(
        self, kernel: Kernel, q: Tensor, latents: Tensor, selected: SelectedKeys, scaling: Scaling
    ) -> Partial:
        """Return attention over selected latents, read once for all heads, by a few absorbed queries at a time."""
        parts = []
        per_query = q.shape[0] * q.shape[1] * (latents.shape[3] + self.latent_width) * sum_dtype(q.dtype).itemsize
        size = max(1, EXPANDED_BYTES // max(1, per_query))
        for start in range(0, max(1, q.shape[2]), size):
            queries = slice(start, start + size)
            absorbed = self.absorb(q[:, :, queries])
            keys = selected.select_queries(queries)
            values = latents[..., : self.latent_width]
            out, lse = attend_visible(kernel, absorbed, latents, values, keys, scaling)
            parts.append(Partial(self.to(out.dtype).project(out), lse))
        return Partial(*(torch.cat(x, 2) for x in zip(*parts, strict=True)))

    def _groups(self, q: Tensor, latents: Tensor) -> Iterator[slice]:
        """Yield slices of the heads whose keys and values are expanded together."""
        per_head = latents.shape[0] * latents.shape[2] * (q.shape[3] + self.value_dim) * latents.element_size()
        size = max(1, EXPANDED_BYTES // max(1, per_head))
        for start in range(0, q.shape[1], size):
            yield slice(start, start + size)


class LatentWidths(NamedTuple):
    """Columns of a latent."""

    projected: int
    """Columns that are projected to keys and values."""
    rotated: int
    """Columns that all heads share in their keys."""


class Latents(NamedTuple):
    """Latents of some tokens, and their projection."""

    rows: Tensor
    """(batch, 1, tokens, rank + rotated columns)."""
    projection: Projection

    @property
    def widths(self) -> LatentWidths:
        """Columns that are projected, and rotated ones."""
        projected = self.projection.latent_width
        return LatentWidths(projected, self.rows.shape[3] - projected)
