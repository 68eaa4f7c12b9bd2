"""Attention of the last tokens to a cache, by runs: some sequences see the slots `start` to `stop` of a piece.

`runs_of` makes the runs of a cache, of its forks, its padding, a window or a selection. `CachedAttention` attends them:
in one launch where a kernel takes them at once, in a loop elsewhere. A kernel that reads a cache in place finds the
slots on its device, where no CPU may look.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.core.band import Band
from attnmesh.core.partial import Partial, merge_partials, sum_dtype, with_sinks
from attnmesh.core.scaling import Scaling
from attnmesh.core.selection import NO_INDEX, Selection
from attnmesh.core.storage import storage_of
from attnmesh.kernels.cache_view import FORGOTTEN_BLOCKS, LENGTH, CacheView, DecodeQuery
from attnmesh.kernels.driver import visible_counts
from attnmesh.kernels.kernel import BoundKernel, Kernel
from attnmesh.kernels.padding import Padding
from attnmesh.kernels.quantized import QuantizedAttention
from attnmesh.kernels.selected_keys import SelectedKeys, nan_where_faulty
from attnmesh.kernels.stacked_merge import by_residue, copy_into, merge_in_pairs

ALL = slice(None)
"""All sequences of a batch."""

MAX_COUNTED_QUERIES = 64
"""Queries whose keys are counted one by one, under a causal mask without a window. For more, tensors are faster."""

AHEAD = 3
"""Runs of files that are read while another one is attended. More hide a longer read, and take more memory."""


class SlotRun(NamedTuple):
    """Queries of some sequences, and the slots of one piece of a cache that they see."""

    sequences: slice
    """Sequences of the batch."""
    piece: CacheView
    """Memory of these sequences."""
    start: int = 0
    stop: int = 0
    band: Band | None = None
    """Keys that each query sees, counted from `start`; None for all."""
    selected: SelectedKeys | None = None
    """Keys that each query selects, instead of a band."""
    bias_positions: tuple[Tensor, Tensor] | None = None
    """Positions of queries, (queries,), and of slots, (slots,), for a bias by distance."""
    hidden: Tensor | None = None
    """(queries,), True for queries that are padding; None if there are none."""


def runs_of(
    query: DecodeQuery, views: Sequence[CacheView], selected: Selection | None = None, *, in_place: bool = False
) -> list[SlotRun]:
    """Return the runs of one cache of the whole batch, or of one cache for each sequence.

    With `in_place` a run has all slots of a piece, among which the kernel finds those that queries see.
    """
    runs = list[SlotRun]()
    q = query.q
    mask = query.mask
    is_biased = q.shape[3] > views[0].keys.shape[3]  # queries end with a column for each distance
    has_band = is_biased or q.shape[2] > 1 or query.key_lengths is not None or mask.depends_on_length
    has_band = has_band or query.partial_block is not None
    for index, view in enumerate(views):
        sequences = slice(index, index + 1) if len(views) > 1 else ALL
        for piece in (*view.earlier_pieces, view):
            if in_place:
                runs.append(SlotRun(sequences, piece))
            elif selected is not None:
                runs += _of_selection(query, view, piece, selected)
            elif piece.padding is not None:
                runs += _of_sequences(query, sequences, piece, piece.padding, is_biased=is_biased)
            elif has_band:
                runs += _of_tokens(query, sequences, piece, is_biased=is_biased)
            else:  # the last token sees all from its first one on
                length, used, *_ = piece.device_counts.tolist()
                start = 0 if mask.max_causal_keys >= length else mask.first_seen(length - 1)
                if start and used < length:
                    start = int(torch.searchsorted(piece.token_index[:used], start))
                if start < used:
                    runs.append(SlotRun(sequences, piece, start, used))
    return runs


def _of_tokens(query: DecodeQuery, sequences: slice, piece: CacheView, *, is_biased: bool) -> list[SlotRun]:
    """Return the runs of a piece without padding; with `partial_block` all its slots, taken block by block."""
    length, used, *_ = piece.device_counts.tolist()
    if not used:
        return []
    mask = query.mask
    count = query.q.shape[2]
    is_plain = query.key_lengths is None and query.partial_block is None and not is_biased
    if is_plain and count <= MAX_COUNTED_QUERIES and mask.is_causal and mask.max_causal_keys >= length:
        newest = piece.token_index[max(used - count, 0) : used].tolist()
        before = used - len(newest)
        counts = tuple(before + bisect_right(newest, token) for token in range(length - count, length))
        return [SlotRun(sequences, piece, 0, used, None if counts[0] == used else _first_keys(counts))]
    queries = torch.arange(length - count, length, device="cpu")
    positions = piece.token_index[:used].cpu()
    band = Band.of(mask, queries, used if used == length else positions)
    if query.partial_block is not None:
        return [SlotRun(sequences, piece, 0, used, band)]
    visible = visible_counts(positions, query.key_lengths)
    bias_positions = (queries, positions) if is_biased else None
    if visible is None:
        return _trimmed(SlotRun(sequences, piece, 0, 0, band, bias_positions=bias_positions))
    runs = list[SlotRun]()
    for index, keys in enumerate(visible):
        sequence = slice(index, index + 1)
        run = SlotRun(sequence, _sequence(piece, index), 0, 0, band.first(keys), bias_positions=bias_positions)
        runs += _trimmed(run)
    return runs


@lru_cache(maxsize=1024)
def _first_keys(counts: tuple[int, ...]) -> Band:
    """Return the band in which query i sees the first `counts[i]` keys. Layers of one length share it."""
    with torch.inference_mode(False):
        return Band(torch.zeros(len(counts), dtype=torch.int64, device="cpu"), torch.tensor(counts, device="cpu"))


def _of_sequences(
    query: DecodeQuery, sequences: slice, piece: CacheView, padding: Padding, *, is_biased: bool
) -> list[SlotRun]:
    """Return the runs of each sequence of a padded batch. Padding cuts its keys into runs, mostly one.

    slots          0 1 2 3 4 5     padding is a dot
    sequence 0     a b c d e f     one run, from 0 to 6
    sequence 1     . . a b c d     one run, from 2 to 6
    sequence 2     a b . . c d     two runs: from 0 to 2, and from 4 to 6
    """
    length, used, *_ = piece.device_counts.tolist()
    indices = torch.arange(length - query.q.shape[2], length, device=padding.positions.device)
    real, queries = padding.last(indices)
    real = real.cpu()
    queries = queries.cpu()
    positions = padding.positions[:, :used].cpu()
    runs = list[SlotRun]()
    first, last = query.mask.bounds(queries)
    is_last_alone = len(indices) == 1 and query.key_lengths is None
    if query.key_lengths is not None:
        last = torch.minimum(last, query.key_lengths.cpu()[:, None] - 1)
    seen = positions >= first[:, :1]
    seen = (seen & real if is_last_alone else seen & (positions <= last[:, -1:]) & real.any(1, True)).int()
    counts = seen.sum(1)
    ends = (seen.argmax(1), used - seen.flip(1).argmax(1)) if used else (counts, counts)
    for index, (count, start, stop) in enumerate(torch.stack((counts, *ends), 1).tolist()):
        sequence, view = (sequences, piece) if len(real) == 1 else (slice(index, index + 1), _sequence(piece, index))
        for begin, end in ([(start, stop)] if stop - start == count else _runs_of_true(seen[index])) if count else []:
            if is_last_alone and not is_biased:
                runs.append(SlotRun(sequence, view, begin, end))
                continue
            keys = positions[index, begin:end]
            band = Band(*(torch.searchsorted(keys, bound) for bound in (first[index], last[index] + 1)))
            bias_positions = (queries[index], keys) if is_biased else None
            hidden = None if bool(real[index].all()) else ~real[index]
            run = SlotRun(sequence, view, begin, end, band, bias_positions=bias_positions, hidden=hidden)
            runs += _trimmed(run)
    return runs


def _trimmed(run: SlotRun) -> list[SlotRun]:
    """Return the run of the slots in its band, which counts from its start; none if no query sees any.

    >>> band = Band(torch.tensor([2, 3]), torch.tensor([5, 6]))            # of two queries
    >>> (run,) = _trimmed(SlotRun(ALL, None, 10, 10, band))
    >>> run.start, run.stop, run.band.low.tolist(), run.band.high.tolist()
    (12, 16, [0, 1], [3, 4])
    """
    band = run.band
    assert band is not None
    low, high = band.low.tolist(), band.high.tolist()
    start, stop = low[0], high[-1]
    if start >= stop:
        return []
    if low[-1] <= start and high[0] >= stop:
        band = None
    elif start:
        band = Band(band.low - start, band.high - start)
    bias_positions = None if run.bias_positions is None else (run.bias_positions[0], run.bias_positions[1][start:stop])
    return [run._replace(start=run.start + start, stop=run.start + stop, band=band, bias_positions=bias_positions)]


def _of_selection(query: DecodeQuery, view: CacheView, piece: CacheView, selection: Selection) -> Iterator[SlotRun]:
    """Yield the runs of the selected tokens of a piece, each of all its slots. The CPU reads nothing of a device.

    Tokens are selected by their number in the cache, padding included; masks and `key_lengths` count the real ones.
    """
    first, last = view.bounds(query.q.shape[2], query.mask)
    filled = piece.without_free_slots()
    lengths = query.key_lengths
    slots = filled.keys.shape[2]
    if filled.padding is None or view.padding is None:
        keys = SelectedKeys(selection, first[0], last[0], filled.token_index, lengths)
        yield SlotRun(ALL, filled, 0, slots, selected=keys)
        return
    by_position = _selection_by_position(selection, view.padding)
    # Padding gets the position of the token before it, which a search for that position finds.
    positions = filled.padding.positions.cummax(1).values
    for index in range(len(query.q)):
        sequence = slice(index, index + 1)
        counts = None if lengths is None else lengths[sequence]
        keys = SelectedKeys(
            Selection(by_position.indices[sequence]), first[index], last[index], positions[index], counts
        )
        yield SlotRun(sequence, _sequence(filled, index), 0, slots, selected=keys)


def _sequence(piece: CacheView, index: int) -> CacheView:
    """Return a piece of one sequence of the batch."""
    one = slice(index, index + 1)
    return piece._replace(keys=piece.keys[one], values=piece.values[one], earlier_pieces=(), file=None)


def _runs_of_true(flags: Tensor) -> list[tuple[int, int]]:
    """Return (start, stop) of each run of True.

    >>> _runs_of_true(torch.tensor([True, True, False, True]))
    [(0, 2), (3, 4)]
    """
    edges = torch.nn.functional.pad(flags.long(), (1, 1)).diff().nonzero().flatten().tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _selection_by_position(selection: Selection, padding: Padding) -> Selection:
    """Return the selection by position in each sequence instead of by token, without padding."""
    indices = selection.positions(selection.indices, slice(0, selection.indices.shape[-1] * selection.block))
    real = padding.token_mask
    positions = (real.cumsum(1) - 1).masked_fill(~real, NO_INDEX).to(torch.int32)
    inside = (indices >= 0) & (indices < positions.shape[1])
    by_position = positions[:, None, None].expand(*indices.shape[:3], -1).gather(-1, indices.where(inside, 0))
    return Selection(by_position.where(inside, NO_INDEX))


class CachedAttention:
    """Steps of one signature with one kernel: their launches are found once for each shape of queries."""

    def __init__(self, kernel: Kernel, scaling: Scaling, value_dim: int) -> None:
        self.in_place_kernel = kernel.bind_cache() if kernel.reads_cache else None
        self.quantized_attention = QuantizedAttention(kernel, scaling, value_dim)
        self.bound_kernels: dict[tuple[int, ...], BoundKernel | None] = {}

    def attend(self, query: DecodeQuery, views: Sequence[CacheView], selected: Selection | None = None) -> Partial:
        """Return the partial over one cache of the whole batch, or one for each sequence, in `query.into` if given."""
        if self.in_place_kernel is not None:
            total = self._attend_in_place(query, runs_of(query, views, in_place=True))
            if query.other_partial is None:
                return total
            return copy_into(merge_partials([total, query.other_partial]), query.into)
        q = query.q if query.q.stride(-1) == 1 else query.q.contiguous()
        runs = runs_of(query, views, selected)
        bound = self.bound_kernels.get(q.shape) or self._bound(q, views[0])
        total = query.into or (self._blank(q) if bound is None else bound.blank())
        if len(runs) == 1 and query.partial_block is None and runs[0].sequences is ALL and runs[0].hidden is None:
            # As most steps have it. This is `_attend` without its calls: hot path, see `decoding/known_steps.py`.
            run = runs[0]
            piece, start = run.piece, run.start
            launch = None if bound is None or selected is not None else bound.attend
            if launch is None or not launch(q, piece.keys, piece.values, total, run.band, start, run.stop - start):
                self._compute(q, run, total)
        else:
            self._attend_groups(query if q is query.q else replace(query, q=q), runs, total)
        if selected is not None:
            length = views[0].device_counts[LENGTH]
            total.out.copy_(nan_where_faulty(total.out, selected, length))
        if query.sinks is not None:
            total = copy_into(with_sinks(total, query.sinks), query.into)
        if query.other_partial is None:
            return total
        return copy_into(merge_partials([total, query.other_partial]), query.into)

    def _attend_in_place(self, query: DecodeQuery, runs: Sequence[SlotRun]) -> Partial:
        """Return the partial of runs of all slots of pieces."""
        assert self.in_place_kernel is not None
        partials = []
        for group in _by_sequences(runs):
            group_query = query if group[0].sequences is ALL else query.sequence(group[0].sequences.start)
            if len(group) == 1:
                partials.append(self.in_place_kernel.attend_cache(group_query, group[0].piece))
                continue
            plain = replace(group_query, sinks=None, into=None)
            merged = merge_partials([self.in_place_kernel.attend_cache(plain, run.piece) for run in group])
            partials.append(copy_into(with_sinks(merged, group_query.sinks), group_query.into))
        if len(partials) == 1:
            return partials[0]
        return query.into or Partial(*(torch.cat(x) for x in zip(*partials, strict=True)))

    def _attend_groups(self, query: DecodeQuery, runs: Sequence[SlotRun], total: Partial) -> None:
        """Write the merge of the runs of each sequence, and the identity for sequences that see nothing."""
        groups = _by_sequences(runs)
        if len(groups) < len(query.q):
            total.out.zero_()
            total.lse.fill_(-torch.inf)
        for group in groups:
            sequences, hidden = group[0].sequences, group[0].hidden
            q = query.q[sequences]
            into = Partial(total.out[sequences], total.lse[sequences])
            if query.partial_block is not None:
                copy_into(self._attend_blocks(q, group, query.partial_block), into)
            elif len(group) == 1:
                self._attend(q, group[0], into)
            elif not self._attend_parts(q, group, into):
                parts = [self._blank(q) for _ in group]
                for run, part in zip(_read_ahead(group), parts, strict=True):
                    self._attend(q, run, part)
                copy_into(merge_partials(parts), into)
            if hidden is not None:
                into.out.masked_fill_(hidden[:, None].to(q.device), 0.0)
                into.lse.masked_fill_(hidden.to(q.device), -torch.inf)

    def _attend_parts(self, q: Tensor, group: Sequence[SlotRun], into: Partial) -> bool:
        """Write the partial of runs that are parts of one launch. Return False if no launch serves them."""
        bound = self._bound(q, group[0].piece)
        if bound is None or group[0].selected is not None:
            return False
        parts = bound.parts([run.stop - run.start for run in group])
        for run, part in zip(_read_ahead(group), parts, strict=True):
            if not part.attend(q, run.piece.keys, run.piece.values, into, run.band, run.start, run.stop - run.start):
                return False
        return True

    def _attend(self, q: Tensor, run: SlotRun, into: Partial) -> None:
        """Write the partial of a run by one launch, or by the kernel's rectangles if no launch serves it."""
        piece, start = run.piece, run.start
        bound = self._bound(q, piece)
        launch = None if bound is None or run.selected is not None else bound.attend
        if launch is None or not launch(q, piece.keys, piece.values, into, run.band, start, run.stop - start):
            self._compute(q, run, into)

    def _compute(self, q: Tensor, run: SlotRun, into: Partial) -> None:
        """Write the partial of a run by the kernel's rectangles."""
        attention = self.quantized_attention
        if run.bias_positions is not None:
            attention = attention.with_positions(*run.bias_positions)
        if run.selected is None:
            partial = attention.attend(q, *_slots(run), run.band)
        else:
            partial = attention.attend_selected(q, *_slots(run), run.selected)
        copy_into(partial, into)

    def _attend_blocks(self, q: Tensor, group: Sequence[SlotRun], block: int) -> Partial:
        """Return the merge along the tree over blocks of one partial per block."""
        stacks = []
        for run in _read_ahead(group):
            keys, values = (x[:, :, : run.stop] for x in (run.piece.keys, run.piece.values))
            assert run.band is not None
            stack = _blocks(self.quantized_attention, q, keys, values, run.band, block)
            forgotten = run.piece.device_counts.tolist()[FORGOTTEN_BLOCKS:]
            stacks.append(by_residue(stack, *forgotten) if any(forgotten) else stack)
        return merge_in_pairs(Partial(*(torch.cat(x) for x in zip(*stacks, strict=True))))

    def _bound(self, q: Tensor, view: CacheView) -> BoundKernel | None:
        """Return the launch of queries of this shape, or None if there is none."""
        if q.shape not in self.bound_kernels:
            kernel = self.quantized_attention.kernel
            plain = storage_of(view.keys) is None
            served = plain or kernel.reads_8_bits
            scaling = self.quantized_attention.scaling
            self.bound_kernels[q.shape] = kernel.bind(q, *view.unscaled, scaling) if served else None
        return self.bound_kernels[q.shape]

    def _blank(self, q: Tensor) -> Partial:
        dtype = sum_dtype(q.dtype)
        shape, value_dim = q.shape[:-1], self.quantized_attention.value_dim
        return Partial(q.new_empty((*shape, value_dim), dtype=dtype), q.new_empty(shape, dtype=dtype))


