"""The emulated GPU computes as one, and records each wait of the CPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import attnmesh as am
from tests.support.emulation.emulated_gpu import DeviceRuleError, EmulatedTensor, emulated_gpu
from tests.support.emulation.emulated_operators import efficient, efficient_backward, flash, flash_backward
from tests.support.truth.tolerances import FLOAT32_SUMS


def test_tensors_say_cuda_and_compute():
    with emulated_gpu():
        assert torch.cuda.is_available()
        x = torch.arange(6.0).view(2, 3).cuda()
        made = (
            torch.tensor([1, 2], device="cuda"),
            torch.zeros(2, device="cuda"),
            x.new_ones(3),
            x[1].sum(),
            x.to("cuda"),
        )
        assert all(isinstance(y, EmulatedTensor) and y.device == torch.device("cuda", 0) for y in made)
        assert (x * 2 + 1).cpu().tolist() == [[1, 3, 5], [7, 9, 11]]
        assert not isinstance(x.cpu(), EmulatedTensor)
        assert x.add_(1) is x
        x[0] = 7
        assert x.cpu().tolist() == [[7, 7, 7], [4, 5, 6]]
    assert not torch.cuda.is_available()


MIXED: dict[str, Callable[[Tensor], object]] = {
    "sum": lambda x: x + torch.ones(3),
    "indices": lambda x: x.index_select(0, torch.tensor([0, 1])),
    "cat": lambda x: torch.cat([x, torch.ones(3)]),
    "scatter": lambda x: x.index_add_(0, torch.tensor([0]), x[:1]),
    "where": lambda x: torch.where(torch.ones(3, dtype=torch.bool), x, 0.0),
}


@pytest.mark.parametrize("name", MIXED)
def test_two_devices_in_one_operator_raise(name: str):
    with emulated_gpu(), pytest.raises(DeviceRuleError, match="on the GPU and on the CPU"):
        MIXED[name](torch.ones(3).cuda())


def test_numbers_and_indices_of_the_host_are_welcome_where_cuda_takes_them():
    with emulated_gpu():
        x = torch.ones(3).cuda()
        assert (x * torch.tensor(2.0)).cpu().tolist() == [2, 2, 2]
        assert x[torch.tensor([0, 1])].cpu().tolist() == [1, 1]


WAITS: dict[str, tuple[list[str], Callable[[Tensor], object]]] = {
    "item": (["read"], lambda x: x[0].item()),
    "bool": (["read"], lambda x: bool(x[0])),
    "tolist": (["read"], lambda x: x.tolist()),
    "to the CPU": (["read"], lambda x: x.cpu()),
    "a copy on the CPU": (["read"], lambda x: torch.empty(3).copy_(x)),
    "nonzero": (["read"], lambda x: x.nonzero()),
    "mask": (["read"], lambda x: x[x > 0]),
    "equal": (["read"], lambda x: torch.equal(x, x)),
    "synchronize": (["read"], lambda x: torch.cuda.synchronize()),
    "to the device": (["copy"], lambda x: torch.ones(3).cuda()),
    "a list": (["copy"], lambda x: torch.tensor([1, 2], device="cuda")),
    "a copy on the device": (["copy"], lambda x: x.copy_(torch.ones(3))),
    "indices": (["copy"], lambda x: x[torch.tensor([0, 2])]),
    "two": (["read", "copy"], lambda x: (x.sum().item(), torch.ones(3).cuda())),
    "nothing": ([], lambda x: (x * 2 + 1, x[1:], x.sum(), torch.zeros(3, device="cuda"), x.copy_(x + 1), x.clone())),
}


@pytest.mark.parametrize("name", WAITS)
def test_waits_of_the_host_are_recorded(name: str):
    expected, call = WAITS[name]
    with emulated_gpu() as gpu:
        x = torch.ones(3).cuda()
        with gpu.recording() as waits:
            call(x)
        call(x)  # outside the block nothing is recorded
    assert [wait.kind for wait in waits] == expected


def test_a_wait_names_its_place_in_the_package():
    with emulated_gpu() as gpu:
        x = torch.randn(1, 2, 5, 8).cuda()
        with gpu.recording() as waits:
            am.attend(x, x, x, mask=am.Causal(), q_positions=torch.arange(5).cuda(), k_positions=torch.arange(5).cuda())
        places = {wait.place for wait in waits if wait.kind == "read"}
    assert any(place.startswith("kernels/local_op.py:") for place in places)
    assert "outside the package" not in places


KERNELS = [(kernel, dtype) for kernel in ("auto", "triton", "reference") for dtype in (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize(("kernel", "dtype"), [*KERNELS, ("auto", torch.float64)])
def test_attend_agrees_with_float64_on_the_emulated_gpu(kernel: str, dtype: torch.dtype):
    q, k, v = (torch.randn(1, heads, 40, 16).to(dtype) for heads in (4, 2, 2))
    expected = am.attend(q.double(), k.double(), v.double(), mask=am.Causal(), kernel="reference").out
    with emulated_gpu() as gpu, gpu.recording():
        out = am.attend(q.cuda(), k.cuda(), v.cuda(), mask=am.Causal(), kernel=kernel).out
        assert out.device.type == "cuda"
        assert (kernel == "triton") <= ("attend" in gpu.launches)
        out = out.cpu()
    # Bfloat16 rounds outputs to 4 by 2e-2.
    torch.testing.assert_close(out.double(), expected, atol=2e-2 if dtype == torch.bfloat16 else FLOAT32_SUMS, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("operator", ["flash", "efficient"])
def test_operators_compute_their_formulas(operator: str, causal: bool):
    q, k, v = (torch.randn(2, 4, 9, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    dout = torch.randn(2, 4, 9, 8, dtype=torch.float64)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    gradients = torch.autograd.grad(expected, (q, k, v), dout)
    if operator == "flash":
        out, lse = flash(q, k, v, 0.0, causal)[:2]
        given = flash_backward(dout, q, k, v, out, lse, None, None, 9, 9, 0.0, causal, None, None)
    else:
        out, lse = efficient(q, k, v, None, True, 0.0, causal)[:2]
        assert lse.shape[-1] == 32
        given = efficient_backward(dout, q, k, v, None, out, lse, None, None, 0.0, [True] * 3, causal)
    for one, other in zip((out, *given), (expected, *gradients), strict=False):
        torch.testing.assert_close(one, other, atol=FLOAT32_SUMS, rtol=0)
