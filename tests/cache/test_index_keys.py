"""A cache of keys alone, such as an indexer's, lives as any other cache: its keys are those of a plain tensor."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import attnmesh as am
from attnmesh.mesh.axes import RankMesh
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.seeds import pairs

BATCH, HEADS, WIDTH = 2, 2, 6


def new_keys(tokens: int, seed: int, batch: int = BATCH) -> Tensor:
    return torch.randn(batch, HEADS, tokens, WIDTH, generator=torch.Generator().manual_seed(seed))


def mesh_of(shape: tuple[int, ...]) -> Any:
    return named_mesh(Shape(*shape), AXES) if Shape(*shape).ranks > 1 else None


def is_held(cache: am.KVCache, keys: Tensor) -> bool:
    """Return whether this rank's keys are those of its tokens, and all ranks together hold each token once."""
    assert cache.length == keys.shape[2]
    mine = cache.keys[:, :, : cache.used]  # a fork first copies what it shares
    index = cache.own_shard.token_index[: cache.used]
    counts = torch.zeros(cache.length, dtype=torch.int64).index_fill_(0, index, 1)
    if cache.token_axis.size > 1:
        dist.all_reduce(counts, group=cache.token_axis.group)
    return torch.equal(mine, keys[:, cache.rank_mesh.heads.slice_of(HEADS)][:, :, index]) and bool((counts == 1).all())


@on_each_rank
def live_with_index_keys(shape: tuple[int, ...], folder: Path, lost: int, padded: bool) -> dict[str, bool]:
    """Fill, change, fork, save, load and recover a cache. Return after which steps its keys were right."""
    mesh, place = mesh_of(shape), RankMesh.of(mesh_of(shape))
    sizes = {"batch": BATCH, "kv_heads": HEADS, "head_dim": WIDTH, "capacity": 80, "block": 4}
    copies = min(2, shape[1] * shape[2])
    cache = am.KVCache(mesh, **sizes, dtype=torch.float32, values="none", copies=copies)
    assert cache.values.numel() == 0
    mask = torch.rand(BATCH, 37, generator=torch.Generator().manual_seed(0)) < 0.7
    keys = new_keys(37, 0)
    mine = am.Zigzag().positions(37, place.shape.ranks, place.shard_index)
    cache.append_shard(keys[:, :, mine], None, mine, token_mask=mask if padded else None)
    right = {"fill": is_held(cache, keys)}
    cache.append(new_keys(9, 1))
    keys = torch.cat((keys, new_keys(9, 1)), 2)
    right["append"] = is_held(cache, keys)
    cache.truncate(30)
    keys = keys[:, :, :30]
    cache.reserve(200)
    order = torch.tensor([1, 0])
    cache.reorder(order)
    keys = keys[order]
    for step in range(5):
        cache.append(new_keys(1, 2 + step))
        keys = torch.cat((keys, new_keys(1, 2 + step)), 2)
    right["truncate, reserve, reorder"] = is_held(cache, keys)
    other = cache.fork()
    other.append(new_keys(3, 20))
    other.truncate(36)
    right["fork"] = is_held(other, torch.cat((keys, new_keys(3, 20)[:, :, :1]), 2))
    right["beside the fork"] = is_held(cache, keys)
    cache.save(folder)
    right["load"] = is_held(am.KVCache.load(folder, mesh), keys)
    if copies > 1:
        (found,) = am.recover(None if dist.get_rank() == lost else [cache], mesh)
        right |= {"recovered sizes": found.config.values == "none", "recover": is_held(found, keys)}
    return right


SHAPES = [(1, 1, 1), (1, 1, 2), (1, 1, 3), (2, 1, 2), (1, 3, 2)]


@pytest.mark.parametrize(("shape", "padded"), pairs(SHAPES, [False, True]))
def test_index_keys_are_right_after_each_change_of_a_cache(
    pool: Pool, tmp_path: Path, shape: tuple[int, ...], padded: bool
) -> None:
    for right in pool.run(Shape(*shape).ranks, live_with_index_keys, shape, tmp_path, Shape(*shape).ranks - 1, padded):
        assert right == dict.fromkeys(right, True)


def test_index_keys_of_a_window_are_those_of_its_tokens() -> None:
    sizes = {"batch": 1, "kv_heads": HEADS, "head_dim": WIDTH, "capacity": 500, "block": 4}
    cache = am.KVCache(None, **sizes, dtype=torch.float32, values="none", mask=am.Window(9))
    keys = new_keys(400, 0, 1)
    for token in range(400):
        cache.append(keys[:, :, token : token + 1])
    assert cache.used < 60
    assert torch.equal(cache.keys[:, :, : cache.used], keys[:, :, cache.own_shard.token_index[: cache.used]])


def test_pages_of_index_keys_hold_no_values() -> None:
    cache = am.KVCache(None, batch=1, kv_heads=1, head_dim=4, capacity=64, dtype=torch.float32, values="none")
    cache.append_pages(torch.randn(9, 16, 1, 4), None, torch.tensor([[5, 6, 7]]))
    pages = cache.pages()
    assert [page.values.shape[-1] for page in pages] == [0] * len(pages)
    assert torch.equal(cache.keys[:, 0, :32], pages[0].keys[pages[0].block_table.long()].flatten(1, 2)[:, :32, 0])
