"""Defaults of a model's generation_config: those that reach the ranks, and fields that are refused at the start."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from attnmesh.errors import ModelError
from attnmesh.hf.load import open_generation_config
from attnmesh.serve.model_defaults import DEFAULT_FIELDS, NOT_SERVED, read_model_defaults, tokens_that_end
from tests.support.serving.fake_engine import LONGEST, ThreadWorld, byte_tokenizer
from tests.support.serving.served import Served, chat, served, until

OWN: dict[str, Any] = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.05}
CHANGING: dict[str, Any] = {
    **dict.fromkeys(NOT_SERVED, 2),
    "suppress_tokens": [5],
    "begin_suppress_tokens": [5],
    "bad_words_ids": [[5]],
    "stop_strings": ["x"],
    "typical_p": 0.5,
    "top_h": 0.5,
    "epsilon_cutoff": 0.5,
    "eta_cutoff": 0.5,
    "token_healing": True,
}


def config(**fields: Any) -> GenerationConfig:
    made = GenerationConfig()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize("name", NOT_SERVED)
def test_a_field_that_changes_tokens_is_refused_by_name(name: str) -> None:
    with pytest.raises(ModelError, match=rf"{name} = .*Fix: start with --generation-config none"):
        read_model_defaults(config(**OWN, **{name: CHANGING[name]}))
    assert read_model_defaults(config(**OWN, **{name: NOT_SERVED[name]})) == OWN
    with pytest.raises(ModelError, match="temperature: expected 0 to 2, given 9"):
        read_model_defaults(config(temperature=9.0))


def test_each_field_that_transformers_draws_by_is_served_or_refused() -> None:
    """Fields that neither table has change no token, or the server has them in another way."""
    others = {
        *("max_length", "do_sample", "early_stopping", "length_penalty", "renormalize_logits", "remove_invalid_values"),
        *("use_cache", "use_mtp", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size"),
        *("num_return_sequences", "output_attentions", "output_hidden_states", "output_scores", "output_logits"),
        *("return_dict_in_generate", "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"),
        *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        *("prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind"),
        *("target_lookbehind", "assistant_ensemble_weight", "speculation_type", "compile_config", "disable_compile"),
        *("continuous_batching_config", "low_memory", "transformers_version"),
    }
    known = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert known - others - {*DEFAULT_FIELDS, *NOT_SERVED} == set()


def submitted_to(server: Served) -> list[dict[str, Any]]:
    """Return a list that gets the options of each answer that a server asks its ranks for."""
    options: list[dict[str, Any]] = []
    submit = server.front.submit

    def record(prompt: Any, choices: Any, put: Any) -> Any:
        options.extend(choices)
        return submit(prompt, choices, put)

    server.front.submit = record  # type: ignore[method-assign]
    return options


def test_defaults_are_those_of_the_model_until_a_request_names_others() -> None:
    world = ThreadWorld()
    with served(world, defaults=OWN | {"max_new_tokens": 300}) as one:
        options = submitted_to(one)

        def sent(path: str, **fields: Any) -> dict[str, Any]:
            assert one.ask(path, {**fields, "stream": True, "seed": 7})[0] == 200
            return {name: value for name, value in options[-1].items() if name != "salt"}

        body = {name: value for name, value in chat().items() if name != "max_tokens"}
        plain = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "logit_bias": [], "seed": 7, "logprobs": 0}
        assert sent("/v1/chat/completions", **body) == OWN | plain | {"max_new_tokens": 300}
        given = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
        assert sent("/v1/chat/completions", **body, **given, max_tokens=9).items() >= given.items()
        assert sent("/v1/chat/completions", **body, temperature=None, max_tokens=9)["temperature"] == 0.6
        completion = {"model": "fake", "prompt": "Hi"}
        assert sent("/v1/completions", **completion)["max_new_tokens"] == 16
        near = {"model": "fake", "prompt": [7] * (LONGEST - 5)}
        assert sent("/v1/completions", **near)["max_new_tokens"] == 5
        until(lambda: not one.front.open)


@pytest.mark.parametrize(("prompt", "new"), [(99, 1), (100, 300)])
def test_an_answer_without_a_limit_stays_on_its_side_of_a_rope_switch(prompt: int, new: int) -> None:
    with served(ThreadWorld(engine_sizes={"rope_switches": [100]})) as one:
        sent = submitted_to(one)
        content = "x" * (prompt - len("<user><assistant>"))
        body = {name: value for name, value in chat(content).items() if name != "max_tokens"}
        assert one.ask("/v1/chat/completions", body)[0] == 200
        assert sent[0]["max_new_tokens"] == new


def test_ends_are_those_of_the_model_and_of_its_tokenizer(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    end = tokenizer.eos_token_id
    assert tokens_that_end(config(eos_token_id=[3, 5]), tokenizer) == (3, 5, end)
    assert tokens_that_end(config(eos_token_id=end), tokenizer) == (end,)
    tokenizer.eos_token = None
    assert tokens_that_end(config(eos_token_id=None), tokenizer) == ()
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "eos_token_id": 7, "no_repeat_ngram_size": 3})
    )
    found = open_generation_config(str(tmp_path))
    assert tokens_that_end(found, tokenizer) == (7,)
    with pytest.raises(ModelError, match="no_repeat_ngram_size = 3"):
        read_model_defaults(found)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9, **OWN}))
    assert read_model_defaults(open_generation_config(str(tmp_path))) == OWN
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match="Fix: mend its generation_config"):
        open_generation_config(str(tmp_path))
