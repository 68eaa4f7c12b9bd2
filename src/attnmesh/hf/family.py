"""Records of model families: what of transformers each needs, and what its layers do beside plain attention.

A file of `families` has `FAMILIES`: records, one for each model type of a family. `plain.json` has the types that need
fields of their configuration, and nothing else. What is run for a family, and what is refused, is read from its record:
no code outside of `families` asks for a family by its name.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from attnmesh.core.selection import Selection
from attnmesh.planner.selected import Selected

FAMILIES_PACKAGE = "attnmesh.hf.families"
"""Package whose files have the records."""

MODELS, CONFIGURATION, MODELING = "transformers.models.", ".configuration_", ".modeling_"
"""Parts of the names of transformers' modules: of all models, of a model's configuration, and of a model's code."""

USE_SUPPORTED = "use a family like Llama, Qwen, Mistral, Gemma 3 or gpt-oss"
"""Fix in errors about models that are not supported."""

ATTENTION_FIELDS = "layer_types max_position_embeddings num_attention_heads num_hidden_layers num_key_value_heads"
"""Fields of attention, which the configurations of many types have."""

EXPERT_FIELDS = "moe_intermediate_size num_experts num_experts_per_tok output_router_logits"
"""Fields of experts, which the configurations of many types have."""

LATENT_FIELDS = (
    f"{ATTENTION_FIELDS} head_dim intermediate_size kv_lora_rank moe_intermediate_size "
    "num_experts_per_tok num_local_experts output_router_logits qk_rope_head_dim"
)
"""Fields of attention with latents, and of experts, which the configurations of several types have."""


@dataclass(frozen=True)
class LayerKind:
    """Work and memory of the layers of a kind, where `config.layer_types` has its name."""

    attends: bool = True
    windowed: bool = False
    """True if the layers keep the keys of a window or chunk."""
    recurrent: bool = False
    """True if the layers keep a state."""
    indexed: bool = False
    """True if an indexer selects the keys of each query."""
    pooled: bool = False
    """True if the keys of the layers' indexers are means of blocks."""
    entries: Mapping[str, str] = field(default_factory=dict)
    """Names of the entries that stand for compressed tokens, and the `values=` of the cache of each."""


ATTENDING = {
    "full_attention": LayerKind(),
    "sliding_attention": LayerKind(windowed=True),
    "chunked_attention": LayerKind(windowed=True),
}
"""Kinds of layers that every family may have."""

RECURRENT = {
    "linear_attention": LayerKind(attends=False, recurrent=True),
    "conv": LayerKind(attends=False, recurrent=True),
    "hybrid": LayerKind(recurrent=True),
    "hybrid_sliding": LayerKind(windowed=True, recurrent=True),
    "mlp": LayerKind(attends=False),
    "moe": LayerKind(attends=False),
}
"""Kinds of layers in families with recurrent ones. The last two mix no tokens."""

INDEXED = {"indexed_attention": LayerKind(indexed=True)}
"""Kinds of layers in families with indexers."""


PLAIN_LAYER = LayerKind()
"""Kind that layers of an unknown kind count as."""

KNOWN: Mapping[str, LayerKind] = {**ATTENDING, **RECURRENT, **INDEXED}
"""Kinds of layers that several families have."""


class Pins(NamedTuple):
    """Parts of a module of transformers that several families need."""

    name: str
    module: str
    names: str = ""
    """Names that the installed release must have, as `module:attribute`, separated by spaces."""
    sources: Mapping[str, str] = {}
    """Digests of the sources that attnmesh follows, by name of the function."""


RECURRENT_STATES = Pins(
    "recurrent_states",
    module="transformers.cache_utils",
    names=(
        "transformers:Cache.get_conv_state transformers:Cache.get_recurrent_state transformers:Cache.update_conv_state "
        "transformers:Cache.update_recurrent_state transformers.cache_utils:LinearAttentionLayer"
    ),
    sources={
        "LinearAttentionLayer.lazy_initialization": "fbf2962d1e8c",
        "LinearAttentionLayer.update_conv_state": "0f92f2c35a59",
        "LinearAttentionLayer.update_recurrent_state": "90b53629cfe7",
    },
)
"""Names that a cache of recurrent states needs."""

LAYERS_WITHOUT_CACHE = Pins(
    "layers_without_cache", module="transformers.cache_utils", names="transformers.cache_utils:DummyLayer"
)
"""Names that layers which mix no tokens need."""

LENGTH_DEPENDENT_ROPES = Pins(
    "length_dependent_ropes",
    module="transformers.modeling_rope_utils",
    sources={"dynamic_rope_update": "237c3e4cff31"},
)
"""Names that a model with a rope that depends on the length needs."""


