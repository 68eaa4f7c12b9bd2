"""DeepSeek-V4: what its layers keep and refuse. `test_prepare_indexer.py` has its tokens beside stock transformers."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import attnmesh as am
import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.hf.cache.compressed_layer import CompressedLayer
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.models.families import prompt
from tests.support.models.tiny_models import Case, build
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.seeds import pairs, some
from tests.support.truth.tolerances import FLOAT64_MODEL

NEW: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
"""Each kind of layer but those of long blocks ends a block within as many tokens."""

CASES = {
    "short blocks": {"compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 5}},
    "more selected than there are": {"index_topk": 512},
    "long blocks": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}},
}


def model(attention: str, changes: dict[str, Any] | None = None) -> Any:
    return build(Case("deepseek_v4", "deepseek_v4", changes or {}), attention, torch.float64)


def cache_of(small: Any, ranks: int, block: int = 4) -> hf.ShardedCache:
    return hf.ShardedCache(small.config, named_mesh(Shape(1, 1, ranks), AXES), block=block)


def logits(generate: Callable[..., Any]) -> list[Tensor]:
    """Return the logits of new tokens after prompts of several lengths, shorter and longer than a block."""
    options = {**NEW, "output_logits": True, "return_dict_in_generate": True}
    found = []
    for tokens, batch in ((1, 2), (3, 1), (33, 2), (150, 1)):
        ids = prompt(tokens, batch=batch)
        found.append(torch.stack(generate(ids, attention_mask=torch.ones_like(ids), **options).logits))
    return found


@on_each_rank
def compute_logits(ranks: int, changes: dict[str, Any]) -> list[Tensor]:
    small = model("attnmesh", changes)

    def generate(ids: Tensor, **options: Any) -> Any:
        return hf.generate(small, ids, cache=cache_of(small, ranks, block=1 if len(ids) > 1 else 16), **options)

    return logits(generate)


@pytest.mark.parametrize("name", some([*CASES], "short blocks"))
def test_logits_are_those_of_stock_transformers(pool: Pool, name: str) -> None:
    changes = CASES[name]
    expected = logits(model("eager", changes).generate)
    for found in pool.run(3, compute_logits, 3, changes):
        for ours, stock in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, stock, atol=FLOAT64_MODEL, rtol=FLOAT64_MODEL)


def test_a_fork_keeps_its_new_entries_to_itself() -> None:
    small = model("attnmesh")
    cache = hf.ShardedCache(small.config, block=4)
    hf.prefill(small, prompt(40), cache)
    layers = [layer for layer in cache.layers if isinstance(layer, CompressedLayer)]
    for layer in layers:
        layer.new = {}
    hf.decode_rows(small, [5], [cache.fork()])
    assert [layer.new for layer in layers] == [{}] * len(layers)


FAULTS: dict[str, Callable[..., Any]] = {
    "attnmesh.hf.cache.compressed_layer.CompressedLayer.attend_other_keys": lambda *_: None,
    "attnmesh.hf.cache.compressed_layer.CompressedLayer.update_overlap_state": lambda *_: (None, None),
    "attnmesh.decoding.index_search.best_across": lambda found, *_, **__: found,
}
"""Functions, each with one that does nothing."""


@on_each_rank
def compute_logits_with(fault: str | None) -> Tensor:
    small = model("attnmesh", {"index_topk": 1})
    cache = hf.ShardedCache(small.config, named_mesh(Shape(1, 1, 2), AXES), block=4, checked=False)
    options = {**NEW, "max_new_tokens": 8, "output_logits": True, "return_dict_in_generate": True}
    with nullcontext() if fault is None else patch(fault, FAULTS[fault]):
        return torch.stack(hf.generate(small, prompt(61), cache=cache, **options).logits)


@cache
def logits_without(pool: Pool) -> Tensor:
    one, _ = pool.run(2, compute_logits_with, None)
    assert isinstance(one, Tensor)
    return one


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_change_logits(pool: Pool, fault: str) -> None:
    assert abs(logits_without(pool) - pool.run(2, compute_logits_with, fault)[0]).max() > 1e-3


class Entries(NamedTuple):
    """How many entries a cache has on all ranks, and on this one."""

    of_all: int
    own: int


class Layer(NamedTuple):
    """A window, and the entries of the layer's other caches."""

    window: object
    entries: list[Entries]


