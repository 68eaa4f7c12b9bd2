"""Calls of a known signature: the bits of the first one, every difference is seen, nothing is left unchecked."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import attnmesh as am
from attnmesh.errors import DtypeError, InputError, KernelError, ShapeError
from attnmesh.kernels import local as attend_module
from attnmesh.kernels.native.build import library
from attnmesh.kernels.prepared_local import PreparedLocal
from attnmesh.mesh_attention import attention as attention_module
from attnmesh.runtime.memo import Memo

pytestmark = pytest.mark.skipif(library().attend is None, reason="there is no C++ compiler")


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin without known signatures."""
    table = Memo[PreparedLocal]()
    for module in (attend_module, attention_module):
        monkeypatch.setattr(module, "PREPARED_LOCAL", table)


def problem(dtype: torch.dtype = torch.float32, keys: int = 40, rows: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(2, h, n, 20, dtype=dtype) for h, n in ((6, rows), (2, keys), (2, keys)))
    return q, k, v


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return am.attend(q, k, v, **options).out


def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return am.attention(q, k, v, mesh=None, **{"mask": am.Full(), **options})


def known_calls() -> int:
    return len(attend_module.PREPARED_LOCAL)


@pytest.mark.parametrize("call", [attend, attention])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"softcap": 2.0}, {"kernel": "native"}])
def test_later_calls_have_the_bits_of_the_first(
    call: Callable[..., Tensor], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    for rows, keys in ((1, 40), (3, 40), (1, 700), (3, 1)):
        q, k, v = problem(dtype, keys, rows)
        first = call(q, k, v, **options)
        assert known_calls()
        again = call(q, k, v, **options)
        assert torch.equal(first, again)
        assert first.stride() == again.stride()
        assert again.dtype == dtype
        # As views with other strides.
        views = (torch.cat((x, x), -1)[..., :20] for x in (q, k, v))
        assert torch.equal(call(*views, **options), first)
        # Bfloat16 has 8 bits: it rounds an output of 4 by up to 0.016.
        torch.testing.assert_close(again, call(q, k, v, **{**options, "kernel": "reference"}), atol=2e-2, rtol=2e-2)


def test_the_number_of_keys_is_in_no_signature_under_a_full_mask() -> None:
    for keys in range(1, 60):
        q, k, v = problem(keys=keys)
        torch.testing.assert_close(attend(q, k, v), attend(q, k, v, kernel="reference"))
    assert len(attend_module.PREPARED_LOCAL) == 2  # with and without kernel=


@pytest.mark.parametrize("mask", [am.Causal(), am.Window(2), am.Window(2, 3), am.Causal() & am.Documents([3, 5])])
def test_a_mask_is_part_of_the_signature(mask: am.Mask) -> None:
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    for _ in range(2):
        for each in (mask, am.Full(), am.Causal()):
            expected = attend(q, k, v, mask=each, kernel="reference")
            torch.testing.assert_close(attend(q, k, v, mask=each), expected)
            torch.testing.assert_close(attention(q, k, v, mask=each), expected)


@pytest.mark.parametrize("call", [attend, attention])
@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: (q, k[:1], v[:1]),
        lambda q, k, v: (q, k, v[:, :, :-1]),
        lambda q, k, v: (q, k.double(), v),
        lambda q, k, v: (q, k[..., :8], v),
        lambda q, k, v: (q[0], k, v),
        lambda q, k, v: (q, k.tolist(), v),
        lambda q, k, v: (q, k, v.to("meta")),
        lambda q, k, v: (q[:, :5], k, v),
    ],
)
def test_bad_tensors_are_refused_once_calls_are_known(call: Callable[..., Tensor], change: Callable[..., Any]) -> None:
    tensors = problem()
    bad = change(*tensors)
    with pytest.raises(InputError) as before:
        call(*bad)
    call(*tensors)
    assert known_calls()
    with pytest.raises(InputError) as after:
        call(*bad)
    assert str(after.value) == str(before.value)