@dataclass(frozen=True, eq=False)
class Recurrence:
    """Parts that a class of recurrent layers must have to run on shards, where they are replaced."""

    functions: Mapping[str, Any] = field(default_factory=dict)
    """Functions that the layer's `forward` calls, each with its replacement: a convolution, a `Rule`, or None.

    None is for a function that joins a convolution and a rule. The function then returns None, as without its kernel.
    """
    unchanged: tuple[str, ...] = ()
    """Further functions that `forward` may call as they are: none of them mixes the tokens of a shard."""
    reads: tuple[str, ...] = ()
    """Attributes that the layer's `forward` reads."""
    convolution: str | None = None
    """Name of the layer's causal `nn.Conv1d`, if `forward` calls this module instead of a function."""
    outputs: int = 1
    """Number of outputs with one value per token. They come first."""
    forward: Callable[..., Any] | None = None
    """Replacement of the layer's `forward`, if its recurrence is no function."""
    states: type | None = None
    """Stand-in for the cache in a prefill; None for `PrefillStates`."""
    base: type | None = None
    """First base of the layer's subclass, if the layer is a part of another recurrent layer."""


class SubclassedModule(NamedTuple):
    """A class of transformers that runs as a subclass, with its keys in shards."""

    base: type
    """First base of the subclass."""
    arguments: tuple[str, ...]
    """Arguments of the class's `forward`."""
    reads: tuple[str, ...]
    """Names that the class's `forward` reads."""
    is_alone: bool = False
    """True if a rank calls the class for its own keys alone: `share_weights` leaves layers with the class out."""


@dataclass(frozen=True, eq=False)
class Family:
    """A model type of transformers: what it needs, and what its layers do beside plain attention."""

    type: str
    fields: str = ""
    """Fields that are read with a default, and that the family's configuration has, separated by spaces."""
    stores: Mapping[str, str] = field(default_factory=dict)
    """Attributes that classes of the family's code set on their instances."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Digests of the sources of the family's functions that are written again here, or that run in parts."""
    uses: tuple[Pins, ...] = ()
    """Names that the family needs beside its own code."""

    layers: Mapping[str, LayerKind] = field(default_factory=dict)
    """Kinds of layers that the family may have beside `ATTENDING`."""
    refused: str = ""
    """Part of the family's layers that is not supported, where `config.layer_types` does not say so."""
    logits_loss: str = ""
    """Attribute of the model with the weight of a mean over logits, which it adds to the loss of its labels."""
    repeats_keys: bool = False
    """True if the family repeats its key heads before attention."""
    window_prefix: str = ""
    """Beginning of the names of heads and columns of layers with windows, in a configuration that has both kinds."""
    prefix_types: bool = False
    """True if tokens of type 0, text too, see each other both ways. In other families type 0 says nothing of text."""
    counts_tokens: Callable[[Any], bool] = lambda _config: False
    """Return whether a model of a configuration counts cached tokens itself. Then rows of a step have one length."""

    recurrences: Mapping[str, Recurrence] = field(default_factory=dict)
    """Classes of the family's recurrent layers, by name."""
    begins_at_zero: bool = False
    """True if the rule of several tokens always begins with a state of zero."""
    hides_states: bool = False
    """True if recurrent states are in the family's own cache or layers, not in a `ShardedCache`: it can only train."""

    subclassed: Mapping[str, SubclassedModule] = field(default_factory=dict)
    """Other classes of the family that run as subclasses on a mesh, by name: indexers and compressors."""
    selection_argument: str = "indices"
    """Argument of attention with what the indexer of a layer has selected."""
    read_selection: Callable[[Any, Any, Any], Selection] = lambda _layer, indices, _mask: Selection(indices[:, None])
    """Return what queries select, from the layer, the value of `selection_argument` and the layer's `RecognisedMask`.

    By default the value has tokens, which are selected for all heads.
    """
    planned_selection: Callable[[Any, Mapping[str, int], int], Selected] | None = None
    """Return the planner's record of the indexers, from a configuration, counts of layers and the key heads."""

    temperature: Callable[[Any, Any], Tensor | None] | None = None
    """Return a factor for each query on a shard, from the layer and its `ShardedSequence`; None for 1.

    The layer scales its queries by a temperature of their positions, which it counts as if they were consecutive. The
    factor is the temperature at the real position, divided by the layer's.
    """
    adds_bias: Callable[[Any], bool] | None = None
    """Return whether a layer adds a bias by distance to its logits. None if no layer of the family does."""
    near_bias: Callable[[Any, Tensor | None, Any], Tensor | None] | None = None
    """Return the bias by distance of each query, from the layer, the bias that it passes and its `ShardedSequence`."""
    prepare: Callable[[Any], None] | None = None
    """Prepare further modules of a model with recurrent layers for shards."""
    restore: Callable[[Any], None] | None = None
    """Undo what `prepare` did to a module."""

    @property
    def modeling_module(self) -> str:
        """The module of transformers with the family's code."""
        name = self.type.removesuffix("_text")
        return f"{MODELS}{name}{MODELING}{name}"

    @property
    def compresses(self) -> bool:
        """True if some layers attend to entries of compressed tokens."""
        return any(layer.entries for layer in self.layers.values())

    def layer(self, kind: str) -> LayerKind:
        """Return what the layers of a kind do, also of a kind that the family does not list."""
        return self.layers.get(kind) or KNOWN.get(kind) or PLAIN_LAYER


