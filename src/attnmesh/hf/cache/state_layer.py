"""Layers of a `ShardedCache` that keep a recurrent state, whole on every rank: it does not grow with the tokens."""

from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from attnmesh.errors import KernelError, require
from attnmesh.hf.cache.compressed_layer import CompressedLayer
from attnmesh.hf.cache.indexed_layer import IndexedLayer, PooledLayer
from attnmesh.hf.cache.layer import ShardedLayer
from attnmesh.hf.images.cross import CrossLayer, SomeKeys
from attnmesh.hf.latent_states import latent_widths
from attnmesh.hf.models import (
    COMPRESSED_LAYERS,
    HYBRID_LAYERS,
    OTHER_LAYERS,
    RECURRENT_LAYERS,
    cached_layers,
    cross_layers,
    indexed_layers,
    is_compressed,
    is_recurrent,
    layer_kinds,
)
from attnmesh.hf.transformers_names import DummyLayer, LinearAttentionLayer

CROSS = "cross_attention"
"""Kind of layers with the keys of images."""

INDEXED = "indexed"
"""Kind of layers with the keys of an indexer."""


class StateLayer(LinearAttentionLayer):  # type: ignore[misc]
    """States of one recurrent layer: the last tokens of its convolution, and the state of its recurrence."""

    def crop(self, tokens_to_remove: int) -> None:
        """Do nothing for 0 tokens, and raise otherwise: a state cannot go back."""
        given, fix = f"{-tokens_to_remove} tokens to remove", "make a new cache, or crop all tokens"
        expected = "0 tokens to remove from recurrent states"
        require(tokens_to_remove == 0, KernelError, "ShardedCache crop", expected, given, fix)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The states by name; none before the first tokens."""
        held = ((f"conv.{i}", x) for i, x in self.conv_states.items() if self.has_previous_state[i])
        states = ((f"state.{i}", x) for i, x in self.recurrent_states.items() if self.has_previous_state[i])
        return {name: x for name, x in (*held, *states) if x is not None}

    def set_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Replace the states by those of `tensors`."""
        StateLayer.reset(self)
        for name, x in tensors.items():
            kind, index = name.split(".")
            if kind == "conv":
                self.update_conv_state(x, int(index), conv_kernel_size=x.shape[-1])
            else:
                self.update_recurrent_state(x, int(index))

    def reset(self) -> None:
        """Drop the states. The next ones may be of another batch."""
        LinearAttentionLayer.__init__(self, self.number_of_states)


class HybridLayer(StateLayer, ShardedLayer):
    """Keys and values, and the states of a recurrent layer beside them."""

    is_compileable = ShardedLayer.is_compileable

    def __init__(self, cache: Any) -> None:
        ShardedLayer.__init__(self, cache)
        config = cache.config.get_text_config(decoder=True)
        LinearAttentionLayer.__init__(self, getattr(config, "number_of_conv_states", 1))

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Allocate states. Keys and values are allocated by `reserve`."""
        if kwargs:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def reset(self) -> None:
        """Drop all tokens and states."""
        ShardedLayer.reset(self)
        StateLayer.reset(self)

    crop = ShardedLayer.crop  # of no tokens, or of all

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace sequence b by sequence `beam_idx[b]`. The batch may grow or shrink."""
        ShardedLayer.reorder_cache(self, beam_idx)
        LinearAttentionLayer.reorder_cache(self, beam_idx)


def make_layers(config: PreTrainedConfig, cache: Any) -> list[Any]:
    """Return an empty layer of the cache for each layer of the model that keeps something."""
    indexed, kinds = indexed_layers(config), layer_kinds(config)
    if not indexed and not is_recurrent(config) and not is_compressed(config):
        crossed = cross_layers(config)
        kinds = [CROSS if n in crossed else "full_attention" for n in range(cached_layers(config))]
    layers = [_make_layer(kind if n not in indexed else INDEXED, cache) for n, kind in enumerate(kinds)]
    for number, layer in enumerate(layers):
        if isinstance(layer, ShardedLayer):
            layer.latent_widths = latent_widths(config, number)
            if cross_layers(config):
                layer.keys = layer.values = SomeKeys()
    return layers


def _make_layer(kind: str, cache: Any) -> Any:
    if kind == CROSS:
        return CrossLayer()
    if kind in OTHER_LAYERS:
        return DummyLayer()
    if kind == INDEXED:
        return PooledLayer(cache) if is_recurrent(cache.config) else IndexedLayer(cache)
    if kind in COMPRESSED_LAYERS:
        return CompressedLayer(cache, cache.config, kind)
    if kind not in RECURRENT_LAYERS:
        return ShardedLayer(cache)
    return HybridLayer(cache) if kind in HYBRID_LAYERS else StateLayer()
