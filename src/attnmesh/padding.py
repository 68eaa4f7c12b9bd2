"""Where the sequences of a batch differ in length: which of its tokens are real, and where those stand in their own."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class Padding(NamedTuple):
    """Tensors that are written to as the cache grows."""

    real: Tensor  # (batch, capacity), of all tokens, on every rank
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
        self.real.index_copy_(1, where, real)
        places = torch.where(real, self.lengths[:, None] + real.cumsum(1) - 1, -1)
        self.places.index_copy_(1, slots, places.index_select(1, new))
        self.lengths.add_(real.sum(1))

    def last(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Which of these last tokens are real, and each one's place in its own sequence."""
        real = self.real.index_select(1, tokens)
        after = real.flip(1).cumsum(1).flip(1)  # of its own, and the real ones behind it
        return real, (self.lengths[:, None] - after).clamp(min=0)

    def cut(self, length: int, before: int) -> None:
        """Forget the tokens from `length` on, of those `before`."""
        self.lengths.sub_(self.real[:, length:before].sum(1))
        self.real[:, length:] = True

    def reordered(self, index: Tensor) -> "Padding":
        """Sequence b becomes what sequence `index[b]` was."""
        with torch.inference_mode(False):
            return Padding(*(each.index_select(0, index) for each in self))

    def grown(self, capacity: int, slots: int) -> "Padding":
        """With room for so many tokens, and slots."""
        real = pad(self.real, (0, capacity - self.real.shape[1]), value=True)
        return Padding(real, pad(self.places, (0, slots - self.places.shape[1]), value=-1), self.lengths)
