"""The packing of documents on a grid of rows and columns: which tokens of each document a cell holds.

Row r and column c of the grid are ranks' indices along the queries and the keys axis. A query of row r and a key of
column c meet at cell (r, c). A document inside one cell sends nothing. A document with too many pairs for a cell is cut
over a block of a rows and b columns, as `Zigzag` cuts a sequence. Under a causal or a full mask all cells of the block
then have equal pairs. Of the document's n tokens each cell receives 2 n (a + b - 2) / (a b), where q, out, k and v are
counted apart.

The longest documents are placed first, each on the smallest block that can take its tokens and pairs. The shortest have
few pairs for their tokens. They fill the cells up, and are cut where a cell is full.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

TokenRun = tuple[int, int]
"""First position, and the position after the last."""

Document = tuple[int, int]
"""First position and length."""

# What these numbers trade was counted as by `python -m benchmarks packed`, on batches with the lengths of documents in
# training corpora: pairs of the busiest rank, over the mean, against tokens that it receives.

MOST_UNEVEN = 1.05
"""Pairs of the busiest cell, over the mean, up to which a packing is taken without a look at finer cuts.

A lower one is more even, and sends more.
"""

CELL_LIMIT = 1.03
"""Pairs, over the mean, up to which documents are placed in a cell.

A lower one is more even. Lower and higher ones send more.
"""

FILLERS = 0.03
"""Bound of the pairs of the shortest documents, over all pairs, below which they fill the cells up.

A higher one is less even, and sends more.
"""

UNCUT = 0.1
"""Pairs, over the limit, of a document that is not cut over a block. It fills cells up if none can take it whole.

