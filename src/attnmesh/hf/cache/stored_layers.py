"""Layers of a `ShardedCache` by what they keep: keys and values in shares, recurrent states whole, keys of images."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial as partial_of
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import Cache, PreTrainedConfig

from attnmesh.cache.cache import KVCache
from attnmesh.cache.cache_config import CacheConfig
from attnmesh.errors import KernelError, StoreError
from attnmesh.guard.agreement import CallGuard
from attnmesh.hf.cache.history import CacheHistory
from attnmesh.hf.cache.layer import ShardedLayer, TailLayer, growth_capacity
from attnmesh.hf.cache.settings import OptionsInUse
from attnmesh.hf.cache.state_layer import StateLayer
from attnmesh.hf.images.cross import CrossLayer
from attnmesh.hf.models import has_windows
from attnmesh.mesh.axes import RankMesh
from attnmesh.runtime.unbroken import unbroken


class StoredLayers(OptionsInUse, Cache):  # type: ignore[misc]
    """Layers of a `ShardedCache` by what they keep, with the ids of their tokens."""

    config: PreTrainedConfig
    mesh: DeviceMesh | None
    history: CacheHistory

    @property
    def tokens(self) -> Tensor | None:
        """Ids of the cached tokens, with -1 for padding and -2 - id for image tokens.

        After an interrupted generation, the ids to continue from. None if the tokens were not cached by
        `attnmesh.hf.generate`. A folder has them, too.
        """
        return self.history.ids

    @tokens.setter
    def tokens(self, ids: Tensor | None) -> None:
        previous, self.history.ids = self.history.ids, ids
        written = previous[:, :0] if ids is None and previous is not None else ids
        if self.folder is not None and written is not None:
            try:
                self.folder.write_ids(written)
            except StoreError as error:
                device = next((kv_cache.device for kv_cache in self.kv_caches), torch.device("cpu"))
                guard = CallGuard(RankMesh.of(self.mesh), device, self.checked)
                guard.raise_uncompared("ShardedCache tokens", error)

    @property
    def attention_layers(self) -> list[ShardedLayer]:
        """Layers that hold keys and values."""
        return [layer for layer in self.layers if isinstance(layer, ShardedLayer)]

    @property
    def kv_caches(self) -> list[KVCache]:
        """The caches of all layers that have been made."""
        return [kv_cache for layer in self.attention_layers for kv_cache in layer.kv_caches]

    @property
    def num_kv_caches(self) -> int:
        """The number of the caches of all layers, made or not."""
        return len(self.tokens_per_key)

    @property
    def irreversible_layers(self) -> list[Any]:
        """Layers whose states cannot go back to fewer tokens."""
        return [layer for _, layer in self.layers_with_tensors]

    @property
    def states(self) -> dict[str, Tensor]:
        """Tensors that layers keep of recurrences and of the last tokens, by number of the layer and name."""
        return {
            f"{number}.{name}": x for number, layer in self.layers_with_tensors for name, x in layer.tensors.items()
        }

    @property
    def layers_with_tensors(self) -> list[tuple[int, Any]]:
        """Layers that keep tensors of recurrences or of the last tokens, with their numbers."""
        return [(number, x) for number, x in enumerate(self.layers) if isinstance(x, (StateLayer, TailLayer))]

    @property
    def cross_layers(self) -> list[CrossLayer]:
        """Layers that hold keys and values of images."""
        return [layer for layer in self.layers if isinstance(layer, CrossLayer)]

    @property
    def tokens_per_key(self) -> list[int]:
        """Tokens that a key of each cache stands for."""
        return [count for layer in self.attention_layers for count in layer.tokens_per_key]

    def _reorder_layers(self, index: Tensor) -> None:
        """Replace sequence b by sequence `index[b]` in all layers and ids, or in none, after the caches' `check_order`.

        If a layer finds no memory, the layers stay marked as mixed.
        """
        ids = None if self.tokens is None else self.tokens[index.to(self.tokens.device)]
        mixed, reordered = replace(self.history, is_mixed=True), replace(self.history, ids=ids)
        layers = [layer for layer in self.layers if isinstance(layer, (ShardedLayer, StateLayer, CrossLayer))]
        actions = [partial_of(layer.actions_to_reorder, index) for layer in layers]
        unbroken(
            [partial_of(setattr, self, "history", mixed), *actions, partial_of(setattr, self, "history", reordered)]
        )

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        """Replace what layers keep of recurrences and of the last tokens by tensors with the names of `states`."""
        for number, layer in self.layers_with_tensors:
            layer_states = {name: x for name, x in states.items() if name.startswith(f"{number}.")}
            layer.set_tensors({name.removeprefix(f"{number}."): x for name, x in layer_states.items()})

    def make_kv_caches(self, layers: Sequence[CacheConfig], tokens: int, device: torch.device) -> list[KVCache]:
        """Make the empty caches of all layers, with space for `tokens` tokens, to be filled. Every rank calls it."""
        capacity = growth_capacity(tokens) if self.capacity is None else self.capacity
        options = {**self.kv_cache_options, "capacity": capacity, "block": self.block, "device": device}
        kv_caches = [KVCache(self.mesh, **{**kv_config.arguments(), **options}) for kv_config in layers]
        if kv_caches:
            self.set_kv_caches(kv_caches)
        return kv_caches

    @property
    def kv_cache_options(self) -> dict[str, Any]:
        """Options of the `KVCache` of each layer."""
        return {"capacity": self.capacity, "checked": self.checked, "copies": self.copies, "shares": self.shares}

    def set_kv_caches(self, kv_caches: Sequence[KVCache]) -> None:
        """Set the `KVCache` of each layer. Raise if they are stored in another way than the cache's."""
        storage, in_windows = self.storage, self.window_storage
        storages, allowed = {kv_cache.config.storage for kv_cache in kv_caches} - {None}, {storage, in_windows} - {None}
        fits = storages <= allowed and (bool(storages) or storage is None or has_windows(self.config))
        if not fits:
            expected = f"keys stored with {storage=}, as the cache's"
            given = f"storage={next(iter(storages), None)!r}"
            raise KernelError("ShardedCache", expected, given, f"make the cache with {given}")
        remaining = iter(kv_caches)
        for layer in self.attention_layers:
            layer.set_kv_caches([next(remaining) for _ in layer.tokens_per_key])
        self.settings = replace(self.settings, block=kv_caches[0].config.block)
