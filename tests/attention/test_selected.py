"""Attention to selected keys: laws on one device, any problem on meshes against float64, and what is refused."""

from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import attnmesh as am
from attnmesh.core import selection as core
from attnmesh.core.selection import NONE
from attnmesh.kernels import selected as kernel
from tests.support import problems
from tests.support.mesh_problems import MeshProblem, check, draw_selected, run
from tests.support.pool import Pool
from tests.support.seeds import batches, seeds


def check_alone(seed: int, longest: int) -> None:
    problem = problems.draw(seed, longest=longest)
    places = range(problem.lengths[1]) if problem.k_positions is None else problem.k_positions.tolist()
    sizes = (problem.batch, problem.heads[1]), problem.lengths[0], max(places, default=-1) + 1
    replace(problem, kernel="auto", selected=problems.selection(Random(seed), *sizes)).check()


@pytest.mark.parametrize("seed", seeds(50, 400))
def test_random_problems_agree_with_float64(seed: int) -> None:
    check_alone(seed, 333)


@pytest.mark.parametrize("seed", seeds(30, 200))
def test_small_tiles_agree_with_float64(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernel.ELEMENTS, "cpu", 200)  # so few that queries, key heads and selected keys are all cut
    monkeypatch.setattr(core, "ELEMENTS", 50)
    check_alone(seed, 33)


# --- laws ---

Drawn = tuple[Tensor, Tensor, Tensor, am.Selection]


@st.composite
def cases(draw: st.DrawFn) -> Drawn:
    """q, k, v in float64, and a selection."""
    random = Random(draw(st.integers(0, 2**30)))
    generator = torch.Generator().manual_seed(random.getrandbits(30))
    n, kv_heads, batch = random.randint(1, 20), random.randint(1, 3), random.randint(1, 2)
    heads = (kv_heads * random.randint(1, 3), kv_heads, kv_heads)
    q, k, v = (torch.randn(batch, h, n, 4, generator=generator, dtype=torch.float64) for h in heads)
    return q, k, v, problems.selection(random, (batch, kv_heads), n, n)


def close(given: am.Partial, expected: am.Partial) -> None:
    for some, other in zip(given, expected, strict=True):
        torch.testing.assert_close(some, other)


@given(cases(), st.integers(1, 4))
def test_parts_of_the_keys_merge(case: Drawn, parts: int) -> None:
    q, k, v, selected = case
    whole = am.attend(q, k, v, mask=am.Causal(), selected=selected)
    some = []
    for places in torch.randperm(k.shape[2]).tensor_split(parts):
        where = {"mask": am.Causal(), "k_positions": places, "selected": selected}
        some.append(am.attend(q, k[:, :, places], v[:, :, places], **where))
    close(am.merge(*some), whole)


@given(cases(), st.integers(0, 20))
def test_disjoint_selections_merge_to_attention_over_their_union(case: Drawn, cut: int) -> None:
    q, k, v, whole = case
    parts = [am.Selection(x, whole.block) for x in whole.indices.tensor_split([cut], -1) if x.shape[-1]]
    close(am.merge(*(am.attend(q, k, v, selected=part) for part in parts)), am.attend(q, k, v, selected=whole))


@given(cases())
def test_a_selection_of_all_keys_is_causal_attention(case: Drawn) -> None:
    q, k, v, _ = case
    every = am.Selection(torch.randperm(k.shape[2]).int().expand(len(q), 1, q.shape[2], -1))
    close(am.attend(q, k, v, mask=am.Causal(), selected=every), am.attend(q, k, v, mask=am.Causal()))


@given(cases())
def test_a_block_is_its_keys(case: Drawn) -> None:
    q, k, v, selected = case
    first = selected.indices.long().unsqueeze(-1) * selected.block
    each = torch.where(first < k.shape[2], first + torch.arange(selected.block), NONE).flatten(-2)
    keys = am.Selection(each.masked_fill(each >= k.shape[2], NONE).int())
    close(am.attend(q, k, v, selected=keys), am.attend(q, k, v, selected=selected))


@given(cases())
def test_rows_with_nothing_are_the_identity(case: Drawn) -> None:
    q, k, v, selected = case
    nothing = am.Selection(torch.full_like(selected.indices, NONE))
    partial = am.attend(q, k, v, selected=nothing)
    assert not partial.out.any()
    assert torch.isneginf(partial.lse).all()


def test_numbers_of_keys_that_are_not_selected_do_not_matter() -> None:
    q, k, v = torch.randn(3, 1, 2, 6, 4).unbind()
    rows = torch.tensor([[1, NONE], [1, 2], [NONE, 2], [1, 5], [5, 4], [1, 2]], dtype=torch.int32)
    expected = am.attend(q, k, v, mask=am.Causal(), selected=am.Selection(rows[None, None]))
    k[:, :, [0, 3]], v[:, :, [0, 3]] = torch.nan, torch.inf
    given = am.attend(q, k, v, mask=am.Causal(), selected=am.Selection(rows[None, None]))
    assert torch.equal(given.out[:, :, 1:], expected.out[:, :, 1:])


# --- meshes ---


def run_each(drawn: list[MeshProblem]) -> list[list[Tensor]]:
    return [run(problem) for problem in drawn]


PER_WORLD = {1: (10, 20), 2: (30, 60), 3: (20, 60), 4: (40, 120)}


def mesh_cases() -> list[object]:
    found = []
    for ranks, (few, many) in PER_WORLD.items():
        for batch in batches(few, many, 10):
            found.append(pytest.param(ranks, *batch.values, id=f"{ranks}-{batch.id}", marks=batch.marks))
    return found


@pytest.mark.parametrize(("ranks", "of"), mesh_cases())
def test_random_problems_on_a_mesh_agree_with_float64(pool: Pool, ranks: int, of: range) -> None:
    drawn = [draw_selected(seed * 100 + ranks, ranks) for seed in of]
    for problem, results in zip(drawn, zip(*pool.run(ranks, run_each, drawn), strict=True), strict=True):
        check(problem, list(results))
