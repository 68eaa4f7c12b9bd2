"""Forked caches continue apart, with the bits of copies, and share the memory of whole blocks."""

import re
import tempfile
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

import attnmesh as am
from attnmesh import errors
from attnmesh.cache import cache_shard, frozen_piece
from attnmesh.cache.cache_shard import CacheShard
from attnmesh.cache.frozen_piece import join_rows
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.mesh_problems import named_mesh
from tests.support.pool import Pool, on_each_rank
from tests.support.problems import numbers
from tests.support.seeds import rotated
from tests.support.tolerances import FLOAT32

SHAPES = [Shape(1, 1, 1), Shape(1, 1, 2), Shape(1, 3, 1), Shape(1, 2, 2), Shape(2, 1, 2)]


def cache_of(shape: Shape, batch: int = 1, tokens: int = 61, padded: bool = False, **options: Any) -> am.KVCache:
    sizes: dict[str, Any] = {"kv_heads": 2, "head_dim": 8, "capacity": 200, "dtype": torch.float32, "block": 4}
    cache = am.KVCache(named_mesh(shape, AXES) if shape.ranks > 1 else None, batch=batch, **sizes, **options)
    mask = None
    if padded:
        mask = torch.ones(batch, tokens, dtype=torch.bool)
        mask[0, :33] = False
    cache.append(*numbers(2, batch, 2, tokens, 8), token_mask=mask)
    return cache


def pieces(cache: am.KVCache) -> list[int]:
    """Return the addresses of the keys that the cache shares."""
    return [blocks.stored[0].data_ptr() for blocks in cache.shard.earlier_pieces]


@on_each_rank
def check_forks_that_continue(shape: Shape, batch: int, padded: bool, reproducible: bool) -> None:
    """Compare three forks with copies that go through the same calls."""
    forked, copied = [cache_of(shape, batch, padded=padded)], [cache_of(shape, batch, padded=padded)]
    for source in (0, 1):
        forked.append(forked[source].fork())
        copied.append(deepcopy(copied[source]))

    def check() -> None:
        for number, (one, other) in enumerate(zip(forked, copied, strict=True)):
            q = numbers(other.sizes.batch, 4, 2, 8, seed=number)
            given, expected = (am.decode(q, cache, reproducible=reproducible) for cache in (one, other))
            assert torch.equal(given, expected) if reproducible else torch.allclose(given, expected, atol=FLOAT32)
            assert (one.length, one.used) == (other.length, other.used)

    def change(act: Any) -> None:
        for number, pair in enumerate(zip(forked, copied, strict=True)):
            for cache in pair:
                act(cache, number)
        check()

    check()
    change(lambda cache, n: cache.append(*numbers(2, batch, 2, 3 + n, 8, seed=n)))
    change(lambda cache, n: cache.truncate((60, 35, 7)[n]))
    change(lambda cache, n: cache.append(*numbers(2, batch, 2, 30 + n, 8, seed=n)))
    forked.append(forked[0].fork())
    copied.append(deepcopy(copied[0]))
    change(lambda cache, n: cache.reorder(torch.arange(batch).flip(0)))
    change(lambda cache, n: cache.reserve(300))


@pytest.mark.parametrize(("shape", "rows"), rotated(SHAPES, [(1, False), (3, False), (2, True)], every=2))
def test_forks_continue_as_copies_do(shape: Shape, rows: tuple[int, bool], pool: Pool) -> None:
    batch, padded = rows
    pool.run(shape.ranks, check_forks_that_continue, shape, batch, padded, False)
    if not padded and shape.queries * shape.keys != 3:
        pool.run(shape.ranks, check_forks_that_continue, shape, batch, padded, True)


@on_each_rank
def check_shared_blocks(shape: Shape) -> None:
    cache = cache_of(shape)
    other = cache.fork()
    whole = cache.used // cache.sizes.block * cache.sizes.block
    assert cache.shard.earlier_tokens == other.shard.earlier_tokens == whole
    assert pieces(cache) == pieces(other)
    before = pieces(cache)
    other.reorder(torch.zeros(4, dtype=torch.long))  # four beams of one prompt
    assert pieces(other) == before
    assert other.shard.earlier_pieces[0].stored[0].stride(0) == 0
    other.reorder(torch.tensor([3, 3, 1, 0]))
    assert pieces(other) == before
    other.truncate(cache.length - 1)
    kept = sum(blocks.token_count for blocks in other.shard.earlier_pieces)
    assert kept >= whole - cache.sizes.block  # the block that was cut is copied, no other
    assert pieces(other) == before


