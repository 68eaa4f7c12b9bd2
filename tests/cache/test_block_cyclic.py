"""Caches of unequal shares: exact on any mesh, saved and loaded on any other, and bounded by each rank's memory."""

import gc
import resource
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import attnmesh as am
from attnmesh import errors
from attnmesh.cache.block_cyclic import BlockCyclic
from attnmesh.cache.cache_config import CacheConfig
from attnmesh.cache.memory_shard import MemoryShard
from attnmesh.mesh.axes import Axis
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.dense import dense
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.tolerances import FLOAT32, FLOAT32_SUMS

HEADS, WIDTH, LENGTH = (4, 2), 8, 397
SHARES = {2: (3, 1), 3: (0.5, 4, 0.02), 1: (7,)}


def cache_of(ranks: int, shares: object, **options: Any) -> am.KVCache:
    sizes = {"batch": 1, "kv_heads": HEADS[1], "head_dim": WIDTH, "capacity": LENGTH + 40, "dtype": torch.float32}
    return am.KVCache(named_mesh(Shape(1, 1, ranks), AXES), **(sizes | {"shares": shares} | options))


def new(tokens: int = LENGTH) -> tuple[Tensor, Tensor]:
    k, v = torch.randn(2, 1, HEADS[1], tokens, WIDTH, generator=torch.Generator().manual_seed(0)).unbind()
    return k, v


def query() -> Tensor:
    return torch.randn(1, HEADS[0], 2, WIDTH, generator=torch.Generator().manual_seed(1))


def dense_step() -> Tensor:
    visible = torch.arange(LENGTH) <= torch.arange(LENGTH - 2, LENGTH)[:, None]
    return dense(*(x.double() for x in (query(), *new())), visible, WIDTH**-0.5)[0]


# --- appended ---


@pytest.mark.parametrize("block", [4, (5, 3, 1)], ids=str)
@pytest.mark.parametrize("rank", range(3))
def test_few_tokens_of_several_ranks_are_stored_as_all_are_at_once(block: int | tuple[int, ...], rank: int) -> None:
    config, (k, v) = CacheConfig(1, HEADS[1], WIDTH, WIDTH, LENGTH, 4, torch.float32), new()
    shards = [MemoryShard(config, Axis(), BlockCyclic(block, 3), torch.device("cpu"), rank) for _ in range(2)]
    few, whole = shards
    whole.append_own((k, v), None, None)
    taken, number = 0, 0
    while few.length < LENGTH:
        start, number = few.length, number % few.turn.width + 1
        some = slice(start, min(start + number, LENGTH))
        taken += few.try_append_run((k[:, :, some], v[:, :, some]), some.stop - start, start, few.used_slots)
    assert taken > LENGTH / few.turn.width / 2
    assert few.device_counts.equal(whole.device_counts)
    for one, other in zip(
        (*few.kv_tensors, few.token_index[None, None]), (*whole.kv_tensors, whole.token_index[None, None]), strict=True
    ):
        assert one[:, :, : few.used_slots].equal(other[:, :, : few.used_slots])


# --- exact ---


@on_each_rank
def step_before_save(ranks: int, folder: Path) -> Tensor:
    """Return a decode step after a sharded prefill, single tokens and several; and save the cache."""
    cache = cache_of(ranks, SHARES[ranks])
    k, v = new()
    mine = cache.layout.positions(300, ranks, cache.token_axis.index)
    cache.append_shard(k[:, :, mine], v[:, :, mine], mine)
    assert cache.is_block_cyclic
    for start, stop in ((300, 301), (301, 302), (302, 350), (350, LENGTH)):
        cache.append(k[:, :, start:stop], v[:, :, start:stop])
    assert (
        abs(cache.used - LENGTH * cache.own_shard.turn.width / cache.own_shard.turn.period)
        <= cache.own_shard.turn.width
    )
    cache.save(folder)
    return am.decode(query(), cache)


