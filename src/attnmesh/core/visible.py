"""What the queries of one device see: a mask of positions, and what narrows it."""

from typing import NamedTuple

from torch import Tensor

from attnmesh.core.mask import Mask
from attnmesh.core.selection import Selection


class Visible(NamedTuple):
    """The keys that each query sees. Positions are 0, 1, 2, ... if they are None."""

    mask: Mask
    q_positions: Tensor | None = None
    k_positions: Tensor | None = None
    key_lengths: Tensor | None = None  # (batch,), real keys of each sequence
    selected: Selection | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Its tensors, which autograd saves and an operator takes."""
        return *self[1:4], None if self.selected is None else self.selected.indices

    @property
    def rule(self) -> tuple[Mask, int]:
        """The rest of it: the mask, and the keys per index."""
        return self.mask, 1 if self.selected is None else self.selected.block

    @staticmethod
    def of(tensors: tuple[Tensor | None, ...], rule: tuple[Mask, int]) -> "Visible":
        """Return what `tensors` and `rule` were taken from."""
        (queries, keys, key_lengths, indices), (mask, block) = tensors, rule
        selected = None if indices is None else Selection(indices, block)
        return Visible(mask, queries, keys, key_lengths, selected)
