"""Errors for bad arguments of public functions: type, and message with expected value, given value and fix."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import attnmesh as am
from attnmesh import errors

pytestmark = pytest.mark.quick

T = torch.zeros


def heads(q: int = 4, k: int = 2, length: int = 6, width: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    return T(1, q, length, width), T(1, k, length, width), T(1, k, length, width)


def attend(**changes: Any) -> Callable[[], Any]:
    return lambda: am.attend(**{**dict(zip("qkv", heads(), strict=True)), **changes})


def attention(**changes: Any) -> Callable[[], Any]:
    return lambda: am.attention(**{**dict(zip("qkv", heads(), strict=True)), **changes})


BAD = [
    # dims, widths, heads
    (
        attend(q=T(4, 6, 8)),
        errors.ShapeError,
        r"attend q: .* 4 dims \(batch, heads, .*given shape \(4, 6, 8\)\. Fix: add",
    ),
    (attend(v=T(1, 2, 6, 8, 1)), errors.ShapeError, r"attend v: expected 4 dims .*\. Fix: add or split"),
    (
        attend(k=[1, 2]),
        errors.DtypeError,
        r"attend k: expected a tensor of floats, given list\. Fix: use torch",
    ),
    (attend(q=T(2, 4, 6, 8)), errors.ShapeError, r"one batch size, given q \(2, 4, 6, 8\), k .*Fix: expand"),
    (attend(v=T(1, 2, 5, 8)), errors.ShapeError, r"k and v with the same heads and length, given .* Fix: pair"),
    (attend(v=T(1, 1, 6, 8)), errors.ShapeError, r"k and v with the same heads and length, given"),
    (attend(q=T(1, 4, 6, 7)), errors.ShapeError, r"q and k of one width, given q \(1, 4, 6, 7\).* Fix: project"),
    (attend(q=T(1, 4, 6, 0), k=T(1, 2, 6, 0)), errors.ShapeError, r"widths of at least 1, given .* Fix: give"),
    (attend(v=T(1, 2, 6, 0)), errors.ShapeError, r"widths of at least 1, given"),
    (attend(q=T(1, 0, 6, 8)), errors.ShapeError, r"at least one head, given"),
    (attend(k=T(1, 0, 6, 8), v=T(1, 0, 6, 8)), errors.ShapeError, r"at least one head, given"),
    (attend(q=T(1, 3, 6, 8)), errors.ShapeError, r"query heads a multiple of key heads, given .* Fix: group"),
    # dtypes and devices
    (
        attend(q=T(1, 4, 6, 8).double()),
        errors.DtypeError,
        r"one dtype of float64, .*, given q float64, k float32.*Fix: cast",
    ),
    (attend(q=heads()[0].int(), k=heads()[1].int(), v=heads()[2].int()), errors.DtypeError, r"given q int32, k int32"),
    (
        attend(q=heads()[0].cfloat(), k=heads()[1].cfloat(), v=heads()[2].cfloat()),
        errors.DtypeError,
        r"given q complex64",
    ),
    (attend(v=T(1, 2, 6, 8, device="meta")), errors.DeviceError, r"one device, given q cpu, k cpu, v meta\. Fix: move"),
    # scale and kernel
    (
        attend(scale="big"),
        errors.DtypeError,
        r"attend scale: expected None, 0 or a number of size .*, given 'big' of type str\. Fix",
    ),
    (attend(scale=float("nan")), errors.DtypeError, r"number of size 1e-30 to 1e30, given nan"),
    (attend(scale=T(1)), errors.DtypeError, r"number of size 1e-30 to 1e30, given tensor"),
    *(
        (attend(softcap=cap), errors.DtypeError, r"attend softcap: expected None or a number from 1e-30 to 1e30, given")
        for cap in (0, -2.0, float("inf"), float("nan"), "50", True, T(1), 1e-40, 10**400)
    ),
    (
        attend(kernel="fast"),
        errors.KernelError,
        r"kernel: expected one of auto, native, triton, cpu, cuda, reference, given 'fast'\. Fix",
    ),
    (attend(kernel="cuda"), errors.KernelError, r"kernel cuda: .*it runs on CUDA, the tensors are on cpu\. Fix: leave"),
    # masks
    (
        attend(mask=am.Causal),
        errors.MaskError,
        r"attend mask: expected Full\(\), .*, given Causal itself\. Fix: call it",
    ),
    (attend(mask=T(6, 6, dtype=torch.bool)), errors.MaskError, r"given Tensor\. Fix: use Full\(\) for no mask; say"),
    (attend(mask=None), errors.MaskError, r"given None\. Fix: use Full"),
    (
        attend(mask=am.Full() & am.Documents((3, 4))),
        errors.MaskError,
        r"documents that add up to 6 tokens, given 7 tokens\. Fix: let",
    ),
    (
        attend(mask=am.Full() & am.Documents((2, 3))),
        errors.MaskError,
        r"documents that add up to 6 tokens, given 5 tokens",
    ),
    # positions
    (
        attend(q_positions=T(6)),
        errors.DtypeError,
        r"attend q_positions: expected a tensor of torch.int64, given torch.float32",
    ),
    (
        attend(k_positions=torch.arange(5)),
        errors.ShapeError,
        r"k_positions: expected shape \(6,\), .* given shape \(5,\)\. Fix: pass layout",
    ),
    (attend(q_positions=[0, 1, 2, 3, 4, 5]), errors.DtypeError, r"attend q_positions: .* given list\. Fix"),
    (
        attend(q_positions=torch.arange(-1, 5)),
        errors.LayoutError,
        r"attend q_positions: expected positions from 0 to .*, given -1",
    ),
    (
        attend(mask=am.Full() & am.Documents((3, 3)), k_positions=torch.arange(1, 7)),
        errors.MaskError,
        r"k_positions: expected positions inside the documents, given position 6 and 6 tokens .*Fix: let",
    ),
    # arguments of attention
    (
        attention(exchange="tree"),
        errors.KernelError,
        r"attention exchange: expected one of auto, bulk, .*, given 'tree'",
    ),
    (attention(layout=am.Zigzag), errors.LayoutError, r"layout: expected .auto., Contiguous\(\), .* Fix: make one"),
    (attention(key_layout="zigzag"), errors.LayoutError, r"attention key_layout: expected .*, given 'zigzag'"),
    (
        attention(length=7),
        errors.ShapeError,
        r"expected length to count the tokens given, given length=7 with 6 tokens",
    ),
    (attention(key_length=5), errors.ShapeError, r"key_length=5 with 6 tokens\. Fix: leave key_length out"),
    (
        attention(sinks=T(3)),
        errors.ShapeError,
        r"attention sinks: expected shape \(4,\), given shape \(3,\)\. Fix: give",
    ),
    (attention(sinks=T(4, 1)), errors.ShapeError, r"attention sinks: expected shape \(4,\), given shape \(4, 1\)"),
    (attention(sinks=[0.0] * 4), errors.DtypeError, r"attention sinks: expected a tensor of floats, given list"),
    (
        attention(sinks=T(4).int()),
        errors.DtypeError,
        r"attention sinks: expected a tensor of floats, given torch.int32",
    ),
    (attention(sinks=T(4, device="meta")), errors.DeviceError, r"attention sinks: expected one device, given .*meta"),
    (
        attention(mask=am.Full() & am.Documents((3, 4))),
        errors.MaskError,
        r"attention mask: expected documents that add up to 6",
    ),
    (
        attention(q=T(1, 4, 1, 8)),
        errors.ShapeError,
        r"as many queries as keys .* given 1 queries, 6 keys and the default mask Causal\(\)\. "
        r"Fix: pass mask=am.Full\(\) for cross-attention; call am.attend with mask=am.Causal\(\) and "
        r"q_positions=torch.arange\(5, 6\) for the last queries of a longer sequence; "
        r"pass mask=am.Causal\(\), key_length=6 for Causal\(\) over another",
    ),
    (
        attention(q=T(1, 4, 1, 8), key_length=6),
        errors.ShapeError,
        r"the default mask Causal\(\)\. Fix: pass mask=am.Full\(\) for .* pass mask=am.Causal\(\), key_length=6 for",
    ),
    (
        attention(q=T(1, 4, 9, 8)),
        errors.ShapeError,
        r"given 9 queries, 6 keys .* Fix: pass mask=am.Full\(\) for cross-attention; pass mask=am.Causal\(\), key_l",
    ),
    (
        attention(q=T(1, 4, 1, 8), mask=am.Window(2)),
        errors.ShapeError,
        r"and the mask Window\(2\)\. Fix: pass mask=am.Full.*; call am.attend .*; pass key_length=6 for Window\(2\)",
    ),
    (attend(scale=1e-46), errors.DtypeError, r"size 1e-30 to 1e30, given 1e-46"),
    (attend(scale=10**400), errors.DtypeError, r"size 1e-30 to 1e30, given 1000"),
    (attend(kernel=None), errors.KernelError, r"kernel: expected one of auto, .*, given None"),
    (attend(q=heads()[0].to_sparse()), errors.DtypeError, r"attend q: expected a dense tensor, given torch.sparse_coo"),
    (attend(q_positions=torch.arange(6) + 2**61), errors.LayoutError, r"expected positions from 0 to .*, given 23058"),
    (attention(sinks=T(4).to_sparse()), errors.DtypeError, r"attention sinks: expected a dense tensor"),
    (attention(length="6"), errors.ShapeError, r"attention length: expected a whole number, given '6'\. Fix: count"),
    (attention(exchange=["bulk"]), errors.KernelError, r"attention exchange: .* given \['bulk'\]"),
    (
        lambda: am.energy(*heads(), None),
        errors.DtypeError,
        r"energy source: .* given NoneType",
    ),
    (
        lambda: am.merge((T(1).int(), T(1))),
        errors.DtypeError,
        r"merge: expected out in floats, given torch.int32",
    ),
    (lambda: am.Documents([2**60, 2**60]), errors.MaskError, r"Documents: expected at most .* tokens, given 23058"),
    (lambda: am.Documents(torch.tensor([2.5])), errors.MaskError, r"Documents length: .* given tensor\(2.5"),
    (lambda: am.Causal().draw(-1), errors.MaskError, r"draw: expected a whole number, 0 or more, given -1"),
    (lambda: am.Causal().draw(4, "auto"), errors.LayoutError, r"draw layout: expected Contiguous.*, given 'auto'"),
    (lambda: am.Causal().draw(4, am.Zigzag(), (2, 2)), errors.LayoutError, r"draw shape: expected .*given \(2, 2\)"),
    (lambda: am.Causal().draw(4, am.Zigzag(), (0, 2, 1)), errors.LayoutError, r"draw shape: .*given \(0, 2, 1\)"),
    (lambda: am.Causal().draw(4, am.Zigzag(), 4), errors.LayoutError, r"draw shape: expected whole.*given 4\. Fix"),
    (attend(mask=am.Mask), errors.MaskError, r"given Mask itself"),
    (
        lambda: am.Mask(left=-1),
        errors.MaskError,
        r"Mask: expected whole numbers: reaches of 0 or more .* chunks and spans, given left -1.*Fix: make masks",
    ),
    (lambda: am.Mask(chunks=(2.5,)), errors.MaskError, r"Mask: expected whole numbers.* chunks \(2\.5,\)\. Fix"),
    (lambda: am.Mask(chunks=("a",)), errors.MaskError, r"Mask: expected whole numbers.* chunks \('a',\)\. Fix"),
    (lambda: am.Mask(chunks=4), errors.MaskError, r"Mask: expected whole numbers.* chunks 4\. Fix"),
    (lambda: am.Mask(ends=3), errors.MaskError, r"Mask: expected whole numbers.* ends 3, chunks \(\)\. Fix"),
    (lambda: am.Mask(left=True), errors.MaskError, r"Mask: expected whole numbers.* left True"),
    (lambda: am.Mask(ends=(5, 3)), errors.MaskError, r"ascending ends, chunks and spans, given .*ends \(5, 3\)"),
    (lambda: am.Zigzag().positions("10", 2, 0), errors.LayoutError, r"whole numbers .*, given '10', 2, 0\. Fix: pass"),
    (
        lambda: am.merge([T(1), T(1)]),
        errors.DtypeError,
        r"merge: expected partials, each \(out, lse\), given list\. Fix: pass",
    ),
    (lambda: am.merge(*heads()), errors.DtypeError, r"given Tensor, Tensor, Tensor"),
    (attention(mesh="cuda"), errors.MeshError, r"mesh: expected a DeviceMesh or None, given str\. Fix: make one"),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD)
def test_bad_arguments_raise(call: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        call()
    assert isinstance(caught.value, ValueError)
    assert str(caught.value).count("Fix: ") == 1


@pytest.mark.parametrize("name", ["dropout_p", "logits_soft_cap", "score_mod", "attn_mask", "is_causal", "enable_gqa"])
def test_options_of_other_attention_functions_raise(name: str) -> None:
    for call in (attention, attend):
        with pytest.raises(errors.KernelError, match=f"exact softmax attention .* given {name}=0.1. Fix: "):
            call(**{name: 0.1})()
    with pytest.raises(TypeError, match=r"the arguments of its signature, given mesk=Mask\. Fix: see help"):
        attention(mesk=am.Causal())()


def test_options_that_say_what_is_done_anyway_are_taken() -> None:
    expected = attention()()
    for options in ({"dropout_p": 0.0, "attn_mask": None}, {"dropout_p": 0, "is_causal": True, "enable_gqa": False}):
        assert torch.equal(attention(**options)(), expected)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # PyTorch's own jvp
def test_forward_mode_raises() -> None:
    q, k, v = heads()
    with pytest.raises(
        errors.KernelError, match=r"without a forward-mode tangent, given a dual number\. Fix: use reverse-mode"
    ):
        torch.func.jvp(lambda x: am.attention(x, k, v), (q,), (torch.ones_like(q),))
    with pytest.raises(errors.KernelError, match="attention sinks: expected a tensor without a forward-mode tangent"):
        torch.func.jvp(lambda x: am.attention(q, k, v, sinks=x), (T(4),), (T(4),))


def test_errors_can_be_pickled() -> None:
    error = errors.MaskError("attend mask", "one thing", "another", "change it")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is errors.MaskError
    assert str(again) == str(error) == "attend mask: expected one thing, given another. Fix: change it."
