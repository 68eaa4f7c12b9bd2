"""Decoding from a sharded cache: exact, reproducible bits, one graph, and traffic that does not grow."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import attnmesh as am
from attnmesh import errors
from attnmesh.mesh.shapes import AXES, Shape
from attnmesh.runtime.counters import count_traffic
from tests.support.process.resident import resident
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth import histories
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.seeds import pairs, rotated, seeds, some
from tests.support.truth.tolerances import assert_near

HEADS, WIDTH = (4, 2), 8


def cache_of(
    shape: tuple[int, ...], tokens: int, *, batch: int = 1, dtype: torch.dtype = torch.float32, **options: int
) -> am.KVCache:
    """Return a cache with the same random tokens on any mesh."""
    sizes = {"kv_heads": HEADS[1], "head_dim": WIDTH, "capacity": tokens + 20, "block": 16} | options
    cache = am.KVCache(named_mesh(Shape(*shape), AXES), batch=batch, dtype=dtype, **sizes)
    generator = torch.Generator().manual_seed(0)
    cache.append(*torch.randn(2, batch, HEADS[1], tokens, WIDTH, generator=generator).to(dtype).unbind())
    return cache


def query(tokens: int, batch: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(batch, HEADS[0], tokens, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


# --- against float64 ---


def history_seeds() -> list[Any]:
    """Return seeds of histories. Those of the first 16 on 1, 2 and 4 ranks alone are quick."""
    few = [seed for seed in range(16) if {phase.shape.ranks for phase in histories.draw(seed).phases} <= {1, 2, 4}]
    return [
        pytest.param(*one.values, marks=[*one.marks, *[pytest.mark.quick] * (one.values[0] in few)])
        for one in seeds(16, 200)
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
    cache = cache_of(shape, tokens, batch=3, dtype=dtype, block=256 if tokens > 60000 else 16)
    q = query(min(rows, tokens), 3, dtype)[:, : group * HEADS[1]]
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
        am.decode(query(1), cache, reproducible=True)
    except errors.LayoutError as error:
        return str(error)
    return "no error"


def test_reproducible_needs_a_block_cyclic_prefill(pool: Pool) -> None:
    assert pool.run(2, decode_after_sharded_prefill, am.Striped(4)) == ["no error"] * 2
    for message in pool.run(2, decode_after_sharded_prefill, am.Striped(2)):
        assert "a cache with block-cyclic tokens, given tokens in the layout of a sharded prefill" in message


# --- one graph ---


@on_each_rank
def check_one_graph(shape: tuple[int, ...]) -> None:
    caches = [cache_of(shape, 30) for _ in range(2)]
    new = torch.randn(6, 2, 1, HEADS[1], 1, WIDTH, generator=torch.Generator().manual_seed(2))
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    def step(cache: am.KVCache, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache.append(k, v)
        return am.decode(q * 2, cache) + 1

    compiled_step = torch.compile(step, fullgraph=True, backend=backend)
    with torch.no_grad():
        pairs = [(step(caches[0], query(1), *kv), compiled_step(caches[1], query(1), *kv)) for kv in new]
    for pair in pairs:
        assert_near(*pair)
    assert (len(graphs), caches[1].length) == (1, 36), (graphs, caches)


@pytest.mark.parametrize("shape", some([(1, 1, 1), (1, 1, 2), (2, 1, 1)], (1, 1, 2)))
def test_step_is_one_graph_for_all_lengths(pool: Pool, shape: tuple[int, ...]) -> None:
    """Lengths live on the device, so a growing cache causes no new trace."""
    pool.run(Shape(*shape).ranks, check_one_graph, shape)


@on_each_rank
def check_compiled_masks() -> None:
    cache, q = cache_of((1, 1, 2), 30), query(1)
    step = torch.compile(lambda mask: am.decode(q, cache, mask=mask), fullgraph=True, backend="aot_eager")
    for mask in (am.Causal(), am.Window(3), am.Window(5), am.Window(7)):
        assert_near(step(mask), am.decode(q, cache, mask=mask))


def test_a_compiled_step_takes_one_mask_after_another(pool: Pool) -> None:
    """PyTorch traces the second value of a number as a symbol, and a mask takes none."""
    pool.run(2, check_compiled_masks)


@on_each_rank
def decode_compiled_with_lengths(odd: int) -> str:
    """On a rank: the output of a graph in which rank 1 has `odd` more real keys."""
    cache = cache_of((1, 1, 2), 30)
    step = torch.compile(lambda q, lengths: am.decode(q, cache, key_lengths=lengths), fullgraph=True, backend="eager")
    with torch.no_grad():
        out = step(query(1), torch.tensor([20 + odd * dist.get_rank()]))
    return "NaN" if bool(out.isnan().all()) else "numbers" if bool(out.isfinite().all()) else "some NaN"


@pytest.mark.parametrize(("odd", "found"), [(0, "numbers"), (1, "NaN")])
def test_key_lengths_that_differ_in_a_graph_give_nan(odd: int, found: str, pool: Pool) -> None:
    assert pool.run(2, decode_compiled_with_lengths, odd) == [found] * 2


def test_a_padded_step_is_one_graph_before_any_eager_one() -> None:
    mask = am.Window(4)  # which no other test has used: nothing of it is cached
    sizes = {"batch": 2, "kv_heads": HEADS[1], "head_dim": WIDTH, "capacity": 20}
    cache = am.KVCache(None, **sizes, dtype=torch.float32)
    new = torch.randn(2, 2, HEADS[1], 6, WIDTH, generator=torch.Generator().manual_seed(2))
    token_mask = torch.ones(2, 6, dtype=torch.bool)
    token_mask[0, :2] = False
    cache.append(*new, token_mask=token_mask)
    q = torch.randn(2, HEADS[0], 1, WIDTH, generator=torch.Generator().manual_seed(3))
    compiled = torch.compile(lambda q: am.decode(q, cache, mask=mask), fullgraph=True, backend="eager")(q)
    assert compiled.equal(am.decode(q, cache, mask=mask))


@on_each_rank
def decode_compiled_with_histories(change: str) -> list[str]:
    """Return the outputs of a graph on equal caches, on ones that rank 1 has changed otherwise, and on equal ones."""
    cache, rank = cache_of((1, 1, 2), 0, batch=2), dist.get_rank()
    new = torch.randn(2, 2, HEADS[1], 6, WIDTH, generator=torch.Generator().manual_seed(2))
    q = torch.randn(2, HEADS[0], 1, WIDTH, generator=torch.Generator().manual_seed(3))
    step = torch.compile(lambda q: am.decode(q, cache), fullgraph=True, backend="eager")
    token_mask = torch.ones(2, 6, dtype=torch.bool)
    token_mask[0, 0] = False
    cache.append(*new, token_mask=token_mask)
    outs = [step(q)]
    if change == "padding":
        odd_mask = token_mask.clone()
        odd_mask[0, rank] = False
        cache.append(*new, token_mask=odd_mask)
    else:
        cache.reorder(torch.tensor([0, 1]))
        cache.reorder(torch.tensor([rank, 1 - rank]))
    outs.append(step(q))
    cache.truncate(0)
    cache.append(*new)
    if change == "padding":
        outs.append(step(q))
    return [
        "NaN" if bool(out.isnan().all()) else "numbers" if bool(out.isfinite().all()) else "some NaN" for out in outs
    ]


@pytest.mark.parametrize(
    ("change", "found"), [("padding", ["numbers", "NaN", "numbers"]), ("order", ["numbers", "NaN"])]
)
def test_histories_that_differ_in_a_graph_give_nan(change: str, found: list[str], pool: Pool) -> None:
    assert pool.run(2, decode_compiled_with_histories, change) == [found] * 2


@on_each_rank
def check_compiled_latent_steps() -> None:
    sizes = {"batch": 1, "kv_heads": 1, "head_dim": WIDTH, "value_dim": WIDTH - 2, "capacity": 40, "values": "prefix"}
    caches = [am.KVCache(named_mesh(Shape(1, 1, 2), AXES), dtype=torch.float32, **sizes) for _ in range(2)]

    def step(cache: am.KVCache, q: Tensor, latents: Tensor) -> Tensor:
        cache.append(latents)
        return am.decode(q, cache)

    compiled_step = torch.compile(step, fullgraph=True, backend="eager")
    new = torch.randn(20, 1, 1, 1, WIDTH, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        for x in new:
            assert_near(step(caches[0], query(1), x), compiled_step(caches[1], query(1), x))


def test_a_step_over_latents_compiles(pool: Pool) -> None:
    pool.run(2, check_compiled_latent_steps)


@on_each_rank
def decode_compiled_past_capacity() -> list[bool]:
    cache = cache_of((1, 1, 2), 30, capacity=32)

    @torch.compile(fullgraph=True, backend="eager")
    def step(q: Tensor, k: Tensor) -> Tensor:
        cache.append(k, k)
        return am.decode(q, cache)

    with torch.no_grad():
        outs = [step(query(1), torch.randn(1, HEADS[1], 1, WIDTH)) for _ in range(4)]
    return [bool(out.isnan().all()) for out in outs]


def test_compiled_step_past_capacity_returns_nan(pool: Pool) -> None:
    assert pool.run(2, decode_compiled_past_capacity) == [[False, False, True, True]] * 2


# --- traffic and memory ---


@on_each_rank
def count_traffic_of_a_step(tokens: int) -> tuple[int, int]:
    cache = cache_of((1, 1, 4), tokens)
    with count_traffic() as received:
        am.decode(query(1), cache, merge="tree")
    return received.bytes, cache.used


def test_traffic_is_independent_of_length_and_shards_are_even(pool: Pool) -> None:
    for tokens in (100, 3000):
        for received, used in pool.run(4, count_traffic_of_a_step, tokens):
            assert received == 2 * 4 * (2 + HEADS[0] + HEADS[0] * WIDTH)
            assert abs(used - tokens / 4) <= 16


@on_each_rank
def measure_memory_growth() -> float:
    """Return the megabytes by which a rank's memory grows from step 100 to step 1,000."""
    cache = cache_of((1, 1, 2), 30, capacity=1100)
    for step in range(1000):
        cache.append(*torch.ones(2, 1, HEADS[1], 1, WIDTH).unbind())
        am.decode(query(1), cache)
        if step == 100:
            before = resident()
    return (resident() - before) / 1e6


def test_memory_is_constant_over_steps(pool: Pool) -> None:
    assert max(pool.run(2, measure_memory_growth)) < 4, "the allocator's own pages"


# --- numbers that are not finite ---


@on_each_rank
def find_heads_with_nan() -> list[list[bool]]:
    """Return whether each column of each head is NaN, once a value of the first key head is."""
    cache = cache_of((1, 1, 4), 100)
    if dist.get_rank() == 2:
        cache.values[0, 0, 3] = torch.nan
    return am.decode(query(1), cache)[0, :, 0].isnan().tolist()  # type: ignore[no-any-return]


def test_nan_in_one_shard_reaches_its_heads_on_all_ranks(pool: Pool) -> None:
    assert pool.run(4, find_heads_with_nan) == [[[True] * WIDTH] * 2 + [[False] * WIDTH] * 2] * 4
