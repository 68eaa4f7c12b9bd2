"""Rounds of tokens: in each round, every rank gets a run of tokens in its turn, long or short as its share.

    widths (2, 2)    001100110011    even shares: blocks of 2 tokens
    widths (3, 1)    000100010001    shares 3 : 1

So the rank of a token and its slot there are known from the token's number.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

MAX_SHARE_ERROR = 0.01
"""Part of a share by which the tokens of a rank may differ from it. A lower one makes rounds longer."""


class Turn(NamedTuple):
    """Tokens of one rank in each round: `width` from token `start` on, of the `period` that all ranks get."""

    start: int
    width: int
    period: int

    def holds(self, indices: Tensor) -> Tensor:
        """Return for each token whether it is this rank's.

        >>> turns((3, 1))[1].holds(torch.arange(5))
        tensor([False, False, False,  True, False])
        """
        return (indices - self.start) % self.period < self.width

    def slot(self, indices: Tensor) -> Tensor:
        """Return the slot that each of this rank's tokens has in its shard."""
        return indices // self.period * self.width + indices % self.period - self.start

    def count(self, length: int) -> int:
        """Return how many of the first `length` tokens are this rank's.

        >>> [turn.count(7) for turn in turns((3, 1))]
        [6, 1]
        """
        rounds, remainder = divmod(length, self.period)
        return rounds * self.width + min(max(remainder - self.start, 0), self.width)

    def share(self, tokens: int) -> int:
        """Return this rank's share of `tokens` tokens, rounded up.

        >>> [turn.share(7) for turn in turns((3, 1))]
        [6, 2]
        """
        return -(-tokens * self.width // self.period)

    def positions(self, length: int) -> Tensor:
        """Return this rank's tokens among the first `length`."""
        first, period = min(self.start, length), min(self.period, max(length, 1))
        starts = torch.arange(first, length, period, device="cpu")
        indices = (starts[:, None] + torch.arange(min(self.width, length), device="cpu")).flatten()
        return indices[indices < length]


def turns(widths: Sequence[int]) -> tuple[Turn, ...]:
    """Return the turn of each rank, by the tokens that it gets in a round."""
    edges = [*accumulate(widths, initial=0)]
    return tuple(Turn(start, width, edges[-1]) for start, width in zip(edges, widths, strict=False))


@lru_cache(maxsize=64)
def widths_of(shares: tuple[float, ...], block: int) -> tuple[int, ...]:
    """Return the tokens of each rank in a round of about `block` tokens a rank, within 1% of its share.

    The rounds that are tried are multiples of the round in which the least share is one token. The least share grows
    with each, and its relative error falls, so few are tried.

    >>> widths_of((3, 1), 16), widths_of((1, 1), 16), widths_of((1000, 1), 16)
    ((24, 8), (16, 16), (1000, 1))
    """
    total_share = sum(shares)
    multiple = ceil(round(total_share / min(shares), 6))
    size = multiple * ceil(block * len(shares) / multiple)
    while True:
        exact = [size * share / total_share for share in shares]
        widths = _rounded(exact, size)
        if all(abs(width - wanted) <= MAX_SHARE_ERROR * wanted for width, wanted in zip(widths, exact, strict=True)):
            return widths
        size += multiple


def _rounded(exact: Sequence[float], total: int) -> tuple[int, ...]:
    """Return whole numbers with this total, by largest remainder."""
    widths = [int(number) for number in exact]
    order = sorted(range(len(exact)), key=lambda rank: (widths[rank] - exact[rank], rank))
    for rank in order[: total - sum(widths)]:
        widths[rank] += 1
    return tuple(widths)
