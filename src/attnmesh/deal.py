"""Which rank holds which token of a growing sequence: blocks of tokens are dealt to the ranks in turn.

With 2 ranks and blocks of 2:

        token    0 1 2 3 4 5 6        rank 0 holds 0 1 4 5, rank 1 holds 2 3 6
        rank     0 0 1 1 0 0 1
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attnmesh.errors import LayoutError
from attnmesh.partial import mixed


@dataclass(frozen=True)
class Deal:
    """Blocks of so many tokens, to so many ranks."""

    block: int
    ranks: int

    def owner(self, tokens: Tensor) -> Tensor:
        """To which rank each token goes.

        >>> import torch
        >>> Deal(block=2, ranks=2).owner(torch.arange(7))
        tensor([0, 0, 1, 1, 0, 0, 1])
        """
        return tokens // self.block % self.ranks

    def slot(self, tokens: Tensor) -> Tensor:
        """How many tokens before it the owner of each token has been dealt."""
        return tokens // (self.block * self.ranks) * self.block + tokens % self.block

    def count(self, rank: int, length: int) -> int:
        """How many of the first `length` tokens a rank has been dealt.

        >>> [Deal(block=2, ranks=2).count(rank, 7) for rank in range(2)]
        [4, 3]
        """
        rounds, rest = divmod(length, self.block * self.ranks)
        return rounds * self.block + min(max(rest - rank * self.block, 0), self.block)

    def to_one(self, start: int, stop: int) -> int | None:
        """The rank to which all of a run of tokens go, if it is one block."""
        first, last = start // self.block, (stop - 1) // self.block
        return first % self.ranks if first == last else None


@dataclass(frozen=True)
class Spread:
    """How many tokens each rank holds: as they came up to `start`, from there on as they are dealt."""

    deal: Deal
    start: int
    came: tuple[int, ...]

    def counts(self, length: int) -> list[int]:
        """Of the first `length` tokens, by rank.

        >>> Spread(Deal(block=2, ranks=2), start=3, came=(3, 0)).counts(7)
        [5, 2]
        """
        dealt = [self.deal.count(rank, length) - self.deal.count(rank, self.start) for rank in range(self.deal.ranks)]
        return [before + more for before, more in zip(self.came, dealt, strict=True)]


def check_cover(sums: int, start: int, more: int) -> None:
    """Raise unless the sum over all ranks is that of `more` positions from `start` on, each once."""
    if (sums - cover(torch.arange(start, start + more))) % 2**64:
        expected = f"positions from {start} to {start + more - 1}, each on one rank"
        fix = "pass layout.positions(length, shards, index), counted from the cache's length"
        raise LayoutError("append_shard", expected, f"{more} others, or some twice", fix)


def cover(positions: Tensor) -> int:
    """A sum that tells one set of positions from another, modulo 2^64."""
    return int(mixed(positions + 1).sum())
