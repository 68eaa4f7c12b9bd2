"""Masks are functions of global positions: each query sees one interval of positions, and the intervals move forward.

Every mask here is one value, `Mask(left, right, ends)`: the query at position p sees the keys from `p - left` to
`p + right` inside its own document. Both bounds never decrease with p, so whether a block of queries and keys is
full, empty or mixed is told by its corners, and an intersection of masks is again a mask.

        Causal()          Window(2)         Documents([3, 5])   Causal() & Documents([3, 5])
        # . . . . . . .   # . . . . . . .   # # # . . . . .     # . . . . . . .
        # # . . . . . .   # # . . . . . .   # # # . . . . .     # # . . . . . .
        # # # . . . . .   # # # . . . . .   # # # . . . . .     # # # . . . . .
        # # # # . . . .   . # # # . . . .   . . . # # # # #     . . . # . . . .
        # # # # # . . .   . . # # # . . .   . . . # # # # #     . . . # # . . .
        # # # # # # . .   . . . # # # . .   . . . # # # # #     . . . # # # . .
        # # # # # # # .   . . . . # # # .   . . . # # # # #     . . . # # # # .
        # # # # # # # #   . . . . . # # #   . . . # # # # #     . . . # # # # #
"""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch import Tensor

from attnmesh.errors import MaskError

FAR = 1 << 60
"""A distance beyond every position: no bound on that side."""


Verdict = Literal["full", "empty", "mixed"]


