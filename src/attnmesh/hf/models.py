"""Models that attention over a mesh supports: checks of their layers, ropes and wrappers.

Configurations are checked before a model runs. `Opaque` catches the rest: a model with custom attention reads the
masks and cached keys that pass through it, and raises.
"""

import sys
from collections.abc import Callable
from inspect import signature
from math import inf
from typing import Any, NoReturn

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from attnmesh.errors import ArgumentError, KernelError, ShapeError
from attnmesh.hf.family import ATTENDING, LENGTH_DEPENDENT_ROPES, USE_SUPPORTED, LayerKind, family_of
from attnmesh.hf.pins import check_family, check_pins, raise_lost
from attnmesh.hf.transformers_names import PEFT

ATTN_IMPLEMENTATION = "attnmesh"
"""Name of the attention and mask functions in transformers' registries."""

SUBJECT = "attnmesh.hf"
"""First words of errors that a model raises inside its forward pass."""


class Opaque:
    """A value that a model must pass on unread. Reading it raises, because the model computes its own attention."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # Python probes every object for special methods
        self.raise_read(name)

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], *_: Any) -> NoReturn:
        """Raise for every function of PyTorch."""
        cls.raise_read(func.__name__)

    @staticmethod
    def raise_read(operation: str) -> NoReturn:
        """Raise for a model that reads the value by an operation."""
        expected = "a model that passes masks and cached keys to attention unread"
        given = f"one that reads them with {operation}, as custom attention does"
        raise KernelError(SUBJECT, expected, given, USE_SUPPORTED)


for _name in (
    *("getitem", "setitem", "len", "iter", "contains", "bool", "neg", "invert", "lt", "le", "gt", "ge", "matmul"),
    *(f"{side}{name}" for side in ("", "r", "i") for name in ("add", "sub", "mul", "truediv", "and", "or", "xor")),
):
    # Python looks special methods up on the class, past __getattr__.
    setattr(Opaque, f"__{_name}__", lambda self, *_, name=_name: self.raise_read(name))


def check_can_generate(model: PreTrainedModel) -> None:
    """Raise unless `generate` supports the model: causal, with a cache, and with attention set to attnmesh."""
    given = type(model).__name__
    supported = isinstance(model, PreTrainedModel) and model.can_generate() and not model.config.is_encoder_decoder
    if not supported:
        fix = "load it with AutoModelForCausalLM"
        raise KernelError("generate", "a causal language model of transformers", given, fix)
    takes_ids = "inputs" in signature(model.generate).parameters
    if not takes_ids:
        raise KernelError("generate", "a model whose generate begins with token ids", given, USE_SUPPORTED)
    check_keys(model.config)
    kind = model.config.get_text_config(decoder=True).model_type
    if family_of(model.config).hides_states:
        expected = "a model whose cache holds its recurrent states"
        raise KernelError("generate", expected, f"{kind}, which keeps them elsewhere", USE_SUPPORTED)
    module = sys.modules.get(type(model).__module__)
    selectable = (
        model.is_backend_compatible() or hasattr(module, "ALL_ATTENTION_FUNCTIONS") or not attends(model.config)
    )
    if not selectable:
        given = f"{given} with built-in attention"
        raise KernelError("generate", "a model with selectable attention", given, USE_SUPPORTED)
    if model.training and model.is_activation_checkpointing:
        given = "one in training with gradient checkpointing, which drops the cache"
        raise KernelError("generate", "a model that uses its cache", given, "call model.eval()")
    check_implementation("generate", model.config)


def check_can_decode_rows(subject: str, model: PreTrainedModel) -> None:
    """Raise unless one forward pass can decode rows of the model: it generates, and has no cross-attention."""
    check_can_generate(model)
    if cross_layer_indices(model.config):
        expected = "a model without cross-attention over images"
        raise KernelError(subject, expected, type(model).__name__, "call hf.generate for each request")


def check_implementation(subject: str, config: PreTrainedConfig) -> None:
    """Raise unless the model's attention is attnmesh: no other attention can read sharded keys."""
    given = config.get_text_config(decoder=True)._attn_implementation
    if given != ATTN_IMPLEMENTATION:
        expected = f"a model with attn_implementation {ATTN_IMPLEMENTATION!r}"
        fix = f'call model.set_attn_implementation("{ATTN_IMPLEMENTATION}") after importing attnmesh.hf'
        raise KernelError(subject, expected, repr(given), fix)


