"""The cache of a step of rows: it has the options of the first row's cache, and nothing of that row's tokens."""

import inspect

import torch

import attnmesh.hf as hf
from attnmesh.hf.serving.rows_cache import OPTIONS, RowsCache
from tests.support.serving.engines import ids, model_of


def test_a_step_has_the_options_of_its_first_row_alone() -> None:
    model = model_of("llama")
    first, other = (hf.ShardedCache(model.config, None, block=32) for _ in range(2))
    for cache in (first, other):
        hf.generate(model, torch.tensor([ids(5)]), max_new_tokens=1, cache=cache)
    first.history.image_fingerprints = {"pixels": torch.ones(1)}
    first.notes = []  # type: ignore[attr-defined]
    step = RowsCache([first, other], [1, 1])
    assert step.block == 32
    assert step.tokens is None
    assert step.history.image_fingerprints is None
    assert not hasattr(step, "notes")


def test_every_option_of_a_cache_is_one_of_a_step() -> None:
    assert {*inspect.signature(hf.ShardedCache).parameters} - {*OPTIONS} == {"folder"}
