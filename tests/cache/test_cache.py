"""A cache by itself: tokens are appended in place, its sizes are checked, and it outlives inference mode."""

import pytest
import torch

import attnmesh as am
from attnmesh import errors
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.mesh_problems import named_mesh
from tests.support.pool import Pool, on_each_rank


@on_each_rank
def append_keeps_addresses() -> bool:
    mesh, sizes = named_mesh(Shape(1, 1, 2), AXES), {"kv_heads": 2, "head_dim": 8, "capacity": 50}
    cache = am.KVCache(mesh, batch=1, dtype=torch.float32, **sizes)
    cache.append(*torch.randn(2, 1, 2, 30, 8).unbind())
    addresses = [x.data_ptr() for x in (cache.keys, cache.values, cache.shard.token_index, cache.shard.state)]
    for _ in range(20):
        cache.append(*torch.randn(2, 1, 2, 1, 8).unbind())
    return addresses == [x.data_ptr() for x in (cache.keys, cache.values, cache.shard.token_index, cache.shard.state)]


def test_append_writes_in_place(pool: Pool) -> None:
    assert pool.run(2, append_keeps_addresses) == [True] * 2


def in_inference_mode() -> bool:
    with torch.inference_mode():
        cache = am.KVCache(None, batch=1, kv_heads=1, head_dim=2, capacity=8, dtype=torch.float32)
        cache.append(*torch.ones(2, 1, 1, 3, 2).unbind(), token_mask=torch.tensor([[False, True, True]]))
        inside = am.decode(torch.ones(1, 1, 1, 2), cache)
    cache.append(*torch.ones(2, 1, 1, 1, 2).unbind())
    cache.truncate(3)
    return torch.equal(am.decode(torch.ones(1, 1, 1, 2), cache), inside)


def test_a_cache_made_in_inference_mode_lives_on_outside() -> None:
    assert in_inference_mode()


INVALID_SIZES = [
    (
        {"capacity": 2**47},
        errors.ShapeError,
        "KVCache capacity: expected tokens that fit the device's memory, given no",
    ),
    ({"capacity": 10**30}, errors.ShapeError, "KVCache capacity: expected at most 281,474,976,710,656, given 1,0"),
    ({"capacity": 0}, errors.ShapeError, "KVCache capacity: expected a whole number, 1 or more, given 0"),
    ({"block": 2.5}, errors.ShapeError, "KVCache block: expected a whole number"),
    ({"dtype": torch.int8}, errors.DtypeError, "KVCache dtype: expected one of float64"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), INVALID_SIZES)
def test_invalid_cache_sizes_raise(changes: dict[str, object], kind: type[Exception], message: str) -> None:
    options = {"batch": 1, "kv_heads": 2, "head_dim": 8, "capacity": 10, "dtype": torch.float32} | changes
    with pytest.raises(kind, match=message):
        am.KVCache(None, **options)
