"""One rank is given a bad argument: all raise the same error, which tells what is wrong, and all can go on.

A row of the table is a call, what one rank alone is given instead of something good, and what every rank has to say.
The last rows are of functions that ask nobody, or that nobody could be asked about: a mesh is what ranks ask each other
by. There a bad thing on one rank is that rank's own error, and all are given it.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache as once
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import attnmesh as am
from attnmesh import errors
from attnmesh.errors import (
    ArgumentError,
    ClusterError,
    DeviceError,
    DtypeError,
    KernelError,
    LayoutError,
    MaskError,
    MeshError,
    ShapeError,
    StoreError,
)
from attnmesh.guard.agreement import Agreement
from attnmesh.mesh.axes import Mesh
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.mesh_problems import named_mesh
from tests.support.pool import Pool, on_each_rank
from tests.support.problems import numbers
from tests.support.tolerances import FLOAT32_SUMS

T = torch.zeros
Q_HEADS, HEADS, WIDTH, TOKENS = 12, 6, 4, 10
SIZES: dict[str, Any] = {
    "batch": 1,
    "kv_heads": HEADS,
    "head_dim": WIDTH,
    "capacity": 32,
    "block": 4,
    "dtype": torch.float32,
}
LEARNED = T(1, HEADS, 1, WIDTH, requires_grad=True)
NO_VALUES = torch.empty(1, dtype=torch.int64, device="meta")
INTS = {name: T(1, HEADS, 4, WIDTH, dtype=torch.int32) for name in "qkv"}
DOUBLES = {name: T(1, HEADS, 4, WIDTH, dtype=torch.float64) for name in "qkv"}
PADDED = torch.arange(40)[None] > 2
NOWHERE = {name: T(1, n, 4, WIDTH, device="meta") for name, n in zip("qkv", (Q_HEADS, HEADS, HEADS), strict=True)}


def tokens(indices: Any, block: int = 1) -> am.Selection:
    """A selection of one query, or of several."""
    x = torch.tensor(indices, dtype=torch.float32 if isinstance(indices, float) else torch.int32)
    return am.Selection(x.reshape(1, 1, -1 if x.ndim > 1 else 1, x.shape[-1] if x.ndim else 1), block)


@dataclass(frozen=True)
class Place:
    """Where a rank makes its call."""

    mesh: DeviceMesh
    folder: Path

    @property
    def rank(self) -> int:
        return dist.get_rank()


# --- calls that are fine, but for what is changed ---


def attention(at: Place, **changes: Any) -> None:
    q, k, v = numbers(1, Q_HEADS, 4, WIDTH), *numbers(2, 1, HEADS, 4, WIDTH)
    am.attention(**{"q": q, "k": k, "v": v, "mesh": at.mesh, "layout": am.Contiguous()} | changes)


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


def new_cache(at: Place, **changes: Any) -> am.KVCache:
    return am.KVCache(**SIZES | {"mesh": at.mesh} | changes)


def filled(at: Place) -> am.KVCache:
    """It has been appended to, and is asked about all the same."""
    cache = new_cache(at, checked=True)
    cache.append(*numbers(2, 1, HEADS, TOKENS, WIDTH))
    return cache


def append(at: Place, **changes: Any) -> None:
    k, v = numbers(2, 1, HEADS, 1, WIDTH)
    filled(at).append(**{"k": k, "v": v} | changes)


def append_latents(at: Place, **changes: Any) -> None:
    cache = new_cache(at, checked=True, values="prefix")
    cache.append(**{"k": numbers(1, HEADS, 1, WIDTH)} | changes)


def append_index_keys(at: Place, **changes: Any) -> None:
    cache = new_cache(at, checked=True, values="none")
    cache.append(**{"k": numbers(1, HEADS, 1, WIDTH)} | changes)


def decode_index_keys(at: Place, alone: bool = False) -> None:
    cache = new_cache(at, checked=True, values="none")
    cache.append(numbers(1, HEADS, 1, WIDTH))
    am.decode(numbers(1, Q_HEADS, 1, WIDTH), cache if alone else filled(at))


def append_shard(at: Place, **changes: Any) -> None:
    cache = filled(at)
    k, v = numbers(2, 1, HEADS, 2, WIDTH)
    positions = TOKENS + torch.tensor([0, 1]) + 2 * at.rank
    cache.append_shard(**{"k": k, "v": v, "positions": positions} | changes)


def truncate(at: Place, length: Any = 7) -> None:
    filled(at).truncate(length)


def reorder(at: Place, batch_index: Any = torch.tensor([0])) -> None:  # noqa: B008
    filled(at).reorder(batch_index)


def reserve(at: Place, capacity: Any = 40) -> None:
    filled(at).reserve(capacity)


def save(at: Place, path: str = "good") -> None:
    if path == "below a file":
        (at.folder / path).touch()
        path = f"{path}/folder"
    filled(at).save(at.folder / path)


def load(at: Place, folder: str = "good", **changes: Any) -> None:
    filled(at).save(at.folder / "good")
    am.KVCache.load(spoiled(at.folder / "good", at.folder / folder), at.mesh, **changes)


def spoiled(good: Path, bad: Path) -> Path:
    """A copy that is what its name says."""
    if bad.name in ("good", "missing"):
        return bad
    shutil.copytree(good, bad)
    said = json.loads((bad / "cache.json").read_text())
    match bad.name:
        case "foreign":
            (bad / "cache.json").write_text('{"format": "another"}')
        case "of another version":
            (bad / "cache.json").write_text(json.dumps(said | {"version": 99}))
        case "of no size":
            (bad / "cache.json").write_text(json.dumps(said | {"length": 1 << 30}))
        case "without its files":
            for file in bad.rglob("*.safetensors"):
                file.unlink()
        case "damaged":
            for file in bad.rglob("*.safetensors"):
                said = file.read_bytes()
                file.write_bytes(said[:-8] + bytes(byte ^ 0x55 for byte in said[-8:]))
    return bad


def decode(at: Place, **changes: Any) -> None:
    given = {"q": numbers(1, Q_HEADS, 1, WIDTH), "cache": filled(at)}
    am.decode(**given | changes)


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


def measure(at: Place, **changes: Any) -> None:
    am.Cluster.measure(at.mesh, **changes)


def init_mesh(at: Place, **changes: Any) -> None:
    given = {"device_type": "cpu", "shape": Shape(1, 1, dist.get_world_size()), "q_heads": 4, "kv_heads": 2}
    am.init_mesh(**given | changes)


def plan_init_mesh(at: Place, device_type: Any = "cpu", hosts: int = 1) -> None:
    cluster = am.Cluster.preset("a100x4", hosts=hosts, ranks=dist.get_world_size())
    am.plan(am.Workload(4, 2, 64, 4096), cluster)[0].init_mesh(device_type)


# --- of transformers ---


@once
def model(attention: str = "attnmesh") -> Any:
    from tests.support import families

    return families.model("llama", attention)


def prompt(length: int = 40, batch: int = 1) -> Tensor:
    return torch.randint(2, 97, (batch, length), generator=torch.Generator().manual_seed(0))


def sharded_cache(at: Place, **changes: Any) -> Any:
    import attnmesh.hf as hf

    return hf.ShardedCache(**{"config": model().config, "mesh": at.mesh} | changes)


def full_cache(at: Place) -> Any:
    """After a prompt, and asked about at every call."""
    import attnmesh.hf as hf

    cache = sharded_cache(at, checked=True)
    hf.prefill(model(), prompt(), cache)
    return cache


def named(changes: dict[str, Any]) -> dict[str, Any]:
    """With models and caches for their names, which are not to be made where nobody needs them."""
    from transformers import DynamicCache

    known = {"a stock model": lambda: model("sdpa"), "a stock cache": DynamicCache}
    return {name: known[x]() if isinstance(x, str) and x in known else x for name, x in changes.items()}


def generate(at: Place, **changes: Any) -> None:
    import attnmesh.hf as hf

    hf.generate(**{"model": model(), "input_ids": prompt(), "mesh": at.mesh, "max_new_tokens": 2} | named(changes))


def prefill(at: Place, **changes: Any) -> None:
    import attnmesh.hf as hf

    hf.prefill(**{"model": model(), "input_ids": prompt(), "cache": sharded_cache(at)} | changes)


def crop(at: Place, tokens_to_remove: Any = -3) -> None:
    full_cache(at).crop(tokens_to_remove)


def reorder_cache(at: Place, beam_idx: Any = torch.tensor([0])) -> None:  # noqa: B008
    full_cache(at).reorder_cache(beam_idx)


def shard_batch(at: Place, **changes: Any) -> None:
    import attnmesh.hf as hf

    batch = changes.pop("batch", {"input_ids": prompt(), "labels": prompt()} | changes)
    hf.shard_batch(batch, at.mesh, **{"layout": changes["layout"]} if "layout" in changes else {})


def forward(at: Place, full: bool = False, **changes: Any) -> None:
    cache = full_cache(at) if full else sharded_cache(at)
    with torch.no_grad():
        model()(prompt(1), past_key_values=cache, **{"use_cache": True} | changes)


def forward_again(at: Place, **changes: Any) -> None:
    forward(at, full=True, **changes)


def prefill_again(at: Place, **changes: Any) -> None:
    """Another turn in shards, where nobody asks about new tokens any more."""
    import attnmesh.hf as hf

    cache, ids = sharded_cache(at), prompt(160)
    hf.prefill(model(), ids[:, :33], cache)
    with torch.no_grad():
        model()(ids[:, 32:64], past_key_values=cache, use_cache=True)
    with mock.patch.object(model(), "forward", partial(model().forward, **changes)):
        hf.prefill(model(), ids, cache)


def forward_anew(at: Place, **changes: Any) -> None:
    """Other sequences, in a cache that was emptied: room is made anew for them."""
    cache = sharded_cache(at)
    with torch.no_grad():
        model()(prompt(4), past_key_values=cache, use_cache=True)
        cache.crop(-4)
        model()(prompt(4, batch=2), past_key_values=cache, use_cache=True, **changes)


def save_all(at: Place, **changes: Any) -> None:
    full_cache(at).save(at.folder / "all", **changes)


def recover_all(at: Place, **changes: Any) -> None:
    import attnmesh.hf as hf

    hf.ShardedCache.recover(**{"cache": full_cache(at), "config": model().config, "mesh": at.mesh} | changes)


def recover(at: Place, caches: Any = None) -> None:
    given = {None: [filled(at)], "of two": [filled(at), am.KVCache(None, **SIZES)]}
    am.recover(given.get(caches, caches), at.mesh)


def train(at: Place, **changes: Any) -> None:
    import attnmesh.hf as hf

    model()(**hf.shard_batch({"input_ids": prompt(), "labels": prompt()}, at.mesh), **changes)


# --- that ask nobody ---


def shard(at: Place, **changes: Any) -> None:
    am.shard(**{"x": numbers(1, 2, 4, 3), "mesh": at.mesh, "layout": am.Contiguous()} | changes)


def mesh_shape(_: Place, **changes: Any) -> None:
    am.mesh_shape(**{"ranks": 4, "q_heads": 4, "kv_heads": 2} | changes)


def workload(_: Place, **changes: Any) -> None:
    am.Workload(**{"q_heads": 4, "kv_heads": 2, "head_dim": 64, "length": 4096} | changes)


def preset(_: Place, name: Any = "a100x4", **changes: Any) -> None:
    am.Cluster.preset(name, **changes)


def plan(_: Place, **changes: Any) -> None:
    am.plan(**{"workload": am.Workload(4, 2, 64, 4096), "cluster": am.Cluster.preset("a100x4")} | changes)


def set_deadline(_: Place, seconds: Any) -> None:
    am.set_deadline(seconds)


# --- what one rank is given, and what all say ---

Table = dict[Callable[..., Any], list[tuple[dict[str, Any], type[Exception], str]]]

ALIKE: Table = {
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
            {"k": T(1, 6, 3, 4), "v": T(1, 6, 3, 4)},
            ShapeError,
            r"shards of Contiguous\(\) of key_length \d+: \[4, .*, given \[.*3.*\], \d+ in all\. Fix: shard",
        ),
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
        ({"key_layout": am.Striped}, LayoutError, r"attention key_layout: expected .*Striped'>\. Fix: make one"),
        ({"layout": am.Striped(2)}, MeshError, r"ranks  layout +key_layout\n(.*\n)*.*Striped\(block=2\)"),
        ({"exchange": "tree"}, KernelError, r"attention exchange: expected one of auto, bulk, .*given 'tree'"),
        ({"exchange": ["ring"]}, KernelError, r"attention exchange: expected one of .*, given \['ring'\]"),
        ({"exchange": "ring"}, MeshError, r"ranks  exchange\n(.*\n)*.*  ring\n"),
        ({"kernel": "fast"}, KernelError, r"kernel: expected one of auto, .*, given 'fast'\. Fix: leave"),
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
    new_cache: [
        ({"batch": 0}, ShapeError, r"KVCache batch: expected a whole number, 1 or more, given 0\. Fix: "),
        ({"kv_heads": True}, ShapeError, r"KVCache kv_heads: expected a whole number, 1 or more, given True"),
        ({"head_dim": "4"}, ShapeError, r"KVCache head_dim: expected a whole number, 1 or more, given '4'"),
        ({"value_dim": -1}, ShapeError, r"KVCache value_dim: expected a whole number, 1 or more, given -1"),
        ({"capacity": 1.5}, ShapeError, r"KVCache capacity: expected a whole number, 1 or more, given 1.5"),
        ({"capacity": 33}, MeshError, r"KVCache: expected the same call .*:\n    ranks  capacity\n(.*\n)*.*  33"),
        ({"block": None}, ShapeError, r"KVCache block: expected a whole number, 1 or more, given None"),
        ({"dtype": "float32"}, DtypeError, r"KVCache dtype: expected one of .*, given 'float32'\. Fix: pass"),
        ({"dtype": torch.int8}, DtypeError, r"KVCache dtype: expected one of .*, given torch.int8\. Fix: pass"),
        (
            {"values": "first"},
            ArgumentError,
            r"KVCache values: expected one of separate, prefix, none, given 'first'\. Fix: ",
        ),
        ({"values": "none"}, MeshError, r"KVCache: expected the same call .*:\n    ranks  .*values\n(.*\n)*.*none"),
        (
            {"values": "none", "value_dim": 4},
            ShapeError,
            r"KVCache value_dim: expected None for keys alone, given 4\. Fix: leave out values",
        ),
        ({"values": "prefix"}, MeshError, r"KVCache: expected the same call .*:\n    ranks  values\n(.*\n)*.*prefix"),
        (
            {"values": "prefix", "value_dim": 5},
            ShapeError,
            r"KVCache value_dim: expected no more than head_dim 4 for a prefix of the keys, given 5\. Fix: ",
        ),
        ({"device": "foo"}, DeviceError, r"KVCache device: expected a device that PyTorch knows, given 'foo'"),
        ({"device": "meta"}, MeshError, r"KVCache: expected the same call .*:\n    ranks  device\n(.*\n)*.*meta"),
        ({"device": "xpu"}, DeviceError, r"KVCache device: expected a device that is there, given 'xpu' \(.*XPU"),
        ({"checked": 1}, ArgumentError, r"KVCache checked: expected None, True or False, given 1\. Fix: leave"),
        ({"checked": False}, MeshError, r"KVCache: expected the same .*:\n    ranks  checked\n(.*\n)*.*False"),
    ],
    append: [
        ({"k": T(6, 1, 4)}, ShapeError, r"append k: expected shape \(1, 6, tokens, 4\), given \(6, 1, 4\)\. Fix"),
        ({"v": T(1, 5, 1, 4)}, ShapeError, r"append v: expected shape \(1, 6, tokens, 4\), given \(1, 5, 1, 4\)"),
        ({"k": T(1, 1, 6, 4)}, ShapeError, r"append k: .*Fix: if these are \(batch, length, heads, dim\), pass x"),
        ({"v": T(1, 6, 2, 4)}, ShapeError, r"append: expected k and v of the same tokens, given 1 and 2 tokens"),
        ({"k": [1.0]}, DtypeError, r"append k: expected a tensor of floats, given list\. Fix: use torch"),
        ({"v": None}, ArgumentError, r"append v: expected a tensor of values, given None\. Fix: pass v, or make"),
        ({"k": T(1, 6, 1, 4).half()}, DtypeError, r"append: expected one dtype of .*, given k float16, v float32"),
        (
            {"k": T(1, 6, 1, 4).double(), "v": T(1, 6, 1, 4).double()},
            DtypeError,
            r"append k: expected torch.float32 on cpu, given torch.float64 on cpu\. Fix: call \.to",
        ),
        ({"k": LEARNED}, KernelError, r"append k: expected a tensor without gradients, given one with requires_grad"),
        ({"k": T(1, 6, 1, 4)}, MeshError, r"append: expected the same call .*:\n    ranks  k\n(.*\n)*.*of digest"),
        ({"k": T(1, 6, 30, 4), "v": T(1, 6, 30, 4)}, ShapeError, r"append: expected room for the new tokens, given 10"),
        (
            {"token_mask": T(1, 1)},
            ShapeError,
            r"append token_mask: expected torch.bool \(1, 1\), given torch.float32 \(1, 1\)",
        ),
        (
            {"token_mask": [True]},
            ShapeError,
            r"append token_mask: expected torch.bool \(1, 1\), given list\. Fix: pass",
        ),
        (
            {"token_mask": T(1, 1) > 0},
            MeshError,
            r"append: expected the same call .*:\n    ranks  token_mask\n(.*\n)*.*bool",
        ),
    ],
    append_latents: [
        ({"v": T(1, 6, 1, 4)}, ArgumentError, r"append v: expected None, for values are columns of k, given \(1, 6, 1"),
        ({"k": T(1, 6, 1, 3)}, ShapeError, r"append k: expected shape \(1, 6, tokens, 4\), given \(1, 6, 1, 3\)"),
    ],
    append_index_keys: [
        ({"v": T(1, 6, 1, 4)}, ArgumentError, r"append v: expected None in a cache of keys, given \(1, 6, 1"),
        ({"k": T(1, 6, 1, 3)}, ShapeError, r"append k: expected shape \(1, 6, tokens, 4\), given \(1, 6, 1, 3\)"),
    ],
    decode_index_keys: [
        ({"alone": True}, ArgumentError, r"decode cache: expected a cache with values, given one of keys alone\. Fix"),
    ],
    append_shard: [
        ({"k": T(1, 5, 2, 4)}, ShapeError, r"append_shard k: expected shape \(1, 6, tokens, 4\), given \(1, 5,"),
        ({"positions": [10, 11]}, DtypeError, r"append_shard positions: expected .*int64, given list\. Fix"),
        ({"positions": T(2)}, DtypeError, r"append_shard positions: expected .*int64, given torch.float32"),
        (
            {"positions": torch.arange(3)},
            ShapeError,
            r"append_shard positions: expected shape \(2,\), one position a token, given",
        ),
        (
            {"positions": torch.tensor([20, 21])},
            LayoutError,
            r"append_shard: expected positions from 10 to 1\d, each on one rank, given \d positions with gaps",
        ),
        (
            {"token_mask": T(2, 4) > 0},
            ShapeError,
            r"append_shard token_mask: expected torch.bool \(1, 4\), given torch.bool",
        ),
        ({"token_mask": T(1, 9) > 0}, MeshError, r"append_shard: expected the same .*:\n    ranks  .*padding.*\n"),
    ],
    truncate: [
        ({"length": 11}, ShapeError, r"truncate: expected a length from 0 to 10, given 11 of type int\. Fix: pass"),
        ({"length": -1}, ShapeError, r"truncate: expected a length from 0 to 10, given -1 of type int\. Fix: pass"),
        ({"length": "x"}, ShapeError, r"truncate: expected a length from 0 to 10, given 'x' of type str\. Fix"),
        ({"length": 3}, MeshError, r"truncate: expected the same call .*:\n    ranks  to\n(.*\n)*.*  3\n"),
    ],
    reorder: [
        ({"batch_index": [0]}, DtypeError, r"reorder: expected a tensor of torch.int64, given list\. Fix: pass"),
        ({"batch_index": T(1)}, DtypeError, r"reorder: expected a tensor of torch.int64, given torch.float32\. Fix"),
        ({"batch_index": torch.tensor([1])}, ShapeError, r"reorder: expected a number of a sequence .*given \[1\]"),
        ({"batch_index": torch.tensor([0, 0])}, MeshError, r"reorder: expected the same .*\n(.*\n)*.*  \[0, 0\]\n"),
    ],
    reserve: [
        ({"capacity": "many"}, ShapeError, r"KVCache capacity: expected a whole number, .* given 'many'\. Fix"),
        ({"capacity": 41}, MeshError, r"reserve: expected the same call .*:\n    ranks  capacity\n(.*\n)*.*  41\n"),
    ],
    save: [
        (
            {"path": "below a file"},
            StoreError,
            r"save: expected a folder that can be written to, given '.*below a file",
        ),
    ],
    load: [
        ({"folder": "missing"}, StoreError, r"load: expected a folder that KVCache.save wrote, given .*missing \("),
        ({"folder": "foreign"}, StoreError, r"load: expected a folder that KVCache.save wrote, given .*foreign \("),
        (
            {"folder": "of another version"},
            StoreError,
            r"load: expected a cache of version \d, given version 99 in .*\. F",
        ),
        ({"folder": "of no size"}, StoreError, r"load: expected the sizes of a cache, given .*length=1073741824"),
        ({"folder": "without its files"}, StoreError, r"load: expected .*, given .*without its files.*\. Fix: "),
        ({"folder": "damaged"}, StoreError, r"load: expected files as they were written, given damage in '.*Fix: re"),
        ({"capacity": 40}, MeshError, r": expected the same call .*:\n    ranks  capacity\n(.*\n)*.*  40\n"),
        ({"capacity": 1 << 45}, StoreError, r"load: expected at most this device's .* GB, given .* GB for a capacity"),
        ({"device": "foo"}, DeviceError, r"load device: expected a device that PyTorch knows, given 'foo'\. Fix"),
    ],
    decode: [
        ({"q": [1.0]}, DtypeError, r"decode q: expected a tensor of floats, given list\. Fix: use torch"),
        ({"q": T(12, 1, 4)}, ShapeError, r"decode q: expected shape \(1, 'heads', 'length', 4\), given \(12, 1, 4\)"),
        ({"q": T(1, 12, 0, 4)}, ShapeError, r"decode q: expected shape .*, given \(1, 12, 0, 4\)\. Fix: pass"),
        (
            {"q": T(1, 1, 12, 4)},
            ShapeError,
            r"given 1 query heads on 6 .*Fix: if these are \(batch, length, heads, dim\)",
        ),
        ({"q": T(1, 7, 1, 4)}, ShapeError, r"query heads a multiple of key heads, given 7 query heads on 6"),
        ({"q": T(1, 12, 1, 4).double()}, DtypeError, r"decode q: expected torch.float32 on cpu, given torch.float64"),
        ({"q": T(1, 12, 11, 4)}, ShapeError, r"as many queries as tokens in .*, given 11 queries and 10 of 32"),
        ({"q": T(1, 12, 1, 4)}, MeshError, r"decode: expected the same call .*:\n    ranks  q\n(.*\n)*.*of digest"),
        (
            {"q": T(1, 12, 1, 4, requires_grad=True)},
            KernelError,
            r"decode q: expected a tensor without gradients, given one with requires_grad=True\. Fix: decode under",
        ),
        ({"mask": am.Full}, MaskError, r"decode mask: expected Full.*, given Full itself\. Fix: call it: Full"),
        (
            {"mask": am.Full() & am.Documents((4, 7))},
            MaskError,
            r"decode mask: expected documents that add up to 10 tokens, ",
        ),
        ({"mask": am.Window(2)}, MeshError, r"decode: .*:\n    ranks  mask\n(.*\n)*.*  Window\(2\)\n"),
        ({"scale": float("nan")}, DtypeError, r"decode scale: expected None, 0 or a number .*, given nan of type"),
        ({"scale": 0.7}, MeshError, r"decode: .*:\n    ranks  scale\n(.*\n)*.*  0.7\n"),
        (
            {"softcap": -1},
            DtypeError,
            r"decode softcap: expected None or a number .*, given -1 of type int\. Fix: pass",
        ),
        ({"key_lengths": torch.tensor([3], dtype=torch.int32)}, DtypeError, r"torch.int64, given torch.int32\. Fix"),
        (
            {"key_lengths": NO_VALUES},
            DeviceError,
            r"decode key_lengths: expected a tensor with values, given one on the m",
        ),
        (
            {"key_lengths": torch.tensor([3]).to_sparse()},
            DtypeError,
            r"decode key_lengths: expected a dense tensor, giv",
        ),
        (
            {"key_lengths": torch.tensor([99])},
            ShapeError,
            r"key_lengths: expected at most 10, the number of keys, given 99",
        ),
        ({"key_lengths": torch.tensor([3])}, MeshError, r"decode: .*:\n    ranks  key_lengths\n(.*\n)*.*\[3\]\n"),
        ({"softcap": 9.0}, MeshError, r"decode: .*:\n    ranks  softcap\n(.*\n)*.*  9.0\n"),
        ({"sinks": T(3)}, ShapeError, r"decode sinks: expected shape \(12,\), given shape \(3,\)\. Fix: give each"),
        ({"sinks": T(12)}, MeshError, r"decode: .*:\n    ranks  sinks\n(.*\n)*.*torch.float32 \[12\] of digest"),
        ({"merge": "ring"}, KernelError, r"decode merge: expected one of auto, tree, .*, given 'ring'\. Fix: use"),
        ({"merge": ["tree"]}, KernelError, r"decode merge: expected one of auto, tree, .*, given \['tree'\]\. Fix"),
        ({"output": "heads"}, MeshError, r"decode: .*:\n    ranks  output\n(.*\n)*.*  heads\n"),
        ({"output": "mine"}, KernelError, r"decode output: expected one of replicated, heads, given 'mine'\. Fix"),
        ({"merge": "direct"}, MeshError, r"decode: .*:\n    ranks  merge\n(.*\n)*.*  direct\n"),
        ({"reproducible": "yes"}, KernelError, r"decode reproducible: expected True or False, given 'yes'\. Fix"),
        (
            {"kernel": ["cpu"]},
            KernelError,
            r"kernel: expected one of auto, .*, given \['cpu'\]\. Fix: leave it",
        ),
        ({"kernel": "cuda"}, KernelError, r"kernel cuda: expected tensors that it supports, given others: "),
        ({"checked": "no"}, ArgumentError, r"decode checked: expected None, True or False, given 'no'\. Fix: leave"),
        (
            {"selected": T(1, 1, 1, 2).int()},
            DtypeError,
            r"decode selected: expected a Selection, given Tensor\. Fix: pass",
        ),
        ({"selected": tokens(1.5)}, DtypeError, r"selected indices: .* torch.int32, given torch.float32\. Fix: pass"),
        ({"selected": tokens([[1], [2]])}, ShapeError, r"selected indices: expected shape \(1, 1 or 6, 1, 1 or more\)"),
        (
            {"selected": tokens([])},
            ShapeError,
            r"decode selected indices: expected shape .*, given shape \(1, 1, 1, 0\)",
        ),
        ({"selected": tokens([10])}, ShapeError, r"selected indices: .*each once in a row, of 10 keys, given 10\. Fix"),
        (
            {"selected": tokens([3], 4)},
            ShapeError,
            r"selected indices: .*each once in a row, of 10 keys, given 3\. Fix",
        ),
        (
            {"selected": tokens([-1])},
            ShapeError,
            r"selected indices: expected indices of 0 or more, .*, given -1\. Fix",
        ),
        ({"selected": tokens([3, 3])}, ShapeError, r"selected indices: .*, given an index twice in a row\. Fix: fill"),
        ({"selected": tokens([3])}, MeshError, r"decode: .*:\n    ranks  .*selected\n(.*\n)*.*int32 \[1, 1, 1, 1\] of"),
        (
            {"selected": tokens([3]), "kernel": "native"},
            KernelError,
            r"decode selected with kernel: expected auto or reference, given native\. Fix: leave it",
        ),
        (
            {"selected": tokens([3]), "reproducible": True},
            KernelError,
            r"decode reproducible: expected no selected= beside reproducible=True, given a Selection\. Fix: leave",
        ),
        ({"dropout_p": 0.1}, KernelError, r"decode: expected exact softmax attention .*, given dropout_p=0.1\. Fix"),
        ({"mesk": 0}, ArgumentError, r"decode: expected the arguments of its signature, given mesk=0\. Fix: see"),
    ],
    merge_across: [
        ({"partial": None}, DtypeError, r"merge_across: expected a partial \(out, lse\), given NoneType\. Fix"),
        ({"out": [1.0]}, DtypeError, r"merge_across: expected a partial \(out, lse\), given Partial\. Fix: "),
        ({"out": T(1, 6, 3, 4).int()}, DtypeError, r"out in floats and lse in float32, .*given out torch.int"),
        ({"lse": T(1, 6, 3).half()}, DtypeError, r"out in floats and lse in float32, .*lse torch.float16\. Fix"),
        ({"lse": T(1, 6)}, ShapeError, r"merge_across: expected out \(batch, .*\(1, 6, 3, 4\) and \(1, 6\)\. "),
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
    measure: [
        ({"dtype": "float32"}, DtypeError, r"Cluster.measure dtype: .* one of .*, given 'float32'\. Fix: pass"),
        ({"dtype": torch.int8}, DtypeError, r"Cluster.measure dtype: .* one of .*, given torch.int8\. Fix"),
        ({"dtype": torch.float64}, MeshError, r"Cluster.measure: expected the same .*\n(.*\n)*.*torch.float64\n"),
    ],
    recover: [
        (
            {"caches": 5},
            DtypeError,
            r"recover: expected a list of caches, one per layer, given int\. Fix: pass \[cache\]",
        ),
        (
            {"caches": "of two"},
            MeshError,
            r"recover: expected caches of one mesh, given caches of 2 meshes\. Fix: pass",
        ),
    ],
    init_mesh: [
        ({"shape": Shape(1, 2, 4)}, MeshError, r"init_mesh: expected at most the world's \d ranks, given 1x2x4\. Fix"),
        (
            {"shape": (2, 1)},
            MeshError,
            r"init_mesh shape: expected \(heads, queries, keys\).*, given \(2, 1\)\. Fix",
        ),
        (
            {"shape": (1, 0, 2)},
            MeshError,
            r"init_mesh shape: expected .* each 1 or more, given \(1, 0, 2\)\. Fix",
        ),
        ({"shape": [1, True, 1]}, MeshError, r"init_mesh shape: expected .*, given \[1, True, 1\]\. Fix: pass"),
        ({"shape": (-1, -2, 1)}, MeshError, r"init_mesh shape: expected .*, given \(-1, -2, 1\)\. Fix: pass a tuple"),
        (
            {"shape": "1x1x2"},
            MeshError,
            r"init_mesh shape: expected .*, given '1x1x2'\. Fix: pass a tuple",
        ),
        ({"shape": None}, MeshError, r"init_mesh shape: expected .*, given None\. Fix: pass a tuple as \(1, 2, 2\)"),
        (
            {"shape": (1, 1, 1)},
            MeshError,
            r"init_mesh: .* same call .*:\n    ranks  shape\n(.*\n)*.*keys=1\)",
        ),
        ({"device_type": "foo"}, DeviceError, r"init_mesh device_type: expected a type of .*, given 'foo'\. Fix: "),
        ({"device_type": "cuda:0"}, DeviceError, r"init_mesh device_type: expected a type of .*, given 'cuda:0'\. F"),
        ({"q_heads": 8}, MeshError, r"init_mesh: expected the same call .*:\n    ranks  q_heads\n(.*\n)*.*  8\n"),
        ({"q_heads": 0}, MeshError, r"init_mesh: expected at least one of each, .*, given \d ranks, 0 query heads, 2"),
        ({"q_heads": 2, "kv_heads": 4}, MeshError, r"whole groups of heads, given \d ranks, 2 query heads, 4 key"),
    ],
    plan_init_mesh: [
        ({"hosts": 2}, MeshError, r"Plan.init_mesh: expected a world of \d ranks, given \d\. Fix: start"),
        ({"device_type": None}, DeviceError, r"Plan.init_mesh device_type: expected a type of .*, given None\. "),
    ],
}

OF_TRANSFORMERS: Table = {
    sharded_cache: [
        ({"config": "llama"}, KernelError, r"ShardedCache config: expected a configuration .*, given str\. "),
        ({"capacity": 0}, ShapeError, r"ShardedCache capacity: expected a whole number, 1 or more, given 0"),
        ({"block": "x"}, ShapeError, r"ShardedCache block: expected a whole number, 1 or more, given 'x'\."),
        ({"merge": "ring"}, KernelError, r"ShardedCache merge: expected one of auto, .*, given 'ring'\. Fix"),
        ({"merge": "tree"}, MeshError, r"ShardedCache: expected the same .*:\n    ranks  merge\n(.*\n)*.*tree"),
        ({"kernel": "fast"}, KernelError, r"kernel: expected one of auto, .*, given 'fast'\. Fix: leave"),
        ({"exchange": "tree"}, KernelError, r"ShardedCache exchange: expected one of auto, .* given 'tree'"),
        ({"checked": "no"}, ArgumentError, r"ShardedCache checked: expected None, True or False, given 'no'"),
        ({"reproducible": "yes"}, KernelError, r"ShardedCache reproducible: expected True or .* given 'yes'"),
    ],
    crop: [
        ({"tokens_to_remove": 3}, ShapeError, r"crop: expected 0 or a negative number, given 3\. Fix: pass a negative"),
        ({"tokens_to_remove": "x"}, ShapeError, r"crop: expected 0 or a negative number, given 'x'\. Fix: pass"),
    ],
    reorder_cache: [
        ({"beam_idx": [0]}, DtypeError, r"reorder: expected a tensor of torch.int64, given list\. Fix: pass"),
    ],
    generate: [
        ({"input_ids": "what?"}, DtypeError, r"generate input_ids: expected int64 token ids .*, given str\. Fix"),
        ({"input_ids": prompt(0)}, ShapeError, r"generate input_ids: expected at least one token, given an empty"),
        ({"input_ids": prompt(1) - 99}, ArgumentError, r"generate input_ids: expected tokens from 0 to 96, .* given -"),
        ({"input_ids": prompt(2049)}, ShapeError, r"generate input_ids: expected at most 2048 tokens, .*given 2049"),
        ({"input_ids": prompt(41)}, MeshError, r"generate: expected the same .*:\n    ranks  prompt\n(.*\n)*.*41\]"),
        ({"attention_mask": T(1, 1, 4, 4)}, ShapeError, r"generate attention_mask: expected 2D, .* given \(1, 1, 4"),
        (
            {"attention_mask": T(1, 40)},
            MaskError,
            r"generate attention_mask: expected no padding at the end .*padding",
        ),
        (
            {"attention_mask": T(1, 40).numpy()},
            DtypeError,
            r"generate attention_mask: expected a tensor, given ndarray",
        ),
        ({"cache": "a stock cache"}, KernelError, r"generate cache: expected a ShardedCache, given DynamicCache"),
        ({"model": torch.nn.ReLU()}, KernelError, r"generate: expected a causal language model .*given ReLU\. Fix"),
        (
            {"model": "a stock model"},
            KernelError,
            r"generate: expected a model with attn_implementation 'attnmesh', given 'sd",
        ),
        ({"max_time": 0.5}, ArgumentError, r"generate: expected options that work .*, given max_time=0.5\. Fix: "),
        ({"use_cache": False}, ArgumentError, r"generate: expected options that work .*, given use_cache=False\."),
        ({"position_ids": T(1)}, ArgumentError, r"generate: expected options of transformers.*, given position_ids"),
        ({"max_new_tokens": 3}, MeshError, r"generate: expected the same .*:\n    ranks  max_new_tokens\n(.*\n)*"),
        ({"checkpoint": Path("x")}, ArgumentError, r"generate checkpoint: expected an hf.Checkpoint, given PosixPath"),
        ({"checkpoint": True}, ArgumentError, r"generate checkpoint: expected an hf.Checkpoint, given bool\. Fix: "),
    ],
    prefill: [
        ({"input_ids": prompt().float()}, DtypeError, r"generate input_ids: expected int64 .*, given torch.float32"),
        ({"chunk_size": 7}, MeshError, r"generate: expected the same .*:\n    ranks  chunk_size\n(.*\n)*.*  7\n"),
    ],
    shard_batch: [
        ({"batch": "words"}, DtypeError, r"shard_batch: expected a mapping of names to tensors, given str\. "),
        ({"input_ids": [1, 2]}, DtypeError, r"shard_batch input_ids: expected token ids .*, given list\. Fix"),
        ({"input_ids": prompt(1)}, ShapeError, r"shard_batch input_ids: expected a sequence, .*\(1, 1\) on 2"),
        ({"labels": prompt(39)}, ShapeError, r"shard_batch labels: expected shape \(1, 40\), given \(1, 39\)"),
        ({"pixels": T(1)}, ArgumentError, r"shard_batch: expected some of input_ids, .*, given 'pixels'\. Fix"),
        ({"attention_mask": T(1, 40)}, MaskError, r"shard_batch labels: expected -100 at .*, given labels"),
        ({"num_items_in_batch": "all"}, DtypeError, r"shard_batch num_items_in_batch: expected a .*given 'all'"),
        ({"num_items_in_batch": 7}, MeshError, r"shard_batch: .*:\n    ranks  num_items_in_batch\n(.*\n)*.* 7"),
        ({"labels": prompt() * 0}, MeshError, r"shard_batch: .*:\n    ranks  labels\n(.*\n)*.*of digest"),
    ],
    forward: [
        ({"output_attentions": True}, KernelError, r"attnmesh.hf output_attentions: expected outputs without att"),
    ],
    forward_again: [
        ({"cu_seq_lens_q": T(3)}, KernelError, r"attnmesh.hf cu_seq_lens_q: expected .*given .*a tensor \(3,\)"),
        (
            {"use_cache": False, "position_ids": torch.arange(40)[None]},
            KernelError,
            r"use_cache: expected use_cache=True with a ShardedCache, given use_cache=False",
        ),
        (
            {"attention_mask": PADDED},
            MaskError,
            r"attention_mask: expected the padding of the cached tokens, given other",
        ),
    ],
    forward_anew: [
        ({"cu_seq_lens_q": T(3)}, KernelError, r"attnmesh.hf cu_seq_lens_q: expected .*given .*a tensor \(3,\)"),
    ],
    save_all: [
        (
            {"more": {"held": T(3)}},
            StoreError,
            r"save more: expected names other than held and recurrent\.\*, given held\. Fix: rename it",
        ),
        ({"more": [1]}, StoreError, r"save more: expected tensors by their names, given list\. Fix: pass a dict"),
    ],
    recover_all: [
        (
            {"cache": "x"},
            KernelError,
            r"ShardedCache.recover cache: expected a ShardedCache, given str\. Fix: pass the",
        ),
    ],
    prefill_again: [
        ({"cu_seq_lens_q": T(3)}, KernelError, r"attnmesh.hf cu_seq_lens_q: expected .*given .*a tensor \(3,\)"),
    ],
    train: [
        ({"output_attentions": True}, KernelError, r"attnmesh.hf output_attentions: expected outputs without att"),
        ({"output_router_logits": True}, KernelError, r"output_router_logits: expected no router loss on shards"),
    ],
}


ALONE: Table = {
    attention: [
        ({"mesh": "cuda"}, MeshError, r"mesh: expected a DeviceMesh or None, given str\. Fix: make one"),
    ],
    new_cache: [
        ({"mesh": [0, 1]}, MeshError, r"mesh: expected a DeviceMesh or None, given list\. Fix: make one"),
    ],
    decode: [
        ({"cache": None}, DtypeError, r"decode cache: expected a KVCache, given NoneType\. Fix: make one"),
    ],
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
    mesh_shape: [
        ({"ranks": 0}, MeshError, r"mesh_shape: expected at least one of each, .* given 0 ranks, 4 query heads"),
        ({"q_heads": "4"}, MeshError, r"mesh_shape: expected at least one of each, .* '4' query heads, 2 key heads"),
        ({"kv_heads": 3}, MeshError, r"whole groups of heads, given 4 ranks, 4 query heads, 3 key heads\. Fix: pass"),
    ],
    workload: [
        ({"q_heads": 3}, ShapeError, r"Workload: expected whole groups .*, given 3 query heads on 2 key heads\. Fix"),
        ({"length": 0}, ClusterError, r"Workload length: expected a whole number, 1 or more, given 0\. Fix: pass"),
        ({"dtype": "int8"}, DtypeError, r"Workload dtype: expected one of .*, given 'int8'\. Fix: name"),
        ({"phase": "dreaming"}, KernelError, r"Workload phase: expected one of training, .*, given 'dreaming'\. Fix"),
        ({"latent": 512}, ShapeError, r"Workload latent: expected two numbers of columns, given 512\. Fix: pass"),
        ({"latent": (0, 4)}, ClusterError, r"Workload latent: expected a whole number, 1 or more, given 0\. Fix: pass"),
        ({"latent": (8, 64)}, ShapeError, r"Workload latent: expected fewer rotated .*, given 64 of 64\. Fix: pass"),
        ({"mask": None}, MaskError, r"Workload mask: expected Full.*, given None\. Fix: use Full"),
    ],
    preset: [
        ({"name": "abacus"}, ClusterError, r"Cluster.preset: expected one of .*, given 'abacus'\. Fix: pass one"),
        ({"hosts": 0}, ClusterError, r"Cluster hosts: expected a whole number, 1 or more, given 0\. Fix: pass"),
        ({"ranks": 64}, ClusterError, r"expected at most 4 ranks a host, given 64 ranks a host\. Fix: take more hosts"),
    ],
    plan: [
        ({"workload": 7}, ClusterError, r"plan: expected a Workload and a Cluster, given int and Cluster\. Fix: call"),
        ({"cluster": None}, ClusterError, r"expected a Workload and a Cluster, given Workload and NoneType\. Fix"),
    ],
    set_deadline: [
        ({"seconds": -1}, MeshError, r"set_deadline: expected more than 0 seconds, or None, given -1\. Fix: pass"),
        ({"seconds": "soon"}, MeshError, r"set_deadline: expected more than 0 seconds, or None, given 'soon'\. Fix"),
    ],
}  # fmt: skip
"""Not counted as messages that are agreed on: there is nobody to agree with."""


@dataclass(frozen=True)
class Case:
    """A row of a table, and on which rank it goes wrong; None for all of them."""

    table: str
    function: str
    row: int
    ranks: int
    bad: int | None
    shape: Shape

    def __str__(self) -> str:
        where = "all ranks" if self.bad is None else f"rank {self.bad} of {self.ranks}"
        return f"{self.function} {self.row}: {', '.join(self.given[0])} on {where}"

    @property
    def given(self) -> tuple[dict[str, Any], type[Exception], str]:
        return next(rows for call, rows in TABLES[self.table].items() if call.__name__ == self.function)[self.row]


TABLES = {"alike": ALIKE, "of transformers": OF_TRANSFORMERS, "alone": ALONE}


def cases() -> list[Case]:
    """On two ranks or three, any of them the one, along any axis; of transformers on two, as each has to import it."""
    found = []
    for table, calls in TABLES.items():
        for call, rows in calls.items():
            for row in range(len(rows)):
                number = len(found)
                ranks = 3 if table == "alike" and number % 3 == 0 else 2
                shape = (Shape(1, 1, ranks), Shape(1, ranks, 1), Shape(ranks, 1, 1))[number // 6 % 3]
                bad = None if table == "alone" else number // 3 % ranks
                found.append(Case(table, call.__name__, row, ranks, bad, shape))
    return found


@on_each_rank
def called(case: Case, folder: Path) -> tuple[str, str, bool]:
    """On a rank: what was raised, and whether attention and decoding go on as if nothing had been."""
    at = Place(named_mesh(case.shape, AXES), folder)
    changes = case.given[0] if case.bad in (None, at.rank) else {}
    raised = ("nothing", "")
    try:
        next(call for call in TABLES[case.table] if call.__name__ == case.function)(at, **changes)
    except errors.InputError as error:
        raised = type(error).__name__, str(error)
    return *raised, goes_on(at)


def goes_on(at: Place) -> bool:
    q, k, v = numbers(1, Q_HEADS, 8, WIDTH, seed=1), *numbers(2, 1, HEADS, 8, WIDTH, seed=2)
    expected = am.attention(q, k, v, mesh=None)
    mine = (am.shard(x, at.mesh, layout=am.Zigzag()) for x in (q, k, v))
    out = am.unshard(am.attention(*mine, mesh=at.mesh, layout=am.Zigzag()), at.mesh, layout=am.Zigzag())
    cache = new_cache(at)
    cache.append(k, v)
    last = am.decode(q[:, :, -2:], cache)
    return torch.allclose(out, expected, atol=FLOAT32_SUMS) and torch.allclose(
        last, expected[:, :, -2:], atol=FLOAT32_SUMS
    )


@pytest.mark.parametrize("case", cases(), ids=str)
def test_all_ranks_raise_alike_and_go_on(pool: Pool, tmp_path: Path, case: Case) -> None:
    answers = pool.run(case.ranks, called, case, tmp_path)
    assert answers == [answers[0]] * case.ranks
    _, kind, message = case.given
    raised, said, went_on = answers[0]
    assert raised == kind.__name__, said
    assert re.search(message, said), said
    assert re.fullmatch(r"[^:]+: (.|\n)*expected (.|\n)+, given(.|\n)+Fix: .+\.", said), said
    assert went_on


@on_each_rank
def refused_by_one() -> str:
    """While the others make a cache whose tokens lie along two axes: they make a group of both, if they are to."""
    mesh = named_mesh(Shape(2, 2, 2), AXES)
    try:
        if dist.get_rank() == 3:
            Agreement(Mesh.of(mesh), "forward").fail(ShapeError("forward", "this", "that", "pass this"))
        am.KVCache(mesh, **SIZES)
    except ShapeError as error:
        return str(error)
    return "made"


def test_nobody_makes_groups_that_one_refuses(pool: Pool) -> None:
    answers = pool.run(8, refused_by_one)
    assert answers == ["forward: expected this, given that. Fix: pass this."] * 8


def test_enough_is_tried_on_one_rank_alone() -> None:
    assert sum(case.bad is not None for case in cases()) >= 60
