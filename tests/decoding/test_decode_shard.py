"""Queries that are shared by ranks over a cache: each rank gets the outputs of its own, as if all had all of them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import attnmesh as am
from attnmesh import errors
from attnmesh.core.scaling import Scores
from attnmesh.core.selection import Selection, Visible
from attnmesh.decoding.decode_shard import decode_shard
from attnmesh.decoding.query_shard import QueryShard
from attnmesh.mesh.axes import RankMesh
from attnmesh.mesh.shapes import AXES, Shape
from attnmesh.runtime.counters import count_traffic
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.problems import float64_numbers
from tests.support.truth.tolerances import FLOAT64, worst

HEADS, WIDTH, CACHED, NEW, BLOCK = (4, 2), 8, 29, 27, 4
HOW: dict[str, Any] = {"scale": 0.5, "softcap": 3.0, "kernel": "auto"}
SCORES = Scores(0.5, 3.0)


def cache_of(mesh: Any, mask: am.Mask | None = None, *, padded: bool = False) -> am.KVCache:
    sizes = {"batch": 2, "kv_heads": HEADS[1], "head_dim": WIDTH, "capacity": 64, "block": BLOCK}
    cache = am.KVCache(mesh, **sizes, dtype=torch.float64, mask=mask, keep=NEW if mask else 0)
    token_mask = torch.arange(CACHED) >= torch.tensor([[0], [5]]) if padded else None
    cache.append(*float64_numbers(2, 2, HEADS[1], CACHED, WIDTH), token_mask=token_mask)
    cache.append(*float64_numbers(2, 2, HEADS[1], NEW, WIDTH, seed=1))
    return cache


@on_each_rank
def compare_with_one_device(shape: Shape) -> list[float]:
    """Return how far outputs are from those of a cache on one device."""
    mesh = named_mesh(shape, AXES)
    found = []
    q, sinks = float64_numbers(2, HEADS[0], NEW, WIDTH, seed=2), float64_numbers(HEADS[0], seed=3)
    cases: list[tuple[am.Layout, am.Mask, bool]] = [
        (am.Striped(BLOCK), am.Causal(), False),
        (am.Contiguous(), am.Window(6), False),
        (am.Striped(BLOCK), am.Causal(), True),
    ]
    for layout, mask, padded in cases:
        forgets = mask if mask != am.Causal() else None
        cache, whole = cache_of(mesh, forgets, padded=padded), cache_of(None, forgets, padded=padded)
        others = [(cache, whole), (cache.fork(), whole)] if not padded and forgets is None else [(cache, whole)]
        own = am.shard(q, mesh, layout=layout)
        for held, one in others:
            out = decode_shard(QueryShard(own, layout, NEW), held, Visible(mask), SCORES, sinks=sinks)
            expected = am.decode(q, one, mask=mask, sinks=sinks, **HOW)
            found.append(float((out - am.shard(expected, mesh, layout=layout)).abs().max()))
    indices = torch.stack([torch.randperm(CACHED, generator=torch.Generator().manual_seed(n))[:5] for n in range(NEW)])
    selected, layout = indices.int().expand(2, 1, -1, -1), am.Striped(BLOCK)
    cache, whole = cache_of(mesh), cache_of(None)
    own = Selection(am.shard(selected, mesh, layout=layout))
    shard, visible = QueryShard(am.shard(q, mesh, layout=layout), layout, NEW), Visible(am.Causal(), selected=own)
    out = decode_shard(shard, cache, visible, SCORES)
    expected = am.decode(q, whole, selected=Selection(selected), **HOW)
    return [*found, float((out - am.shard(expected, mesh, layout=layout)).abs().max())]


@pytest.mark.parametrize("shape", [Shape(1, 1, 1), Shape(1, 1, 3), Shape(1, 2, 2), Shape(2, 2, 1)], ids=str)
def test_each_rank_gets_the_outputs_of_its_queries(shape: Shape, pool: Pool) -> None:
    for found in pool.run(shape.ranks, compare_with_one_device, shape):
        assert worst(found) < FLOAT64, found


@on_each_rank
def count_received_bytes() -> tuple[int, int]:
    """Return the bytes that arrive with queries in shards, and with all of them on each rank."""
    mesh, layout = named_mesh(Shape(1, 1, 2), AXES), am.Striped(BLOCK)
    q, cache = float64_numbers(2, HEADS[0], NEW, WIDTH, seed=2), cache_of(mesh)
    own = am.shard(q, mesh, layout=layout)
    with count_traffic() as shards:
        decode_shard(QueryShard(own, layout, NEW), cache, Visible(am.Causal()), SCORES)
    with count_traffic() as whole:
        am.decode(am.unshard(own, mesh, layout=layout), cache, **HOW)
    return shards.bytes, whole.bytes


def test_a_partial_goes_to_its_owner_alone(pool: Pool) -> None:
    q, partial = 2 * HEADS[0] * WIDTH * 8, 2 * HEADS[0] * (WIDTH + 1) * 8
    (first, every), (second, _) = pool.run(2, count_received_bytes)
    assert {first, second} == {12 * q + 15 * partial, 15 * q + 12 * partial}
    assert max(first, second) < every


@on_each_rank
def catch_refusal(layout: bool) -> str:
    mesh = named_mesh(Shape(1, 1, 2), AXES)
    cache, rank = cache_of(mesh), dist.get_rank()
    given = am.Contiguous() if layout and rank else am.Striped(BLOCK)
    own = am.shard(float64_numbers(2, HEADS[0], NEW, WIDTH), mesh, layout=given)
    own = own if layout or not rank else own.float()
    with pytest.raises(errors.InputError) as raised:
        decode_shard(QueryShard(own, given, NEW), cache, Visible(am.Causal()), SCORES)
    assert RankMesh.of(mesh).shard_index == rank
    return str(raised.value)


@on_each_rank
def catch_error_of_one_selection() -> str:
    mesh, layout = named_mesh(Shape(1, 1, 2), AXES), am.Striped(BLOCK)
    own = am.shard(float64_numbers(2, HEADS[0], NEW, WIDTH), mesh, layout=layout)
    indices = torch.zeros(2, 1, own.shape[2], 1, dtype=torch.int32)
    visible = Visible(am.Causal(), selected=Selection(indices) if dist.get_rank() else None)
    with pytest.raises(errors.MeshError) as raised:
        decode_shard(QueryShard(own, layout, NEW), cache_of(mesh), visible, SCORES)
    return str(raised.value)


def test_a_selection_of_one_rank_alone_is_refused(pool: Pool) -> None:
    first, second = pool.run(2, catch_error_of_one_selection, deadline=30.0)
    assert first == second
    assert "index_block" in first


@on_each_rank
def catch_error_of_a_count() -> str:
    mesh = named_mesh(Shape(1, 1, 2), AXES)
    cache, layout = cache_of(mesh, am.Window(6)), am.Striped(BLOCK)
    own = am.shard(float64_numbers(2, HEADS[0], NEW, WIDTH), mesh, layout=layout)
    short = own[:, :, :-1] if dist.get_rank() else own
    messages = []
    for q, length in (
        (short, NEW),
        (am.shard(float64_numbers(2, HEADS[0], 2 * NEW, WIDTH), mesh, layout=layout), 2 * NEW),
    ):
        with pytest.raises(errors.InputError) as raised:
            decode_shard(QueryShard(q, layout, length), cache, Visible(am.Window(6)), SCORES)
        messages.append(str(raised.value))
    return messages[0]


def test_other_numbers_of_queries_are_refused(pool: Pool) -> None:
    first, second = pool.run(2, catch_error_of_a_count)
    assert first == second
    assert "a query for each token of the shard" in first


@on_each_rank
def compare_heads_that_select() -> float:
    """Return how far outputs are, of key heads that select other tokens, on ranks that share the heads."""
    mesh, layout = named_mesh(Shape(2, 1, 1), AXES), am.Contiguous()
    q, generator = float64_numbers(2, HEADS[0], NEW, WIDTH, seed=2), torch.Generator().manual_seed(0)
    shape = 2, HEADS[1], NEW, 5
    selected = torch.rand(*shape[:3], CACHED, generator=generator).topk(5).indices.int()
    own = Selection(am.shard(selected, mesh, layout=layout))
    shard, visible = QueryShard(am.shard(q, mesh, layout=layout), layout, NEW), Visible(am.Causal(), selected=own)
    out = decode_shard(shard, cache_of(mesh), visible, SCORES)
    expected = am.decode(q, cache_of(None), selected=Selection(selected), **HOW)
    return float((out - am.shard(expected, mesh, layout=layout)).abs().max())


def test_each_rank_takes_what_its_key_heads_select(pool: Pool) -> None:
    assert worst(pool.run(2, compare_heads_that_select)) < FLOAT64


@pytest.mark.parametrize(("layout", "message"), [(True, "the same call on every rank"), (False, "torch.float64")])
def test_calls_that_differ_raise_alike(layout: bool, message: str, pool: Pool) -> None:
    first, second = pool.run(2, catch_refusal, layout)
    assert first == second
    assert message in first
