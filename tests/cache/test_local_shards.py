"""The shards that one rank holds, its own and copies of others'."""

from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import attnmesh as am
from attnmesh.cache.block_cyclic import BlockCyclic, RankCounts
from attnmesh.cache.cache_config import CacheConfig
from attnmesh.cache.local_shards import LocalShards
from attnmesh.cache.memory_shard import MemoryShard
from attnmesh.cache.token_counter import TokenCounter
from attnmesh.errors import UnforeseenError
from attnmesh.mesh.axes import Axis
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh

SIZES: dict[str, Any] = {"batch": 2, "kv_heads": 4, "head_dim": 6, "value_dim": 5, "capacity": 120}


def new_tokens(length: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(2, 4, length, width, generator=generator) for width in (6, 5))
    return k, v


def mesh_of(shape: tuple[int, int, int]) -> Any:
    return named_mesh(Shape(*shape), AXES) if Shape(*shape).ranks > 1 else None


class Reserved(NamedTuple):
    """The error of the first of two reserves, and the shards of a rank after the second."""

    error: str
    lengths: list[int]
    tokens: int


@on_each_rank
def reserve_twice() -> Reserved:
    """Reserve while the allocation of a copy fails on rank 1, and again."""
    mesh = mesh_of((1, 1, 2))
    cache = am.KVCache(mesh, **SIZES, dtype=torch.float32, block=4, copies=2)
    cache.append(*new_tokens(100, 0))
    (copy,) = cache.local_shards.copy_shards.values()
    grow = copy.grow
    if dist.get_rank() == 1:
        copy.grow = Mock(side_effect=MemoryError("none left"))
    with pytest.raises((MemoryError, UnforeseenError)) as caught:
        cache.reserve(300)
    copy.grow = grow
    cache.reserve(300)
    cache.append(*new_tokens(100, 1))
    shards = cache.local_shards.shards
    return Reserved(caught.typename, [shard.length for shard in shards], sum(shard.used_slots for shard in shards))


def test_reserve_succeeds_after_a_failure(pool: Pool) -> None:
    first, second = pool.run(2, reserve_twice)
    assert first == Reserved("UnforeseenError", lengths=[200, 200], tokens=200)
    assert second == Reserved("MemoryError", lengths=[200, 200], tokens=200)


@on_each_rank
def find_errors_without_memory(folder: str) -> list[str]:
    """Return what a fork and a save raise where rank 1 finds no memory, and what they raise after that."""
    cache = am.KVCache(mesh_of((1, 1, 2)), **SIZES, dtype=torch.float32, block=4)
    cache.append(*new_tokens(100, 0))
    errors = []
    shard = cache.own_shard
    for name, call in (("fork", cache.fork), ("join_pieces", lambda: cache.save(folder))):
        if dist.get_rank() == 1:
            setattr(shard, name, Mock(side_effect=MemoryError("none left")))
        with pytest.raises((MemoryError, UnforeseenError)) as caught:
            call()
        errors.append(caught.typename)
        vars(shard).pop(name, None)
        call()
    return errors


def test_all_ranks_raise_where_one_has_no_memory_for_what_forks_share(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(2, find_errors_without_memory, str(tmp_path))
    assert first == ["UnforeseenError"] * 2
    assert second == ["MemoryError"] * 2


@pytest.mark.parametrize("copies", [0, 2, True, "two"])
def test_invalid_copies_raise(copies: Any) -> None:
    with pytest.raises(
        ValueError, match="KVCache copies: expected 1 to 1, the ranks that tokens are sharded over, given"
    ):
        am.KVCache(None, **SIZES, dtype=torch.float32, copies=copies)


@on_each_rank
def find_keepers_and_copies(shape: tuple[int, int, int]) -> list[list[int]]:
    cache = am.KVCache(mesh_of(shape), **SIZES, dtype=torch.float32, block=4, copies=2)
    return [cache.local_shards.keepers, [*cache.local_shards.copy_shards]]


def test_next_rank_holds_the_copy(pool: Pool) -> None:
    assert pool.run(3, find_keepers_and_copies, (1, 1, 3)) == [[[1], [2]], [[2], [0]], [[0], [1]]]
    assert pool.run(4, find_keepers_and_copies, (2, 1, 2)) == [[[1], [1]], [[0], [0]]] * 2


def test_tokens_after_a_sharded_prefill_are_checked_each_time() -> None:
    """Otherwise the rank whose memory ends first would raise alone."""
    config, blocks = CacheConfig(2, 4, 6, 5, 120, 4, torch.float32), BlockCyclic(4, 2)
    shards = LocalShards(Axis(2, 0), 1, lambda index: MemoryShard(config, Axis(), blocks, torch.device("cpu"), index))
    assert shards.try_append_plain(new_tokens(1, 0))
    shards.counter.set_rank_counts(RankCounts(blocks, 1, (1, 0)))
    assert not shards.try_append_plain(new_tokens(1, 1))
    assert shards.length == 1


def test_the_cpu_counts_anew_after_an_append_that_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = am.KVCache(None, **SIZES, dtype=torch.float32, mask=am.Window(30))
    cache.append(*new_tokens(20, 0))
    with monkeypatch.context() as patch:
        patch.setattr(LocalShards, "_advance", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            cache.append(*new_tokens(3, 1))
    for more in (1, 1, 4):  # a new signature, a known one, and a new one
        cache.append(*new_tokens(more, 2))
        assert cache.local_shards.counter.length == cache.length
    assert cache.length == 26


def test_tokens_that_an_interrupted_append_has_written_are_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the CPU did not count tokens that are there, a cache that forgets would not find room for later ones."""
    cache = am.KVCache(None, **{**SIZES, "capacity": 400}, dtype=torch.float32, mask=am.Window(30))
    cache.append(*new_tokens(5, 0))
    with monkeypatch.context() as patch:
        patch.setattr(TokenCounter, "add_slots", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            cache.append(*new_tokens(3, 1))
    for number in range(100):
        cache.append(*new_tokens(1, number))
    assert cache.length == 105
    held = cache.own_shard.token_index[: cache.used].tolist()
    assert held == [*range(held[0], 105)]
    assert held[0] <= 105 - 31
