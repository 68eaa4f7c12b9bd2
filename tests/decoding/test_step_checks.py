"""Checks of steps on more ranks than `tests/refusals` has, and of what calls before them have changed on one rank."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import attnmesh as am
from attnmesh import errors
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.problems import numbers

HEADS, KV_HEADS, WIDTH, TOKENS = 4, 2, 8, 30


def cache_of(ranks: int, batch: int = 1, **options: Any) -> am.KVCache:
    sizes: dict[str, Any] = {"kv_heads": KV_HEADS, "head_dim": WIDTH, "capacity": 32, "dtype": torch.float32}
    return am.KVCache(named_mesh(Shape(1, 1, ranks), AXES), batch=batch, **sizes | options)


@on_each_rank
def decode_alike(ranks: int, odd_width: int, options: dict[str, Any]) -> None:
    cache = cache_of(ranks, block=16)
    cache.append(*numbers(2, 1, KV_HEADS, TOKENS, WIDTH))
    am.decode(numbers(1, HEADS, 1, WIDTH)[..., : odd_width if dist.get_rank() == 1 else WIDTH], cache, **options)


@pytest.mark.parametrize("options", [{"reproducible": True}, {"merge": "tree"}, {"merge": "direct"}, {}])
def test_bad_query_on_one_rank_raises_on_all(pool: Pool, options: dict[str, Any]) -> None:
    for error in pool.ask(4, decode_alike, 4, 3, options):
        assert isinstance(error, errors.ShapeError)
        assert "decode q: expected shape (1, 'heads', 'length', 8), given (1, 4, 1, 3)" in str(error)


def test_three_ranks_have_no_reproducible_step(pool: Pool) -> None:
    for error in pool.ask(3, decode_alike, 3, WIDTH, {"reproducible": True}):
        assert isinstance(error, errors.KernelError)
        assert "ranks along queries and keys, and a tree, given 3 ranks" in str(error)


def append_padding(cache: am.KVCache, odd: bool) -> None:
    cache.append(*torch.ones(2, 2, KV_HEADS, 6, WIDTH), token_mask=torch.full((2, 6), not odd))


def append_and_reorder(cache: am.KVCache, odd: bool) -> None:
    cache.append(*torch.ones(2, 2, KV_HEADS, 6, WIDTH))
    cache.reorder(torch.tensor([int(odd), 0]))


UNCOMPARED_CALLS = {"padding": append_padding, "an order": append_and_reorder}
"""What a cache with `checked=False` does not compare. A checked step does."""


@on_each_rank
def decode_after_uncompared_call(name: str) -> None:
    cache = cache_of(2, batch=2, block=4, checked=False)
    UNCOMPARED_CALLS[name](cache, dist.get_rank() == 1)
    am.decode(torch.ones(2, HEADS, 1, WIDTH), cache, checked=True)


@pytest.mark.parametrize("name", UNCOMPARED_CALLS)
def test_a_step_finds_what_differs_in_a_cache_that_compares_nothing(name: str, pool: Pool) -> None:
    for error in pool.ask(2, decode_after_uncompared_call, name):
        assert isinstance(error, errors.InputError)
        assert "ranks  padding and order\n    0      " in str(error)


def test_tensors_with_gradients_are_refused() -> None:
    cache = am.KVCache(None, batch=1, kv_heads=1, head_dim=2, capacity=8, dtype=torch.float32)
    learned = torch.ones(1, 1, 1, 2, requires_grad=True)
    with pytest.raises(errors.KernelError, match="append k: expected a tensor without gradients"):
        cache.append(learned, learned)
    with torch.no_grad():
        cache.append(learned, learned)
        am.decode(learned, cache)
    with pytest.raises(errors.KernelError, match="decode q: expected a tensor without gradients"):
        am.decode(learned, cache)
