"""Schedules, for all ranks of a mesh at once and without a device."""

from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attnmesh as am
import attnmesh.mesh.schedule as schedules
from attnmesh.core.layout import Layout
from attnmesh.core.mask import Mask
from attnmesh.mesh.schedule import Problem, Schedule, make_schedule
from attnmesh.mesh.shapes import Shape
from tests.support.truth.schedules import problems

pytestmark = pytest.mark.quick


def all_schedules(problem: Problem, ring: bool) -> dict[tuple[int, int], Schedule]:
    _, rows, columns = problem.shape
    return {(r, c): make_schedule(problem, r, c, ring) for r in range(rows) for c in range(columns)}


@given(problems(), st.booleans())
def test_every_visible_pair_is_computed_once(problem: Problem, ring: bool) -> None:
    count = torch.zeros(problem.length, problem.key_length, dtype=torch.long)
    for plan in all_schedules(problem, ring).values():
        for step, band in zip(plan.key_steps, plan.bands, strict=True):
            count[plan.query_step.positions[:, None], step.positions] += band.visible(len(step.positions))
    tokens = torch.arange(problem.length), torch.arange(problem.key_length)
    assert torch.equal(count, problem.mask.visible(*tokens).long())


@given(problems(), st.booleans())
def test_sent_tokens_are_received_and_results_return_to_their_owner(problem: Problem, ring: bool) -> None:
    plans = all_schedules(problem, ring)
    for (r, c), plan in plans.items():
        row = {peer: plans[r, peer].query_step for peer in range(problem.shape.keys)}
        sent = {p: problem.query_positions(r, p) for p in row}
        _check_step(plan.query_step, c, row, problem.query_positions(r, c), sent)
        held = problem.key_positions(r, c)
        befores = {p: problem.key_positions(p, c) for p in range(problem.shape.queries)}
        for t, step in enumerate(plan.key_steps):
            column = {peer: plans[peer, c].key_steps[t] for peer in range(problem.shape.queries)}
            _check_step(step, r, column, problem.key_positions(r, c), befores, held)
            held, befores = step.positions, {peer: other.positions for peer, other in column.items()}


def _check_step(step, me, peers, chunk, befores, held=None):  # type: ignore[no-untyped-def]
    """One rank's step beside its peers'; `befores` is what each held before it."""
    held = chunk if held is None else held
    arriving = [held[step.keep]]
    for peer, count in step.receive:
        sent = dict(peers[peer].send)[me]
        assert len(sent) == count
        arriving.append(befores[peer][sent])
    arrived = torch.cat(arriving)
    assert torch.equal(arrived if step.permutation is None else arrived[step.permutation], step.positions)
    for peer, tokens in step.send:
        assert dict(peers[peer].receive)[me] == len(tokens)
    for peer, mine in step.return_from:
        theirs = dict(peers[peer].return_to)[me]
        assert torch.equal(chunk[mine], peers[peer].positions[theirs])
    for peer, _ in step.return_to:
        assert me in dict(peers[peer].return_from)


def received_keys(plan: Schedule, *, width: int = 1) -> int:
    """Return the number of keys received from other ranks."""
    return width * sum(count for step in plan.key_steps for _, count in step.receive)


def test_under_a_full_mask_each_missing_token_is_received_once() -> None:
    for shape in (Shape(1, 4, 1), Shape(1, 2, 3), Shape(2, 3, 2), Shape(1, 1, 5)):
        n = 24
        problem = Problem(am.Full(), shape, am.Zigzag(), am.Zigzag(), n * shape.ranks, n * shape.ranks)
        for ring in (False, True):
            for plan in all_schedules(problem, ring).values():
                assert received_keys(plan) == n * shape.heads * (shape.queries - 1)
                assert sum(count for _, count in plan.query_step.receive) == n * shape.heads * (shape.keys - 1)
                assert sum(len(t) for p, t in plan.query_step.return_from) == n * shape.heads * shape.keys


def test_under_a_window_neighbours_exchange_the_same_tokens_at_any_length() -> None:
    for length in (1000, 100_000):
        problem = Problem(am.Window(50), Shape(1, 8, 1), am.Contiguous(), am.Contiguous(), length, length)
        for (r, _), plan in all_schedules(problem, ring=False).items():
            assert plan.key_steps[0].receive == (((r - 1, 50),) if r else ())
            assert received_keys(plan) <= 50
        for plan in all_schedules(problem, ring=True).values():
            assert received_keys(plan) <= 50


def test_packed_documents_receive_only_their_keys() -> None:
    lengths = [130, 7, 300, 63, 200, 100]
    mask = am.Causal() & am.Documents(lengths)
    problem = Problem(mask, Shape(1, 4, 2), am.Contiguous(), am.Contiguous(), 800, 800)
    for (r, c), plan in all_schedules(problem, ring=False).items():
        seen = mask.visible(problem.query_positions_at(r), problem.key_positions_at(c)).any(0)
        assert len(plan.key_steps[0].positions) == int(seen.sum())


@pytest.mark.parametrize("layout", [am.Zigzag(), am.Striped()])
@pytest.mark.parametrize(
    "ranks",
    [
        ranks if ranks in (1, 2, 3, 4, 6, 7, 8) else pytest.param(ranks, marks=pytest.mark.long)
        for ranks in range(1, 17)
    ],
)
def test_causal_work_is_balanced_on_every_shape(layout: Layout, ranks: int) -> None:
    for length in (64 * ranks, 64 * ranks + 37):
        for rows in (n for n in range(1, ranks + 1) if ranks % n == 0):
            problem = Problem(am.Causal(), Shape(1, rows, ranks // rows), layout, layout, length, length)
            work = [_pairs(plan) for plan in all_schedules(problem, ring=False).values()]
            assert sum(work) == length * (length + 1) // 2
            assert max(work) <= 1.05 * sum(work) / ranks


def _pairs(plan: Schedule) -> int:
    return sum(int((band.high - band.low).clamp(min=0).sum()) for band in plan.bands)


@pytest.mark.parametrize(("mask", "count"), [(am.Full(), 16), (am.Causal(), sum(range(16)) + 15)])
def test_a_ring_asks_who_sees_a_key_until_all_are_seen(mask: Mask, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Causal queries of the ranks before the owner see none of its keys, and those of the last of 16 ranks see all."""
    asked = Mock(wraps=schedules._keys_seen_by)
    monkeypatch.setattr(schedules, "_keys_seen_by", asked)
    make_schedule.__wrapped__(Problem(mask, Shape(1, 16, 1), am.Contiguous(), am.Contiguous(), 64, 64), 3, 0, True)
    assert asked.call_count == count
