"""Each argument of transformers' `generate`, beside stock: `python -m tools.generation` prints the table."""

import inspect
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    CompileConfig,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteriaList,
    WatermarkingConfig,
)
from transformers.generation import ContinuousBatchingConfig, GenerationMixin, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

import attnmesh.hf as hf
from attnmesh.errors import InputError
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.models import families
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh

PROMPT = 24

BASE: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}

SAMPLE = {"do_sample": True}
BEAMS = {"num_beams": 3}
DICT = {"return_dict_in_generate": True}
SCORES = {**DICT, "output_scores": True}
END = {"eos_token_id": [*range(2, 40)]}
GROUPS = {"num_beams": 4, "num_beam_groups": 2}


@lru_cache
def tokenizer(count: int = 97) -> PreTrainedTokenizerFast:
    """A tokenizer of single characters, by default of as many as the models know tokens."""
    made = Tokenizer(WordLevel({chr(33 + number): number for number in range(count)}, unk_token="!"))
    made.pre_tokenizer, made.decoder = Split(Regex("."), "isolated"), Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="!", bos_token='"')


def assistant(words: int = 97) -> Any:
    """A smaller model, which proposes tokens."""
    return families.model("llama", "sdpa", num_hidden_layers=1, vocab_size=words)


def other_words() -> dict[str, Any]:
    """An assistant with words of its own."""
    return {"assistant_model": partial(assistant, 98), "tokenizer": tokenizer(), "assistant_tokenizer": tokenizer(98)}


def even_tokens(_: int, ids: Tensor) -> list[int]:
    """Tokens that may follow: even numbers."""
    return [*range(2, 97, 2)]


class Silence(BaseStreamer):
    """A streamer that shows nothing."""

    def put(self, value: Tensor) -> None:
        """Take tokens."""

    def end(self) -> None:
        """Take the end."""


class Doubled(LogitsProcessor):
    """A logits processor that sharpens."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores, twice as far from each other."""
        return scores * 2


