"""Calls and models that generation on a mesh refuses: all ranks raise the same error, by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, DogeConfig, DynamicCache, MiniMaxConfig, RwkvConfig

import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.mesh.shapes import AXES, Shape
from tests.support import families
from tests.support.families import prompt
from tests.support.mesh_problems import named_mesh
from tests.support.models.tiny_models import Case, tiny_config
from tests.support.pool import Pool, on_each_rank


@on_each_rank
def refusal(name: str, shape: Shape) -> str:
    """Return the error of an unsupported call on a rank."""
    mesh, model = named_mesh(shape, AXES), families.model("llama", "attnmesh")
    try:
        REFUSED[name][0](model, mesh)
    except errors.InputError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _with(model: Any, mesh: Any, **options: Any) -> None:
    hf.generate(model, options.pop("ids", prompt(40)), mesh=mesh, max_new_tokens=3, **options)


def _with_default(model: Any, mesh: Any, **defaults: Any) -> None:
    """Call with a setting of the model's generation configuration."""
    model.generation_config.update(**defaults)
    _with(model, mesh)


def _forward(model: Any, **options: Any) -> None:
    with torch.no_grad():
        model(prompt(40), **options)


def _checkpointing() -> Any:
    model = families.model("llama", "attnmesh").train()
    model.gradient_checkpointing_enable()
    return model


DOGE = DogeConfig(
    vocab_size=97, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    attn_implementation="attnmesh",
)  # fmt: skip


def _filled(model: Any, mesh: Any) -> hf.ShardedCache:
    cache = hf.ShardedCache(model.config, mesh)
    hf.prefill(model, prompt(40), cache)
    return cache


REFUSED: dict[str, tuple[Callable[[Any, Any], None], str]] = {
    "an empty prompt": (
        lambda m, mesh: _with(m, mesh, ids=prompt(0)),
        "ShapeError: generate input_ids: expected at least one token, given an empty prompt",
    ),
    "an unknown token": (
        lambda m, mesh: _with(m, mesh, ids=prompt(40) + 90),
        "ArgumentError: generate input_ids: expected tokens from 0 to 96, the model's vocabular",
    ),
    "a negative token": (
        lambda m, mesh: _with(m, mesh, ids=prompt(40) - 9),
        "ArgumentError: generate input_ids: expected tokens from 0 to 96, the model's vocabular",
    ),
    "a default of the model": (
        lambda m, mesh: _with_default(m, mesh, guidance_scale=2.0),
        (
            "ArgumentError: generate: expected options that work on a mesh, given guidance_scale=2.0"
            " in model.generation_config. Fix: set model.generation_config.guidance_scale = None."
        ),
    ),
    "a capacity beyond memory": (
        lambda m, mesh: _with(m, mesh, cache=hf.ShardedCache(m.config, mesh, capacity=2**47)),
        "ShapeError: KVCache capacity: expected tokens that fit the device's memory, given",
    ),
    "stop strings alone": (
        lambda m, mesh: _with(m, mesh, stop_strings=["a"]),
        "ArgumentError: generate: expected a tokenizer beside stop strings, given stop_strings=['a']",
    ),
    "too long": (
        lambda m, mesh: _with(m, mesh, ids=prompt(2049)),
        "ShapeError: generate input_ids: expected at most 2048 tokens, the model's context, given 2049",
    ),
    "words": (
        lambda m, mesh: _with(m, mesh, ids="what?"),
        "DtypeError: generate input_ids: expected int64 token ids (batch, length), given str",
    ),
    "a 4D mask": (
        lambda m, mesh: _with(m, mesh, attention_mask=torch.ones(1, 1, 40, 40)),
        "ShapeError: generate attention_mask: expected 2D, (1, 40), given (1, 1, 40, 40)",
    ),
    "a stock cache": (
        lambda m, mesh: _with(m, mesh, cache=DynamicCache()),
        "KernelError: generate cache: expected a ShardedCache, given DynamicCache",
    ),
    "a stock model": (
        lambda _, mesh: _with(families.model("llama", "sdpa"), mesh),
        "KernelError: generate: expected a model with attn_implementation 'attnmesh', given 'sdpa'",
    ),
    "no model": (
        lambda _, mesh: _with(torch.nn.Linear(2, 2), mesh),
        "KernelError: generate: expected a causal language model of transformers, given Linear",
    ),
    "assisted on a full cache": (
        lambda m, mesh: _with(m, mesh, cache=_filled(m, mesh), prompt_lookup_num_tokens=3, ids=prompt(41)),
        "KernelError: generate: expected an empty cache for assisted decoding, given 39 toke",
    ),
    "another batch": (
        lambda m, mesh: _with(m, mesh, cache=_filled(m, mesh), ids=prompt(40, batch=2)),
        "ShapeError: generate: expected as many sequences as the cache holds, given 2 and 1 in the cach",
    ),
    "forward with a 4D mask": (
        lambda m, _: _forward(m, attention_mask=torch.zeros(1, 1, 40, 40), use_cache=False),
        "MaskError: attnmesh.hf attention_mask: expected one made by transformer",
    ),
    "forward of packed sequences": (
        lambda m, _: _forward(m, position_ids=torch.arange(40)[None] % 13, use_cache=False),
        "MaskError: attention mask: expected a causal mask, a sliding window or chunks, gi",
    ),
    "a clock": (
        lambda m, mesh: _with(m, mesh, max_time=0.5),
        "ArgumentError: generate: expected options that work on a mesh, given max_time=0.5. Fix: p",
    ),
    "no cache at all": (
        lambda m, mesh: _with(m, mesh, use_cache=False),
        "ArgumentError: generate: expected options that work on a mesh, given use_cache=Fa",
    ),
    "a static cache": (
        lambda m, mesh: _with(m, mesh, cache_implementation="static"),
        "ArgumentError: generate: expected options that work on a mesh, given cache_impleme",
    ),
    "other positions": (
        lambda m, mesh: _with(m, mesh, position_ids=torch.arange(40)[None] * 3),
        "ArgumentError: generate: expected options of transformers' generation, given position_ids=",
    ),
    "hidden states": (
        lambda m, mesh: _with(m, mesh, output_hidden_states=True, return_dict_in_generate=True),
        "ArgumentError: generate: expected options that work on a mesh, given output_hidden_",
    ),
    "right padding": (
        lambda m, mesh: _with(m, mesh, attention_mask=torch.arange(40)[None].lt(30).long()),
        "MaskError: generate attention_mask: expected no padding at the end of a sequence, given pa",
    ),
    "inferred right padding": (
        lambda m, mesh: _with(m, mesh, ids=prompt(40) * torch.arange(40).lt(30)),
        "MaskError: generate attention_mask: expected no padding at the end of a sequence,",
    ),
    "other options": (
        lambda m, mesh: hf.generate(m, prompt(40), mesh=mesh, max_new_tokens=3 + torch.distributed.get_rank()),
        "MeshError: generate: expected the same call on every rank, given:\n    ranks  max_new_tokens",
    ),
    "checkpointing": (
        lambda _, mesh: _with(_checkpointing(), mesh),
        "KernelError: generate: expected a model that uses its cache, given one in training with gradie",
    ),
    "the bits of three ranks": (
        lambda m, mesh: hf.ShardedCache(m.config, mesh, reproducible=True, merge="direct"),
        "KernelError: ShardedCache reproducible: expected 1, 2, 4, 8, ... ranks along queries",
    ),
    "a cache that is not used": (
        lambda m, mesh: m.generate(
            prompt(40), past_key_values=hf.ShardedCache(m.config), use_cache=False, max_new_tokens=3
        ),
        "KernelError: attnmesh.hf use_cache: expected use_cache=True with a",
    ),
    "keys that are read": (
        lambda *_: _forward(
            AutoModelForCausalLM.from_config(DOGE, attn_implementation="attnmesh"),
            past_key_values=hf.ShardedCache(DOGE),
        ),
        "KernelError: attnmesh.hf: expected a model that passes masks and cache",
    ),
    "weights": (
        lambda m, _: _forward(m, output_attentions=True, use_cache=False),
        "KernelError: attnmesh.hf output_attentions: expected outputs without attention weights, given True",
    ),
    "an unknown argument": (
        lambda m, _: _forward(m, cu_seq_lens_q=torch.arange(3), use_cache=False),
        "KernelError: attnmesh.hf cu_seq_lens_q: expected exact softmax attention",
    ),
    "a stock model with our cache": (
        lambda _, mesh: _forward(
            (stock := families.model("llama", "sdpa")), past_key_values=hf.ShardedCache(stock.config, mesh)
        ),
        "KernelError: ShardedCache: expected a model with attn_implementation 'attnmesh'",
    ),
}
"""Each call that is refused, and how its error begins."""


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_calls_raise_the_same_error_on_all_ranks(name: str, pool: Pool) -> None:
    answers = pool.run(4, refusal, name, Shape(1, 2, 2))
    assert len(set(answers)) == 1
    assert answers[0].startswith(REFUSED[name][1]), answers[0]
    assert answers[0].endswith(".")


