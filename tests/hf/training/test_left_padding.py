"""Rows that begin with padding move to the left, and outputs move back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnmesh.hf.training.left_padding import MovedRows

pytestmark = pytest.mark.quick

LENGTH = 5
SPANS = st.lists(st.tuples(st.integers(0, LENGTH - 1), st.integers(1, LENGTH)), min_size=1, max_size=4)


@given(SPANS)
def test_tokens_of_each_row_come_first_and_outputs_go_back(spans: list[tuple[int, int]]) -> None:
    """Rows whose tokens are from `start` on, some of them, then padding again."""
    places = torch.arange(LENGTH)
    spans = [(start, min(count, LENGTH - start)) for start, count in spans]
    mask = torch.stack([((places >= start) & (places < start + count)).long() for start, count in spans])
    ids = torch.arange(mask.numel()).view(mask.shape)
    rows = MovedRows.of({"attention_mask": mask, "input_ids": ids})
    if all(start == 0 for start, _ in spans):
        assert rows is None
        return
    assert rows is not None
    moved = rows.batch({"attention_mask": mask, "input_ids": ids, "other": "kept", "number": torch.tensor(3)})
    for row, (start, count) in enumerate(spans):
        assert moved["input_ids"][row, :count].tolist() == ids[row, start : start + count].tolist()
        assert moved["attention_mask"][row].tolist() == [1] * count + [0] * (LENGTH - count)
    assert (moved["other"], int(moved["number"])) == ("kept", 3)
    outputs = torch.randn(*mask.shape, 2)
    expected = outputs.gather(1, rows.places[..., None].expand(-1, -1, 2))
    assert torch.equal(rows.back(moved["input_ids"]), ids)
    assert torch.equal(rows.back(expected), outputs)


def test_batches_with_positions_or_without_a_mask_stay() -> None:
    mask = torch.tensor([[0, 1]])
    assert MovedRows.of({}) is None
    assert MovedRows.of({"attention_mask": mask, "position_ids": torch.tensor([[0, 1]])}) is None
    assert MovedRows.of({"attention_mask": mask[:, None, None]}) is None
    assert MovedRows.of({"attention_mask": mask}) is not None
