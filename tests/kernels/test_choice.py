"""The choice of a kernel: by what a call needs, and of one that nothing else in the package knows."""

import pytest
import torch
from torch import Tensor

import attnmesh as am
from attnmesh.cli import proofs
from attnmesh.core.partial import Partial
from attnmesh.core.scaling import Scaling
from attnmesh.errors import KernelError
from attnmesh.kernels import choice
from attnmesh.kernels.choice import KERNELS, best_kernel, choose
from attnmesh.kernels.implementations.reference import Reference
from attnmesh.kernels.kernel import Kernel, KernelRequest
from attnmesh.kernels.rectangles import BackwardInputs, Gradients, Rectangle
from tests.support.truth.dense import dense

pytestmark = pytest.mark.quick

REQUEST = KernelRequest.of(*torch.zeros(3, 1, 2, 100, 8), Scaling(1.0))


class Dense(Kernel):
    """All of what a kernel is asked, in the fewest lines; it counts its calls."""

    name, made_for, priority, caps_logits = "dense", "short calls", 0, False

    def __init__(self) -> None:
        self.calls = 0

    def unsupported_reason(self, request: KernelRequest) -> str | None:
        return "it is made for float32" if request.dtype != torch.float32 else None

    def is_made_for(self, request: KernelRequest) -> bool:
        return request.rows <= 64

    def attend(self, q: Tensor, k: Tensor, v: Tensor, block: Rectangle, scaling: Scaling) -> Partial:
        self.calls += 1
        out, lse, _ = dense(q, k, v, block.visible(), scaling.scale)
        return Partial(out, lse)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, saved: BackwardInputs, block: Rectangle, scaling: Scaling
    ) -> Gradients:
        self.calls += 1
        return Reference().backward(q, k, v, saved, block, scaling)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Dense:
    """A kernel whose name is in `KERNELS`, and nowhere else."""
    kernel = Dense()
    monkeypatch.setattr(choice, "KERNELS", choice.in_order((*KERNELS, kernel)))
    return kernel


def test_a_kernel_is_added_in_one_place(made_up: Dense) -> None:
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, 30, 8).unbind())
    given = [am.attention(q, k, v), am.attend(q, k, v, mask=am.Causal()).out]
    assert made_up.calls == 2
    given.append(am.attention(q, k, v, kernel="reference"))
    gradients = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in given]
    for number in range(2):
        torch.testing.assert_close(given[number], given[2])
        torch.testing.assert_close(gradients[number], gradients[2])
    assert made_up.calls == 4


def test_a_new_kernel_decodes_from_a_cache(made_up: Dense) -> None:
    for storage in (None, "int8"):
        cache = am.KVCache(None, batch=1, kv_heads=2, head_dim=8, capacity=40, dtype=torch.float32, storage=storage)
        cache.append(*torch.randn(2, 1, 2, 30, 8).unbind())
        q = torch.randn(1, 4, 1, 8)
        given, expected = am.decode(q, cache), am.decode(q, cache, kernel="reference")
        torch.testing.assert_close(given, expected)
    assert made_up.calls == 2


def test_it_is_named_proved_and_refused_as_others_are(made_up: Dense) -> None:
    x = torch.zeros(1, 1, 4, 8)
    assert choose(REQUEST, "dense") is made_up
    assert next(proofs.proofs()).kernel == "dense"
    with pytest.raises(KernelError, match=r"kernel dense: .*others: it has no soft cap"):
        am.attend(x, x, x, softcap=2.0, kernel="dense")
    with pytest.raises(KernelError, match=r"kernel dense: .*others: it is made for float32"):
        am.attend(x.double(), x.double(), x.double(), kernel="dense")
    with pytest.raises(KernelError, match="one of auto, dense, native"):
        am.attend(x, x, x, kernel="fast")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rows": 64}, "dense"),
        ({"rows": 65}, "cpu"),  # though the made-up kernel, which comes first, serves it
        ({"rows": 65, "device": torch.device("meta")}, "dense"),  # for nothing is made for it
        ({"rows": 65, "device": torch.device("meta"), "capped": True}, "reference"),
        ({"biased": True}, "reference"),
    ],
)
def test_the_first_that_is_made_for_a_call_is_taken(changes: dict[str, object], expected: str, made_up: Dense) -> None:
    assert choose(REQUEST._replace(**changes)).name == expected  # type: ignore[arg-type]


class Unranked(Kernel):
    """A kernel of the first name that supports all tensors, and says nothing of its place among others."""

    name, adds_bias = "a", True

    def unsupported_reason(self, request: KernelRequest) -> str | None:
        return None


@pytest.mark.parametrize("changes", [{}, {"rows": 65}, {"biased": True}, {"cached": True}, {"capped": True}])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_kernel_that_says_nothing_of_its_place_is_taken_by_name_alone(
    changes: dict[str, object], device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = REQUEST._replace(device=torch.device(device), dtype=dtype, **changes)  # type: ignore[arg-type]
    expected = best_kernel(request)
    monkeypatch.setattr(choice, "KERNELS", choice.in_order((*KERNELS, Unranked())))
    assert best_kernel(request) is expected
    assert choose(request, "a").name == "a"


def test_a_call_that_no_kernel_serves_is_refused() -> None:
    assert best_kernel(REQUEST._replace(scattered=True, dtype=torch.float64)) is None
    message = "native: it computes in float32, the tensors are float64; .*Fix: change what one of these names"
    with pytest.raises(KernelError, match=message):
        choose(REQUEST._replace(scattered=True, dtype=torch.float64))
