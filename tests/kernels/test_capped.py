"""Soft-capped logits in the tiles of the reference kernel, which random problems draw too."""

import math

import pytest
import torch
from torch import Tensor

import attnmesh as am
from attnmesh.core.scaling import Scaling
from attnmesh.errors import KernelError
from attnmesh.kernels.implementations.cuda import CUDA
from attnmesh.kernels.kernel import KernelRequest
from tests.support.process.resident import peak_memory
from tests.support.truth.dense import truth
from tests.support.truth.seeds import in_turn
from tests.support.truth.tolerances import FLOAT32

pytestmark = pytest.mark.quick


def heads(queries: int, keys: int, dtype: torch.dtype = torch.float32, size: float = 1.0) -> list[Tensor]:
    shapes = ((2, 6, queries, 16), (2, 2, keys, 16), (2, 2, keys, 24))
    return [(size * torch.randn(shape)).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(
    ("dtype", "size", "softcap"),
    [
        pytest.param(
            dtype,
            in_turn((0.1, 1.0, 4.0), number + turn),
            softcap,
            marks=pytest.mark.long if (number + turn) % 2 else [],
        )
        for number, dtype in enumerate((torch.float32, torch.bfloat16))
        for turn, softcap in enumerate((1e-3, 0.4, 3.0, 5.0, 50.0, 1e4, 1e30))
    ],
)
@pytest.mark.parametrize(
    ("queries", "keys", "left"), [(140, 300, 60), pytest.param(300, 700, 350, marks=pytest.mark.long)]
)
def test_caps_of_any_size_agree_with_float64(
    queries: int, keys: int, left: int, dtype: torch.dtype, size: float, softcap: float
) -> None:
    q, k, v = heads(queries, keys, dtype, size)
    out, lse = am.attend(q, k, v, mask=am.Window(left, 20), scale=0.3, softcap=softcap)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    gradients = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    visible = am.Window(left, 20).visible(torch.arange(queries), torch.arange(keys))
    expected = truth([q, k, v], visible, 0.3, dout, dlse, softcap)
    for name, given in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True):
        expected.check(name, given)


def test_a_cap_beyond_all_logits_changes_nothing() -> None:
    q, k, v = heads(200, 200)
    assert torch.allclose(am.attention(q, k, v, softcap=1e9), am.attention(q, k, v), atol=FLOAT32)


@pytest.mark.parametrize("softcap", [2.0, 50.0])
def test_a_sequence_has_the_same_bits_beside_others(softcap: float) -> None:
    """A tile holds several sequences, of which one has large logits and one small ones."""
    q, k, v = (x.detach() for x in heads(40, 300))
    q[0] *= 0.01
    q[1] *= 100.0
    both = am.attend(q, k, v, softcap=softcap)
    for row in range(2):
        one = am.attend(*(x[row : row + 1] for x in (q, k, v)), softcap=softcap)
        assert torch.equal(one.out[0], both.out[row])
        assert torch.equal(one.lse[0], both.lse[row])


@pytest.mark.parametrize("queries", [1, 7, 33])
@pytest.mark.parametrize("softcap", [2.0, 50.0])
def test_a_key_head_has_the_same_bits_beside_others(softcap: float, queries: int) -> None:
    """Sizes are odd: operators that compute the end of a tensor another way would end in different heads."""
    q, k, v = (x.detach() for x in heads(queries, 13))
    both = am.attend(q, k, v, softcap=softcap, kernel="cpu")
    for head in range(2):
        rows = slice(3 * head, 3 * head + 3)
        one = am.attend(q[:, rows], *(x[:, head : head + 1] for x in (k, v)), softcap=softcap, kernel="cpu")
        assert torch.equal(one.out, both.out[:, rows])
        assert torch.equal(one.lse, both.lse[:, rows])


def test_infinite_inputs_are_capped_and_invalid_ones_spread() -> None:
    q, k, v = (torch.full((1, 1, 3, 8), x) for x in (1.0, 1.0, 2.0))
    k[:, :, 1], k[:, :, 2] = math.inf, -math.inf
    out, lse = am.attend(q, k, v, softcap=5.0)
    scaling = torch.tensor([5.0 * math.tanh(math.sqrt(8.0) / 5.0), 5.0, -5.0])
    assert torch.allclose(lse, scaling.logsumexp(0).expand_as(lse))
    assert torch.allclose(out, torch.full_like(out, 2.0))
    k[:, :, 0] = math.nan
    assert am.attend(q, k, v, softcap=5.0).out.isnan().all()
    last = torch.tensor([1, 2, 0])
    unseen = am.attend(q, k, v, mask=am.Causal(), q_positions=last, k_positions=last + 2, softcap=5.0)
    assert torch.equal(unseen.lse[0, 0].isneginf(), torch.tensor([True, False, True]))


@pytest.mark.parametrize("kernel", ["cpu", pytest.param("reference", marks=pytest.mark.long)])
def test_memory_of_logits_is_that_of_one_tile(kernel: str) -> None:
    q, k, v = (torch.zeros(1, 2, 4000, 8) for _ in range(3))
    peak = peak_memory(lambda: am.attend(q, k, v, mask=am.Causal(), softcap=1.0, kernel=kernel))
    assert peak is None or peak < 16e6  # 128 rows of two heads by 4,000 keys are 4 MB, and 4,000 squared 128 MB


def test_operators_of_cuda_refuse_a_cap_by_name() -> None:
    x = torch.zeros(1, 1, 4, 8, device="meta")
    assert CUDA().refusal(KernelRequest.of(x, x, x, Scaling(1.0, 2.0))) == "it runs on CUDA, the tensors are on meta"
    with pytest.raises(KernelError, match="kernel cuda: expected tensors that it supports"):
        am.attend(*(torch.zeros(1, 1, 4, 8) for _ in range(3)), softcap=2.0, kernel="cuda")
