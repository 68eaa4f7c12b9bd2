"""Which rank holds which token of a growing sequence: blocks of tokens are dealt to the ranks in turn.

With 2 ranks and blocks of 2:

        token    0 1 2 3 4 5 6        rank 0 holds 0 1 4 5, rank 1 holds 2 3 6
        rank     0 0 1 1 0 0 1
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnmesh.errors import LayoutError, ShapeError


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


def kept_by(hosts: Sequence[Sequence[int]], copies: int) -> dict[int, list[int]]:
    """For each rank those that keep copies of what it holds: one on each of the next hosts, or else the next ranks.

    >>> kept_by([[0, 1], [2, 3]], 2), kept_by([[0, 1, 2]], 2)
    ({0: [2], 1: [3], 2: [0], 3: [1]}, {0: [1], 1: [2], 2: [0]})
    """
    groups = hosts if len(hosts) >= copies else [[rank] for host in hosts for rank in host]
    keepers: dict[int, list[int]] = {}
    for number, group in enumerate(groups):
        others = [groups[(number + step) % len(groups)] for step in range(1, copies)]
        keepers |= {rank: [other[place % len(other)] for other in others] for place, rank in enumerate(group)}
    return keepers


def check_copies(copies: object, ranks: int) -> None:
    """Raise unless each of so many copies can be on a rank of its own."""
    if isinstance(copies, bool) or not isinstance(copies, int) or not 1 <= copies <= ranks:
        fix = "leave it out, or use more ranks along queries and keys"
        raise ShapeError("KVCache copies", f"1 to {ranks}, the ranks that tokens are dealt to", repr(copies), fix)


def check_cover(sums: int, start: int, more: int) -> None:
    """Raise unless the sum over all ranks is that of `more` positions from `start` on, each once."""
    if (sums - cover(torch.arange(start, start + more))) % 2**64:
        expected = f"positions from {start} to {start + more - 1}, each on one rank"
        fix = "pass layout.positions(length, shards, index), counted from the cache's length"
        raise LayoutError("append_shard", expected, f"{more} others, or some twice", fix)


def cover(positions: Tensor) -> int:
    """A sum that tells one set of positions from another, modulo 2^64: each position is mixed as a hash table would."""
    x = (positions + 1) * -7046029254386353131
    x = (x ^ (x >> 29)) * -4658895280553007687
    return int((x ^ (x >> 32)).sum())