A higher one is less even, and sends more.
"""

TRIES = 12
"""Cells that are tried for a whole document. Fewer send more; a hundred send the same."""

PART_LIMITS = (1.0, 0.8, 0.65, 0.5, 0.35, 0.25, 0.12, 0.06)
"""Most pairs of one document in a cell, over the limit. Finer cuts balance better, and send more."""


@lru_cache(maxsize=64)
def pack_documents(lengths: tuple[int, ...], heads: int, rows: int, columns: int) -> tuple[tuple[TokenRun, ...], ...]:
    """Return the ascending runs of positions that each shard of a mesh of `heads` x `rows` x `columns` ranks holds."""
    ranks, cells = heads * rows * columns, rows * columns
    sizes = [stop - start for start, stop in pairwise(sum(lengths) * shard // ranks for shard in range(ranks + 1))]
    room = [sum(sizes[cell::cells]) for cell in range(cells)]
    documents = sorted(zip(accumulate(lengths, initial=0), lengths, strict=False), key=lambda document: -document[1])
    grids: list[Grid] = []
    for share in PART_LIMITS:
        grids.append(Grid(rows, columns, room))
        grids[-1].pack(documents, share)
        if not grids[-1].excess:
            break
    grid = min(grids, key=lambda grid: grid.excess)
    by_cell = [_cut(sorted(runs), sizes[cell::cells]) for cell, runs in enumerate(grid.runs)]
    return tuple(by_cell[shard % cells][shard // cells] for shard in range(ranks))


def _cut(runs: Iterable[TokenRun], sizes: Iterable[int]) -> list[tuple[TokenRun, ...]]:
    """Return runs cut into parts of `sizes` tokens. Runs of a part that touch become one.

    >>> _cut([(0, 2), (2, 4), (6, 9)], [3, 4])
    [((0, 3),), ((3, 4), (6, 9))]
    """
    next_runs = iter(runs)
    parts = []
    start = stop = 0
    for size in sizes:
        part: list[TokenRun] = []
        while size:
            if start == stop:
                start, stop = next(next_runs)
            end = min(stop, start + size)
            if part and part[-1][1] == start:
                part[-1] = part[-1][0], end
            else:
                part.append((start, end))
            size = size - (end - start)
            start = end
        parts.append(tuple(part))
    return parts


class Grid:
    """Cells that documents fill. A cell stands for all ranks along the heads axis."""

    def __init__(self, rows: int, columns: int, room: Sequence[int]) -> None:
        self.rows, self.columns = rows, columns
        self.room = list(room)
        """Tokens that each cell has room for."""
        self.runs: list[list[TokenRun]] = [[] for _ in room]
        self.pairs = [0.0] * len(room)
        self.mean = 0.0
        """Mean pairs of a cell, once all documents are placed."""
        blocks = [(a, b) for a in _block_sides(rows) for b in _block_sides(columns)]
        self.blocks = sorted(blocks, key=lambda block: (block[0] * block[1], sum(block)))
        self.deficits = [0.0] * len(room)
        """Pairs that each cell lacks, per token of its room."""
        self.heap: list[tuple[float, int]] = []
        """Entries (-deficit, cell). Those of former deficits are skipped."""

    @property
    def excess(self) -> float:
        """Pairs of the busiest cell beyond those of a balanced one."""
        return max(0.0, max(self.pairs) - MOST_UNEVEN * self.mean)

    def pack(self, documents: Sequence[Document], share: float) -> None:
        """Place documents, the longest first. Of each, a cell gets at most `share` of the pairs that it may have."""
        total = sum(length * length for _, length in documents) / 2
        tokens_left = sum(self.room)
        self.mean = total / len(self.room)
        for cell in range(len(self.room)):
            self._put(cell, (), 0, 0.0)
        filling: list[Document] = []
        for placed, (start, length) in enumerate(documents):
            if tokens_left * length / 2 <= FILLERS * total:
                filling += documents[placed:]
                break
            if not self.assign(start, length, share):
                filling.append((start, length))
            tokens_left -= length
        self.fill(filling)

    def assign(self, start: int, length: int, share: float) -> bool:
        """Place a document whole in a cell, or otherwise on the smallest block that can take it: the whole grid can.

        Return False for a small document that no cell can take whole.
        """
        pairs, limit = length * length / 2, CELL_LIMIT * self.mean
        if pairs <= share * limit and (cell := self._cell(length, pairs)) is not None:
            self._put(cell, [(start, start + length)], length, pairs)
            return True
        if pairs <= UNCUT * limit:
            return False
        for a, b in self.blocks:
            if pairs > share * limit * a * b and a * b < len(self.room):
                continue
            if cells := self._block(a, b, length, pairs):
                self._spread(start, length, cells, b)
                break
        return True

    def fill(self, documents: Iterable[Document]) -> None:
        """Fill the room of all cells, with the longest documents where most pairs per token are lacking."""
        cells = sorted((cell for cell, room in enumerate(self.room) if room), key=self.deficits.__getitem__)
        for start, length in documents:
            parts: list[tuple[int, int]] = []  # cells and tokens
            while length:
                cell = cells[-1]
                tokens = min(length, self.room[cell])
                self.runs[cell].append((start, start + tokens))
                self.room[cell] -= tokens
                for other, keys in parts:
                    self.pairs[cell - cell % self.columns + other % self.columns] += tokens * keys
                self.pairs[cell] += tokens * tokens / 2
                parts.append((cell, tokens))
                start, length = start + tokens, length - tokens
                if not self.room[cell]:
                    cells.pop()

    def _cell(self, length: int, pairs: float) -> int | None:
        """Return the cell that lacks most pairs per token, of those that can take a document."""
        tried: list[tuple[float, int]] = []
        fitting = None
        while self.heap and fitting is None and len(tried) < TRIES:
            entry = heapq.heappop(self.heap)
            cell = entry[1]
            if -entry[0] == self.deficits[cell]:
                if self._fits(cell, length, pairs):
                    fitting = cell
                tried.append(entry)
        for entry in tried:
            heapq.heappush(self.heap, entry)
        return fitting

    def _block(self, a: int, b: int, length: int, pairs: float) -> list[int]:
        """Return the cells of a x b rows and columns with few pairs, if each can take its part of a document."""
        if a * b == len(self.room):  # the whole grid takes the document as its room allows
            return [*range(a * b)]
        lines = [self.pairs[row * self.columns :][: self.columns] for row in range(self.rows)]
        rows = sorted(range(self.rows), key=lambda row: sum(sorted(lines[row])[:b]))[:a]
        columns = sorted(range(self.columns), key=lambda column: sum(lines[row][column] for row in rows))[:b]
        cells = [row * self.columns + column for row in sorted(rows) for column in sorted(columns)]
        return cells if all(self._fits(cell, length // (a * b) + 1, pairs / (a * b)) for cell in cells) else []

    def _fits(self, cell: int, tokens: int, pairs: float) -> bool:
        return tokens <= self.room[cell] and self.pairs[cell] + pairs <= CELL_LIMIT * self.mean

    def _spread(self, start: int, length: int, cells: Sequence[int], columns: int) -> None:
        """Give each cell of a block an early and a late chunk of a document.

        >>> grid = Grid(1, 2, [4, 4])
        >>> grid._spread(0, 8, [0, 1], 2)
        >>> grid.runs
        [[(0, 2), (6, 8)], [(2, 4), (4, 6)]]
        """
        shares = self._shares(length, cells)
        chunks = [share // 2 for share in shares] + [share - share // 2 for share in reversed(shares)]
        runs = list(pairwise(accumulate(chunks, initial=start)))
        in_rows = [sum(shares[first : first + columns]) for first in range(0, len(shares), columns)]
        in_columns = [sum(shares[column::columns]) for column in range(columns)]
        for index, (cell, share) in enumerate(zip(cells, shares, strict=True)):
            halves = [run for run in (runs[index], runs[-1 - index]) if run[0] < run[1]]
            self._put(cell, halves, share, in_rows[index // columns] * in_columns[index % columns] / 2)

    def _put(self, cell: int, runs: Sequence[TokenRun], tokens: int, pairs: float) -> None:
        self.runs[cell] += runs
        self.room[cell] -= tokens
        self.pairs[cell] += pairs
        if self.room[cell]:
            self.deficits[cell] = deficit = (CELL_LIMIT * self.mean - self.pairs[cell]) / self.room[cell]
            heapq.heappush(self.heap, (-deficit, cell))
        else:
            self.deficits[cell] = -math.inf

    def _shares(self, length: int, cells: Sequence[int]) -> list[int]:
        """Return how many tokens of a document each cell takes: as equal as their room allows."""
        shares = dict.fromkeys(cells, 0)
        for taken, cell in enumerate(sorted(cells, key=self.room.__getitem__)):
            shares[cell] = min(self.room[cell], -(-length // (len(cells) - taken)))
            length -= shares[cell]
        return list(shares.values())


def _block_sides(most: int) -> list[int]:
    """Return how many rows, or columns, a block can have: 1, 2, 3, 4, 6, 8, 12 and so on, and all.

    >>> _block_sides(10)
    [1, 2, 3, 4, 6, 8, 10]
    """
    return [n for n in range(1, most + 1) if n == most or (n // 3 if n % 3 == 0 else n).bit_count() == 1]