def check_layers(config: PreTrainedConfig) -> None:
    """Raise unless every layer attends to all earlier tokens, to a sliding window of them or to a chunk.

    Before the configuration is read, the installed transformers must have what the model's family needs of it.
    """
    check_family(config)
    config = config.get_text_config(decoder=True)
    family = family_of(config)
    layer_types = getattr(config, "layer_types", None) or ()
    unsupported = sorted({*layer_types} - {*ATTENDING, *family.layers})
    if not layer_types and getattr(config, "attention_chunk_size", None):
        unsupported.append("chunks in unknown places")
    if getattr(config, "ple_layer_ids", None):
        unsupported.append("embeddings of several tokens")
    if family.refused:
        unsupported = [family.refused]
    if unsupported:
        given = f"{config.model_type} with layers of {', '.join(unsupported)}"
        raise KernelError(SUBJECT, f"a model of layers of {', '.join(ATTENDING)}", given, USE_SUPPORTED)


def layer_types_of(config: PreTrainedConfig) -> list[str]:
    """Return the kind of each layer, as `config.layer_types` has it. Without it, all layers attend alike.

    >>> from transformers import LlamaConfig
    >>> layer_types_of(LlamaConfig(num_hidden_layers=2))
    ['full_attention', 'full_attention']
    """
    config = config.get_text_config(decoder=True)
    default_kind = "sliding_attention" if window_of(config) else "full_attention"
    return list(getattr(config, "layer_types", None) or [default_kind] * getattr(config, "num_hidden_layers", 1))


def layers_of(config: PreTrainedConfig) -> list[LayerKind]:
    """Return what each layer does."""
    family = family_of(config)
    return [family.layer(kind) for kind in layer_types_of(config)]


def window_of(config: PreTrainedConfig | None) -> int | None:
    """Return the tokens of a model's sliding window; None without a window."""
    window: int | None = getattr(config and config.get_text_config(decoder=True), "sliding_window", None)
    return window


def has_windows(config: PreTrainedConfig) -> bool:
    """Return whether layers attend to a sliding window or to chunks."""
    return any(layer.windowed for layer in layers_of(config))


def is_recurrent(config: PreTrainedConfig) -> bool:
    """Return whether the model has recurrent layers that can run on shards."""
    return bool(family_of(config).recurrences)


def one_token_differs(config: PreTrainedConfig) -> bool:
    """Return whether one token is computed by another rule than several: time steps are bounded in one rule alone."""
    lowest, highest = getattr(config.get_text_config(decoder=True), "time_step_limit", None) or (0.0, inf)
    return is_recurrent(config) and (lowest > 0 or highest < inf)


def is_compressed(config: PreTrainedConfig) -> bool:
    """Return whether the model has layers that attend to entries of compressed tokens."""
    return family_of(config).compresses


def attends(config: PreTrainedConfig) -> bool:
    """Return whether the model has layers of attention."""
    return any(layer.attends for layer in layers_of(config))


def key_heads(config: PreTrainedConfig) -> int | None:
    """Return the fewest key heads of a layer of attention; None without such layers, or where none are configured."""
    config = config.get_text_config(decoder=True)
    layers = config.per_layer_config if config.is_heterogeneous else [config]
    names = ("num_key_value_heads", "num_attention_heads")[family_of(config).repeats_keys :]
    layer_heads = [next(filter(None, (getattr(layer, name, None) for name in names)), None) for layer in layers]
    counts = [heads for heads in layer_heads if isinstance(heads, int)]
    return min(counts) if counts and attends(config) else None


