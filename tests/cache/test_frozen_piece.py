"""Frozen pieces: parts and reorders have the rows of plain indexing, and one sequence for all is stored once."""

import pytest
import torch
from torch import Tensor

from attnmesh.cache.frozen_piece import FrozenPiece, join_slots

pytestmark = pytest.mark.quick

BATCH, HEADS, TOKENS, WIDTH = 3, 2, 9, 4


def piece(shared: bool = False, padded: bool = True) -> FrozenPiece:
    """Return a piece of nine tokens, and one more slot."""
    keys, values = torch.randn(2, 1 if shared else BATCH, HEADS, TOKENS + 1, WIDTH)
    positions = torch.randint(-1, TOKENS, (1 if shared else BATCH, TOKENS + 1)) if padded else None
    stored = [x.expand(BATCH, -1, -1, -1) for x in (keys, values)]
    return FrozenPiece(stored, torch.arange(100, 100 + TOKENS + 1), positions)


def test_a_part_has_the_rows_between_and_one_more_slot() -> None:
    whole = piece()
    part = whole.part(2, 5)
    assert (whole.token_count, part.token_count) == (9, 3)
    assert part.token_index.tolist() == [102, 103, 104, 105]
    for x, own in zip(part.kv_tensors, whole.kv_tensors, strict=True):
        assert torch.equal(x, own[:, :, 2:6])
    assert part.positions is not None
    assert whole.positions is not None
    assert torch.equal(part.positions, whole.positions[:, 2:6])
    assert piece(padded=False).part(2, 5).positions is None


def test_bytes_are_those_of_the_tokens_that_are_stored() -> None:
    assert piece().nbytes == BATCH * 2 * HEADS * TOKENS * WIDTH * 4
    assert piece(shared=True).nbytes == 2 * HEADS * TOKENS * WIDTH * 4


@pytest.mark.parametrize("index", [[2, 0, 1], [1, 1], [0], [0, 1, 2, 2], [1, 2]])
def test_a_reorder_has_the_sequences_of_its_index(index: list[int]) -> None:
    whole, order = piece(), torch.tensor(index)
    made = whole.reordered(order, block=4)
    assert whole.positions is not None
    assert made.positions is not None
    for x, own in zip((*made.kv_tensors, made.positions), (*whole.kv_tensors, whole.positions), strict=True):
        assert torch.equal(x, own[order])
    for x in made.kv_tensors:  # ten rows are three blocks of four
        assert x.untyped_storage().nbytes() >= len(index) * HEADS * 12 * WIDTH * 4


def test_the_same_order_and_one_sequence_for_all_copy_nothing() -> None:
    whole, shared = piece(), piece(shared=True)
    assert whole.reordered(torch.arange(BATCH), block=4) is whole
    made = shared.reordered(torch.tensor([2, 2, 0, 1]), block=4)
    for x, own in zip(made.kv_tensors, shared.kv_tensors, strict=True):
        assert x.shape[0] == 4
        assert x.data_ptr() == own.data_ptr()
        assert torch.equal(x, own[[2, 2, 0, 1]])


def test_joined_rows_are_those_of_the_parts_with_room_behind() -> None:
    parts: list[Tensor] = [torch.randn(2, 3, length, 4) for length in (2, 0, 5)]
    joined = join_slots(parts, 2, 12)
    assert joined.shape == (2, 3, 12, 4)
    assert torch.equal(joined[:, :, :7], torch.cat(parts, 2))
