"""Models that attention over a mesh serves: their layers, their ropes, and what may be wrapped around them."""

import sys
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from attnmesh.errors import KernelError, ShapeError
from attnmesh.hf.opaque import FAMILIES

NAME = "attnmesh"
"""The name of the plug-ins in transformers."""

SERVED = ("full_attention", "sliding_attention")
"""Kinds of layers that are served. Others keep states that are no keys, or attend by chunks or by an index."""

RECURRENT = ("rwkv", "xlstm")
"""Model types of recurrent layers that do not say so in their `layer_types`."""


def check_layers(config: PreTrainedConfig) -> None:
    """Raise unless every layer is attention over all tokens, or over a window of them."""
    config = config.get_text_config(decoder=True)
    expected = f"a model of layers of {' and '.join(SERVED)}"
    kinds = getattr(config, "layer_types", None) or []
    if others := sorted({kind for kind in kinds if kind not in SERVED}):
        raise KernelError("attnmesh.hf", expected, f"{config.model_type} with layers of {', '.join(others)}", FAMILIES)
    if getattr(config, "attention_chunk_size", None):
        raise KernelError("attnmesh.hf", expected, f"{config.model_type} with layers of chunks", FAMILIES)
    if config.model_type in RECURRENT:
        given = f"{config.model_type} with layers of recurrent states"
        raise KernelError("attnmesh.hf", expected, given, FAMILIES)


def check_keys(config: PreTrainedConfig) -> None:
    """Raise unless each layer has keys of its own, which a cache can keep."""
    config = config.get_text_config(decoder=True)
    if not hasattr(config, "num_hidden_layers"):
        expected, given = "a model of one stack of layers", f"{config.model_type}, whose config counts none"
        raise KernelError("attnmesh.hf", expected, given, FAMILIES)
    modes = getattr(config, "kv_sharing_modes", None) or []
    if getattr(config, "num_kv_shared_layers", None) or "reuse" in modes:
        expected, given = "a model whose layers have keys of their own", f"{config.model_type}, whose layers share keys"
        raise KernelError("attnmesh.hf", expected, given, FAMILIES)


def check_model(model: PreTrainedModel) -> None:
    """Raise unless it is a causal language model that asks attnmesh for its attention."""
    if not isinstance(model, PreTrainedModel) or not model.can_generate() or model.config.is_encoder_decoder:
        fix = "load it with AutoModelForCausalLM"
        raise KernelError("generate", "a causal language model of transformers", type(model).__name__, fix)
    check_layers(model.config)
    check_keys(model.config)
    if not (model.is_backend_compatible() or hasattr(sys.modules[type(model).__module__], "ALL_ATTENTION_FUNCTIONS")):
        given = f"{type(model).__name__}, which computes its own"
        raise KernelError("generate", "a model that lets attention be chosen", given, FAMILIES)
    if model.training and getattr(model, "is_gradient_checkpointing", False):
        given = "one in training with gradient checkpointing, which drops the cache"
        raise KernelError("generate", "a model that uses its cache", given, "call model.eval()")
    if model.config._attn_implementation != NAME:
        fix = f'call model.set_attn_implementation("{NAME}")'
        raise KernelError("generate", f"attn_implementation {NAME!r}", repr(model.config._attn_implementation), fix)


def unwrapped(model: Any) -> Any:
    """Return the model of transformers inside of torch.compile, DDP or PEFT's adapters."""
    if isinstance(model, PreTrainedModel) or not isinstance(model, nn.Module):
        return model
    adapters = getattr(model, "peft_config", None) or {}
    if any(getattr(adapter, "is_prompt_learning", False) for adapter in adapters.values()):
        fix = "use adapters that change weights, such as LoRA"
        raise KernelError("generate", "adapters without tokens of their own", type(model).__name__, fix)
    if adapters:
        base: Any = model.get_base_model  # LoRA's layers stand inside of it
        return base()
    inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
    return unwrapped(inner) if isinstance(inner, nn.Module) else model


def rope_regime(config: PreTrainedConfig, length: int, grown: int = 0) -> tuple[int, ...]:
    """Return what the rope's frequencies depend on: keys of two regimes are not keys of one sequence.

    `grown` is the length that a model's dynamic ropes have been scaled to before, as `rope_growth` has it.

    >>> from transformers import LlamaConfig
    >>> dynamic = LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    >>> rope_regime(dynamic, 100, 6000), rope_regime(dynamic, 5000), rope_regime(dynamic, 5000, 6000)
    ((2048,), (5000,), (6000,))
    """
    return tuple(
        (max(length, grown) if length > switch else switch) if rope["rope_type"] == "dynamic" else int(length > switch)
        for rope, switch in _scaled_ropes(config)
    )


def rope_growth(model: PreTrainedModel) -> int:
    """Return the longest sequence that the model's dynamic ropes are scaled to: they grow, and seldom shrink."""
    grown = [
        int(value)
        for module in model.modules()
        for name, value in vars(module).items()
        if name.endswith("max_seq_len_cached")
    ]
    return max(grown, default=0)


def check_rope_switch(config: PreTrainedConfig, cached: int, total: int) -> None:
    """Raise where generation crosses the length at which a rope changes, and all keys would have to be made again."""
    for rope, switch in _scaled_ropes(config.get_text_config(decoder=True)):
        if rope["rope_type"] == "longrope" and cached <= switch < total:
            expected = f"tokens on one side of {switch}, where the model's longrope changes"
            fix = f"generate up to {switch} tokens, then call it again with these as the prompt"
            raise ShapeError("generate", expected, f"a prompt of {cached + 1} and up to {total} in all", fix)


def _scaled_ropes(config: PreTrainedConfig) -> list[tuple[dict[str, Any], int]]:
    """Return the ropes that depend on the length of a sequence, with the length at which they change."""
    config = config.get_text_config(decoder=True)
    ropes = getattr(config, "rope_parameters", None) or {}
    ropes = [ropes] if "rope_type" in ropes else [rope for rope in ropes.values() if isinstance(rope, dict)]
    longest: int = getattr(config, "max_position_embeddings", 0)
    return [
        (rope, int(rope.get("original_max_position_embeddings") or longest))
        for rope in ropes
        if rope.get("rope_type") in ("dynamic", "longrope")
    ]
