"""Calls that PyTorch traces, transforms, watches, records or casts are told from plain ones."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

import attnmesh as am
from attnmesh.errors import KernelError
from attnmesh.kernels.traced import (
    are_plain,
    cast_for_autocast,
    is_dense,
    is_traced,
    needs_grad,
    needs_operator,
    run_once_differentiable,
    without_autocast,
)

pytestmark = pytest.mark.quick

X = torch.ones(2, 3)


class Subclass(Tensor):
    """A tensor that PyTorch does not compute with by itself."""


def under(transform: Callable[[Callable[[Tensor], Tensor]], Any]) -> list[bool]:
    """Return what a function is told of its tensor where `transform` runs it."""
    told: list[bool] = []

    def watched(x: Tensor) -> Tensor:
        told.extend((is_traced(), needs_operator(x), are_plain(x)))
        return x.sum()

    transform(watched)
    return told


def forward_gradients(f: Callable[[Tensor], Tensor]) -> None:
    with forward_ad.dual_level():
        f(forward_ad.make_dual(X, X))


def test_a_plain_call_is_neither_traced_nor_recorded() -> None:
    assert under(lambda f: f(X)) == [False, False, True]
    assert not needs_grad(X, None)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: torch.vmap(f)(X),
        lambda f: torch.func.grad(f)(X),
        lambda f: torch.jit.trace(f, X, check_trace=False),
        forward_gradients,
    ],
    ids=["vmap", "grad", "jit", "forward gradients"],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_transformed_calls_are_traced(transform: Callable[[Callable[[Tensor], Tensor]], Any]) -> None:
    assert under(transform) == [True, True, False]


def test_a_compiled_call_is_traced() -> None:
    found = torch.compile(
        lambda x: x + (1 if is_traced() and needs_operator(x) and not are_plain(x) else 0), backend="eager"
    )
    assert torch.equal(found(X), X + 1)


def test_a_mode_that_looks_at_operators_watches_calls_that_are_not_traced() -> None:
    with FlopCounterMode(display=False):
        assert under(lambda f: f(X)) == [False, True, False]


@pytest.mark.parametrize(
    ("x", "dense", "operator", "plain"),
    [
        (torch.nn.Parameter(X, requires_grad=False), True, False, True),
        (X.as_subclass(Subclass), True, True, False),  # type: ignore[arg-type]
        (X.to_sparse(), False, False, False),
        (torch.ones(2, dtype=torch.complex64).conj().imag, False, False, False),
        (X.to("meta"), True, False, False),
    ],
    ids=["parameter", "subclass", "sparse", "negated", "meta"],
)
def test_tensors_of_other_kinds_are_not_plain(x: Tensor, dense: bool, operator: bool, plain: bool) -> None:
    assert (is_dense(x), needs_operator(X, None, x), are_plain(X, x)) == (dense, operator, plain)


@pytest.mark.parametrize(
    ("mode", "recorded"), [(nullcontext(), True), (torch.no_grad(), False)], ids=["plain", "no_grad"]
)
def test_calls_are_recorded_where_gradients_are_enabled(mode: AbstractContextManager[object], recorded: bool) -> None:
    x = X.clone().requires_grad_()
    with mode:
        assert needs_grad(None, X, x) == recorded
        assert are_plain(X, x) != recorded


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_autocast_casts_as_it_casts_for_pytorch_s_own_attention(dtype: torch.dtype) -> None:
    q, k, v = torch.randn(3, 1, 2, 4, 8, dtype=dtype).unbind()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = scaled_dot_product_attention(q, k, v).dtype
        assert [x.dtype for x in cast_for_autocast(q, k, v)] == [expected] * 3
        assert not are_plain(q)
        with without_autocast(q):
            assert cast_for_autocast(q, k, v) == (q, k, v)
            assert are_plain(q)
        assert not are_plain(q)


def test_a_backward_pass_that_is_run_once_gives_no_gradient_of_its_own() -> None:
    x = X.clone().requires_grad_()
    (twice,) = run_once_differentiable(lambda x: (2 * x,), x)
    assert torch.equal(twice, 2 * X)
    with pytest.raises(KernelError, match="given a gradient of a gradient"):
        twice.sum().backward()


Q, K, V, SINKS, BIAS, WEIGHTS = (
    torch.randn(shape, requires_grad=True)
    for shape in ((1, 2, 5, 4), (1, 2, 5, 4), (1, 2, 5, 4), (2,), (1, 2, 5, 3), (1, 2, 5, 4))
)
SELECTED = am.Selection(torch.arange(5, dtype=torch.int32).expand(1, 1, 5, 5))
DIFFERENTIABLE: dict[str, Callable[[], Tensor]] = {
    "attend": lambda: am.attend(Q, K, V).out,
    "lse": lambda: am.attend(Q, K, V).lse.unsqueeze(-1),
    "causal": lambda: am.attention(Q, K, V),
    "window": lambda: am.attention(Q, K, V, mask=am.Window(3)),
    "sinks": lambda: am.attention(Q, K, V, sinks=SINKS),
    "bias": lambda: am.attention(Q, K, V, distance_bias=BIAS),
    "softcap": lambda: am.attention(Q, K, V, softcap=2.0),
    "selected": lambda: am.attention(Q, K, V, selected=SELECTED),
    "key_lengths": lambda: am.attention(Q, K, V, key_lengths=torch.tensor([3])),
    "positions": lambda: am.attend(Q, K, V, mask=am.Causal(), q_positions=torch.tensor([4, 2, 0, 1, 3])).out,
}
MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "plain": nullcontext,
    "as an operator": lambda: FlopCounterMode(display=False),
}
"""Modes under which calls are recorded by autograd itself, and as an operator."""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", DIFFERENTIABLE)
@pytest.mark.parametrize("inner", [Q, K], ids=["dq", "dk"])
@pytest.mark.parametrize("outer", [Q, WEIGHTS], ids=["by q", "by the gradient of the output"])
def test_a_gradient_of_a_gradient_of_attention_raises(inner: Tensor, outer: Tensor, call: str, mode: str) -> None:
    with MODES[mode]():
        weighted = (DIFFERENTIABLE[call]() * WEIGHTS).sum()
        (gradient,) = torch.autograd.grad(weighted, inner, create_graph=True)
        with pytest.raises(KernelError, match=r"given a gradient of a gradient\. Fix: differentiate energy"):
            torch.autograd.grad(gradient.sum(), outer)


@pytest.mark.parametrize("call", ["sinks", "bias"])
@pytest.mark.parametrize("outer", [K, WEIGHTS], ids=["by k", "by the gradient of the output"])
def test_a_gradient_of_the_gradient_of_sinks_and_biases_raises(outer: Tensor, call: str) -> None:
    inner = SINKS if call == "sinks" else BIAS
    (gradient,) = torch.autograd.grad((DIFFERENTIABLE[call]() * WEIGHTS).sum(), inner, create_graph=True)
    with pytest.raises(KernelError, match="given a gradient of a gradient"):
        torch.autograd.grad(gradient.sum(), outer)


def test_forward_gradients_by_two_backward_passes_raise() -> None:
    with pytest.raises(KernelError, match="given a gradient of a gradient"):
        torch.autograd.functional.jvp(lambda q: am.attention(q, K, V), Q.detach(), WEIGHTS.detach())