def _read_ahead(runs: Sequence[SlotRun]) -> Iterator[SlotRun]:
    """Yield the runs. While the caller attends one, the next `AHEAD` runs of files are being read.

    When the caller asks for the next run, the pages of the last one are given back.
    """
    fetched = 0
    for index, run in enumerate(runs):
        while fetched < min(len(runs), index + 1 + AHEAD):
            if (file := runs[fetched].piece.file) is not None:
                file.fetch(*_slots(runs[fetched]))
            fetched += 1
        if (file := run.piece.file) is not None:
            file.await_pages(*_slots(run))
        yield run
        if file is not None:
            file.leave(run.piece.keys, run.piece.values)


def _slots(run: SlotRun) -> tuple[Tensor, Tensor]:
    return run.piece.keys[:, :, run.start : run.stop], run.piece.values[:, :, run.start : run.stop]


def _by_sequences(runs: Sequence[SlotRun]) -> list[list[SlotRun]]:
    """Return the runs of each group of sequences."""
    groups = dict[int | None, list[SlotRun]]()
    for run in runs:
        groups.setdefault(run.sequences.start, []).append(run)
    return [*groups.values()]


def _blocks(attention: QuantizedAttention, q: Tensor, keys: Tensor, values: Tensor, band: Band, block: int) -> Partial:
    """Return a stack of one partial per block. Blocks that every query sees whole take one call."""
    used, queries = keys.shape[2], q.shape[2]
    count = -(-used // block)
    out = q.new_zeros((count, *q.shape[:-1], attention.value_dim), dtype=sum_dtype(q.dtype))
    lse = q.new_full((count, *q.shape[:-1]), -torch.inf, dtype=sum_dtype(q.dtype))
    first = -(-int(band.low[-1]) // block)
    last = int(band.high[0]) // block
    whole_blocks = range(first, max(first, last))
    full = Band(torch.zeros(queries, dtype=torch.long, device="cpu"), torch.full((queries,), block, device="cpu"))
    for sequence in range(q.shape[0] if whole_blocks else 0):
        # A view: (blocks, heads, tokens of a block, dim). One call for all sequences would have to copy the keys.
        some_keys, some_values = (
            x[sequence, :, first * block : last * block].unflatten(1, (-1, block)).transpose(0, 1)
            for x in (keys, values)
        )
        some_q = q[sequence].expand(len(whole_blocks), *q.shape[1:])
        out[first:last, sequence], lse[first:last, sequence] = attention.attend(some_q, some_keys, some_values, full)
    for index in set(range(int(band.low[0]) // block, min(count, -(-int(band.high[-1]) // block)))) - set(whole_blocks):
        start = index * block
        stop = min(used, (index + 1) * block)
        seen = band.within(start, stop)
        out[index], lse[index] = attention.attend(q, keys[:, :, start:stop], values[:, :, start:stop], seen)
    return Partial(out, lse)
