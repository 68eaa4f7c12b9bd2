"""A reorder of a `ShardedCache` that is broken off leaves no layer in another order than the rest, or says so."""

from copy import deepcopy
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attnmesh import errors, hf
from attnmesh.cache import memory_shard
from tests.support.models import families
from tests.support.models.families import prompt
from tests.support.models.recurrent import FAMILIES, model_of
from tests.support.process.interrupts import interrupt

STEP = 7
"""Every such point is tried."""


def content(cache: hf.ShardedCache) -> list[Tensor]:
    assert cache.tokens is not None
    keys = [x[:, :, : kv_cache.used] for kv_cache in cache.kv_caches for x in (kv_cache.keys, kv_cache.values)]
    digests = torch.tensor([[kv_cache.history.digest, kv_cache.rewrites] for kv_cache in cache.kv_caches])
    return [x.clone() for x in (*keys, *cache.states.values(), cache.tokens, digests)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(x.equal(y) for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize("order", [[1, 0], [1, 0, 1]])
@pytest.mark.parametrize("family", ["qwen3_next", "gemma3"])  # with recurrent states, and with windows
def test_ctrl_c_leaves_all_layers_in_one_order(family: str, order: list[int]) -> None:
    model = model_of(family) if family in FAMILIES else families.model(family, "attnmesh")
    index = torch.tensor(order)
    filled = hf.ShardedCache(model.config)
    hf.prefill(model, prompt(21, batch=2), filled)
    after = deepcopy(filled)
    after.reorder_cache(index)
    wanted = [content(filled), content(after)]
    for number in count(0, STEP):
        cache = deepcopy(filled)
        if (place := interrupt(lambda: cache.reorder_cache(index), number)) is None:  # noqa: B023
            break
        assert any(same(content(cache), expected) for expected in wanted), place
        assert not cache.history.is_mixed, place
    assert number > 10 * STEP


def test_layers_of_which_one_finds_no_memory_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, done = families.model("llama", "attnmesh"), prompt(21, batch=2), count()
    options = {"max_new_tokens": 4, "do_sample": False}
    expected = hf.generate(model, ids, **options)
    cache = hf.ShardedCache(model.config)
    hf.prefill(model, ids, cache)
    select = memory_shard._select

    def until_memory_ends(*arguments: Tensor) -> None:
        if next(done) > cache.kv_caches[0].config.kv_heads * 2:
            raise torch.OutOfMemoryError
        select(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(memory_shard, "_select", until_memory_ends)
        with pytest.raises(torch.OutOfMemoryError):
            cache.reorder_cache(torch.tensor([1, 0]))
    assert cache.kv_caches[0].rewrites > cache.kv_caches[-1].rewrites
    with pytest.raises(errors.KernelError, match="sequences in one order in all layers"):
        model(ids[:, -1:], past_key_values=cache)
    with pytest.raises(errors.KernelError, match="sequences in one order in all layers"):
        cache.save(tmp_path)
    assert hf.generate(model, ids, cache=cache, **options).equal(expected)
    assert not cache.history.is_mixed
