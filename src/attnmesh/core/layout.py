"""Layouts: which token positions each shard holds. A layout cuts a permutation of 0..length-1 into shards.

The layout decides how the work is balanced. Under a causal mask, 16 tokens over 4 shards:

        Contiguous()         0000111122223333  the last shard sees every key, the first almost none
        Zigzag()             0011223333221100  each shard holds an early and a late chunk: equal work
        Striped()            0123012301230123  each shard holds every 4th token: equal work, finer
        Striped((5, 1, 1, 1))  0000012300000123  shard 0 holds five times as many tokens: unequal devices
        Split((7, 3, 3, 3))  0000000111222333  runs of any length, for shards that something else has cut

For one batch of documents and one mesh there is a layout of its own, here for documents of 8, 2, 2, 2 and 2 tokens:

        Packed((8, 2, 2, 2, 2), Shape(1, 4, 1))    0123321000112233  the long one is cut, the short ones are whole

Any length is valid, but `Split` and `Packed` have that of their parts. With fewer tokens than shards, some are empty.
"""

import math
import operator
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from itertools import chain
from typing import ClassVar

import torch
from torch import Tensor

from attnmesh.core.packing import pack_documents
from attnmesh.core.turns import Turn, turns
from attnmesh.errors import LayoutError, checked_count

__all__ = ["Contiguous", "Zigzag", "Striped", "Split", "Packed"]


@dataclass(frozen=True)
class Layout:
    """Type of the argument `layout=`, which takes `kinds`: dataclasses of whole numbers and tuples of them."""

    kinds: ClassVar[list[type["Layout"]]] = []
    """Subclasses of this file, in the order of `to_code`. No call takes another, whose shards nobody checks."""

    def __init_subclass__(cls) -> None:
        if cls.__module__ == __name__:
            cls.kinds.append(cls)

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
        raise NotImplementedError

    def to_code(self) -> list[int]:
        """Return the layout as integers, for the schema of an operator: its kind, and arguments by their lengths.

        Only a graph of this process has them. Files and messages have none, so kinds may change their order.
        """
        arguments = (getattr(self, field.name) for field in fields(self))
        numbers = ([-1, one] if isinstance(one, int) else [len(one), *one] for one in arguments)
        return [self.kinds.index(type(self)), *chain(*numbers)]

    @classmethod
    def example(cls) -> str:
        """Return a call with the arguments that it needs, for an error."""
        return f"{cls.__name__}({', '.join(field.name for field in fields(cls) if field.default is MISSING)})"

    @staticmethod
    def from_code(code: Sequence[int]) -> tuple["Layout", Sequence[int]]:
        """Return the layout of a code that begins as `to_code` writes it, and the rest of the code."""
        kind, *rest = code
        arguments: list[int | tuple[int, ...]] = []
        for _ in fields(make := Layout.kinds[kind]):
            size, *rest = rest
            arguments.append(rest[0] if size < 0 else tuple(rest[:size]))
            rest = rest[abs(size) :]
        return make(*arguments), rest


