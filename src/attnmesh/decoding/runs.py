"""What the queries of a step see of the keys on this rank, as runs of slots, and attention to them.

Slots are in the order of their tokens: those of a shard, and before them those that forks share, each a piece of
memory. Of a piece a query sees one run of slots, or several where padding cuts it. A kernel attends a run in a launch,
of all sequences that see the same, and partials of several runs of a sequence merge.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnmesh.cache.cache_shard import CacheShard
from attnmesh.core.band import Band
from attnmesh.core.logits import Logits
from attnmesh.core.mask import Mask
from attnmesh.core.partial import Partial, sum_dtype
from attnmesh.core.selection import NONE, Selection
from attnmesh.core.storage import Storage, storage_of
from attnmesh.kernels.blocks import Kernel
from attnmesh.kernels.cache_view import CacheView, Padding
from attnmesh.kernels.driver import NATIVE
from attnmesh.kernels.local_plan import is_one_launch
from attnmesh.kernels.native.kernel import DTYPES, NativeKind
from attnmesh.kernels.selected_keys import SelectedKeys, nan_where_faulty
from attnmesh.kernels.stacked_merge import by_residue, copy_into, merge_along_tree, merge_stacked
from attnmesh.kernels.stored import CacheKernel


class Visible(NamedTuple):
    """Which keys the last queries of a cache see."""

    mask: Mask
    key_lengths: Tensor | None = None  # (batch,), real keys per sequence, on the device
    selection: Selection | None = None
    block: int | None = None  # slots of a block; each block gives one partial, and these are merged along a tree
    by_distance: bool = False  # logits have a bias by distance, whose kernel needs positions

    def in_order(self, rows: int) -> bool:
        """Return whether numbers of tokens tell which keys of a cache without padding so many queries see."""
        mask, others = self.mask, (self.key_lengths, self.selection, self.block)
        return others == (None, None, None) and not (
            self.by_distance or mask.spans or mask.ends or (rows > 1 and mask.chunks)
        )


class Run(NamedTuple):
    """Slots of a piece that the queries of a sequence see, or those of all sequences."""

    keys: Tensor  # (sequences, heads, slots, dim) as in memory
    values: Tensor
    start: int
    stop: int
    sequence: int | None = None  # None for all
    bounds: Band | SelectedKeys | None = None  # what each query sees of the run, counted from its start; None for all
    part: int | slice = 0  # the partial that it gives, of those of a sequence; of each block one
    hidden: Tensor | None = None  # (rows,), True for queries that see nothing
    places: tuple[Tensor, Tensor] | None = None  # positions of queries and of keys, where a kernel needs them


class RunKernel(NamedTuple):
    """A kernel for the runs of a kind of steps."""

    cache_kernel: CacheKernel
    whole: NativeKind | None  # the native launch for all sequences, and for one, if the native kernel serves them so
    single: NativeKind | None
    storage: Storage | None

    @staticmethod
    def of(kernel: Kernel, q: Tensor, rows: tuple[Tensor, Tensor], logits: Logits, value_dim: int) -> "RunKernel":
        """Return the kernel for queries of a cache with such rows of keys and values."""
        keys, values = numbers = rows[0][..., : q.shape[-1]], rows[1][..., :value_dim]
        run, storage = CacheKernel(kernel, logits, value_dim), storage_of(rows[0])
        if kernel is not NATIVE or q.dtype not in DTYPES or not is_one_launch(q[: len(keys)], *numbers, logits):
            return RunKernel(run, None, None, storage)
        single = NativeKind.of(q[:1], keys[:1], values[:1], logits)
        return RunKernel(run, NativeKind.of(q, keys, values, logits), single, storage)

    def blank(self, q: Tensor) -> Partial:
        """Return memory for a partial of the queries."""
        if self.whole is not None:
            return self.whole.blank()
        dtype = sum_dtype(q.dtype)
        out = q.new_empty((*q.shape[:-1], self.cache_kernel.value_dim), dtype=dtype)
        return Partial(out, q.new_empty(q.shape[:-1], dtype=dtype))

    def attend(self, q: Tensor, runs: Sequence[Run], into: Partial) -> None:
        """Write the partials of runs to their places in `into`, that of all queries or a stack of several."""
        is_stack = into.lse.ndim > 3
        for run in runs:
            keys, values, start, stop, sequence, bounds, part, hidden, _ = run
            (out, lse), some_q, kind = into, q, self.whole
            if is_stack:
                out, lse = out[part], lse[part]
            if sequence is not None:
                kind, some_q = self.single, q[sequence : sequence + 1]
                if type(part) is int:
                    out, lse = out[sequence : sequence + 1], lse[sequence : sequence + 1]
                else:  # blocks are the batch of a call
                    out, lse, some_q = out[:, sequence], lse[:, sequence], some_q.expand(len(keys), -1, -1, -1)
                    kind = None
            if start >= stop:  # the identity
                out.zero_()
                lse.fill_(-torch.inf)
                continue
            if kind is None or isinstance(bounds, SelectedKeys):
                self._attend_otherwise(some_q, run, Partial(out, lse))
            else:
                places = out.data_ptr(), lse.data_ptr()
                if not kind.launch_at(some_q, keys, values, places, bounds, start, stop - start):
                    self._attend_otherwise(some_q, run, Partial(out, lse))
            if hidden is not None:
                out[:, :, hidden] = 0.0
                lse[:, :, hidden] = -torch.inf

    def _attend_otherwise(self, q: Tensor, run: Run, into: Partial) -> None:
        """Write the partial of a run that is no native launch, or has numbers that are not finite."""
        keys, values = (x[:, :, run.start : run.stop] for x in (run.keys, run.values))
        if self.storage is not None:
            keys, values = keys.view(self.storage.dtype), values.view(self.storage.dtype)
        else:
            values = values[..., : self.cache_kernel.value_dim]
        kernel = self.cache_kernel if run.places is None else self.cache_kernel.at(q, keys, run.places)
        copy_into(kernel(q, keys, values, run.bounds), into)


def attend_caches(q: Tensor, views: Sequence[CacheView], visible: Visible, kernel: RunKernel, into: Partial) -> Partial:
    """Return the partial of the last queries over what this rank holds of one cache, or of a cache for each row."""
    rows = range(len(views)) if len(views) > 1 else (None,)
    if visible.block is not None:
        for row, view in zip(rows, views, strict=True):
            one = slice(None) if row is None else slice(row, row + 1)
            runs = runs_of_view(view, visible, q[one], None if row is None else 0)
            own, forgotten = Partial(into.out[one], into.lse[one]), view.state.tolist()[2:]
            attend_runs(kernel, q[one], runs, own, *(forgotten or [0]))
        return into
    runs = [run for row, view in zip(rows, views, strict=True) for run in runs_of_view(view, visible, q, row)]
    attend_runs(kernel, q, runs, into)
    if visible.selection is not None:
        into.out.copy_(nan_where_faulty(into.out, visible.selection, views[0].state[0]))
    return into


def attend_runs(
    kernel: RunKernel, q: Tensor, runs: Sequence[Run], into: Partial, forgotten: int | None = None
) -> Partial:
    """Return the merge of the partials of runs, written to `into`.

    Partials of blocks, of which so many came before and are forgotten, merge along a tree over their numbers.
    """
    if forgotten is None and (len(runs) == 1 or not any(run.part for run in runs)):
        kernel.attend(q, runs, into)
        return into
    parts = max(1, _stop(runs))
    strides = into.out.numel(), *into.out.stride()
    out = torch.empty_strided((parts, *into.out.shape), strides, dtype=into.out.dtype, device=q.device).zero_()
    stack = Partial(out, into.lse.new_full((parts, *into.lse.shape), -torch.inf))
    kernel.attend(q, runs, stack)
    if forgotten is None:
        return copy_into(merge_stacked(stack), into)
    return copy_into(merge_along_tree(by_residue(stack, forgotten) if forgotten else stack), into)


def runs_of_shard(
    shard: CacheShard, counts: tuple[int, int], mask: Mask, rows: int, alone: bool, sequence: int | None = None
) -> list[Run]:
    """Return the runs that the last queries of a cache without padding see, under a mask that depends on order alone.

    `counts` are the tokens of all ranks and of the shard. With `alone` there is no other rank.
    """
    (length, used), pieces = counts, [(shard.stored, shard.token_index, counts[1])]
    if shard.shared:
        pieces[:0] = [(blocks.stored, blocks.token_index, blocks.used) for blocks in shard.shared]
    first = 0 if mask.left >= length and not mask.chunks else mask.first_seen(length - rows)
    several = rows > 1 and (mask.left < length or mask.right < rows)
    at, runs = length - used - (shard.shared_tokens if shard.shared else 0), list[Run]()
    for part, (stored, tokens, count) in enumerate(pieces):
        start, bounds = 0, None
        if first:
            start = min(max(0, first - at), count) if alone else int(torch.searchsorted(tokens[:count], first))
        if several:
            bounds = _bounds(mask, range(length - rows, length), tokens[:count], at if alone else None, start)
        runs.append(Run(stored[0], stored[-1], start, count, sequence, bounds, part))
        at += count
    return runs


def _bounds(mask: Mask, queries: range, tokens: Tensor, at: int | None, start: int) -> Band:
    """Return the slots after `start` that each query sees. Slot 0 holds token `at`, if tokens follow each other."""
    low = torch.tensor([max(0, query - mask.left) for query in queries], device="cpu")
    high = torch.tensor([min(queries.stop, query + mask.right + 1) for query in queries], device="cpu")
    if at is None:
        low, high = torch.searchsorted(tokens, low), torch.searchsorted(tokens, high)
    else:
        low, high = (low - at).clamp(min=0), (high - at).clamp(0, len(tokens))
    return Band(low - start, high - start)


def runs_of_view(view: CacheView, visible: Visible, q: Tensor, sequence: int | None = None) -> list[Run]:
    """Return the runs that the last queries of any cache see. With a selection the host reads nothing of a device."""
    positions, real = view.last(q.shape[2])
    if visible.selection is not None:
        first, last = visible.mask.bounds(positions)
        last = last if real is None else last.masked_fill(~real, -1)
        return _selected_runs([piece.held() for piece in (*view.shared, view)], visible, view.padding, (first, last))
    positions, real = positions.cpu(), None if real is None else real.cpu()
    first, last = visible.mask.bounds(positions)
    runs, pieces = list[Run](), [piece.held(on_host=True) for piece in (*view.shared, view)]
    if visible.block is None:
        runs = _seen_runs(pieces, visible, (positions, first, last), real)
    else:
        for here in pieces:
            runs += _block_runs(here, (first[0], last[0]), visible.block, len(q), _stop(runs))
    return runs if sequence is None else [run._replace(sequence=sequence) for run in runs]


def _seen_runs(
    pieces: Sequence[CacheView], visible: Visible, queries: tuple[Tensor, Tensor, Tensor], real: Tensor | None
) -> list[Run]:
    """Return runs of what queries at these positions see, from the first position up to the last. Others are hidden."""
    positions, first, last = queries
    rows, lengths = positions.shape[1], visible.key_lengths
    if lengths is not None:
        last = torch.minimum(last, lengths.cpu()[:, None] - 1)
        first = first.expand_as(last)
    if real is not None and rows == 1:
        last = last.masked_fill(~real, -1)
    sequences = len(first)
    lowest, highest = first[:, :1], last[:, -1:]
    runs, parts = list[Run](), [0] * sequences
    for here in pieces:
        places = here.places()
        seen = ((places >= lowest) & (places <= highest)).to(torch.int8)
        edges = pad(seen, (1, 1)).diff().nonzero().tolist()
        for (number, start), (_, stop) in zip(edges[::2], edges[1::2], strict=True):
            one = slice(number, number + 1) if sequences > 1 or len(here.keys) == 1 else slice(None)
            own = places[number if len(places) > 1 else 0, start:stop]
            bounds = hidden = where = None
            if rows > 1:
                bounds = Band(torch.searchsorted(own, first[number]), torch.searchsorted(own, last[number], right=True))
                hidden = None if real is None else ~real[number]
            if visible.by_distance:
                where = positions[number if len(positions) > 1 else 0], own
            sequence = number if sequences > 1 else None
            runs.append(
                Run(here.keys[one], here.values[one], start, stop, sequence, bounds, parts[number], hidden, where)
            )
            parts[number] += 1
    here = pieces[-1]
    empty = [number for number, count in enumerate(parts) if not count]
    return runs + [Run(here.keys, here.values, 0, 0, number if sequences > 1 else None) for number in empty]


def _selected_runs(
    pieces: Sequence[CacheView], visible: Visible, padding: Padding | None, seen: tuple[Tensor, Tensor]
) -> list[Run]:
    """Return runs of the selected keys. In a padded batch each sequence has positions of its own."""
    selection, lengths, (first, last), runs = visible.selection, visible.key_lengths, seen, list[Run]()
    assert selection is not None
    wanted = selection if padding is None else _by_position(selection, padding)
    for part, here in enumerate(pieces):
        count = here.keys.shape[2]
        if here.padding is None:
            keys = SelectedKeys(wanted, first[0], last[0], here.token_index, lengths)
            runs.append(Run(here.keys, here.values, 0, count, None, keys, part))
            continue
        places = here.padding.places.cummax(1).values  # a search finds the token before, not padding after it
        for row in range(len(places)):
            one = slice(row, row + 1)
            own = Selection(wanted.indices[one]), first[row], last[row], places[row]
            keys = SelectedKeys(*own, None if lengths is None else lengths[one])
            runs.append(Run(here.keys[one], here.values[one], 0, count, row, keys, part))
    return runs


def _by_position(selection: Selection, padding: Padding) -> Selection:
    """Return the selection by position in each sequence instead of by token, without padding."""
    tokens = selection.positions(selection.indices, slice(0, selection.indices.shape[-1] * selection.block))
    real = padding.token_mask
    positions = (real.cumsum(1) - 1).masked_fill(~real, NONE).to(torch.int32)
    inside = (tokens >= 0) & (tokens < positions.shape[1])
    found = positions[:, None, None].expand(*tokens.shape[:3], -1).gather(-1, tokens.where(inside, 0))
    return Selection(found.where(inside, NONE))


def _block_runs(here: CacheView, seen: tuple[Tensor, Tensor], block: int, sequences: int, before: int) -> Iterator[Run]:
    """Yield runs of blocks, after those of earlier pieces. Blocks that every query sees whole take one call."""
    low, tokens, used = torch.searchsorted(here.token_index, seen[0]), here.token_index, here.keys.shape[2]
    high = torch.searchsorted(tokens, seen[1], right=True)
    count = -(-used // block)
    first, last = -(-int(low[-1]) // block), int(high[0]) // block
    whole = range(first, max(first, last))
    for row in range(sequences if whole else 0):
        # A view: (blocks, heads, tokens of a block, dim). One call for all sequences would have to copy the keys.
        keys, values = (
            x[row, :, first * block : last * block].unflatten(1, (-1, block)).transpose(0, 1)
            for x in (here.keys, here.values)
        )
        yield Run(keys, values, 0, block, row, None, slice(before + first, before + last))
    for number in range(count):
        if number not in whole:
            start, stop = number * block, min(used, (number + 1) * block)
            inside = Band(*((bound - start).clamp(0, stop - start) for bound in (low, high)))
            empty = not bool((inside.low < inside.high).any())
            yield Run(here.keys, here.values, start, start if empty else stop, None, inside, before + number)


def _stop(runs: Sequence[Run]) -> int:
    """Return the number of parts of runs in order of their parts."""
    parts = [run.part for run in runs]
    return max((part + 1 if isinstance(part, int) else part.stop for part in parts), default=0)
