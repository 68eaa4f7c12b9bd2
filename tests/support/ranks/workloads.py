"""Workloads that ranks repeat under faults; every step of a workload returns the same tensors."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import attnmesh as am
from attnmesh.comm.host_linear import HostLinear
from attnmesh.comm.topology import agreed_axis_mailboxes
from attnmesh.errors import StoreError
from attnmesh.mesh.axes import RankMesh
from attnmesh.store.manifest import read_manifest

LENGTHS = 2000, 2050, 2300
"""Tokens in the cache at each save, in turn, so that the number of a save determines its length."""

Step = Callable[[], Sequence[Tensor]]


def _random_shards() -> list[Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(1, heads, 64, 16, generator=generator) for heads in (4, 2, 2)]


def _prefill(mesh: Any, _: Path, __: dict[str, Any]) -> Step:
    q, k, v = _random_shards()
    options = {"mesh": mesh, "layout": am.Zigzag()}
    return lambda: [am.attention(q, k, v, **options, exchange=name) for name in ("bulk", "pipelined", "ring")]


def _training(mesh: Any, _: Path, __: dict[str, Any]) -> Step:
    qkv = [x.requires_grad_() for x in _random_shards()]

    def step() -> Sequence[Tensor]:
        out = am.attention(*qkv, mesh=mesh, layout=am.Zigzag())
        return out.detach(), *torch.autograd.grad(out.square().sum(), qkv)

    return step


def _decoding(mesh: Any, _: Path, __: dict[str, Any]) -> Step:
    cache = _filled_cache(mesh, 60)
    return lambda: [am.decode(_query(), cache, merge=merge) for merge in ("tree", "direct", "gather")]


def _sharing(mesh: Any, _: Path, __: dict[str, Any]) -> Step:
    """Compute layers that the ranks of an axis share; decode where these are on several hosts."""
    axis = max(RankMesh.of(mesh).axes, key=lambda one: one.size)
    if (boxes := agreed_axis_mailboxes(axis)) is None:
        return _decoding(mesh, _, __)
    noise = torch.Generator().manual_seed(2)
    layers = [(torch.randn(outputs, 64, generator=noise), None) for outputs in (300, 7, 90000)]
    calls = [HostLinear(0, layers[:2], axis, boxes), HostLinear(1, layers[2:], axis, boxes)]
    x = torch.randn(2, 64, generator=noise)
    return lambda: [out for call in calls for out in call.run(x)]


def _saving(mesh: Any, folder: Path, progress: dict[str, Any]) -> Step:
    """Decode and save in turn. After a refused save, the previous save is loaded and has to be correct."""
    cache = _filled_cache(mesh, LENGTHS[0])
    outputs = {}
    last = [0]

    def step() -> Sequence[Tensor]:
        for length in LENGTHS:
            cache.truncate(min(cache.length, length))
            cache.append(*_tokens()[:, :, :, cache.length : length])
            outputs[length] = am.decode(_query(), cache)
            try:
                cache.save(folder)
                progress["saved"] += 1
                last[0] = length
            except StoreError as error:
                progress["refused"] = str(error)
                loaded = am.KVCache.load(folder, mesh)
                if loaded.length != last[0]:
                    raise AssertionError(f"{loaded.length} tokens, and not {last[0]}") from error
                outputs[loaded.length] = am.decode(_query(), loaded)
        return [outputs[length] for length in LENGTHS]

    return step


def _loading(mesh: Any, folder: Path, progress: dict[str, Any]) -> Step:
    """Decode from a cache that was never saved, and at later steps from the saved one."""
    manifest = read_manifest(folder)
    progress["saved"] = manifest.save_number
    caches = [_filled_cache(mesh, manifest.length), am.KVCache.load(folder, mesh)]
    return lambda: [am.decode(_query(), caches.pop(0) if len(caches) > 1 else caches[0])]


WORKLOADS = {
    "prefill": _prefill,
    "training": _training,
    "decoding": _decoding,
    "sharing": _sharing,
    "saving": _saving,
    "loading": _loading,
}


def length_of_save(number: int) -> int:
    """Return how many tokens the save of this number holds."""
    return LENGTHS[(number - 1) % len(LENGTHS)]


def _tokens() -> Tensor:
    return torch.randn(2, 1, 2, max(LENGTHS), 16, generator=torch.Generator().manual_seed(0))


def _query() -> Tensor:
    return torch.randn(1, 4, 1, 16, generator=torch.Generator().manual_seed(1))


def _filled_cache(mesh: Any, length: int) -> am.KVCache:
    cache = am.KVCache(mesh, batch=1, kv_heads=2, head_dim=16, capacity=max(LENGTHS), dtype=torch.float32)
    cache.append(*_tokens()[:, :, :, :length])
    return cache
