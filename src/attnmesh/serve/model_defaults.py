"""Defaults that a model's generation_config brings to requests, its ends, and the fields of it that are refused."""

from collections.abc import Iterable
from typing import Any

from transformers import GenerationConfig

from attnmesh.errors import ModelError
from attnmesh.serve.refused import Refused
from attnmesh.serve.request_fields import CHAT, SAMPLING

DEFAULT_FIELDS = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p", "max_new_tokens")
"""Fields that become defaults of requests, as vLLM has them."""

NOT_SERVED: dict[str, Any] = {
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"), None),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), None),
    **dict.fromkeys(("constraints", "force_words_ids", "penalty_alpha", "dola_layers", "watermarking_config"), None),
    **dict.fromkeys(("stop_strings", "max_time", "top_h"), None),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), 0),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "diversity_penalty"), 0),
    **dict.fromkeys(("typical_p", "encoder_repetition_penalty", "guidance_scale", "num_beams", "num_beam_groups"), 1),
    "token_healing": False,
}
"""Fields that change which tokens `generate` gives, each with the value that changes nothing beside None."""

USE_NO_DEFAULTS = "start with --generation-config none, and the model's generation_config sets no defaults"


def read_model_defaults(config: GenerationConfig) -> dict[str, Any]:
    """Return the defaults of requests by name, or raise on a field that changes tokens and is not served."""
    for name, neutral in NOT_SERVED.items():
        value = getattr(config, name, None)
        if value is not None and value != neutral:
            expected = f"fields that are served ({', '.join(DEFAULT_FIELDS)})"
            given = f"{name} = {str(value)[:60]}"
            raise ModelError("generation_config", expected, given, USE_NO_DEFAULTS)
    values = {name: getattr(config, name, None) for name in DEFAULT_FIELDS}
    return {name: _checked_default(name, value) for name, value in values.items() if value is not None}


def _checked_default(name: str, value: Any) -> Any:
    """Return a value that a request might have, or raise."""
    try:
        return (SAMPLING.get(name) or CHAT["max_tokens"]).read(name, value)
    except Refused as error:
        raise ModelError("generation_config", "values that requests may have", str(error), USE_NO_DEFAULTS) from None


def tokens_that_end(config: GenerationConfig, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end an answer: those of the generation_config, and the tokenizer's own."""
    eos = config.eos_token_id
    ends: Iterable[int] = () if eos is None else (eos,) if isinstance(eos, int) else eos
    own = tokenizer.eos_token_id
    return tuple(sorted({*ends, *(() if own is None else (own,))}))
