"""A cache in two memories: exact, with the newest tokens alone on the device, older ones in memory or in files."""

import gc
import os
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import attnmesh as am
from attnmesh import errors
from attnmesh.cache import memory_shard
from attnmesh.cache.memory_shard import MemoryShard
from attnmesh.cache.tiered_shard import TieredShard
from attnmesh.core.storage import STORAGES
from attnmesh.guard.agreement import CallGuard
from attnmesh.mesh.axes import RankMesh
from attnmesh.mesh.shapes import AXES, Shape
from attnmesh.runtime.unbroken import Action
from attnmesh.store import folder_shard
from attnmesh.store.journal import Journal
from attnmesh.store.layer_files import PIECE_TOKENS
from tests.support.caches import growing_caches
from tests.support.caches.growing_caches import grow
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth import histories
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.seeds import in_turn, seeds
from tests.support.truth.tolerances import FLOAT32

HOT = 32
SIZES: dict[str, Any] = {"batch": 1, "kv_heads": 2, "head_dim": 8, "capacity": 700, "dtype": torch.float32}


rows = partial(growing_caches.rows, dim=8)


def step_output(cache: am.KVCache, queries: int = 1, **options: Any) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return am.decode(torch.randn(cache.config.batch, 4, queries, 8, generator=generator), cache, **options)


def plain(length: int, mesh: Any = None, **sizes: Any) -> am.KVCache:
    """Return a cache of the same tokens in one memory."""
    cache = am.KVCache(mesh, **{**SIZES, **sizes})
    grow(cache, length)
    return cache


def tiered_cache(length: int = 0, mesh: Any = None, **sizes: Any) -> am.KVCache:
    cache = am.KVCache(mesh, **{**SIZES, "hot": HOT, **sizes})
    for start in range(0, length, 7):
        grow(cache, min(7, length - start))
    return cache


def same_bits(cache: am.KVCache) -> bool:
    """Return whether a reproducible step has the bits of a cache in one memory."""
    twin = plain(cache.length, cache.device_mesh, batch=cache.config.batch)
    return all(torch.equal(*(step_output(each, n, reproducible=True) for each in (cache, twin))) for n in (1, 3))


@pytest.mark.parametrize("seed", seeds(8, 200))
def test_random_histories_agree_with_float64(pool: Pool, tmp_path: Path, seed: int) -> None:
    history = histories.in_tiers(histories.draw(seed + 900, (1, 2, 3)), in_turn((1, 5, 16, 40), seed))
    histories.check(history, pool, tmp_path)


@pytest.mark.parametrize("storage", STORAGES)
def test_eight_bits_in_tiers_agree_with_float64(pool: Pool, tmp_path: Path, storage: str) -> None:
    for seed in (5001, 5004):
        drawn = histories.in_tiers(histories.draw(seed, (1, 2)), 16)
        histories.check(histories.replace(drawn, storage=storage), pool, tmp_path)


def test_the_newest_tokens_alone_are_on_the_device() -> None:
    cache, most = tiered_cache(), 0
    for _ in range(90):
        grow(cache, 7)
        assert cache.own_shard.used_slots >= min(HOT, cache.length)
        most = max(most, cache.own_shard.used_slots)
    assert most <= cache.own_shard.slots == HOT + 2 * cache.config.block
    assert cache.own_shard.earlier_tokens == cache.length - cache.own_shard.used_slots
    assert cache.used == cache.length == 630
    assert cache.nbytes == plain(630).nbytes
    grow(cache, 70)  # more than are hot, at once
    assert cache.own_shard.used_slots <= cache.own_shard.slots
    assert cache.keys.shape[2] > 700
    assert torch.equal(cache.keys[:, :, :700], plain(700).keys[:, :, :700])


@on_each_rank
def compare_bits_over_cuts(shape: Shape) -> dict[int, bool]:
    """On a rank: after which cuts of a growing cache steps have the bits of one memory."""
    cache = tiered_cache(200, named_mesh(shape, AXES), capacity=800)
    same = {}
    for length in (200, 190, 75, 74, 3, 0):
        cache.truncate(length)
        grow(cache, 61)
        same[length] = same_bits(cache)
    return same