@dataclass(frozen=True)
class Mask:
    """Which keys each query sees. Make one with `Full`, `Causal`, `Window` or `Documents`, and join them with `&`.

    >>> import attnmesh as am
    >>> am.Causal() & am.Window(4, 4)
    Window(4)
    >>> am.Causal() & am.Full() == am.Causal()
    True
    >>> (am.Causal() & am.Documents((3, 5))).draw(8)[-1]
    '. . . # # # # #'
    """

    left: int = FAR
    right: int = FAR
    ends: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "ends", tuple(self.ends))
        if self.left < 0 or self.right < 0 or any(stop <= start for start, stop in pairwise((0, *self.ends))):
            given = f"left {self.left}, right {self.right}, ends {self.ends}"
            fix = "make masks with Full, Causal, Window and Documents"
            raise MaskError("Mask", "reaches of 0 or more and ascending ends of documents", given, fix)

    def bounds(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The first and the last position that the query at each position sees; neither ever decreases."""
        first, last = (positions - self.left).clamp(min=0), positions + self.right
        if self.ends:
            real = type(positions) is Tensor and positions.device.type == "cuda"
            edges = (_edges if real else _fresh_edges)(self.ends, positions.device)
            document = torch.searchsorted(edges[1:-1], positions, right=True)
            first = torch.maximum(first, edges[document])
            last = torch.minimum(last, edges[document + 1] - 1)
        return first, last

    def visible(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """The mask point by point, (queries, keys): True where the query sees the key."""
        first, last = (bound[:, None] for bound in self.bounds(q_positions))
        return (first <= k_positions) & (k_positions <= last)

    def verdict(self, queries: range, keys: range) -> Verdict:
        """Whether all, none or some of the pairs in a block of positions are visible.

        Exact for consecutive positions. For ranges with a step, "full" and "empty" still always hold.

        >>> import attnmesh as am
        >>> [am.Causal().verdict(range(4, 8), keys) for keys in (range(4), range(4, 8), range(8, 12))]
        ['full', 'mixed', 'empty']
        """
        if not queries or not keys:
            return "empty"
        (first_low, first_high), (last_low, last_high) = (
            b.tolist() for b in self.bounds(torch.tensor(_corners(queries)))
        )
        low, high = _corners(keys)
        if last_high < low or first_low > high:
            return "empty"
        return "full" if first_high <= low and high <= last_low else "mixed"

    def encode(self) -> list[int]:
        """The mask as plain integers, as an operator's schema and a wire can carry it."""
        return [self.left, self.right, *self.ends]

    @staticmethod
    def decode(code: Sequence[int]) -> "Mask":
        """The mask that `encode` wrote."""
        left, right, *ends = code
        return Mask(left, right, tuple(ends))

    def check_length(self, subject: str, length: int) -> None:
        """Raise unless the documents, if any, add up to exactly `length` tokens."""
        if self.ends and self.ends[-1] != length:
            fix = "let Documents(lengths) cover every token, padding as a document of its own"
            raise MaskError(subject, f"documents that add up to {length} tokens", f"{self.ends[-1]} tokens", fix)

    def draw(self, length: int) -> list[str]:
        """The mask over `length` tokens as text, a row a query."""
        positions = torch.arange(_count("draw", length))
        return [" ".join(".#"[seen] for seen in row) for row in self.visible(positions, positions).tolist()]

    def __and__(self, other: "Mask") -> "Mask":
        """Both masks at once."""
        if not isinstance(other, Mask):
            return NotImplemented
        if self.ends and other.ends:
            other.check_length("mask &", self.ends[-1])
        ends = tuple(sorted({*self.ends, *other.ends}))
        return Mask(min(self.left, other.left), min(self.right, other.right), ends)

    def __repr__(self) -> str:
        """The calls that make it."""
        lengths = [stop - start for start, stop in pairwise((0, *self.ends))]
        documents = f"Documents({lengths})" if lengths else ""
        return " & ".join(filter(None, (self._reach(), documents))) or "Full()"

    def _reach(self) -> str:
        match self.left, self.right:
            case (left, right) if left >= FAR and right >= FAR:
                return ""
            case (left, 0) if left >= FAR:
                return "Causal()"
            case (left, 0):
                return f"Window({left})"
            case (left, right):
                return f"Window({left}, {right})"


def Full() -> Mask:
    """Every query sees every key."""
    return Mask()


def Causal() -> Mask:
    """A query sees its own position and those before it."""
    return Mask(right=0)


def Window(left: int, right: int = 0) -> Mask:
    """A query sees its own position, the `left` before it and the `right` after it.

    That is `left + 1` positions for the causal `Window(left)`: a transformers `sliding_window=w` is `Window(w - 1)`.
    """
    return Mask(_count("Window left", left), _count("Window right", right))


def Documents(lengths: Iterable[int]) -> Mask:
    """Packed sequences: a query sees the keys of its own document. Join with `& Causal()` for language models."""
    if not isinstance(lengths, Iterable):
        raise MaskError("Documents", "a list of lengths", repr(lengths), "list each document's number of tokens")
    sizes = [_count("Documents length", length) for length in lengths]
    if sum(sizes) > FAR:
        raise MaskError("Documents", f"at most {FAR} tokens", f"{sum(sizes)} tokens", "check the unit of the lengths")
    if not any(sizes):
        raise MaskError("Documents", "at least one token", f"lengths {sizes}", "use Full() when there are no documents")
    return Mask(ends=tuple(sorted({*accumulate(sizes)} - {0})))


def check_mask(subject: str, mask: Mask, *lengths: int) -> None:
    """Raise unless it is a mask, and one whose documents, if any, add up to each of the lengths."""
    if not isinstance(mask, Mask):
        expected = "Full(), Causal(), Window(left), Documents(lengths) or a & of them"
        if callable(mask) and hasattr(mask, "__name__"):
            raise MaskError(subject, expected, f"{mask.__name__} itself", f"call it: {mask.__name__}()")
        fix = "use Full() for no mask; say which keys a query sees by position, not with a tensor"
        raise MaskError(
            subject, expected, repr(mask) if mask is None or isinstance(mask, str) else type(mask).__name__, fix
        )
    for length in lengths:
        mask.check_length(subject, length)


def _count(subject: str, value: int) -> int:
    """A number of tokens: any integer type, but no negative and no bool; beyond FAR it makes no difference."""
    try:
        count = value if isinstance(value, int) else operator.index(value)
    except TypeError:
        count = -1
    if isinstance(value, bool) or count < 0:
        raise MaskError(subject, "a whole number, 0 or more", repr(value), "count the tokens as a Python int")
    return min(count, FAR)


def _fresh_edges(ends: tuple[int, ...], device: torch.device) -> Tensor:
    """Where documents begin; tokens beyond are one more document."""
    return torch.tensor((0, *ends, FAR), device=device)


_edges = lru_cache(maxsize=64)(_fresh_edges)
"""The same, brought to a GPU once."""


def _corners(positions: range) -> tuple[int, int]:
    return min(positions[0], positions[-1]), max(positions[0], positions[-1])


@dataclass(frozen=True)
class Band:
    """For each query the run of key indices that it sees, `low[i] <= j < high[i]`."""

    low: Tensor
    high: Tensor

    @staticmethod
    def of(mask: Mask, q_positions: Tensor, k_positions: Tensor | int) -> "Band":
        """The band of ascending positions; keys given as a number are at 0, 1, 2, ..."""
        first, last = mask.bounds(q_positions)
        if isinstance(k_positions, int):
            return Band(first.clamp(max=k_positions), (last + 1).clamp(0, k_positions))
        return Band(torch.searchsorted(k_positions, first), torch.searchsorted(k_positions, last, right=True))

    def rows(self, start: int, stop: int, key: int) -> "Band":
        """The band of some of the queries, over keys counted from `key`."""
        return Band(self.low[start:stop] - key, self.high[start:stop] - key)

    def visible(self, keys: int) -> Tensor:
        """Point by point, (queries, keys)."""
        index = torch.arange(keys, device=self.low.device)
        return (self.low[:, None] <= index) & (index < self.high[:, None])