@dataclass(frozen=True)
class Contiguous(Layout):
    """Runs of equal length, the last ones shorter, as in `torch.chunk` and in a DTensor with `Shard`.

    >>> import attnmesh as am
    >>> [am.Contiguous().positions(10, 4, index).tolist() for index in range(4)]
    [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    """

    def positions(self, length: int, shards: int, index: int) -> Tensor:
        """Return the run of shard `index`; see `Layout.positions`."""
        length, shards, index = _checked_range(length, shards, index)
        size = -(-length // shards)
        return torch.arange(min(index * size, length), min((index + 1) * size, length), device="cpu")


@dataclass(frozen=True)
class Zigzag(Layout):
    """Two chunks per shard: of `2 * shards` chunks, shard i holds the i-th and the i-th from the end.

    >>> import attnmesh as am
    >>> [am.Zigzag().positions(10, 2, index).tolist() for index in range(2)]
    [[0, 1, 7, 8, 9], [2, 3, 4, 5, 6]]
    """

    def positions(self, length: int, shards: int, index: int) -> Tensor:
        """Return the two chunks of shard `index`; see `Layout.positions`."""
        length, shards, index = _checked_range(length, shards, index)
        edges = [chunk * length // (2 * shards) for chunk in range(2 * shards + 1)]
        early = index
        late = 2 * shards - 1 - index
        return torch.cat([torch.arange(edges[chunk], edges[chunk + 1], device="cpu") for chunk in (early, late)])


@dataclass(frozen=True)
class Striped(Layout):
    """Block-cyclic: blocks of tokens go to the shards in turn.

    Args:
        block: Tokens per block; or a tuple, for shards of unequal shares, with the tokens of each shard's blocks. Fewer
            numbers than shards are repeated.

    Raises:
        LayoutError: If `block` is not a whole number, 1 or more, or a tuple of some.

    >>> import attnmesh as am
    >>> [am.Striped(block=2).positions(10, 2, index).tolist() for index in range(2)]
    [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7]]
    >>> [am.Striped(block=(3, 1)).positions(10, 2, index).tolist() for index in range(2)]
    [[0, 1, 2, 4, 5, 6, 8, 9], [3, 7]]
    """

    block: int | tuple[int, ...] = 1

    def __post_init__(self) -> None:
        fix = "use Striped() for blocks of 1 token, or a larger block"
        if not isinstance(self.block, (tuple, list)):
            object.__setattr__(self, "block", checked_count("Striped block", self.block, fix, error=LayoutError))
            return
        widths = _counts("Striped block", self.block, "one a shard")
        if 0 in widths:
            raise LayoutError("Striped block", "a whole number, 1 or more", repr(self.block), fix)
        object.__setattr__(self, "block", widths if len(widths) > 1 else widths[0])

    def turns(self, shards: int) -> tuple[Turn, ...]:
        """Return the turn of each of `shards` shards.

        Raises:
            LayoutError: If there are shards without a block.
        """
        if not isinstance(self.block, tuple):
            return turns((self.block,) * shards)
        if shards % len(self.block):
            fix = "give each shard a block, as shares of a cache are"
            raise LayoutError(f"layout {self}", f"a multiple of {len(self.block)} shards", f"{shards} shards", fix)
        return turns(self.block * (shards // len(self.block)))

    def positions(self, length: int, shards: int, index: int) -> Tensor:
        """Return the blocks of shard `index`; see `Layout.positions`."""
        length, shards, index = _checked_range(length, shards, index)
        return self.turns(shards)[index].positions(length)


@dataclass(frozen=True)
class Split(Layout):
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
        object.__setattr__(self, "sizes", _counts("Split sizes", self.sizes, "one a rank"))

    def positions(self, length: int, shards: int, index: int) -> Tensor:
        """Return the run of shard `index`; see `Layout.positions`. The sizes give `length` and `shards`."""
        index = _checked_index(self, (len(self.sizes), sum(self.sizes)), (shards, length), index)
        start = sum(self.sizes[:index])
        return torch.arange(start, start + self.sizes[index], device="cpu")


@dataclass(frozen=True)
class Packed(Layout):
    """A layout for one batch of packed documents and one mesh: equal tokens, nearly equal pairs, and little to send.

    Short documents lie whole at one (r, c), the indices along queries and keys. Long ones are cut over as few of these
    places as balance allows. Pairs are those of a causal mask, or a full one, over these documents; attention is exact
    under any mask.

    Args:
        documents: Tokens of each document, in order, padding as a document of its own.
        shape: Ranks of the mesh along heads, queries and keys.

    Raises:
        LayoutError: If the documents or the shape are not whole numbers.

    >>> import attnmesh as am
    >>> layout = am.Packed((6, 2, 2, 2), am.Shape(1, 3, 1))
    >>> [layout.positions(12, 3, index).tolist() for index in range(3)]
    [[0, 5, 6, 7], [1, 4, 8, 9], [2, 3, 10, 11]]
    """

    documents: tuple[int, ...]
    shape: tuple[int, int, int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "documents", _counts("Packed documents", self.documents, "one a document"))
        object.__setattr__(self, "shape", checked_shape("Packed shape", self.shape))

    def positions(self, length: int, shards: int, index: int) -> Tensor:
        """Return the tokens of shard `index`; see `Layout.positions`. The documents and the shape give the others."""
        index = _checked_index(self, (math.prod(self.shape), sum(self.documents)), (shards, length), index)
        runs = pack_documents(self.documents, *self.shape)[index]
        return torch.cat([torch.arange(start, stop, device="cpu") for start, stop in ((0, 0), *runs)])


def check_layout(subject: str, layout: Layout | str, *, auto: bool = False) -> None:
    """Raise unless layout is of `Layout.kinds`, or "auto" where that is served."""
    if type(layout) not in Layout.kinds and not (auto and isinstance(layout, str) and layout == "auto"):
        fix = "make one by calling it, as in Zigzag()"
        *others, last = (kind.example() for kind in Layout.kinds)
        expected = f"{', '.join(others)} or {last}"
        expected = f'"auto", {expected}' if auto else expected
        raise LayoutError(subject, expected, repr(layout), fix)


def checked_shape(subject: str, shape: Sequence[int]) -> tuple[int, int, int]:
    """Return the ranks along heads, queries and keys as Python ints, or raise unless they are three counts."""
    counts = _counts(subject, shape, "ranks along heads, queries and keys")
    if len(counts) != 3 or 0 in counts:
        expected, fix = "ranks along heads, queries and keys", "pass am.Shape(heads, queries, keys) of the mesh"
        raise LayoutError(subject, expected, repr(counts), fix)
    return counts


def _counts(subject: str, values: Sequence[int], meaning: str) -> tuple[int, ...]:
    """Return the values as Python ints, or raise unless they are one or more whole numbers of 0 or more."""
    counts: tuple[int, ...] = ()
    if isinstance(values, (tuple, list)) and not any(isinstance(value, bool) for value in values):
        with suppress(TypeError):  # a value may be no whole number
            counts = tuple(map(operator.index, values))
    if not counts or min(counts) < 0:
        raise LayoutError(
            subject, f"whole numbers of 0 or more, {meaning}", repr(values), "pass a tuple of Python ints"
        )
    return counts


def _checked_index(layout: Layout, expected: tuple[int, int], given: tuple[int, int], index: int) -> int:
    """Return the index, or raise unless shards and tokens are those of the layout's parts."""
    shards, length = given
    length, shards, index = _checked_range(length, shards, index)
    if (shards, length) != expected:
        name = type(layout).__name__
        expected_text = "{} shards of {} tokens in all".format(*expected)
        fix = f"make {name} for this length and mesh"
        raise LayoutError(f"layout {name}", expected_text, f"{shards} shards of {length} tokens", fix)
    return index


def _checked_range(length: int, shards: int, index: int) -> tuple[int, int, int]:
    """Return the arguments as Python ints, or raise if one is out of range."""
    if not all(hasattr(value, "__index__") for value in (length, shards, index)):
        given = f"{length!r}, {shards!r}, {index!r}"
        raise LayoutError("layout positions", "whole numbers length, shards and index", given, "pass Python ints")
    length, shards, index = (operator.index(value) for value in (length, shards, index))
    if length < 0 or shards < 1 or not 0 <= index < shards:
        expected = "length >= 0, shards >= 1 and 0 <= index < shards"
        given = f"length {length}, shards {shards}, index {index}"
        fix = "pass the length of the whole sequence, its number of shards, and this shard's index"
        raise LayoutError("layout positions", expected, given, fix)
    return length, shards, index
