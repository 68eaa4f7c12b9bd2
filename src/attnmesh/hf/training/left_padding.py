"""Rows that begin with padding. Their tokens move to the left, and the padding to the right, where shards may have it.

Positions then count from the first token of each row, as in generation.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor


class MovedRows(NamedTuple):
    """Places that tokens of moved rows had before.

    >>> rows = MovedRows.of({"attention_mask": torch.tensor([[0, 0, 1, 1, 0]])})
    >>> moved = rows.batch({"input_ids": torch.tensor([[7, 7, 1, 2, 7]])})["input_ids"]
    >>> moved, rows.back(moved)
    (tensor([[1, 2, 7, 7, 7]]), tensor([[7, 7, 1, 2, 7]]))
    """

    places: Tensor
    """(batch, length): the place that each token of a moved row had."""

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> Self | None:
        """Return how the rows of a batch move; None if none begins with padding, or its positions are given."""
        mask = batch.get("attention_mask")
        if mask is None or mask.ndim != 2 or batch.get("position_ids") is not None:
            return None
        first = (mask != 0).int().argmax(1, keepdim=True)
        length = mask.shape[1]
        return cls((torch.arange(length, device=mask.device) + first) % length) if bool(first.any()) else None

    def batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of a batch with moved tokens."""
        shape = self.places.shape
        is_moved = {name: isinstance(x, Tensor) and x.shape == shape for name, x in batch.items()}
        return {name: x.gather(1, self.places) if is_moved[name] else x for name, x in batch.items()}

    def back(self, x: Tensor) -> Tensor:
        """Return outputs of moved tokens, (batch, length, ...), where the tokens were before."""
        return x[torch.arange(len(x), device=x.device)[:, None], self.places.argsort(1)]
