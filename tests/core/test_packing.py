"""Layouts of packed documents: parts of equal length and equal pairs, on the mesh that they are made for."""

from itertools import product
from math import prod
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attnmesh as am
from attnmesh import errors
from attnmesh.core.band import Band
from attnmesh.core.layout import Layout
from attnmesh.mesh.schedule import Problem, make_schedule

pytestmark = pytest.mark.quick


shapes = st.builds(am.Shape, st.integers(1, 3), st.integers(1, 5), st.integers(1, 5))


@given(st.lists(st.integers(0, 60), min_size=1, max_size=30), shapes)
def test_packed_shards_are_a_permutation_of_equal_parts(documents: list[int], shape: am.Shape) -> None:
    layout, length = am.Packed(documents, shape), sum(documents)
    parts = [layout.positions(length, shape.ranks, index) for index in range(shape.ranks)]
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(length))
    assert all((part.diff() > 0).all() for part in parts)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert Layout.from_code([*layout.to_code(), 7, 8]) == (layout, [7, 8])


@pytest.mark.parametrize("shape", [(1, 8, 1), (1, 1, 8), (1, 3, 3), (2, 2, 4), (1, 4, 4), (1, 8, 8)])
@pytest.mark.parametrize("seed", range(2))
def test_packed_cells_have_equal_pairs(shape: tuple[int, int, int], seed: int) -> None:
    """A query at r meets a key at c at rank (r, c). Lengths are those of text: many short, a few very long."""
    random, ranks, documents = Random(seed), prod(shape), list[int]()
    while sum(documents) < 512 * ranks:
        documents.append(min(int(random.lognormvariate(3.5, 1.4)) + 1, 512 * ranks - sum(documents)))
    layout, mask = am.Packed(documents, shape), am.Causal() & am.Documents(documents)
    problem = Problem(mask, am.Shape(*shape), layout, layout, sum(documents), sum(documents))
    pairs = []
    for r, c in product(range(shape[1]), range(shape[2])):
        band = Band.of(mask, problem.query_positions_at(r), problem.key_positions_at(c))
        pairs.append(int((band.high - band.low).clamp(min=0).sum()))
    assert sum(pairs) == sum(n * (n + 1) // 2 for n in documents)
    assert max(pairs) <= 1.06 * sum(pairs) / len(pairs)  # 1.05 without the diagonal, of which shards have equal parts


@pytest.mark.parametrize("lengths", [[50, 30, 20], [100], [25, 25, 25, 25]])
def test_documents_that_fit_a_cell_send_nothing(lengths: list[int]) -> None:
    layout = am.Packed(lengths * 16, am.Shape(1, 4, 4))
    mask = am.Causal() & am.Documents(layout.documents)
    problem = Problem(mask, am.Shape(1, 4, 4), layout, layout, 1600, 1600)
    for r, c in product(range(4), range(4)):
        own_schedule = make_schedule(problem, r, c, ring=False)
        assert not own_schedule.query_step.receive
        assert not own_schedule.key_steps[0].receive


@pytest.mark.parametrize(
    ("documents", "shape", "expected"),
    [
        ((3, -1), (1, 1, 2), "Packed documents: expected whole numbers of 0 or more, one a document, given"),
        ([], (1, 1, 2), "Packed documents"),
        (5, (1, 1, 2), "Packed documents"),
        ([torch.tensor(4.0)], (1, 1, 2), r"Packed documents: .*, given \[tensor\(4\.\)\]\. Fix: pass a tuple"),
        ([torch.tensor([4, 4])], (1, 1, 2), "Packed documents"),
        ([4], (2, 2), r"Packed shape: expected ranks along heads, queries and keys, given \(2, 2\)"),
        ([4], (1, 0, 2), "Packed shape"),
        ([4], 4, "Packed shape"),
    ],
)
def test_packed_layouts_of_no_documents_or_no_mesh_raise(documents: Any, shape: Any, expected: str) -> None:
    with pytest.raises(errors.LayoutError, match=expected):
        am.Packed(documents, shape)


def test_packed_layouts_of_other_types_of_numbers_are_equal() -> None:
    layout, other = am.Packed((8, 4), am.Shape(1, 2, 1)), am.Packed([torch.tensor(8), 4], [1, torch.tensor(2), 1])
    assert (layout, hash(layout), repr(layout)) == (other, hash(other), repr(other))


def test_a_packed_layout_of_another_mesh_raises() -> None:
    expected = "layout Packed: expected 4 shards of 9 tokens in all, given 2 shards of 9 tokens. Fix: make Packed for"
    with pytest.raises(errors.LayoutError, match=expected):
        am.Packed((4, 5), am.Shape(1, 2, 2)).positions(9, 2, 0)