@pytest.mark.parametrize("call", [attend, attention])
@pytest.mark.parametrize("options", [{"scale": True}, {"scale": [1.0]}, {"softcap": True}, {"kernel": "nonsense"}])
def test_bad_options_are_refused_once_calls_are_known(call: Callable[..., Tensor], options: dict[str, Any]) -> None:
    tensors = problem()
    call(*tensors, scale=1.0)
    call(*tensors, softcap=1.0)
    with pytest.raises(InputError):
        call(*tensors, **options)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_not_finite_take_the_usual_way(bad: float) -> None:
    q, k, v = problem()
    attend(q, k, v)
    for x in (q, k, v):
        changed = x.clone()
        changed[0, 0, 0, 0] = bad
        tensors = [changed if x is y else y for y in (q, k, v)]
        expected = am.attend(*tensors, kernel="reference")
        torch.testing.assert_close(am.attend(*tensors), expected, equal_nan=True)


def test_gradients_transforms_autocast_and_graphs_take_the_usual_way() -> None:
    q, k, v = problem()
    first = attend(q, k, v)
    leaf = q.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(attend(leaf, k, v).sum(), leaf)
    (expected,) = torch.autograd.grad(attend(leaf, k, v, kernel="reference").sum(), leaf)
    torch.testing.assert_close(gradient, expected)
    with torch.no_grad():
        assert torch.equal(attend(leaf, k, v), first)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attend(q, k, v).dtype == torch.bfloat16
    graph = torch.compile(attend, fullgraph=True, backend="eager")
    assert torch.equal(graph(q, k, v), first)


def test_a_result_is_new_memory() -> None:
    tensors = problem()
    attend(*tensors)
    one, other = attend(*tensors), attend(*tensors)
    before = other.clone()
    one.fill_(7.0)
    assert torch.equal(other, before)
    assert not one._is_view()


def test_defaults_of_pytorch_do_not_matter() -> None:
    q, k, v = problem()
    first = attend(q, k, v)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert torch.equal(attend(q, k, v), first)
        with torch.device("meta"):
            assert torch.equal(attend(q, k, v), first)
    finally:
        torch.set_default_dtype(before)


def test_calls_without_keys_with_fewer_values_or_with_a_length_are_not_taken_for_a_known_one() -> None:
    """A signature does not hold the number of keys. Calls whose checks depend on that number have another signature."""
    q, k, v = problem()
    attend(q, k[:, :, :0], v[:, :, :0])
    with pytest.raises(ShapeError, match="k and v with the same heads and length"):
        attend(q, k, v[:, :, :4])
    attention(q, k[:, :, :5], v[:, :, :5], key_length=5)
    with pytest.raises(ShapeError, match="key_length to count the tokens given"):
        attention(q, k[:, :, :4], v[:, :, :4], key_length=5)


LAZY = {
    "negated": (torch._neg_view, "call .resolve_neg()"),
    "sparse": (Tensor.to_sparse, "call .to_dense()"),
    "nested": (lambda x: torch.nested.as_nested_tensor(list(x)), "call .to_padded_tensor(0.0)"),
}


@pytest.mark.parametrize("call", [attend, attention])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("name", LAZY)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_whose_memory_is_not_their_numbers_are_refused(
    call: Callable[..., Tensor], place: int, name: str
) -> None:
    change, fix = LAZY[name]
    tensors = list(problem())
    call(*tensors)
    tensors[place] = change(tensors[place])
    with pytest.raises(DtypeError, match=re.escape(fix)):
        call(*tensors)


@pytest.mark.parametrize("call", [attend, attention])
def test_modes_of_pytorch_see_one_operator(call: Callable[..., Tensor]) -> None:
    tensors = problem()
    call(*tensors)
    graph = make_fx(lambda q, k, v: call(q, k, v))(*tensors).graph
    assert [str(node.target) for node in graph.nodes if "attnmesh" in str(node.target)] == ["attnmesh.attend.default"]
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert call(*tensors).shape == tensors[0].shape


def test_a_gradient_of_the_gradient_of_sinks_is_refused() -> None:
    q, k, v = problem(rows=70, keys=70)
    sinks = torch.zeros(6, requires_grad=True)
    (gradient,) = torch.autograd.grad(am.attention(q, k, v, mesh=None, sinks=sinks).sum(), sinks, create_graph=True)
    with pytest.raises(KernelError, match="a gradient of a gradient"):
        torch.autograd.grad(gradient.sum(), sinks)


@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"kernel": "cpu"}])
def test_half_precision_does_not_depend_on_the_default_dtype(options: dict[str, Any]) -> None:
    tensors = problem(torch.float16, rows=3)
    first = attend(*tensors, **options)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert torch.equal(attend(*tensors, **options), first)
    finally:
        torch.set_default_dtype(before)
