"""Block-cyclic assignment of tokens to ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

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
        """True if all ranks get equally many tokens."""
        return len({turn.width for turn in self.turns}) == 1

    def count(self, rank: int, length: int) -> int:
        """Return how many of the first `length` tokens a rank holds.

        >>> [BlockCyclic(block=2, ranks=2).count(rank, 7) for rank in range(2)]
        [4, 3]
        """
        return self.turns[rank].count(length)

    def report_of(self, rank: int, indices: Tensor) -> "ShardReport":
        """Return the report that `rank` sends on its new tokens."""
        return ShardReport(len(indices), rank, token_set_digest(indices), bool(self.turns[rank].holds(indices).all()))

    @staticmethod
    def reports_in(numbers_by_rank: Sequence[Sequence[int]]) -> "list[ShardReport]":
        """Return the reports that ranks have sent as integers."""
        return [ShardReport(count, rank, digest, bool(last)) for count, rank, digest, last in numbers_by_rank]


class ShardReport(NamedTuple):
    """A report of a rank on its new tokens, which ranks send one another as integers."""

    token_count: int
    rank: int
    digest: int
    """The `token_set_digest` of the tokens."""
    is_block_cyclic: bool
    """True if all of them lie where the block-cyclic layout puts them."""


@dataclass(frozen=True)
class RankCounts:
    """Tokens per rank: `initial` for the first `start` tokens, block-cyclic from there on."""

    block_cyclic: BlockCyclic
    start: int
    initial: tuple[int, ...]

    def by_rank(self, length: int) -> list[int]:
        """Return how many of the first `length` tokens each rank holds.

        >>> RankCounts(BlockCyclic(block=2, ranks=2), start=3, initial=(3, 0)).by_rank(7)
        [5, 2]
        """
        count = self.block_cyclic.count
        return [initial + count(rank, length) - count(rank, self.start) for rank, initial in enumerate(self.initial)]

    def with_shards(self, length: int, reports: Sequence[ShardReport]) -> "RankCounts":
        """Return the counts after ranks have added the tokens of their reports to the first `length`.

        Raise unless all new tokens together continue the sequence, each on exactly one rank.
        """
        new_count = sum(report.token_count for report in reports)
        _check_cover(sum(report.digest for report in reports), length, new_count)
        if not self.start and all(report.is_block_cyclic for report in reports):
            return self
        counts = self.by_rank(length)
        for report in reports:
            counts[report.rank] += report.token_count
        return RankCounts(self.block_cyclic, length + new_count, tuple(counts))

    def check(self, subject: str, length: int, slots: Callable[[int], int]) -> None:
        """Raise unless each rank has slots for its part of `length` tokens. Block-cyclic tokens always fit."""
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


def _check_cover(digest: int, start: int, new_count: int) -> None:
    """Raise unless `digest` is that of the tokens from `start` to `start + new_count - 1`, each on exactly one rank."""
    if (digest - token_set_digest(torch.arange(start, start + new_count, device="cpu"))) % 2**64:
        expected = f"positions from {start} to {start + new_count - 1}, each on one rank"
        fix = "pass layout.positions(length, shards, index), counted from the cache's length"
        raise LayoutError("append_shard", expected, f"{new_count} positions with gaps or repeats", fix)


def token_set_digest(indices: Tensor) -> int:
    """Return a sum of hashes, modulo 2^64, that distinguishes sets of tokens. Those of disjoint sets add up."""
    return int(hash_each(indices + 1).sum())
