"""Selections: the keys of indices, and rows of indices that are faulty."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attnmesh as am
from attnmesh.core import selection
from attnmesh.core.selection import NO_INDEX, Selection, Visible

pytestmark = pytest.mark.quick

INDICES = st.integers(-1, 6) | st.just(NO_INDEX)
ROWS = st.integers(1, 4).flatmap(
    lambda size: st.lists(st.lists(INDICES, min_size=size, max_size=size), min_size=1, max_size=6)
)


def of_rows(rows: list[list[int]], block: int = 1) -> Selection:
    return Selection(torch.tensor(rows, dtype=torch.int32)[None, None], block)


def test_an_index_is_a_key_or_a_block_of_keys() -> None:
    rows = torch.tensor([[4, 0, NO_INDEX]], dtype=torch.int32)
    assert of_rows([[4, 0, NO_INDEX]]).positions(rows, slice(0, 3)).tolist() == [[4, 0, -1]]
    of_blocks = of_rows([[4, 0, NO_INDEX]], block=2)
    assert of_blocks.positions(rows, slice(0, 6)).tolist() == [[8, 9, 0, 1, -1, -1]]
    assert of_blocks.positions(rows, slice(1, 4)).tolist() == [[9, 0, 1]]


@given(ROWS, st.integers(1, 3), st.none() | st.integers(0, 20), st.sampled_from((1, 3, 1 << 22)))
def test_faulty_rows_are_those_with_an_index_twice_or_out_of_range(
    rows: list[list[int]], block: int, length: int | None, at_once: int
) -> None:
    def is_faulty(row: list[int]) -> bool:
        chosen = [index for index in row if index != NO_INDEX]
        keys = 10**9 if length is None else length
        return len({*chosen}) < len(chosen) or any(index < 0 or index * block >= keys for index in chosen)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "INDICES_AT_ONCE", at_once)
        assert of_rows(rows, block).faulty(length).tolist() == [[[is_faulty(row) for row in rows]]]
        chosen = [index for row in rows for index in row if index != NO_INDEX]
        assert of_rows(rows).highest() == max(chosen, default=-1)


def test_no_rows_and_no_indices_are_no_fault() -> None:
    for shape in ((1, 2, 0, 3), (1, 2, 3, 0)):
        empty = Selection(torch.zeros(shape, dtype=torch.int32))
        assert empty.highest() == -1
        assert empty.faulty(5).shape == shape[:3]
        assert not empty.faulty(5).any()


def test_an_index_has_65536_keys_at_most() -> None:
    assert of_rows([[0]], block=65536).block == 65536
    with pytest.raises(am.errors.ShapeError, match="at most 65536 keys an index"):
        of_rows([[0]], block=65537)


def test_parts_have_the_indices_of_their_heads_and_queries() -> None:
    indices = torch.arange(24, dtype=torch.int32).view(1, 2, 4, 3)
    whole = Selection(indices, block=2)
    assert torch.equal(whole.of_heads(slice(1, 2)).indices, indices[:, 1:])
    assert torch.equal(whole.of_queries(torch.tensor([3, 0])).indices, indices[:, :, [3, 0]])
    assert whole.of_heads(slice(1)).block == whole.of_queries(torch.tensor([0])).block == 2
    shared = Selection(indices[:, :1])
    assert shared.of_heads(slice(3, 5)) is shared


def test_what_is_seen_is_made_again_from_its_tensors() -> None:
    places, lengths = torch.arange(4), torch.tensor([3])
    seen = Visible(am.Window(2), places, places + 1, lengths, of_rows([[0]], block=3))
    again = Visible.of(seen.tensors, seen.mask_and_block)
    assert again.mask == seen.mask
    assert all(x is y for x, y in zip(again.tensors, seen.tensors, strict=True))
    assert again.selected is not None
    assert again.selected.block == 3
    assert Visible.of(Visible(am.Full()).tensors, Visible(am.Full()).mask_and_block) == Visible(am.Full())
