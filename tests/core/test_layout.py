"""Layouts: the shards of each are a permutation of the tokens, and their causal work is balanced."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attnmesh as am
from attnmesh import errors
from attnmesh.core.layout import Layout

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


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9))
def test_split_is_torch_split(sizes: list[int]) -> None:
    layout = am.Split(sizes)
    parts = [layout.positions(sum(sizes), len(sizes), index) for index in range(len(sizes))]
    assert [part.tolist() for part in parts] == [part.tolist() for part in torch.arange(sum(sizes)).split(sizes)]
    assert Layout.from_code([*layout.to_code(), 7, 8]) == (layout, [7, 8])


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
