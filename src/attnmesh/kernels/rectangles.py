"""Rectangles: a local problem, in any layout and under any mask, cut into few of them, and the loops over them.

Queries and keys are sorted by position. Query i then sees one run of keys, from `low[i]` up to `high[i]`, and both
bounds only move forward: a `Band`. Consecutive rows of one kind become one rectangle, of any length:

        full     every row sees every key of it
        causal   a square whose row i sees its keys 0..i
        masked   a tile of few rows, with bounds per row

A causal square is one call, packed documents are one call each, and a window is tiles along its diagonal. Invisible
keys are in no rectangle. A dense mask is never larger than one tile's rows by their visible keys.

A loop runs a kernel on each rectangle. It merges the partials, or sums the gradients in float32 or wider.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from attnmesh.core.band import Band
from attnmesh.core.partial import Partial, identity, merge_into, sum_dtype
from attnmesh.runtime.memo import TENSOR_MEMO

T = TypeVar("T")

MASKED_TILE_ROWS = 128
"""Rows of a masked tile: enough for an efficient matrix product, few enough to waste little along a window's edges."""

TILE_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 27}
"""Elements of a tile at most: few enough for a CPU's cache, enough to fill a GPU."""

MIN_RUN = 64
"""Rows of one kind that are worth a rectangle. Shorter runs go into tiles."""


class RowKind(IntEnum):
    """Keys that the rows of a run see, by the link between each two neighbours. A tensor holds kinds as numbers."""

    FULL = 0  # the same keys
    CAUSAL = 1  # the later row sees one key more
    MASKED = 2  # anything else


def tile_elements(device: torch.device, most: Mapping[str, int] = TILE_ELEMENTS) -> int:
    """Return the elements of a tile on a device at most."""
    return most.get(device.type, most["cuda"])


