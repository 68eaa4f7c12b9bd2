"""Models that attention over a mesh supports: checks of their layers, ropes and wrappers.

Configurations are checked before a model runs. `Opaque` catches the rest: a model with custom attention reads the
masks and cached keys that pass through it, and raises.
"""

import sys
from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from attnmesh.errors import KernelError, ShapeError

NAME = "attnmesh"
"""Name of the attention and mask functions in transformers' registries."""

SUBJECT = "attnmesh.hf"
"""First words of errors that a model raises inside its forward pass."""

USE_SUPPORTED = "use a family like Llama, Qwen, Mistral, Gemma 3 or gpt-oss"
"""Fix in errors about models that are not supported."""

SUPPORTED_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
"""Supported values of `config.layer_types`. Other layers keep a state instead of keys, or attend by index."""

RECURRENT_MODELS = ("rwkv", "xlstm")
"""Model types with recurrent layers and without `config.layer_types`."""


class Opaque:
    """A value that a model must pass on unread. Reading it raises, because the model computes its own attention."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # Python probes every object for special methods
        self._raise_read(name)

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], *_: Any) -> NoReturn:
        """Raise for every function of PyTorch."""
        cls._raise_read(func.__name__)

    @staticmethod
    def _raise_read(operation: str) -> NoReturn:
        expected = "a model that passes masks and cached keys to attention unread"
        given = f"one that reads them with {operation}, as custom attention does"
        raise KernelError(SUBJECT, expected, given, USE_SUPPORTED)


def _raising(name: str) -> Callable[..., NoReturn]:
    """Return a special method that raises."""

    def special_method(self: Opaque, *_: Any) -> NoReturn:
        self._raise_read(name)

    return special_method


for _name in (
    *("getitem", "setitem", "len", "iter", "contains", "bool", "neg", "invert", "lt", "le", "gt", "ge", "matmul"),
    *(f"{side}{name}" for side in ("", "r", "i") for name in ("add", "sub", "mul", "truediv", "and", "or", "xor")),
):
    setattr(Opaque, f"__{_name}__", _raising(_name))  # Python looks special methods up on the class, past __getattr__


def check_model(model: PreTrainedModel) -> None:
    """Raise unless `generate` supports the model: causal, with a cache, and with attention set to attnmesh."""
    if not isinstance(model, PreTrainedModel) or not model.can_generate() or model.config.is_encoder_decoder:
        fix = "load it with AutoModelForCausalLM"
        raise KernelError("generate", "a causal language model of transformers", type(model).__name__, fix)
    check_layers(model.config)
    check_keys(model.config)
    if not (model.is_backend_compatible() or hasattr(sys.modules[type(model).__module__], "ALL_ATTENTION_FUNCTIONS")):
        given = f"{type(model).__name__} with built-in attention"
        raise KernelError("generate", "a model with selectable attention", given, USE_SUPPORTED)
    if model.training and getattr(model, "is_gradient_checkpointing", False):
        given = "one in training with gradient checkpointing, which drops the cache"
        raise KernelError("generate", "a model that uses its cache", given, "call model.eval()")
    if model.config._attn_implementation != NAME:
        fix = f'call model.set_attn_implementation("{NAME}")'
        raise KernelError("generate", f"attn_implementation {NAME!r}", repr(model.config._attn_implementation), fix)


def check_layers(config: PreTrainedConfig) -> None:
    """Raise unless every layer attends to all earlier tokens or to a sliding window of them."""
    config = config.get_text_config(decoder=True)
    expected = f"a model of layers of {', '.join(SUPPORTED_LAYERS)}"
    layer_types = getattr(config, "layer_types", None) or []
    unsupported = ", ".join(sorted({layer for layer in layer_types if layer not in SUPPORTED_LAYERS}))
    if not layer_types and getattr(config, "attention_chunk_size", None):
        unsupported = "chunks in unknown places"
    if not unsupported and config.model_type in RECURRENT_MODELS:
        unsupported = "recurrent states"
    if unsupported:
        raise KernelError(SUBJECT, expected, f"{config.model_type} with layers of {unsupported}", USE_SUPPORTED)


def check_keys(config: PreTrainedConfig) -> None:
    """Raise unless the layers compute keys that a cache can keep, and the last ones at most share those of others."""
    config = config.get_text_config(decoder=True)
    if not hasattr(config, "num_hidden_layers"):
        expected, given = "a model of one stack of layers", f"{config.model_type} without num_hidden_layers"
        raise KernelError(SUBJECT, expected, given, USE_SUPPORTED)
    modes = _sharing_modes(config)
    if "reuse" in modes[: cached_layers(config)] or (getattr(config, "num_kv_shared_layers", None) and not modes):
        expected = "a model in which only the last layers share keys"
        raise KernelError(SUBJECT, expected, f"{config.model_type} with shared keys", USE_SUPPORTED)


def cached_layers(config: PreTrainedConfig) -> int:
    """Return the number of layers that compute keys. The layers after them read the keys of an earlier layer."""
    config = config.get_text_config(decoder=True)
    count: int = config.num_hidden_layers
    return count - _sharing_modes(config).count("reuse")


def _sharing_modes(config: PreTrainedConfig) -> list[str | None]:
    """Return per layer "reuse" if it reads another layer's keys, as transformers says; empty if no layer does."""
    return getattr(config, "kv_sharing_modes", None) or []


