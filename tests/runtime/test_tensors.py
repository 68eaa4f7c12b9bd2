"""Tensors in the order in which an output projection reads them: the same numbers, and never a caller's memory."""

import pytest
import torch

from attnmesh.runtime.tensors import empty_length_major, length_major

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", ["heads first", "length first", "every second head"])
def test_numbers_stay_and_the_heads_of_a_token_are_side_by_side(order: str, dtype: torch.dtype) -> None:
    x = {
        "heads first": torch.randn(2, 3, 5, 4),
        "length first": torch.randn(2, 5, 3, 4).transpose(1, 2),
        "every second head": torch.randn(2, 6, 5, 4)[:, ::2],
    }[order]
    expected = x.to(dtype)
    found = length_major(x, dtype)
    assert torch.equal(found, expected)
    assert found.transpose(1, 2).is_contiguous()
    found.zero_()
    assert bool(x.any()), "a caller's memory is not written to"


def test_a_tensor_that_owns_its_memory_in_that_order_is_itself() -> None:
    own = empty_length_major(torch.zeros(2, 3, 5, 4), 7)
    assert own.shape == (2, 3, 5, 7)
    assert length_major(own, own.dtype) is own