TINY: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "bos_token_id": 1,
    "pad_token_id": 0, "eos_token_id": None,
}  # fmt: skip

UNSUPPORTED = {
    "recurrent states": (
        RwkvConfig(vocab_size=97, hidden_size=16, num_hidden_layers=2, attention_hidden_size=16),
        "KernelError: attnmesh.hf: expected a model of layers of full_attention, sliding_attention, "
        "chunked_attention, given rwkv with layers of recurrent states",
    ),
    "weights of each token": (
        tiny_config(Case("inkling2_text", "inkling2_text")),
        "KernelError: attnmesh.hf: expected a model of layers of full_attention, sliding_attention, "
        "chunked_attention, given inkling2_text with layers of convolutions whose weights differ by token. Fix: ",
    ),
    "a cache of its own": (
        MiniMaxConfig(**TINY, num_key_value_heads=1, head_dim=8, num_local_experts=2, intermediate_size=16),
        "KernelError: generate: expected a model whose cache holds its recurrent states, given minimax",
    ),
    "attention of its own": (
        BloomConfig(**TINY),
        "KernelError: generate: expected a model with selectable attention, given BloomForCausalLM",
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_families_are_refused_by_name(name: str) -> None:
    config, expected_error = UNSUPPORTED[name]
    model = AutoModelForCausalLM.from_config(config)
    model.config._attn_implementation = "attnmesh"
    with pytest.raises(errors.InputError) as error:
        hf.generate(model.eval(), prompt(30), max_new_tokens=2)
    assert f"{type(error.value).__name__}: {error.value}".startswith(expected_error)


def test_dropout_is_refused() -> None:
    model = families.model("llama", "attnmesh", attention_dropout=0.1).train()
    with pytest.raises(errors.KernelError, match="dropout: expected attention without dropout, given"):
        model(prompt(20), use_cache=False)
