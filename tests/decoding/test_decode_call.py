"""Decoding from a sharded cache: exact, reproducible bits, one graph, and an error wherever ranks differ."""

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
from benchmarks.timing import resident
from tests.support import histories
from tests.support.mesh_problems import named_mesh
from tests.support.pool import Pool, on_each_rank
from tests.support.seeds import pairs, rotated, seeds, some

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
def compiles_to_one_graph(shape: tuple[int, ...]) -> bool:
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
    return all(torch.equal(*pair) for pair in pairs) and len(graphs) == 1 and caches[1].length == 36


@pytest.mark.parametrize("shape", some([(1, 1, 1), (1, 1, 2), (2, 1, 1)], (1, 1, 2)))
def test_step_is_one_graph_for_all_lengths(pool: Pool, shape: tuple[int, ...]) -> None:
    """Lengths live on the device, so a growing cache causes no new trace."""
    ranks = Shape(*shape).ranks
    assert pool.run(ranks, compiles_to_one_graph, shape) == [True] * ranks


@on_each_rank
def compiled_with_lengths(odd: int) -> str:
    """On a rank: the output of a graph in which rank 1 has `odd` more real keys."""
    cache = cache_of((1, 1, 2), 30)
    step = torch.compile(lambda q, lengths: am.decode(q, cache, key_lengths=lengths), fullgraph=True, backend="eager")
    with torch.no_grad():
        out = step(query(1), torch.tensor([20 + odd * dist.get_rank()]))
    return "NaN" if bool(out.isnan().all()) else "numbers" if bool(out.isfinite().all()) else "some NaN"


@pytest.mark.parametrize(("odd", "found"), [(0, "numbers"), (1, "NaN")])
def test_key_lengths_that_differ_in_a_graph_give_nan(odd: int, found: str, pool: Pool) -> None:
    assert pool.run(2, compiled_with_lengths, odd) == [found] * 2


