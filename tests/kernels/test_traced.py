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


def test_a_gradient_of_a_gradient_of_attention_raises() -> None:
    q, k, v = (torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(3))
    (dq,) = torch.autograd.grad(am.attend(q, k, v).out.sum(), q, create_graph=True)
    with pytest.raises(KernelError, match=r"given a gradient of a gradient\. Fix: differentiate energy"):
        dq.sum().backward()