@pytest.mark.parametrize("shape", [Shape(1, 1, 1), Shape(1, 1, 2), Shape(2, 1, 1), Shape(1, 2, 2)], ids=str)
def test_a_reproducible_step_has_the_bits_of_one_memory(pool: Pool, shape: Shape) -> None:
    for same in pool.run(shape.ranks, compare_bits_over_cuts, shape):
        assert same == dict.fromkeys(same, True)


def test_forks_and_copies_go_on_apart() -> None:
    cache = tiered_cache(150)
    for other in (cache.fork(), deepcopy(cache)):
        grow(other, 90)
        cache.truncate(60)
        assert same_bits(cache)
        assert same_bits(other)
        other.truncate(20)
        grow(cache, 90)
        assert same_bits(cache)
        assert same_bits(other)


def test_a_device_without_memory_to_reorder_leaves_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, reorder = tiered_cache(100, batch=2), MemoryShard.actions_to_reorder

    def on_the_cpu_alone(shard: MemoryShard, index: Tensor) -> list[Action]:
        if isinstance(shard, TieredShard):
            raise torch.OutOfMemoryError
        return reorder(shard, index)

    with monkeypatch.context() as patched:
        patched.setattr(MemoryShard, "actions_to_reorder", on_the_cpu_alone)
        with pytest.raises(torch.OutOfMemoryError):
            cache.reorder(torch.tensor([1, 0]))
    assert same_bits(cache)


def test_a_save_leaves_the_newest_tokens_on_the_device(tmp_path: Path) -> None:
    cache = tiered_cache(300)
    hot = cache.own_shard.used_slots
    saving = cache.save(tmp_path, wait=False)
    grow(cache, 50)
    saving.wait()
    assert cache.own_shard.used_slots >= min(hot, HOT)
    loaded = am.KVCache.load(tmp_path, None, hot=HOT)
    assert loaded.own_shard.earlier_tokens > 200
    for each in (cache, loaded):
        assert same_bits(each)
    grow(loaded, 50)
    assert same_bits(loaded)
    assert am.KVCache.load(tmp_path, None).config.hot is None


# --- files ---


def test_a_folder_has_the_older_tokens(tmp_path: Path) -> None:
    cache = tiered_cache(500, folder=tmp_path)
    assert same_bits(cache)
    assert torch.allclose(
        step_output(cache, mask=am.Window(40)), step_output(plain(500), mask=am.Window(40)), atol=FLOAT32
    )
    del cache
    cache = tiered_cache(folder=tmp_path)
    assert 500 - cache.own_shard.slots <= cache.length < 500  # the newest were in memory alone
    grow(cache, 500 - cache.length)
    cache.flush()
    grow(cache, 1)
    assert same_bits(cache)
    del cache
    cache = tiered_cache(folder=tmp_path)
    assert cache.length == 500
    assert cache.own_shard.used_slots >= HOT  # they are brought to the device again
    assert same_bits(cache)
    del cache
    assert am.KVCache(None, **SIZES, folder=tmp_path).length == 500


def test_pieces_of_a_folder_fill_and_are_cut(tmp_path: Path) -> None:
    cache = tiered_cache(folder=tmp_path, capacity=3 * PIECE_TOKENS, hot=600)
    for more in (PIECE_TOKENS, 500, PIECE_TOKENS, 3):
        grow(cache, more)
        cache.flush()
        assert torch.allclose(
            step_output(cache, 3), step_output(plain(cache.length, capacity=3 * PIECE_TOKENS), 3), atol=FLOAT32
        )
    for length in (2 * PIECE_TOKENS, PIECE_TOKENS + 20, PIECE_TOKENS, 30):
        cache.truncate(length)
        grow(cache, 5)
        del cache
        gc.collect()
        cache = tiered_cache(folder=tmp_path, capacity=3 * PIECE_TOKENS, hot=600)
        assert cache.length in (length, length + 5)
        assert torch.allclose(
            step_output(cache), step_output(plain(cache.length, capacity=3 * PIECE_TOKENS)), atol=FLOAT32
        )