@on_each_rank
def compiled_latent_steps() -> bool:
    sizes = {"batch": 1, "kv_heads": 1, "head_dim": WIDTH, "value_dim": WIDTH - 2, "capacity": 40, "values": "prefix"}
    caches = [am.KVCache(named_mesh(Shape(1, 1, 2), AXES), dtype=torch.float32, **sizes) for _ in range(2)]

    def step(cache: am.KVCache, q: Tensor, latents: Tensor) -> Tensor:
        cache.append(latents)
        return am.decode(q, cache)

    compiled_step = torch.compile(step, fullgraph=True, backend="eager")
    new = torch.randn(20, 1, 1, 1, WIDTH, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return all(torch.equal(step(caches[0], query(1), x), compiled_step(caches[1], query(1), x)) for x in new)


def test_a_step_over_latents_compiles(pool: Pool) -> None:
    assert pool.run(2, compiled_latent_steps) == [True] * 2


@on_each_rank
def compiled_steps_past_capacity_are_nan() -> bool:
    cache = cache_of((1, 1, 2), 30, capacity=32)
    step = torch.compile(lambda q, k: (cache.append(k, k), am.decode(q, cache))[1], fullgraph=True, backend="eager")
    with torch.no_grad():
        outs = [step(query(1), torch.randn(1, HEADS[1], 1, WIDTH)) for _ in range(4)]
    return [bool(out.isnan().all()) for out in outs] == [False, False, True, True]


def test_compiled_step_past_capacity_returns_nan(pool: Pool) -> None:
    assert pool.run(2, compiled_steps_past_capacity_are_nan) == [True] * 2


# --- traffic and memory ---


@on_each_rank
def traffic(tokens: int) -> tuple[int, int]:
    cache = cache_of((1, 1, 4), tokens)
    with count_traffic() as received:
        am.decode(query(1), cache, merge="tree")
    return received.bytes, cache.used


def test_traffic_is_independent_of_length_and_shards_are_even(pool: Pool) -> None:
    for tokens in (100, 3000):
        for received, used in pool.run(4, traffic, tokens):
            assert received == 2 * 4 * (2 + HEADS[0] + HEADS[0] * WIDTH)
            assert abs(used - tokens / 4) <= 16


@on_each_rank
def memory_growth() -> float:
    """Return the megabytes by which a rank's memory grows from step 100 to step 1,000."""
    cache = cache_of((1, 1, 2), 30, capacity=1100)
    for step in range(1000):
        cache.append(*torch.ones(2, 1, HEADS[1], 1, WIDTH).unbind())
        am.decode(query(1), cache)
        if step == 100:
            before = resident("VmRSS")
    return (resident("VmRSS") - before) / 1e6


def test_memory_is_constant_over_steps(pool: Pool) -> None:
    assert max(pool.run(2, memory_growth)) < 4, "the allocator's own pages"


# --- bad input ---


@on_each_rank
def run_bad_step(kind: str) -> bool:
    """Make a bad call on rank 1 or on all ranks. The cache has to stay as it is."""
    cache = cache_of((1, 1, 3), 30, capacity=32)
    before = am.decode(query(1), cache)
    odd = dist.get_rank() == 1
    rows = torch.ones(1, HEADS[1], 3, WIDTH)
    try:
        match kind:
            case "token":
                am.decode(query(1) + odd, cache)
            case "shape":
                am.decode(query(2 if odd else 1), cache)
            case "width":
                am.decode(query(1)[..., : 4 if odd else 8], cache)
            case "dtype":
                am.decode(query(1).to(torch.float64 if odd else torch.float32), cache)
            case "mask":
                am.decode(query(1), cache, mask=am.Window(3) if odd else am.Causal())
            case "dropout":
                am.decode(query(1), cache, **({"dropout_p": 0.1} if odd else {}))
            case "unknown":
                am.decode(query(1), cache, **({"mesk": 0.1} if odd else {}))
            case "sinks":
                am.decode(query(1), cache, sinks=torch.full((4,), float(odd)))
            case "long message":
                am.decode(query(30).expand(1, 4, 30, 8), cache, scale="big" if odd else None)
            case "gather":
                am.decode(query(1), cache, merge="gather", scale="big" if odd else None)
            case "collective":
                am.decode(query(2 if odd else 1), cache, merge="allreduce")
            case "long":
                am.decode(query(31), cache)
            case "reproducible":
                am.decode(query(1), cache, reproducible=True)
            case "capacity":
                cache.append(rows, rows)
            case "heads":
                cache.append(rows[:, :1], rows[:, :1])
            case "cut":
                cache.truncate(31)
            case "order":
                cache.reorder(torch.tensor([1]))
            case "positions":
                cache.append_shard(
                    rows[:, :, :0],
                    rows[:, :, :0],
                    torch.zeros(int(odd), dtype=torch.long),
                )
            case "cover":
                cache.append_shard(rows[:, :, :1], rows[:, :, :1], torch.tensor([30]))
            case "token mask":
                cache.append(rows[:, :, :1], rows[:, :, :1], token_mask=torch.ones(2, 1, dtype=torch.bool))
    finally:
        assert torch.equal(am.decode(query(1), cache), before), "the cache has changed"
    return True


BAD_STEPS = [
    (
        "token",
        errors.MeshError,
        r"same call on .*:\n    ranks  q\n    0, 2   torch.float32 \[1, 4, 1, 8\] of digest \w+\n    1  ",
    ),
    (
        "shape",
        errors.MeshError,
        r"same call on .*:\n.*\n    0, 2 .*\[1, 4, 1, 8\].*\n    1 .*\[1, 4, 2, 8\]",
    ),
    ("width", errors.ShapeError, r"decode q: expected shape \(1, 'heads', 'length', 8\), given \(1, 4, 1, 4\)"),
    ("dtype", errors.DtypeError, r"decode q: expected torch.float32 on cpu, given torch.float64"),
    ("mask", errors.MeshError, r"ranks  mask\n    0, 2   Causal\(\)\n    1      Window\(3\)\nFix: "),
    ("dropout", errors.KernelError, "exact softmax attention under a mask of positions, given dropout_p="),
    ("unknown", errors.ArgumentError, "the arguments of its signature, given mesk="),
    ("sinks", errors.MeshError, r"ranks  sinks\n    0, 2   .*\n    1  "),
    ("long message", errors.DtypeError, "decode scale: expected None, 0 or a number"),
    ("gather", errors.DtypeError, "decode scale: expected None, 0 or a number"),
    ("collective", errors.MeshError, "same call on every rank"),
    ("long", errors.ShapeError, "given 31 queries and 30 of 32 tokens in the cache"),
    ("reproducible", errors.KernelError, "ranks along queries and keys, and a tree, given 3 ranks"),
    ("capacity", errors.ShapeError, "append: expected room .* given 30 tokens and 3 more in a cache of 32"),
    ("heads", errors.ShapeError, r"append k: expected shape \(1, 2, tokens, 8\), given \(1, 1, 3, 8\)"),
    (
        "cut",
        errors.ShapeError,
        "truncate: expected a length from 0 to 30, given 31 of type int. Fix: pass an int that is no more",
    ),
    ("order", errors.ShapeError, "reorder: expected a number of a sequence below 1 for each"),
    (
        "positions",
        errors.ShapeError,
        r"append_shard positions: expected shape \(0,\), one position a token, given shape \(1,\)",
    ),
    ("cover", errors.LayoutError, "positions from 30 to 32, each on one rank, given 3 positions with gaps or repeats"),
    ("token mask", errors.ShapeError, r"append token_mask: expected torch.bool \(1, 1\)"),
]


@pytest.mark.parametrize(("kind", "error", "message"), BAD_STEPS)
def test_all_ranks_raise_alike_and_continue(pool: Pool, kind: str, error: type[Exception], message: str) -> None:
    results = pool.ask(3, run_bad_step, kind)
    assert [type(result) for result in results] == [error] * 3
    assert len({str(result) for result in results}) == 1
    with pytest.raises(error, match=message):
        raise results[0]


@on_each_rank
def decode_bad_query_on_one_rank(options: dict[str, object]) -> str:
    cache = cache_of((1, 1, 4), 30)
    q = query(1) if dist.get_rank() != 1 else query(1)[:, :, :, :3]
    try:
        am.decode(q, cache, **options)
    except errors.ShapeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("options", [{"reproducible": True}, {"merge": "tree"}, {"merge": "direct"}, {}])
def test_bad_query_on_one_rank_raises_on_all(pool: Pool, options: dict[str, object]) -> None:
    for message in pool.run(4, decode_bad_query_on_one_rank, options):
        assert "decode q: expected shape (1, 'heads', 'length', 8), given (1, 4, 1, 3)" in message


@on_each_rank
def run_different_calls(kind: str) -> str:
    """Make a call that differs on rank 1, or that leaves caches different. Return the error."""
    odd = dist.get_rank() == 1
    cache = am.KVCache(
        named_mesh(Shape(1, 1, 2), AXES),
        batch=2,
        kv_heads=2,
        head_dim=8,
        capacity=1 << 14,
        dtype=torch.float32,
        block=4,
        checked=False if kind in ("padding", "order") else None,
    )
    rows = torch.ones(2, HEADS[1], 6, WIDTH)
    try:
        match kind:
            case "padding" | "padding at once":
                cache.append(rows, rows, token_mask=torch.full((2, 6), not odd))
            case "shard padding":
                mine = am.Contiguous().positions(6, 2, dist.get_rank())
                cache.append_shard(rows[:, :, mine], rows[:, :, mine], mine, token_mask=torch.full((2, 6), not odd))
            case "shard padding width":
                mine = am.Contiguous().positions(6, 2, dist.get_rank())
                cache.append_shard(rows[:, :, mine], rows[:, :, mine], mine, token_mask=torch.ones(2, 6 + odd) > 0)
            case "order" | "order at once":
                cache.append(rows, rows)
                cache.reorder(torch.tensor([int(odd), 0]))
            case "cut of shards":
                mine = am.Contiguous().positions(6, 2, dist.get_rank())
                cache.append_shard(rows[:, :, mine], rows[:, :, mine], mine)
                cache.truncate(100 if odd else 1)
            case "long":
                cache.append(*torch.ones(2, 2, HEADS[1], 5000, WIDTH).unbind())
                am.decode(torch.ones(2, 4, 5000 if odd else 1, WIDTH), cache)
            case "device":
                am.KVCache(
                    named_mesh(Shape(1, 1, 2), AXES),
                    batch=1,
                    kv_heads=1,
                    head_dim=1,
                    capacity=1,
                    dtype=torch.float32,
                    device="foo" if odd else None,
                )
            case "merge":
                out = torch.ones(1, 2, 3 + odd, 4)
                am.merge_across(am.Partial(out, out[..., 0]), dist.group.WORLD)
            case "merge alone":
                out = torch.ones(1, 2, 3, 4)
                am.merge_across(am.Partial(out, out[..., 0]), dist.group.WORLD, base="3" if odd else "e")
        am.decode(torch.ones(2, 4, 1, WIDTH), cache, checked=True)
    except errors.InputError as error:
        return str(error)
    return "no error"


DIFFERENT_CALLS = {
    "padding": "ranks  padding and order\n    0      ",
    "padding at once": "append: expected the same call on every rank, given:\n    ranks  token_mask\n    0 ",
    "shard padding": "append_shard: expected the same call on every rank",
    "shard padding width": "append_shard: expected the same call on every rank",
    "order": "ranks  padding and order\n    0      ",
    "order at once": "ranks  to\n    0      [",
    "cut of shards": "truncate: expected a length from 0 to 6, given 100",
    "long": "decode: expected the same call on every rank",
    "device": "KVCache device: expected a device that PyTorch knows, given 'foo'",
    "merge": "merge_across: expected the same call on every rank",
    "merge alone": "merge_across base: expected one of e, 2, given '3'",
}


@pytest.mark.parametrize("kind", DIFFERENT_CALLS)
def test_different_calls_raise_on_all_ranks(pool: Pool, kind: str) -> None:
    for message in pool.run(2, run_different_calls, kind):
        assert DIFFERENT_CALLS[kind] in message


def test_gradients_raise() -> None:
    cache = am.KVCache(None, batch=1, kv_heads=1, head_dim=2, capacity=8, dtype=torch.float32)
    learned = torch.ones(1, 1, 1, 2, requires_grad=True)
    with pytest.raises(errors.KernelError, match="append k: expected a tensor without gradients"):
        cache.append(learned, learned)
    with torch.no_grad():
        cache.append(learned, learned)
        am.decode(learned, cache)
    with pytest.raises(errors.KernelError, match="decode q: expected a tensor without gradients"):
        am.decode(learned, cache)


@on_each_rank
def nan_reaches_only_its_heads() -> bool:
    cache = cache_of((1, 1, 4), 100)
    if dist.get_rank() == 2:
        cache.values[0, 0, 3] = torch.nan
    out = am.decode(query(1), cache)
    return bool(out[:, :2].isnan().all()) and not bool(out[:, 2:].isnan().any())


def test_nan_in_one_shard_reaches_its_heads_on_all_ranks(pool: Pool) -> None:
    assert pool.run(4, nan_reaches_only_its_heads) == [True] * 4
