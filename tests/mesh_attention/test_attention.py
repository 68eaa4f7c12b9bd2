"""`attention` on one device: its defaults, options and sinks."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attnmesh as am
from attnmesh import errors
from attnmesh.core.layout import Layout

pytestmark = pytest.mark.quick


def heads(*, batch: int = 2, length: int = 50) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(batch, n, length, 8, requires_grad=True) for n in (4, 2, 2))
    return q, k, v


def test_the_default_is_causal_attention() -> None:
    q, k, v = heads()
    torch.testing.assert_close(am.attention(q, k, v), sdpa(q, k, v, is_causal=True, enable_gqa=True))


@pytest.mark.parametrize("grouped", [True, False])
def test_options_of_sdpa_that_say_what_is_done_are_accepted_and_contradictions_refused(*, grouped: bool) -> None:
    qkv = heads()
    for call, mask in ((am.attention, None), (am.attention, am.Causal()), (am.attend, am.Window(7)), (am.attend, None)):
        given: dict[str, Any] = {} if mask is None else {"mask": mask}
        causal = mask is not None or call is am.attention  # attend has no mask unless one is given
        out = call(*qkv, is_causal=causal, enable_gqa=grouped, **given)
        torch.testing.assert_close(out, call(*qkv, **given), rtol=0, atol=0)
        with pytest.raises(errors.KernelError, match=f"given is_causal={not causal}. Fix: let mask= say it"):
            call(*qkv, is_causal=not causal, **given)
    for mask in (am.Full(), am.Window(3, 3), am.Spans([(2, 9)])):
        with pytest.raises(errors.KernelError, match=r"given is_causal=True\. Fix: let mask= say it: am\.Causal\(\)"):
            am.attention(*qkv, mask=mask, is_causal=True)
        am.attention(*qkv, mask=mask, is_causal=False)


@pytest.mark.parametrize("layout", [am.Contiguous(), am.Zigzag(), am.Striped(), am.Striped(4)])
@pytest.mark.parametrize("exchange", ["auto", "bulk", "pipelined", "ring"])
def test_on_one_device_every_layout_and_exchange_is_the_same(layout: Layout, exchange: str) -> None:
    q, k, v = heads()
    given = am.attention(q, k, v, layout=layout, exchange=exchange, length=50, key_layout=layout, key_length=50)
    assert torch.equal(given, am.attention(q, k, v))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_sinks_may_be_wider_than_the_heads_and_get_their_gradient(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in heads())
    sinks = torch.randn(4, requires_grad=True)
    out = am.attention(q, k, v, sinks=sinks)
    assert out.dtype == dtype
    (gradient,) = torch.autograd.grad(out.float().square().sum(), sinks)
    assert gradient.dtype == torch.float32
    assert (gradient < 0).all()  # the more a sink takes, the smaller the output


def test_sinks_of_minus_infinity_are_no_sinks() -> None:
    q, k, v = heads()
    torch.testing.assert_close(am.attention(q, k, v, sinks=torch.full((4,), -torch.inf)), am.attention(q, k, v))


def test_queries_and_keys_may_have_other_lengths() -> None:
    q, (_, k, v) = heads(length=20)[0], heads(length=50)
    torch.testing.assert_close(am.attention(q, k, v, mask=am.Full()), sdpa(q, k, v, enable_gqa=True))
    early = am.attend(q, k, v, mask=am.Causal()).out
    torch.testing.assert_close(am.attention(q, k, v, mask=am.Causal(), key_length=50), early)


def test_gradients_accumulate_over_calls_in_flight() -> None:
    q, k, v = heads()
    total = am.attention(q, k, v).sum() + am.attention(q, k, v, mask=am.Window(3)).sum()
    total.backward()
    parts = [torch.autograd.grad(am.attention(q, k, v, mask=m).sum(), q)[0] for m in (am.Causal(), am.Window(3))]
    torch.testing.assert_close(q.grad, parts[0] + parts[1])


def test_a_sink_of_minus_infinity_beside_nothing_has_no_gradient() -> None:
    q, k, v = heads()
    sinks = torch.full((4,), -torch.inf, requires_grad=True)
    out = am.attention(q, k[:, :, :0], v[:, :, :0], mask=am.Full(), sinks=sinks)
    assert torch.equal(out, torch.zeros_like(out))
    (gradient,) = torch.autograd.grad(out.sum(), sinks)
    assert torch.equal(gradient, torch.zeros(4))
