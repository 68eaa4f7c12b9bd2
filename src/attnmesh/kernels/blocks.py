"""A local problem, in any layout and under any mask, cut into few blocks that a plain kernel can do.

With queries and keys in order of position, query i sees one run of keys, from `low[i]` up to `high[i]`, and both only
move forward: a *band*. Wherever the rows of a band are alike they are one block, however long:

        full     every row sees every key of the block
        causal   a square block whose row i sees its keys 0..i
        masked   a tile of few rows, with each row's own bounds

so a causal square is one call, packed documents are one each, and a window is tiles along its diagonal. Keys that
nobody sees are in no block, and no mask is ever larger than one tile's rows by the keys that those rows see.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnmesh.core.mask import Band

TILE = 128
"""Rows of a masked tile: as many as keep a matrix product busy, as few as keep a window's wasted corners small."""


ALIKE = 64
"""Rows that must be alike to be worth a block of their own rather than a place in a tile."""


FULL, CAUSAL, MASKED = range(3)


@dataclass(frozen=True)
class Block:
    """A rectangle of queries and keys to attend in one call."""

    queries: slice
    keys: slice
    causal: bool = False
    band: Band | None = None  # each row's bounds within the block; None when full or causal

    def bounds(self) -> Band:
        """Each row's bounds within the block, whatever its kind."""
        if self.band is not None:
            return self.band
        rows, keys = (part.stop - part.start for part in (self.queries, self.keys))
        high = torch.arange(1, rows + 1) if self.causal else torch.full((rows,), keys)
        return Band(torch.zeros(rows, dtype=torch.long), high)

    def visible(self) -> Tensor:
        """Point by point, (queries, keys)."""
        return self.bounds().visible(self.keys.stop - self.keys.start)

    def blind(self) -> Tensor:
        """The rows that see nothing of the block."""
        if self.band is None:
            return torch.empty(0, dtype=torch.long)
        keys = self.keys.stop - self.keys.start
        return (self.band.high.clamp(max=keys) <= self.band.low.clamp(min=0)).nonzero().flatten()

    def only(self, rows: Tensor) -> "Block":
        """A block of some of its rows, over the same keys."""
        bounds = self.bounds()
        return Block(slice(0, len(rows)), self.keys, band=Band(bounds.low[rows], bounds.high[rows]))


def cut(band: Band) -> list[Block]:
    """The blocks that hold every visible pair of the band exactly once.

    >>> import attnmesh as am
    >>> [(b.queries, b.keys) for b in cut(Band.of(am.Documents((100, 200)), torch.arange(300), 300))]
    [(slice(0, 100, None), slice(0, 100, None)), (slice(100, 300, None), slice(100, 300, None))]
    """
    return [block for kind, start, stop in _stretches(band) for block in _CUT[kind](band, start, stop)]


def tiles(band: Band) -> list[Block]:
    """The same pairs in tiles of a few rows each, for a kernel whose memory grows with a block's area."""
    return list(_tiles(band, 0, len(band.low)))


def _stretches(band: Band) -> Iterator[tuple[int, int, int]]:
    """(kind, start, stop): rows joined by links of one kind, and the rows between them to be tiled."""
    rows, row, link = len(band.low), 0, 0
    kinds, counts = _links(band)
    for kind, count in zip(kinds, counts, strict=True):
        link += count
        # The row on the border belongs to the stretch of alike rows; between two of those, to the first.
        stop = link if kind == MASKED and link < rows - 1 else link + 1
        if row < stop:
            yield kind, row, stop
            row = stop
    if row < rows:  # a single row has no links
        yield FULL, row, rows


def _links(band: Band) -> tuple[list[int], list[int]]:
    """Runs of equal links between neighbouring rows: both see the same, or the later sees one key more."""
    low, high = band.low.diff(), band.high.diff()
    kind = torch.where(low == 0, high.clamp(max=MASKED), MASKED)
    kinds, counts = kind.unique_consecutive(return_counts=True)
    kind = torch.where(counts >= ALIKE - 1, kinds, MASKED).repeat_interleave(counts)
    kinds, counts = kind.unique_consecutive(return_counts=True)
    return kinds.tolist(), counts.tolist()


def _full(band: Band, start: int, stop: int) -> Iterator[Block]:
    low, high = int(band.low[start]), int(band.high[start])
    if low < high:
        yield Block(slice(start, stop), slice(low, high))


def _causal(band: Band, start: int, stop: int) -> Iterator[Block]:
    low, high = int(band.low[start]), int(band.high[start])
    blind = max(low + 1 - high, 0)  # the first rows may see nothing yet
    start, high = start + blind, high + blind
    if start < stop:
        if low < high - 1:
            yield Block(slice(start, stop), slice(low, high - 1))
        yield Block(slice(start, stop), slice(high - 1, high - 1 + stop - start), causal=True)


def _tiles(band: Band, start: int, stop: int) -> Iterator[Block]:
    for row in range(start, stop, TILE):
        end = min(row + TILE, stop)
        low, high = int(band.low[row]), int(band.high[end - 1])
        if low < high:
            yield Block(slice(row, end), slice(low, high), band=band.rows(row, end, low))


_CUT = {FULL: _full, CAUSAL: _causal, MASKED: _tiles}