def num_mixing_calls(config: PreTrainedConfig) -> int:
    """Return the number of calls that mix tokens in one forward pass. A hybrid layer attends and keeps a state."""
    layers = layers_of(config)
    calls = sum(layer.attends or layer.recurrent for layer in layers) - len(cross_layer_indices(config))
    return calls + _num_conv_states(config) * sum(layer.attends and layer.recurrent for layer in layers)


def cross_layer_indices(config: PreTrainedConfig) -> list[int]:
    """Return the numbers of the layers of cross-attention over images. Text without images skips them."""
    return [*(getattr(config.get_text_config(decoder=True), "cross_attention_layers", None) or ())]


def num_recurrent_layers(config: PreTrainedConfig) -> int:
    """Return the number of layers that keep a state, in a model whose recurrent layers can run on shards."""
    count = sum(layer.recurrent for layer in layers_of(config))
    return count * _num_conv_states(config) if is_recurrent(config) else 0


def _num_conv_states(config: PreTrainedConfig) -> int:
    """Return the convolutions with a state of their own in each layer that keeps states."""
    return getattr(config.get_text_config(decoder=True), "number_of_conv_states", 1)


def check_keys(config: PreTrainedConfig) -> None:
    """Raise unless a cache can keep the keys of all layers. Only the last layers may share keys of earlier ones."""
    check_layers(config)
    config = config.get_text_config(decoder=True)
    stacked = hasattr(config, "num_hidden_layers")
    if not stacked:
        given = f"{config.model_type} without num_hidden_layers"
        raise KernelError(SUBJECT, "a model of one stack of layers", given, USE_SUPPORTED)
    modes = _sharing_modes(config)
    unknown = bool(getattr(config, "num_kv_shared_layers", None)) and not modes
    fits = "reuse" not in modes[: num_cached_layers(config)] and not unknown
    if not fits:
        expected = "a model in which only the last layers share keys"
        raise KernelError(SUBJECT, expected, f"{config.model_type} with shared keys", USE_SUPPORTED)


def indexed_layer_indices(config: PreTrainedConfig) -> list[int]:
    """Return the numbers of the layers with an indexer of their own. Others select what an earlier layer selected."""
    config = config.get_text_config(decoder=True)
    layers = layers_of(config)
    types = getattr(config, "indexer_types", None) or ["full"] * len(layers)
    return [index for index, layer in enumerate(layers) if layer.indexed and types[index] == "full"]


def num_cached_layers(config: PreTrainedConfig) -> int:
    """Return the number of layers that compute keys. The layers after them read the keys of an earlier layer."""
    config = config.get_text_config(decoder=True)
    count: int = config.num_hidden_layers
    return count - _sharing_modes(config).count("reuse")


def _sharing_modes(config: PreTrainedConfig) -> list[str | None]:
    """Return per layer "reuse" if it reads another layer's keys, as transformers says; empty if no layer does."""
    return getattr(config, "kv_sharing_modes", None) or []


def unwrap(model: Any, subject: str = "generate") -> Any:
    """Return the transformers model inside torch.compile, DDP or PEFT. Adapters that do not fit shards raise."""
    if isinstance(model, PreTrainedModel) or not isinstance(model, nn.Module):
        return model
    check_adapters(subject, model)
    if getattr(model, "peft_config", None):
        PEFT.check()
        base: Any = model.get_base_model  # LoRA layers are inside the base model
        return base()
    inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
    return unwrap(inner, subject) if isinstance(inner, nn.Module) else model


