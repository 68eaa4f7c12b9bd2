"""Decoding from a sharded cache: exact, reproducible bits, and traffic that does not grow."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import attnmesh as am
from attnmesh import errors
from attnmesh.mesh.shapes import AXES, Shape
from attnmesh.runtime.counters import count_traffic
from tests.support.caches.make import random_cache
from tests.support.process.resident import resident
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth import histories
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.problems import numbers
from tests.support.truth.seeds import pairs, rotated, seeds
from tests.support.truth.tolerances import FLOAT32, assert_near

HEADS, WIDTH = (4, 2), 8


@on_each_rank
def decode_last_tokens(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    two_ranks = named_mesh(Shape(1, 1, 2), AXES)  # along keys
    cache = am.KVCache(two_ranks, batch=1, kv_heads=2, head_dim=8, capacity=40, dtype=torch.float32, block=4)
    cache.append(k, v)
    return am.decode(q, cache)


def test_a_step_on_two_ranks_is_causal_attention(pool: Pool) -> None:
    q, (k, v) = numbers(1, 4, 3, 8, seed=1), numbers(2, 1, 2, 30, 8)  # the last 3 of 30 tokens
    visible = torch.arange(30) <= torch.arange(27, 30)[:, None]
    expected = scaled_dot_product_attention(q.double(), k.double(), v.double(), visible, enable_gqa=True)
    for out in pool.run(2, decode_last_tokens, q, k, v):
        assert_near(out.double(), expected, FLOAT32)


# --- random histories against float64 ---


def history_seeds() -> list[Any]:
    """Return seeds of histories. Those of the first 10 on 1, 2 and 4 ranks alone are quick."""
    few = [seed for seed in range(10) if {phase.shape.ranks for phase in histories.draw(seed).phases} <= {1, 2, 4}]
    return [
        pytest.param(*one.values, marks=[*one.marks, *[pytest.mark.quick] * (one.values[0] in few)])
        for one in seeds(10, 200)
    ]


@pytest.mark.parametrize("seed", history_seeds())
def test_random_histories_agree_with_float64(pool: Pool, tmp_path: Path, seed: int) -> None:
    histories.check(histories.draw(seed), pool, tmp_path)


# --- the same bits ---


@on_each_rank
def decode_reproducibly(
    shape: tuple[int, ...],
    tokens: int,
    rows: int,
    dtype: torch.dtype,
    group: int = 2,
    softcap: float | None = None,
) -> Tensor:
    sizes = {"batch": 3, "dtype": dtype, "capacity": tokens + 20, "block": 256 if tokens > 60000 else 16}
    cache = random_cache(tokens, named_mesh(Shape(*shape), AXES), **sizes)
    q = numbers(3, group * HEADS[1], min(rows, tokens), WIDTH, seed=1, dtype=dtype)
    return am.decode(q, cache, reproducible=True, softcap=softcap)


def reproducible_cases() -> list[Any]:
    """Return tokens, rows and dtypes, of which one in two is a sample, and of the longest cache one in four."""
    dtypes = torch.float32, torch.bfloat16
    longest = [
        pytest.param(65537, rows, dtype, marks=[pytest.mark.long] * ((rows, dtype) != (4, torch.bfloat16)))
        for rows, dtype in product([1, 4], dtypes)
    ]
    return [*rotated([1, 17, 4095], [1, 4], dtypes, every=2), *longest]


@pytest.mark.parametrize(("tokens", "rows", "dtype"), reproducible_cases())
def test_bits_are_the_same_on_any_power_of_two(pool: Pool, tokens: int, rows: int, dtype: torch.dtype) -> None:
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    (alone,) = pool.run(1, decode_reproducibly, (1, 1, 1), tokens, rows, dtype)
    for shape in ((1, 1, 2), (1, 2, 2), (1, 1, 8), (2, 1, 4)):
        for out in pool.run(Shape(*shape).ranks, decode_reproducibly, shape, tokens, rows, dtype):
            assert torch.equal(out.view(bits), alone.view(bits)), shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 17, 4095])
def test_bits_are_the_same_with_one_query_row_per_key_head(pool: Pool, tokens: int, dtype: torch.dtype) -> None:
    (alone,) = pool.run(1, decode_reproducibly, (1, 1, 1), tokens, 1, dtype, 1)
    for shape in ((1, 1, 2), (1, 2, 2), (1, 1, 8), (2, 1, 4)):
        for out in pool.run(Shape(*shape).ranks, decode_reproducibly, shape, tokens, 1, dtype, 1):
            assert torch.equal(out.view(torch.int16), alone.view(torch.int16)), shape


@pytest.mark.parametrize(("softcap", "dtype"), pairs([2.0, 30.0], [torch.float32, torch.bfloat16]))
def test_bits_are_the_same_with_capped_logits(pool: Pool, softcap: float, dtype: torch.dtype) -> None:
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    for tokens, rows, group in ((4095, 40, 2), (300, 1, 1)):
        arguments = tokens, rows, dtype, group, softcap
        (alone,) = pool.run(1, decode_reproducibly, (1, 1, 1), *arguments)
        for shape in ((1, 2, 2), (2, 1, 4)):
            for out in pool.run(Shape(*shape).ranks, decode_reproducibly, shape, *arguments):
                assert torch.equal(out.view(bits), alone.view(bits)), shape


@on_each_rank
def decode_after_sharded_prefill(layout: am.Striped) -> str:
    cache = am.KVCache(
        named_mesh(Shape(1, 1, 2), AXES), batch=1, kv_heads=2, head_dim=8, capacity=64, dtype=torch.float32, block=4
    )
    positions = layout.positions(33, 2, dist.get_rank())
    cache.append_shard(*torch.ones(2, 1, 2, len(positions), 8).unbind(), positions)
    try:
        am.decode(numbers(1, HEADS[0], 1, WIDTH, seed=1), cache, reproducible=True)
    except errors.LayoutError as error:
        return str(error)
    return "no error"


def test_reproducible_needs_a_block_cyclic_prefill(pool: Pool) -> None:
    assert pool.run(2, decode_after_sharded_prefill, am.Striped(4)) == ["no error"] * 2
    for message in pool.run(2, decode_after_sharded_prefill, am.Striped(2)):
        assert "a cache with block-cyclic tokens, given tokens in the layout of a sharded prefill" in message


# --- traffic and memory ---


@on_each_rank
def count_traffic_of_a_step(tokens: int) -> tuple[int, int]:
    cache = random_cache(tokens, named_mesh(Shape(1, 1, 4), AXES), capacity=tokens + 20)
    with count_traffic() as received:
        am.decode(numbers(1, HEADS[0], 1, WIDTH, seed=1), cache, merge="tree")
    return received.bytes, cache.used


def test_traffic_is_independent_of_length_and_shards_are_even(pool: Pool) -> None:
    for tokens in (100, 3000):
        for received, used in pool.run(4, count_traffic_of_a_step, tokens):
            assert received == 2 * 4 * (2 + HEADS[0] + HEADS[0] * WIDTH)
            assert abs(used - tokens / 4) <= 16


@on_each_rank
def measure_memory_growth() -> float:
    """Return the megabytes by which a rank's memory grows from step 100 to step 1,000."""
    cache = random_cache(30, named_mesh(Shape(1, 1, 2), AXES), capacity=1100)
    for step in range(1000):
        cache.append(*torch.ones(2, 1, HEADS[1], 1, WIDTH).unbind())
        am.decode(numbers(1, HEADS[0], 1, WIDTH, seed=1), cache)
        if step == 100:
            before = resident()
    return (resident() - before) / 1e6


def test_memory_is_constant_over_steps(pool: Pool) -> None:
    assert max(pool.run(2, measure_memory_growth)) < 4, "the allocator's own pages"


# --- numbers that are not finite ---


@on_each_rank
def find_heads_with_nan() -> list[list[bool]]:
    """Return whether each column of each head is NaN, once a value of the first key head is."""
    cache = random_cache(100, named_mesh(Shape(1, 1, 4), AXES))
    if dist.get_rank() == 2:
        cache.values[0, 0, 3] = torch.nan
    return am.decode(numbers(1, HEADS[0], 1, WIDTH, seed=1), cache)[0, :, 0].isnan().tolist()  # type: ignore[no-any-return]


def test_nan_in_one_shard_reaches_its_heads_on_all_ranks(pool: Pool) -> None:
    assert pool.run(4, find_heads_with_nan) == [[[True] * WIDTH] * 2 + [[False] * WIDTH] * 2] * 4
