"""Selections: the keys that each query attends, of those that its mask lets it see, as indices.

A selection is a set, and attention over disjoint sets merges. So a rank that holds some of the keys attends to those of
a selection that it holds, and the partials of all ranks merge to attention over the selection.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.core.mask import Mask
from attnmesh.errors import ShapeError, checked_count

NO_INDEX = 2**31 - 1
"""Index that selects nothing, after those of all tokens."""

MAX_INDEX_KEYS = 1 << 16
"""Keys of an index at most: time grows with indices times keys."""

INDICES_AT_ONCE = 1 << 22
"""Indices that are looked at together. More take more memory, fewer more launches."""


@dataclass(frozen=True, eq=False)
class Selection:
    """The keys that each query attends, by index: keys of the whole sequence, or blocks of them.

    Args:
        indices: int32, (batch, 1 or key heads, queries, k), each once in a row. 2^31 - 1 selects nothing.
        block: Keys per index: index i selects the keys from `i * block` up to `(i + 1) * block`.

    Raises:
        ShapeError: If `block` is not a whole number from 1 to 65,536.

    >>> import attnmesh as am
    >>> q, k, v = torch.randn(3, 1, 2, 4, 8).unbind()
    >>> last_two = am.Selection(torch.tensor([2, 3], dtype=torch.int32).expand(1, 1, 4, 2))
    >>> out = am.attend(q, k, v, selected=last_two).out
    >>> torch.allclose(out, am.attend(q, k[:, :, 2:], v[:, :, 2:]).out, atol=1e-6)
    True
    """

    indices: Tensor
    block: int = 1

    def __post_init__(self) -> None:
        fix = "count the keys of an index as a Python int"
        object.__setattr__(self, "block", checked_count("Selection block", self.block, fix))
        if self.block > MAX_INDEX_KEYS:
            expected = f"at most {MAX_INDEX_KEYS} keys an index"
            raise ShapeError("Selection block", expected, f"{self.block}", "select smaller blocks")

    @property
    def heads(self) -> int:
        """Key heads with a selection of their own; 1 if all share one."""
        return self.indices.shape[1]

    def of_heads(self, heads: slice) -> "Selection":
        """Return the selection of some key heads."""
        return self if self.heads == 1 else Selection(self.indices[:, heads], self.block)

    def of_queries(self, queries: Tensor) -> "Selection":
        """Return the selection of some queries."""
        return Selection(self.indices.index_select(2, queries), self.block)

    def positions(self, rows: Tensor, keys: slice) -> Tensor:
        """Return the positions of some of the keys that rows of indices select, or -1 for none: (..., keys)."""
        if self.block == 1:
            indices = rows[..., keys].long()
            return indices.masked_fill(indices == NO_INDEX, -1)
        key = torch.arange(keys.start, keys.stop, device=rows.device)
        indices = rows.index_select(-1, key // self.block).long()
        return (indices * self.block + key % self.block).masked_fill(indices == NO_INDEX, -1)

    def highest(self) -> int:
        """Return the highest index, or -1 if nothing is selected."""
        parts = (int(rows.masked_fill(rows == NO_INDEX, -1).max()) for rows in self._parts())
        return max(parts, default=-1)

    def faulty(self, length: int | Tensor | None) -> Tensor:
        """Return which rows have an index twice, below 0, or beyond the last of `length` keys: (batch, heads, queries).

        A `length` of None is for any number of keys. Memory does not grow with the selection.
        """
        blocks = NO_INDEX if length is None else -(-length // self.block)
        flags = []
        for rows in self._parts():
            ordered = rows.sort(-1).values
            beyond = ordered >= blocks
            twice = (ordered[..., 1:] == ordered[..., :-1]) & ~beyond[..., 1:]
            flags.append(twice.any(-1) | (ordered[..., 0] < 0) | (beyond & (ordered != NO_INDEX)).any(-1))
        shape = self.indices.shape[:-1]
        return torch.cat(flags).view(shape) if flags else self.indices.new_zeros(shape, dtype=torch.bool)

    def _parts(self) -> Iterator[Tensor]:
        """Yield the rows of indices, (rows, k), a few at a time."""
        size = self.indices.shape[-1]
        if self.indices.numel():
            yield from self.indices.reshape(-1, size).split(max(1, INDICES_AT_ONCE // size))


class Visible(NamedTuple):
    """The keys that each query sees. Positions are 0, 1, 2, ... if they are None."""

    mask: Mask
    q_positions: Tensor | None = None
    k_positions: Tensor | None = None
    key_lengths: Tensor | None = None
    """(batch,), real keys of each sequence."""
    selected: Selection | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Tensors of positions, lengths and indices, which autograd saves and an operator takes."""
        indices = None if self.selected is None else self.selected.indices
        return self.q_positions, self.k_positions, self.key_lengths, indices

    @property
    def mask_and_block(self) -> tuple[Mask, int]:
        """The mask, and the keys per index: what `tensors` leaves out."""
        return self.mask, 1 if self.selected is None else self.selected.block

    @staticmethod
    def of(tensors: tuple[Tensor | None, ...], mask_and_block: tuple[Mask, int]) -> "Visible":
        """Return what `tensors` and `mask_and_block` were taken from."""
        queries, keys, key_lengths, indices = tensors
        mask, block = mask_and_block
        selected = None if indices is None else Selection(indices, block)
        return Visible(mask, q_positions=queries, k_positions=keys, key_lengths=key_lengths, selected=selected)
