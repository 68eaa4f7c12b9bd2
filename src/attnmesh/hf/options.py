"""Checks of the options of `generate`. All ranks compare their calls before the model runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from numbers import Number
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from attnmesh.core.digest import fingerprints
from attnmesh.errors import (
    ArgumentError,
    DtypeError,
    KernelError,
    MaskError,
    ShapeError,
    check_count,
    short,
    type_and_shape,
)
from attnmesh.guard.agreement import Agreement, Fields
from attnmesh.hf.cache.interruption import HeldCounts, held_counts, truncate_to_shortest
from attnmesh.hf.cache.sharded_cache import ShardedCache
from attnmesh.hf.images.inputs import IMAGE_INPUTS, OWN_PROCESSOR, image_inputs, split_images
from attnmesh.hf.layer_mask import check_left_padded
from attnmesh.hf.models import (
    check_can_generate,
    check_rope_switch,
    check_tokens,
    has_windows,
    is_compressed,
    is_recurrent,
    rope_regime,
)
from attnmesh.hf.tensor_parallel import tp_mesh
from attnmesh.mesh.axes import RankMesh

USE_TOKENIZER = 'pass tokenizer(text, return_tensors="pt")["input_ids"]'
"""Fix in errors about token ids."""

SEARCHES = ("penalty_alpha", "dola_layers", "constraints", "force_words_ids", "diversity_penalty", "num_beam_groups")
"""Options of ways of searching that transformers loads from the hub."""

ON_HUB = "leave it out: its code is on the hub, not in transformers"

TEXT_ALONE = "leave it out: prefill takes only token ids, attention_mask and images"

SECOND_PROMPT = "leave it out: it runs the model on a second prompt"

UNSUPPORTED = {
    "past_key_values": "pass a ShardedCache as cache=",
    "cache_implementation": "leave it out, or pass a ShardedCache as cache=",
    "use_cache": "leave it out",
    "custom_generate": "call it yourself with past_key_values=ShardedCache(model.config, mesh)",
    "trust_remote_code": "leave it out: no code is loaded",
    "inputs": "pass input_ids",
    "max_time": "pass max_new_tokens: the clocks of ranks differ, and ranks would stop at different tokens",
    "token_healing": "pass model.heal_tokens(input_ids, tokenizer) as the prompt: it is prefilled before it is healed",
    "is_assistant": "leave it out: transformers sets it on a model that assists another",
    "use_mtp": "leave it out: its layers keep a cache of their own",
    "speculation_type": "leave it out: its drafter reads hidden states of the prompt, which no rank has whole",
    **dict.fromkeys(("guidance_scale", "negative_prompt_ids", "negative_prompt_attention_mask"), SECOND_PROMPT),
    "output_attentions": "leave it out: no rank has all attention weights",
    "output_hidden_states": "leave it out: no rank has all hidden states of the prompt",
    **dict.fromkeys(SEARCHES, ON_HUB),
}
"""Options of transformers' `generate` that raise, each with its fix."""

NEUTRAL = {"use_cache": True, "guidance_scale": 1, "num_beam_groups": 1}
"""Values of unsupported options that have no effect. For options not named here they are False and 0."""

OVERRIDDEN = ("use_cache", "cache_implementation")
"""Options that configurations may set: `generate` brings the cache. Gemma 3's asks for a hybrid one."""

ASSISTED_OPTIONS = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")
"""Options that turn on assisted decoding."""

