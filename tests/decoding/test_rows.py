"""Rows of several caches in one step: each row is what its cache alone gives, and ranks raise alike."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import attnmesh as am
from attnmesh import errors
from attnmesh.mesh.shapes import AXES, Shape
from attnmesh.runtime.counters import count_traffic
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.seeds import rotated
from tests.support.truth.tolerances import FLOAT32, assert_near

HEADS, KV_HEADS, DIM = 4, 2, 8
LENGTHS = (61, 1, 200, 17)
SHAPES = [Shape(1, 1, 1), Shape(1, 1, 2), Shape(1, 3, 1), Shape(2, 1, 2)]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@on_each_rank
def decode_two_rows(q: Tensor, short: Tensor, long: Tensor) -> Tensor:
    two_ranks = named_mesh(Shape(1, 1, 2), AXES)  # along keys
    sizes: dict[str, Any] = {"batch": 1, "kv_heads": 4, "head_dim": 8, "capacity": 40, "block": 4}
    caches = [am.KVCache(two_ranks, dtype=torch.float32, **sizes) for _ in range(2)]
    caches[0].append(*short)
    caches[1].append(*long)
    return am.decode_rows(q, caches)


def test_each_row_on_two_ranks_is_attention_to_its_own_cache(pool: Pool) -> None:
    q, short, long = random(2, 4, 1, 8), random(2, 1, 4, 5, 8, seed=1), random(2, 1, 4, 30, 8, seed=2)
    # A row's one query is its last token, which sees all tokens.
    rows = [scaled_dot_product_attention(q[[row]].double(), *x.double()) for row, x in enumerate((short, long))]
    for out in pool.run(2, decode_two_rows, q, short, long):
        assert_near(out.double(), torch.cat(rows), FLOAT32)


# --- random rows against float64 ---


class Rows:
    """Caches of several lengths, and all that was appended to them, in float64."""

    def __init__(self, shape: Shape, dtype: torch.dtype = torch.float32, value_dim: int = DIM, **options: Any) -> None:
        self.dtype = dtype
        self.caches = []
        self.kept = []
        self.steps = 0
        self.value_dim = value_dim
        self.latent = options.get("values") == "prefix"
        sizes: dict[str, Any] = {"batch": 1, "kv_heads": 1 if self.latent else KV_HEADS, "head_dim": DIM}
        for number, tokens in enumerate(LENGTHS):
            more = {"capacity": tokens + 30, "block": 4 if number % 2 else 16, "value_dim": value_dim, "dtype": dtype}
            self.caches.append(am.KVCache(named_mesh(shape, AXES), **(sizes | more | options)))
            k, v = self.new(1, tokens, number)
            self.caches[-1].append(k, None if self.latent else v)
            self.kept.append((k, v))
        self.caches.append(self.caches[2].fork())
        self.kept.append(self.kept[2])

    def new(self, rows: int, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
        heads = 1 if self.latent else KV_HEADS
        k = random(rows, heads, tokens, DIM, seed=seed, dtype=self.dtype)
        v = random(rows, heads, tokens, self.value_dim, seed=100 + seed, dtype=self.dtype)
        return k, k[..., : self.value_dim] if self.latent else v

    def step(self, queries: int = 1, **options: Any) -> tuple[Tensor, Tensor]:
        """Append a token to each cache and decode. Return the output, and dense attention in float64."""
        self.steps += 1
        rows, seed = len(self.caches), 1000 * self.steps
        k, v = self.new(rows, queries, seed)
        q = random(rows, HEADS, queries, DIM, seed=seed + 1, dtype=self.dtype)
        out = am.decode_rows(q, self.caches, k=k, v=None if self.latent else v, **options)
        how = {name: options[name] for name in ("mask", "scale", "softcap", "sinks") if name in options}
        wanted = []
        for row in range(rows):
            one = slice(row, row + 1)
            self.kept[row] = tuple(torch.cat((x, new[one]), 2) for x, new in zip(self.kept[row], (k, v), strict=True))
            keys, values = (x.double() for x in self.kept[row])
            positions = torch.arange(keys.shape[2])
            if "sinks" in how:
                how["sinks"] = how["sinks"].double()
            sinks = how.get("sinks")
            plain = {name: x for name, x in how.items() if name != "sinks"} | {"mask": how.get("mask", am.Causal())}
            partial = am.attend(
                q[one].double(), keys, values, q_positions=positions[-queries:], kernel="reference", **plain
            )
            if sinks is not None:
                lse = sinks[None, :, None].expand(1, -1, queries)
                partial = am.merge(partial, am.Partial(torch.zeros_like(partial.out), lse.clone()))
            wanted.append(partial.out)
        return out, torch.cat(wanted)


@on_each_rank
def check_against_float64(shape: Shape, options: dict[str, Any], cache: dict[str, Any]) -> None:
    rows = Rows(shape, **cache)
    for _ in range(3):  # the first makes the plan, and the caches with blocks of 4 change owners
        out, wanted = rows.step(**options)
        if options.get("output") == "heads":
            wanted = own_heads(wanted, shape)
        tolerance = 2e-2 if rows.dtype == torch.bfloat16 else 2 * FLOAT32  # bfloat16 rounds outputs to 4 by 2e-2
        assert out.dtype == rows.dtype
        torch.testing.assert_close(out.double(), wanted, atol=tolerance, rtol=tolerance)


def own_heads(out: Tensor, shape: Shape) -> Tensor:
    """Return the heads of this rank."""
    rank = torch.distributed.get_rank()
    first, stop = HEADS * rank // shape.ranks, HEADS * (rank + 1) // shape.ranks
    return out[:, first:stop]


OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"mask": am.Window(9)}, {}),
    ({"mask": am.Window(9)}, {"mask": am.Window(9)}),
    ({"mask": am.Causal() & am.Chunks(8)}, {}),
    ({"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]), "softcap": 3.0, "scale": 0.7}, {}),
    ({"kernel": "reference"}, {"dtype": torch.float64}),
    ({"queries": 3}, {}),
    ({"merge": "gather"}, {}),
    ({"merge": "direct", "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}, {"dtype": torch.bfloat16}),
    ({"checked": False}, {"value_dim": 5}),
]


@on_each_rank
def check_padded_rows(shape: Shape, queries: int, mask: am.Mask) -> None:
    """Rows of caches with padding, of caches with padding that is none, and of caches without."""
    tokens = 21
    padding = torch.arange(tokens) >= torch.tensor([[5], [0], [0], [8]])
    caches = []
    for row, token_mask in enumerate(padding):
        sizes: dict[str, Any] = {"batch": 1, "kv_heads": KV_HEADS, "head_dim": DIM, "capacity": 40, "block": 4}
        cache = am.KVCache(named_mesh(shape, AXES), dtype=torch.float32, **sizes)
        k, v = (random(1, KV_HEADS, tokens, DIM, seed=10 * row + kind) for kind in range(2))
        cache.append(k, v, token_mask=None if row == 2 else token_mask[None])
        caches.append(cache)
    q = random(len(caches), HEADS, queries, DIM, seed=99)
    for _ in range(2):  # the second call finds its step prepared
        out = am.decode_rows(q, caches, mask=mask)
        expected = [am.decode(q[row : row + 1], cache, mask=mask) for row, cache in enumerate(caches)]
        torch.testing.assert_close(out, torch.cat(expected), atol=FLOAT32, rtol=FLOAT32)


@pytest.mark.parametrize("mask", [am.Causal(), am.Window(6)], ids=str)
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("shape", [Shape(1, 1, 1), Shape(1, 1, 3), Shape(2, 1, 1)], ids=str)
def test_padded_rows_are_those_of_each_cache(shape: Shape, queries: int, mask: am.Mask, pool: Pool) -> None:
    pool.run(shape.ranks, check_padded_rows, shape, queries, mask)


@pytest.mark.parametrize(("shape", "number"), rotated(SHAPES, range(len(OPTIONS)), every=2))
def test_rows_agree_with_float64(shape: Shape, number: int, pool: Pool) -> None:
    options, cache = OPTIONS[number]
    pool.run(shape.ranks, check_against_float64, shape, options, cache)


@pytest.mark.parametrize("shape", [Shape(1, 1, 1), Shape(1, 1, 3)], ids=str)
def test_rows_of_latents_agree_with_float64(shape: Shape, pool: Pool) -> None:
    pool.run(shape.ranks, check_against_float64, shape, {}, {"values": "prefix", "value_dim": 5})


@pytest.mark.parametrize("shape", [Shape(1, 1, 2), Shape(2, 1, 1)], ids=str)
def test_each_rank_gets_its_heads(shape: Shape, pool: Pool) -> None:
    pool.run(shape.ranks, check_against_float64, shape, {"output": "heads"}, {})


# --- bits ---


@on_each_rank
def step_twice(shape: Shape, reproducible: bool) -> list[Tensor]:
    rows = Rows(shape, block=16)
    return [rows.step(reproducible=reproducible)[0] for _ in range(2)]


def test_reproducible_rows_have_the_same_bits_on_any_ranks(pool: Pool) -> None:
    alone = pool.run(1, step_twice, Shape(1, 1, 1), True)[0]
    for shape in (Shape(1, 1, 2), Shape(1, 1, 4)):
        for answer in pool.run(shape.ranks, step_twice, shape, True):
            assert all(torch.equal(one, other) for one, other in zip(answer, alone, strict=True))


@on_each_rank
def check_same_on_all(shape: Shape) -> None:
    rows = Rows(shape)
    for _ in range(2):
        out, _ = rows.step()
        first = out.clone()
        torch.distributed.broadcast(first, 0)
        assert torch.equal(first, out)


def test_all_ranks_hold_the_same_bits(pool: Pool) -> None:
    pool.run(3, check_same_on_all, Shape(1, 1, 3))


# --- one merge ---


@on_each_rank
def check_merges(shape: Shape) -> None:
    rows = Rows(shape)
    for _ in range(2):
        rows.step()
    with count_traffic() as traffic:
        rows.step()
    assert len(traffic.merges) == 1


def test_all_rows_take_one_merge(pool: Pool) -> None:
    pool.run(2, check_merges, Shape(1, 1, 2))


@on_each_rank
def check_a_number_that_is_not_finite(shape: Shape) -> None:
    rows = Rows(shape)
    rows.step()
    k, v = rows.new(len(rows.caches), 1, 7)
    k[1, 0, 0, 0] = torch.nan
    q = random(len(rows.caches), HEADS, 1, DIM, seed=8)
    out = am.decode_rows(q, rows.caches, k=k, v=v)
    assert bool(out[1, : HEADS // KV_HEADS].isnan().any())
    assert bool(out[[0, 2, 3, 4]].isfinite().all())


def test_a_row_that_is_not_finite_spoils_no_other(pool: Pool) -> None:
    for ranks in (1, 2):
        pool.run(ranks, check_a_number_that_is_not_finite, Shape(1, 1, ranks))


# --- refusals ---


@on_each_rank
def check_one_full_cache(shape: Shape) -> None:
    """A step that a full cache refuses leaves the other caches as they were."""
    rows, full = Rows(shape), 3
    cache = rows.caches[full]
    cache.append(*rows.new(1, cache.config.capacity - cache.length, 5))
    lengths = [cache.length for cache in rows.caches]
    q, (k, v) = random(len(lengths), HEADS, 1, DIM), rows.new(len(lengths), 1, 3)
    with pytest.raises(errors.ShapeError, match=rf"decode_rows k of row {full}: expected room .* call cache.reserve"):
        am.decode_rows(q, rows.caches, k=k, v=v)
    assert [cache.length for cache in rows.caches] == lengths
    cache.reserve(cache.length + 1)
    am.decode_rows(q, rows.caches, k=k, v=v)
    assert [cache.length for cache in rows.caches] == [length + 1 for length in lengths]


@on_each_rank
def check_one_full_cache_of_a_graph() -> None:
    """A cache that a graph has filled is refused before any is written to."""
    rows, full = Rows(Shape(1, 1, 2)), 3
    cache = rows.caches[full]
    append = torch.compile(lambda k, v: cache.append(k, v), fullgraph=True, backend="eager")
    with torch.no_grad():
        for seed in range(cache.config.capacity - cache.length):
            append(*rows.new(1, 1, seed))
    lengths = [cache.length for cache in rows.caches]
    assert lengths[full] == cache.config.capacity
    q, (k, v) = random(len(lengths), HEADS, 1, DIM), rows.new(len(lengths), 1, 3)
    with pytest.raises(errors.ShapeError, match=rf"decode_rows k of row {full}: expected room .* call cache.reserve"):
        am.decode_rows(q, rows.caches, k=k, v=v)
    assert [cache.length for cache in rows.caches] == lengths


def test_a_cache_that_a_graph_has_filled_is_refused_before_any_is_written_to(pool: Pool) -> None:
    pool.run(2, check_one_full_cache_of_a_graph)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_full_cache_leaves_the_others_as_they_were(shape: Shape, pool: Pool) -> None:
    pool.run(shape.ranks, check_one_full_cache, shape)


@dataclass
class RowsCall:
    """The arguments of a call of `decode_rows`. A change makes it one that is refused."""

    rows: Rows
    q: Tensor
    k: Tensor
    v: Tensor
    caches: list[am.KVCache]
    options: dict[str, Any]

    @staticmethod
    def on(rows: Rows) -> "RowsCall":
        count = len(rows.caches)
        return RowsCall(rows, random(count, HEADS, 1, DIM), *rows.new(count, 1, 3), [*rows.caches], {})

    def run(self) -> Tensor:
        return am.decode_rows(self.q, self.caches, k=self.k, v=self.v, **self.options)


Change = Callable[[RowsCall], None]


def leave_out_a_query(call: RowsCall) -> None:
    call.q = call.q[1:]


def pass_one_cache_twice(call: RowsCall) -> None:
    call.caches[1] = call.caches[0]


def double_the_width_of_keys(call: RowsCall) -> None:
    call.k = torch.cat((call.k, call.k), 3)


def pass_a_mask_by_its_name(call: RowsCall) -> None:
    call.options["mask"] = "causal"


def pass_queries_in_float64(call: RowsCall) -> None:
    call.q = call.q.double()


def pass_nan_as_scale(call: RowsCall) -> None:
    call.options["scale"] = torch.nan


def pass_more_tokens_than_there_is_room_for(call: RowsCall) -> None:
    call.k, call.v = call.rows.new(len(call.caches), 40, 3)


WRONG: list[tuple[Change, str]] = [
    (leave_out_a_query, "decode_rows q: expected 4 dims, of which the first has 5 rows"),
    (
        pass_one_cache_twice,
        "decode_rows caches: expected each cache once, given one cache twice. Fix: pass cache.fork()",
    ),
    (double_the_width_of_keys, "append k: expected shape"),
    (pass_a_mask_by_its_name, "decode_rows mask: expected Full"),
    (pass_queries_in_float64, "decode_rows q of row 0: expected torch.float32"),
    (pass_nan_as_scale, "decode_rows scale: expected None, 0 or a number"),
    (pass_more_tokens_than_there_is_room_for, "decode_rows k of row 0: expected room for the new tokens"),
]


def pass_another_scale(call: RowsCall) -> None:
    call.options["scale"] = 0.3


def reverse_the_caches(call: RowsCall) -> None:
    call.caches.reverse()


def leave_out_rows(call: RowsCall) -> None:
    call.caches, call.q, call.k, call.v = call.caches[:2], call.q[:2], call.k[:2], call.v[:2]


@on_each_rank
def catch_refusal(change: Change, ranks: set[int], warm: bool) -> str:
    """Return the error of a call that is changed on these ranks; the caches serve the next call."""
    rows = Rows(Shape(1, 1, 2))
    if warm:
        rows.step()
    call = RowsCall.on(rows)
    if torch.distributed.get_rank() in ranks:
        change(call)
    with pytest.raises(errors.InputError) as caught:
        call.run()
    shortest = [min(row) for row in zip(*gathered([cache.length for cache in rows.caches]), strict=True)]
    for cache, length in zip(rows.caches, shortest, strict=True):
        cache.truncate(length)
    q = random(len(rows.caches), HEADS, 1, DIM)
    out = am.decode_rows(q, rows.caches)
    for row, cache in enumerate(rows.caches):
        one = slice(row, row + 1)
        torch.testing.assert_close(out[one], am.decode(q[one], cache), atol=2 * FLOAT32, rtol=2 * FLOAT32)
    return f"{type(caught.value).__name__}: {caught.value}"


def gathered(numbers: list[int]) -> list[list[int]]:
    rows: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(rows, numbers)
    return rows


@pytest.mark.parametrize(
    ("change", "message", "ranks", "warm"),
    [
        pytest.param(*wrong, ranks, warm, marks=pytest.mark.long if (number + len(ranks) + warm) % 2 else [])
        for number, wrong in enumerate(WRONG)
        for ranks in ({0, 1}, {1})
        for warm in (False, True)
    ],
)
def test_wrong_input_is_refused_alike_on_all_ranks(
    change: Change, message: str, ranks: set[int], warm: bool, pool: Pool
) -> None:
    first, second = pool.run(2, catch_refusal, change, ranks, warm)
    assert first == second
    assert message in first


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("change", [pass_another_scale, reverse_the_caches, leave_out_rows])
def test_calls_that_differ_are_refused_alike(change: Change, warm: bool, pool: Pool) -> None:
    first, second = pool.run(2, catch_refusal, change, {1}, warm)
    assert first == second
    assert "MeshError" in first


@on_each_rank
def catch_error_of_lengths(by_rank: list[tuple[int, ...]], options: dict[str, Any]) -> str:
    """Return the error of a known step on caches of other lengths on each rank."""
    own = by_rank[torch.distributed.get_rank()]
    sizes: dict[str, Any] = {"batch": 1, "kv_heads": KV_HEADS, "head_dim": DIM, "capacity": 30, "block": 4}
    caches = [am.KVCache(named_mesh(Shape(1, 1, 2), AXES), dtype=torch.float32, **sizes) for _ in own]
    for cache in caches:
        cache.append(*random(2, 1, KV_HEADS, 8, DIM))
    q = random(len(own), HEADS, 1, DIM)
    am.decode_rows(q, caches, **options)
    for cache, length in zip(caches, own, strict=True):
        cache.append(*random(2, 1, KV_HEADS, length - 8, DIM))
    with pytest.raises(errors.MeshError) as caught:
        am.decode_rows(q, caches, **options)
    return str(caught.value)


@pytest.mark.parametrize("options", [{}, {"merge": "gather"}, {"reproducible": True}], ids=str)
@pytest.mark.parametrize("by_rank", [[(10, 20), (12, 19)], [(10, 20, 12), (9, 19, 13)], [(10, 20), (20, 10)]], ids=str)
def test_lengths_that_differ_are_refused_alike(
    by_rank: list[tuple[int, ...]], options: dict[str, Any], pool: Pool
) -> None:
    first, second = pool.run(2, catch_error_of_lengths, by_rank, options)
    assert first == second
    assert "tokens in the caches" in first


def test_caches_of_other_kinds_are_refused() -> None:
    sizes: dict[str, Any] = {"kv_heads": 2, "head_dim": 8, "capacity": 9, "dtype": torch.float32}
    one, other = am.KVCache(None, batch=1, **sizes), am.KVCache(None, batch=2, **sizes)
    wide = am.KVCache(None, batch=1, **(sizes | {"head_dim": 16}))
    q = random(2, 4, 1, 8)
    with pytest.raises(errors.ShapeError, match="caches of one sequence, given one of 2"):
        am.decode_rows(q, [one, other])
    with pytest.raises(errors.ShapeError, match="caches of equal heads, widths, dtypes and masks"):
        am.decode_rows(q, [one, wide])
    with pytest.raises(errors.DtypeError, match="a list of KVCaches, given 0 caches"):
        am.decode_rows(q, [])
    blocks = [am.KVCache(None, batch=1, **sizes, block=block) for block in (4, 8)]
    for cache in blocks:
        cache.append(*random(2, 1, 2, 5, 8))
    with pytest.raises(errors.LayoutError, match=r"caches of one block size, given \[4, 8\]"):
        am.decode_rows(q, blocks, reproducible=True)


@pytest.mark.parametrize("known", [[0, 1], [2, 3]], ids=["first", "second"])
def test_caches_of_several_blocks_are_refused_in_known_steps(known: list[int]) -> None:
    """A step on caches of one block does not make a step known on caches of several."""
    sizes: dict[str, Any] = {"kv_heads": KV_HEADS, "head_dim": DIM, "capacity": 40, "dtype": torch.float32}
    caches = [am.KVCache(None, batch=1, **sizes, block=block) for block in (16, 16, 32, 32)]
    for cache in caches:
        cache.append(*random(2, 1, KV_HEADS, 35, DIM))
    q = random(2, HEADS, 1, DIM)
    for _ in range(2):
        am.decode_rows(q, [caches[number] for number in known], reproducible=True)
    with pytest.raises(errors.LayoutError, match=r"caches of one block size, given \[16, 32\]"):
        am.decode_rows(q, caches[1:3], reproducible=True)
    out = am.decode_rows(q, caches[2:], reproducible=True)
    assert torch.equal(
        out, torch.cat([am.decode(q[:1], caches[2], reproducible=True), am.decode(q[1:], caches[3], reproducible=True)])
    )


def test_the_row_whose_cache_is_too_short_is_named() -> None:
    sizes: dict[str, Any] = {"batch": 1, "kv_heads": 2, "head_dim": 8, "capacity": 9, "dtype": torch.float32}
    caches = [am.KVCache(None, **sizes) for _ in range(2)]
    for tokens, cache in zip((5, 1), caches, strict=True):
        cache.append(*random(2, 1, 2, tokens, 8))
    expected = (
        "decode_rows q of row 1: expected as many queries as tokens in the cache, or fewer, given 3 queries and 1 of"
    )
    with pytest.raises(errors.ShapeError, match=expected):
        am.decode_rows(random(2, 4, 3, 8), caches)
    with pytest.raises(errors.MaskError, match="decode_rows mask of row 0: expected documents that add up to 5 tokens"):
        am.decode_rows(random(2, 4, 1, 8), caches, mask=am.Causal() & am.Documents([1]))
