"""Padding of a batch in a cache: which tokens are real, and where each is in its sequence."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class Padding(NamedTuple):
    """Padding of a batch: which tokens are real, and their positions. Updated in place as the cache grows."""

    token_mask: Tensor
    """(batch, capacity), True for real tokens, of all ranks."""
    positions: Tensor
    """(batch, slots), position of each slot's token in its sequence, -1 for padding."""
    lengths: Tensor
    """(batch,), real tokens per sequence."""

    @staticmethod
    def none(batch: int, capacity: int, token_index: Tensor, length: Tensor) -> "Padding":
        """Return a padding where all tokens so far are real; `token_index` is the token in each slot."""
        with torch.inference_mode(False):  # tensors that can be written to in any mode
            everything = torch.ones(batch, capacity, dtype=torch.bool, device=token_index.device)
            return Padding(everything, token_index.expand(batch, -1).clone(), length.expand(batch).clone())

    def add(self, start: Tensor, real: Tensor, new: Tensor, slots: Tensor) -> None:
        """Add tokens from `start` on, with their mask `real`; the tokens `new` among them are in `slots`."""
        indices = start + torch.arange(real.shape[1], device=real.device)
        self.token_mask.index_copy_(1, indices, real)
        positions = torch.where(real, self.lengths[:, None] + real.cumsum(1) - 1, -1)
        self.positions.index_copy_(1, slots, positions.index_select(1, new))
        self.lengths.add_(real.sum(1))

    def last(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return which of these last tokens are real, and the position of each in its sequence."""
        real = self.token_mask.index_select(1, indices)
        after = real.flip(1).cumsum(1).flip(1)  # real tokens from this one on
        return real, (self.lengths[:, None] - after).clamp(min=0)

    def cut(self, length: int) -> None:
        """Remove the tokens from `length` on."""
        self.lengths.copy_(self.token_mask[:, :length].sum(1))  # an append that was broken off may have added to them
        self.token_mask[:, length:] = True  # True for all places without a token

    def reordered(self, index: Tensor) -> "Padding":
        """Return a padding whose sequence b is the sequence `index[b]` of this one."""
        with torch.inference_mode(False):
            return Padding(*(x.index_select(0, index) for x in self))

    def resized(self, capacity: int, positions: Tensor) -> "Padding":
        """Return the padding with another capacity and other slots."""
        real = pad(self.token_mask, (0, capacity - self.token_mask.shape[1]), value=True)
        return Padding(real, positions, self.lengths)
