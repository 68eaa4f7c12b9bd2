"""A rank's part of a cache as tensors on its device, and the padding of a batch.

Kernels attend to this view without asking the host how many tokens it holds.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnmesh.core.mask import Mask
from attnmesh.core.partial import Partial


class Padding(NamedTuple):
    """Tensors that are written to as the cache grows."""

    token_mask: Tensor  # (batch, capacity), of all tokens, on every rank
    places: Tensor  # (batch, slots), each slot's place in its own sequence, -1 for padding
    lengths: Tensor  # (batch,), real tokens of each sequence

    @staticmethod
    def none(batch: int, capacity: int, columns: Tensor, length: Tensor) -> "Padding":
        """As if all tokens so far were real; `columns` says which token is in which slot."""
        with torch.inference_mode(False):  # tensors that can be written to in any mode
            everything = torch.ones(batch, capacity, dtype=torch.bool, device=columns.device)
            return Padding(everything, columns.expand(batch, -1).clone(), length.expand(batch).clone())

    def add(self, start: Tensor, real: Tensor, new: Tensor, slots: Tensor) -> None:
        """The tokens from `start` on that are real; of these tokens `new` are in `slots`."""
        where = start + torch.arange(real.shape[1], device=real.device)
        self.token_mask.index_copy_(1, where, real)
        places = torch.where(real, self.lengths[:, None] + real.cumsum(1) - 1, -1)
        self.places.index_copy_(1, slots, places.index_select(1, new))
        self.lengths.add_(real.sum(1))

    def last(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Which of these last tokens are real, and each one's place in its own sequence."""
        real = self.token_mask.index_select(1, tokens)
        after = real.flip(1).cumsum(1).flip(1)  # of its own, and the real ones behind it
        return real, (self.lengths[:, None] - after).clamp(min=0)

    def cut(self, length: int, before: int) -> None:
        """Forget the tokens from `length` on, of those `before`."""
        self.lengths.sub_(self.token_mask[:, length:before].sum(1))
        self.token_mask[:, length:] = True

    def reordered(self, index: Tensor) -> "Padding":
        """Sequence b becomes what sequence `index[b]` was."""
        with torch.inference_mode(False):
            return Padding(*(each.index_select(0, index) for each in self))

    def grown(self, capacity: int, slots: int) -> "Padding":
        """With room for so many tokens, and slots."""
        real = pad(self.token_mask, (0, capacity - self.token_mask.shape[1]), value=True)
        return Padding(real, pad(self.places, (0, slots - self.places.shape[1]), value=-1), self.lengths)


class DecodeQuery(NamedTuple):
    """What a step asks of the slots: the last queries, and how they are to be attended."""

    q: Tensor
    mask: Mask
    scale: float
    capacity: int
    sinks: Tensor | None = None
    block: int | None = None  # tokens of which a partial each is made, to be merged along the tree of blocks
    into: Partial | None = None  # where the partial is to be written


class CacheView(NamedTuple):
    """Room for tokens, the first of it used: keys and values, (batch, heads, slots, dim), and which token is in each.

    Tokens are in order: of two slots the later one has the later token.
    """

    keys: Tensor
    values: Tensor
    token_index: Tensor  # (slots,), the token in each
    state: Tensor  # (2,), tokens of all ranks, and of them those that are here
    padding: Padding | None

    def places(self) -> Tensor:
        """Each slot's position in its sequence, (1 or batch, slots), -1 for padding."""
        return self.token_index[None] if self.padding is None else self.padding.places

    def bounds(self, rows: int, mask: Mask) -> tuple[Tensor, Tensor]:
        """The first and the last position that each of the last `rows` queries sees, (1 or batch, rows)."""
        tokens = (self.state[0] - rows + torch.arange(rows, device=self.state.device)).clamp(min=0)
        if self.padding is None:
            return mask.bounds(tokens[None])
        real, places = self.padding.last(tokens)
        first, last = mask.bounds(places)
        return first, last.masked_fill(~real, -1)
