"""Forked caches continue apart, with the bits of copies, and share the memory of whole blocks."""

import tempfile
from copy import deepcopy
from typing import Any

import pytest
import torch

import attnmesh as am
from attnmesh import errors
from attnmesh.mesh.shapes import Shape
from tests.support.caches.make import along_keys, mesh_or_none, random_cache
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.problems import numbers
from tests.support.truth.seeds import rotated
from tests.support.truth.tolerances import FLOAT32

SHAPES = [Shape(1, 1, 1), Shape(1, 1, 2), Shape(1, 3, 1), Shape(1, 2, 2), Shape(2, 1, 2)]


def pieces(cache: am.KVCache) -> list[int]:
    """Return the addresses of the keys that the cache shares."""
    return [piece.kv_tensors[0].data_ptr() for piece in cache.own_shard.earlier_pieces]


@on_each_rank
def check_forks_that_continue(shape: Shape, batch: int, padded: bool, reproducible: bool) -> None:
    """Compare three forks with copies that go through the same calls."""
    options = {"batch": batch, "padding": 33 if padded else 0}
    forked, copied = ([random_cache(61, mesh_or_none(shape), **options)] for _ in range(2))
    for source in (0, 1):
        forked.append(forked[source].fork())
        copied.append(deepcopy(copied[source]))

    def check() -> None:
        for number, (one, other) in enumerate(zip(forked, copied, strict=True)):
            q = numbers(other.config.batch, 4, 2, 8, seed=number)
            given, expected = (am.decode(q, cache, reproducible=reproducible) for cache in (one, other))
            assert torch.equal(given, expected) if reproducible else torch.allclose(given, expected, atol=FLOAT32)
            assert (one.length, one.used) == (other.length, other.used)

    def change(act: Any) -> None:
        for number, pair in enumerate(zip(forked, copied, strict=True)):
            for cache in pair:
                act(cache, number)
        check()

    left = (60, 35, 7)
    check()
    change(lambda cache, n: cache.append(*numbers(2, batch, 2, 3 + n, 8, seed=n)))
    change(lambda cache, n: cache.truncate(left[n]))
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
    cache = random_cache(61, mesh_or_none(shape))
    other = cache.fork()
    whole = cache.used // cache.config.block * cache.config.block
    assert cache.own_shard.earlier_tokens == other.own_shard.earlier_tokens == whole
    assert pieces(cache) == pieces(other)
    before = pieces(cache)
    other.reorder(torch.zeros(4, dtype=torch.long))  # four beams of one prompt
    assert pieces(other) == before
    assert other.own_shard.earlier_pieces[0].kv_tensors[0].stride(0) == 0
    other.reorder(torch.tensor([3, 3, 1, 0]))
    assert pieces(other) == before
    other.truncate(cache.length - 1)
    kept = sum(piece.token_count for piece in other.own_shard.earlier_pieces)
    assert kept >= whole - cache.config.block  # the block that was cut is copied, no other
    assert pieces(other) == before


@pytest.mark.parametrize("shape", [Shape(1, 1, 1), Shape(1, 1, 2), Shape(2, 1, 2)], ids=str)
def test_whole_blocks_are_shared_and_not_copied(shape: Shape, pool: Pool) -> None:
    pool.run(shape.ranks, check_shared_blocks, shape)


@on_each_rank
def check_saved_fork(shape: Shape, folder: str) -> None:
    cache = random_cache(61, mesh_or_none(shape), batch=2)
    other, q = cache.fork(), numbers(2, 4, 1, 8)
    other.append(*numbers(2, 2, 2, 5, 8, seed=1))
    expected = am.decode(q, other)
    other.save(folder)
    for found in (other, am.KVCache.load(folder, cache.device_mesh), deepcopy(other)):
        assert torch.allclose(am.decode(q, found), expected, atol=FLOAT32)
        assert not found.local_shards.forked
    assert cache.local_shards.forked
    like = random_cache(61, mesh_or_none(shape), batch=2)
    assert torch.allclose(am.decode(q, cache), am.decode(q, like), atol=FLOAT32)


@pytest.mark.parametrize("shape", [Shape(1, 1, 1), Shape(1, 1, 3), Shape(2, 2, 1)], ids=str)
def test_a_saved_fork_is_a_plain_cache(shape: Shape, pool: Pool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pool.run(shape.ranks, check_saved_fork, shape, folder)


@on_each_rank
def catch_error_during_save(shape: Shape, folder: str) -> str:
    cache = random_cache(61, mesh_or_none(shape))
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
        answers = pool.run(shape.ranks, catch_error_during_save, shape, folder)
    expected = "fork: expected a cache at rest, given a cache whose save is writing. Fix: call wait() on the result of"
    for answer in answers:
        assert answer.startswith(expected), answer


@on_each_rank
def check_recovered_forks() -> None:
    cache = random_cache(61, along_keys(2), copies=2)
    other, q = cache.fork(), numbers(1, 4, 1, 8)
    other.append(*numbers(2, 1, 2, 5, 8, seed=1))
    expected = am.decode(q, other)
    (found,) = am.recover([other], cache.device_mesh)
    assert torch.allclose(am.decode(q, found), expected, atol=FLOAT32)


def test_forks_with_copies_are_recovered(pool: Pool) -> None:
    pool.run(2, check_recovered_forks)


def test_a_copy_of_a_fork_shares_no_block() -> None:
    """So it serves graphs and reproducible steps, as the error of a fork in a graph says."""
    cache = random_cache(20)
    fork = cache.fork()
    other = deepcopy(fork)
    assert [each.local_shards.forked for each in (cache, fork, other)] == [True, True, False]
    assert not pieces(other)
    other.local_shards.check_in_graph("decode")


def test_a_fork_of_a_window_shares_no_block() -> None:
    cache = random_cache(20, mask=am.Window(6))
    for each in (cache.fork(), cache):
        assert not each.local_shards.forked
        assert not pieces(each)
        each.local_shards.check_in_graph("decode")


def test_a_graph_refuses_a_fork() -> None:
    cache = am.KVCache(None, batch=1, kv_heads=2, head_dim=8, capacity=50, dtype=torch.float32)
    cache.append(*numbers(2, 1, 2, 20, 8))
    other = cache.fork()
    with pytest.raises(errors.KernelError, match="expected a cache of one piece in a graph, given a forked cache"):
        torch.compile(lambda x: am.decode(x, other), backend="eager")(numbers(1, 4, 1, 8))