@on_each_rank
def reopen_a_folder(path: Path, shape: Shape) -> tuple[dict[str, int], dict[str, bool]]:
    """Leave a folder without a flush, then with one. Return the lengths it opens with, and what is right then."""
    mesh = named_mesh(shape, AXES)
    there = {}
    right = {}
    cache = tiered_cache(301, mesh, folder=path)
    for left in ("unflushed", "flushed"):
        del cache
        gc.collect()
        dist.barrier()
        cache = tiered_cache(0, mesh, folder=path)
        there[left] = cache.length
        grow(cache, 300 - cache.length)
        cache.flush()
        twin = plain(300, mesh)
        for n in (1, 3):
            right[f"{left}, {n} queries"] = torch.allclose(step_output(cache, n), step_output(twin, n), atol=FLOAT32)
    return there, right


@pytest.mark.parametrize("shape", [Shape(1, 1, 2), Shape(1, 1, 3), Shape(2, 1, 1)], ids=str)
def test_ranks_leave_what_all_of_them_wrote(pool: Pool, tmp_path: Path, shape: Shape) -> None:
    answers = pool.run(shape.ranks, reopen_a_folder, tmp_path, shape)
    assert answers == [answers[0]] * shape.ranks
    there, right = answers[0]
    assert 301 - HOT - 4 * 16 * shape.ranks <= there["unflushed"] < 301
    assert there["flushed"] == 300
    assert right == dict.fromkeys(right, True)


@on_each_rank
def append_over_edges(path: Path, shape: Shape) -> dict[int, bool]:
    """On a rank: the lengths after appends over the edge between blocks of two ranks, and what is right then."""
    mesh = named_mesh(shape, AXES)
    cache = tiered_cache(14, mesh, folder=path)
    right = {}
    for more in (3, 14, 2, 100, 4, 12, 5):
        grow(cache, more)
        right[cache.length] = torch.allclose(step_output(cache), step_output(plain(cache.length, mesh)), atol=FLOAT32)
    return right


def test_few_tokens_of_several_ranks_go_to_a_folder(pool: Pool, tmp_path: Path) -> None:
    shape = Shape(1, 1, 3)
    for right in pool.run(shape.ranks, append_over_edges, tmp_path, shape):
        assert right == dict.fromkeys((17, 31, 33, 133, 137, 149, 154), True)


def grown_until_full(cache: am.KVCache, more: int) -> str:
    """Return the error that ends a cache's growth."""
    for _ in range(20):
        try:
            grow(cache, more)
        except errors.StoreError as error:
            return str(error)
    return ""


def test_a_full_disk_leaves_the_cache_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tiered_cache(folder=tmp_path, capacity=2 * PIECE_TOKENS)
    grow(cache, PIECE_TOKENS - 10)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for more in (200, 30, 80):  # over the end of a piece, or fewer than are hot
        monkeypatch.setattr(os, "posix_fallocate", full)
        said = grown_until_full(cache, more)
        assert f"append again from token {cache.length} on" in said
        assert torch.allclose(
            step_output(cache), step_output(plain(cache.length, capacity=2 * PIECE_TOKENS)), atol=FLOAT32
        )
        monkeypatch.undo()
        grow(cache, more)
        assert torch.allclose(
            step_output(cache), step_output(plain(cache.length, capacity=2 * PIECE_TOKENS)), atol=FLOAT32
        )
        cache.truncate(PIECE_TOKENS - 10)


