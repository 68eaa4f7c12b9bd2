"""Bad arguments of what ranks do with their shards: merge, choose, scan, exchange a halo, shard and unshard."""

from typing import Any

import torch
import torch.distributed as dist

import attnmesh as am
from attnmesh.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    KernelError,
    LayoutError,
    MaskError,
    MeshError,
    ShapeError,
)
from tests.refusals.refusal import HEADS, INTS, LEARNED, WIDTH, Place, T, Table
from tests.support.truth.problems import numbers


def merge_across(at: Place, **changes: Any) -> None:
    out, lse = numbers(1, HEADS, 3, WIDTH), numbers(1, HEADS, 3)
    parts = {name: changes.pop(name, x) for name, x in {"out": out, "lse": lse}.items()}
    am.merge_across(**{"partial": am.Partial(**parts), "group": dist.group.WORLD} | changes)


def top_k_across(at: Place, **changes: Any) -> None:
    keys = {"scores": numbers(2, 5), "indices": torch.arange(5)}
    am.top_k_across(**keys | {"k": 3, "group": dist.group.WORLD} | changes)


def scan_across(at: Place, **changes: Any) -> None:
    maps = {"linear": numbers(1, HEADS, WIDTH), "bias": numbers(1, HEADS, WIDTH, 3)}
    am.scan_across(**maps | {"group": dist.group.WORLD} | changes)


def halo(at: Place, **changes: Any) -> None:
    am.halo(**{"x": numbers(1, 5, WIDTH), "size": 3, "group": dist.group.WORLD} | changes)


def shard_auto(at: Place, **changes: Any) -> None:
    am.shard(
        **{"x": numbers(1, 2, 4, 3), "mesh": at.mesh, "layout": "auto", "mask": am.Full() & am.Documents([1, 3])}
        | changes
    )


def unshard(at: Place, **changes: Any) -> None:
    am.unshard(**{"x": numbers(1, 2, 4, 3), "mesh": at.mesh, "layout": am.Contiguous()} | changes)


def shard(at: Place, **changes: Any) -> None:
    am.shard(**{"x": numbers(1, 2, 4, 3), "mesh": at.mesh, "layout": am.Contiguous()} | changes)