ACCEPTED = {
    *vars(GenerationConfig()),
    *("generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "synced_gpus"),
    *("assistant_model", "streamer", "tokenizer", "assistant_tokenizer", "checkpoint"),
    *("custom_generate", "trust_remote_code", "negative_prompt_ids", "negative_prompt_attention_mask"),
}
"""Names of options that `generate` accepts, some with one value alone."""


class CheckpointSpec(NamedTuple):
    """Fields of a `Checkpoint` that ranks compare."""

    folder: Path
    every: int


class GenerationSettings:
    """Generation settings in transformers' order: options of the call, its configuration, the model's configuration."""

    def __init__(self, model: Any, options: dict[str, Any]) -> None:
        self.options = options
        self.configs = [options.get("generation_config"), getattr(model, "generation_config", None)]

    def __getitem__(self, name: str) -> Any:
        values = [self.options.get(name), *(getattr(config, name, None) for config in self.configs)]
        return next((value for value in values if value is not None), None)

    def is_default(self, name: str) -> bool:
        """Return whether the value is the model's, not the call's."""
        call_values = (self.options.get(name), getattr(self.configs[0], name, None))
        return self[name] is not None and call_values == (None, None)

    def total(self, prompt_tokens: int) -> int:
        """Return the largest number of tokens, with a prompt of this length. transformers adds 20 by default."""
        if self["max_new_tokens"] is not None:
            return prompt_tokens + int(self["max_new_tokens"])
        return prompt_tokens + 20 if self["max_length"] is None else int(self["max_length"])


def agree_on_call(
    mesh: RankMesh,
    model: PreTrainedModel,
    ids: Tensor,
    attention_mask: Tensor | None,
    cache: ShardedCache | None,
    options: dict[str, Any],
) -> None:
    """Raise the same error on all ranks unless all make the same valid call of `generate` or `prefill`.

    Afterwards the cache has the same tokens on all ranks, also if an error has interrupted some ranks before.
    """

    def fields() -> dict[str, object]:
        prompt = fingerprints({"prompt": ids, "attention_mask": attention_mask})
        values = {name: describe_value(value) for name, value in sorted(options.items()) if name != "streamer"}
        config = {"model's generation_config": describe_value(model.generation_config)}
        return {**prompt, **values, **config}

    counts = HeldCounts(0, 0, 0, False)
    with agreement_with_peers(mesh, model, "generate", fields) as agreements:
        check_can_generate(model)
        _check_prompt(model, ids, attention_mask)
        _check_options(model, options)
        for name in ("chunk_size", "prefill_chunk_size"):
            if options.get(name) is not None:
                check_count(f"{name}", options[name], "count the tokens of a chunk, or leave it out")
        if cache is not None:
            _check_cache(cache, ids)
        if "chunk_size" not in options:  # an option of `prefill`, which makes no new tokens
            check_rope_switch(model.config, ids.shape[1] - 1, GenerationSettings(model, options).total(ids.shape[1]))
        if cache is not None:
            counts = held_counts(cache)
        for agreement in agreements:
            counts = _compare_held(agreement, counts)
    if cache is not None:
        truncate_to_shortest(cache, counts)


@contextmanager
def agreement_with_peers(
    mesh: RankMesh, model: PreTrainedModel, name: str, fields: Fields
) -> Iterator[list[Agreement]]:
    """Agree on a call with the ranks that split the model's weights, then with those of a mesh. Yield both agreements.

    The agreement of the mesh is around the other one. If rank A's peer in the weights fails, rank A raises the error
    inside the agreement of its mesh, so all ranks of A's mesh raise it too.
    """
    with Agreement(mesh, name, fields) as mesh_agreement:
        peers = tp_mesh(model) if isinstance(model, PreTrainedModel) else None
        with Agreement(RankMesh.of(peers), name, fields, is_compared=peers is not None) as peers_agreement:
            yield [peers_agreement, mesh_agreement]


def _compare_held(agreement: Agreement, counts: HeldCounts) -> HeldCounts:
    """Compare a call, and return what the caches of all ranks hold.

    Raise if the caches differ and no error interrupted one of them: then ranks have passed different caches.
    """
    payloads = agreement.compare(payload=counts)
    held_by_all = HeldCounts.of_ranks(payloads)
    if not held_by_all.is_interrupted and any(payload[0] != counts.shortest for payload in payloads):
        Agreement(agreement.mesh, agreement.name, {"held": counts.shortest}).compare()
    return held_by_all


def describe_value(value: object) -> str:
    """Return an option as text that ranks compare: its value if all ranks write it alike, or the name of its type."""
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
    """Raise unless the options of `generate` work on a mesh."""
    settings = GenerationSettings(model, options)
    for name, fix in UNSUPPORTED.items():
        value = options.get(name) if name in OVERRIDDEN else settings[name]
        if value is None or (isinstance(value, (int, float)) and value == NEUTRAL.get(name, False)):
            continue
        given = f"{name}={describe_value(value)}"
        if settings.is_default(name):
            given, fix = f"{given} in model.generation_config", f"set model.generation_config.{name} = None"
        raise ArgumentError("generate", "options that work on a mesh", given, fix)
    if settings["stop_strings"] and options.get("tokenizer") is None:
        given = f"stop_strings={describe_value(settings['stop_strings'])} alone"
        raise ArgumentError("generate", "a tokenizer beside stop strings", given, "pass tokenizer=")
    assisted = [name for name in ASSISTED_OPTIONS if settings[name]]
    if assisted and (is_recurrent(model.config) or is_compressed(model.config)):
        given, fix = ", ".join(assisted), "leave it out: states cannot go back"
        raise ArgumentError("generate", "options that work on states", given, fix)
    checkpoint = options.get("checkpoint")
    if not isinstance(checkpoint, (NoneType, CheckpointSpec)):
        given = type(checkpoint).__name__
        raise ArgumentError("generate checkpoint", "an hf.Checkpoint", given, "pass hf.Checkpoint(path)")
    images, _ = split_images(model, options)
    alone = [name for name in ("checkpoint", *ASSISTED_OPTIONS) if settings[name]]
    if alone and images:
        fix = "leave them out, or generate from text"
        raise ArgumentError("generate images", "images without these options", ", ".join(alone), fix)
    for name, value in options.items():
        if name not in ACCEPTED and name != "chunk_size" and name not in image_inputs(model):
            expected, given = "options of transformers' generation", f"{name}={short(value)}"
            raise ArgumentError("generate", expected, given, _fix_of_unknown(name))


def _fix_of_unknown(name: str) -> str:
    """Return the fix of an option that `generate` does not take: the option with the most similar name, if any."""
    if name in IMAGE_INPUTS:
        return OWN_PROCESSOR
    nearest = get_close_matches(name, ACCEPTED, 1, 0.8)
    return f"write {nearest[0]}=" if nearest else TEXT_ALONE


def check_padding(config: PreTrainedConfig, attention_mask: Tensor) -> None:
    """Raise unless every sequence ends in a token and, in a model with windows or chunks, begins with its padding."""
    subject = "generate attention_mask"
    if not bool(attention_mask[:, -1].all()):
        fix = "set the tokenizer's padding_side to 'left'"
        raise MaskError(subject, "no padding at the end of a sequence", "padding", fix)
    if has_windows(config):
        check_left_padded(subject, attention_mask)


def _check_cache(cache: ShardedCache, ids: Tensor) -> None:
    """Raise unless a cache can hold this batch."""
    if not isinstance(cache, ShardedCache):
        fix = "pass attnmesh.hf.ShardedCache(model.config, mesh)"
        raise KernelError("generate cache", "a ShardedCache", type(cache).__name__, fix)
    cached = cache.batch_size if cache.get_seq_length() else len(ids)
    if cached != len(ids):
        given, expected = f"{len(ids)} and {cached} in the cache", "as many sequences as the cache holds"
        raise ShapeError("generate", expected, given, "pass a new cache")


def _check_prompt(model: PreTrainedModel, ids: Tensor, attention_mask: Tensor | None) -> None:
    """Raise unless token ids and their mask are valid for the model."""
    config = model.config.get_text_config(decoder=True)
    subject = "generate input_ids"
    if not (isinstance(ids, Tensor) and ids.ndim == 2 and ids.dtype == torch.int64):
        raise DtypeError(subject, "int64 token ids (batch, length)", type_and_shape(ids), USE_TOKENIZER)
    if not ids.numel():
        raise ShapeError(subject, "at least one token", "an empty prompt", "begin with a token")
    check_tokens(subject, ids, model)
    longest = None if rope_regime(config, 0) else getattr(config, "max_position_embeddings", None)
    if longest is not None and ids.shape[1] > longest:
        fix = "shorten the prompt, or use a model with a longer context"
        raise ShapeError(subject, f"at most {longest} tokens, the model's context", str(ids.shape[1]), fix)
    if attention_mask is None:
        return
    subject, fix = "generate attention_mask", "pass the tokenizer's 2D mask; 4D and additive masks are not supported"
    if not isinstance(attention_mask, Tensor):
        raise DtypeError(subject, "a tensor", type(attention_mask).__name__, fix)
    if attention_mask.shape != ids.shape:
        raise ShapeError(subject, f"2D, {tuple(ids.shape)}", str(tuple(attention_mask.shape)), fix)
    check_padding(config, attention_mask)
