"""Runs of slots: together they hold the keys that each query of a step sees, each once."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import attnmesh as am
from attnmesh.core.scaling import Scaling
from attnmesh.core.selection import NO_INDEX
from attnmesh.kernels import cache_runs
from attnmesh.kernels.cache_runs import ALL, CachedAttention, SlotRun, runs_of
from attnmesh.kernels.cache_view import CacheView, DecodeQuery
from attnmesh.kernels.implementations.reference import Reference
from attnmesh.kernels.padding import Padding
from tests.support.truth.problems import numbers
from tests.support.truth.tolerances import FLOAT32

HEADS, DIM = 2, 8
MASKS = (am.Causal(), am.Full(), am.Window(0), am.Window(9), am.Causal() & am.Chunks(8), am.Window(7, 3))


def view_of(tokens: Tensor, length: int, batch: int = 1, token_mask: Tensor | None = None, **more: Any) -> CacheView:
    """Return a view of a shard that holds these tokens of so many, and three free slots."""
    used, slots = len(tokens), len(tokens) + 3
    token_index = torch.cat((tokens, torch.zeros(3, dtype=torch.int64)))
    keys, values = (numbers(batch, HEADS, slots, DIM, seed=seed) for seed in (1, 2))
    padding = None
    if token_mask is not None:
        real = torch.cat((token_mask, torch.ones(batch, 3, dtype=torch.bool)), 1)
        positions = torch.where(token_mask, token_mask.cumsum(1) - 1, -1)[:, tokens]
        padding = Padding(real, torch.nn.functional.pad(positions, (0, 3)), token_mask.sum(1))
    return CacheView(keys, values, token_index, torch.tensor([length, used]), padding, DIM, **more)


def query_of(queries: int, mask: am.Mask = MASKS[0], batch: int = 1, **options: Any) -> DecodeQuery:
    return DecodeQuery(numbers(batch, HEADS, queries, DIM, seed=3), mask, Scaling(DIM**-0.5), 50, **options)


def some_tokens(length: int, seed: int) -> Tensor:
    """Return about half of the tokens, in order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.arange(length)[torch.rand(length, generator=generator) < 0.5]


def times_seen(runs: list[SlotRun], piece: CacheView, query: DecodeQuery) -> Tensor:
    """Return how often each query sees each used slot of a piece, (batch, queries, slots)."""
    batch, _, queries, _ = query.q.shape
    times = torch.zeros(batch, queries, int(piece.device_counts[1]), dtype=torch.int64)
    for run in runs:
        if run.piece.token_index is not piece.token_index:
            continue
        seen = torch.ones(queries, run.stop - run.start, dtype=torch.bool)
        if run.band is not None:
            seen = run.band.visible(run.stop - run.start)
        if run.hidden is not None:
            seen = seen & ~run.hidden[:, None]
        times[run.sequences, :, run.start : run.stop] += seen
    return times


def visible(piece: CacheView, query: DecodeQuery) -> Tensor:
    """Return what each query sees of each used slot, by the positions of both."""
    length, used = piece.device_counts.tolist()
    tokens = torch.arange(length - query.q.shape[2], length)
    real, positions = (torch.tensor(True), tokens[None]) if piece.padding is None else piece.padding.last(tokens)
    first, last = query.mask.bounds(positions)
    keys = piece.positions()[:, None, :used]
    seen = (first[..., None] <= keys) & (keys <= last[..., None]) & (keys >= 0) & real[..., None]
    if query.key_lengths is not None:
        seen = seen & (keys < query.key_lengths[:, None, None])
    return seen.expand(len(query.q), -1, -1)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("queries", [1, 2, 5])
def test_runs_hold_what_each_query_sees(queries: int, mask: am.Mask) -> None:
    for seed in range(8):
        view = view_of(some_tokens(31, seed), 31)
        query = query_of(queries, mask)
        assert torch.equal(times_seen(runs_of(query, [view]), view, query), visible(view, query).long())


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("queries", [1, 4])
def test_runs_hold_the_real_tokens_of_padded_sequences(queries: int, mask: am.Mask) -> None:
    for seed in range(8):
        token_mask = torch.rand(3, 31, generator=torch.Generator().manual_seed(seed)) < 0.7
        view = view_of(some_tokens(31, seed), 31, batch=3, token_mask=token_mask)
        query = query_of(queries, mask, batch=3)
        assert torch.equal(times_seen(runs_of(query, [view]), view, query), visible(view, query).long())


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("queries", [1, 4])
def test_runs_end_with_the_real_keys_of_each_sequence(queries: int, padded: bool) -> None:
    token_mask = torch.arange(31) >= torch.tensor([[0], [4], [9]]) if padded else None
    view = view_of(some_tokens(31, 0), 31, batch=3, token_mask=token_mask)
    query = query_of(queries, batch=3, key_lengths=torch.tensor([31, 12, 0]))
    runs = runs_of(query, [view])
    assert torch.equal(times_seen(runs, view, query), visible(view, query).long())
    assert {run.sequences.start for run in runs} == {0, 1}, "the last sequence sees nothing"