ON_ONE_RANK: Table = {
    merge_across: [
        ({"partial": None}, DtypeError, r"merge_across: expected a partial \(out, lse\), given NoneType\. Fix"),
        ({"out": [1.0]}, DtypeError, r"merge_across: expected a partial \(out, lse\), given Partial\. Fix: "),
        ({"out": T(1, 6, 3, 4).int()}, DtypeError, r"out in floats and lse in float32, .*given out torch.int"),
        (
            {"out": T(1, 6, 3, 4).to(torch.float8_e4m3fn)},
            DtypeError,
            r"out in floats.*given out torch.float8_.* cast out",
        ),
        ({"lse": T(1, 6, 3).half()}, DtypeError, r"out in floats and lse in float32, .*lse torch.float16\. Fix"),
        ({"lse": T(1, 6)}, ShapeError, r"merge_across: expected out \(batch, .*\(1, 6, 3, 4\) and \(1, 6\)\. "),
        (
            {"out": T(1, 6, 4, 4), "lse": T(1, 6, 4)},
            MeshError,
            r"merge_across: .*:\n    ranks  out\n(.*\n)*.*\[1, 6, 4, 4\]\n",
        ),
        ({"out": T(1, 6, 3, 5)}, MeshError, r"merge_across: .*:\n    ranks  out\n(.*\n)*.*\[1, 6, 3, 5\]\n"),
        (
            {"out": T(1, 6, 3, 4, device="meta"), "lse": T(1, 6, 3, device="meta")},
            DeviceError,
            r"merge_across: expected a partial with values, given one on the meta device\. Fix: compute",
        ),
        ({"how": "ring"}, KernelError, r"merge_across how: expected one of auto, .*, given 'ring'\. Fix: use"),
        ({"output": "heads"}, MeshError, r"merge_across: .*:\n    ranks  output\n(.*\n)*.*  heads\n"),
        ({"output": "mine"}, KernelError, r"merge_across output: expected one of replicated, .* given 'mine'"),
        ({"wire": torch.int8}, DtypeError, r"merge_across wire: expected None or one of .*, given torch.int8"),
        ({"wire": "bfloat16"}, DtypeError, r"merge_across wire: expected None or one of .*, given 'bfloat16'"),
        ({"base": 2}, KernelError, r"merge_across base: expected one of e, 2, given 2\. Fix: pass"),
        ({"checked": 0}, ArgumentError, r"merge_across checked: expected None, True or False, given 0\. Fix"),
        (
            {"out": T(1, 6, 3, 4, requires_grad=True)},
            KernelError,
            r"merge_across: expected a partial without gradients, given one with requires_grad=True\. Fix: call it",
        ),
    ],
    top_k_across: [
        ({"scores": [1.0]}, DtypeError, r"top_k_across scores: expected a tensor of floats, given list\. Fix: use"),
        ({"scores": T(2, 5).int()}, DtypeError, r"top_k_across scores: expected a tensor of floats, given torch.int32"),
        ({"scores": T(())}, DtypeError, r"top_k_across scores: expected a tensor of floats, .*\(\)\. Fix: pass"),
        ({"scores": T(2, 5, requires_grad=True)}, KernelError, r"top_k_across scores: .* without gradients, given"),
        ({"scores": T(3, 5)}, MeshError, r"top_k_across: .*:\n    ranks  rows\n(.*\n)*.*\[3\]\n"),
        (
            {"indices": T(5)},
            DtypeError,
            r"top_k_across indices: expected a tensor of int32 or int64, given torch.float",
        ),
        ({"indices": torch.arange(4)}, ShapeError, r"top_k_across indices: expected shape \(2, 5\), .*, given \(4,\)"),
        (
            {"indices": torch.arange(5) - 1},
            ShapeError,
            r"indices: expected numbers from 0 to 2147483647, given -1 to 3",
        ),
        ({"indices": torch.arange(5) << 30}, ShapeError, r"indices: expected numbers from 0 to .*, given 0 to 4294967"),
        ({"indices": torch.arange(5, device="meta")}, DeviceError, r"top_k_across: expected one device, given scores"),
        ({"k": 0}, ShapeError, r"top_k_across k: expected a whole number, 1 or more, given 0\. Fix: find"),
        ({"k": 2.0}, ShapeError, r"top_k_across k: expected a whole number, 1 or more, given 2\.0\. Fix: count"),
        ({"k": 4}, MeshError, r"top_k_across: .*:\n    ranks  k\n(.*\n)*.*  4\n"),
        ({"unique": 1}, ArgumentError, r"top_k_across unique: expected True or False, given 1\. Fix: pass"),
        ({"unique": True}, MeshError, r"top_k_across: .*:\n    ranks  unique\n(.*\n)*.*True\n"),
    ],
    scan_across: [
        ({"linear": 1.0}, DtypeError, r"scan_across linear: expected a tensor of floats, given float\. Fix: use"),
        ({"bias": INTS["q"]}, DtypeError, r"scan_across bias: expected a tensor of floats, given torch.int32\. Fix"),
        ({"bias": T(1, HEADS, 4)}, ShapeError, r"scan_across bias: expected 4 dims .*, given shape \(1, 6, 4\)\. Fix"),
        (
            {"linear": T(1, 5)},
            ShapeError,
            r"scan_across linear: expected shape \(1, 6\), .*, given shape \(1, 5\)\. Fix",
        ),
        ({"linear": T(1, 6, 4, 3)}, ShapeError, r"scan_across linear: .* \(1, 6, 4, 4\) for .*, given .*4, 3\)\. Fix"),
        ({"linear": T(1, 6)}, MeshError, r"scan_across: .*:\n    ranks  linear\n(.*\n)*.*\[1, 6\]\n"),
        ({"bias": T(1, 6, 4, 2)}, MeshError, r"scan_across: .*:\n    ranks  bias\n(.*\n)*.*\[1, 6, 4, 2\]\n"),
        ({"bias": T(1, 6, 4, 3).double()}, MeshError, r"scan_across: .*:\n    ranks  dtypes\n(.*\n)*.*float64"),
        ({"linear": T(1, 6, 4).requires_grad_()}, MeshError, r"scan_across: .*:\n    ranks  requires_grad\n"),
        ({"linear": T(1, 6, 4, device="meta")}, DeviceError, r"scan_across: expected one device, given linear meta"),
        ({"reverse": True}, MeshError, r"scan_across: .*:\n    ranks  reverse\n(.*\n)*.*True\n"),
        ({"reverse": 1}, ArgumentError, r"scan_across reverse: expected True or False, given 1\. Fix: pass"),
        ({"checked": 0}, ArgumentError, r"scan_across checked: expected None, True or False, given 0\. Fix"),
    ],
    halo: [
        ({"x": [1.0]}, DtypeError, r"halo x: expected a tensor of floats, given list\. Fix: use torch"),
        ({"x": T(1, 5, WIDTH).int()}, DtypeError, r"halo x: expected a tensor of floats, given torch.int32\. Fix"),
        ({"x": T(1, 5, WIDTH).half()}, MeshError, r"halo: .*:\n    ranks  dtype\n(.*\n)*.*float16\n"),
        ({"x": T(2, 5, WIDTH)}, MeshError, r"halo: .*:\n    ranks  others\n(.*\n)*.*\[2, 4\]\n"),
        ({"size": 2}, MeshError, r"halo: .*:\n    ranks  size\n(.*\n)*.*2\n"),
        ({"size": -1}, ShapeError, r"halo size: expected a whole number, 0 or more, given -1\. Fix: pass"),
        ({"size": 2.5}, ShapeError, r"halo size: expected a whole number, 0 or more, given 2\.5\. Fix: pass"),
        ({"dim": 3}, ShapeError, r"halo dim: expected a dim of the tensor's 3, given 3\. Fix: pass"),
        ({"dim": 2}, MeshError, r"halo: .*:\n    ranks  others .*dim\n"),
    ],
    shard_auto: [
        ({"mask": None}, LayoutError, 'shard layout: expected mask= beside layout="auto", given no mask'),
        ({"mask": am.Causal()}, MeshError, r"shard: expected the same .*:\n    ranks  mask\n(.*\n)*.*Causal\(\)\n"),
        ({"mask": "causal"}, MaskError, r"shard mask: expected Full\(\).*, given 'causal'\. Fix: use Full"),
        ({"x": T(1, 2, 9, 3)}, MeshError, r"shard: expected the same .*:\n    ranks  tokens\n(.*\n)*.*  9\n"),
        ({"layout": "best"}, LayoutError, r'shard layout: expected "auto", Contiguous.*given .best.\. Fix: make'),
    ],
    unshard: [
        ({"x": [1.0]}, DtypeError, r"unshard: expected a tensor of floats, given list\. Fix: use torch"),
        ({"x": T(1, 2, 4, 3).to_sparse()}, DtypeError, r"unshard: expected a dense tensor, given torch.sparse_coo"),
        ({"x": T(1, 2, 4, 3).half()}, MeshError, r"unshard: expected the same .*:\n    ranks  dtype\n(.*\n)*.*16\n"),
        ({"x": T(1, 2, 9, 3)}, ShapeError, r"unshard: expected shards of \[.*\] tokens for Contiguous.*, given \[.*9"),
        ({"x": LEARNED}, KernelError, r"unshard: expected a tensor without gradients, given one that asks .*detach"),
        ({"dim": 4}, ShapeError, r"unshard: expected a dim of the tensor's 4, given dim 4\. Fix: say along which"),
        ({"dim": "tokens"}, ShapeError, r"unshard: expected a dim of the tensor's 4, given dim 'tokens'\. Fix: say"),
        ({"layout": "zigzag"}, LayoutError, r"unshard layout: expected .auto., Contiguous.*, given 'zigzag'\. Fix"),
        ({"length": 5}, MeshError, r"unshard: expected the same call .*:\n    ranks  length\n(.*\n)*.*  5\n"),
    ],
}

ON_ALL_RANKS: Table = {
    merge_across: [
        ({"group": "world"}, MeshError, r"merge_across group: .* a process group that holds .*, given 'world'\. Fix"),
        ({"group": None}, MeshError, r"a process group that .*, given None in a world of \d ranks\. Fix: pass"),
    ],
    scan_across: [({"group": "world"}, MeshError, r"scan_across group: .*, given 'world'\. Fix: pass")],
    halo: [({"group": None}, MeshError, r"halo group: .* given None in a world of \d ranks\. Fix: pass")],
    shard: [
        ({"x": [1.0]}, DtypeError, r"shard: expected a tensor of floats, given list\. Fix: use torch"),
        ({"dim": 4}, ShapeError, r"shard: expected a dim of the tensor's 4, given dim 4\. Fix: say along which"),
        ({"dim": None}, ShapeError, r"shard: expected a dim of the tensor's 4, given dim None\. Fix: say along"),
        ({"layout": am.Zigzag}, LayoutError, r"shard layout: expected .auto., Contiguous.*Zigzag'>\. Fix: make one"),
    ],
}
