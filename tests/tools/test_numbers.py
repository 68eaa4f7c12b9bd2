"""At the edges of what numbers can hold errors stay at the rounding of the dtype."""

import pytest
import torch

from tools import numbers

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("case", list(numbers.cases()), ids=lambda case: f"{case.name} {case.dtype}")
def test_edges_are_within_their_bounds(case: numbers.Case, kernel: str) -> None:
    for share in case.shares(kernel).values():
        assert share <= 1


def test_partials_that_are_far_apart_merge_within_roundings() -> None:
    assert numbers.far_apart() < 8 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.long), torch.bfloat16])
def test_ten_million_keys_round_as_few_do(dtype: torch.dtype) -> None:
    out, lse = numbers.many_keys(dtype)
    assert out < 8 * torch.finfo(dtype).eps
    assert lse < 8 * torch.finfo(torch.float32).eps
