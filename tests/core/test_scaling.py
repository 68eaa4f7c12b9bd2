"""Logits of attention: scaled products, the soft cap, and a bias that ends the queries."""

import math

import pytest
import torch

from attnmesh.core.scaling import Scaling, Scores, bias_columns, with_distance_bias
from tests.support.truth.tolerances import FLOAT64

pytestmark = pytest.mark.quick


def test_the_default_is_the_root_of_the_width_without_a_cap() -> None:
    assert Scores().scaling("call", 64) == Scaling(1 / 8, math.inf)
    assert not Scaling(0.5).capped
    products = torch.tensor([-torch.inf, -3.0, 0.0, torch.inf])
    assert Scaling(0.5).cap(products) is products


def test_a_cap_bounds_logits_and_leaves_small_ones() -> None:
    capped = Scaling(1.0, 5.0).cap(torch.tensor([-torch.inf, -1e-4, 0.0, 5.0, torch.inf], dtype=torch.float64))
    expected = [-5.0, -1e-4, 0.0, 5 * math.tanh(1.0), 5.0]
    assert capped.tolist() == pytest.approx(expected, abs=1e-13)  # of 1e-4 the cap takes a third of its cube over 25


@pytest.mark.parametrize("scale", [0.7, -0.7, 0.0])
@pytest.mark.parametrize("softcap", [math.inf, 3.0])
def test_a_sign_and_a_positive_scale_give_the_same_logits(scale: float, softcap: float) -> None:
    scaling, products = Scaling(scale, softcap), 4 * torch.randn(50, dtype=torch.float64)
    sign, positive = scaling.positive()
    assert positive.scale > 0
    given, expected = positive.cap(sign * products * positive.scale), scaling.cap(products * scale)
    torch.testing.assert_close(given, expected, rtol=FLOAT64, atol=0.0)


def test_a_bias_is_columns_of_the_queries_which_get_its_gradients() -> None:
    q, bias = torch.randn(2, 3, 4, 8, dtype=torch.bfloat16), torch.randn(2, 3, 4, 5, requires_grad=True)
    assert with_distance_bias(q, None) is q
    assert bias_columns(q, 8) == 0
    wide = Scores(distance_bias=bias).widened(q)
    assert bias_columns(wide, 8) == 5
    assert torch.equal(wide, torch.cat((q, bias.bfloat16()), -1))
    (gradient,) = torch.autograd.grad(wide.float().square().sum() / 2, bias)
    assert torch.equal(gradient, bias.bfloat16().float())


def test_scores_of_some_sequences_have_their_bias() -> None:
    bias = torch.randn(3, 1, 2, 4)
    scores = Scores(0.5, 2.0, bias).select_sequences(slice(1, 3))
    assert scores[:2] == (0.5, 2.0)
    assert scores.distance_bias is not None
    assert torch.equal(scores.distance_bias, bias[1:])
    assert Scores(0.5).select_sequences(slice(1)) == Scores(0.5)