@pytest.mark.parametrize("in_files", [False, True])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "native_append",
        "_append_cold",
        "_move",
        "_set_cold_count",
        "_write_hot",
        "_set_counts",
        "refill_hot",
        "append_rows_at",
    ],
)
def test_a_cache_goes_on_after_an_interrupt(
    name: str, after: bool, in_files: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner: Any = memory_shard if name == "native_append" else MemoryShard if name == "append_rows_at" else TieredShard
    original, ended = getattr(owner, name), list[str]()

    def ends(*arguments: Any) -> Any:
        found = original(*arguments) if after or ended else None
        if not ended:
            ended.append(name)
            raise KeyboardInterrupt
        return found

    cache = tiered_cache(100, **({"folder": tmp_path} if in_files else {}))
    for more in (1, 1, 5, 40, 100, 5, -2, -90):
        for moment in (ends, original):
            ended.clear()
            monkeypatch.setattr(owner, name, moment)
            with suppress(KeyboardInterrupt):
                if more > 0:
                    grow(cache, more)
                else:
                    cache.truncate(cache.length + more)
            monkeypatch.undo()
            assert torch.allclose(step_output(cache), step_output(plain(cache.length)), atol=FLOAT32)
            assert cache.own_shard.device_counts.tolist() == [cache.own_shard.length, cache.own_shard.used_slots]
    length = cache.length
    if in_files:
        cache.flush()
        del cache
        gc.collect()
        cache = tiered_cache(folder=tmp_path)
        assert same_bits(cache)
        assert cache.length == length


def test_an_interrupt_adds_no_token() -> None:
    cache = tiered_cache(100)
    k, v = rows(100, 200)
    with (
        patch.object(TieredShard, "_write_hot", side_effect=[KeyboardInterrupt, None]),
        pytest.raises(KeyboardInterrupt),
    ):
        cache.append(k, v)
    assert cache.length == 100
    cache.append(k, v)
    assert same_bits(cache)


def test_shards_that_are_not_written_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tiered_cache(20)
    counter = cache.local_shards.counter
    before = counter.rank_counts, counter.length
    monkeypatch.setattr(TieredShard, "append_rows_at", fails)
    with pytest.raises(errors.StoreError, match="no space"):
        cache.append_shard(*rows(20, 40), torch.arange(20, 40).flip(0))
    assert (counter.rank_counts, counter.length) == before


def fails(*_: object) -> None:
    raise errors.StoreError("append", "a disk", "no space", "free some")


def test_what_helps_is_said_where_the_folder_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tiered_cache(100, folder=tmp_path)
    monkeypatch.setattr(os, "fstat", lambda _: os.stat_result([0] * 10))
    monkeypatch.setattr(folder_shard, "native_append", lambda *_: False)
    assert "Fix: call cache.fork() and save it elsewhere" in grown_until_full(cache, 50)
    with pytest.raises(errors.StoreError, match=r"Fix: call cache.fork\(\) and save it elsewhere"):
        cache.flush()


def test_a_flush_that_fails_says_to_flush_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tiered_cache(100, folder=tmp_path)
    monkeypatch.setattr(Journal, "_write", no_space)
    monkeypatch.setattr(folder_shard, "native_append", lambda *_: False)
    with pytest.raises(errors.StoreError, match="Fix: free space there, and flush again"):
        cache.flush()
    monkeypatch.undo()
    cache.flush()
    assert same_bits(cache)


def no_space(*_: object) -> None:
    raise OSError(28, "No space left on device")


@on_each_rank
def flush_beside_a_full_disk(path: Path) -> tuple[str, str]:
    """On a rank: what is said where rank 1 alone cannot write, though ranks compare no call."""
    cache = tiered_cache(100, named_mesh(Shape(1, 1, 2), AXES), folder=path, checked=False)
    is_full = dist.get_rank() == 1
    with (
        patch.object(Journal, "_write", no_space if is_full else Journal._write),
        patch.object(folder_shard, "native_append", lambda *_: False),
    ):
        with pytest.raises(errors.StoreError) as error:
            cache.flush()
        dist.barrier()
        return str(error.value), grown_until_full(cache, 100) if is_full else ""


@on_each_rank
def append_beside_a_failure() -> str:
    """On a rank: what rank 1 says to an append to files that it alone cannot do, of ranks on GPUs."""
    guard = CallGuard(RankMesh.of(named_mesh(Shape(1, 1, 2), AXES)), torch.device("cuda"), None)
    try:
        if dist.get_rank() == 1:
            guard.raise_uncompared("append", errors.StoreError("append", "a disk", "no space", "free some"))
    except errors.StoreError as error:
        return str(error)
    return ""


def test_an_append_that_fails_on_a_gpu_raises_there(pool: Pool) -> None:
    assert pool.run(2, append_beside_a_failure) == ["", "append: expected a disk, given no space. Fix: free some."]


def test_a_flush_that_fails_on_a_rank_fails_on_all(pool: Pool, tmp_path: Path) -> None:
    (one, _), (other, appended) = pool.run(2, flush_beside_a_full_disk, tmp_path)
    assert one == other
    assert "flush again" in one
    assert "open the folder again" in appended


def test_a_save_of_files_is_refused_before_it_writes(tmp_path: Path) -> None:
    cache = tiered_cache(100, folder=tmp_path / "lives")
    before = cache.own_shard.cold_tokens
    with pytest.raises(errors.StoreError, match="KVCache folder"):
        cache.save(tmp_path / "saved")
    with pytest.raises(errors.StoreError, match="KVCache folder"):
        _ = cache.keys
    assert cache.own_shard.cold_tokens == before < 100


# --- refused ---


def test_a_graph_does_not_read_one_piece_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = am.KVCache(None, **SIZES, folder=tmp_path)
    grow(cache, 20)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(errors.KernelError, match="expected a cache of one piece in a graph, given one in a folder"):
        step_output(cache)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"hot": 0}, "KVCache hot: expected a whole number, 1 or more, given 0"),
        ({"hot": 2.5}, "KVCache hot: expected a whole number, 1 or more, given 2.5"),
        ({"mask": am.Window(7)}, "KVCache hot: expected a cache that keeps all tokens, given mask=Window"),
        ({"values": "none"}, "KVCache hot: expected a cache with values, given values='none'"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(sizes: dict[str, Any], said: str) -> None:
    with pytest.raises(errors.InputError, match=said):
        am.KVCache(None, **{**SIZES, "hot": HOT, **sizes})


@on_each_rank
def catch_error_of_copies() -> str:
    try:
        tiered_cache(0, named_mesh(Shape(1, 1, 2), AXES), copies=2)
    except errors.KernelError as error:
        return str(error)
    return ""


def test_copies_are_refused_on_every_rank(pool: Pool) -> None:
    (said,) = {*pool.run(2, catch_error_of_copies)}
    assert said == "KVCache hot: expected one rank of each token, given copies=2. Fix: leave copies out, or hot."


def test_a_saved_window_takes_no_hot_tokens(tmp_path: Path) -> None:
    cache = am.KVCache(None, **SIZES, mask=am.Window(7))
    grow(cache, 20)
    cache.save(tmp_path)
    with pytest.raises(errors.KernelError, match="KVCache hot: expected a cache that keeps all tokens"):
        am.KVCache.load(tmp_path, None, hot=HOT)


def test_calls_that_need_one_memory_are_refused() -> None:
    cache = tiered_cache(100)
    pool, k, v = torch.zeros(1, 16, 2, 8), *rows(100, 101)
    for call, said in (
        (cache.pages, "pages: expected a cache in one memory, given hot=32"),
        (
            lambda: tiered_cache().append_pages(pool, pool, torch.tensor([[0]])),
            "append_pages: expected a cache in one memory",
        ),
        (lambda: am.recover([cache], None), "recover: expected caches in one memory, given hot=32"),
        (
            lambda: cache.append(k, v, token_mask=torch.tensor([[False]])),
            "append token_mask: expected sequences without padding beside hot=",
        ),
    ):
        with pytest.raises(errors.KernelError, match=said):
            call()  # type: ignore[operator]
    assert same_bits(cache)
