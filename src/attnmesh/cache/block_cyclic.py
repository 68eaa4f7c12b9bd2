"""Block-cyclic assignment of tokens to ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attnmesh.core.digest import hash_each
from attnmesh.core.layout import Striped
from attnmesh.core.turns import Turn, widths_of
from attnmesh.errors import LayoutError, ShapeError


@dataclass(frozen=True)
class BlockCyclic:
    """Assignment of blocks of `block` tokens to `ranks` ranks, round robin. Blocks are as long as the ranks' shares."""

    block: int | tuple[int, ...]
    ranks: int
    shares: tuple[float, ...] | None = None

    @staticmethod
    def of(block: int, ranks: int, shares: Sequence[float] | None) -> "BlockCyclic":
        """Return the assignment by shares, whose blocks have about `block` tokens on average.

        >>> BlockCyclic.of(16, 2, (3, 1)).block
        (24, 8)
        """
        if shares is None:
            return BlockCyclic(block, ranks)
        return BlockCyclic(widths_of(tuple(shares), block), ranks, tuple(shares))

    @cached_property
    def turns(self) -> tuple[Turn, ...]:
        """Turn of each rank."""
        return Striped(self.block).turns(self.ranks)

    @cached_property
    def is_even(self) -> bool:
        """True if all ranks get as many tokens."""
        return len({turn.width for turn in self.turns}) == 1

    def count(self, rank: int, length: int) -> int:
        """Return how many of the first `length` tokens a rank holds.

        >>> [BlockCyclic(block=2, ranks=2).count(rank, 7) for rank in range(2)]
        [4, 3]
        """
        return self.turns[rank].count(length)

    def numbers_of(self, rank: int, tokens: Tensor) -> tuple[int, int, int, bool]:
        """Return what a rank says of its new tokens: count, rank, position sum, and whether they are block-cyclic."""
        return len(tokens), rank, position_sum(tokens), bool(self.turns[rank].holds(tokens).all())


@dataclass(frozen=True)
class TokenCounts:
    """Tokens per rank: `initial` for the first `start` tokens, block-cyclic from there on."""

    block_cyclic: BlockCyclic
    start: int
    initial: tuple[int, ...]

    def by_rank(self, length: int) -> list[int]:
        """Return how many of the first `length` tokens each rank holds.

        >>> TokenCounts(BlockCyclic(block=2, ranks=2), start=3, initial=(3, 0)).by_rank(7)
        [5, 2]
        """
        count = self.block_cyclic.count
        return [n + count(rank, length) - count(rank, self.start) for rank, n in enumerate(self.initial)]

    def with_shards(self, length: int, table: Sequence[Sequence[int]]) -> "TokenCounts":
        """Return the counts after `append_shard` to `length` tokens, by the `numbers_of` each rank.

        Raise unless all tokens together continue the sequence, each on exactly one rank.
        """
        new_count = sum(count for count, *_ in table)
        _check_cover(sum(total for _, _, total, _ in table), length, new_count)
        if not self.start and all(block_cyclic for *_, block_cyclic in table):
            return self
        counts = self.by_rank(length)
        for count, rank, *_ in table:
            counts[rank] += count
        return TokenCounts(self.block_cyclic, length + new_count, tuple(counts))

    def check(self, subject: str, length: int, slots: Callable[[int], int]) -> None:
        """Raise unless each rank holds its tokens of `length` in its `slots`; block-cyclic tokens always fit."""
        if not self.start:
            return
        over = {rank: count for rank, count in enumerate(self.by_rank(length)) if count > slots(rank)}
        if over:
            turns = self.block_cyclic.turns
            needed = {rank: -(-count * turns[rank].period // turns[rank].width) for rank, count in over.items()}
            worst = max(needed, key=lambda rank: needed[rank])
            given = f"{over[worst]} tokens on a rank of {slots(worst)} slots"
            fix = f"call cache.reserve({needed[worst]}) on every rank, or prefill in cache.layout"
            raise ShapeError(subject, "tokens spread over the ranks as their shares are", given, fix)


def _check_cover(total: int, start: int, new_count: int) -> None:
    """Raise unless `total` is the position sum of `start` to `start + new_count - 1`, each on exactly one rank."""
    if (total - position_sum(torch.arange(start, start + new_count, device="cpu"))) % 2**64:
        expected = f"positions from {start} to {start + new_count - 1}, each on one rank"
        fix = "pass layout.positions(length, shards, index), counted from the cache's length"
        raise LayoutError("append_shard", expected, f"{new_count} positions with gaps or repeats", fix)


def position_sum(positions: Tensor) -> int:
    """Return a sum of hashes, modulo 2^64, that distinguishes sets of positions."""
    return int(hash_each(positions + 1).sum())
