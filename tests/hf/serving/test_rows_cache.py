"""The cache of a step of rows: it has the options of the first row's cache, and nothing of that row's tokens."""

import inspect
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

import attnmesh.hf as hf
from attnmesh.errors import KernelError
from attnmesh.hf.cache.settings import CacheSettings
from attnmesh.hf.cache.sharded_cache import LONG_BLOCK
from attnmesh.hf.serving.rows_cache import RowsCache
from tests.support.serving.engines import ids, model_of

OPTIONS = [field.name for field in fields(CacheSettings)]

VALUES: dict[str, Any] = {
    "capacity": 96,
    "block": 32,
    "merge": "tree",
    "output": "heads",
    "reproducible": True,
    "kernel": "reference",
    "exchange": "ring",
    "checked": False,
    "copies": 1,
    "windows": False,
    "keep": 3,
    "storage": "int8",
    "window_storage": "fp8_e4m3",
    "shares": (1.0,),
    "hot": 64,
}
"""A value of each option of a cache in memory, on one device."""


def test_a_step_has_the_options_of_its_first_row_alone() -> None:
    model = model_of("llama")
    first, other = (hf.ShardedCache(model.config, None, block=32) for _ in range(2))
    for cache in (first, other):
        hf.generate(model, torch.tensor([ids(5)]), max_new_tokens=1, cache=cache)
    first.history.image_fingerprints = {"pixels": torch.ones(1)}
    first.notes = []  # type: ignore[attr-defined]
    step = RowsCache([first, other], [1, 1])
    assert step.settings is first.settings
    assert step.block == 32
    assert step.tokens is None
    assert step.history.image_fingerprints is None
    assert not hasattr(step, "notes")
    assert {*vars(hf.ShardedCache(model.config))} - {*vars(step)} == {"_length", "block_is_free"}


def test_every_option_of_a_cache_is_one_of_its_settings_and_an_attribute() -> None:
    assert [*inspect.signature(hf.ShardedCache).parameters] == ["config", "mesh", *OPTIONS]
    assert {*VALUES, "folder"} == {*OPTIONS}
    cache = hf.ShardedCache(model_of("llama").config, None, **VALUES)
    assert {name: getattr(cache.settings, name) for name in VALUES} == VALUES
    assert {name: getattr(cache, name) for name in VALUES} == VALUES


def test_rows_of_a_step_share_what_the_step_computes_with() -> None:
    settings = hf.ShardedCache(model_of("llama").config).settings
    shared = [name for name in OPTIONS if settings.difference_of_rows(replace(settings, **{name: "another"})) == name]
    assert shared == ["merge", "output", "reproducible", "kernel", "checked", "storage", "window_storage"]


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_is_set_when_a_cache_is_made_and_not_later(name: str) -> None:
    config = model_of("llama").config
    cache = hf.ShardedCache(config)
    value = VALUES.get(name)
    with pytest.raises(KernelError, match=f"ShardedCache {name}: .* Fix: make a new cache with {name}=") as caught:
        setattr(cache, name, value)
    assert getattr(cache, name) == getattr(hf.ShardedCache(config), name)
    fix = str(caught.value).removesuffix(".").partition("Fix: make a new cache with ")[2]
    made = eval(f"hf.ShardedCache(config, {fix})", {"hf": hf, "config": config})
    assert getattr(made, name) == getattr(made.settings, name) == value


def test_what_a_cache_settles_itself_does_not_open_its_options() -> None:
    cache = hf.ShardedCache(model_of("llama").config)
    cache.choose_block(10**6)
    assert cache.block == cache.settings.block == LONG_BLOCK