@pytest.mark.parametrize("shape", [Shape(1, 1, 1), Shape(1, 1, 2), Shape(2, 1, 2)], ids=str)
def test_whole_blocks_are_shared_and_not_copied(shape: Shape, pool: Pool) -> None:
    pool.run(shape.ranks, check_shared_blocks, shape)


@on_each_rank
def check_saved_fork(shape: Shape, folder: str) -> None:
    cache = cache_of(shape, batch=2)
    other, q = cache.fork(), numbers(2, 4, 1, 8)
    other.append(*numbers(2, 2, 2, 5, 8, seed=1))
    expected = am.decode(q, other)
    other.save(folder)
    for found in (other, am.KVCache.load(folder, cache.device_mesh), deepcopy(other)):
        assert torch.allclose(am.decode(q, found), expected, atol=FLOAT32)
        assert not found.shards.forked
    assert cache.shards.forked
    assert torch.allclose(am.decode(q, cache), am.decode(q, cache_of(shape, batch=2)), atol=FLOAT32)


@pytest.mark.parametrize("shape", [Shape(1, 1, 1), Shape(1, 1, 3), Shape(2, 2, 1)], ids=str)
def test_a_saved_fork_is_a_plain_cache(shape: Shape, pool: Pool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pool.run(shape.ranks, check_saved_fork, shape, folder)


@on_each_rank
def error_during_save(shape: Shape, folder: str) -> str:
    cache = cache_of(shape)
    saving = cache.save(folder, wait=False)
    try:
        cache.fork()
    except errors.StoreError as error:
        saving.wait()
        cache.fork()
        return str(error)
    return "nothing"


@pytest.mark.parametrize("shape", [Shape(1, 1, 1), Shape(1, 1, 2)], ids=str)
def test_a_cache_that_is_saving_does_not_fork(shape: Shape, pool: Pool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        answers = pool.run(shape.ranks, error_during_save, shape, folder)
    expected = "fork: expected a cache at rest, given a cache whose save is writing. Fix: call wait() on the result of"
    for answer in answers:
        assert answer.startswith(expected), answer


@on_each_rank
def check_recovered_forks() -> None:
    cache = cache_of(Shape(1, 1, 2), copies=2)
    other, q = cache.fork(), numbers(1, 4, 1, 8)
    other.append(*numbers(2, 1, 2, 5, 8, seed=1))
    expected = am.decode(q, other)
    (found,) = am.recover([other], cache.device_mesh)
    assert torch.allclose(am.decode(q, found), expected, atol=FLOAT32)


def test_forks_with_copies_are_recovered(pool: Pool) -> None:
    pool.run(2, check_recovered_forks)


def test_a_graph_refuses_a_fork() -> None:
    cache = am.KVCache(None, batch=1, kv_heads=2, head_dim=8, capacity=50, dtype=torch.float32)
    cache.append(*numbers(2, 1, 2, 20, 8))
    other = cache.fork()
    with pytest.raises(errors.KernelError, match="expected a cache of one piece in a graph, given a forked cache"):
        torch.compile(lambda x: am.decode(x, other), backend="eager")(numbers(1, 4, 1, 8))


@on_each_rank
def check_pages(shape: Shape) -> None:
    """Attend to the pages of a rank as an engine does, and merge the ranks."""
    cache = cache_of(shape, batch=2)
    other = cache.fork()
    other.append(*numbers(2, 2, 2, 9, 8, seed=3))
    q, heads = numbers(2, 4, 1, 8), cache.mesh.heads
    for each in (cache, other):
        own_q = q[:, heads.slice_of(4)]
        partials = []
        for pages in each.pages():
            k, v = (
                pool[pages.block_table.long()].flatten(1, 2).transpose(1, 2)[:, :, : int(pages.lengths[0])]
                for pool in (pages.keys, pages.values)
            )
            assert len(pages.tokens) == k.shape[2]
            partials.append(am.attend(own_q, k, v))
        group = each.token_axis.group if each.token_axis.size > 1 else None
        partial = am.Partial(*am.merge(*partials))
        partial = partial if group is None else am.merge_across(partial, group)
        expected = am.decode(q, each)[:, heads.slice_of(4)]
        assert torch.allclose(partial.out, expected, atol=FLOAT32)


@pytest.mark.parametrize("shape", [Shape(1, 1, 1), Shape(1, 1, 3), Shape(2, 1, 2)], ids=str)
def test_an_engine_reads_the_pages(shape: Shape, pool: Pool) -> None:
    pool.run(shape.ranks, check_pages, shape)


@on_each_rank
def check_blocks_of_a_pool(shape: Shape, scattered: bool) -> None:
    """Take the blocks of an engine's pool, and compare with a cache that has appended the same tokens."""
    mesh, blocks, ranks = named_mesh(shape, AXES), 3, shape.queries * shape.keys
    sizes: dict[str, Any] = {"kv_heads": 2, "head_dim": 8, "capacity": 200, "dtype": torch.float32, "block": 4}
    caches = [am.KVCache(mesh, batch=2, **sizes) for _ in range(2)]
    index, heads = caches[0].token_axis.index, caches[0].mesh.heads.slice_of(2)
    table = torch.tensor([[1, 2, 3], [5, 6, 7]]) if not scattered else torch.tensor([[4, 0, 2], [2, 7, 1]])
    whole = numbers(2, 2, 2, blocks * ranks * 4, 8)
    if scattered:
        for rank in range(ranks):  # block 2 of the pool is in both tables
            first, last = rank * 4, (2 * ranks + rank) * 4
            whole[:, 1, :, first : first + 4] = whole[:, 0, :, last : last + 4]
    pools = torch.zeros(2, 8, 4, 2, 8)
    for row in range(2):
        for number in range(blocks):
            start = (number * ranks + index) * 4
            pools[:, table[row, number]] = whole[:, row, :, start : start + 4].transpose(1, 2)
    keys, values = pools[:, :, :, heads].contiguous().unbind()
    caches[0].append_pages(keys, values, table.int())
    caches[1].append(*whole)
    shared = caches[0].shard.earlier_pieces[0].stored[0].data_ptr()
    assert (shared == keys[1].data_ptr()) is not scattered
    for act in (
        lambda cache: None,
        lambda cache: cache.append(*numbers(2, 2, 2, 7, 8, seed=1)),
        lambda cache: cache.truncate(9),
        lambda cache: cache.append(*numbers(2, 2, 2, 5, 8, seed=2)),
    ):
        for cache in caches:
            act(cache)
        q = numbers(2, 4, 2, 8, seed=4)
        given, expected = (am.decode(q, cache) for cache in caches)
        assert torch.allclose(given, expected, atol=FLOAT32)
    assert torch.equal(keys, pools[0][:, :, heads])  # the engine's pool is not written to


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("shape", [Shape(1, 1, 1), Shape(1, 1, 3), Shape(2, 1, 2)], ids=str)
def test_a_cache_takes_the_blocks_of_an_engine(shape: Shape, scattered: bool, pool: Pool) -> None:
    pool.run(shape.ranks, check_blocks_of_a_pool, shape, scattered)


BAD_PAGES: dict[str, tuple[dict[str, Any], str]] = {
    "shape": ({"keys": torch.zeros(8, 16, 2, 8)}, r"append_pages keys: expected shape \(blocks, 4, 2, 8\), given"),
    "dtype": ({"keys": torch.zeros(8, 4, 2, 8).double()}, "append_pages keys: expected torch.float32"),
    "values": ({"values": None}, "append_pages values: expected 2 pools, given 1"),
    "table": ({"table": torch.tensor([[0.5]])}, "block_table: expected a tensor of int32 or int64"),
    "pools": ({"values": torch.zeros(7, 4, 2, 8)}, "expected pools of the same number of blocks, given 8 and 7"),
    "rows": ({"table": torch.tensor([[0], [1]])}, r"block_table: expected shape \(1, blocks\), given \(2, 1\)"),
    "number": ({"table": torch.tensor([[8]])}, "block_table: expected numbers from 0 to 7, given others"),
    "capacity": ({"table": torch.zeros(1, 99, dtype=torch.long)}, "expected room for the new tokens"),
}


@on_each_rank
def badly_paged(shape: Shape, name: str) -> str:
    """Return the error of a call that is wrong on the last rank alone."""
    sizes: dict[str, Any] = {"kv_heads": 2, "head_dim": 8, "capacity": 200, "dtype": torch.float32, "block": 4}
    cache = am.KVCache(named_mesh(shape, AXES), batch=1, **sizes)
    good = {"keys": torch.zeros(8, 4, 2, 8), "values": torch.zeros(8, 4, 2, 8), "table": torch.tensor([[3]])}
    bad = cache.mesh.shard_index == shape.ranks - 1 or name == "capacity"
    call = good | (BAD_PAGES[name][0] if bad else {})
    try:
        cache.append_pages(call["keys"], call["values"], call["table"])
    except errors.InputError as error:
        cache.append_pages(good["keys"], good["values"], good["table"])  # ranks go on together
        return str(error)
    return "nothing"


@pytest.mark.parametrize("name", BAD_PAGES)
def test_bad_pages_raise_alike(name: str, pool: Pool) -> None:
    answers = pool.run(2, badly_paged, Shape(1, 1, 2), name)
    assert len(set(answers)) == 1
    assert re.search(BAD_PAGES[name][1], answers[0]), answers[0]


@pytest.mark.parametrize("slots", [20, 100])
def test_a_resize_without_memory_for_the_values_leaves_the_shard_as_it_was(
    slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = am.KVCache(None, batch=1, kv_heads=2, head_dim=8, capacity=60, dtype=torch.float32, block=4)
    k, v = numbers(2, 1, 2, 60, 8, seed=1)
    cache.append(k[:, :, :12], v[:, :, :12])
    made = list[int]()

    def once(parts: Any, dim: int, rows: int) -> Any:
        made.extend([rows] * (parts[0].ndim == 4))
        if len(made) == 2:
            raise torch.OutOfMemoryError
        return join_rows(parts, dim, rows)

    with monkeypatch.context() as patch:
        patch.setattr(cache_shard, "join_rows", once)
        with pytest.raises(torch.OutOfMemoryError):
            cache.shard.resize(cache.sizes, slots)
    cache.append(k[:, :, 12:], v[:, :, 12:])
    assert cache.keys[:, :, :60].equal(k)
    assert cache.values[:, :, :60].equal(v)


def test_a_padded_fork_that_finds_no_memory_to_truncate_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, other = (cache_of(Shape(1, 1, 1), batch=2, padded=True) for _ in range(2))
    forked = cache.fork()

    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(cache_shard, "join_rows", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            forked.truncate(30)
    assert forked.lengths.tolist() == other.lengths.tolist()
    for each in (forked, other):
        each.truncate(30)
        each.append(*numbers(2, 2, 2, 5, 8, seed=2))
    one, two = (am.decode(numbers(2, 4, 2, 8, seed=3), each) for each in (forked, other))
    assert float((one - two).abs().max()) < FLOAT32


def test_a_fork_that_finds_no_memory_for_another_batch_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of(Shape(1, 1, 1), batch=2)
    forked = cache.fork()

    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(frozen_piece, "join_rows", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            forked.reorder(torch.tensor([1, 0, 1]))
    q = numbers(2, 4, 2, 8, seed=3)
    assert am.decode(q, forked).equal(am.decode(q, cache))


def test_a_save_after_a_reorder_that_failed_is_of_the_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, reorder = cache_of(Shape(1, 1, 1), batch=2), CacheShard.reorder
    cache.save(tmp_path)

    def half(shard: CacheShard, index: torch.Tensor) -> None:
        reorder(shard, index)
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(CacheShard, "reorder", half)
        with pytest.raises(torch.OutOfMemoryError):
            cache.reorder(torch.tensor([1, 0]))
    cache.save(tmp_path)
    loaded = am.KVCache.load(tmp_path, None)
    assert loaded.keys[:, :, :61].equal(cache.keys[:, :, :61])


@pytest.mark.parametrize("point", ["resize", "append_at"])
def test_pages_that_find_no_memory_leave_the_cache_empty(point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = am.KVCache(None, batch=1, kv_heads=2, head_dim=8, capacity=60, dtype=torch.float32, block=4)
    keys, values, table = numbers(8, 4, 2, 8, seed=1), numbers(8, 4, 2, 8, seed=2), torch.tensor([[2, 3, 4]])

    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(CacheShard, point, no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            cache.append_pages(keys, values, table)
    assert (cache.length, cache.used, cache.shard.earlier_pieces, cache.shards.forked) == (0, 0, (), False)
    assert (cache.shards.known_length, cache.shard.token_bytes) == (0, 0)
    cache.append_pages(keys, values, table)
    cache.append(*numbers(2, 1, 2, 48, 8, seed=3))
    assert cache.keys[0, :, :12].equal(keys[2:5].flatten(0, 1).transpose(0, 1))
    assert cache.keys[0, :, 12:60].equal(numbers(2, 1, 2, 48, 8, seed=3)[0, 0])
