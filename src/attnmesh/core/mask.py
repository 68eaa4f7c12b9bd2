"""Masks: functions of token positions. Each query sees one interval of positions, and the intervals move forward.

Every mask is one value, `Mask(left, right, ends, chunks)`: the query at position p sees the keys from `p - left` to
`p + right` inside its document and its chunk. Both bounds never decrease with p, and an intersection of masks is again
a mask. A `Band` is a mask applied to the positions of some queries and keys.

        Causal()          Window(2)         Documents([3, 5])   Causal() & Documents([3, 5])   Causal() & Chunks(3)
        # . . . . . . .   # . . . . . . .   # # # . . . . .     # . . . . . . .                # . . . . . . .
        # # . . . . . .   # # . . . . . .   # # # . . . . .     # # . . . . . .                # # . . . . . .
        # # # . . . . .   # # # . . . . .   # # # . . . . .     # # # . . . . .                # # # . . . . .
        # # # # . . . .   . # # # . . . .   . . . # # # # #     . . . # . . . .                . . . # . . . .
        # # # # # . . .   . . # # # . . .   . . . # # # # #     . . . # # . . .                . . . # # . . .
        # # # # # # . .   . . . # # # . .   . . . # # # # #     . . . # # # . .                . . . # # # . .
        # # # # # # # .   . . . . # # # .   . . . # # # # #     . . . # # # # .                . . . . . . # .
        # # # # # # # #   . . . . . # # #   . . . # # # # #     . . . # # # # #                . . . . . . # #
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from attnmesh.core.layout import Layout, Packed, check_layout, check_shape
from attnmesh.errors import MaskError, check_count

RANKS = "0123456789abcdefghijklmnopqrstuvwxyz"
"""Characters of ranks in a drawing. They begin anew after the last."""

FAR = 1 << 60
"""A distance beyond every position: no bound on that side."""


@dataclass(frozen=True)
class Mask:
    """The keys that each query sees. Make it with `Full`, `Causal`, `Window`, `Documents`, `Chunks`, and join with `&`.

    Args:
        left: How many positions before its own a query sees.
        right: How many positions after its own a query sees.
        ends: The end of each document, ascending. Empty if there are no documents.
        chunks: Sizes of chunks, ascending. A query sees the keys of its own chunk of each size.

    Raises:
        MaskError: If a value is no whole number, `left` or `right` is negative, `ends` does not ascend, or a chunk is
            empty.

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
    chunks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.ends, Iterable) and isinstance(self.chunks, Iterable):
            object.__setattr__(self, "ends", tuple(self.ends))
            object.__setattr__(self, "chunks", tuple(self.chunks))
        if not self._is_valid():
            given = f"left {self.left}, right {self.right}, ends {self.ends}, chunks {self.chunks}"
            fix = "make masks with Full, Causal, Window, Documents and Chunks"
            expected = "whole numbers: reaches of 0 or more, ascending ends and ascending chunks"
            raise MaskError("Mask", expected, given, fix)

    def _is_valid(self) -> bool:
        """Return whether the bounds are whole numbers, 0 or more, and the edges ascend."""
        both = self.ends, self.chunks
        if not all(isinstance(edges, tuple) for edges in both):
            return False
        if not all(type(number) is int for number in (self.left, self.right, *self.ends, *self.chunks)):
            return False
        ascending = all(start < stop for edges in both for start, stop in pairwise((0, *edges)))
        return self.left >= 0 and self.right >= 0 and ascending

    @property
    def documents(self) -> tuple[int, ...]:
        """Tokens of each document that has any."""
        return tuple(stop - start for start, stop in pairwise((0, *self.ends)))

    @property
    def longest(self) -> int:
        """Tokens of the longest document or chunk; `FAR` if there are none."""
        return min((max(self.documents, default=FAR), *self.chunks))

    @property
    def reach(self) -> int:
        """Distance to the farthest key that a query sees."""
        return min(max(self.left, self.right), self.longest)

    def bounds(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first and the last position that each query sees. Neither decreases along ascending positions.

        >>> import attnmesh as am
        >>> am.Window(2).bounds(torch.arange(5))
        (tensor([0, 0, 0, 1, 2]), tensor([0, 1, 2, 3, 4]))
        """
        first, last = (positions - self.left).clamp(min=0), positions + self.right
        if self.ends:
            on_gpu = type(positions) is Tensor and positions.device.type == "cuda"
            edges = (_cached_edges if on_gpu else _edges)(self.ends, positions.device)
            document = torch.searchsorted(edges[1:-1], positions, right=True)
            first = torch.maximum(first, edges[document])
            last = torch.minimum(last, edges[document + 1] - 1)
        for size in self.chunks:
            start = positions - positions % size
            first, last = torch.maximum(first, start), torch.minimum(last, start + (size - 1))
        return first, last

    def first_seen(self, position: int) -> int:
        """Return the first position that a query sees, of a mask without documents.

        >>> import attnmesh as am
        >>> [(am.Window(5) & am.Chunks(4)).first_seen(position) for position in (3, 4, 12)]
        [0, 4, 12]
        """
        first = max(0, position - self.left)
        for size in self.chunks:
            first = max(first, position - position % size)
        return first

    def visible(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """Return the dense mask, (queries, keys): True where the query sees the key.

        >>> import attnmesh as am
        >>> am.Causal().visible(torch.arange(2), torch.arange(2))
        tensor([[ True, False],
                [ True,  True]])
        """
        first, last = (bound[:, None] for bound in self.bounds(q_positions))
        return (first <= k_positions) & (k_positions <= last)

    def encode(self) -> list[int]:
        """Return the mask as integers, for the schema of an operator and for messages."""
        return [self.left, self.right, len(self.chunks), *self.chunks, *self.ends]

    @staticmethod
    def decode(code: Sequence[int]) -> "Mask":
        """Return the mask of a code from `encode`."""
        left, right, chunks, *edges = code
        return Mask(left, right, tuple(edges[chunks:]), tuple(edges[:chunks]))

    def check_length(self, subject: str, length: int) -> None:
        """Raise unless the documents, if any, add up to `length` tokens."""
        if self.ends and self.ends[-1] != length:
            fix = "let Documents(lengths) cover every token, padding as a document of its own"
            raise MaskError(subject, f"documents that add up to {length} tokens", f"{self.ends[-1]} tokens", fix)

    def draw(self, length: int, layout: Layout | None = None, shape: tuple[int, int, int] | None = None) -> list[str]:
        """Return the mask over `length` tokens as text, one line per query.

        With a layout and the shape of a mesh, which `Packed` knows, a pair is drawn as the rank that computes it: 0 to
        9, then letters. Ranks along heads compute the same pairs.

        >>> import attnmesh as am
        >>> am.Causal().draw(3)
        ['# . .', '# # .', '# # #']
        >>> (am.Causal() & am.Documents((4, 1, 1))).draw(6, am.Packed((4, 1, 1), am.Shape(1, 1, 2)))
        ['0 . . . . .', '0 1 . . . .', '0 1 1 . . .', '0 1 1 0 . .', '. . . . 0 .', '. . . . . 1']
        """
        positions = torch.arange(_count("draw", length))
        visible = self.visible(positions, positions)
        if layout is None:
            return [" ".join(".#"[seen] for seen in row) for row in visible.tolist()]
        check_layout("draw layout", layout)
        own = layout.shape if isinstance(layout, Packed) else (1, 1, 1)
        heads, rows, columns = own if shape is None else check_shape("draw shape", shape)
        cells = torch.empty(length, dtype=torch.long)
        for shard in range(heads * rows * columns):
            cells[layout.positions(length, heads * rows * columns, shard)] = shard % (rows * columns)
        ranks = cells[:, None] // columns * columns + cells % columns
        drawn = (ranks % len(RANKS) + 1) * visible
        return [" ".join(f".{RANKS}"[rank] for rank in row) for row in drawn.tolist()]

    def __and__(self, other: "Mask") -> "Mask":
        """Return the intersection of two masks."""
        if not isinstance(other, Mask):
            return NotImplemented
        if self.ends and other.ends:
            other.check_length("mask &", self.ends[-1])
        ends, sizes = tuple(sorted({*self.ends, *other.ends})), sorted({*self.chunks, *other.chunks})
        chunks = tuple(size for n, size in enumerate(sizes) if all(size % smaller for smaller in sizes[:n]))
        return Mask(min(self.left, other.left), min(self.right, other.right), ends, chunks)

    def __repr__(self) -> str:
        """Return the calls that make the mask."""
        window = f"Window({self.left})" if self.right == 0 else f"Window({self.left}, {self.right})"
        if self.left >= FAR and not 0 < self.right < FAR:
            window = "Causal()" if self.right == 0 else ""
        lengths = [stop - start for start, stop in pairwise((0, *self.ends))]
        documents = f"Documents({lengths})" if lengths else ""
        chunks = (f"Chunks({size})" for size in self.chunks)
        return " & ".join(filter(None, (window, documents, *chunks))) or "Full()"


FULL, CAUSAL = Mask(), Mask(right=0)
"""Results of `Full()` and `Causal()`."""


def Full() -> Mask:
    """Return the mask under which every query sees every key.

    >>> import attnmesh as am
    >>> am.Full().draw(2)
    ['# #', '# #']
    """
    return FULL


def Causal() -> Mask:
    """Return the mask under which a query sees its own position and all before it.

    >>> import attnmesh as am
    >>> am.Causal().draw(2)
    ['# .', '# #']
    """
    return CAUSAL


def Window(left: int, right: int = 0) -> Mask:
    """Return the mask under which a query sees its own position, `left` before it and `right` after it.

    The causal `Window(left)` has `left + 1` positions: `sliding_window=w` of transformers is `Window(w - 1)`.

    Args:
        left: Positions before the query's own, 0 or more.
        right: Positions after the query's own, 0 or more.

    Raises:
        MaskError: If one of them is not a whole number, 0 or more.

    >>> import attnmesh as am
    >>> am.Window(1).draw(3)
    ['# . .', '# # .', '. # #']
    """
    return Mask(_count("Window left", left), _count("Window right", right))


def Documents(lengths: Iterable[int]) -> Mask:
    """Return the mask of packed sequences: a query sees the keys of its own document.

    Combine it with `& Causal()` for language models.

    Args:
        lengths: Tokens of each document, in order. They must add up to the length of the sequence.

    Raises:
        MaskError: If lengths are not whole numbers, 0 or more, or add up to no tokens or to too many.

    >>> import attnmesh as am
    >>> am.Documents([1, 2]).draw(3)
    ['# . .', '. # #', '. # #']
    """
    if not isinstance(lengths, Iterable):
        raise MaskError("Documents", "a list of lengths", repr(lengths), "list each document's number of tokens")
    sizes = [_count("Documents length", length) for length in lengths]
    if sum(sizes) > FAR:
        raise MaskError("Documents", f"at most {FAR} tokens", f"{sum(sizes)} tokens", "check the unit of the lengths")
    if not any(sizes):
        raise MaskError("Documents", "at least one token", f"lengths {sizes}", "use Full() when there are no documents")
    return Mask(ends=tuple(sorted({*accumulate(sizes)} - {0})))


def Chunks(size: int) -> Mask:
    """Return the mask under which a query sees the keys of its own chunk. Chunks begin at multiples of `size`.

    Combine it with `& Causal()` for language models such as Llama 4.

    Args:
        size: Tokens of a chunk, 1 or more.

    Raises:
        MaskError: If it is not a whole number, 1 or more.

    >>> import attnmesh as am
    >>> (am.Chunks(2) & am.Causal()).draw(4)
    ['# . . .', '# # . .', '. . # .', '. . # #']
    """
    size = check_count("Chunks size", size, "count the tokens of a chunk as a Python int", least=1, error=MaskError)
    return Mask(chunks=(size,)) if size < FAR else Mask()


def check_mask(subject: str, mask: Mask, *lengths: int) -> None:
    """Raise unless mask is a `Mask`, and its documents, if any, add up to each of the lengths."""
    if not isinstance(mask, Mask):
        expected = "Full(), Causal(), Window(left), Documents(lengths), Chunks(size) or a & of them"
        if callable(mask) and hasattr(mask, "__name__"):
            raise MaskError(subject, expected, f"{mask.__name__} itself", f"call it: {mask.__name__}()")
        given = repr(mask) if mask is None or isinstance(mask, str) else type(mask).__name__
        fix = "use Full() for no mask; say which keys a query sees by position, not with a tensor"
        raise MaskError(subject, expected, given, fix)
    for length in lengths:
        mask.check_length(subject, length)


def _count(subject: str, value: int) -> int:
    """Return a number of tokens, at most `FAR`, or raise."""
    return min(check_count(subject, value, "count the tokens as a Python int", least=0, error=MaskError), FAR)


def _edges(ends: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the start of each document, and of one more for tokens beyond the last."""
    return torch.tensor((0, *ends, FAR), device=device)


_cached_edges = lru_cache(maxsize=64)(_edges)
"""As `_edges`. The cache avoids a copy to the GPU per call."""


@dataclass(frozen=True)
class Band:
    """A run of key indices per query: query i sees the keys j with `low[i] <= j < high[i]`."""

    low: Tensor
    high: Tensor

    @staticmethod
    def of(mask: Mask, q_positions: Tensor, k_positions: Tensor | int) -> "Band":
        """Return the band of a mask over ascending positions. An int n stands for the key positions 0..n-1."""
        first, last = mask.bounds(q_positions)
        if isinstance(k_positions, int):
            return Band(first.clamp(max=k_positions), (last + 1).clamp(0, k_positions))
        return Band(torch.searchsorted(k_positions, first), torch.searchsorted(k_positions, last, right=True))

    def rows(self, start: int, stop: int, key: int) -> "Band":
        """Return the band of the queries from start to stop, with key indices relative to `key`."""
        return Band(self.low[start:stop] - key, self.high[start:stop] - key)

    def first(self, keys: int) -> "Band":
        """Return the band over the first keys alone."""
        return Band(self.low, self.high.clamp(max=keys))

    def visible(self, keys: int) -> Tensor:
        """Return the dense mask, (queries, keys)."""
        index = torch.arange(keys, device=self.low.device)
        return (self.low[:, None] <= index) & (index < self.high[:, None])
