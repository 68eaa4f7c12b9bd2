"""Models on caches in 8 bits: the tokens of stock transformers on a cache that rounds, on any number of ranks."""

from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, DynamicCache
from transformers.cache_utils import DynamicLayer

import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.core.storage import STORAGES
from attnmesh.hf.cache.layer import SHORT_WINDOW
from attnmesh.mesh.shapes import Shape
from tests.support.models import families, sparse_models
from tests.support.models.families import STOCK, prompt
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.seeds import in_turn, pairs, rotated

AXES = ("heads", "queries", "keys")

SHAPES = [Shape(1, 1, 1), Shape(1, 1, 2), Shape(1, 3, 1), Shape(1, 2, 2), Shape(2, 1, 2)]


class RoundedLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values that are rounded when they are stored; the first ones are attended before."""

    def __init__(self, storage: str, padded: bool) -> None:
        super().__init__()
        self.storage, self.padded = STORAGES[storage], padded

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        given = (key_states, value_states)
        first = self.get_seq_length() == 0
        rounded = (self.storage.dequantize(self.storage.quantize(x), x.dtype) for x in given)
        held: tuple[Tensor, Tensor] = super().update(*rounded, *args, **kwargs)
        return given if first and not self.padded else held


def conversation(generate: Any, padded: bool) -> list[Tensor]:
    """A prompt and a second turn; a prompt shorter than a round of blocks; or one with padding."""
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    if padded:
        ids = prompt(140, batch=2)
        mask = (torch.arange(140) >= torch.tensor([[0], [70]])).long()
        return [generate(ids * mask, attention_mask=mask, **options)]
    one = generate(prompt(150), **options)
    return [one, generate(torch.cat((one, prompt(33, seed=1)), 1), **options)]


@lru_cache
def expected(family: str, storage: str, padded: bool) -> list[Tensor]:
    model = families.model(family, STOCK[family], torch.float64)  # fewer numbers are where rounding changes
    cache = DynamicCache(config=model.config)
    wide = [isinstance(layer, DynamicLayer) and not layer.is_sliding for layer in cache.layers]
    cache.layers = [
        RoundedLayer(storage, padded) if rounds else layer for layer, rounds in zip(cache.layers, wide, strict=True)
    ]

    def generate(ids: Tensor, **options: Any) -> Tensor:
        """Prefill all but the last token, as `hf.generate` does, and generate."""
        if not padded and not cache.get_seq_length():
            with torch.no_grad():
                model(ids[:, :-1], past_key_values=cache)
        out: Tensor = model.generate(ids, past_key_values=cache, **options)
        return out

    return conversation(generate, padded)


@on_each_rank
def talk_in_8_bits(family: str, shape: Shape, storage: str, padded: bool) -> list[Tensor]:
    model = families.model(family, "attnmesh", torch.float64)
    cache = hf.ShardedCache(model.config, named_mesh(shape, AXES), storage=storage)
    return conversation(lambda ids, **options: hf.generate(model, ids, cache=cache, **options), padded)


KINDS = [("llama", False), ("gemma3", True), ("gpt-oss", False), ("gemma4", True), ("llama", True)]
"""Families, and whether their prompts are padded."""

PLACES = [(shape, in_turn(STORAGES, n + turn)) for turn in (0, 1) for n, shape in enumerate(SHAPES)]
"""Meshes with storages: the first ones have each mesh once, and the storages in turn."""


@pytest.mark.parametrize(("kind", "place"), pairs(KINDS, PLACES, len(KINDS)))
def test_tokens_are_those_of_a_stock_cache_that_rounds(
    pool: Pool, kind: tuple[str, bool], place: tuple[Shape, str]
) -> None:
    (family, padded), (shape, storage) = kind, place
    for found in pool.run(shape.ranks, talk_in_8_bits, family, shape, storage, padded):
        assert all(map(torch.equal, found, expected(family, storage, padded)))


class Answers(NamedTuple):
    """The tokens after a short prompt, and those of a model that caches latents."""

    short: list[list[int]]
    of_latents: list[list[int]]


@on_each_rank
def answer_short_and_latent(shape: Shape, storage: str) -> Answers:
    model, mesh = families.model("llama", "attnmesh"), named_mesh(shape, AXES)
    cache = hf.ShardedCache(model.config, mesh, storage=storage, block=4)
    short = hf.generate(model, prompt(7), cache=cache, max_new_tokens=20, do_sample=False).tolist()
    latent = latent_model()
    cache = hf.ShardedCache(latent.config, mesh, storage=storage)
    of_latents = hf.generate(latent, prompt(90), cache=cache, max_new_tokens=9, do_sample=False).tolist()
    assert cache.kv_caches[0].config.storage == storage
    assert cache.held_bytes == 2 * cache.held * (24 + 2)
    return Answers(short, of_latents)


def latent_model() -> Any:
    from transformers import AutoModelForCausalLM

    sizes = {**families.SIZES, "num_hidden_layers": 2, "num_key_value_heads": 6, "head_dim": None}
    sizes |= {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": None}
    config = DeepseekV3Config(**sizes, first_k_dense_replace=2, rope_interleave=False)
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config, attn_implementation="attnmesh").eval()


@cache
def short_and_latent_alone(pool: Pool, storage: str) -> Answers:
    (found,) = pool.run(1, answer_short_and_latent, Shape(1, 1, 1), storage)
    assert isinstance(found, Answers)
    return found


@pytest.mark.parametrize(("shape", "storage"), rotated(SHAPES[1:4], [*STORAGES], every=2))
def test_short_prompts_and_latents_give_the_same_tokens_on_any_ranks(pool: Pool, shape: Shape, storage: str) -> None:
    for found in pool.run(shape.ranks, answer_short_and_latent, shape, storage):
        assert found == short_and_latent_alone(pool, storage)


class Continued(NamedTuple):
    """The tokens of each cache that goes on, and the errors of other storages."""

    tokens: list[list[list[int]]]
    errors: list[str]


@on_each_rank
def continue_stored_and_recovered(shape: Shape, storage: str, folder: Path) -> Continued:
    """Continue a cache after a save, a restore, a recovery and a fork."""
    model, mesh = families.model("llama", "attnmesh"), named_mesh(shape, AXES)

    def empty(storage: str | None = storage) -> hf.ShardedCache:
        return hf.ShardedCache(model.config, mesh, storage=storage)

    def answer(cache: hf.ShardedCache) -> Any:
        return hf.generate(model, torch.cat((cache.tokens, prompt(20, seed=2)), 1), cache=cache, max_new_tokens=9)

    cache, restored = empty(), empty()
    hf.generate(model, prompt(100), cache=cache, max_new_tokens=5)
    cache.save(folder)
    restored.restore(folder)
    recovered = hf.ShardedCache.recover(cache, model.config, mesh, storage=storage)
    tokens = [answer(each).tolist() for each in (cache.fork(), restored, recovered, cache)]
    found = []
    for wrong in (None, "int8" if storage == "fp8_e4m3" else "fp8_e4m3"):
        options: dict[str, Any] = {"storage": wrong}
        for call in (
            partial(empty(wrong).restore, folder),
            partial(hf.ShardedCache.recover, cache, model.config, mesh, **options),
        ):
            try:
                call()
            except errors.KernelError as error:
                found.append(str(error))
    return Continued(tokens, found)


@pytest.mark.parametrize(("shape", "storage"), rotated(SHAPES[1:4], [*STORAGES], every=2))
def test_a_cache_is_saved_restored_and_recovered(pool: Pool, tmp_path: Path, shape: Shape, storage: str) -> None:
    for continued in pool.run(shape.ranks, continue_stored_and_recovered, shape, storage, tmp_path):
        assert continued.tokens == [continued.tokens[0]] * 4
        assert len(continued.errors) == 4
        assert all(f"storage='{storage}'" in error for error in continued.errors)


def test_layers_with_short_windows_stay_as_they_are() -> None:
    model = families.model("gemma3", "attnmesh")
    assert model.config.sliding_window <= SHORT_WINDOW
    for windows, wanted in ((None, [None, "int8"]), ("fp8_e4m3", ["fp8_e4m3", "int8"])):
        cache = hf.ShardedCache(model.config, storage="int8", window_storage=windows)
        hf.generate(model, prompt(60), cache=cache, max_new_tokens=2)
        assert [kv_cache.config.storage for kv_cache in cache.kv_caches] == wanted
    model = families.model("mistral", "attnmesh", sliding_window=SHORT_WINDOW + 1)
    cache = hf.ShardedCache(model.config, storage="int8")
    hf.generate(model, prompt(60), cache=cache, max_new_tokens=2)
    assert {kv_cache.config.storage for kv_cache in cache.kv_caches} == {"int8"}


def test_wrong_storages_are_refused() -> None:
    model = families.model("llama", "attnmesh")
    for name in ("storage", "window_storage"):
        with pytest.raises(errors.ArgumentError, match=f"ShardedCache {name}: expected None or one of int8, fp8_e4m3"):
            hf.ShardedCache(model.config, **{name: "int3"})
    with pytest.raises(errors.KernelError, match="a tensor without gradients"):
        model(prompt(20), past_key_values=hf.ShardedCache(model.config, storage="int8"))


@on_each_rank
def generate_with_sparse_model(name: str, shape: Shape) -> tuple[list[int], list[str | None]]:
    """Return the tokens of a model whose queries select their keys, and how its caches are stored."""
    model = sparse_models.model(name, "attnmesh", torch.float64)
    cache = hf.ShardedCache(model.config, named_mesh(shape, AXES), storage="int8")
    found = hf.generate(model, prompt(150), cache=cache, max_new_tokens=10, do_sample=False)
    return found[0].tolist(), [kv_cache.config.storage for kv_cache in cache.kv_caches]


@pytest.mark.parametrize(("name", "ranks"), pairs(["deepseek_v32", "qwen4"], [2, 3]))
def test_index_keys_are_stored_but_for_means_of_blocks(pool: Pool, name: str, ranks: int) -> None:
    tokens, storages = pool.run(1, generate_with_sparse_model, name, Shape(1, 1, 1))[0]
    assert set(storages) == ({"int8"} if name == "deepseek_v32" else {"int8", None})
    for found in pool.run(ranks, generate_with_sparse_model, name, Shape(1, 1, ranks)):
        assert found == (tokens, storages)