def unwrap(model: Any) -> Any:
    """Return the transformers model inside torch.compile, DDP or PEFT adapters. Prompt-learning adapters raise."""
    if isinstance(model, PreTrainedModel) or not isinstance(model, nn.Module):
        return model
    adapters = getattr(model, "peft_config", None) or {}
    if any(getattr(adapter, "is_prompt_learning", False) for adapter in adapters.values()):
        fix = "use adapters that change weights, such as LoRA"
        raise KernelError("generate", "adapters without virtual tokens", type(model).__name__, fix)
    if adapters:
        base: Any = model.get_base_model  # LoRA layers are inside the base model
        return base()
    inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
    return unwrap(inner) if isinstance(inner, nn.Module) else model


def rope_regime(config: PreTrainedConfig, length: int, grown: int = 0) -> tuple[int, ...]:
    """Return one number per length-dependent rope. Keys computed under different numbers cannot share a cache.

    `length` is the length of the sequence. `grown` is the length that dynamic ropes are scaled to already, see
    `rope_growth`.

    >>> from transformers import LlamaConfig
    >>> dynamic = LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    >>> rope_regime(dynamic, 100, 6000), rope_regime(dynamic, 5000), rope_regime(dynamic, 5000, 6000)
    ((2048,), (5000,), (6000,))
    """
    return tuple(
        (max(length, grown) if length > switch else switch) if rope["rope_type"] == "dynamic" else int(length > switch)
        for rope, switch in _length_dependent_ropes(config)
    )


def rope_growth(model: PreTrainedModel) -> int:
    """Return the longest sequence that the model's dynamic ropes are scaled to. They grow, and seldom shrink."""
    grown = [
        int(value)
        for module in model.modules()
        for name, value in vars(module).items()
        if name.endswith("max_seq_len_cached")
    ]
    return max(grown, default=0)


def check_rope_switch(config: PreTrainedConfig, cached: int, total: int) -> None:
    """Raise if generation crosses the length at which a longrope changes, because cached keys would become invalid."""
    for rope, switch in _length_dependent_ropes(config.get_text_config(decoder=True)):
        if rope["rope_type"] == "longrope" and cached <= switch < total:
            expected = f"tokens on one side of {switch}, where the model's longrope changes"
            fix = f"generate up to {switch} tokens, then call generate again with the output as the prompt"
            raise ShapeError("generate", expected, f"a prompt of {cached + 1} and up to {total} in all", fix)


def _length_dependent_ropes(config: PreTrainedConfig) -> list[tuple[dict[str, Any], int]]:
    """Return each rope that depends on the sequence length, with the length at which it changes."""
    config = config.get_text_config(decoder=True)
    ropes = getattr(config, "rope_parameters", None) or {}
    ropes = [ropes] if "rope_type" in ropes else [rope for rope in ropes.values() if isinstance(rope, dict)]
    longest: int = getattr(config, "max_position_embeddings", 0)
    return [
        (rope, int(rope.get("original_max_position_embeddings") or longest))
        for rope in ropes
        if rope.get("rope_type") in ("dynamic", "longrope")
    ]
