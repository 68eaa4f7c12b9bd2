"""Masks: functions of token positions. Each query sees one interval of positions, and the intervals move forward.

Every mask is one value, `Mask(left, right, ends, chunks, spans)`: the query at position p sees the keys from `p - left`
to `p + right`, or to the end of its span, inside its document and its chunk. Both bounds never decrease with p, and an
intersection of masks is again a mask, but for some with spans, which raise.

        Causal()          Window(2)         Full() &            Causal() &                     Causal() & Chunks(3)
                                            Documents([3, 5])   Documents([3, 5])
        # . . . . . . .   # . . . . . . .   # # # . . . . .     # . . . . . . .                # . . . . . . .
        # # . . . . . .   # # . . . . . .   # # # . . . . .     # # . . . . . .                # # . . . . . .
        # # # . . . . .   # # # . . . . .   # # # . . . . .     # # # . . . . .                # # # . . . . .
        # # # # . . . .   . # # # . . . .   . . . # # # # #     . . . # . . . .                . . . # . . . .
        # # # # # . . .   . . # # # . . .   . . . # # # # #     . . . # # . . .                . . . # # . . .
        # # # # # # . .   . . . # # # . .   . . . # # # # #     . . . # # # . .                . . . # # # . .
        # # # # # # # .   . . . . # # # .   . . . # # # # #     . . . # # # # .                . . . . . . # .
        # # # # # # # #   . . . . . # # #   . . . # # # # #     . . . # # # # #                . . . . . . # #
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, chain, pairwise
from math import lcm
from operator import sub
from types import FunctionType
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from attnmesh.core.layout import Layout
from attnmesh.core.mask_drawing import drawn
from attnmesh.errors import MaskError, checked_count, warn_once

__all__ = ["Mask", "Full", "Causal", "Window", "Documents", "Chunks", "Spans"]

FAR = 1 << 60
"""A distance beyond every position: no bound on that side."""


@dataclass(frozen=True)
class Mask:
    """The keys that each query sees.

    Make it with a function of this file, as `Causal` or `Window`, and join with `&`.

    Args:
        left: How many positions before its own a query sees.
        right: How many after its own.
        ends: The end of each document, ascending. Empty if there are no documents.
        chunks: Sizes of chunks, ascending. A query sees the keys of its own chunk of each size.
        spans: The start and the end of each span, one after the other. A query sees the keys up to the end of its span.

    Raises:
        MaskError: If a value is no whole number, `left` or `right` is negative, `right` is not 0 with spans, `ends` or
            `spans` do not ascend, or a chunk or span is empty.

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
    spans: tuple[int, ...] = ()
    is_undirected: ClassVar[bool] = False
    """True for `Documents` or `Chunks` alone: the caller has said neither `Causal() &` nor `Full() &`."""

    def __post_init__(self) -> None:
        for name in ("ends", "chunks", "spans"):
            if isinstance(edges := getattr(self, name), Iterable):
                object.__setattr__(self, name, tuple(edges))
        if not self._is_valid():
            spans = f", spans {self.spans}" if self.spans else ""
            given = f"left {self.left}, right {self.right}, ends {self.ends}, chunks {self.chunks}{spans}"
            *others, last = (function.make.__name__ for function in _MASK_FUNCTIONS)
            fix = f"make masks with {', '.join(others)} and {last}"
            expected = "whole numbers: reaches of 0 or more (right=0 with spans), ascending ends, chunks and spans"
            raise MaskError("Mask", expected, given, fix)

    def _is_valid(self) -> bool:
        """Return whether the bounds are whole numbers, 0 or more, `right` is 0 with spans, and the edges ascend."""
        parts = (self.ends, self.chunks, self.spans)
        spans = self.spans
        if not all(isinstance(edges, tuple) for edges in parts):
            return False
        if not all(type(number) is int for number in (self.left, self.right, *chain(*parts))):
            return False
        ascending = all(start < stop for edges in parts[:2] for start, stop in pairwise((0, *edges)))
        causal = not spans or (not self.right and len(spans) % 2 == 0)
        filled = all(start < stop for start, stop in zip(spans[::2], spans[1::2], strict=False))
        ordered = all(start <= stop for start, stop in pairwise((0, *spans)))
        return self.left >= 0 and self.right >= 0 and ascending and causal and filled and ordered

    def __eq__(self, other: object) -> bool:
        """Return whether queries see the same keys. An undirected mask may equal a mask that is not."""
        if not isinstance(other, Mask):
            return NotImplemented
        own = self.left, self.right, self.ends, self.chunks, self.spans
        return own == (other.left, other.right, other.ends, other.chunks, other.spans)

    @cached_property
    def depends_on_length(self) -> bool:
        """True if the mask is of sequences of one length, which its documents add up to.

        It is cached for known steps. PyTorch cannot trace a cached property: code in graphs asks for `documents`.
        """
        return bool(self.ends)

    @property
    def documents(self) -> tuple[int, ...]:
        """Tokens of each document that has any."""
        return tuple(map(sub, self.ends, (0, *self.ends)))

    def document_edges(self, start: int, stop: int) -> list[int]:
        """Return `start`, the positions up to `stop` where a document begins, and `stop`.

        >>> import attnmesh as am
        >>> am.Documents((3, 5, 2)).document_edges(1, 9), am.Causal().document_edges(1, 9)
        ([1, 3, 8, 9], [1, 9])
        """
        return [start, *(end for end in self.ends if start < end < stop), stop]

    @property
    def span_pairs(self) -> tuple[tuple[int, int], ...]:
        """Start and end of each span."""
        return tuple(zip(self.spans[::2], self.spans[1::2], strict=True))

    @property
    def longest_document_or_chunk(self) -> int:
        """Its tokens; `FAR` if there are none."""
        return min((max(self.documents, default=FAR), *self.chunks))

    @property
    def max_distance(self) -> int:
        """Distance to a key that a query sees, at most."""
        ahead = (stop - 1 - start for start, stop in self.span_pairs)
        return min(max(self.left, self.right, *ahead), self.longest_document_or_chunk)

    @property
    def max_keys_per_query(self) -> int:
        """Keys that a query sees at most, but for those of its span."""
        return min(self.left + self.right + 1, self.longest_document_or_chunk)

    @property
    def period(self) -> int:
        """Shift of positions that leaves the mask the same, as its multiples do. The mask has no documents or spans."""
        return lcm(*self.chunks)

    @cached_property
    def is_by_distance(self) -> bool:
        """True if a query sees keys by their distance alone, as `distances` has it."""
        return self == Mask(self.left, self.right)

    def distances(self, most: int) -> tuple[int, int]:
        """Return how far back and how far ahead a query sees by distance, `most` at most."""
        return min(self.left, most), min(self.right, most)

    @property
    def is_symmetric(self) -> bool:
        """True if a query sees as far ahead as back, so that all queries take like work."""
        return self.left == self.right

    @property
    def is_at_any_distance(self) -> bool:
        """True if a query sees keys at any distance, before and after it, of its documents and chunks."""
        return self.left >= FAR and self.right >= FAR

    @property
    def is_causal(self) -> bool:
        """True if no query sees a later token."""
        return self.right == 0 and not self.spans

    @cached_property
    def max_causal_keys(self) -> int:
        """Keys that a query sees at most, up to its own; `FAR` if there is no limit."""
        return self.max_causal_keys_of(FAR)

    def max_causal_keys_of(self, length: int) -> int:
        """Return how many keys of `length` tokens a query sees at most, up to its own.

        >>> import attnmesh as am
        >>> (am.Window(5) & am.Chunks(4)).max_causal_keys_of(100), am.Causal().max_causal_keys_of(100)
        (4, 100)
        """
        documents = [self.longest_document_or_chunk] if self.ends else []  # a graph cannot trace that
        return min(length, self.left + 1, *self.chunks, *documents)

    def sees_no_further_back_than(self, widest: "Mask") -> bool:
        """Return whether queries see no earlier token than under the widest mask.

        >>> import attnmesh as am
        >>> am.Window(3, 2).sees_no_further_back_than(am.Window(4))
        True
        >>> am.Chunks(5).sees_no_further_back_than(am.Window(4))
        True
        >>> am.Causal().sees_no_further_back_than(am.Window(4)), am.Window(4).sees_no_further_back_than(am.Chunks(5))
        (False, False)
        """
        chunks = (any(size % smaller == 0 for smaller in self.chunks) for size in widest.chunks)
        documents = (end in self.ends[:-1] for end in widest.ends[:-1])
        return self.max_causal_keys_of(FAR) <= widest.max_causal_keys_of(FAR) and all(chunks) and all(documents)

    def scaled(self, scale: Callable[[int], int]) -> "Mask":
        """Return the mask of a shorter problem, in which n tokens of this one are `scale(n)`.

        >>> import attnmesh as am
        >>> (am.Window(8) & am.Documents((10, 30))).scaled(lambda tokens: tokens // 5)
        Window(1) & Documents([2, 6])
        """
        ends, chunks = (sorted({max(1, scale(edge)) for edge in edges}) for edges in (self.ends, self.chunks))
        pairs = ((scale(start), scale(stop)) for start, stop in self.span_pairs)
        spans = chain(*(pair for pair in pairs if pair[0] < pair[1]))
        left, right = scale(self.left), scale(self.right)
        return type(self)(left, right, tuple(ends), tuple(chunks), tuple(spans))

    def cropped(self, length: int) -> "Mask":
        """Return the mask of the first `length` tokens alone.

        >>> import attnmesh as am
        >>> am.Documents((3, 5, 2)).cropped(7)
        Full() & Documents([3, 4])
        """
        return replace(self, ends=tuple(self.document_edges(0, length)[1:])) if self.ends else self

    def in_documents(self, documents: "Mask") -> "Mask":
        """Return the mask inside each document, in which chunks begin anew.

        >>> import attnmesh as am
        >>> (am.Causal() & am.Chunks(4)).in_documents(am.Documents((5, 3)))
        Causal() & Documents([4, 1, 3])
        """
        if not (self.chunks and documents.ends):
            return self & documents
        runs = pairwise((0, *documents.ends))
        pieces = (range(start + size, stop, size) for start, stop in runs for size in self.chunks)
        return replace(self, chunks=()) & Mask(ends=tuple(sorted({*documents.ends, *chain(*pieces)})))

    def bounds(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first and the last position that each query sees. Neither decreases along ascending positions.

        >>> import attnmesh as am
        >>> am.Window(2).bounds(torch.arange(5))
        (tensor([0, 0, 0, 1, 2]), tensor([0, 1, 2, 3, 4]))
        """
        first = (positions - self.left).clamp(min=0)
        last = positions + self.right
        if self.spans:
            edges = _edges_beside(positions, self.spans)
            edge = torch.searchsorted(edges[1:-1], positions, right=True)  # odd inside a span
            last = torch.where(edge % 2 == 1, torch.maximum(last, edges[edge + 1] - 1), last)
        if self.ends:
            edges = _edges_beside(positions, self.ends)
            document = torch.searchsorted(edges[1:-1], positions, right=True)
            first = torch.maximum(first, edges[document])
            last = torch.minimum(last, edges[document + 1] - 1)
        for size in self.chunks:
            start = positions - positions % size
            first = torch.maximum(first, start)
            last = torch.minimum(last, start + (size - 1))
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

    def to_code(self) -> list[int]:
        """Return the mask as integers, for the schema of an operator and for messages."""
        return [self.left, self.right, len(self.chunks), *self.chunks, *self.ends, *(-1 - edge for edge in self.spans)]

    @staticmethod
    def from_code(code: Sequence[int]) -> "Mask":
        """Return the mask of a code from `to_code`."""
        left, right, chunk_count, *numbers = map(int, code)  # a graph is traced anew for another mask
        chunks, edges = tuple(numbers[:chunk_count]), numbers[chunk_count:]
        ends = tuple(edge for edge in edges if edge >= 0)
        return Mask(left, right, ends, chunks, tuple(-1 - edge for edge in edges if edge < 0))

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
        positions = torch.arange(_count("draw", length), device="cpu")
        return drawn(self.visible(positions, positions), layout, shape)

    def __and__(self, other: "Mask") -> "Mask":
        """Return the intersection of two masks."""
        if not isinstance(other, Mask):
            return NotImplemented
        if self.ends and other.ends:
            other.check_length("mask &", self.ends[-1])
        ends = tuple(sorted({*self.ends, *other.ends}))
        sizes = sorted({*self.chunks, *other.chunks})
        chunks = tuple(size for n, size in enumerate(sizes) if all(size % smaller for smaller in sizes[:n]))
        reach = (min(self.left, other.left), min(self.right, other.right))
        spans = self._common_spans(other)
        kind = _UndirectedMask if self.is_undirected and other.is_undirected else Mask
        return kind(*reach, ends, chunks, spans)

    def _common_spans(self, other: "Mask") -> tuple[int, ...]:
        """Return the spans of an intersection: none if queries see no later tokens in one mask. Raise if unknown."""
        first, second = (self, other) if self.spans else (other, self)
        if first.spans == second.spans or not (second.spans or second.right):
            return second.spans
        if not second.spans and second.right >= FAR:
            return first.spans
        expected = "the same spans, or a mask that shows all later tokens"
        fix = "pass all spans, and the window of earlier tokens, to one Spans(ranges, left)"
        raise MaskError("mask &", expected, f"{self} & {other}", fix)

    def __repr__(self) -> str:
        """Return the calls that make the mask."""
        window = f"Window({self.left})" if self.right == 0 else f"Window({self.left}, {self.right})"
        if self.left >= FAR and not 0 < self.right < FAR:
            window = "Causal()" if self.right == 0 else "Full()"
        if self.spans:
            pairs = [*self.span_pairs]
            window = f"Spans({pairs})" if self.left >= FAR else f"Spans({pairs}, {self.left})"
        documents = f"Documents({[*self.documents]})" if self.ends else ""
        chunks = (f"Chunks({size})" for size in self.chunks)
        return " & ".join(filter(None, (window, documents, *chunks)))


class _UndirectedMask(Mask):
    """A mask of documents or chunks alone, which will be refused. It equals the one that shows later tokens.

    A memo of checked calls tells the two apart by their types. Otherwise a call with the equal mask, made before, would
    spare this one its check.
    """

    is_undirected = True


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

    Say if it sees later ones: `Causal() & Documents(lengths)` for language models, `Full() & Documents(lengths)` for
    encoders. Attention under documents alone is the latter, with a `FutureWarning`.

    Args:
        lengths: Tokens of each document, in order. They must add up to the length of the sequence.

    Raises:
        MaskError: If lengths are not whole numbers, 0 or more, or add up to no tokens or to too many.

    >>> import attnmesh as am
    >>> (am.Full() & am.Documents([1, 2])).draw(3)
    ['# . .', '. # #', '. # #']
    """
    if not isinstance(lengths, Iterable):
        raise MaskError("Documents", "a list of lengths", repr(lengths), "list each document's number of tokens")
    sizes = [_count("Documents length", length) for length in lengths]
    if sum(sizes) > FAR:
        raise MaskError("Documents", f"at most {FAR} tokens", f"{sum(sizes)} tokens", "check the unit of the lengths")
    if not any(sizes):
        raise MaskError("Documents", "at least one token", f"lengths {sizes}", "use Full() when there are no documents")
    return _UndirectedMask(ends=tuple(sorted({*accumulate(sizes)} - {0})))


def Chunks(size: int) -> Mask:
    """Return the mask under which a query sees the keys of its own chunk. Chunks begin at multiples of `size`.

    Say if it sees later ones: `Causal() & Chunks(size)`, as Llama 4 has it, or `Full() & Chunks(size)`. Attention under
    chunks alone is the latter, with a `FutureWarning`.

    Args:
        size: Tokens of a chunk, 1 or more.

    Raises:
        MaskError: If it is not a whole number, 1 or more.

    >>> import attnmesh as am
    >>> (am.Causal() & am.Chunks(2)).draw(4)
    ['# . . .', '# # . .', '. . # .', '. . # #']
    """
    size = checked_count("Chunks size", size, "count the tokens of a chunk as a Python int", least=1, error=MaskError)
    return _UndirectedMask(chunks=(size,) if size < FAR else ())


def Spans(ranges: Iterable[Sequence[int]], left: int = FAR) -> Mask:
    """Return the causal mask under which the tokens of a span also see its later ones, as those of an image do.

    Args:
        ranges: The start and the stop of each span, in order and apart, as of a Python range.
        left: Positions before the query's own, 0 or more, also in its span.

    Raises:
        MaskError: If starts and stops are not whole numbers that ascend.

    >>> import attnmesh as am
    >>> am.Spans([(1, 4)], 1).draw(5)
    ['# . . . .', '# # # # .', '. # # # .', '. . # # .', '. . . # #']
    """
    left = _count("Spans left", left)
    try:
        return Mask(left, 0, spans=tuple(edge for start, stop in ranges for edge in (start, stop)))
    except (MaskError, TypeError, ValueError):
        expected, fix = "pairs of start and stop, in order and apart", "pass spans such as [(3, 7), (9, 12)]"
        raise MaskError("Spans", expected, repr(ranges), fix) from None


class _MaskFunction(NamedTuple):
    """A function that makes masks, with a call of it for texts of errors."""

    make: Callable[..., Mask]
    call: str
    part_field: str | None = None
    """The field of `Mask` that it sets, if it says within which part of the sequence a query sees, but not how far."""


_MASK_FUNCTIONS = (
    _MaskFunction(Full, "Full()"),
    _MaskFunction(Causal, "Causal()"),
    _MaskFunction(Window, "Window(left)"),
    _MaskFunction(Spans, "Spans(ranges)"),
    _MaskFunction(Documents, "Documents(lengths)", "ends"),
    _MaskFunction(Chunks, "Chunks(size)", "chunks"),
)
"""All functions that make masks. Of a mask of parts alone, which does not say how far a query sees, a check warns."""


def check_mask(subject: str, mask: Mask, *lengths: int) -> None:
    """Raise unless mask is a `Mask`, and its documents, if any, add up to each of the lengths."""
    if not isinstance(mask, Mask):
        reaches = {function.make: function.call for function in _MASK_FUNCTIONS if function.part_field is None}
        parts = {function.make: function.call for function in _MASK_FUNCTIONS if function.part_field is not None}
        expected = f"{', '.join(reaches.values())}, or one of them & {' or '.join(parts.values())}"
        calls = {Mask: "Mask()", **reaches, **{make: f"Causal() & {call}" for make, call in parts.items()}}
        if isinstance(mask, (FunctionType, type)) and mask in calls:
            raise MaskError(subject, expected, f"{mask.__name__} itself", f"call it: {calls[mask]}")
        given = repr(mask) if mask is None or isinstance(mask, str) else type(mask).__name__
        fix = "use Full() for no mask; say which keys a query sees by position, not with a tensor or a function"
        raise MaskError(subject, expected, given, fix)
    for length in lengths:
        mask.check_length(subject, length)
    if mask.is_undirected and not torch.compiler.is_compiling():
        fields = ((each.call, each.part_field) for each in _MASK_FUNCTIONS if each.part_field is not None)
        alone = next(call for call, field in fields if getattr(mask, field))
        which = f"Say which: am.Causal() & am.{alone} hides later tokens, am.Full() & am.{alone} shows them"
        warn_once(f"{subject}: {alone} alone shows later tokens, and will be refused. {which}.", FutureWarning)


def _count(subject: str, value: int) -> int:
    """Return a number of tokens, at most `FAR`, or raise."""
    return min(checked_count(subject, value, "count the tokens as a Python int", least=0, error=MaskError), FAR)


def _edges_beside(positions: Tensor, inner: tuple[int, ...]) -> Tensor:
    """Return the edges of documents or spans on the device of positions, from the first one to beyond the last."""
    device = positions.device
    if device.type == "cuda" and not torch.compiler.is_compiling():
        if torch.cuda.is_current_stream_capturing():
            # A CUDA graph has edges of its own: it cannot copy them, and cached ones may be gone before it is replayed.
            return torch.stack([torch.full((), edge, device=device) for edge in (0, *inner, FAR)])
        if type(positions) is Tensor:
            return _cached_edges(inner, device)
    return _edges(inner, device)


def _edges(inner: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor((0, *inner, FAR), device=device)


_cached_edges = lru_cache(maxsize=64)(_edges)
"""Returns the edges, cached: without the cache each call would copy them to the GPU."""
