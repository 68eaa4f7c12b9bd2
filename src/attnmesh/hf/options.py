"""Checks of the options of `generate`. All ranks compare their calls before the model runs."""

from numbers import Number
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from attnmesh.comm.consensus import describe_call, run_agreed
from attnmesh.core.checks import require, short, type_and_shape
from attnmesh.core.digest import fingerprints
from attnmesh.errors import ArgumentError, DtypeError, InputError, KernelError, MaskError, MeshError, ShapeError
from attnmesh.hf.cache import ShardedCache
from attnmesh.hf.mask import check_left_padded
from attnmesh.hf.models import USE_TOKENIZER, check_model, check_rope_switch, has_windows, is_recurrent, rope_regime
from attnmesh.hf.tensor_parallel import sharing
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

    error = None
    if isinstance(model, PreTrainedModel) and (peers := sharing(model)) is not None:
        try:
            run_agreed(Mesh.of(peers), check, describe)
        except InputError as found:  # which the other ranks of the mesh raise too
            error = found

    def check_with_peers() -> None:
        if error is not None:
            raise error
        check()

    run_agreed(place, check_with_peers, describe)


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
        given, supported = f"{name}={describe_value(value)}", value in (None, no_effect.get(name, False))
        require(supported, ArgumentError, "generate", "options that work on a mesh", given, UNSUPPORTED[name])
    assisted = [name for name in ASSISTED_OPTIONS if settings[name] and is_recurrent(model.config)]
    expected, fix = "options that work on recurrent states", "leave it out: states cannot go back"
    require(not assisted, ArgumentError, "generate", expected, ", ".join(assisted), fix)
    checkpoint, fix = options.get("checkpoint"), "pass hf.Checkpoint(path)"
    is_spec, given = isinstance(checkpoint, (NoneType, CheckpointSpec)), type(checkpoint).__name__
    require(is_spec, ArgumentError, "generate checkpoint", "an hf.Checkpoint", given, fix)
    fix = "leave it out: prefill takes only input_ids and attention_mask"
    for name, value in options.items():
        known = name in ACCEPTED or name == "chunk_size"
        given = f"{name}={short(value)}"
        require(known, ArgumentError, "generate", "options of transformers' generation", given, fix)


def check_padding(config: PreTrainedConfig, attention_mask: Tensor) -> None:
    """Raise unless every sequence ends in a token and, in a model with windows or chunks, begins with its padding."""
    subject = "generate attention_mask"
    fits, fix = bool(attention_mask[:, -1].all()), "set the tokenizer's padding_side to 'left'"
    require(fits, MaskError, subject, "no padding at the end of a sequence", "padding", fix)
    if has_windows(config):
        check_left_padded(subject, attention_mask)


def _check_cache(cache: ShardedCache, ids: Tensor) -> None:
    """Raise unless it is a cache for this batch."""
    given, fix = type(cache).__name__, "pass attnmesh.hf.ShardedCache(model.config, mesh)"
    require(isinstance(cache, ShardedCache), KernelError, "generate cache", "a ShardedCache", given, fix)
    cached = cache.batch_size if cache.get_seq_length() else len(ids)
    given, expected = f"{len(ids)} and {cached} in the cache", "as many sequences as the cache holds"
    require(cached == len(ids), ShapeError, "generate", expected, given, "pass a new cache")


def _check_prompt(config: PreTrainedConfig, ids: Tensor, attention_mask: Tensor | None, ranks: int) -> None:
    """Raise unless these are token ids that fit the model and the mesh, with a matching mask."""
    subject, expected, given = "generate input_ids", "int64 token ids (batch, length)", type_and_shape(ids)
    valid = isinstance(ids, Tensor) and ids.ndim == 2 and ids.dtype == torch.int64
    require(valid, DtypeError, subject, expected, given, USE_TOKENIZER)
    length = ids.shape[1]
    require(ids.numel() > 0, ShapeError, subject, "at least one token", "an empty prompt", "begin with a token")
    given, fix = f"{length} on {ranks} ranks", "use fewer ranks, or a longer prompt"
    require(length >= ranks, MeshError, "generate", "at least one token per rank", given, fix)
    longest = None if rope_regime(config, 0) else getattr(config, "max_position_embeddings", None)
    expected = f"at most {longest} tokens, the model's context"
    fix = "shorten the prompt, or use a model with a longer context"
    require(longest is None or length <= longest, ShapeError, subject, expected, length, fix)
    if attention_mask is None:
        return
    subject, fix = "generate attention_mask", "pass the tokenizer's 2D mask; 4D and additive masks are not supported"
    given = type(attention_mask).__name__
    require(isinstance(attention_mask, Tensor), DtypeError, subject, "a tensor", given, fix)
    shape = tuple(attention_mask.shape)
    require(shape == ids.shape, ShapeError, subject, f"2D, {tuple(ids.shape)}", shape, fix)
    check_padding(config, attention_mask)