@on_each_rank
def step_after_load(ranks: int, shares: object, folder: Path, save_to: Path) -> Tensor:
    cache = am.KVCache.load(folder, named_mesh(Shape(1, 1, ranks), AXES), shares=shares)
    cache.save(save_to)
    return am.decode(query(), cache)


@pytest.mark.parametrize("ranks", SHARES)
def test_a_save_of_unequal_shares_is_loaded_on_other_ranks_and_back(ranks: int, pool: Pool, tmp_path: Path) -> None:
    outs = pool.run(ranks, step_before_save, ranks, tmp_path / "0")
    for number, (others, shares) in enumerate(((2, None), (3, (1, 2, 9)), (1, None), (ranks, SHARES[ranks]))):
        outs += pool.run(others, step_after_load, others, shares, tmp_path / str(number), tmp_path / str(number + 1))
    for out in outs:
        torch.testing.assert_close(out, dense_step().float(), atol=2 * FLOAT32, rtol=2 * FLOAT32_SUMS)


@on_each_rank
def step_around_recovery(ranks: int) -> list[Tensor]:
    """Return steps before and after the cache moves to other shares, with copies of each token."""
    cache = cache_of(ranks, SHARES[ranks], copies=2)
    cache.append(*new())
    (other,) = am.recover([cache], cache.device_mesh, shares=(1, 5))
    (even,) = am.recover([other], cache.device_mesh)
    assert (other.shares, even.shares) == ((1, 5), None)
    assert other.used < cache.used if cache.token_axis.index == 0 else other.used > cache.used
    return [am.decode(query(), one) for one in (cache, other, even)]


def test_copies_and_recovery_have_unequal_shares(pool: Pool) -> None:
    for outs in pool.run(2, step_around_recovery, 2):
        for out in outs:
            torch.testing.assert_close(out, dense_step().float(), atol=2 * FLOAT32, rtol=2 * FLOAT32_SUMS)


@on_each_rank
def step_rows(ranks: int) -> list[Tensor]:
    """Return a step on rows of three caches, of which one was forked and each has other shares, beside each alone."""
    caches = [cache_of(ranks, shares) for shares in (SHARES[ranks], None)]
    for tokens, cache in zip((LENGTH, 90), caches, strict=True):
        cache.append(*new(tokens))
    caches.append(caches[0].fork())
    caches[2].append(*new(3))
    q = torch.randn(3, HEADS[0], 1, WIDTH, generator=torch.Generator().manual_seed(2))
    alone = [am.decode(q[row : row + 1], cache) for row, cache in enumerate(caches)]
    return [am.decode_rows(q, caches), torch.cat(alone)]


def test_rows_of_caches_with_other_shares_decode_together(pool: Pool) -> None:
    for together, alone in pool.run(3, step_rows, 3):
        torch.testing.assert_close(together, alone, atol=FLOAT32, rtol=FLOAT32_SUMS)


# --- refused ---


@on_each_rank
def check_refusal(kind: str) -> None:
    odd = torch.distributed.get_rank() == 1
    match kind:
        case "reproducible":
            cache = cache_of(2, (3, 1))
            cache.append(*new())
            am.decode(query(), cache, reproducible=True)
        case "pages":
            pool = torch.randn(4, 16, HEADS[1], WIDTH)
            cache_of(2, (3, 1)).append_pages(pool, pool, torch.tensor([[0, 1]]))
        case "others":
            cache_of(2, (3, 1) if odd else (1, 3))
        case "shard":
            cache, (k, v) = cache_of(2, (30, 1)), new()
            mine = am.Zigzag().positions(LENGTH, 2, cache.token_axis.index)
            cache.append_shard(k[:, :, mine], v[:, :, mine], mine)
        case _:
            cache_of(
                2, {"count": (1, 2, 3), "zero": (1, 0), "nan": (1, float("nan")), "text": "3,1"}.get(kind, (1, 1e12))
            )


