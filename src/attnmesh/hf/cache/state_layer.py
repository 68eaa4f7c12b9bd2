"""Layers of a `ShardedCache` that keep a recurrent state, whole on every rank: it does not grow with the tokens."""

from collections.abc import Callable, Sequence
from functools import partial as partial_of
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from attnmesh.errors import KernelError
from attnmesh.hf.cache.compressed_layer import CompressedLayer
from attnmesh.hf.cache.indexed_layer import IndexedLayer, PooledLayer
from attnmesh.hf.cache.layer import ShardedLayer
from attnmesh.hf.cache.layer_protocols import LayersCache
from attnmesh.hf.family import family_of
from attnmesh.hf.images.cross import CrossLayer, SomeKeys
from attnmesh.hf.latent_states import latent_widths
from attnmesh.hf.models import cross_layer_indices, indexed_layer_indices, layer_types_of, num_cached_layers
from attnmesh.hf.transformers_names import DummyLayer, LinearAttentionLayer


class StateLayer(LinearAttentionLayer):  # type: ignore[misc]
    """States of one recurrent layer: the last tokens of its convolution, and the state of its recurrence."""

    def crop(self, tokens_to_remove: int) -> None:
        """Do nothing for 0 tokens, and raise otherwise: a state cannot go back."""
        if tokens_to_remove != 0:
            expected, given = "0 tokens to remove from recurrent states", f"{-tokens_to_remove} tokens to remove"
            raise KernelError("ShardedCache crop", expected, given, "make a new cache, or crop all tokens")

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The states by name; none before the first tokens."""
        convolutions = ((f"conv.{i}", x) for i, x in self.conv_states.items() if self.has_previous_state[i])
        states = ((f"state.{i}", x) for i, x in self.recurrent_states.items() if self.has_previous_state[i])
        return {name: x for name, x in (*convolutions, *states) if x is not None}

    def keeps(self, names: Sequence[str]) -> bool:
        """Return whether these are names of its states, once it has seen tokens."""
        known = {f"{kind}.{i}" for kind in ("conv", "state") for i in range(self.number_of_states)}
        return bool(names) and known.issuperset(names)

    def set_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Replace the states by those of `tensors`."""
        StateLayer.reset(self)
        for name, x in tensors.items():
            kind, index = name.split(".")
            if kind == "conv":
                self.update_conv_state(x, int(index), conv_kernel_size=x.shape[-1])
            else:
                self.update_recurrent_state(x, int(index))

    def actions_to_reorder(self, index: Tensor) -> list[Callable[[], Any]]:
        """Return actions that replace sequence b by sequence `index[b]`. The batch may grow or shrink."""
        actions = list[Callable[[], Any]]()
        for name in ("conv_states", "recurrent_states"):
            states = getattr(self, name).items()
            reordered = {i: None if x is None else x.index_select(0, index.to(x.device)) for i, x in states}
            actions.append(partial_of(setattr, self, name, reordered))
        return actions

    def reset(self) -> None:
        """Drop the states. The next ones may be of another batch."""
        LinearAttentionLayer.__init__(self, self.number_of_states)


class HybridLayer(StateLayer, ShardedLayer):
    """Keys and values, and the states of a recurrent layer beside them."""

    is_compileable = ShardedLayer.is_compileable

    def __init__(self, cache: LayersCache) -> None:
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

    def actions_to_reorder(self, index: Tensor) -> list[Callable[[], Any]]:
        """Return actions that replace sequence b by sequence `index[b]`. The batch may grow or shrink."""
        return [*ShardedLayer.actions_to_reorder(self, index), *StateLayer.actions_to_reorder(self, index)]


def make_layers(config: PreTrainedConfig, cache: LayersCache) -> list[Any]:
    """Return an empty layer of the cache for each layer of the model that keeps something."""
    indexed = indexed_layer_indices(config)
    crossed = cross_layer_indices(config)
    layers = [
        CrossLayer() if index in crossed else _make_layer(kind, cache, indexed=index in indexed)
        for index, kind in enumerate(layer_types_of(config)[: num_cached_layers(config)])
    ]
    for index, layer in enumerate(layers):
        if isinstance(layer, ShardedLayer):
            layer.latent_widths = latent_widths(config, index)
            if crossed:
                layer.keys = layer.values = SomeKeys()
    return layers


def _make_layer(kind: str, cache: LayersCache, *, indexed: bool) -> Any:
    """Return an empty layer of a kind, which may have an indexer of its own."""
    layer = family_of(cache.config).layer(kind)
    if layer.recurrent:
        return HybridLayer(cache) if layer.attends else StateLayer()
    if not layer.attends:
        return DummyLayer()
    if indexed:
        return PooledLayer(cache) if layer.pooled else IndexedLayer(cache)
    return CompressedLayer(cache, kind, layer.entries) if layer.entries else ShardedLayer(cache)