@cache
def families() -> Mapping[str, Family]:
    """Return the record of each model type that has one."""
    room = import_module(FAMILIES_PACKAGE)
    plain = json.loads(Path(str(room.__file__)).with_name("plain.json").read_text(encoding="utf-8"))
    records = {kind: Family(kind, **entry) for kind, entry in plain.items()}
    for info in iter_modules(room.__path__):
        module = import_module(f"{FAMILIES_PACKAGE}.{info.name}")
        records |= {family.type: family for family in getattr(module, "FAMILIES", ())}
    return records


@cache
def recurrences() -> Mapping[str, Recurrence]:
    """Return the known classes of recurrent layers, by name."""
    return {name: kind for family in families().values() for name, kind in family.recurrences.items()}


@cache
def known_subclassed() -> Mapping[str, SubclassedModule]:
    """Return the known classes that run as subclasses on a mesh, by name."""
    return {name: record for family in families().values() for name, record in family.subclassed.items()}


@cache
def prepared_code() -> frozenset[str]:
    """Return modules of transformers with layers or indexers that are changed before they run on shards."""
    return frozenset(family.modeling_module for family in families().values() if family.layers)


def family_of(config: Any) -> Family:
    """Return the family of a model, or of its text model.

    >>> from transformers import LlamaConfig, MambaConfig
    >>> family_of(LlamaConfig()).recurrences, [*family_of(MambaConfig()).recurrences]
    ({}, ['MambaMixer'])
    """
    text: Any = type(config.get_text_config(decoder=True))
    return family_of_class(text)


class _FamiliesByName:
    """Families of the layers that graphs have asked for, as attributes.

    A graph can call functions of what it reads here. It cannot call those of a value that a constant function returns,
    and it sees a dictionary as that was when it first looked.
    """


def family_of_layer(layer: Any) -> Family:
    """Return the family of a layer's configuration, which is that of a text model."""
    config: Any = type(getattr(layer, "config", None))
    found: Family = getattr(_FamiliesByName, _family_name(config)) if is_compiling() else family_of_class(config)
    return found


@cache
def family_of_class(config: type) -> Family:
    """Return the family of a class of configurations, or of the first class of transformers that it derives from."""
    model_type = getattr(config, "model_type", "")
    stock: Any = next((base for base in config.__mro__ if base.__module__.startswith(MODELS)), None)
    records = families()
    return records.get(model_type) or records.get(getattr(stock, "model_type", "")) or _unknown(model_type)


def has_entries(layer: Any) -> bool:
    """Return whether a layer attends to entries of compressed tokens."""
    is_compressed: bool = _has_entries(type(getattr(layer, "config", None)), getattr(layer, "layer_type", ""))
    return is_compressed


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator] # a graph cannot look families up
def _family_name(config: type) -> str:
    """Return the attribute of `_FamiliesByName` that has the family of a class, set now."""
    family = family_of_class(config)
    name = f"family_{family.type}".replace(".", "_")
    setattr(_FamiliesByName, name, family)
    return name


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_entries(config: Any, kind: str) -> bool:
    return bool(family_of_class(config).layer(kind).entries)


def _unknown(kind: str) -> Family:
    """Return a record for a type that has none. Its layers may be copies, so functions of all families are tried."""
    scaling = [family.temperature for family in families().values() if family.temperature is not None]

    def temperature(layer: Any, sequence: Any) -> Tensor | None:
        scales = (temperature_of(layer, sequence) for temperature_of in scaling)
        return next((scale for scale in scales if scale is not None), None)

    def counts_tokens(config: Any) -> bool:
        return any(family.counts_tokens(config) for family in families().values())

    return Family(kind, temperature=temperature, counts_tokens=counts_tokens)
