"""Shards that take rows of files of any ranks: each token of each head once, and nothing of a file that is wrong."""

from functools import partial as partial_of

import pytest
import torch
from torch import Tensor

import attnmesh as am
from attnmesh.core.turns import turns
from attnmesh.errors import StoreError
from attnmesh.mesh.axes import Axis
from attnmesh.store.shard_filler import ShardFiller
from tests.support.caches.make import random_cache

LENGTH = 23


def read(tensors: dict[str, Tensor], name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of a file, which has the dtype and the shape that the filler expects."""
    assert (tensors[name].dtype, tuple(tensors[name].shape)) == (dtype, shape)
    return tensors[name]


def files_of(cache: am.KVCache) -> list[tuple[Tensor, Axis, dict[str, Tensor]]]:
    """Return the files of four ranks: two along the heads, and two of unequal shares along the tokens."""
    shard, files = cache.own_shard, []
    for head_rank in range(2):
        for turn in turns((3, 1)):
            tokens, axis = turn.positions(LENGTH), Axis(2, head_rank)
            keys, values = (x[:, axis.slice_of(x.shape[1])][:, :, tokens] for x in shard.kv_tensors)
            files.append((tokens, axis, {"keys 7": keys, "values 7": values}))
    return files


@pytest.mark.parametrize("start", [0, 5])
def test_files_of_other_ranks_fill_a_shard(start: int) -> None:
    cache, empty = random_cache(LENGTH, None), random_cache(0, None)
    filler = ShardFiller({7: empty.own_shard}, start, LENGTH, oldest_kept_token=start)
    for tokens, axis, tensors in files_of(cache):
        filler.put(tokens, axis, partial_of(read, tensors), "a file")
    filler.check_all_filled("a folder")
    filled = [x[:, :, : LENGTH - start] for x in empty.own_shard.kv_tensors]
    assert all(
        torch.equal(x, wanted[:, :, start:LENGTH]) for x, wanted in zip(filled, cache.own_shard.kv_tensors, strict=True)
    )
    assert empty.own_shard.token_index[: LENGTH - start].tolist() == [*range(start, LENGTH)]


def test_rows_that_lack_or_come_twice_raise() -> None:
    files = files_of(random_cache(LENGTH, None))
    filler = ShardFiller({7: random_cache(0, None).own_shard}, 0, LENGTH, oldest_kept_token=0)
    for tokens, axis, tensors in files[:3]:
        filler.put(tokens, axis, partial_of(read, tensors), "a file")
    with pytest.raises(StoreError, match=f"every token once, given 18 of this rank's {LENGTH} tokens in a folder"):
        filler.check_all_filled("a folder")
    tokens, axis, tensors = files[0]
    with pytest.raises(StoreError, match="every token once, given some twice in a file"):
        filler.put(tokens, axis, partial_of(read, tensors), "a file")
    tokens, axis, tensors = files[3]
    with pytest.raises(StoreError, match="every token once, given some twice in a file"):
        filler.put(tokens[[0, 0]], axis, partial_of(read, tensors), "a file")


def test_files_without_rows_of_this_rank_are_not_read() -> None:
    filler = ShardFiller({7: random_cache(0, None).own_shard}, 4, 8, oldest_kept_token=0)
    filler.put(torch.tensor([1, 3, 9]), Axis(1, 0), partial_of(read, {}), "a file")
    assert not filler.is_filled.any()
