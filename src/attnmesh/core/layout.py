"""Layouts: which token positions each shard holds. A layout cuts a permutation of 0..length-1 into shards.

The layout decides how the work is balanced. Under a causal mask, 16 tokens over 4 shards:

        Contiguous()         0000111122223333  the last shard sees every key, the first almost none
        Zigzag()             0011223333221100  each shard holds an early and a late chunk: equal work
        Striped()            0123012301230123  each shard holds every 4th token: equal work, finer
        Split((7, 3, 3, 3))  0000000111222333  runs of any length, for shards that something else has cut

Any length is valid, but `Split` has the length of its sizes. With fewer tokens than shards, some shards are empty.
"""

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from attnmesh.errors import LayoutError, check_count


class Layout(Hashable, Protocol):
    """Type of the argument `layout=`."""

    def positions(self, length: int, shards: int, index: int) -> Tensor:
        """Return the positions of one shard.

        Args:
            length: Number of tokens of all shards.
            shards: Number of shards.
            index: Index of the shard, from 0 to shards - 1.

        Returns:
            Ascending int64 positions. Each position is in exactly one shard.

        Raises:
            LayoutError: If an argument is not a whole number in its range.
        """
        ...


@dataclass(frozen=True)
class Contiguous:
    """Runs of equal length, the last ones shorter, as in `torch.chunk` and in a DTensor with `Shard`.

    >>> import attnmesh as am
    >>> [am.Contiguous().positions(10, 4, index).tolist() for index in range(4)]
    [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    """

    def positions(self, length: int, shards: int, index: int) -> Tensor:
        """Return the run of shard `index`; see `Layout.positions`."""
        length, shards, index = _check_range(length, shards, index)
        size = -(-length // shards)
        return torch.arange(min(index * size, length), min((index + 1) * size, length))


@dataclass(frozen=True)
class Zigzag:
    """Two chunks per shard: of `2 * shards` chunks, shard i holds the i-th and the i-th from the end.

    >>> import attnmesh as am
    >>> [am.Zigzag().positions(10, 2, index).tolist() for index in range(2)]
    [[0, 1, 7, 8, 9], [2, 3, 4, 5, 6]]
    """

    def positions(self, length: int, shards: int, index: int) -> Tensor:
        """Return the two chunks of shard `index`; see `Layout.positions`."""
        length, shards, index = _check_range(length, shards, index)
        edges = [chunk * length // (2 * shards) for chunk in range(2 * shards + 1)]
        early, late = index, 2 * shards - 1 - index
        return torch.cat([torch.arange(edges[chunk], edges[chunk + 1]) for chunk in (early, late)])


@dataclass(frozen=True)
class Striped:
    """Block-cyclic: blocks of tokens go to the shards in turn.

    Args:
        block: Tokens per block.

    Raises:
        LayoutError: If `block` is not a whole number, 1 or more.

    >>> import attnmesh as am
    >>> [am.Striped(block=2).positions(10, 2, index).tolist() for index in range(2)]
    [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7]]
    """

    block: int = 1

    def __post_init__(self) -> None:
        fix = "use Striped() for blocks of 1 token, or a larger block"
        object.__setattr__(self, "block", check_count("Striped block", self.block, fix, error=LayoutError))

    def positions(self, length: int, shards: int, index: int) -> Tensor:
        """Return the blocks of shard `index`; see `Layout.positions`."""
        length, shards, index = _check_range(length, shards, index)
        block = min(self.block, max(length, 1))
        starts = torch.arange(index * block, max(length, index * block), shards * block)
        tokens = (starts[:, None] + torch.arange(block)).flatten()
        return tokens[tokens < length]


@dataclass(frozen=True)
class Split:
    """Consecutive runs of given sizes, as in `torch.split`: shard i holds `sizes[i]` tokens.

    Args:
        sizes: Tokens of each shard, 0 or more.

    Raises:
        LayoutError: If `sizes` is not a tuple or a list of whole numbers.

    >>> import attnmesh as am
    >>> [am.Split((5, 0, 3)).positions(8, 3, index).tolist() for index in range(3)]
    [[0, 1, 2, 3, 4], [], [5, 6, 7]]
    """

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        counts, fix = isinstance(self.sizes, (tuple, list)) and self.sizes, "pass a number of tokens for each rank"
        if not counts or not all(hasattr(n, "__index__") and not isinstance(n, bool) and n >= 0 for n in self.sizes):
            raise LayoutError("Split sizes", "whole numbers of 0 or more, one a rank", repr(self.sizes), fix)
        object.__setattr__(self, "sizes", tuple(map(operator.index, self.sizes)))

    def positions(self, length: int, shards: int, index: int) -> Tensor:
        """Return the run of shard `index`; see `Layout.positions`. The sizes give `length` and `shards`."""
        length, shards, index = _check_range(length, shards, index)
        if shards != len(self.sizes) or length != sum(self.sizes):
            expected, fix = f"{len(self.sizes)} shards of {sum(self.sizes)} tokens in all", "correct the sizes of Split"
            raise LayoutError(f"layout {self}", expected, f"{shards} shards of {length} tokens", fix)
        start = sum(self.sizes[:index])
        return torch.arange(start, start + self.sizes[index])


LAYOUTS = (Contiguous, Zigzag, Striped, Split)


def encode_layout(layout: Layout) -> list[int]:
    """Return a layout as integers, for the schema of an operator: its type, how many numbers it has, and these."""
    numbers = layout.sizes if isinstance(layout, Split) else [layout.block] if isinstance(layout, Striped) else []
    return [LAYOUTS.index(type(layout)), len(numbers), *numbers]


def decode_layout(code: Sequence[int]) -> tuple[Layout, Sequence[int]]:
    """Return the layout of a code that begins as `encode_layout` writes it, and the rest of the code."""
    kind, count, *rest = code
    numbers, make = tuple(rest[:count]), LAYOUTS[kind]
    layout: Layout = make(numbers) if make is Split else cast(Callable[..., Layout], make)(*numbers)
    return layout, rest[count:]


def check_layout(subject: str, layout: Layout) -> None:
    """Raise unless layout is an instance of one of `LAYOUTS`."""
    if not isinstance(layout, LAYOUTS):
        fix = "make one by calling it, as in Zigzag()"
        raise LayoutError(subject, "Contiguous(), Zigzag(), Striped() or Split(sizes)", repr(layout), fix)


def _check_range(length: int, shards: int, index: int) -> tuple[int, int, int]:
    """Return the three as Python ints, or raise if one is out of range."""
    if not all(hasattr(value, "__index__") for value in (length, shards, index)):
        given = f"{length!r}, {shards!r}, {index!r}"
        raise LayoutError("layout positions", "whole numbers length, shards and index", given, "pass Python ints")
    length, shards, index = (operator.index(value) for value in (length, shards, index))
    if length < 0 or shards < 1 or not 0 <= index < shards:
        expected = "length >= 0, shards >= 1 and 0 <= index < shards"
        given = f"length {length}, shards {shards}, index {index}"
        raise LayoutError("layout positions", expected, given, "pass this rank's index among its shards")
    return length, shards, index
