"""What every kind of shard has: its tokens before a length, and its view."""

from pathlib import Path
from typing import Any

import pytest
import torch

import attnmesh as am
from attnmesh.cache.block_cyclic import BlockCyclic
from attnmesh.cache.cache_config import CacheConfig
from attnmesh.cache.cache_shard import CacheShard
from attnmesh.cache.memory_shard import MemoryShard
from attnmesh.cache.tiered_shard import TieredShard
from attnmesh.mesh.axes import Axis
from attnmesh.store.folder_shard import FolderShard
from tests.support.truth.problems import numbers

LENGTH = 90
OF_MEMORY = "actions_to_make_room", "put_before", "mark_present"
KINDS = ["memory", "fork", "two memories", "folder"]


def shard_of(kind: str, path: Path) -> CacheShard:
    options: dict[str, Any] = {"two memories": {"hot": 32}, "folder": {"folder": path}}.get(kind, {})
    cache = am.KVCache(None, batch=1, kv_heads=1, head_dim=8, capacity=100, dtype=torch.float32, block=4, **options)
    cache.append(*numbers(2, 1, 1, LENGTH, 8, seed=1))
    return (cache.fork() if kind == "fork" else cache).own_shard


@pytest.mark.parametrize("kind", [MemoryShard, TieredShard, FolderShard])
def test_each_kind_has_the_methods_that_it_must_have(kind: type[CacheShard]) -> None:
    assert CacheShard.__abstractmethods__
    assert not kind.__abstractmethods__
    if issubclass(kind, MemoryShard):
        assert [name for name in OF_MEMORY if getattr(kind, name) is getattr(CacheShard, name)] == []


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_has_all_tokens_before_any_length(kind: str, tmp_path: Path) -> None:
    shard = shard_of(kind, tmp_path)
    assert [shard.count_before(length) for length in range(LENGTH + 1)] == [*range(LENGTH + 1)]


@pytest.mark.parametrize("rank", range(3))
def test_a_rank_has_its_turns_before_any_length(rank: int) -> None:
    config, blocks = CacheConfig(1, 1, 8, 8, LENGTH, 4, torch.float32), BlockCyclic(4, 3)
    shard = MemoryShard(config, Axis(), blocks, torch.device("cpu"), rank)
    shard.append_own(tuple(numbers(2, 1, 1, LENGTH, 8, seed=1)), None, None)
    found = [shard.count_before(length) for length in range(LENGTH + 1)]
    assert found == [blocks.count(rank, length) for length in range(LENGTH + 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_view_is_kept_and_counts_along(kind: str, tmp_path: Path) -> None:
    shard = shard_of(kind, tmp_path)
    view = shard.view
    shard.truncate(LENGTH - 1)
    assert shard.view is view
    assert {int(piece.device_counts[0]) for piece in (*view.earlier_pieces, view)} == {LENGTH - 1}


@pytest.mark.parametrize("kind", ["memory", "fork"])
def test_a_view_made_before_has_padding_that_comes_later(kind: str, tmp_path: Path) -> None:
    shard = shard_of(kind, tmp_path)
    assert shard.view.padding is None
    token_mask = torch.tensor([[True, False]])
    shard.append_own(tuple(numbers(2, 1, 1, 2, 8, seed=2)), token_mask, (LENGTH, shard.used_slots))
    assert [piece.padding is not None for piece in (*shard.view.earlier_pieces, shard.view)] == (
        [True] * (1 + len(shard.earlier_pieces))
    )
    assert shard.view.padding is shard.padding


@pytest.mark.parametrize(
    ("length", "capacity", "slots", "new_count"),
    [(11, 14, 40, 4), (8, 40, 5, 2), (6, 40, 5, 4), (11, 40, 40, 5)],
    ids=["the capacity", "the slots", "the slots, after another rank", "a run"],
)
def test_tokens_that_do_not_fit_are_not_written(length: int, capacity: int, slots: int, new_count: int) -> None:
    """A native call writes tokens without a look at how much memory there is."""
    config = CacheConfig(1, 1, 8, 8, capacity, 4, torch.float32)
    shard = MemoryShard(config, Axis(), BlockCyclic(4, 2), torch.device("cpu"), 0)
    shard.append_own(tuple(numbers(2, 1, 1, length, 8, seed=1)), None, None)
    shard.slots = slots
    before = shard.device_counts.clone()
    new = tuple(numbers(2, 1, 1, new_count, 8, seed=2))
    assert not shard.try_append_run(new, new_count, length, shard.used_slots)
    assert shard.device_counts.equal(before)
