"""Checks of the options of `generate`. All ranks compare their calls before the model runs."""

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

UNSUPPORTED = {
    "past_key_values": "pass a ShardedCache as cache=",
    "cache_implementation": "leave it out, or pass a ShardedCache as cache=",
    "use_cache": "leave it out",
    "custom_generate": "call it yourself with past_key_values=ShardedCache(model.config, mesh)",
    "max_time": "pass max_new_tokens: the clocks of ranks differ, and ranks would stop at different tokens",
    "use_mtp": "leave it out: its layers keep a cache of their own",
    "guidance_scale": "leave it out: it runs the model on a second prompt",
    "output_attentions": "leave it out: no rank has all attention weights",
    "output_hidden_states": "leave it out: no rank has all hidden states of the prompt",
}
"""Options of transformers' `generate` that raise, each with its fix."""

ASSISTED_OPTIONS = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")
"""Options that turn on assisted decoding."""

ACCEPTED = {
    *vars(GenerationConfig()),
    *("generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "synced_gpus"),
    *("assistant_model", "streamer", "tokenizer", "assistant_tokenizer", "checkpoint"),
}
"""Names of options that `generate` accepts."""


class CheckpointSpec(NamedTuple):
    """Fields of a `Checkpoint` that ranks compare."""

    folder: Path
    every: int


class Settings:
    """Generation settings in transformers' order: options of the call, its configuration, the model's configuration."""

    def __init__(self, model: Any, options: dict[str, Any]) -> None:
        self.options = options
        self.configs = [options.get("generation_config"), getattr(model, "generation_config", None)]

    def __getitem__(self, name: str) -> Any:
        values = [self.options.get(name), *(getattr(config, name, None) for config in self.configs)]
        return next((value for value in values if value is not None), None)

    def total(self, prompt: int) -> int:
        """Return the largest number of tokens, with a prompt of this length. transformers adds 20 by default."""
        if self["max_new_tokens"] is not None:
            return prompt + int(self["max_new_tokens"])
        return prompt + 20 if self["max_length"] is None else int(self["max_length"])


def agree_on_call(
    place: Mesh,
    model: PreTrainedModel,
    ids: Tensor,
    attention_mask: Tensor | None,
    cache: ShardedCache | None,
    options: dict[str, Any],
) -> None:
    """Raise the same error on all ranks unless all make the same valid call of `generate` or `prefill`."""

    def check() -> None:
        check_model(model)
        _check_prompt(model.config.get_text_config(decoder=True), ids, attention_mask, place.shape.ranks)
        _check_options(model, options)
        if cache is not None:
            _check_cache(cache, ids)
        if "chunk_size" not in options:  # an option of `prefill`, which makes no new tokens
            check_rope_switch(model.config, ids.shape[1] - 1, Settings(model, options).total(ids.shape[1]))

    def describe(_: None) -> str:
        prompt = fingerprints({"prompt": ids, "attention_mask": attention_mask})
        held = 0 if cache is None else cache.get_seq_length()
        fields = {name: describe_value(value) for name, value in sorted(options.items()) if name != "streamer"}
        config = {"model's generation_config": describe_value(model.generation_config)}
        return describe_call("generate", **{**prompt, "held": held, **fields, **config})

    run_agreed(place, check, describe)


def describe_value(value: object) -> str:
    """Return an option as text that ranks compare: its value where it has one, else the name of its type."""
    if isinstance(value, GenerationConfig):
        return repr(sorted(value.to_diff_dict().items(), key=str))
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(describe_value, value))}]"
    if isinstance(value, Tensor):
        return fingerprints({"": value})[""]
    if isinstance(value, dict):
        return repr({name: describe_value(item) for name, item in value.items()})
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(describe_value, value)))}}}"
    if callable(getattr(value, "to_dict", None)):
        return describe_value(value.to_dict())  # type: ignore[attr-defined]
    return repr(value) if isinstance(value, (Number, str, Path, NoneType, torch.dtype)) else type(value).__name__


def _check_options(model: PreTrainedModel, options: dict[str, Any]) -> None:
    """Raise for options that `generate` does not support, and for unknown ones."""
    settings = Settings(model, options)
    unsupported = {name: settings[name] for name in UNSUPPORTED} | {"use_cache": options.get("use_cache", True)}
    no_effect = {"use_cache": True, "guidance_scale": 1.0}
    for name, value in unsupported.items():
        if value not in (None, no_effect.get(name, False)):
            expected, given = "options that work on a mesh", f"{name}={describe_value(value)}"
            raise ArgumentError("generate", expected, given, UNSUPPORTED[name])
    if not isinstance(options.get("checkpoint"), (NoneType, CheckpointSpec)):
        given, fix = type(options["checkpoint"]).__name__, "pass hf.Checkpoint(path)"
        raise ArgumentError("generate checkpoint", "an hf.Checkpoint", given, fix)
    for name in options:
        if name not in ACCEPTED and name != "chunk_size":
            fix = "leave it out: prefill takes only input_ids and attention_mask"
            raise ArgumentError("generate", "options of transformers' generation", f"{name}=", fix)


def check_left_padded(attention_mask: Tensor) -> None:
    """Raise unless every sequence ends in a token."""
    if not bool(attention_mask[:, -1].all()):
        fix = "set the tokenizer's padding_side to 'left'"
        raise MaskError("generate attention_mask", "no padding at the end of a sequence", "padding", fix)


def _check_cache(cache: ShardedCache, ids: Tensor) -> None:
    """Raise unless it is a cache for this batch."""
    if not isinstance(cache, ShardedCache):
        fix = "pass attnmesh.hf.ShardedCache(model.config, mesh)"
        raise KernelError("generate cache", "a ShardedCache", type(cache).__name__, fix)
    if cache.get_seq_length() and cache.layers[0].kv.sizes.batch != ids.shape[0]:
        given, fix = f"{ids.shape[0]} and {cache.layers[0].kv.sizes.batch} in the cache", "pass a new cache"
        raise ShapeError("generate", "as many sequences as the cache holds", given, fix)


def _check_prompt(config: PreTrainedConfig, ids: Tensor, attention_mask: Tensor | None, ranks: int) -> None:
    """Raise unless these are token ids that fit the model and the mesh, with a matching mask."""
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.dtype != torch.int64:
        given = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        fix = 'pass tokenizer(text, return_tensors="pt")["input_ids"]'
        raise DtypeError("generate input_ids", "int64 token ids (batch, length)", given, fix)
    if not ids.numel():
        raise ShapeError("generate input_ids", "at least one token", "an empty prompt", "begin with a token")
    if ids.shape[1] < ranks:
        fix = "use fewer ranks, or a longer prompt"
        raise MeshError("generate", "at least one token per rank", f"{ids.shape[1]} on {ranks} ranks", fix)
    longest = None if rope_regime(config, 0) else getattr(config, "max_position_embeddings", None)
    if longest is not None and ids.shape[1] > longest:
        fix = "shorten the prompt, or use a model with a longer context"
        raise ShapeError("generate input_ids", f"at most {longest} tokens, the model's context", f"{ids.shape[1]}", fix)
    if attention_mask is None:
        return
    fix = "pass the tokenizer's 2D mask; 4D and additive masks are not supported"
    if not isinstance(attention_mask, Tensor):
        raise DtypeError("generate attention_mask", "a tensor", type(attention_mask).__name__, fix)
    if attention_mask.shape != ids.shape:
        given = str(tuple(attention_mask.shape))
        raise ShapeError("generate attention_mask", f"2D, {tuple(ids.shape)}", given, fix)
    check_left_padded(attention_mask)
