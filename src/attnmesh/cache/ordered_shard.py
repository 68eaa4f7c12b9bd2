"""Shard whose tokens stand in their order, and whose memory may fail while it grows: files, or two memories."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, NoReturn

import torch
from torch import Tensor

from attnmesh.cache.cache_shard import CacheShard
from attnmesh.errors import KernelError, StoreError
from attnmesh.runtime.tensors import Tensors

Fail = Callable[[str, StoreError], NoReturn]
"""Raises an error of this rank in a call, given the call's name. Other ranks may have ended the call already."""


class OrderedShard(CacheShard):
    """Tokens of one rank, in their order. `_append_rows` writes new ones."""

    fail: Fail
    unpadded: ClassVar[tuple[str, str]]
    """What `check_unpadded` expects, and how a user mends a padded batch."""

    @abstractmethod
    def _append_rows(self, rows: Sequence[Tensor], indices: Tensor, length: int) -> None:
        """Write rows of this rank's new tokens after those in the shard. Then there are `length` on all ranks."""

    def check_unpadded(self, subject: str, token_mask: Tensor | None) -> None:
        """Raise if new tokens are padded."""
        if token_mask is not None and not bool(token_mask.all()):
            expected, fix = self.unpadded
            raise KernelError(f"{subject} token_mask", expected, "a mask", fix)

    def append_own(self, new: Tensors, token_mask: Tensor | None, length_and_used: tuple[int, int] | None) -> None:
        """Add this rank's share of the new tokens; `new` has all tokens and heads."""
        length = self.length
        try:
            self._append_rows(*self.own_rows(new, length), length + new[0].shape[2])
        except StoreError as error:
            self.fail("append", error)

    def append_rows_at(self, new: Tensors, indices: Tensor, new_count: int, token_mask: Tensor | None) -> None:
        """Add rows of the given tokens with this rank's heads; all ranks together add `new_count`."""
        indices = indices.cpu()
        if bool((indices.diff() < 0).any()):
            order = indices.argsort()
            new, indices = tuple(x.index_select(2, order.to(x.device)) for x in new), indices[order]
        self._append_rows(new, indices, self.length + new_count)

    def own_rows(self, new: Tensors, length: int) -> tuple[list[Tensor], Tensor]:
        """Return this rank's rows of `new`, and their tokens. `new` has all heads and the tokens from `length` on."""
        indices = torch.arange(length, length + new[0].shape[2], device="cpu")
        rows = self.own_heads(new)
        if self.turn.width < self.turn.period:  # other ranks hold tokens too
            own = self.turn.holds(indices).nonzero().flatten()
            rows = [x.index_select(2, own.to(self.device)) for x in rows]
            indices = indices[own]
        return [*map(self.config.rows_of, rows)], indices
