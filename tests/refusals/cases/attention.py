"""Bad arguments of `attention`, to tensors and to DTensors."""

from typing import Any

import torch
from torch import Tensor

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
from attnmesh.mesh.shapes import AXES
from tests.refusals.refusal import HEADS, INTS, LEARNED, NO_VALUES, Q_HEADS, WIDTH, Place, T, Table
from tests.support.truth.problems import numbers

DOUBLES = {name: T(1, HEADS, 4, WIDTH, dtype=torch.float64) for name in "qkv"}
NOWHERE = {name: T(1, n, 4, WIDTH, device="meta") for name, n in zip("qkv", (Q_HEADS, HEADS, HEADS), strict=True)}
MORE_KEYS = {name: T(1, HEADS, 7, WIDTH) for name in "kv"}


def attention(at: Place, **changes: Any) -> None:
    q, k, v = numbers(1, Q_HEADS, 4, WIDTH), *numbers(2, 1, HEADS, 4, WIDTH)
    am.attention(**{"q": q, "k": k, "v": v, "mesh": at.mesh, "layout": am.Contiguous()} | changes)


def shards(tokens: int, width: int = WIDTH) -> dict[str, Tensor]:
    return {name: T(1, n, tokens, width) for name, n in zip("qkv", (Q_HEADS, HEADS, HEADS), strict=True)}


def dtensors(at: Place, **changes: Any) -> None:
    """What is changed is told by a word where it takes DTensors to say it."""
    from torch.distributed.tensor import Shard, distribute_tensor

    axis = at.mesh[next(name for name in AXES if at.mesh[name].size() > 1)]
    given = {n: distribute_tensor(numbers(1, HEADS, 4 * axis.size(), WIDTH), axis, [Shard(2)]) for n in "qkv"}
    for name in [name for name, x in changes.items() if x == "plain"]:
        changes[name] = given[name].to_local()
    if changes.pop("placed", None) == "by heads":
        changes |= {
            n: distribute_tensor(numbers(1, HEADS, 4, WIDTH), axis, [Shard(1)], src_data_rank=None) for n in "qkv"
        }
    am.attention(**given | {"layout": am.Contiguous()} | changes)


