"""Block-cyclic assignment of tokens to ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnmesh.core.digest import hash_each
from attnmesh.errors import LayoutError, ShapeError


@dataclass(frozen=True)
class BlockCyclic:
    """Assignment of blocks of `block` tokens to `ranks` ranks, round robin."""

    block: int
    ranks: int

    def owner(self, tokens: Tensor) -> Tensor:
        """Return the rank of each token.

        >>> import torch
        >>> BlockCyclic(block=2, ranks=2).owner(torch.arange(7))
        tensor([0, 0, 1, 1, 0, 0, 1])
        """
        return tokens // self.block % self.ranks

    def slot(self, tokens: Tensor) -> Tensor:
        """Return each token's slot in the shard of its rank."""
        return tokens // (self.block * self.ranks) * self.block + tokens % self.block

    def count(self, rank: int, length: int) -> int:
        """Return how many of the first `length` tokens a rank holds.

        >>> [BlockCyclic(block=2, ranks=2).count(rank, 7) for rank in range(2)]
        [4, 3]
        """
        rounds, rest = divmod(length, self.block * self.ranks)
        return rounds * self.block + min(max(rest - rank * self.block, 0), self.block)

    def numbers_of(self, rank: int, tokens: Tensor) -> tuple[int, int, int, bool]:
        """Return what a rank says of its new tokens: count, rank, position sum, and whether they are block-cyclic."""
        return len(tokens), rank, position_sum(tokens), bool((self.owner(tokens) == rank).all())


@dataclass(frozen=True)
class TokenCounts:
    """Tokens per rank: `initial` for the first `start` tokens, block-cyclic from there on."""

    block_cyclic: BlockCyclic
    start: int
    initial: tuple[int, ...]

    def counts(self, length: int) -> list[int]:
        """Return how many of the first `length` tokens each rank holds.

        >>> TokenCounts(BlockCyclic(block=2, ranks=2), start=3, initial=(3, 0)).counts(7)
        [5, 2]
        """
        count = self.block_cyclic.count
        return [n + count(rank, length) - count(rank, self.start) for rank, n in enumerate(self.initial)]

    def with_shards(self, length: int, table: Sequence[Sequence[int]]) -> "TokenCounts":
        """Return the counts after `append_shard` to `length` tokens, by the `numbers_of` each rank.

        Raise unless all tokens together continue the sequence, each on exactly one rank.
        """
        more = sum(count for count, *_ in table)
        _check_cover(sum(total for _, _, total, _ in table), length, more)
        if not self.start and all(block_cyclic for *_, block_cyclic in table):
            return self
        counts = self.counts(length)
        for count, rank, *_ in table:
            counts[rank] += count
        return TokenCounts(self.block_cyclic, length + more, tuple(counts))

    def check(self, subject: str, length: int, slots: int) -> None:
        """Raise unless the fullest rank holds `length` tokens in `slots`; block-cyclic tokens always fit."""
        fullest = max(self.counts(length)) if self.start else 0
        if fullest > slots:
            given = f"{fullest} tokens on a rank of {slots} slots"
            fix = f"call cache.reserve({fullest * len(self.initial)}) on every rank, or prefill in even shards"
            raise ShapeError(subject, "tokens spread evenly over the ranks", given, fix)


def _check_cover(total: int, start: int, more: int) -> None:
    """Raise unless `total` is the position sum of `start` to `start + more - 1`, each on exactly one rank."""
    if (total - position_sum(torch.arange(start, start + more))) % 2**64:
        expected = f"positions from {start} to {start + more - 1}, each on one rank"
        fix = "pass layout.positions(length, shards, index), counted from the cache's length"
        raise LayoutError("append_shard", expected, f"{more} positions with gaps or repeats", fix)


def position_sum(positions: Tensor) -> int:
    """Return a sum of hashes, modulo 2^64, that distinguishes sets of positions."""
    return int(hash_each(positions + 1).sum())
