"""Layouts: the shards of each are a permutation of the tokens, and their causal work is balanced."""

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
from attnmesh.core.layout import Layout, layout_from_code, layout_to_code
from attnmesh.mesh.schedule import Problem, schedule

pytestmark = pytest.mark.quick

layouts = st.one_of(
    st.builds(am.Contiguous), st.builds(am.Zigzag), st.builds(am.Striped), st.builds(am.Striped, st.integers(1, 9))
)


unequal_layouts = st.builds(am.Striped, st.lists(st.integers(1, 9), min_size=2, max_size=4))
"""Block-cyclic ones with a block for each of a few shards, which so many shards, or a multiple, share."""


def of_shards(layout: am.Striped) -> st.SearchStrategy[tuple[Layout, int]]:
    assert isinstance(layout.block, tuple)
    count = len(layout.block)
    return st.tuples(st.just(layout), st.integers(1, 4).map(lambda times: times * count))


layouts_and_shards = st.tuples(layouts, st.integers(1, 17)) | unequal_layouts.flatmap(of_shards)


@given(layouts_and_shards, st.integers(0, 200))
def test_the_shards_are_a_permutation_each_in_order(case: tuple[Layout, int], length: int) -> None:
    layout, shards = case
    parts = [layout.positions(length, shards, index) for index in range(shards)]
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(length))
    for part in parts:
        assert part.dtype == torch.int64
        assert (part.diff() > 0).all()


@given(st.sampled_from((am.Zigzag(), am.Striped())), st.integers(1, 16), st.integers(0, 64))
def test_causal_work_is_balanced(layout: Layout, shards: int, extra: int) -> None:
    length = 64 * shards + extra
    work = [int((layout.positions(length, shards, index) + 1).sum()) for index in range(shards)]
    assert max(work) <= 1.05 * sum(work) / shards


@given(st.integers(1, 100), st.integers(1, 12))
def test_contiguous_is_torch_chunk(length: int, shards: int) -> None:
    chunks = torch.arange(length).chunk(shards)
    parts = [am.Contiguous().positions(length, shards, index).tolist() for index in range(shards)]
    assert parts == [chunk.tolist() for chunk in chunks] + [[]] * (shards - len(chunks))


@given(layouts, st.integers(0, 50))
def test_one_shard_is_the_order_of_the_tokens(layout: Layout, length: int) -> None:
    assert torch.equal(layout.positions(length, 1, 0), torch.arange(length))


@pytest.mark.parametrize("arguments", [(-1, 2, 0), (4, 0, 0), (4, 2, 2), (4, 2, -1)])
def test_shards_that_do_not_exist_raise(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(
        errors.LayoutError, match=r"expected length >= 0, .* given length .*\. Fix: pass the length of the whole"
    ):
        am.Zigzag().positions(*arguments)


shapes = st.builds(am.Shape, st.integers(1, 3), st.integers(1, 5), st.integers(1, 5))


@given(st.lists(st.integers(0, 60), min_size=1, max_size=30), shapes)
def test_packed_shards_are_a_permutation_of_equal_parts(documents: list[int], shape: am.Shape) -> None:
    layout, length = am.Packed(documents, shape), sum(documents)
    parts = [layout.positions(length, shape.ranks, index) for index in range(shape.ranks)]
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(length))
    assert all((part.diff() > 0).all() for part in parts)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert layout_from_code([*layout_to_code(layout), 7, 8]) == (layout, [7, 8])


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
        own_schedule = schedule(problem, r, c, ring=False)
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


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9))
def test_split_is_torch_split(sizes: list[int]) -> None:
    layout = am.Split(sizes)
    parts = [layout.positions(sum(sizes), len(sizes), index) for index in range(len(sizes))]
    assert [part.tolist() for part in parts] == [part.tolist() for part in torch.arange(sum(sizes)).split(sizes)]
    assert layout_from_code([*layout_to_code(layout), 7, 8]) == (layout, [7, 8])


@pytest.mark.parametrize("sizes", [(), (3, -1), (2.0, 1), (True, 2), 5, None])
def test_sizes_that_count_nothing_raise(sizes: Any) -> None:
    with pytest.raises(errors.LayoutError, match="Split sizes: expected whole numbers of 0 or more, one a rank, given"):
        am.Split(sizes)


@pytest.mark.parametrize(("length", "shards"), [(7, 3), (8, 2), (8, 4)])
def test_sizes_of_other_shards_raise(length: int, shards: int) -> None:
    with pytest.raises(
        errors.LayoutError, match=r"expected 3 shards of 8 tokens in all, given .* make Split for this length"
    ):
        am.Split((3, 3, 2)).positions(length, shards, 0)


def test_a_block_for_all_shards_is_one_number() -> None:
    assert am.Striped((3,)) == am.Striped(3)


@pytest.mark.parametrize("block", [0, -2, 1.5, True])
def test_blocks_of_no_tokens_raise(block: object) -> None:
    with pytest.raises(errors.LayoutError, match="Striped block: expected a whole number, 1 or more, given"):
        am.Striped(block)
