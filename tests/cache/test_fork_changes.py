"""Forks that change: in inference mode, as pages, beside invalid numbers, in graphs, and while a save is writing."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attnmesh as am
from attnmesh import errors, hf
from attnmesh.mesh.shapes import AXES, Shape
from tests.support import families
from tests.support.mesh_problems import named_mesh
from tests.support.pool import Pool, on_each_rank
from tests.support.problems import numbers
from tests.support.tolerances import FLOAT32


def cache_of(batch: int = 1, tokens: int = 21, shape: Shape | None = None, **options: Any) -> am.KVCache:
    mesh = None if shape is None else named_mesh(shape, AXES)
    sizes: dict[str, Any] = {"kv_heads": 2, "head_dim": 8, "capacity": 200, "dtype": torch.float32, "block": 4}
    cache = am.KVCache(mesh, batch=batch, **(sizes | options))
    if tokens:
        cache.append(*numbers(2, batch, cache.sizes.kv_heads, tokens, 8))
    return cache


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("changed", [0, 1])
def test_caches_that_fork_in_inference_mode_change_outside_it(changed: int, padded: bool) -> None:
    mask = torch.ones(2, 21, dtype=torch.bool)
    mask[0, :3] = False
    cache, new = cache_of(2, tokens=0), numbers(2, 2, 2, 21, 8)
    cache.append(*new, token_mask=mask if padded else None)
    with torch.inference_mode():
        pair = cache, cache.fork()
    pair[changed].append(*new[:, :, :, :3])
    with torch.inference_mode():
        pair[changed].truncate(9)
    pair[changed].append(*new[:, :, :, :3])
    assert [each.length for each in pair] == ([12, 21] if not changed else [21, 12])


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
    cache = cache_of(2, 37, kv_heads=kv_heads, block=block)
    other = cache.fork()
    other.reorder(torch.tensor(order))
    assert torch.equal(read(other), cache.keys[:, :, :37][order])


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_invalid_numbers_stay_in_their_fork(number: float, reproducible: bool) -> None:
    cache, alone, q = cache_of(tokens=20), cache_of(tokens=20), numbers(1, 4, 1, 8)
    other = cache.fork()
    cache.append(*torch.full((2, 1, 2, 1, 8), number))
    for length in (20, 17):
        other.truncate(length)
        alone.truncate(length)
        given, expected = (am.decode(q, each, reproducible=reproducible) for each in (other, alone))
        assert torch.allclose(given, expected, atol=FLOAT32)


def test_truncation_copies_one_block_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    module, copied = sys.modules["attnmesh.cache.cache_shard"], []
    join = module.join_rows  # type: ignore[attr-defined]

    def counted(parts: list[Tensor], dim: int, rows: int) -> Tensor:
        copied.append(sum(part.shape[dim] for part in parts))
        return join(parts, dim, rows)  # type: ignore[no-any-return]

    cache = cache_of(tokens=150)
    turn = cache.fork()
    other = turn.fork()
    turn.append(*numbers(2, 1, 2, 20, 8, seed=1))
    third = turn.fork()
    monkeypatch.setattr(module, "join_rows", counted)
    for each, length in ((other, 30), (third, 161), (third, 9)):
        each.truncate(length)
        assert torch.equal(each.keys[:, :, :9], cache_of(tokens=150).keys[:, :, :9])
    assert copied[:3] == [30 % 4] * 3


@on_each_rank
def error_in_graph(tokens: int) -> str:
    """Decode from a fork in a graph; of 5 tokens one rank has no whole block."""
    other, q = cache_of(tokens=tokens, shape=Shape(1, 1, 2)).fork(), numbers(1, 4, 1, 8)
    try:
        torch.compile(lambda x: am.decode(x, other), backend="eager")(q)
    except errors.KernelError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("tokens", [5, 20])
def test_all_ranks_refuse_a_fork_in_a_graph(tokens: int, pool: Pool) -> None:
    answers = pool.run(2, error_in_graph, tokens)
    assert len(set(answers)) == 1
    assert "expected a cache of one piece in a graph" in answers[0]


def test_pools_that_require_gradients_are_refused() -> None:
    pools = torch.zeros(2, 8, 4, 2, 8, requires_grad=True)
    with pytest.raises(errors.KernelError, match="append_pages"):
        cache_of(tokens=0).append_pages(pools[0], pools[1], torch.tensor([[1, 2]]))


def test_beams_of_a_cache_whose_save_is_writing(tmp_path: Path) -> None:
    model = families.model("gemma3", "attnmesh")
    cache = hf.ShardedCache(model.config)
    hf.prefill(model, torch.arange(5, 45)[None], cache)
    saving = cache.save(tmp_path, wait=False)
    cache.batch_repeat_interleave(3)
    saving.wait()
    assert cache.layers[0].kv.sizes.batch == 3
