"""What a call of `generate` asks for, held against what can be served over a mesh, and agreed on by all ranks."""

from numbers import Number
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from attnmesh.comm.consensus import describe_call, run_agreed
from attnmesh.core.digest import fingerprints
from attnmesh.errors import ArgumentError, DtypeError, KernelError, MaskError, MeshError, ShapeError
from attnmesh.hf.cache import ShardedCache
from attnmesh.hf.models import check_model, check_rope_switch, rope_regime
from attnmesh.mesh.axes import Mesh

REFUSED = {
    "past_key_values": "pass a ShardedCache as cache=",
    "cache_implementation": "leave it out, or pass a ShardedCache as cache=",
    "use_cache": "leave it out",
    "custom_generate": "call it yourself with past_key_values=ShardedCache(model.config, mesh)",
    "max_time": "pass max_new_tokens: ranks have clocks of their own, and would stop at different tokens",
    "guidance_scale": "leave it out: it runs the model on another prompt beside",
    "output_attentions": "leave it out: weights are nowhere as a whole",
    "output_hidden_states": "leave it out: those of the prompt are spread over ranks",
}
"""What `generate` of transformers takes and this one does not, and what to do instead."""

ASSISTED = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")

TAKEN = {
    *vars(GenerationConfig()),
    *("generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "synced_gpus"),
    *("assistant_model", "streamer", "tokenizer", "assistant_tokenizer", "checkpoint"),
}


class CheckpointSpec(NamedTuple):
    """Where a call keeps what it has, and every how many tokens: what ranks agree on of a checkpoint."""

    folder: Path
    every: int


class Settings:
    """What transformers will go by: options of the call, then those of a configuration, then the model's."""

    def __init__(self, model: Any, options: dict[str, Any]) -> None:
        self.options = options
        self.configs = [options.get("generation_config"), getattr(model, "generation_config", None)]

    def __getitem__(self, name: str) -> Any:
        given = [self.options.get(name), *(getattr(config, name, None) for config in self.configs)]
        return next((value for value in given if value is not None), None)

    def total(self, prompt: int) -> int:
        """Return how many tokens there may be in all. transformers makes 20 new ones unless it is told."""
        if self["max_new_tokens"] is not None:
            return prompt + int(self["max_new_tokens"])
        return prompt + 20 if self["max_length"] is None else int(self["max_length"])


def agree_on(
    here: Mesh,
    model: PreTrainedModel,
    ids: Tensor,
    attention_mask: Tensor | None,
    cache: ShardedCache | None,
    options: dict[str, Any],
) -> None:
    """A call of `generate` or `prefill`: all ranks were given the same, or all raise the same error."""

    def look() -> None:
        check_model(model)
        _check_prompt(model.config.get_text_config(decoder=True), ids, attention_mask, here.shape.ranks)
        _check_options(model, options)
        if cache is not None:
            _check_cache(cache, ids)
        if "chunk_size" not in options:  # those of `prefill`
            check_rope_switch(model.config, ids.shape[1] - 1, Settings(model, options).total(ids.shape[1]))

    def call(_: None) -> str:
        prompt = fingerprints({"prompt": ids, "attention_mask": attention_mask})
        held = 0 if cache is None else cache.get_seq_length()
        asked = {name: value_of(given) for name, given in sorted(options.items()) if name != "streamer"}
        own = value_of(model.generation_config)
        return describe_call("generate", **{**prompt, "held": held, **asked, "model's generation_config": own})

    run_agreed(here, look, call)


def value_of(given: object) -> str:
    """An option as ranks tell each other of it: by its value if it is one, else by its kind."""
    if isinstance(given, GenerationConfig):
        return repr(sorted(given.to_diff_dict().items(), key=str))
    if isinstance(given, (list, tuple)):
        return f"[{', '.join(map(value_of, given))}]"
    if isinstance(given, Tensor):
        return fingerprints({"": given})[""]
    if isinstance(given, dict):
        return repr({name: value_of(value) for name, value in given.items()})
    if isinstance(given, (set, frozenset)):
        return f"{{{', '.join(sorted(map(value_of, given)))}}}"
    if callable(getattr(given, "to_dict", None)):
        return value_of(given.to_dict())  # type: ignore[attr-defined]
    return repr(given) if isinstance(given, (Number, str, Path, NoneType, torch.dtype)) else type(given).__name__


def _check_options(model: PreTrainedModel, options: dict[str, Any]) -> None:
    settings = Settings(model, options)
    refused = {name: settings[name] for name in REFUSED} | {"use_cache": options.get("use_cache", True)}
    harmless = {"use_cache": True, "guidance_scale": 1.0}
    for name, given in refused.items():
        if given not in (None, harmless.get(name, False)):
            expected, given = "options that can be served over a mesh", f"{name}={value_of(given)}"
            raise ArgumentError("generate", expected, given, REFUSED[name])
    if not isinstance(options.get("checkpoint"), (NoneType, CheckpointSpec)):
        given, fix = type(options["checkpoint"]).__name__, "pass hf.Checkpoint(path)"
        raise ArgumentError("generate checkpoint", "an hf.Checkpoint", given, fix)
    for name in options:
        if name not in TAKEN and name != "chunk_size":
            fix = "leave it out: prompts are prefilled from their ids and their attention_mask alone"
            raise ArgumentError("generate", "options of transformers' generation", f"{name}=", fix)


def check_left(attention_mask: Tensor) -> None:
    """Raise unless every sequence ends in a token."""
    if not bool(attention_mask[:, -1].all()):
        fix = "set the tokenizer's padding_side to 'left'"
        raise MaskError("generate attention_mask", "real tokens at the end of each sequence", "padding", fix)


def _check_cache(cache: ShardedCache, ids: Tensor) -> None:
    if not isinstance(cache, ShardedCache):
        fix = "pass attnmesh.hf.ShardedCache(model.config, mesh)"
        raise KernelError("generate cache", "a ShardedCache", type(cache).__name__, fix)
    if cache.get_seq_length() and cache.layers[0].kv.sizes.batch != ids.shape[0]:
        given, fix = f"{ids.shape[0]} and {cache.layers[0].kv.sizes.batch} in the cache", "pass a new cache"
        raise ShapeError("generate", "as many sequences as the cache holds", given, fix)


def _check_prompt(config: PreTrainedConfig, ids: Tensor, attention_mask: Tensor | None, ranks: int) -> None:
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.dtype != torch.int64:
        given = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise DtypeError("generate input_ids", "int64 token ids (batch, length)", given, "tokenize with return_tensors")
    if not ids.numel():
        raise ShapeError("generate input_ids", "at least one token", "an empty prompt", "begin with a token")
    if ids.shape[1] < ranks:
        fix = "use fewer ranks, or a longer prompt"
        raise MeshError("generate", "at least one token a rank", f"{ids.shape[1]} on {ranks} ranks", fix)
    longest = None if rope_regime(config, 0) else getattr(config, "max_position_embeddings", None)
    if longest is not None and ids.shape[1] > longest:
        fix = "shorten the prompt, or use a model with a longer context"
        raise ShapeError("generate input_ids", f"at most {longest} tokens, the model's context", f"{ids.shape[1]}", fix)
    fix = "pass the tokenizer's; a 4D or additive mask cannot be served"
    if attention_mask is not None and not isinstance(attention_mask, Tensor):
        raise DtypeError("generate attention_mask", "a tensor", type(attention_mask).__name__, fix)
    if attention_mask is not None and attention_mask.shape != ids.shape:
        given = str(tuple(attention_mask.shape))
        raise ShapeError("generate attention_mask", f"2D, {tuple(ids.shape)}", given, fix)
    if attention_mask is not None:
        check_left(attention_mask)
