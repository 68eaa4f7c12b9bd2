"""Blocks of a rank's slots that several caches read: the memory that `KVCache.fork` does not copy."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class SharedBlocks(NamedTuple):
    """Whole blocks of slots that several caches read and none writes. One more slot follows, as kernels expect."""

    stored: list[Tensor]
    token_index: Tensor
    places: Tensor | None
    """Position of each token in its sequence, as in `Padding`; None if the batch had no padding."""

    @property
    def used(self) -> int:
        """Number of tokens."""
        return len(self.token_index) - 1

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens in memory: those of one sequence if all sequences read the same."""
        return sum((x[:1] if x.stride(0) == 0 else x)[:, :, :-1].nbytes for x in self.stored)

    def first(self, count: int) -> "SharedBlocks":
        """Return the first tokens."""
        places = None if self.places is None else self.places[:, : count + 1]
        return SharedBlocks([x[:, :, : count + 1] for x in self.stored], self.token_index[: count + 1], places)

    def reordered(self, index: Tensor) -> "SharedBlocks":
        """Return the blocks with sequence `index[b]` in place of b: a view of one sequence, a copy of several."""
        if len(index) == len(self.stored[0]) and bool((index.diff() == 1).all()) and not int(index[0]):
            return self

        def select(x: Tensor) -> Tensor:
            alike = len(x) == 1 or (len(x) > 1 and x.stride(0) == 0)
            return x[:1].expand(len(index), *x.shape[1:]) if alike else x.index_select(0, index)

        places = None if self.places is None else select(self.places)
        return SharedBlocks([*map(select, self.stored)], self.token_index, places)


def prepended(x: Tensor, parts: Sequence[Tensor], dim: int) -> Tensor:
    """Return a tensor of the parts and then x, in memory of its own."""
    return torch.cat([*parts, x], dim)
