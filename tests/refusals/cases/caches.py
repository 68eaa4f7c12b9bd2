"""Bad arguments of a `KVCache` and of what changes, saves and loads it."""

import json
import shutil
from pathlib import Path
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
    MeshError,
    ShapeError,
    StoreError,
)
from tests.refusals.refusal import HEADS, LEARNED, Q_HEADS, TOKENS, WIDTH, Place, T, Table, filled, new_cache, unchanged
from tests.support.truth.problems import numbers


def append(at: Place, **changes: Any) -> None:
    k, v = numbers(2, 1, HEADS, 1, WIDTH)
    with unchanged(filled(at)) as cache:
        cache.append(**{"k": k, "v": v} | changes)


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
    k, v = numbers(2, 1, HEADS, 2, WIDTH)
    positions = TOKENS + torch.tensor([0, 1]) + 2 * at.rank
    with unchanged(filled(at)) as cache:
        cache.append_shard(**{"k": k, "v": v, "positions": positions} | changes)


def truncate(at: Place, length: Any = 7) -> None:
    with unchanged(filled(at)) as cache:
        cache.truncate(length)


def reorder(at: Place, batch_index: Any = torch.tensor([0])) -> None:  # noqa: B008
    with unchanged(filled(at)) as cache:
        cache.reorder(batch_index)


def reserve(at: Place, capacity: Any = 40) -> None:
    filled(at).reserve(capacity)


def append_pages(at: Place, blocks: int = 8, dtype: torch.dtype = torch.float32, **changes: Any) -> None:
    heads = HEADS // at.mesh["heads"].size()
    keys, values = T(8, 4, heads, WIDTH, dtype=dtype), T(blocks, 4, heads, WIDTH, dtype=dtype)
    new_cache(at).append_pages(**{"keys": keys, "values": values, "block_table": torch.tensor([[3]])} | changes)


TWO: dict[str, Any] = {"batch": 2, "capacity": 1 << 14}


def ones(tokens: int = 6, heads: int = HEADS) -> Tensor:
    return torch.ones(2, heads, tokens, WIDTH)


def append_padding(at: Place, seen: bool = True) -> None:
    new_cache(at, **TWO).append(ones(), ones(), token_mask=torch.full((2, 6), seen))


def shard_of_two(at: Place, **options: Any) -> am.KVCache:
    cache, mine = new_cache(at, **TWO), am.Contiguous().positions(6, at.mesh.size(), at.rank)
    cache.append_shard(ones()[:, :, mine], ones()[:, :, mine], mine, **options)
    return cache


def reorder_two(at: Place, first: int = 0) -> None:
    cache = new_cache(at, **TWO)
    cache.append(ones(), ones())
    cache.reorder(torch.tensor([first, 0]))


def truncate_shard(at: Place, length: int = 1) -> None:
    shard_of_two(at).truncate(length)


def decode_two(at: Place, queries: int = 1) -> None:
    cache = new_cache(at, **TWO)
    cache.append(ones(5000), ones(5000))
    am.decode(ones(queries, Q_HEADS), cache)


def save(at: Place, path: str = "good") -> None:
    if path == "below a file":
        (at.folder / path).touch()
        path = f"{path}/folder"
    filled(at).save(at.folder / path)


def load(at: Place, folder: str = "good", **changes: Any) -> None:
    filled(at).save(at.folder / "good")
    am.KVCache.load(spoiled_copy(at.folder / "good", at.folder / folder), at.mesh, **changes)


def spoiled_copy(good: Path, bad: Path) -> Path:
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


ON_ONE_RANK: Table = {
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
            r"KVCache value_dim: expected None for keys alone, given 4\. Fix: leave out value_dim",
        ),
        ({"values": "prefix"}, MeshError, r"KVCache: expected the same call .*:\n    ranks  values\n(.*\n)*.*prefix"),
        (
            {"values": "prefix", "value_dim": 5},
            ShapeError,
            r"KVCache value_dim: expected no more than head_dim 4 for a prefix of the keys, given 5\. Fix: ",
        ),
        ({"device": "foo"}, DeviceError, r"KVCache device: expected a device that PyTorch knows, given 'foo'"),
        ({"device": "meta"}, DeviceError, r"KVCache device: expected a device with memory, given .meta."),
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
            {"token_mask": T(2, 1) > 0},
            ShapeError,
            r"append token_mask: expected torch.bool \(1, 1\), given torch.bool \(2, 1\)",
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
    append_pages: [
        ({"keys": T(8, 16, 2, 4)}, ShapeError, r"append_pages keys: expected shape \(blocks, 4, \d, 4\), given"),
        ({"dtype": torch.float64}, DtypeError, r"append_pages keys: expected torch.float32"),
        ({"values": None}, ShapeError, r"append_pages values: expected 2 pools, given 1"),
        ({"block_table": torch.tensor([[0.5]])}, DtypeError, r"block_table: expected a tensor of int32 or int64"),
        ({"block_table": T(2, 1).int()}, ShapeError, r"block_table: expected shape \(1, blocks\), given \(2, 1\)"),
        ({"blocks": 7}, ShapeError, r"append_pages: expected pools of the same number of blocks, given 8 and 7"),
        ({"block_table": torch.tensor([[8]])}, ShapeError, r"block_table: expected numbers from 0 to 7, given others"),
    ],
    append_padding: [
        ({"seen": False}, MeshError, r"append: expected the same call .*:\n    ranks  token_mask\n"),
    ],
    shard_of_two: [
        ({"token_mask": T(2, 6) > 0}, MeshError, r"append_shard: expected the same call on every rank"),
        ({"token_mask": T(2, 7) > -1}, MeshError, r"append_shard: expected the same call on every rank"),
    ],
    reorder_two: [
        ({"first": 1}, MeshError, r"reorder: expected the same call .*:\n    ranks  to\n(.*\n)*.*  \[1, 0\]\n"),
    ],
    truncate_shard: [
        ({"length": 100}, ShapeError, r"truncate: expected a length from 0 to 6, given 100 of type int\. Fix: pass"),
    ],
    decode_two: [
        ({"queries": 5000}, MeshError, r"decode: expected the same call on every rank"),
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
}

ON_ALL_RANKS: Table = {
    append_pages: [
        ({"block_table": T(1, 99).long()}, ShapeError, r"append_pages.*: expected room for the new tokens"),
    ],
    append_shard: [
        (
            {"positions": torch.tensor([10, 11])},
            LayoutError,
            r"append_shard: expected positions from 10 to 1\d, each on one rank, given \d positions with gaps",
        ),
    ],
    new_cache: [
        ({"mesh": [0, 1]}, MeshError, r"mesh: expected a DeviceMesh or None, given list\. Fix: make one"),
    ],
}