@dataclass(frozen=True)
class Rectangle:
    """A rectangle of queries and keys to attend in one call."""

    queries: slice
    keys: slice
    causal: bool = False
    band: Band | None = None
    """Bounds per row within it; None if full or causal."""

    def bounds(self) -> Band:
        """Return the bounds of each row within the rectangle, for any kind of rectangle."""
        if self.band is not None:
            return self.band
        rows, keys = (part.stop - part.start for part in (self.queries, self.keys))
        high = torch.arange(1, rows + 1, device="cpu") if self.causal else torch.full((rows,), keys, device="cpu")
        return Band(torch.zeros(rows, dtype=torch.long, device="cpu"), high)

    def visible(self) -> Tensor:
        """Return the dense mask, (queries, keys)."""
        return self.bounds().visible(self.keys.stop - self.keys.start)

    def unseeing_rows(self) -> Tensor:
        """Return the indices of rows that see no key of the rectangle."""
        if self.band is None:
            return torch.empty(0, dtype=torch.long, device="cpu")
        keys = self.keys.stop - self.keys.start
        return (self.band.high.clamp(max=keys) <= self.band.low.clamp(min=0)).nonzero().flatten()

    def slices(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rectangle's queries, keys and values."""
        return q[:, :, self.queries], k[:, :, self.keys], v[:, :, self.keys]

    def select(self, rows: Tensor) -> "Rectangle":
        """Return a rectangle of some of the rows, over the same keys."""
        bounds = self.bounds()
        return Rectangle(slice(0, len(rows)), self.keys, band=Band(bounds.low[rows], bounds.high[rows]))


class Gradients(NamedTuple):
    """The gradients of q, k and v, in the shapes of these."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class BackwardInputs:
    """Tensors for the backward pass: out and lse over *all* keys, and the gradient of out.

    Of `out` only `sum(out * dout)` of each row counts. Ranks send this sum alone, so `out` may be any tensor with it.
    """

    out: Tensor
    """(batch, heads, queries, value_dim)."""
    lse: Tensor
    """(batch, heads, queries)."""
    dout: Tensor
    """Shaped like `out`."""

    def select_queries(self, queries: slice) -> "BackwardInputs":
        """Return the tensors of some of the queries."""
        return BackwardInputs(*(x[:, :, queries] for x in (self.out, self.lse, self.dout)))

    def select_sequences(self, sequences: slice) -> "BackwardInputs":
        """Return the tensors of some sequences."""
        return BackwardInputs(*(x[sequences] for x in (self.out, self.lse, self.dout)))


def memo_of_band(band: Band, name: Hashable, make: Callable[[], T], size: Callable[[T], int]) -> T:
    """Return what was made of a band, now or at an earlier call. `size` counts its bytes."""

    def with_low() -> tuple[Tensor, T]:  # keeps `band.low` alive, so that no other tensor gets its id
        return band.low, make()

    return TENSOR_MEMO.get_or_make(
        band.high, (id(band.low), name), with_low, lambda low_and_made: size(low_and_made[1])
    )[1]


def cut(band: Band) -> list[Rectangle]:
    """Return rectangles that contain every visible pair of the band exactly once.

    >>> import attnmesh as am
    >>> rectangles = cut(Band.of(am.Documents((100, 200)), torch.arange(300), 300))
    >>> [(rectangle.queries, rectangle.keys) for rectangle in rectangles]
    [(slice(0, 100, None), slice(0, 100, None)), (slice(100, 300, None), slice(100, 300, None))]
    """
    rectangles, staircases = list[Rectangle](), list[list[Rectangle]]()
    for kind, start, stop in _runs(band):
        for rectangle in _CUT[kind](band, start, stop):
            if rectangle.causal or rectangle.band is not None:
                rectangles.append(rectangle)
            elif staircases and _is_stair(staircases[-1][-1], rectangle):
                staircases[-1].append(rectangle)
            else:
                staircases.append([rectangle])
    for staircase in staircases:
        rectangles += _tall_rectangles(staircase, staircase[0].keys.start)
    return sorted(rectangles, key=lambda rectangle: (rectangle.queries.start, -rectangle.queries.stop))


def _is_stair(last: Rectangle, rectangle: Rectangle) -> bool:
    """Return whether the next rows see the keys that the last ones see, and more."""
    return (last.queries.stop, last.keys.start) == (rectangle.queries.start, rectangle.keys.start)


def _tall_rectangles(stairs: Sequence[Rectangle], first: int) -> Iterator[Rectangle]:
    """Yield the pairs of a staircase from key `first` on, in as many rectangles as it has stairs.

    The keys that all rows of the later half see are one rectangle of these rows; what remains of both halves is cut
    alike. A rectangle of more rows is faster.
    """
    if not stairs:
        return
    middle = len(stairs) // 2
    stop = stairs[middle].keys.stop
    if first < stop:
        yield Rectangle(slice(stairs[middle].queries.start, stairs[-1].queries.stop), slice(first, stop))
    yield from _tall_rectangles(stairs[:middle], first)
    yield from _tall_rectangles(stairs[middle + 1 :], stop)


def cut_into_tiles(band: Band, rows: int, keys: int) -> list[Rectangle]:
    """Return the band's pairs in tiles of at most `rows` x `keys`, for a kernel that needs memory for each pair."""
    rectangles = []
    for tile in _tiles(band, 0, len(band.low), rows):
        bounds = tile.bounds()
        width = tile.keys.stop - tile.keys.start
        for start in range(0, width, keys):
            stop = min(start + keys, width)
            full = bounds.low[-1] <= start and stop <= bounds.high[0]
            some_keys = slice(tile.keys.start + start, tile.keys.start + stop)
            some_bounds = None if full else bounds.select_queries(0, len(bounds.low), start)
            rectangles.append(Rectangle(tile.queries, some_keys, band=some_bounds))
    return rectangles


def attend_rectangles(
    attend: Callable[[Tensor, Tensor, Tensor, Rectangle], Partial],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rectangles: Sequence[Rectangle],
) -> Partial:
    """Return the merge of the partials of rectangles, with out in q's dtype or wider.

    Rectangles come in order of their first row. Either all rows of a rectangle have a partial already, or none has.
    """
    overlap = any(after.queries.start < before.queries.stop for before, after in pairwise(rectangles))
    total = identity(q, v.shape[-1], sum_dtype(q.dtype) if overlap else q.dtype)
    done = 0  # rows from here on have no partial yet
    for rectangle in rectangles:
        before = Partial(*(x[:, :, rectangle.queries] for x in total))
        partial = attend(*rectangle.slices(q, k, v), rectangle)
        if rectangle.queries.start < done:
            merge_into(before, partial)
        else:
            before.out.copy_(partial.out)
            before.lse.copy_(partial.lse)
        done = max(done, rectangle.queries.stop)
    return total


def backward_rectangles(
    backward: Callable[[Tensor, Tensor, Tensor, BackwardInputs, Rectangle], Gradients],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inputs: BackwardInputs,
    rectangles: Sequence[Rectangle],
) -> Gradients:
    """Return the sum of the gradients of rectangles, in float32 or wider."""
    total = Gradients(*(torch.zeros_like(x, dtype=sum_dtype(x.dtype)) for x in (q, k, v)))
    for rectangle in rectangles:
        part = backward(*rectangle.slices(q, k, v), inputs.select_queries(rectangle.queries), rectangle)
        for gradient, share in zip(rectangle.slices(*total), part, strict=True):
            gradient.add_(share)
    return total


def _runs(band: Band) -> Iterator[tuple[RowKind, int, int]]:
    """Yield (kind, start, stop): rows joined by links of one kind, and the rows between them as `MASKED`."""
    rows = len(band.low)
    row = 0
    link = 0
    kinds, counts = _links(band)
    for kind, count in zip(kinds, counts, strict=True):
        link += count
        # The row between two runs belongs to the one that is not masked; if neither is, to the first.
        stop = link if kind == RowKind.MASKED and link < rows - 1 else link + 1
        if row < stop:
            yield kind, row, stop
            row = stop
    if row < rows:  # a single row has no links
        yield RowKind.FULL, row, rows


def _links(band: Band) -> tuple[list[RowKind], list[int]]:
    """Return kinds and lengths of the runs of equal links between neighbouring rows."""
    low, high = band.low.diff(), band.high.diff()
    masked = int(RowKind.MASKED)
    kind = torch.where(low == 0, high.clamp(max=masked), masked)
    kinds, counts = kind.unique_consecutive(return_counts=True)
    kind = torch.where(counts >= MIN_RUN - 1, kinds, masked).repeat_interleave(counts)
    kinds, counts = kind.unique_consecutive(return_counts=True)
    return [*map(RowKind, kinds.tolist())], counts.tolist()


def _full(band: Band, start: int, stop: int) -> Iterator[Rectangle]:
    low, high = int(band.low[start]), int(band.high[start])
    if low < high:
        yield Rectangle(slice(start, stop), slice(low, high))


def _causal(band: Band, start: int, stop: int) -> Iterator[Rectangle]:
    low, high = int(band.low[start]), int(band.high[start])
    empty = max(low + 1 - high, 0)  # the first rows may see no key
    start, high = start + empty, high + empty
    if start < stop:
        if low < high - 1:
            yield Rectangle(slice(start, stop), slice(low, high - 1))
        yield Rectangle(slice(start, stop), slice(high - 1, high - 1 + stop - start), causal=True)


def _tiles(band: Band, start: int, stop: int, rows: int = MASKED_TILE_ROWS) -> Iterator[Rectangle]:
    for row in range(start, stop, rows):
        end = min(row + rows, stop)
        low, high = int(band.low[row]), int(band.high[end - 1])
        if low < high:
            alike = int(band.low[end - 1]) == low and int(band.high[row]) == high  # no mask of rows x keys
            bounds = None if alike else band.select_queries(row, end, low)
            yield Rectangle(slice(row, end), slice(low, high), band=bounds)


_CUT = {RowKind.FULL: _full, RowKind.CAUSAL: _causal, RowKind.MASKED: _tiles}
