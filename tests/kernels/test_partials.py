"""`energy`: attention is its gradient."""

import pytest
import torch

import attnmesh as am
from attnmesh import errors

pytestmark = pytest.mark.quick


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


def test_energies_of_disjoint_keys_add_by_logsumexp() -> None:
    q, k, v, source = torch.randn(4, 1, 2, 12, 4, dtype=torch.float64).unbind()
    parts = [am.energy(q, k[:, :, keys], v[:, :, keys], source) for keys in (slice(0, 5), slice(5, 12))]
    torch.testing.assert_close(torch.logaddexp(*parts), am.energy(q, k, v, source))


def test_a_source_of_another_shape_raises() -> None:
    q, k, v = torch.randn(3, 1, 2, 6, 4).unbind()
    with pytest.raises(
        errors.ShapeError, match=r"expected source of .* \(1, 2, 6, 4\), given \(1, 2, 5, 4\)\. Fix: use"
    ):
        am.energy(q, k, v, torch.zeros(1, 2, 5, 4))


def test_half_precision_is_summed_in_float32() -> None:
    x = (torch.randn(1, 1, 64, 64) * 40).half()
    energy = am.energy(x, x, x, torch.zeros_like(x))
    assert energy.dtype == torch.float32
    torch.testing.assert_close(energy, am.attend(x, x, x).lse, rtol=1e-5, atol=1e-4)  # logits of 10,000, in float32