@on_each_rank
def count_entries() -> list[Layer]:
    small = model("attnmesh")
    cache = cache_of(small, 3)
    hf.generate(small, prompt(193), cache=cache, **NEW | {"max_new_tokens": 8})
    layers = [layer for layer in cache.layers if isinstance(layer, CompressedLayer)]
    return [
        Layer(
            layer.kv_cache.config.mask,
            [Entries(kv_cache.length, kv_cache.used) for kv_cache in layer.other_kv_caches.values()],
        )
        for layer in layers
    ]


def test_each_rank_keeps_a_window_and_its_share_of_entries(pool: Pool) -> None:
    for layers, halves, quarters in zip(pool.run(3, count_entries), (18, 16, 16), (9, 8, 8), strict=True):
        first, second = layers
        assert first.window == second.window == am.Window(15)
        assert first.entries == [Entries(50, halves)] * 2
        assert second.entries == [Entries(25, quarters)]


# --- the cache's life ---


@on_each_rank
def live_with_entries() -> dict[str, bool]:
    """Fork, reset and interrupt a cache. Return after which steps it gives the tokens of a new one."""
    small = model("attnmesh")
    cache = cache_of(small, 2)

    def tokens(used: hf.ShardedCache, ids: Tensor) -> Tensor:
        found: Tensor = hf.generate(small, ids, cache=used, **NEW)
        return found

    first = tokens(cache, prompt(50))
    turns = [torch.cat((first, prompt(more, seed=more)), 1) for more in (7, 9)]
    expected = [tokens(cache_of(small, 2), ids) for ids in turns]
    right = {"fork": torch.equal(tokens(cache.fork(), turns[0]), expected[0])}
    right["beside the fork"] = torch.equal(tokens(cache, turns[1]), expected[1])
    cache.reset()
    right["reset"] = torch.equal(tokens(cache, prompt(50)), first)
    with patch.object(CompressedLayer, "attend_other_keys", side_effect=RuntimeError), pytest.raises(RuntimeError):
        tokens(cache, turns[0])
    return right | {"interrupt": torch.equal(tokens(cache, turns[0]), expected[0])}


def test_a_changed_cache_gives_the_tokens_of_a_new_one(pool: Pool) -> None:
    for right in pool.run(2, live_with_entries):
        assert right == dict.fromkeys(right, True)


@on_each_rank
def generate_around_save(folder: Path, tokens: int) -> list[int]:
    """Save the cache of a prompt twice, of a batch of two. Return the tokens of the prompt and of new ones."""
    small = model("attnmesh")
    cache = cache_of(small, 3)
    ids = prompt(tokens, batch=2)
    for _ in range(2):
        ids = hf.generate(small, ids, cache=cache, **NEW)
        cache.save(folder)
    return ids.tolist()


@on_each_rank
def generate_from_restored(folder: Path, ids: list[list[int]], capacity: int | None) -> list[list[int]]:
    """Return the tokens that follow, with a restored cache, which has to be read."""
    small, mesh = model("attnmesh"), named_mesh(Shape(1, 1, dist.get_world_size()), AXES)
    cache = hf.ShardedCache(small.config, mesh, capacity=capacity)
    cache.restore(folder)
    assert cache.get_seq_length() == len(ids[0]) - 1
    if capacity is not None:
        assert [kv_cache.config.capacity for kv_cache in cache.kv_caches] == [capacity, capacity, 15, 15, capacity, 8]
    out: Tensor = hf.generate(small, torch.tensor(ids), cache=cache, **NEW)
    return out.tolist()


@pytest.mark.parametrize(("tokens", "capacity"), pairs([1, 29], [None, 60]))
def test_a_cache_is_saved_and_restored_on_other_ranks(
    tmp_path: Path, pool: Pool, tokens: int, capacity: int | None
) -> None:
    ids = pool.run(3, generate_around_save, tmp_path, tokens)[0]
    expected = model("eager").generate(torch.tensor(ids), attention_mask=torch.ones(2, len(ids[0])), **NEW).tolist()
    for found in pool.run(2, generate_from_restored, tmp_path, ids, capacity):
        assert found == expected


@on_each_rank
def resume_generation(folder: Path, tokens: int) -> tuple[list[list[int]], bool]:
    """Return the tokens of a generation with checkpoints, and whether one was restored."""
    small, restore = model("attnmesh"), hf.ShardedCache.restore
    options = {**NEW, "max_new_tokens": tokens, "checkpoint": hf.Checkpoint(folder, every=3)}
    with patch.object(hf.ShardedCache, "restore", autospec=True, side_effect=restore) as restored:
        out: Tensor = hf.generate(small, prompt(33), mesh=named_mesh(Shape(1, 1, 2), AXES), **options)
    return out.tolist(), restored.called


