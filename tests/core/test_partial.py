"""Partials of any parts of the keys merge to softmax over all keys, as PyTorch computes it at once in float64."""

import math

import pytest
import torch
from torch import Tensor

from attnmesh.core.partial import Partial, identity, merge_into, merge_partials, merge_stack, sum_dtype, with_sinks
from tests.support.truth.tolerances import FLOAT64

pytestmark = pytest.mark.quick

ROWS = (2, 3, 4)
"""Sequences, heads and queries."""


def softmax(logits: Tensor, values: Tensor) -> Partial:
    """Return attention over keys by their logits, (*ROWS, keys), and values, (*ROWS, keys, dim)."""
    return Partial((logits.softmax(-1).unsqueeze(-2) @ values).squeeze(-2), logits.logsumexp(-1))


def problem(keys: int) -> tuple[Tensor, Tensor]:
    """Return logits up to about 20, and values."""
    generator = torch.Generator().manual_seed(keys)
    logits = 6 * torch.randn(*ROWS, keys, generator=generator, dtype=torch.float64)
    return logits, torch.randn(*ROWS, keys, 2, generator=generator, dtype=torch.float64)


def assert_same(found: Partial, expected: Partial) -> None:
    torch.testing.assert_close(found.out, expected.out, rtol=0, atol=FLOAT64)
    torch.testing.assert_close(found.lse, expected.lse, rtol=FLOAT64, atol=FLOAT64)


def test_keys_of_weights_1_and_3_are_merged_by_their_weights() -> None:
    one = Partial(torch.tensor([[[[1.0]]]]), torch.tensor([[[math.log(1)]]]))
    other = Partial(torch.tensor([[[[5.0]]]]), torch.tensor([[[math.log(3)]]]))
    out, lse = merge_partials([one, other])
    assert out.item() == pytest.approx((1 * 1 + 3 * 5) / 4)
    assert lse.item() == pytest.approx(math.log(1 + 3))


@pytest.mark.parametrize("sizes", [[7], [3, 2], [0, 5, 0], [4, 0, 2, 7], [1] * 9], ids=str)
def test_parts_of_the_keys_merge_to_all_keys(sizes: list[int]) -> None:
    logits, values = problem(sum(sizes))
    none = identity(values[..., 0, :], 2, torch.float64)
    parts = [
        softmax(*part) if part[0].shape[-1] else none
        for part in zip(logits.split(sizes, -1), values.split(sizes, -2), strict=True)
    ]
    expected = softmax(logits, values)
    assert_same(merge_partials(parts), expected)
    assert_same(merge_stack(Partial(*map(torch.stack, zip(*parts, strict=True)))), expected)
    total = Partial(*(x.clone() for x in none))
    for part in parts:
        merge_into(total, part)
    assert_same(total, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_two_stacked_partials_have_the_bits_of_two_in_a_list(dtype: torch.dtype) -> None:
    parts = [Partial(x.out.to(dtype), x.lse.to(sum_dtype(dtype))) for x in (softmax(*problem(n)) for n in (3, 4))]
    one, other = merge_partials(parts), merge_stack(Partial(*map(torch.stack, zip(*parts, strict=True))))
    assert torch.equal(one.out, other.out.to(dtype))
    assert torch.equal(one.lse, other.lse)


def test_partials_in_half_precision_are_summed_in_float32() -> None:
    exact = [softmax(*problem(keys)) for keys in (3, 4)]
    wide, half = (Partial(out.float(), lse.float()) for out, lse in exact)
    half = Partial(half.out.bfloat16(), half.lse)
    expected = merge_partials([wide, Partial(half.out.float(), half.lse)])
    for pair in ([wide, half], [half, wide]):
        assert torch.equal(merge_partials(pair).out, expected.out)
    total = Partial(wide.out.clone(), wide.lse.clone())
    merge_into(total, half)
    torch.testing.assert_close(total.out, expected.out)
    stacked = Partial(torch.stack([half.out, half.out]), torch.stack([half.lse, half.lse]))
    assert torch.equal(merge_stack(stacked).out, half.out.float())
    sinks = torch.zeros(ROWS[1])
    assert with_sinks(half, sinks).out.dtype == merge_partials([half, half]).out.dtype == torch.bfloat16


def test_a_sink_is_a_key_whose_value_is_0() -> None:
    logits, values = problem(5)
    sinks = torch.tensor([-3.0, 0.0, 30.0], dtype=torch.float64)
    column = sinks[:, None, None].expand(*ROWS, 1)
    expected = softmax(torch.cat((logits, column), -1), torch.cat((values, torch.zeros(*ROWS, 1, 2)), -2))
    assert_same(with_sinks(softmax(logits, values), sinks), expected)
    none = identity(values[..., 0, :], 2, torch.float64)
    assert_same(with_sinks(none, sinks), Partial(none.out, column.squeeze(-1)))
    assert with_sinks(none, None) is none


def test_no_keys_have_the_output_0_and_an_lse_that_is_summed_in_float32_or_wider() -> None:
    for dtype, wide in ((torch.float64, torch.float64), (torch.float32, torch.float32), (torch.float16, torch.float32)):
        out, lse = identity(torch.ones(1, 2, 3, 4, dtype=dtype), 5, torch.float32)
        assert (out.shape, out.dtype, out.any().item()) == ((1, 2, 3, 5), torch.float32, False)
        assert (lse.shape, lse.dtype, lse.max().item()) == ((1, 2, 3), wide, -math.inf)
        assert sum_dtype(dtype) == wide
