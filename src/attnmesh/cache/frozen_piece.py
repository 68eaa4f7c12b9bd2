"""A piece of a rank's slots to which nothing is written any more: it may be shared with a fork, or be a file."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.core.storage import empty_rows
from attnmesh.runtime.mapped_file import MappedFile
from attnmesh.runtime.memory import with_huge_pages


class FrozenPiece(NamedTuple):
    """Slots of consecutive tokens of a rank, which no cache writes to. One more slot follows, as kernels expect."""

    kv_tensors: list[Tensor]
    token_index: Tensor
    positions: Tensor | None
    """Position of each token in its sequence, as in `Padding`; None if the batch had no padding."""
    file: MappedFile | None = None
    """File whose bytes these are; None if they are memory of this process alone."""

    @property
    def token_count(self) -> int:
        """Number of tokens."""
        return len(self.token_index) - 1

    @property
    def indices(self) -> Tensor:
        """Index of each token."""
        return self.token_index[:-1]

    @property
    def rows(self) -> list[Tensor]:
        """Keys, and values if they are separate, of the tokens."""
        return [x[:, :, :-1] for x in self.kv_tensors]

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens in memory: those of one sequence if all sequences read the same."""
        return sum((x[:1] if x.stride(0) == 0 else x).nbytes for x in self.rows)

    def part(self, start: int, stop: int) -> "FrozenPiece":
        """Return the tokens from `start` up to `stop`."""
        positions = None if self.positions is None else self.positions[:, start : stop + 1]
        kv_tensors = [x[:, :, start : stop + 1] for x in self.kv_tensors]
        return FrozenPiece(kv_tensors, self.token_index[start : stop + 1], positions, self.file)

    def reordered(self, index: Tensor, block: int) -> "FrozenPiece":
        """Return the piece with sequence `index[b]` in place of b: a view of one sequence, a copy of several.

        A copy has whole blocks of slots in memory, for `KVCache.pages`.
        """
        if len(index) == len(self.kv_tensors[0]) and bool((index.diff() == 1).all()) and not int(index[0]):
            return self

        slots = len(self.token_index)

        def select(x: Tensor, dim: int) -> Tensor:
            if len(x) == 1 or x.stride(0) == 0:
                return x[:1].expand(len(index), *x.shape[1:])
            return join_slots([x.index_select(0, index)], dim, -(-slots // block) * block).narrow(dim, 0, slots)

        positions = None if self.positions is None else select(self.positions, 1)
        return FrozenPiece([select(x, 2) for x in self.kv_tensors], self.token_index, positions, self.file)


def join_slots(parts: Sequence[Tensor], dim: int, slots: int) -> Tensor:
    """Return memory of `slots` slots along `dim`, of which the first are those of the parts."""
    shape = [*parts[0].shape]
    used = sum(part.shape[dim] for part in parts)
    shape[dim] = slots
    new = with_huge_pages(empty_rows(shape, parts[0].dtype, parts[0].device), dim)
    torch.cat([*parts], dim, out=new.narrow(dim, 0, used))
    return new