THEMES: dict[str, dict[str, dict[str, Any]]] = {
    "length": {
        "max_length": {"max_new_tokens": None, "max_length": PROMPT + 5},
        "max_new_tokens": {"max_new_tokens": 5},
        "min_length": {**END, "min_length": PROMPT + 6},
        "min_new_tokens": {**END, "min_new_tokens": 6},
        "early_stopping": {**BEAMS, **END, "early_stopping": True},
        "max_time": {"max_time": 60.0},
        "stop_strings": {"stop_strings": [chr(33 + number) for number in range(2, 50)], "tokenizer": tokenizer()},
        "stopping_criteria": {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(PROMPT + 3)])},
    },
    "search": {
        "do_sample": SAMPLE,
        "num_beams": BEAMS,
        "num_return_sequences": {**SAMPLE, "num_return_sequences": 2},
        "length_penalty": {**BEAMS, **END, "length_penalty": -5.0},
    },
    "sampling": {
        "temperature": {**SAMPLE, "temperature": 3.0},
        "top_k": {**SAMPLE, "top_k": 2},
        "top_p": {**SAMPLE, **SCORES, "top_p": 0.1},
        "min_p": {**SAMPLE, "min_p": 0.5},
        "top_h": {**SAMPLE, **SCORES, "top_h": 0.1},
        "typical_p": {**SAMPLE, "typical_p": 0.1},
        "epsilon_cutoff": {**SAMPLE, **SCORES, "epsilon_cutoff": 0.2},
        "eta_cutoff": {**SAMPLE, "eta_cutoff": 0.5},
    },
    "logits": {
        "repetition_penalty": {**SCORES, "repetition_penalty": 5.0},
        "encoder_repetition_penalty": {**SCORES, "encoder_repetition_penalty": 5.0},
        "no_repeat_ngram_size": {**SCORES, "no_repeat_ngram_size": 1},
        "encoder_no_repeat_ngram_size": {**SCORES, "encoder_no_repeat_ngram_size": 1},
        "bad_words_ids": {"bad_words_ids": [[number] for number in range(2, 60)]},
        "renormalize_logits": {**SAMPLE, **SCORES, "renormalize_logits": True},
        "forced_bos_token_id": {"forced_bos_token_id": 7},
        "forced_eos_token_id": {"forced_eos_token_id": 7},
        "remove_invalid_values": {"remove_invalid_values": True},
        "exponential_decay_length_penalty": {"eos_token_id": 3, "exponential_decay_length_penalty": (2, 99.0)},
        "suppress_tokens": {"suppress_tokens": [*range(2, 60)]},
        "begin_suppress_tokens": {"begin_suppress_tokens": [*range(2, 60)]},
        "sequence_bias": {"sequence_bias": {(7,): 50.0}},
        "guidance_scale": {"guidance_scale": 2.0},
        "negative_prompt_ids": {"negative_prompt_ids": families.prompt(PROMPT, seed=1)},
        "negative_prompt_attention_mask": {"negative_prompt_attention_mask": torch.ones(1, PROMPT)},
        "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=50.0)},
        "logits_processor": {"logits_processor": LogitsProcessorList([Doubled()]), **SAMPLE},
        "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": even_tokens},
        "inputs": {"inputs": families.prompt(PROMPT)},
    },
    "tokens": {
        "pad_token_id": {"pad_token_id": 5},
        "bos_token_id": {"bos_token_id": 5},
        "eos_token_id": END,
        "decoder_start_token_id": {"decoder_start_token_id": 5},
        "tokenizer": {"tokenizer": tokenizer()},
        "token_healing": {"token_healing": True, "tokenizer": tokenizer()},
    },
    "output": {
        "return_dict_in_generate": DICT,
        "output_scores": {**SCORES, "repetition_penalty": 5.0},
        "output_logits": {**DICT, "output_logits": True},
        "output_attentions": {**DICT, "output_attentions": True},
        "output_hidden_states": {**DICT, "output_hidden_states": True},
        "streamer": {"streamer": Silence()},
    },
    "assisted decoding": {
        "assistant_model": {"assistant_model": assistant},
        "assistant_tokenizer": other_words(),
        "assistant_lookbehind": {**other_words(), "assistant_lookbehind": 4},
        "target_lookbehind": {**other_words(), "target_lookbehind": 4},
        "assistant_confidence_threshold": {"assistant_model": assistant, "assistant_confidence_threshold": 0.1},
        "assistant_ensemble_weight": {**SAMPLE, "assistant_model": assistant, "assistant_ensemble_weight": 0.01},
        "assistant_early_exit": {"assistant_early_exit": 1},
        "num_assistant_tokens": {"assistant_model": assistant, "num_assistant_tokens": 3},
        "num_assistant_tokens_schedule": {"assistant_model": assistant, "num_assistant_tokens_schedule": "constant"},
        "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
        "max_matching_ngram_size": {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1},
        "speculation_type": {"speculation_type": "dflash", "assistant_model": assistant},
        "use_mtp": {"use_mtp": True},
        "is_assistant": {"is_assistant": True},
    },
    "cache and compilation": {
        "use_cache": {"use_cache": False},
        "cache_implementation": {"cache_implementation": "static"},
        "cache_config": {"cache_config": {}},
        "max_cache_len": {"max_cache_len": 64},
        "prefill_chunk_size": {"prefill_chunk_size": 8},
        "compile_config": {"compile_config": CompileConfig()},
        "disable_compile": {"disable_compile": True},
        "low_memory": {"low_memory": True},
        "continuous_batching_config": {"continuous_batching_config": ContinuousBatchingConfig()},
    },
    "the method": {
        "generation_config": {"generation_config": GenerationConfig(suppress_tokens=[*range(2, 60)])},
        "synced_gpus": {"synced_gpus": True},
        "custom_generate": {"custom_generate": GenerationMixin._sample},
        "trust_remote_code": {"trust_remote_code": True},
    },
    "searches whose code is on the hub": {
        "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
        "dola_layers": {"dola_layers": "low"},
        "num_beam_groups": GROUPS,
        "diversity_penalty": {**GROUPS, "diversity_penalty": 1.0},
        "constraints": {**BEAMS, "constraints": [1]},
        "force_words_ids": {**BEAMS, "force_words_ids": [[5]]},
    },
}
"""A call with each argument, in which it changes something where it can."""

EXAMPLES = {name: example for theme in THEMES.values() for name, example in theme.items()}

IDLE = {
    *("bos_token_id", "decoder_start_token_id", "pad_token_id", "forced_bos_token_id", "remove_invalid_values"),
    *("tokenizer", "streamer", "synced_gpus", "low_memory", "max_cache_len", "cache_config", "compile_config"),
    *("disable_compile", "continuous_batching_config", "prefill_chunk_size", "return_dict_in_generate"),
    *("max_matching_ngram_size", "prompt_lookup_num_tokens", "num_assistant_tokens", "num_assistant_tokens_schedule"),
    *("assistant_model", "assistant_lookbehind", "target_lookbehind", "assistant_early_exit"),
    "assistant_confidence_threshold",
}
"""Arguments that leave the tokens of one prompt as they are, in transformers too."""


