"""A layout says which tokens each shard holds: a permutation of the positions 0..length-1, cut into shards.

Which shard computes which queries decides who works how much. Under a causal mask, 16 tokens over 4 shards:

        Contiguous()       0000111122223333    the last shard sees every key, the first almost none
        Zigzag()           0011223333221100    each shard holds an early and a late chunk: equal work
        Striped()          0123012301230123    each shard holds every 4th token: equal work, finer

Any length goes, also fewer tokens than shards: then some shards are empty.
"""

import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from attnmesh.errors import LayoutError


class Layout(Hashable, Protocol):
    """What `layout=` takes."""

    def positions(self, length: int, shards: int, index: int) -> Tensor:
        """The positions that shard `index` of `shards` holds, ascending; together the shards hold each once."""
        ...


@dataclass(frozen=True)
class Contiguous:
    """Runs of equal length, the last ones shorter: what `torch.chunk` and a DTensor's `Shard` do.

    >>> [Contiguous().positions(10, 4, index).tolist() for index in range(4)]
    [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    """

    def positions(self, length: int, shards: int, index: int) -> Tensor:
        """The run of shard `index`."""
        length, shards, index = _checked(length, shards, index)
        size = -(-length // shards)
        return torch.arange(min(index * size, length), min((index + 1) * size, length))


@dataclass(frozen=True)
class Zigzag:
    """Of `2 * shards` chunks, shard i holds the i-th from the start and the i-th from the end.

    >>> [Zigzag().positions(10, 2, index).tolist() for index in range(2)]
    [[0, 1, 7, 8, 9], [2, 3, 4, 5, 6]]
    """

    def positions(self, length: int, shards: int, index: int) -> Tensor:
        """The two chunks of shard `index`."""
        length, shards, index = _checked(length, shards, index)
        edges = [chunk * length // (2 * shards) for chunk in range(2 * shards + 1)]
        early, late = index, 2 * shards - 1 - index
        return torch.cat([torch.arange(edges[chunk], edges[chunk + 1]) for chunk in (early, late)])


@dataclass(frozen=True)
class Striped:
    """Blocks of `block` tokens dealt in turn.

    >>> [Striped(block=2).positions(10, 2, index).tolist() for index in range(2)]
    [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7]]
    """

    block: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 1:
            fix = "deal 1 token at a time with Striped(), or more"
            raise LayoutError("Striped block", "a whole number, 1 or more", repr(self.block), fix)

    def positions(self, length: int, shards: int, index: int) -> Tensor:
        """The blocks of shard `index`."""
        length, shards, index = _checked(length, shards, index)
        block = min(self.block, max(length, 1))
        starts = torch.arange(index * block, max(length, index * block), shards * block)
        tokens = (starts[:, None] + torch.arange(block)).flatten()
        return tokens[tokens < length]


LAYOUTS = (Contiguous, Zigzag, Striped)


def encode_layout(layout: Layout) -> list[int]:
    """A layout as two integers, as an operator's schema can carry it."""
    return [LAYOUTS.index(type(layout)), getattr(layout, "block", 0)]


def decode_layout(code: Sequence[int]) -> Layout:
    """The layout that `encode_layout` wrote."""
    kind, block = code
    return Striped(block) if LAYOUTS[kind] is Striped else LAYOUTS[kind]()


def check_layout(subject: str, layout: Layout) -> None:
    """Raise unless it is one of the layouts here."""
    if not isinstance(layout, LAYOUTS):
        fix = "make one by calling it, as in Zigzag()"
        raise LayoutError(subject, "Contiguous(), Zigzag() or Striped()", repr(layout), fix)


def _checked(length: int, shards: int, index: int) -> tuple[int, int, int]:
    """The three as plain ints, or the error that names the wrong one."""
    if not all(hasattr(value, "__index__") for value in (length, shards, index)):
        given = f"{length!r}, {shards!r}, {index!r}"
        raise LayoutError("layout positions", "whole numbers length, shards and index", given, "pass Python ints")
    length, shards, index = (operator.index(value) for value in (length, shards, index))
    if length < 0 or shards < 1 or not 0 <= index < shards:
        expected = "length >= 0, shards >= 1 and 0 <= index < shards"
        given = f"length {length}, shards {shards}, index {index}"
        raise LayoutError("layout positions", expected, given, "pass this rank's index among its shards")
    return length, shards, index