def check_adapters(subject: str, model: nn.Module) -> None:
    """Raise if a model of PEFT has adapters that add tokens, or that look for some in the sequence they are given."""
    adapters: Any = getattr(model, "peft_config", None) or {}
    for adapter in adapters.values():
        name = type(adapter).__name__
        fix = "use adapters that change weights, such as LoRA"
        if getattr(adapter, "is_prompt_learning", False):
            raise KernelError(subject, "adapters without virtual tokens", name, fix)
        if getattr(adapter, "peft_type", None) == "SHADOW":
            raise KernelError(subject, "adapters without attention of their own", name, fix)
        if ids := getattr(adapter, "alora_invocation_tokens", None):
            given = f"{name}(alora_invocation_tokens={ids})"
            fix = "leave alora_invocation_tokens out: LoRA then adapts all tokens"
            raise KernelError(subject, "adapters of all tokens", given, fix)


def vocabulary_size(model: PreTrainedModel) -> int:
    """Return how many tokens have an embedding."""
    embeddings = model.get_input_embeddings()
    return int(getattr(embeddings, "num_embeddings", model.config.get_text_config(decoder=True).vocab_size))


def check_tokens(subject: str, ids: Tensor, model: PreTrainedModel) -> None:
    """Raise unless the model has an embedding for each token, so that no rank alone fails in a look-up."""
    last_known = vocabulary_size(model) - 1
    first, last = (int(end) for end in ids.aminmax())
    if first < 0 or last > last_known:
        expected, fix = f"tokens from 0 to {last_known}, the model's vocabulary", "use the tokenizer of this model"
        raise ArgumentError(subject, expected, str(first if first < 0 else last), fix)


def forget_images(model: nn.Module) -> None:
    """Drop the shift of positions that a vision-language model keeps from its last image.

    The shift would move the tokens of a text that follows a filled cache: the model takes them for a continuation.
    """
    for module in model.modules():
        if "rope_deltas" in vars(module):
            vars(module)["rope_deltas"] = None


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


GROWN = "max_seq_len_cached"
"""Last part of the names of fields with the length that a dynamic rope is scaled to."""


def rope_growth(model: PreTrainedModel) -> int:
    """Return the longest sequence that the model's dynamic ropes are scaled to. Ropes grow, and seldom shrink."""
    fields = (field for module in model.modules() for field in vars(module).items())
    lengths = [int(value) for name, value in fields if name.endswith(GROWN)]
    config = model.config.get_text_config(decoder=True)
    if not lengths and any(rope["rope_type"] == "dynamic" for rope, _ in _length_dependent_ropes(config)):
        raise_lost(config.model_type, f"{GROWN} of dynamic ropes")
    return max(lengths, default=0)


def rope_switches(config: PreTrainedConfig) -> list[int]:
    """Return the lengths at which ropes change: an answer of `Engine` stays on its prompt's side."""
    return [switch for _, switch in _length_dependent_ropes(config)]


def check_rope_switch(config: PreTrainedConfig, cached: int, total: int) -> None:
    """Raise if generation crosses the length at which a longrope changes, because cached keys would become invalid."""
    for rope, switch in _length_dependent_ropes(config.get_text_config(decoder=True)):
        crosses = rope["rope_type"] == "longrope" and cached <= switch < total
        if crosses:
            expected = f"tokens on one side of {switch}, where the model's longrope changes"
            fix = f"generate up to {switch} tokens, then call generate again with the output as the prompt"
            raise ShapeError("generate", expected, f"a prompt of {cached + 1} and up to {total} in all", fix)


def _length_dependent_ropes(config: PreTrainedConfig) -> list[tuple[dict[str, Any], int]]:
    """Return each rope that depends on the sequence length, with the length at which it changes."""
    config = config.get_text_config(decoder=True)
    ropes = getattr(config, "rope_parameters", None) or {}
    ropes = [ropes] if "rope_type" in ropes else [rope for rope in ropes.values() if isinstance(rope, dict)]
    ropes = [rope for rope in ropes if rope.get("rope_type") in ("dynamic", "longrope")]
    if ropes:
        check_pins(LENGTH_DEPENDENT_ROPES, config.model_type)
    longest: int = getattr(config, "max_position_embeddings", 0)
    return [(rope, int(rope.get("original_max_position_embeddings") or longest)) for rope in ropes]
