"""Steps over selected tokens: in a graph, with new tokens, and where indices are wrong or differ by rank."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import attnmesh as am
from attnmesh.core.selection import NO_INDEX
from attnmesh.decoding.index_search import top_k_tokens
from attnmesh.errors import ShapeError
from attnmesh.mesh.shapes import AXES, Shape
from attnmesh.runtime.counters import count_traffic
from tests.support.caches.make import along_keys, random_cache
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.problems import indexer_scores, numbers
from tests.support.truth.seeds import some
from tests.support.truth.tolerances import FLOAT32, largest_difference, worst

HEADS = (4, 2)
WIDTH, TOKENS = 8, 45


def indices(rows: int, k: int, tokens: int = TOKENS, seed: int = 1) -> Tensor:
    return numbers(2, HEADS[1], rows, tokens, seed=seed).argsort(-1)[..., :k].int()


@on_each_rank
def compare_all_tokens_and_parts(ranks: int) -> dict[str, float]:
    """Return by how much selections of all tokens differ from causal attention, and a new token's from its cache's."""
    cache, q = random_cache(TOKENS, along_keys(ranks), batch=2), numbers(2, HEADS[0], 3, WIDTH, seed=2)
    every = torch.arange(TOKENS).int().expand(2, 1, 3, -1)
    whole = am.decode(q, cache)
    selections = {"all tokens": am.Selection(every), "all blocks": am.Selection(every[..., :12], block=4)}
    found = {name: am.decode(q, cache, selected=one) for name, one in selections.items()}
    differences = {name: largest_difference(out, whole) for name, out in found.items()}
    k, v = numbers(1, 2, HEADS[1], 1, WIDTH, seed=3)[0], numbers(1, 2, HEADS[1], 1, WIDTH, seed=4)[0]
    new = am.Selection(torch.tensor([TOKENS, 3]).int().expand(2, 1, 1, -1))
    step = am.decode(q[:, :, :1], cache, k=k, v=v, selected=new)
    cache.truncate(TOKENS)
    cache.append(k, v)
    return differences | {"a new token": largest_difference(step, am.decode(q[:, :, :1], cache, selected=new))}


@pytest.mark.parametrize("ranks", some([1, 2, 3, 4, 6], 1, 2, 3, 4))
def test_all_tokens_selected_is_causal_attention(pool: Pool, ranks: int) -> None:
    for differences in pool.run(ranks, compare_all_tokens_and_parts, ranks):
        assert differences["a new token"] == 0
        assert worst(differences.values()) < FLOAT32, differences


def test_disjoint_selections_merge_to_their_union() -> None:
    q, (k, v), both = numbers(2, HEADS[0], 3, WIDTH), numbers(2, 2, HEADS[1], TOKENS, WIDTH), indices(3, 20)
    options = {"mask": am.Causal(), "q_positions": torch.arange(TOKENS - 3, TOKENS)}
    parts = [am.attend(q, k, v, selected=am.Selection(part), **options) for part in both.split([7, 13], -1)]
    whole = am.attend(q, k, v, selected=am.Selection(both), **options)
    for found, right in zip(am.merge(*parts), whole, strict=True):
        torch.testing.assert_close(found, right)
    cache = am.KVCache(None, batch=2, kv_heads=HEADS[1], head_dim=WIDTH, capacity=64, dtype=torch.float32)
    cache.append(k, v)
    torch.testing.assert_close(am.decode(q, cache, selected=am.Selection(both)), whole.out)


@on_each_rank
def compare_compiled_steps(ranks: int) -> dict[str, float]:
    """Return by how much compiled steps differ from eager ones, and how many numbers are NaN or not by mistake."""
    caches = [random_cache(TOKENS, along_keys(ranks), batch=2) for _ in range(2)]
    q = numbers(2, HEADS[0], 1, WIDTH, seed=2)

    def step(cache: am.KVCache, k: Tensor, chosen: Tensor) -> Tensor:
        cache.append(k, k)
        return am.decode(q, cache, selected=am.Selection(chosen))

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    wrongs = dict[str, float]()
    with torch.no_grad():
        for token in range(4):
            given = numbers(2, HEADS[1], 1, WIDTH, seed=token), indices(1, 9, TOKENS + token + 1, seed=token)
            wrongs[f"token {token}"] = largest_difference(step(caches[0], *given), compiled(caches[1], *given))
        for wrong in (-1, TOKENS + 5, int(given[1][0, 0, 0, 1])):
            faulty = given[1].clone()
            faulty[0, 0, 0, 0] = wrong
            out = compiled(caches[1], given[0], faulty)
            wrongs[f"numbers for {wrong}"] = int((~out[0, :2].isnan()).sum())
            wrongs[f"NaN beside {wrong}"] = int(out[0, 2:].isnan().sum() + out[1].isnan().sum())
            caches[1].truncate(TOKENS + 4)
    return wrongs


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_over_selected_tokens_is_one_graph(pool: Pool, ranks: int) -> None:
    for wrongs in pool.run(ranks, compare_compiled_steps, ranks):
        assert wrongs == dict.fromkeys(wrongs, 0)


@on_each_rank
def step_over_unchecked_differences() -> dict[str, float]:
    """Return the share of NaN in outputs where ranks that compare nothing select the same tokens, and others."""
    cache, q = random_cache(TOKENS, along_keys(2), batch=2), numbers(2, HEADS[0], 1, WIDTH, seed=2)
    selections = [am.Selection(indices(1, 9, seed=rank)) for rank in range(2)]
    alike = am.decode(q, cache, selected=selections[0], checked=False)
    differing = am.decode(q, cache, selected=selections[dist.get_rank()], checked=False)
    return {name: float(out.isnan().float().mean()) for name, out in (("alike", alike), ("differing", differing))}


def test_selections_that_differ_by_rank_are_nan_where_nothing_is_compared(pool: Pool) -> None:
    for share in pool.run(2, step_over_unchecked_differences):
        assert share == {"alike": 0, "differing": 1}


@on_each_rank
def count_received_bytes(tokens: int) -> int:
    cache, q = random_cache(TOKENS, along_keys(4), batch=2), numbers(2, HEADS[0], 1, WIDTH, seed=2)
    chosen = am.Selection(indices(1, tokens))
    with count_traffic() as traffic:
        am.decode(q, cache, selected=chosen, merge="tree")
    return traffic.bytes


def test_a_step_sends_what_one_over_all_tokens_sends(pool: Pool) -> None:
    for tokens in (1, 40):
        assert pool.run(4, count_received_bytes, tokens) == [2 * 4 * (2 + 2 * HEADS[0] * (1 + WIDTH))] * 4


def test_an_empty_selection_gives_zeros() -> None:
    cache, q = random_cache(TOKENS, batch=2, values="prefix"), numbers(2, HEADS[0], 2, WIDTH, seed=2)
    nothing = am.Selection(torch.full((2, 1, 2, 3), NO_INDEX, dtype=torch.int32))
    assert not am.decode(q, cache, selected=nothing).any()


@on_each_rank
def catch_error_of_longer_index_keys() -> str:
    """Return the error of a step that attends the best tokens of index keys with more tokens than the cache."""
    mesh = named_mesh(Shape(1, 1, 2), AXES)
    sizes = {"batch": 2, "kv_heads": 1, "head_dim": WIDTH, "capacity": 200, "block": 4}
    index = am.KVCache(mesh, **sizes, dtype=torch.float32, values="none")
    index.append(numbers(2, 1, TOKENS + 2, WIDTH))
    operands = numbers(2, 1, 64, WIDTH, seed=6), numbers(2, 1, 64, seed=7)
    found = top_k_tokens(index, indexer_scores, operands, TOKENS + 2)
    cache = random_cache(TOKENS, along_keys(2), batch=2)
    with pytest.raises(ShapeError) as raised:
        am.decode(numbers(2, HEADS[0], 1, WIDTH), cache, selected=am.Selection(found[:, None]))
    return str(raised.value)


def test_index_keys_of_more_tokens_than_the_cache_raise_the_same_on_all_ranks(pool: Pool) -> None:
    first, second = pool.run(2, catch_error_of_longer_index_keys)
    assert first == second
    assert f"of {TOKENS} keys, given {TOKENS + 1}" in first
