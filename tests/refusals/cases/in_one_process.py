"""Bad arguments of calls in one process: `attend`, `attention`, masks, layouts and merges."""

from typing import Any

import torch
from torch import Tensor

import attnmesh as am
from attnmesh.errors import DeviceError, DtypeError, KernelError, LayoutError, MaskError, MeshError, ShapeError
from tests.refusals.refusal import Refusal, T, Table, refusals


def heads(q: int = 4, k: int = 2, length: int = 6, width: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    return T(1, q, length, width), T(1, k, length, width), T(1, k, length, width)


def attend(**changes: Any) -> am.Partial:
    return am.attend(**dict(zip("qkv", heads(), strict=True)) | changes)


def attention(**changes: Any) -> Tensor:
    return am.attention(**dict(zip("qkv", heads(), strict=True)) | changes)


def merge_across(**changes: Any) -> am.Partial:
    parts = {"out": T(2, 9, 3, 8), "lse": T(2, 9, 3)}
    parts |= {name: changes.pop(name) for name in ("out", "lse") if name in changes}
    return am.merge_across(**{"partial": am.Partial(**parts), "group": None} | changes)


def kv_cache(**changes: Any) -> am.KVCache:
    sizes = {"batch": 1, "kv_heads": 2, "head_dim": 8, "capacity": 10, "dtype": torch.float32}
    return am.KVCache(None, **sizes | changes)


def append(**changes: Any) -> None:
    kv_cache().append(**{"k": T(1, 2, 1, 8), "v": T(1, 2, 1, 8)} | changes)


def decode(**changes: Any) -> Tensor:
    cache = kv_cache()
    cache.append(T(1, 2, 3, 8), T(1, 2, 3, 8))
    return am.decode(**{"q": T(1, 2, 1, 8), "cache": cache} | changes)


LEARNED = T(1, 2, 1, 8, requires_grad=True)
PARTIAL = am.Partial(T(1, 2, 3, 4), T(1, 2, 3))

TABLE: Table = {
    merge_across: [
        ({"how": "ring"}, KernelError, r"how: expected one of auto, tree, .* given 'ring'. Fix: use \"auto\""),
        ({"output": "mine"}, KernelError, r"output: expected one of replicated, heads"),
        ({"base": 2}, KernelError, r"base: expected one of e, 2"),
        ({"wire": torch.int8}, DtypeError, r"wire: expected None or one of float64"),
        ({"group": "world"}, MeshError, r"a process group that holds this rank, or a mesh of one axis, given 'world'"),
        ({"lse": T(2, 9)}, ShapeError, r"\(2, 9, 3, 8\) and \(2, 9\)"),
        ({"lse": T(2, 9, 3).half()}, DtypeError, r"lse in float32"),
        ({"out": T(2, 9, 3, 8, requires_grad=True)}, KernelError, r"without gradients"),
    ],
    attend: [
        ({"q": T(4, 6, 8)}, ShapeError, r"attend q: .* 4 dims \(batch, heads, .*given shape \(4, 6, 8\)\. Fix: add"),
        ({"v": T(1, 2, 6, 8, 1)}, ShapeError, r"attend v: expected 4 dims .*\. Fix: add or split"),
        ({"k": [1, 2]}, DtypeError, r"attend k: expected a tensor of floats, given list\. Fix: use torch"),
        ({"q": T(2, 4, 6, 8)}, ShapeError, r"one batch size, given q \(2, 4, 6, 8\), k .*Fix: expand"),
        ({"v": T(1, 2, 5, 8)}, ShapeError, r"k and v with the same heads and length, given .* Fix: pair"),
        ({"v": T(1, 1, 6, 8)}, ShapeError, r"k and v with the same heads and length, given"),
        ({"q": T(1, 4, 6, 7)}, ShapeError, r"q and k of one width, given q \(1, 4, 6, 7\).* Fix: project"),
        ({"q": T(1, 4, 6, 0), "k": T(1, 2, 6, 0)}, ShapeError, r"widths of at least 1, given .* Fix: give"),
        ({"v": T(1, 2, 6, 0)}, ShapeError, r"widths of at least 1, given"),
        ({"q": T(1, 0, 6, 8)}, ShapeError, r"at least one head, given"),
        ({"k": T(1, 0, 6, 8), "v": T(1, 0, 6, 8)}, ShapeError, r"at least one head, given"),
        ({"q": T(1, 3, 6, 8)}, ShapeError, r"query heads a multiple of key heads, given .* Fix: group"),
        ({"q": T(1, 4, 6, 8).double()}, DtypeError, r"one dtype of float64, .*, given q float64, k float32.*Fix: cast"),
        ({"q": heads()[0].int(), "k": heads()[1].int(), "v": heads()[2].int()}, DtypeError, r"given q int32, k int32"),
        (
            {"q": heads()[0].cfloat(), "k": heads()[1].cfloat(), "v": heads()[2].cfloat()},
            DtypeError,
            r"given q complex64",
        ),
        ({"v": T(1, 2, 6, 8, device="meta")}, DeviceError, r"one device, given q cpu, k cpu, v meta\. Fix: move"),
        (
            {"scale": "big"},
            DtypeError,
            r"attend scale: expected None, 0 or a number of size .*, given 'big' of type str\. Fix",
        ),
        ({"scale": float("nan")}, DtypeError, r"number of size 1e-30 to 1e30, given nan"),
        ({"scale": T(1)}, DtypeError, r"number of size 1e-30 to 1e30, given tensor"),
        *(
            ({"softcap": cap}, DtypeError, r"attend softcap: expected None or a number from 1e-30 to 1e30, given")
            for cap in (0, -2.0, float("inf"), float("nan"), "50", True, T(1), 1e-40, 10**400)
        ),
        (
            {"kernel": "fast"},
            KernelError,
            r"kernel: expected one of auto, native, triton, cpu, cuda, reference, given 'fast'\. Fix",
        ),
        ({"kernel": "cuda"}, KernelError, r"kernel cuda: .*it runs on CUDA, the tensors are on cpu\. Fix: leave"),
        ({"mask": am.Causal}, MaskError, r"attend mask: expected Full\(\), .*, given Causal itself\. Fix: call it"),
        ({"mask": T(6, 6, dtype=torch.bool)}, MaskError, r"given Tensor\. Fix: use Full\(\) for no mask; say"),
        ({"mask": None}, MaskError, r"given None\. Fix: use Full"),
        (
            {"mask": am.Full() & am.Documents((3, 4))},
            MaskError,
            r"documents that add up to 6 tokens, given 7 tokens\. Fix: let",
        ),
        ({"mask": am.Full() & am.Documents((2, 3))}, MaskError, r"documents that add up to 6 tokens, given 5 tokens"),
        (
            {"q_positions": T(6)},
            DtypeError,
            r"attend q_positions: expected a tensor of torch.int64, given torch.float32",
        ),
        (
            {"k_positions": torch.arange(5)},
            ShapeError,
            r"k_positions: expected shape \(6,\), .* given shape \(5,\)\. Fix: pass layout",
        ),
        ({"q_positions": [0, 1, 2, 3, 4, 5]}, DtypeError, r"attend q_positions: .* given list\. Fix"),
        (
            {"q_positions": torch.arange(-1, 5)},
            LayoutError,
            r"attend q_positions: expected positions from 0 to .*, given -1",
        ),
        (
            {"mask": am.Full() & am.Documents((3, 3)), "k_positions": torch.arange(1, 7)},
            MaskError,
            r"k_positions: expected positions inside the documents, given position 6 and 6 tokens .*Fix: let",
        ),
        ({"scale": 1e-46}, DtypeError, r"size 1e-30 to 1e30, given 1e-46"),
        ({"scale": 10**400}, DtypeError, r"size 1e-30 to 1e30, given 1000"),
        ({"kernel": None}, KernelError, r"kernel: expected one of auto, .*, given None"),
        ({"q": heads()[0].to_sparse()}, DtypeError, r"attend q: expected a dense tensor, given torch.sparse_coo"),
        ({"q_positions": torch.arange(6) + 2**61}, LayoutError, r"expected positions from 0 to .*, given 23058"),
        ({"mask": am.Mask}, MaskError, r"given Mask itself"),
    ],
    attention: [
        ({"exchange": "tree"}, KernelError, r"attention exchange: expected one of auto, bulk, .*, given 'tree'"),
        ({"layout": am.Zigzag}, LayoutError, r"layout: expected .auto., Contiguous\(\), .* Fix: make one"),
        ({"key_layout": "zigzag"}, LayoutError, r"attention key_layout: expected .*, given 'zigzag'"),
        ({"length": 7}, ShapeError, r"expected length to count the tokens given, given length=7 with 6 tokens"),
        ({"key_length": 5}, ShapeError, r"key_length=5 with 6 tokens\. Fix: leave key_length out"),
        ({"sinks": T(3)}, ShapeError, r"attention sinks: expected shape \(4,\), given shape \(3,\)\. Fix: give"),
        ({"sinks": T(4, 1)}, ShapeError, r"attention sinks: expected shape \(4,\), given shape \(4, 1\)"),
        ({"sinks": [0.0] * 4}, DtypeError, r"attention sinks: expected a tensor of floats, given list"),
        ({"sinks": T(4).int()}, DtypeError, r"attention sinks: expected a tensor of floats, given torch.int32"),
        ({"sinks": T(4, device="meta")}, DeviceError, r"attention sinks: expected one device, given .*meta"),
        ({"mask": am.Full() & am.Documents((3, 4))}, MaskError, r"attention mask: expected documents that add up to 6"),
        (
            {"q": T(1, 4, 1, 8)},
            ShapeError,
            r"as many queries as keys .* given 1 queries, 6 keys and the default mask Causal\(\)\. "
            r"Fix: pass mask=am.Full\(\) for cross-attention; call am.attend with mask=am.Causal\(\) and "
            r"q_positions=torch.arange\(5, 6\) for the last queries of a longer sequence; "
            r"pass mask=am.Causal\(\), key_length=6 for Causal\(\) over another",
        ),
        (
            {"q": T(1, 4, 1, 8), "key_length": 6},
            ShapeError,
            r"the default mask Causal\(\)\. Fix: pass mask=am.Full\(\) for .* pass mask=am.Causal\(\), key_length=6 f",
        ),
        (
            {"q": T(1, 4, 9, 8)},
            ShapeError,
            r"given 9 queries, 6 keys .* Fix: pass mask=am.Full\(\) for cross-attention; pass mask=am.Causal\(\), key_",
        ),
        (
            {"q": T(1, 4, 1, 8), "mask": am.Window(2)},
            ShapeError,
            r"and the mask Window\(2\)\. Fix: pass mask=am.Full.*; call am.attend .*; pass key_length=6 for Window\(2",
        ),
        ({"sinks": T(4).to_sparse()}, DtypeError, r"attention sinks: expected a dense tensor"),
        ({"length": "6"}, ShapeError, r"attention length: expected a whole number, given '6'\. Fix: count"),
        ({"exchange": ["bulk"]}, KernelError, r"attention exchange: .* given \['bulk'\]"),
        ({"mesh": "cuda"}, MeshError, r"mesh: expected a DeviceMesh or None, given str\. Fix: make one"),
    ],
    kv_cache: [
        ({"capacity": 2**47}, ShapeError, r"KVCache capacity: expected tokens that fit the device.s memory, given no"),
        ({"capacity": 10**30}, ShapeError, r"KVCache capacity: expected at most 281,474,976,710,656, given 1,0"),
        ({"capacity": 0}, ShapeError, r"KVCache capacity: expected a whole number, 1 or more, given 0"),
        ({"block": 2.5}, ShapeError, r"KVCache block: expected a whole number, 1 or more, given 2.5"),
        ({"dtype": torch.int8}, DtypeError, r"KVCache dtype: expected one of float64"),
    ],
    append: [({"k": LEARNED, "v": LEARNED}, KernelError, r"append k: expected a tensor without gradients")],
    decode: [({"q": LEARNED}, KernelError, r"decode q: expected a tensor without gradients")],
    am.Mask: [
        (
            {"left": -1},
            MaskError,
            r"Mask: expected whole numbers: reaches of 0 or more .* chunks and spans, given left -1.*Fix: make masks",
        ),
        ({"chunks": (2.5,)}, MaskError, r"Mask: expected whole numbers.* chunks \(2\.5,\)\. Fix"),
        ({"chunks": ("a",)}, MaskError, r"Mask: expected whole numbers.* chunks \('a',\)\. Fix"),
        ({"chunks": 4}, MaskError, r"Mask: expected whole numbers.* chunks 4\. Fix"),
        ({"ends": 3}, MaskError, r"Mask: expected whole numbers.* ends 3, chunks \(\)\. Fix"),
        ({"left": True}, MaskError, r"Mask: expected whole numbers.* left True"),
        ({"ends": (5, 3)}, MaskError, r"ascending ends, chunks and spans, given .*ends \(5, 3\)"),
    ],
}

IN_ONE_PROCESS = [
    *refusals(TABLE),
    Refusal(lambda: am.energy(*heads(), None), {}, DtypeError, r"energy source: .* given NoneType"),
    Refusal(
        lambda: am.energy(*heads(), T(1, 4, 5, 8)),
        {},
        ShapeError,
        r"expected source of .* \(1, 4, 6, 8\), given \(1, 4, 5, 8\)\. Fix: use",
    ),
    Refusal(
        lambda: kv_cache().reorder(torch.ones(10000, dtype=torch.int64)),
        {},
        ShapeError,
        r"^(?=.{1,199}$).*given \[1, 1, ",  # in short
    ),
    Refusal(am.merge, {}, ShapeError, r"merge: expected at least one partial, given none\. Fix: pass the ident"),
    Refusal(
        lambda: am.merge(PARTIAL, am.Partial(PARTIAL.out, T(1, 2, 5))),
        {},
        ShapeError,
        r"given .*lse \(1, 2, 5\).*\. Fix: merge partials of the same queries",
    ),
    Refusal(
        lambda: am.merge(PARTIAL, am.Partial(PARTIAL.out, PARTIAL.lse.bfloat16())),
        {},
        DtypeError,
        r"expected lse in float32 or float64, given torch\.bfloat16\. Fix: keep",
    ),
    Refusal(
        lambda: am.merge(PARTIAL, am.Partial(PARTIAL.out.to("meta"), PARTIAL.lse.to("meta"))),
        {},
        DeviceError,
        r"one device, given out of partial 0 cpu, .*lse of partial 1 meta\. Fix",
    ),
    Refusal(lambda: am.merge((T(1).int(), T(1))), {}, DtypeError, r"merge: expected out in floats, given torch.int32"),
    Refusal(
        lambda: am.merge((T(1).to(torch.float8_e5m2), T(1))),
        {},
        DtypeError,
        r"given torch.float8_e5m2\. Fix: cast it to",
    ),
    Refusal(lambda: am.Documents([2**60, 2**60]), {}, MaskError, r"Documents: expected at most .* tokens, given 23058"),
    Refusal(lambda: am.Documents(torch.tensor([2.5])), {}, MaskError, r"Documents length: .* given tensor\(2.5"),
    Refusal(lambda: am.Causal().draw(-1), {}, MaskError, r"draw: expected a whole number, 0 or more, given -1"),
    Refusal(lambda: am.Causal().draw(4, "auto"), {}, LayoutError, r"draw layout: expected Contiguous.*, given 'auto'"),
    Refusal(
        lambda: am.Causal().draw(4, am.Zigzag(), (2, 2)), {}, LayoutError, r"draw shape: expected .*given \(2, 2\)"
    ),
    Refusal(lambda: am.Causal().draw(4, am.Zigzag(), (0, 2, 1)), {}, LayoutError, r"draw shape: .*given \(0, 2, 1\)"),
    Refusal(lambda: am.Causal().draw(4, am.Zigzag(), 4), {}, LayoutError, r"draw shape: expected whole.*given 4\. Fix"),
    Refusal(
        lambda: am.Zigzag().positions("10", 2, 0), {}, LayoutError, r"whole numbers .*, given '10', 2, 0\. Fix: pass"
    ),
    Refusal(
        lambda: am.merge([T(1), T(1)]),
        {},
        DtypeError,
        r"merge: expected partials, each \(out, lse\), given list\. Fix: pass",
    ),
    Refusal(lambda: am.merge(*heads()), {}, DtypeError, r"given Tensor, Tensor, Tensor"),
]
