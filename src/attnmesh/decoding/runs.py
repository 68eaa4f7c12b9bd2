"""What the queries of a step see of the keys on this rank, as runs of slots, and attention to them.

Slots are in the order of their tokens: those of a shard, and before them those that forks share, each a piece of
memory. Of a piece a query sees one run of slots, or several where padding cuts it. A kernel attends a run in a launch,
of all sequences that see the same, and partials of several runs of a sequence merge.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnmesh.cache.cache_shard import CacheShard
from attnmesh.core.band import Band
from attnmesh.core.logits import Logits
from attnmesh.core.mask import Mask
from attnmesh.core.partial import Partial, merge_unchecked, sum_dtype, with_sinks
from attnmesh.core.selection import NONE, Selection
from attnmesh.core.storage import Storage, storage_of
from attnmesh.kernels.blocks import Kernel, Launch
from attnmesh.kernels.cache_view import CacheView, DecodeQuery, Padding
from attnmesh.kernels.selected_keys import SelectedKeys, nan_where_faulty
from attnmesh.kernels.stacked_merge import by_residue, copy_into, merge_along_tree, merge_stacked
from attnmesh.kernels.stored import CacheKernel


class Slots(NamedTuple):
    """Slots of a cache in the order of their tokens, the first of which are used."""

    keys: Tensor  # (batch, heads, slots, dim) as in memory
    values: Tensor
    tokens: Tensor  # (slots,), the token in each slot; without its host reading, unused ones are `NOWHERE`
    used: int
    places: Tensor | None = None  # (batch, slots), positions in the sequences of a padded batch if they are others


class Held(NamedTuple):
    """What a rank holds of a cache."""

    pieces: list[Slots]
    state: Tensor  # on the device, tokens of all ranks first
    length: Any
    """Tokens of all ranks, on the device where the host does not read them."""
    padding: Padding | None
    at: int | None = None  # the first token, if those after it follow without a gap
    forgotten: int = 0  # blocks before the first slot

    @staticmethod
    def of(shard: CacheShard, alone: bool) -> "Held":
        """Return what a shard holds. With `alone` no other rank holds tokens between."""
        stored, padding, (length, used, *gone) = shard.stored, shard.padding, shard.state.tolist()
        tokens, places = shard.token_index, None if padding is None else padding.places
        if not tokens.is_cpu:
            tokens, places = tokens.cpu(), None if places is None else places.cpu()
        pieces, at = [Slots(stored[0], stored[-1], tokens, used, places)], length - used
        if shard.shared:
            pieces[:0] = [Slots(x.stored[0], x.stored[-1], x.token_index.cpu(), x.used, x.places) for x in shard.shared]
            at -= shard.shared_tokens
        return Held(pieces, shard.state, length, padding, at if alone else None, gone[0] if gone else 0)

    @staticmethod
    def of_view(view: CacheView, *, on_host: bool) -> "Held":
        """Return what a view shows; with `on_host` the host reads how many tokens that is."""
        parts = [part.held(on_host=on_host) for part in (*view.shared, view)]
        pieces = [
            Slots(x.keys, x.values, x.token_index, x.keys.shape[2], None if x.padding is None else x.padding.places)
            for x in parts
        ]
        if not on_host and view.state.device.type != "cpu":
            return Held(pieces, view.state, view.state[0], view.padding)
        length, _, *gone = view.state.tolist()
        return Held(pieces, view.state, length, view.padding, None, *gone)


class SeenKeys(NamedTuple):
    """Which keys the last queries of a cache see."""

    mask: Mask
    in_order: bool  # numbers of tokens tell it, in a cache without padding
    block: int | None = None  # slots of a block; each block gives one partial, and these are merged along a tree
    by_distance: bool = False  # logits have a bias by distance, whose kernel needs positions
    key_lengths: Tensor | None = None  # (batch,), real keys per sequence, on the device
    selection: Selection | None = None

    @staticmethod
    def of(mask: Mask, rows: int, block: int | None, by_distance: bool) -> "SeenKeys":
        """Return what so many queries see."""
        others = by_distance or block is not None or mask.spans or mask.ends or (rows > 1 and mask.chunks)
        return SeenKeys(mask, not others, block, by_distance)


class Run(NamedTuple):
    """Slots of a piece that the queries of a sequence see, or those of all sequences."""

    keys: Tensor  # (sequences, heads, slots, dim) as in memory
    values: Tensor
    start: int
    stop: int
    sequence: int | None = None  # None for all
    part: int | slice = 0  # the partial that it gives, of those of a sequence; of each block one
    bounds: Band | SelectedKeys | None = None  # what each query sees of the run, counted from its start; None for all
    hidden: Tensor | None = None  # (rows,), True for queries that see nothing
    places: tuple[Tensor, Tensor] | None = None  # positions of queries and of keys, where a kernel needs them


class RunKernel(NamedTuple):
    """A kernel that attends runs, of a kind of steps."""

    rows: CacheKernel
    whole: Launch | None  # the launch for all sequences, and for one, if one call serves them
    single: Launch | None
    storage: Storage | None
    alone: bool  # no other rank holds tokens of the cache
    on_host: bool  # the host reads how many tokens are held

    @staticmethod
    def of(kernel: Kernel, q: Tensor, view: CacheView, logits: Logits, *, alone: bool, on_host: bool) -> "RunKernel":
        """Return the kernel for queries of a cache."""
        keys, values = view.numbers
        rows, options = CacheKernel(kernel, logits, view.value_dim), (storage_of(view.keys), alone, on_host)
        single = kernel.launch_of(q[:1], keys[:1], values[:1], logits)
        return RunKernel(rows, kernel.launch_of(q, keys, values, logits), single, *options)

    def hold(self, shards: Sequence[CacheShard]) -> list[Held]:
        """Return what shards hold."""
        if self.on_host:
            return [Held.of(shard, self.alone) for shard in shards]
        return [Held.of_view(shard.view, on_host=False) for shard in shards]

    def attend(
        self, q: Tensor, held: Sequence[Any], visible: SeenKeys, place: Partial | None, sinks: Tensor | None = None
    ) -> Partial:
        """Return the partial of the last queries over one cache, or of each row over a cache, at its place if given."""
        several, runs = len(held) > 1, list[Run]()
        if several and visible.block is not None:  # each row has a tree of its own
            one = self._replace(whole=self.single)
            rows = [one.attend(q[row : row + 1], [own], visible, None, sinks) for row, own in enumerate(held)]
            return copy_into(Partial(*map(torch.cat, zip(*rows, strict=True))), place)
        for row, own in enumerate(held):
            find = runs_by_number if visible.in_order and own.padding is None else runs_by_position
            runs += find(own, visible, q, row if several else None)
        if place is not None and q.shape[2] == 1:
            into = place
        else:  # launches write tokens before heads
            into = self._blank(q) if self.whole is None else self.whole.blank()
        parts = _parts(runs) if len(runs) > 1 or visible.block is not None else 1
        is_stack = visible.block is not None or parts > 1
        stack = _stack_of(parts, into) if is_stack else into
        for run in runs:
            keys, values, start, stop, sequence, part, bounds, hidden, _ = run
            (out, lse), some_q, kind = stack, q, self.whole
            if is_stack:
                out, lse = out[part], lse[part]
            if not isinstance(part, int):  # blocks are the batch of a call
                out, lse, some_q = out[:, sequence], lse[:, sequence], q[sequence].expand(len(keys), -1, -1, -1)
                kind = None
            elif sequence is not None:
                only, kind = slice(sequence, sequence + 1), self.single
                out, lse, some_q = out[only], lse[only], q[only]
            if start >= stop:  # the identity
                out.zero_()
                lse.fill_(-torch.inf)
                continue
            places = out.data_ptr(), lse.data_ptr()
            if (
                kind is None
                or isinstance(bounds, SelectedKeys)
                or not kind.launch_at(some_q, keys, values, places, bounds, start, stop - start)
            ):
                self._attend_otherwise(some_q, run, Partial(out, lse))
            if hidden is not None:
                out[:, :, hidden] = 0.0
                lse[:, :, hidden] = -torch.inf
        if is_stack:
            into = _merge(stack, held[0].forgotten if visible.block is not None else None)
        if visible.selection is not None:
            into = Partial(nan_where_faulty(into.out, visible.selection, held[0].state[0]), into.lse)
        if sinks is not None:
            into = with_sinks(into, sinks)
        return into if place is None or into is place else copy_into(into, place)

    def _blank(self, q: Tensor) -> Partial:
        """Return memory for a partial of the queries."""
        dtype = sum_dtype(q.dtype)
        out = q.new_empty((*q.shape[:-1], self.rows.value_dim), dtype=dtype)
        return Partial(out, q.new_empty(q.shape[:-1], dtype=dtype))

    def _attend_otherwise(self, q: Tensor, run: Run, into: Partial) -> None:
        """Write the partial of a run that is no native launch, or has numbers that are not finite."""
        keys, values = (x[:, :, run.start : run.stop] for x in (run.keys, run.values))
        if self.storage is not None:
            keys, values = keys.view(self.storage.dtype), values.view(self.storage.dtype)
        else:
            values = values[..., : self.rows.value_dim]
        kernel = self.rows if run.places is None else self.rows.at(q, keys, run.places)
        copy_into(kernel(q, keys, values, run.bounds), into)


class DeviceKernel(NamedTuple):
    """The Triton programs, which find the runs themselves where the host reads nothing."""

    kernel: Kernel
    logits: Logits
    capacity: int

    def hold(self, shards: Sequence[CacheShard]) -> list[CacheView]:
        """Return views of shards."""
        return [shard.view for shard in shards]

    def attend(
        self, q: Tensor, held: Sequence[Any], visible: SeenKeys, place: Partial | None, sinks: Tensor | None = None
    ) -> Partial:
        """Return the partial of the last queries, as `RunKernel` does: a launch for each piece of a cache."""
        into = place
        if place is None and visible.block is None:
            shape = *q.shape[:-1], held[0].value_dim
            into = Partial(q.new_empty(shape), q.new_empty(shape[:-1], dtype=torch.float32))
        options = visible.mask, self.logits, self.capacity, sinks, visible.block, into, visible.key_lengths
        query = DecodeQuery(q, *options)
        if len(held) == 1:
            return self._attend_one(query, held[0])
        rows = [self._attend_one(query.row(row), view) for row, view in enumerate(held)]
        return into or Partial(*map(torch.cat, zip(*rows, strict=True)))

    def _attend_one(self, query: DecodeQuery, view: CacheView) -> Partial:
        """Return the partial over one cache."""
        if not view.shared:
            return self.kernel.attend_cache(query, view)
        plain = query._replace(sinks=None, into=None)
        parts = [self.kernel.attend_cache(plain, part) for part in (*view.shared, view)]
        return copy_into(with_sinks(merge_unchecked(parts), query.sinks), query.into)


def _parts(runs: Sequence[Run]) -> int:
    """Return the number of partials of a sequence that runs give at most."""
    parts = [run.part for run in runs]
    return max((part + 1 if isinstance(part, int) else part.stop for part in parts), default=0)


def _stack_of(parts: int, like: Partial) -> Partial:
    """Return identities stacked along a first dim, each in the memory order of a partial."""
    (out, lse), parts = like, max(1, parts)
    outs = torch.empty_strided((parts, *out.shape), (out.numel(), *out.stride()), dtype=out.dtype, device=out.device)
    return Partial(outs.zero_(), lse.new_full((parts, *lse.shape), -torch.inf))


def _merge(stack: Partial, forgotten: int | None) -> Partial:
    """Return the merge of stacked partials; of blocks, after so many that are forgotten, along a tree."""
    if forgotten is None:
        return merge_stacked(stack)
    return merge_along_tree(by_residue(stack, forgotten) if forgotten else stack)


def runs_by_number(held: Held, visible: SeenKeys, q: Tensor, sequence: int | None) -> list[Run]:
    """Return the runs that the last queries of a cache without padding see, where numbers of tokens tell."""
    mask, rows, length, at, runs = visible.mask, q.shape[2], held.length, held.at, list[Run]()
    first = 0 if mask.left >= length and not mask.chunks else mask.first_seen(length - rows)
    several = rows > 1 and (mask.left < length or mask.right < rows)
    for part, (keys, values, tokens, used, _) in enumerate(held.pieces):
        start, bounds = 0, None
        if first:
            start = min(max(0, first - at), used) if at is not None else int(torch.searchsorted(tokens[:used], first))
        if several:
            bounds = _bounds(mask, range(length - rows, length), (tokens, used), at, start)
        runs.append(Run(keys, values, start, used, sequence, part, bounds))
        at = None if at is None else at + used
    return runs


def runs_by_position(held: Held, visible: SeenKeys, q: Tensor, sequence: int | None = None) -> list[Run]:
    """Return the runs that the last queries of any cache see. With a selection the host reads nothing of a device."""
    mask, length, rows, padding = visible.mask, held.length, q.shape[2], held.padding
    tokens = (length - rows + torch.arange(rows, device=held.state.device)).clamp(min=0)
    real, positions = (None, tokens[None]) if padding is None else padding.last(tokens)
    if visible.selection is None:
        positions, real = positions.cpu(), None if real is None else real.cpu()
    first, last = mask.bounds(positions)
    if real is not None and (visible.selection is not None or rows == 1):
        last = last.masked_fill(~real, -1)
    if visible.selection is not None:
        runs = _selected_runs(held, visible, (first, last))
    elif visible.block is not None:
        runs = list[Run]()
        for piece in held.pieces:
            runs += _block_runs(piece, (first[0], last[0]), visible.block, len(q), _parts(runs))
    else:
        runs = _seen_runs(held.pieces, visible, (positions, first, last), real)
    return runs if sequence is None else [run._replace(sequence=sequence) for run in runs]


def _bounds(mask: Mask, queries: range, held: tuple[Tensor, int], at: int | None, start: int) -> Band:
    """Return the slots after `start` that each query sees. Slot 0 holds token `at`, if tokens follow each other."""
    tokens, used = held
    low = [max(0, query - mask.left) for query in queries]
    high = [min(queries.stop, query + mask.right + 1) for query in queries]
    if at is None:
        tokens = tokens[:used]
        return Band(*(torch.searchsorted(tokens, torch.tensor(bounds, device="cpu")) - start for bounds in (low, high)))
    first, count = at + start, used - start
    some = ([min(max(0, bound - first), count) for bound in bounds] for bounds in (low, high))
    return Band(*(torch.tensor(bounds, device="cpu") for bounds in some))


def _seen_runs(
    pieces: Sequence[Slots], visible: SeenKeys, queries: tuple[Tensor, Tensor, Tensor], real: Tensor | None
) -> list[Run]:
    """Return runs of what queries at these positions see, from the first position up to the last. Others are hidden."""
    positions, first, last = queries
    if visible.key_lengths is not None:
        last = torch.minimum(last, visible.key_lengths.cpu()[:, None] - 1)
        first = first.expand_as(last)
    rows, sequences = positions.shape[1], len(last)
    runs, parts = list[Run](), [0] * sequences
    for keys, values, tokens, used, places in pieces:
        places = tokens[None, :used] if places is None else places[:, :used]
        seen = torch.zeros(sequences, used + 2, dtype=torch.bool, device="cpu")
        torch.logical_and(places >= first[:, :1], places <= last[:, -1:], out=seen[:, 1:-1])
        edges = (seen[:, 1:] != seen[:, :-1]).nonzero().tolist()
        for (number, start), (_, stop) in zip(edges[::2], edges[1::2], strict=True):
            one, bounds, hidden, where = slice(number, number + 1), None, None, None
            if rows > 1 or visible.by_distance:
                own = places[number if len(places) > 1 else 0, start:stop]
                where = positions[number if len(positions) > 1 else 0], own
                low, high = torch.searchsorted(own, first[number]), torch.searchsorted(own, last[number], right=True)
                bounds, hidden = Band(low, high), None if real is None else ~real[number]
            part, parts[number] = parts[number], parts[number] + 1
            if sequences == 1:
                runs.append(Run(keys, values, start, stop, None, part, bounds, hidden, where))
            else:
                runs.append(Run(keys[one], values[one], start, stop, number, part, bounds, hidden, where))
    for number, count in enumerate(parts):
        if not count:
            runs.append(Run(keys, values, 0, 0, number if sequences > 1 else None))
    return runs


def _selected_runs(held: Held, visible: SeenKeys, seen: tuple[Tensor, Tensor]) -> list[Run]:
    """Return runs of the selected keys. In a padded batch each sequence has positions of its own."""
    selection, lengths, (first, last), runs = visible.selection, visible.key_lengths, seen, list[Run]()
    assert selection is not None
    wanted = selection if held.padding is None else _by_position(selection, held.padding)
    for part, (keys, values, tokens, used, places) in enumerate(held.pieces):
        if held.padding is None:
            found = SelectedKeys(wanted, first[0], last[0], tokens[:used], lengths)
            runs.append(Run(keys, values, 0, used, None, part, found))
            continue
        places = tokens.expand(len(keys), -1) if places is None else places
        places = places[:, :used].cummax(1).values  # a search finds the token before, not padding after it
        for row in range(len(keys)):
            one = slice(row, row + 1)
            own = Selection(wanted.indices[one]), first[row], last[row], places[row]
            found = SelectedKeys(*own, None if lengths is None else lengths[one])
            runs.append(Run(keys[one], values[one], 0, used, row, part, found))
    return runs


def _by_position(selection: Selection, padding: Padding) -> Selection:
    """Return the selection by position in each sequence instead of by token, without padding."""
    tokens = selection.positions(selection.indices, slice(0, selection.indices.shape[-1] * selection.block))
    real = padding.token_mask
    positions = (real.cumsum(1) - 1).masked_fill(~real, NONE).to(torch.int32)
    inside = (tokens >= 0) & (tokens < positions.shape[1])
    found = positions[:, None, None].expand(*tokens.shape[:3], -1).gather(-1, tokens.where(inside, 0))
    return Selection(found.where(inside, NONE))


def _block_runs(piece: Slots, seen: tuple[Tensor, Tensor], block: int, sequences: int, before: int) -> Iterator[Run]:
    """Yield runs of blocks, after those of earlier pieces. Blocks that every query sees whole take one call."""
    keys, values, tokens, used, _ = piece
    low, high = torch.searchsorted(tokens[:used], seen[0]), torch.searchsorted(tokens[:used], seen[1], right=True)
    count = -(-used // block)
    first, last = -(-int(low[-1]) // block), int(high[0]) // block
    whole = range(first, max(first, last))
    for row in range(sequences if whole else 0):
        # A view: (blocks, heads, tokens of a block, dim). One call for all sequences would have to copy the keys.
        some_keys, some_values = (
            x[row, :, first * block : last * block].unflatten(1, (-1, block)).transpose(0, 1) for x in (keys, values)
        )
        yield Run(some_keys, some_values, 0, block, row, slice(before + first, before + last))
    for number in range(count):
        if number not in whole:
            start, stop = number * block, min(used, (number + 1) * block)
            inside = Band(*((bound - start).clamp(0, stop - start) for bound in (low, high)))
            empty = not bool((inside.low < inside.high).any())
            yield Run(keys, values, start, start if empty else stop, None, before + number, inside)