def documented() -> list[str]:
    """Return the arguments of transformers' `generate`: its own, those it takes out of others, its configuration's."""
    own = {*inspect.signature(GenerationMixin.generate).parameters} - {"self", "kwargs"}
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")} - {"transformers_version"}
    return sorted(own | fields | {"tokenizer", "assistant_tokenizer", "trust_remote_code"})


class Row(NamedTuple):
    """How an argument ends: it works, is refused with a fix, or is wrong."""

    status: str
    fix: str = ""


Outcome = list[Tensor] | Exception


def attempt(generate: Callable[..., Any], options: dict[str, Any]) -> Outcome:
    """Return the tensors of an output, or the error."""
    options = {**BASE, **options}
    if (make := options.get("assistant_model")) is not None:
        options["assistant_model"] = make()  # a new one, because transformers adapts its settings to the last call
    torch.manual_seed(3)
    try:
        output = generate(families.prompt(PROMPT), **options)
    except Exception as error:
        return error
    if isinstance(output, Tensor):
        return [output]
    return [output.sequences, *(output.scores or ()), *(output.logits or ())]


def same(found: Any, expected: Any) -> bool:
    """Return whether two outputs have the same tokens and scores, to the rounding of float32."""
    if isinstance(found, Exception) or isinstance(expected, Exception) or len(found) != len(expected):
        return False
    pairs = zip(found, expected, strict=True)
    return all(x.shape == y.shape and torch.allclose(x.float(), y.float(), atol=1e-4) for x, y in pairs)


def alone(name: str, stock: PreTrainedModel, model: PreTrainedModel) -> tuple[Outcome, Outcome, Outcome]:
    """Return how the argument ends in stock transformers, on one device, and, if it works, in stock without it."""
    options = EXAMPLES[name]
    expected, ours = attempt(stock.generate, options), attempt(partial(hf.generate, model, mesh=None), options)
    rest = {other: value for other, value in options.items() if other != name}
    return expected, ours, attempt(stock.generate, rest) if same(ours, expected) else expected


def compare(name: str, known: tuple[Outcome, Outcome, Outcome], model: PreTrainedModel, mesh: DeviceMesh) -> Row:
    """Return how the argument ends on one device and on the mesh, beside stock transformers."""
    (expected, ours, without), theirs = known, attempt(partial(hf.generate, model, mesh=mesh), EXAMPLES[name])
    found = [ours, theirs]
    if all(same(each, expected) for each in found):
        idle = same(without, expected)
        return Row("works") if idle == (name in IDLE) else Row("wrong", f"idle={idle} in transformers")
    refused = {str(each) for each in found if isinstance(each, InputError) and f"given {name}=" in str(each)}
    if len(refused) == 1 and all(str(each) in refused for each in found):
        return Row("refused", refused.pop().split(" Fix: ")[1].rstrip("."))
    return Row("wrong", f"stock {expected}, on one device {found[0]}, on the mesh {found[1]}")


TOGETHER = ("synced_gpus",)
"""Arguments with which stock transformers waits for the other ranks."""


@on_each_rank
def compare_all(ranks: int, names: list[str]) -> dict[str, Row]:
    """Return a row for each argument, on a rank. Ranks share the calls that each makes alone."""
    stock, model = (families.model("llama", name, num_hidden_layers=3) for name in ("sdpa", "attnmesh"))
    rank = dist.get_rank()
    mine = [name for number, name in enumerate(names) if number % ranks == rank or name in TOGETHER]
    shares: list[Any] = [None] * ranks
    dist.all_gather_object(shares, {name: alone(name, stock, model) for name in mine})
    known = {name: outcomes for share in shares for name, outcomes in share.items()}
    mesh = named_mesh(Shape(1, 1, ranks), AXES)
    return {name: compare(name, known[name], model, mesh) for name in names}


def table(rows: dict[str, Row]) -> list[str]:
    """Return the lines of the table: of each theme the arguments that work, and each one that is refused."""
    lines = ["| arguments of `generate` | on a mesh | use this instead |", "|---|---|---|"]
    for theme, names in THEMES.items():
        works = ", ".join(f"`{name}`" for name in names if rows[name].status == "works")
        lines += [f"| *{theme}*: {works} | work | |"] if works else []
        lines += [
            f"| `{name}` | {rows[name].status} | {rows[name].fix} |" for name in names if rows[name].status != "works"
        ]
    return lines


if __name__ == "__main__":
    pool = Pool()
    print("\n".join(table(pool.run(2, compare_all, 2, list(EXAMPLES))[0])))
    pool.close()