@on_each_rank
def interrupt_generation(folder: Path) -> bool:
    """Generate until some new tokens are saved. Return whether the cache was interrupted."""
    save = hf.Checkpoint.save
    calls = []

    def fails_later(*args: Any) -> None:
        save(*args)
        calls.append(args)
        if len(calls) > 3:
            args[0].wait()
            raise RuntimeError

    with patch.object(hf.Checkpoint, "save", fails_later), pytest.raises(RuntimeError):
        resume_generation(folder, 20)
    return (folder / "cache.json").exists()


@pytest.mark.long
def test_generation_resumes_from_a_checkpoint(tmp_path: Path, pool: Pool) -> None:
    assert pool.run(2, interrupt_generation, tmp_path) == [True, True]
    ids = prompt(33)
    expected = model("eager").generate(ids, attention_mask=torch.ones_like(ids), **{**NEW, "max_new_tokens": 20})
    assert pool.run(2, resume_generation, tmp_path, 20) == [(expected.tolist(), True)] * 2


# --- what is refused ---


def padded(small: Any, cache: hf.ShardedCache) -> None:
    ids = prompt(20)
    hf.generate(small, ids, cache=cache, attention_mask=(torch.arange(20) > 3).long()[None], **NEW)


def assisted(small: Any, cache: hf.ShardedCache) -> None:
    hf.generate(small, prompt(20), cache=cache, prompt_lookup_num_tokens=3, **NEW)


def cropped(small: Any, cache: hf.ShardedCache) -> None:
    hf.generate(small, prompt(20), cache=cache, **NEW)
    cache.crop(-2)


def recovered(small: Any, cache: hf.ShardedCache) -> None:
    hf.ShardedCache.recover(cache, small.config, cache.mesh)


def reproducible(small: Any, cache: hf.ShardedCache) -> None:
    hf.ShardedCache(small.config, cache.mesh, reproducible=True)


def stored(small: Any, cache: hf.ShardedCache) -> None:
    hf.ShardedCache(small.config, cache.mesh, storage="int8")


def in_heads(small: Any, cache: hf.ShardedCache) -> None:
    hf.ShardedCache(small.config, cache.mesh, output="heads")


def heads_axis(small: Any, cache: hf.ShardedCache) -> None:
    hf.ShardedCache(small.config, named_mesh(Shape(2, 1, 1), AXES))


def trained(small: Any, cache: hf.ShardedCache) -> None:
    small(**hf.shard_batch({"input_ids": prompt(40), "labels": prompt(40)}, named_mesh(Shape(1, 2, 1), AXES)))


def unprepared(small: Any, cache: hf.ShardedCache) -> None:
    small.generate(prompt(20), past_key_values=cache, **NEW)


def stock_cache(small: Any, cache: hf.ShardedCache) -> None:
    small.generate(prompt(20), **NEW)


REFUSED: dict[Callable[..., None], str] = {
    padded: "attnmesh.hf attention_mask: expected sequences without padding in a model that compresses tokens",
    assisted: "generate: expected options that work on states, given prompt_lookup_num_tokens",
    cropped: "ShardedCache crop: expected all tokens or none, as states cannot go back",
    recovered: "ShardedCache.recover: expected a model without states, given deepseek_v4",
    reproducible: "ShardedCache reproducible: expected none for a model that compresses tokens",
    stored: "ShardedCache storage: expected none for a model that compresses tokens",
    in_heads: "ShardedCache output: expected keys and values with heads, given entries",
    heads_axis: "ShardedCache mesh: expected a mesh without a heads axis for latents, index keys or entries",
    trained: "attnmesh.hf past_key_values: expected a ShardedCache, which keeps the entries of compressed tokens",
    unprepared: "attnmesh.hf compressor: expected a compressor that is prepared for a mesh, given one that is not",
    stock_cache: "attnmesh.hf past_key_values: expected a ShardedCache, which keeps the entries of compressed tokens",
}


@on_each_rank
def catch_refusal(name: str) -> str:
    small = model("attnmesh")
    call = next(call for call in REFUSED if call.__name__ == name)
    try:
        call(small, cache_of(small, dist.get_world_size()))
    except errors.InputError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("call", REFUSED, ids=lambda call: call.__name__)
def test_what_entries_cannot_do_is_refused_on_all_ranks(pool: Pool, call: Callable[..., None]) -> None:
    for error in pool.run(2, catch_refusal, call.__name__):
        assert error.startswith(REFUSED[call]), error
        assert " Fix: " in error