def test_shared_pieces_come_first_and_in_their_order() -> None:
    early, late = (view_of(torch.arange(start, start + 10), 30) for start in (0, 10))
    view = view_of(torch.arange(20, 30), 30, earlier_pieces=(early, late))
    query = query_of(3, am.Window(14))
    runs = runs_of(query, [view])
    assert [run.piece for run in runs] == [late, view], "the window begins after the first piece"
    for piece in (early, late, view):
        assert torch.equal(times_seen(runs, piece, query), visible(piece, query).long())


def test_rows_of_caches_have_runs_of_their_own() -> None:
    views = [view_of(torch.arange(length), length) for length in (5, 9)]
    runs = runs_of(query_of(1, batch=2), views)
    assert [(run.sequences, run.start, run.stop) for run in runs] == [(slice(0, 1), 0, 5), (slice(1, 2), 0, 9)]
    (alone,) = runs_of(query_of(1), views[:1])
    assert alone.sequences is ALL


@pytest.mark.parametrize("queries", [1, 3])
def test_a_piece_without_tokens_has_no_run(queries: int) -> None:
    assert runs_of(query_of(queries), [view_of(torch.arange(0), 12)]) == []


def test_a_kernel_that_reads_in_place_gets_whole_pieces() -> None:
    view = view_of(torch.arange(9), 9)
    assert runs_of(query_of(3, am.Window(2)), [view], in_place=True) == [SlotRun(ALL, view)]


def test_slots_of_a_reproducible_step_are_one_run() -> None:
    """Their blocks are cut from the first slot on, whatever the window."""
    (run,) = runs_of(query_of(2, am.Window(3), partial_block=4), [view_of(torch.arange(30), 30)])
    assert (run.start, run.stop) == (0, 30)


def test_few_queries_see_what_their_bounds_say() -> None:
    """The CPU counts the keys of few queries one by one: the same runs as of many."""
    for seed in range(60):
        length = 9 + seed % 31
        view, query = view_of(some_tokens(length, seed), length), query_of(2 + seed % 8)
        found = runs_of(query, [view])
        with mock.patch.object(cache_runs, "MAX_COUNTED_QUERIES", 0):
            wanted = runs_of(query, [view])
        assert [run[:4] for run in found] == [run[:4] for run in wanted]
        for one, other in zip(found, wanted, strict=True):
            assert (one.band is None) == (other.band is None)
            if one.band is not None and other.band is not None:
                assert one.band.low.equal(other.band.low)
                assert one.band.high.equal(other.band.high)


def test_selected_tokens_are_a_run_of_all_used_slots() -> None:
    tokens = torch.arange(1, 20, 2)
    selection = am.Selection(torch.tensor([1, 4, 19, NO_INDEX], dtype=torch.int32)[None, None, None])
    (run,) = runs_of(query_of(1), [view_of(tokens, 20)], selection)
    assert run.selected is not None
    assert (run.start, run.stop) == (0, len(tokens))
    assert run.piece.token_index.tolist() == tokens.tolist()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("queries", [1, 3])
def test_cached_attention_is_attention_over_the_slots_that_are_seen(queries: int, padded: bool) -> None:
    token_mask = torch.arange(20) >= torch.tensor([[0], [6]]) if padded else None
    view, query = (
        view_of(torch.arange(20), 20, batch=2, token_mask=token_mask),
        query_of(queries, am.Window(8), batch=2),
    )
    total = CachedAttention(Reference(), query.scaling, DIM).attend(query, [view])
    logits = (query.q @ view.keys[:, :, :20].transpose(-1, -2) * query.scaling.scale).double()
    logits = logits.masked_fill(~visible(view, query)[:, None], -torch.inf)
    torch.testing.assert_close(total.lse.double(), logits.logsumexp(-1), atol=FLOAT32, rtol=FLOAT32)
    out = logits.softmax(-1) @ view.values[:, :, :20].double()
    torch.testing.assert_close(total.out.double(), out, atol=2 * FLOAT32, rtol=FLOAT32)