ON_ONE_RANK: Table = {
    attention: [
        ({"q": T(12, 4, 4)}, ShapeError, r"attention q: expected 4 dims .*, given shape \(12, 4, 4\)\. Fix: add"),
        ({"k": [1, 2]}, DtypeError, r"attention k: expected a tensor of floats, given list\. Fix: use torch"),
        ({"v": None}, DtypeError, r"attention v: expected a tensor of floats, given NoneType"),
        ({"q": T(2, 12, 4, 4)}, ShapeError, r"one batch size, given q \(2, 12, 4, 4\), k .* Fix: expand"),
        ({"v": T(1, 6, 3, 4)}, ShapeError, r"k and v with the same heads and length, given q .* Fix: pair"),
        ({"q": T(1, 12, 4, 5)}, ShapeError, r"q and k of one width, given q \(1, 12, 4, 5\), .* Fix: project"),
        ({"q": T(1, 7, 4, 4)}, ShapeError, r"query heads a multiple of key heads, given q \(1, 7, .*: group"),
        ({"q": T(1, 12, 4, 4).half()}, DtypeError, r"one dtype of .*, given q float16, k float32, .* Fix: cast"),
        (INTS, DtypeError, r"one dtype of float64, .*, given q int32, k int32, v int32\. Fix: cast"),
        ({"q": T(1, 12, 4, 4).to_sparse()}, DtypeError, r"q: expected a dense tensor, given torch.sparse_coo"),
        (DOUBLES, MeshError, r"the same call on every rank, given:\n(.*\n)*.*torch.float64"),
        (NOWHERE, MeshError, r"attention: expected the same .*:\n    ranks  device\n(.*\n)*.*  meta\n"),
        ({"v": T(1, 6, 4, 4, device="meta")}, DeviceError, r"one device, given q cpu, k cpu, v meta\. Fix: move"),
        (
            {"k": T(1, 6, 2, 4), "v": T(1, 6, 2, 4)},
            ShapeError,
            r"shards of Contiguous\(\) of key_length \d+: \[.*, given \[.*2.*\], \d+ in all\. Fix: shard",
        ),
        (shards(2), ShapeError, r"of length \d+: \[.*tokens by shard, given \[.*2.*\], \d+ in all\. Fix: shard with"),
        (shards(4, 6), MeshError, r"ranks  q (.*\n)*.*\[1, 12, 6\]"),
        ({"v": LEARNED.expand(1, 6, 4, 4)}, MeshError, r"ranks  gradients\n(.*\n)*.*\['v'\]"),
        ({"checked": 0, "length": 8}, ArgumentError, r"attention checked: expected None, True or False, given 0\. Fix"),
        ({"scale": "big"}, DtypeError, r"attention scale: expected None, 0 or a number .*, given 'big' of type"),
        ({"scale": 0.7}, MeshError, r"the same call on every rank, given:\n    ranks  scale\n(.*\n)*.*  0.7\n"),
        (
            {"softcap": 0.0},
            DtypeError,
            r"attention softcap: expected None or a number .*, given 0\.0 of type float\. Fix",
        ),
        ({"softcap": float("inf")}, DtypeError, r"attention softcap: expected None or a number .*, given inf of type"),
        (
            {"key_lengths": [1]},
            DtypeError,
            r"attention key_lengths: expected a tensor of torch.int64, given list\. Fix",
        ),
        (
            {"key_lengths": torch.tensor([1, 2])},
            ShapeError,
            r"key_lengths: expected shape \(1,\), .*given shape \(2,\)",
        ),
        (
            {"key_lengths": torch.tensor([-1])},
            ShapeError,
            r"key_lengths: expected numbers of 0 or more, given -1\. Fix",
        ),
        (
            {"key_lengths": NO_VALUES},
            DeviceError,
            r"key_lengths: expected a tensor with values, given one on the meta d",
        ),
        ({"key_lengths": torch.tensor([3]).to_sparse()}, DtypeError, r"attention key_lengths: expected a dense tensor"),
        ({"key_lengths": torch.tensor([3])}, MeshError, r"ranks  key_lengths\n(.*\n)*.*\[3\]\n"),
        ({"softcap": 30}, MeshError, r"the same call on every rank, given:\n    ranks  softcap\n(.*\n)*.*  30\n"),
        ({"mask": am.Causal}, MaskError, r"attention mask: expected Full.*, given Causal itself\. Fix: call it"),
        ({"mask": am.Causal()}, MeshError, r"ranks  mask\n(.*\n)*.*Causal\(\)\n"),
        ({"mask": T(4, 4)}, MaskError, r"attention mask: .*, given Tensor\. Fix: use Full\(\) for no mask; say"),
        ({"mask": am.Full() & am.Documents((2, 3))}, MeshError, r"ranks  mask\n(.*\n)*.*Documents\(\[2, 3\]\)\n"),
        ({"layout": "zigzag"}, LayoutError, r"attention layout: expected .auto., Contiguous.*, given 'zigzag'\. Fix"),
        ({"layout": None}, LayoutError, r"attention layout: expected the layout of the shards of \d ranks, given None"),
        ({"layout": "best"}, LayoutError, r'attention layout: expected "auto", Contiguous.*given .best.'),
        ({"layout": "auto"}, LayoutError, r'attention layout: expected mask= beside layout="auto", given no mask'),
        ({"layout": "auto", "mask": am.Full()}, MeshError, r"ranks  mask .*layout .*\n(.*\n)*.* auto "),
        ({"key_layout": am.Striped}, LayoutError, r"attention key_layout: expected .*Striped'>\. Fix: make one"),
        ({"layout": am.Striped(2)}, MeshError, r"ranks  layout +key_layout\n(.*\n)*.*Striped\(block=2\)"),
        ({"exchange": "tree"}, KernelError, r"attention exchange: expected one of auto, bulk, .*given 'tree'"),
        ({"exchange": ["ring"]}, KernelError, r"attention exchange: expected one of .*, given \['ring'\]"),
        ({"exchange": "ring"}, MeshError, r"ranks  exchange\n(.*\n)*.*  ring\n"),
        ({"kernel": "fast"}, KernelError, r"kernel: expected one of auto, .*, given 'fast'\. Fix: leave"),
        ({"kernel": "cuda"}, KernelError, r"kernel cuda: expected tensors that it supports, given others"),
        ({"kernel": "reference"}, MeshError, r"ranks  kernel\n(.*\n)*.*  reference\n"),
        ({"length": "ten"}, ShapeError, r"attention length: expected a whole number, given 'ten'\. Fix: count"),
        ({"length": -1}, ShapeError, r"attention length: expected a whole number, given -1\. Fix: count"),
        ({"length": True}, ShapeError, r"attention length: expected a whole number, given True\. Fix: count"),
        ({"length": 99}, MeshError, r"ranks  length\n(.*\n)*.*  99\n"),
        ({"key_length": 2.5}, ShapeError, r"attention key_length: expected a whole number, given 2.5\. Fix"),
        ({"sinks": T(3)}, ShapeError, r"attention sinks: expected shape \(12,\), given shape \(3,\)\. Fix: give"),
        ({"sinks": [0.0] * 12}, DtypeError, r"attention sinks: expected a tensor of floats, given list"),
        ({"sinks": T(12)}, MeshError, r"ranks  sinks\n(.*\n)*.*  \[12\]\n"),
        ({"checked": "yes"}, ArgumentError, r"attention checked: expected None, True or False, given 'yes'"),
        ({"dropout_p": 0.1}, KernelError, r"exact softmax attention under .*, given dropout_p=0.1\. Fix: leave it"),
        ({"mesk": 0}, ArgumentError, r"attention: expected the arguments of its signature, given mesk=0\. Fix"),
    ],
    dtensors: [
        ({"k": "plain"}, MeshError, r"q, k and v as DTensors of one mesh and one placement, given k Tensor"),
        ({"q": "plain"}, MeshError, r"q, k and v as DTensors of one mesh and one placement, given q Tensor"),
        ({"layout": am.Zigzag()}, LayoutError, r"expected layout=Contiguous\(\), .*, given Zigzag\(\)\. Fix: leave"),
        ({"key_layout": am.Striped()}, LayoutError, r"expected key_layout=Contiguous\(\), .*, given Striped.*: leave"),
        ({"placed": "by heads"}, LayoutError, r"expected S\(2\) along axis \w+, given S\(1\)\. Fix: .*redistribute"),
        ({"mesh": "cpu"}, MeshError, r"attention mesh: expected the DTensors' own mesh, given cpu beside"),
        ({"scale": "big"}, DtypeError, r"attention scale: expected None, 0 or a number .*, given 'big' of type"),
    ],
}

ON_ALL_RANKS: Table = {
    attention: [
        ({"mesh": "cuda"}, MeshError, r"mesh: expected a DeviceMesh or None, given str\. Fix: make one"),
        (
            {"length": 9, "key_length": 8},
            ShapeError,
            r"length 9: \[5, 4\] tokens by shard, given \[4, 4\]",
        ),
        (
            {"mask": am.Full() & am.Documents((3, 4))},
            MaskError,
            r"documents that add up to 8 tokens, given 7 tokens",
        ),
        (
            MORE_KEYS,
            ShapeError,
            r"given 8 queries, 14 keys and the default .* Fix: pass mask=am.Full\(\)",
        ),
        (MORE_KEYS | {"key_length": 14}, ShapeError, r"given 8 queries, 14 keys and the default mask"),
        (
            {"layout": None},
            LayoutError,
            r"attention layout: expected the layout of the shards of 2 ranks, given None\. Fix: pass "
            r"layout=am.Zigzag\(\) if you sharded with am.shard\(..., layout=am.Zigzag\(\)\), am.Contiguous\(\) for "
            r"consecutive shards\.",
        ),
        ({"layout": None, "length": 8, "checked": False}, LayoutError, r"of the shards of 2 ranks"),
    ],
}
