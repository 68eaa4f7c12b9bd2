"""Forks that change: in inference mode, beside invalid numbers, in graphs, and while a save is writing."""

from pathlib import Path

import pytest
import torch

import attnmesh as am
from attnmesh import errors, hf
from tests.support.caches.make import along_keys, empty_cache, random_cache
from tests.support.models import families
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.problems import numbers
from tests.support.truth.tolerances import FLOAT32


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("changed", [0, 1])
def test_caches_that_fork_in_inference_mode_change_outside_it(changed: int, padded: bool) -> None:
    mask = torch.ones(2, 21, dtype=torch.bool)
    mask[0, :3] = False
    cache, new = empty_cache(batch=2), numbers(2, 2, 2, 21, 8)
    cache.append(*new, token_mask=mask if padded else None)
    with torch.inference_mode():
        pair = cache, cache.fork()
    pair[changed].append(*new[:, :, :, :3])
    with torch.inference_mode():
        pair[changed].truncate(9)
    pair[changed].append(*new[:, :, :, :3])
    assert [each.length for each in pair] == ([12, 21] if not changed else [21, 12])


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_invalid_numbers_stay_in_their_fork(number: float, reproducible: bool) -> None:
    cache, alone, q = random_cache(20), random_cache(20), numbers(1, 4, 1, 8)
    other = cache.fork()
    cache.append(*torch.full((2, 1, 2, 1, 8), number))
    for length in (20, 17):
        other.truncate(length)
        alone.truncate(length)
        given, expected = (am.decode(q, each, reproducible=reproducible) for each in (other, alone))
        assert torch.allclose(given, expected, atol=FLOAT32)


@on_each_rank
def catch_error_in_graph(tokens: int) -> str:
    """Decode from a fork in a graph; of 5 tokens one rank has no whole block."""
    other, q = random_cache(tokens, along_keys(2)).fork(), numbers(1, 4, 1, 8)
    try:
        torch.compile(lambda x: am.decode(x, other), backend="eager")(q)
    except errors.KernelError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("tokens", [5, 20])
def test_all_ranks_refuse_a_fork_in_a_graph(tokens: int, pool: Pool) -> None:
    answers = pool.run(2, catch_error_in_graph, tokens)
    assert len(set(answers)) == 1
    assert "expected a cache of one piece in a graph" in answers[0]


def test_beams_of_a_cache_whose_save_is_writing(tmp_path: Path) -> None:
    model = families.model("gemma3", "attnmesh")
    cache = hf.ShardedCache(model.config)
    hf.prefill(model, torch.arange(5, 45)[None], cache)
    saving = cache.save(tmp_path, wait=False)
    cache.batch_repeat_interleave(3)
    saving.wait()
    assert cache.layers[0].kv_cache.config.batch == 3
