"""Rows in 8 bits: how far a number moves, that rows depend on nothing else, and what is not finite stays visible."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnmesh.core.storage import LEAST_SCALE, SCALE_COLUMNS, STORAGES, Storage, _rounded_up, columns_of, storage_of
from attnmesh.errors import ShapeError

pytestmark = pytest.mark.quick

WIDTHS = (2, 64, 126, 128, 130, 192, 256, 576)

each_storage = pytest.mark.parametrize("storage", STORAGES.values(), ids=STORAGES)


def moved(storage: Storage, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return how far numbers move, and by how much they may, from the largest of their group."""
    error = (storage.dequantize(storage.quantize(x), torch.float64) - x.double()).abs()
    largest = torch.cat([part.abs().amax(-1, True).expand_as(part) for part in x.double().split(SCALE_COLUMNS, -1)], -1)
    scale = (largest / storage.largest * (1 + 2**-7)).clamp(min=LEAST_SCALE)
    if storage.name == "int8":
        return error, scale * 0.5001
    return error, torch.maximum(x.double().abs() * 2**-4, scale * 2**-10) * 1.0001


@each_storage
@pytest.mark.parametrize("width", WIDTHS)
def test_numbers_move_by_half_a_step_at_most(storage: Storage, width: int) -> None:
    x = torch.randn(50, width) * torch.logspace(-30, 30, 50)[:, None]
    error, most = moved(storage, x)
    assert bool((error <= most).all())
    rows = storage.quantize(x)
    assert rows.shape == (50, storage.row_width(width))
    assert columns_of(rows) == width
    assert storage_of(rows) is storage


@each_storage
@given(largest=st.floats(0, 2.0**127, width=32), seed=st.integers(0, 1000))
def test_numbers_of_any_size_move_within_their_bound(storage: Storage, largest: float, seed: int) -> None:
    x = (torch.rand(4, 8, generator=torch.Generator().manual_seed(seed)) * 2 - 1) * largest
    x[0, 0] = largest
    error, most = moved(storage, x)
    assert bool((error <= most).all())


@each_storage
def test_values_are_exact_in_float32(storage: Storage) -> None:
    rows = storage.quantize(torch.randn(100, 192) * torch.logspace(-38, 30, 100)[:, None])
    assert torch.equal(storage.dequantize(rows).double(), storage.dequantize(rows, torch.float64))


@each_storage
def test_rows_depend_on_nothing_else(storage: Storage) -> None:
    x = torch.randn(3, 2, 37, 192, dtype=torch.bfloat16)
    whole = storage.quantize(x)
    pieces = torch.cat([storage.quantize(part) for part in x.split((1, 5, 31), 2)], 2)
    assert torch.equal(whole.view(torch.int8), pieces.view(torch.int8))
    assert torch.equal(whole.view(torch.int8), storage.quantize(x.transpose(1, 2)).transpose(1, 2).view(torch.int8))


@each_storage
def test_stored_again_rows_keep_their_values(storage: Storage) -> None:
    once = storage.dequantize(storage.quantize(torch.randn(50, 128)))
    again = storage.dequantize(storage.quantize(once))
    error, most = (again - once).abs(), once.abs().amax(-1, True) / storage.largest
    assert bool((error <= most).all())


def test_scales_are_rounded_up_to_the_next_number_of_bfloat16() -> None:
    numbers = torch.randn(1000).abs()
    rounded = _rounded_up(numbers)
    assert torch.equal(rounded, rounded.bfloat16().float())
    assert bool((rounded >= numbers).all())
    assert bool((rounded - numbers < numbers * 2**-7).all())
    assert torch.equal(_rounded_up(rounded), rounded)


def test_scales_of_any_nan_are_nan() -> None:
    """GPUs compute NaN with all bits set."""
    faults = torch.tensor([0x7FFFFFFF, 0x7FC00000, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert bool(_rounded_up(faults).isnan().all())


@each_storage
@pytest.mark.parametrize("fault", [torch.inf, -torch.inf, torch.nan])
def test_a_group_that_is_not_finite_is_nan(storage: Storage, fault: float) -> None:
    x = torch.randn(3, 192)
    x[1, 5] = fault
    values = storage.dequantize(storage.quantize(x))
    assert bool(values[1, :SCALE_COLUMNS].isnan().all())
    assert bool(values[1, SCALE_COLUMNS:].isfinite().all())
    assert bool(values[[0, 2]].isfinite().all())


@each_storage
def test_zeros_are_stored_as_zeros(storage: Storage) -> None:
    assert torch.equal(storage.dequantize(storage.quantize(torch.zeros(2, 130))), torch.zeros(2, 130))


@each_storage
def test_other_widths_are_refused(storage: Storage) -> None:
    with pytest.raises(ShapeError, match="even number of columns"):
        storage.quantize(torch.zeros(2, 7))
    rows = storage.quantize(torch.zeros(2, 128))
    for width in (0, 1, 2, 3, 129, 132):
        with pytest.raises(ShapeError, match="pass whole rows"):
            columns_of(rows.new_empty(2, width))
