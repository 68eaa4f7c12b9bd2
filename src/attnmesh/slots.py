"""What a rank's cache holds, as tensors of its device: the last queries attend to this, and nobody asks the host."""

from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.mask import Mask
from attnmesh.padding import Padding
from attnmesh.partial import Partial


class Question(NamedTuple):
    """What a step asks of the slots: the last queries, and how they are to be attended."""

    q: Tensor
    mask: Mask
    scale: float
    capacity: int
    sinks: Tensor | None = None
    block: int | None = None  # tokens of which a partial each is made, to be merged along the tree of blocks
    into: Partial | None = None  # where the partial is to be written


class Slots(NamedTuple):
    """Room for tokens, the first of it used: keys and values, (batch, heads, slots, dim), and which token is in each.

    Tokens are in order: of two slots the later one has the later token.
    """

    keys: Tensor
    values: Tensor
    columns: Tensor  # (slots,), the token in each
    state: Tensor  # (2,), tokens of all ranks, and of them those that are here
    padding: Padding | None

    def places(self) -> Tensor:
        """Each slot's position in its sequence, (1 or batch, slots), -1 for padding."""
        return self.columns[None] if self.padding is None else self.padding.places

    def bounds(self, rows: int, mask: Mask) -> tuple[Tensor, Tensor]:
        """The first and the last position that each of the last `rows` queries sees, (1 or batch, rows)."""
        tokens = (self.state[0] - rows + torch.arange(rows, device=self.state.device)).clamp(min=0)
        if self.padding is None:
            return mask.bounds(tokens[None])
        real, places = self.padding.last(tokens)
        first, last = mask.bounds(places)
        return first, last.masked_fill(~real, -1)
