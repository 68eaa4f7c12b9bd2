"""Layers of a cache that are saved in a folder: keys and values in shares, recurrent states whole."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import Cache, PreTrainedConfig

from attnmesh.cache.cache import KVCache
from attnmesh.cache.cache_config import CacheConfig
from attnmesh.cache.saved_cache import LayersToLoad, Saving
from attnmesh.errors import KernelError, ShapeError, StoreError
from attnmesh.guard.agreement import Agreement, CallGuard
from attnmesh.hf.cache.history import CacheHistory
from attnmesh.hf.cache.layer import ShardedLayer, TailLayer, growth_capacity
from attnmesh.hf.cache.settings import CacheSettings, settled_option
from attnmesh.hf.cache.state_layer import StateLayer
from attnmesh.hf.images.cross import CrossLayer
from attnmesh.hf.models import has_windows
from attnmesh.mesh.axes import RankMesh
from attnmesh.store.checkpoint import load_layers
from attnmesh.store.checkpoint_writer import save_layers
from attnmesh.store.tensor_file import check_extra_tensors

STATES = "recurrent."
"""First part of the names of recurrent states in a folder."""


class StoredLayers(Cache):  # type: ignore[misc]
    """Layers of a `ShardedCache` with the ids of their tokens, and how both go to a folder and back."""

    config: PreTrainedConfig
    mesh: DeviceMesh | None
    settings: CacheSettings
    """Options in use. Each is an attribute of the cache too, which cannot be set."""
    history: CacheHistory

    @property
    def tokens(self) -> Tensor | None:
        """Ids of the cached tokens, with -1 for padding and -2 - id for image tokens.

        After an interrupted generation, the ids to continue from. None if the tokens were not cached by
        `attnmesh.hf.generate`. A folder has them, too.
        """
        return self.history.tokens

    @tokens.setter
    def tokens(self, tokens: Tensor | None) -> None:
        previous, self.history.tokens = self.history.tokens, tokens
        ids = previous[:, :0] if tokens is None and previous is not None else tokens
        if self.folder is not None and ids is not None:
            try:
                self.folder.write_ids(ids)
            except StoreError as error:
                device = next((kv_cache.device for kv_cache in self.kv_caches), torch.device("cpu"))
                guard = CallGuard(RankMesh.of(self.mesh), device, self.settings.checked)
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
    def next_position(self) -> int:
        """Position of the next token, if it is text. Images before it may have shifted it."""
        return int(self.get_seq_length()) + (0 if self.history.shift is None else self.history.shift.shift)

    @property
    def num_kv_caches(self) -> int:
        """The number of the caches of all layers, made or not."""
        return len(self.tokens_per_key)

    @property
    def irreversible_layers(self) -> list[Any]:
        """Layers whose states cannot go back to fewer tokens."""
        return [layer for _, layer in self._layers_with_tensors]

    @property
    def states(self) -> dict[str, Tensor]:
        """Tensors that layers keep of recurrences and of the last tokens, by number of the layer and name."""
        return {
            f"{number}.{name}": x for number, layer in self._layers_with_tensors for name, x in layer.tensors.items()
        }

    @property
    def _layers_with_tensors(self) -> list[tuple[int, Any]]:
        return [(number, x) for number, x in enumerate(self.layers) if isinstance(x, (StateLayer, TailLayer))]

    @property
    def cross_layers(self) -> list[CrossLayer]:
        """Layers that hold keys and values of images."""
        return [layer for layer in self.layers if isinstance(layer, CrossLayer)]

    @property
    def tokens_per_key(self) -> list[int]:
        """Tokens that a key of each cache stands for."""
        return [count for layer in self.attention_layers for count in layer.tokens_per_key]

    def check_no_images(self, subject: str) -> None:
        """Raise if layers of cross-attention have keys of images, which are neither saved nor recovered."""
        if any(layer.is_initialized for layer in self.cross_layers):
            fix = "prefill the prompt and its images in a new cache"
            raise KernelError(subject, "a cache without images of cross-attention", "one with images", fix)

    def save(
        self, path: str | Path, *, more: Mapping[str, Tensor] | None = None, note: str = "", wait: bool = True
    ) -> Saving:
        """Write all layers to a folder, as `KVCache.save` writes one.

        Args:
            path: A folder that all ranks can write to.
            more: Further tensors, which `restore` returns.
            note: Text, which `restore` returns.
            wait: False to return while the files are written.

        Returns:
            The running save. Its `wait` returns when the files are complete.

        Raises:
            InputError: A layer is empty, the folder cannot be written, or ranks differ.
        """
        kv_caches = self.kv_caches
        with Agreement(RankMesh.of(self.mesh), "save"):
            check_extra_tensors({} if more is None else more)
            if not self.attention_layers:
                expected = "a cache with layers of attention"
                raise KernelError("ShardedCache save", expected, "recurrent states alone", "prefill again instead")
            self.check_no_images("ShardedCache save")
            counts = {count for layer in self.attention_layers for count in layer.token_counts}
            filled = len(kv_caches) == self.num_kv_caches and 0 not in counts
            if not filled:
                expected, fix = "a cache with tokens in all layers", "prefill a prompt first"
                raise ShapeError("ShardedCache save", expected, repr(self.attention_layers[0]), fix)
            if len(counts) != 1:
                given, fix = f"layers of {sorted(counts)} tokens", "call hf.prefill with the prompt"
                raise StoreError("ShardedCache save", "layers of the same tokens", given, fix)
            reserved = [name for name in more or {} if name == "held" or name.startswith(STATES)]
            if reserved:
                raise StoreError("save more", f"names other than held and {STATES}*", ", ".join(reserved), "rename it")
        is_known = self.tokens is not None and kv_caches[0].length == self.tokens.shape[1]
        ids = {"held": self.tokens.cpu()} if self.tokens is not None and is_known else {}
        states = {STATES + name: x.cpu().clone() for name, x in self.states.items()}
        extra_tensors = {**ids, **states, **(more or {})}
        differ = self.tokens_per_key != [1] * self.num_kv_caches
        return save_layers(kv_caches, path, extra_tensors=extra_tensors, note=note, wait=wait, lengths_differ=differ)

    def restore(
        self, path: str | Path, *, device: torch.device | str | None = None, capacity: int | None = None
    ) -> tuple[dict[str, Tensor], str]:
        """Replace the cached tokens by those in a folder. Every rank calls it, on any number of ranks.

        Args:
            path: A folder that `save` wrote.
            device: The device of the tensors; None for the mesh's device.
            capacity: Tokens to allocate for; None for the cache's capacity.

        Returns:
            The further tensors and the note that were saved.

        Raises:
            InputError: The folder has no complete save of a cache of this model, or ranks differ.
        """
        if self.folder is not None:
            fix = "open the folder that was saved, or restore into hf.ShardedCache(config, mesh)"
            raise KernelError("restore", "a cache in memory", "one in a folder", fix)
        options = self._kv_cache_options
        capacity = self.settings.capacity if capacity is None else capacity
        del options["capacity"]
        layers = LayersToLoad(self.num_kv_caches, capacity, self.tokens_per_key, self.settings.hot)
        kv_caches, extra_tensors, note = load_layers(KVCache, path, self.mesh, layers, device=device, **options)
        names = [name for name in extra_tensors if name.startswith(STATES)]
        states = {name.removeprefix(STATES): extra_tensors.pop(name).to(kv_caches[0].device) for name in names}
        self._check_states(states, path)
        self.set_kv_caches(kv_caches)
        for layer in self.cross_layers:  # a cache with images is not saved
            layer.reset()
        self.set_states(states)
        self.settings = replace(self.settings, capacity=capacity)
        self.history = CacheHistory.of(extra_tensors.pop("held", None), self.config)
        return extra_tensors, note

    def flush(self) -> None:
        """Write the tokens on the device to the folder too, as `KVCache.flush` does. Every rank calls it."""
        for kv_cache in self.kv_caches if self.settings.hot is not None else ():
            kv_cache.flush()

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        """Replace what layers keep of recurrences and of the last tokens by tensors with the names of `states`."""
        for number, layer in self._layers_with_tensors:
            layer_states = {name: x for name, x in states.items() if name.startswith(f"{number}.")}
            layer.set_tensors({name.removeprefix(f"{number}."): x for name, x in layer_states.items()})

    def _check_states(self, states: Mapping[str, Tensor], path: str | Path) -> None:
        """Raise unless states in a folder are those that these layers keep."""
        layers = {str(number): layer for number, layer in self._layers_with_tensors}
        for number in sorted({*layers, *(name.partition(".")[0] for name in states)}):
            names = [name.removeprefix(f"{number}.") for name in states if name.startswith(f"{number}.")]
            if number not in layers or not layers[number].keeps(names):
                expected, fix = "the states of this model", "pass the configuration of the model that was saved"
                raise StoreError("load", expected, f"{names} of layer {number} in {path}", fix)

    def make_kv_caches(self, layers: Sequence[CacheConfig], tokens: int, device: torch.device) -> list[KVCache]:
        """Make the empty caches of all layers, with space for `tokens` tokens, to be filled. Every rank calls it."""
        capacity = growth_capacity(tokens) if self.settings.capacity is None else self.settings.capacity
        options = {**self._kv_cache_options, "capacity": capacity, "block": self.settings.block, "device": device}
        kv_caches = [KVCache(self.mesh, **{**kv_config.arguments(), **options}) for kv_config in layers]
        if kv_caches:
            self.set_kv_caches(kv_caches)
        return kv_caches

    @property
    def _kv_cache_options(self) -> dict[str, Any]:
        """Options of the `KVCache` of each layer."""
        return {name: getattr(self.settings, name) for name in ("capacity", "checked", "copies", "shares")}

    def set_kv_caches(self, kv_caches: Sequence[KVCache]) -> None:
        """Set the `KVCache` of each layer. Raise if they are stored in another way than the cache's."""
        storage, in_windows = self.settings.storage, self.settings.window_storage
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


for option in fields(CacheSettings):
    setattr(StoredLayers, option.name, settled_option(option.name))
