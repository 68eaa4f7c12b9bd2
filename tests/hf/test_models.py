"""Models that no mesh serves, or not this one: they are refused by name, before the first call."""

from collections.abc import Callable
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, BloomConfig, MiniMaxConfig, RwkvConfig, Trainer, TrainingArguments

import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.hf.models import key_heads
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.models import families
from tests.support.models.families import prompt
from tests.support.models.tiny_models import Case, tiny_config
from tests.support.models.variants import VARIANTS
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.training.trainers import launched, settings
from tests.support.truth.mesh_problems import named_mesh

GIVEN = "given 2 key heads and a heads axis of 3. Fix:"

TRAINED = f"ShapeError: on_mesh mesh: expected at least one key head a rank of the heads axis, {GIVEN} shorten it to at"

CACHED = f"ShapeError: ShardedCache mesh: expected key heads that the heads axis divides, {GIVEN} give its ranks to the"


@on_each_rank
def catch_errors_of_makers() -> list[str]:
    """Return the errors of a trainer, a prepared model, a cache and an engine that are made and not used."""
    from accelerate import Accelerator

    model, mesh = families.model("llama", "attnmesh"), named_mesh(Shape(3, 1, 1), AXES)
    makers: list[Callable[[], Any]] = [
        lambda: hf.on_mesh(Trainer, mesh)(model=model, args=settings(TrainingArguments, "/nonexistent")),
        lambda: hf.prepare(Accelerator(cpu=True), model, mesh),
        lambda: hf.ShardedCache(model.config, mesh),
        lambda: hf.Engine(model, mesh),
    ]
    found = []
    with launched():
        for make in makers:
            try:
                make()
            except errors.InputError as error:
                found.append(f"{type(error).__name__}: {error}")
    return found


def test_a_heads_axis_that_is_too_long_is_refused_before_the_first_call(pool: Pool) -> None:
    for said in pool.run(3, catch_errors_of_makers):
        assert [text.startswith(TRAINED) for text in said] == [True, True, False, False]
        assert [text.startswith(CACHED) for text in said] == [False, False, True, True]


def test_layers_whose_key_heads_differ_have_the_fewest() -> None:
    case = next(case for case in VARIANTS if case.name == "gemma4_text+keys-as-values")
    assert key_heads(tiny_config(case)) == 1


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