REFUSED = {
    "reproducible": r"KernelError: reproducible: expected even shares, .* tree, given shares=\(3, 1\). Fix: leave",
    "pages": r"KernelError: append_pages: expected as many blocks on every rank, given shares=\(3, 1\). Fix: leave",
    "others": r"MeshError: KVCache: expected .*:\n    ranks  shares\n    0      \(1, 3\)\n    1      \(3, 1\)",
    "shard": r"ShapeError: append_shard: expected tokens spread .*, given 198 tokens on a rank of .*"
    r"Fix: call cache.reserve\(\d+\) on every rank, or prefill in cache.layout",
    "count": r"ShapeError: shares: expected 2 positive numbers, one a rank .*, given \(1, 2, 3\). Fix: pass ratios",
    "zero": r"ShapeError: shares: expected numbers above 0, given \(1, 0\). Fix: leave a rank without tokens out",
    "nan": r"ShapeError: shares: expected numbers above 0, given \(1, nan\)",
    "text": r"ShapeError: shares: expected 2 positive numbers, .* given '3,1'",
    "ratio": r"ShapeError: shares: expected numbers of which none is 4294967296 times another",
}


@pytest.mark.parametrize("kind", [*REFUSED])
def test_what_unequal_shares_cannot_do_is_refused_on_all_ranks(kind: str, pool: Pool) -> None:
    found = pool.ask(2, check_refusal, kind)
    assert len({str(error) for error in found}) == 1
    name, said = REFUSED[kind].split(": ", 1)
    with pytest.raises(getattr(errors, name), match=said):
        raise found[0]


# --- memory ---

MEGABYTE = 1 << 20


@on_each_rank
def make_cache_under_a_limit(shares: object, tokens: int) -> tuple[str, list[int]]:
    """Return what a rank says of a cache of 1 GB, if the ranks may take 320 and 960 MB more, and its tokens."""
    rank = torch.distributed.get_rank()
    gc.collect()  # or what earlier tests have left makes room meanwhile
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    most = (960 if rank else 320) * MEGABYTE
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + most, before[1]))
    try:
        cache = cache_of(2, shares, capacity=tokens, head_dim=128)
        counts = cache.own_shard.block_cyclic.turns
        return "", [turn.count(tokens) for turn in counts]
    except errors.ShapeError as error:
        return str(error), []
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_ranks_of_unequal_memory_hold_a_context_that_even_shares_cannot(pool: Pool) -> None:
    tokens = 1024 * MEGABYTE // (2 * HEADS[1] * 128 * 4)
    for said, _ in pool.run(2, make_cache_under_a_limit, None, tokens):
        assert "KVCache capacity: expected tokens that fit the device's memory, given no room for" in said
    for said, counts in pool.run(2, make_cache_under_a_limit, (1, 3), tokens):
        assert not said
        assert counts == [tokens // 4, 3 * tokens // 4]


# --- measured ---


@on_each_rank
def choose_shares_by_rates(rates: list[int], free: list[int]) -> object:
    with (
        mock.patch("attnmesh.setup.measure_shares.read_rates", return_value=rates),
        mock.patch("attnmesh.setup.measure_shares.free_of_ranks", return_value=free),
    ):
        cache = cache_of(2, "auto", capacity=2**20)
    cache.append(*new())
    out = am.decode(query(), cache)
    torch.testing.assert_close(out, dense_step().float(), atol=2 * FLOAT32, rtol=2 * FLOAT32_SUMS)
    return cache.shares


def test_auto_shares_follow_what_was_measured(pool: Pool) -> None:
    assert set(pool.run(2, choose_shares_by_rates, [4000, 1000], [10**9] * 2)) == {(4, 1)}
    whole = 2**20 * HEADS[1] * 2 * WIDTH * 4
    assert set(pool.run(2, choose_shares_by_rates, [4000, 1000], [whole // 3, 2 * whole])) == {(1, 3)}


@on_each_rank
def choose_shares_here() -> tuple[float, ...] | None:
    return cache_of(2, "auto").shares


def test_auto_shares_are_the_same_on_all_ranks(pool: Pool) -> None:
    one, other = pool.run(2, choose_shares_here)
    assert one == other
    assert len(one) == 2
