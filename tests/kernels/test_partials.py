"""Partials as users merge them, and the energy whose gradient attention is."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import attnmesh as am
from attnmesh import Partial, merge

pytestmark = pytest.mark.quick

# --- merge: commutative and associative, with an identity, and differentiable ---

LSES = st.one_of(st.just(-math.inf), st.floats(-1e4, 1e4, width=32), st.sampled_from((-1e4, 1e4, 0.0)))


@st.composite
def partials(draw: st.DrawFn, dtype: torch.dtype = torch.float64) -> Partial:
    """Partials of three queries; where nothing was seen the output is 0, as a kernel leaves it."""
    lse = torch.tensor([draw(LSES) for _ in range(3)], dtype=dtype).view(1, 1, 3)
    out = torch.tensor([draw(st.floats(-4, 4, width=32)) for _ in range(6)], dtype=dtype).view(1, 1, 3, 2)
    return Partial(out * (lse > -math.inf).unsqueeze(-1), lse)


def same(one: Partial, other: Partial) -> None:
    """Equal to a few roundings: of lse for lse, and of a weight e^(lse - lse) for out."""
    torch.testing.assert_close(one.lse, other.lse, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(one.out, other.out, rtol=0, atol=1e-11)


def identity(dtype: torch.dtype = torch.float64) -> Partial:
    return Partial(torch.zeros(1, 1, 3, 2, dtype=dtype), torch.full((1, 1, 3), -torch.inf, dtype=dtype))


@given(partials(), partials())
def test_merge_commutes_to_the_bit(a: Partial, b: Partial) -> None:
    one, other = merge(a, b), merge(b, a)
    assert torch.equal(one.out, other.out)
    assert torch.equal(one.lse, other.lse)


@given(partials(), partials(), partials())
def test_merge_is_associative(a: Partial, b: Partial, c: Partial) -> None:
    same(merge(merge(a, b), c), merge(a, merge(b, c)))
    same(merge(merge(a, b), c), merge(a, b, c))


@given(partials())
def test_no_keys_at_all_are_the_identity(a: Partial) -> None:
    assert torch.equal(merge(a, identity()).out, a.out)
    assert torch.equal(merge(identity(), a).lse, a.lse)
    assert torch.equal(merge(a).out, a.out)


def test_identities_merge_to_the_identity_and_their_gradients_are_zero() -> None:
    parts = [Partial(*(x.requires_grad_() for x in identity())) for _ in range(3)]
    merged = merge(*parts)
    assert torch.equal(merged.out, identity().out)
    assert torch.equal(merged.lse, identity().lse)
    for gradient in torch.autograd.grad(merged.out.sum() + merged.lse.exp().sum(), [x for p in parts for x in p]):
        assert torch.equal(gradient, torch.zeros_like(gradient))


@given(partials(), partials())
def test_merge_is_differentiable(a: Partial, b: Partial) -> None:
    tensors = [x.clone().requires_grad_() for x in (*a, *b)]

    def weighted(*x: Tensor) -> Tensor:
        merged = merge(Partial(*x[:2]), Partial(*x[2:]))
        return (merged.out.sin().sum(-1) + torch.where(merged.lse > -torch.inf, merged.lse, 0.0)).sum()

    gradients = torch.autograd.grad(weighted(*tensors), tensors)
    # d lse/d lse_i is the weight of i, d out/d out_i too, and d out/d lse_i is weight * (out_i - out).
    merged = merge(a, b)
    for part, (dout, dlse) in zip((a, b), (gradients[:2], gradients[2:]), strict=True):
        weight = torch.exp(part.lse - merged.lse.masked_fill(merged.lse == -torch.inf, 0.0))
        dout_merged = merged.out.cos()
        torch.testing.assert_close(dout, weight.unsqueeze(-1) * dout_merged)
        expected_dlse = weight * (1 + ((part.out - merged.out) * dout_merged).sum(-1))
        torch.testing.assert_close(dlse, expected_dlse, rtol=1e-6, atol=1e-8)  # of e^(lse - lse), of lse to 10,000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_merged_in_float32_and_keeps_its_dtype(dtype: torch.dtype) -> None:
    outs, lses = torch.randn(8, 1, 2, 5, 4).to(dtype), torch.randn(8, 1, 2, 5)
    merged = merge(*(Partial(o, e) for o, e in zip(outs, lses, strict=True)))
    exact = merge(*(Partial(o.double(), e.double()) for o, e in zip(outs, lses, strict=True)))
    assert merged.out.dtype == dtype
    assert merged.lse.dtype == torch.float32
    assert torch.equal(merged.out, exact.out.to(dtype))  # as if summed exactly and rounded once


def test_nan_and_infinity_spread_to_their_own_rows_only() -> None:
    lse = torch.tensor([[[math.nan, math.inf, 1.0]]])
    merged = merge(Partial(torch.ones(1, 1, 3, 2), lse), Partial(torch.ones(1, 1, 3, 2), torch.zeros(1, 1, 3)))
    assert merged.out[0, 0, :2].isnan().all()
    assert torch.equal(merged.out[0, 0, 2], torch.ones(2))


def test_a_sink_is_one_more_partial() -> None:
    q, k, v = torch.randn(3, 1, 2, 6, 4, dtype=torch.float64).unbind()
    sinks = torch.randn(2, dtype=torch.float64)
    merged = merge(am.attend(q, k, v, mask=am.Causal()), Partial(torch.zeros(1), sinks[:, None]))
    torch.testing.assert_close(merged.out, am.attention(q, k, v, sinks=sinks), rtol=1e-12, atol=1e-12)  # float64


def test_plain_tuples_are_partials_too() -> None:
    out, lse = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3)
    assert torch.equal(merge((out, lse), (out, lse)).out, merge(Partial(out, lse), Partial(out, lse)).out)


# --- energy ---


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (4, 1)])
@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_attention_is_the_energy_s_gradient_and_lse_its_value(
    heads: tuple[int, int], kernel: str, softcap: float | None
) -> None:
    q = torch.randn(2, heads[0], 33, 8, dtype=torch.float64)
    k, v = torch.randn(2, heads[1], 70, 8, dtype=torch.float64), torch.randn(2, heads[1], 70, 5, dtype=torch.float64)
    source = torch.zeros(2, heads[0], 33, 5, dtype=torch.float64, requires_grad=True)
    energy = am.energy(q, k, v, source, scale=0.7, softcap=softcap)
    out, lse = am.attend(q, k, v, scale=0.7, kernel=kernel, softcap=softcap)
    torch.testing.assert_close(lse, energy.detach(), rtol=1e-13, atol=1e-13)  # float64
    torch.testing.assert_close(out, torch.autograd.grad(energy.sum(), source)[0], rtol=1e-12, atol=1e-12)  # float64


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_lse_s_gradient_is_that_of_the_energy(softcap: float | None) -> None:
    q, k, v = (torch.randn(1, 2, 20, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    energy = am.energy(q, k, v, torch.zeros_like(v), softcap=softcap)
    ours = torch.autograd.grad(am.attend(q, k, v, softcap=softcap).lse.sum(), (q, k))
    torch.testing.assert_close(ours, torch.autograd.grad(energy.sum(), (q, k)), rtol=1e-12, atol=1e-12)  # float64


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_energies_and_merges_have_gradients_of_gradients(softcap: float | None) -> None:
    inputs = [torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(4)]
    assert torch.autograd.gradgradcheck(lambda *x: am.energy(*x, softcap=softcap), inputs)
    assert torch.autograd.gradgradcheck(lambda a, b, c, d: tuple(merge((a, b[..., 0]), (c, d[..., 0]))), inputs)


def test_energies_of_disjoint_keys_add_by_logsumexp() -> None:
    q, k, v, source = torch.randn(4, 1, 2, 12, 4, dtype=torch.float64).unbind()
    parts = [am.energy(q, k[:, :, keys], v[:, :, keys], source) for keys in (slice(0, 5), slice(5, 12))]
    torch.testing.assert_close(torch.logaddexp(*parts), am.energy(q, k, v, source))


def test_the_energy_of_half_precision_is_summed_in_float32() -> None:
    x = (torch.randn(1, 1, 64, 64) * 40).half()
    energy = am.energy(x, x, x, torch.zeros_like(x))
    assert energy.dtype == torch.float32
    torch.testing.assert_close(energy, am.attend(x, x, x).lse, rtol=1e-5, atol=1e-4)  # logits of 10,000, in float32
