"""Caches by themselves, empty or with random tokens: a test names the sizes that matter to it."""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

import attnmesh as am
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.problems import numbers

SIZES: dict[str, Any] = {
    "batch": 1,
    "kv_heads": 2,
    "head_dim": 8,
    "capacity": 200,
    "block": 4,
    "dtype": torch.float32,
}


def mesh_or_none(shape: Shape) -> DeviceMesh | None:
    """Return a mesh of several ranks; one rank alone has none."""
    return named_mesh(shape, AXES) if shape.ranks > 1 else None


def along_keys(ranks: int) -> DeviceMesh | None:
    return mesh_or_none(Shape(1, 1, ranks))


def empty_cache(mesh: DeviceMesh | None = None, **sizes: Any) -> am.KVCache:
    return am.KVCache(mesh, **SIZES | sizes)


def random_cache(tokens: int, mesh: DeviceMesh | None = None, *, padding: int = 0, **sizes: Any) -> am.KVCache:
    """Return a cache with the same tokens on any mesh: those of `numbers`, of which sequence 0 begins with padding."""
    cache = empty_cache(mesh, **sizes)
    config = cache.config
    k, v = numbers(2, config.batch, config.kv_heads, tokens, config.head_dim, dtype=config.dtype)
    token_mask = None
    if padding:
        token_mask = torch.ones(config.batch, tokens, dtype=torch.bool)
        token_mask[0, :padding] = False
    cache.append(k, v if config.values == "separate" else None, token_mask=token_mask)
    return cache
