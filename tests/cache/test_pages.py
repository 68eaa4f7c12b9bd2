"""Pages of a cache, which an engine reads, and the blocks of an engine's pool that a cache takes."""

import pytest
import torch
from torch import Tensor

import attnmesh as am
from attnmesh import errors
from attnmesh.cache.memory_shard import MemoryShard
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.caches.make import empty_cache, mesh_or_none, random_cache
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.problems import numbers
from tests.support.truth.tolerances import FLOAT32


@on_each_rank
def check_pages(shape: Shape) -> None:
    """Attend to the pages of a rank as an engine does, and merge the ranks."""
    cache = random_cache(61, mesh_or_none(shape), batch=2)
    other = cache.fork()
    other.append(*numbers(2, 2, 2, 9, 8, seed=3))
    q, heads = numbers(2, 4, 1, 8), cache.rank_mesh.heads
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
    caches = [empty_cache(mesh, batch=2) for _ in range(2)]
    index, heads = caches[0].token_axis.index, caches[0].rank_mesh.heads.slice_of(2)
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
    shared = caches[0].own_shard.earlier_pieces[0].kv_tensors[0].data_ptr()
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


def read(cache: am.KVCache) -> Tensor:
    """Return the keys as an engine reads them from the pages."""
    found = []
    for pages in cache.pages():
        keys = pages.keys[pages.block_table.long()].flatten(1, 2).transpose(1, 2)
        found.append(keys[:, :, : int(pages.lengths[0])])
    return torch.cat(found, 2)


@pytest.mark.parametrize("order", [[0, 1], [1, 0], [0, 0], [1, 1, 0]], ids=str)
@pytest.mark.parametrize(("kv_heads", "block"), [(1, 4), (2, 4), (2, 16)])
def test_pages_of_a_reordered_fork_hold_its_keys_in_order(order: list[int], kv_heads: int, block: int) -> None:
    cache = random_cache(37, batch=2, kv_heads=kv_heads, block=block)
    other = cache.fork()
    other.reorder(torch.tensor(order))
    assert torch.equal(read(other), cache.keys[:, :, :37][order])


def test_pools_that_require_gradients_are_refused() -> None:
    pools = torch.zeros(2, 8, 4, 2, 8, requires_grad=True)
    with pytest.raises(errors.KernelError, match="append_pages"):
        empty_cache().append_pages(pools[0], pools[1], torch.tensor([[1, 2]]))


@pytest.mark.parametrize("point", ["resize", "append_rows_at"])
def test_pages_that_find_no_memory_leave_the_cache_empty(point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = am.KVCache(None, batch=1, kv_heads=2, head_dim=8, capacity=60, dtype=torch.float32, block=4)
    keys, values, table = numbers(8, 4, 2, 8, seed=1), numbers(8, 4, 2, 8, seed=2), torch.tensor([[2, 3, 4]])

    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(MemoryShard, point, no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            cache.append_pages(keys, values, table)
    assert (cache.length, cache.used, cache.own_shard.earlier_pieces, cache.local_shards.forked) == (0, 0, (), False)
    assert (cache.local_shards.counter.length, cache.own_shard.token_bytes) == (0, 0)
    cache.append_pages(keys, values, table)
    cache.append(*numbers(2, 1, 2, 48, 8, seed=3))
    assert cache.keys[0, :, :12].equal(keys[2:5].flatten(0, 1).transpose(0, 1))
    assert cache.keys[0, :, 12:60].equal(numbers(2, 1, 2, 48, 8, seed=3)[0, 0])
