"""After ranks are lost: the keys that the others hold, and their copies, on another mesh; nothing is computed again."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import attnmesh as am
from attnmesh.mesh import AXES, Mesh, Shape
from tests.mesh_problems import named_mesh
from tests.pool import Pool

SIZES: dict[str, Any] = {"batch": 2, "kv_heads": 4, "head_dim": 6, "value_dim": 5, "capacity": 120}


def new_tokens(length: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(2, 4, length, width, generator=generator) for width in (6, 5))
    return k, v


def filled(mesh: Any, copies: int, padded: bool, seed: int = 0) -> am.KVCache:
    """By a prefill in shards, new tokens, a cut, another order, and more room."""
    cache = am.KVCache(mesh, **SIZES, dtype=torch.float32, block=4, copies=copies)
    here = Mesh.of(mesh)
    (k, v), real = new_tokens(37, seed), torch.rand(2, 37, generator=torch.Generator().manual_seed(0)) > 0.3
    mine = am.Zigzag().positions(37, here.shape.ranks, here.shard)
    cache.append_shard(k[:, :, mine], v[:, :, mine], mine, real=real if padded else None)
    cache.append(*new_tokens(20, seed + 1))
    cache.truncate(50)
    cache.reorder(torch.tensor([1, 0]))
    cache.reserve(200)
    for step in range(11):
        cache.append(*new_tokens(1, seed + 2 + step))
    return cache


def answer(cache: am.KVCache) -> Tensor:
    q = torch.randn(2, 8, 3, 6, generator=torch.Generator().manual_seed(9))
    return am.decode(q, cache)


def meshed(shape: tuple[int, int, int]) -> Any:
    return named_mesh(Shape(*shape), AXES) if Shape(*shape).ranks > 1 else None


def recovered(
    before: tuple[int, int, int], after: tuple[int, int, int], lost: list[int], padded: bool, layers: int
) -> tuple[float, bool]:
    """As if these ranks had come anew, in a world that is as large: how far it is off, and whether it goes on."""
    rank = dist.get_rank()
    mesh, other = meshed(before), meshed(after)
    caches = [filled(mesh, 2, padded, 100 * layer) for layer in range(layers)]
    if rank == 1:  # a step ahead of the others
        for cache in caches[:1]:
            cache.checked = False
            cache.append(*new_tokens(1, 77))
    found = am.recover(None if rank in lost else caches, other, copies=min(2, Shape(*after).ranks // after[0]))
    worst = 0.0
    for layer, cache in enumerate(found):
        alone = filled(None, 1, padded, 100 * layer)
        worst = max(worst, float((answer(cache) - answer(alone)).abs().max()))
        for each in (cache, alone):
            each.append(*new_tokens(3, 5))
        worst = max(worst, float((answer(cache) - answer(alone)).abs().max()))
    again = am.recover(found, other)  # once more, from those that were recovered
    same = all(torch.allclose(answer(one), answer(two), atol=1e-5) for one, two in zip(again, found, strict=True))
    return worst, same


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("before", "after", "lost"),
    [
        ((1, 1, 4), (1, 1, 4), [2]),
        ((1, 2, 2), (1, 1, 4), [0]),
        ((2, 1, 2), (1, 2, 2), [3]),
        ((1, 1, 4), (2, 2, 1), [1, 3]),
        ((1, 1, 3), (1, 3, 1), [1]),
        ((1, 1, 2), (1, 1, 2), [0]),
    ],
)
def test_what_is_left_and_its_copies_are_the_whole(
    pool: Pool, before: tuple[int, int, int], after: tuple[int, int, int], lost: list[int], padded: bool
) -> None:
    for worst, same in pool.run(Shape(*before).ranks, recovered, before, after, lost, padded, 2, deadline=60):
        assert worst < 1e-5, "float32, merged in another order"
        assert same
