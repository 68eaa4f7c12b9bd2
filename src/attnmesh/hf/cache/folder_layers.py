"""Layers of a `ShardedCache` that move: into a folder and back, with the ids of their tokens, and to another mesh.

A cache may live in a folder, whose files are its keys, its values and the ids, or be saved in one.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from attnmesh.cache.cache import KVCache
from attnmesh.cache.make_shards import FolderLayer
from attnmesh.cache.saved_cache import LayersToLoad, Saving
from attnmesh.errors import KernelError, ShapeError, StoreError
from attnmesh.guard.agreement import Agreement
from attnmesh.hf.cache.history import CacheHistory, gathered_ids
from attnmesh.hf.cache.stored_layers import StoredLayers
from attnmesh.mesh.axes import RankMesh, agreed_flat_axis
from attnmesh.store.kv_folder import KVFolder
from attnmesh.store.load_layers import load_layers
from attnmesh.store.recover import recover
from attnmesh.store.save_layers import save_layers
from attnmesh.store.tensor_file import check_extra_tensors
from attnmesh.store.token_ids import CACHED_IDS

STATES = "recurrent."
"""First part of the names of recurrent states in a folder."""


def open_layers(cache: StoredLayers, folder: str | Path) -> None:
    """Open a folder, and the caches and token ids that are in it."""
    token_axis = agreed_flat_axis(cache.mesh, ("queries", "keys"))
    opened = KVFolder(folder, RankMesh.of(cache.mesh), token_axis, "ShardedCache folder")
    cache.settings = replace(cache.settings, folder=opened)
    with opened.released_on_error():
        _read_folder(cache, opened)


def _read_folder(cache: StoredLayers, opened: KVFolder) -> None:
    """Take the caches and token ids of a folder."""
    folder, layer_configs = opened.path, opened.manifest.configs
    with Agreement(opened.mesh, "ShardedCache folder"):
        if len(layer_configs) not in (0, cache.num_kv_caches):
            expected, fix = f"a folder of {cache.num_kv_caches} layers", "pass that of this model, or a new one"
            raise StoreError("ShardedCache folder", expected, f"{len(layer_configs)} in {folder}", fix)
        ids = opened.read_ids()
        if layer_configs and ids is None:
            given = f"none in {folder}"
            fix = "fill a new one by hf.generate, or restore this one into memory"
            raise StoreError("ShardedCache folder", "a folder with the ids of its tokens", given, fix)
    options = {"device": "cpu" if cache.hot is None else None, "checked": cache.checked}  # None: the mesh's
    room = LayersToLoad(cache.num_kv_caches, cache.capacity, cache.tokens_per_key, cache.hot)
    kv_caches = [
        KVCache(cache.mesh, **{**config.arguments(), **options}, folder=FolderLayer(opened, index))
        for index, config in enumerate(room.configs(layer_configs) if layer_configs else ())
    ]
    if ids is None:
        return
    shortest = min(kv_cache.length for kv_cache in kv_caches)
    if ids.shape[1] == 0 and shortest > 0:
        given, fix = f"no ids of {shortest} tokens in {folder}", "restore it into memory, or fill a new one"
        raise StoreError("ShardedCache folder", "ids of its tokens", given, fix)
    cache.set_kv_caches(kv_caches)
    length = min(ids.shape[1], shortest)
    for kv_cache in kv_caches:
        kv_cache.truncate(length)
    cache.tokens = ids[:, :length]
    cache.history = CacheHistory.of(cache.tokens, cache.config)


def save_cache(cache: StoredLayers, path: str | Path, more: Mapping[str, Tensor] | None, **options: Any) -> Saving:
    """Write all layers to a folder. `options` are those of `save_layers`."""
    kv_caches = cache.kv_caches
    with Agreement(RankMesh.of(cache.mesh), "save"):
        check_extra_tensors({} if more is None else more)
        _check_filled(cache)
        reserved = [name for name in more or {} if name == CACHED_IDS or name.startswith(STATES)]
        if reserved:
            raise StoreError(
                "save more", f"names other than {CACHED_IDS} and {STATES}*", ", ".join(reserved), "rename it"
            )
    is_known = cache.tokens is not None and kv_caches[0].length == cache.tokens.shape[1]
    ids = {CACHED_IDS: cache.tokens.cpu()} if cache.tokens is not None and is_known else {}
    states = {STATES + name: x.cpu().clone() for name, x in cache.states.items()}
    extra_tensors = {**ids, **states, **(more or {})}
    differ = cache.tokens_per_key != [1] * cache.num_kv_caches
    return save_layers(kv_caches, path, extra_tensors=extra_tensors, lengths_differ=differ, **options)


def _check_filled(cache: StoredLayers) -> None:
    """Raise unless all layers have the same tokens, and no images."""
    subject = "ShardedCache save"
    if not cache.attention_layers:
        raise KernelError(
            subject, "a cache with layers of attention", "recurrent states alone", "prefill again instead"
        )
    _check_no_images(cache, subject)
    cache.history.check_order(subject)
    counts = {count for layer in cache.attention_layers for count in layer.token_counts}
    filled = len(cache.kv_caches) == cache.num_kv_caches and 0 not in counts
    if not filled:
        expected, fix = "a cache with tokens in all layers", "prefill a prompt first"
        raise ShapeError(subject, expected, repr(cache.attention_layers[0]), fix)
    if len(counts) != 1:
        given, fix = f"layers of {sorted(counts)} tokens", "call hf.prefill with the prompt"
        raise StoreError(subject, "layers of the same tokens", given, fix)


def _check_no_images(cache: StoredLayers, subject: str) -> None:
    """Raise if layers of cross-attention have keys of images, which are neither saved nor recovered."""
    if any(layer.is_initialized for layer in cache.cross_layers):
        fix = "prefill the prompt and its images in a new cache"
        raise KernelError(subject, "a cache without images of cross-attention", "one with images", fix)


def restore_cache(
    cache: StoredLayers, path: str | Path, device: torch.device | str | None, capacity: int | None
) -> tuple[dict[str, Tensor], str]:
    """Replace the cached tokens by those in a folder. Return the further tensors and the note that were saved."""
    if cache.folder is not None:
        fix = "open the folder that was saved, or restore into hf.ShardedCache(config, mesh)"
        raise KernelError("restore", "a cache in memory", "one in a folder", fix)
    kv_cache_options = cache.kv_cache_options
    capacity = cache.capacity if capacity is None else capacity
    del kv_cache_options["capacity"]
    layers = LayersToLoad(cache.num_kv_caches, capacity, cache.tokens_per_key, cache.hot)
    kv_caches, extra_tensors, note = load_layers(KVCache, path, cache.mesh, layers, device=device, **kv_cache_options)
    names = [name for name in extra_tensors if name.startswith(STATES)]
    states = {name.removeprefix(STATES): extra_tensors.pop(name).to(kv_caches[0].device) for name in names}
    _check_states(cache, states, path)
    cache.set_kv_caches(kv_caches)
    for layer in cache.cross_layers:  # a cache with images is not saved
        layer.reset()
    cache.set_states(states)
    cache.settings = replace(cache.settings, capacity=capacity)
    cache.history = CacheHistory.of(extra_tensors.pop(CACHED_IDS, None), cache.config)
    return extra_tensors, note


def _check_states(cache: StoredLayers, states: Mapping[str, Tensor], path: str | Path) -> None:
    """Raise unless states in a folder are those that the cache's layers keep."""
    layers = {str(number): layer for number, layer in cache.layers_with_tensors}
    for number in sorted({*layers, *(name.partition(".")[0] for name in states)}):
        names = [name.removeprefix(f"{number}.") for name in states if name.startswith(f"{number}.")]
        if number not in layers or not layers[number].keeps(names):
            expected, fix = "the states of this model", "pass the configuration of the model that was saved"
            raise StoreError("load", expected, f"{names} of layer {number} in {path}", fix)


def recover_cache(
    old: StoredLayers | None, new: StoredLayers, config: PreTrainedConfig, device: torch.device | str | None
) -> None:
    """Fill a new cache with the tokens of that of a mesh which lost ranks. On a new rank, the old cache is None."""
    subject = "ShardedCache.recover"
    with Agreement(RankMesh.of(new.mesh), subject):
        _check_recoverable(old, new, subject)
    kv_caches, ids = ([], None) if old is None else (old.kv_caches, old.tokens)
    # A prefill that is interrupted in its first chunk leaves layers without a cache.
    is_complete = len(kv_caches) == new.num_kv_caches
    new.set_kv_caches(recover(kv_caches if is_complete else None, new.mesh, device=device, **new.kv_cache_options))
    new.history = CacheHistory.of(gathered_ids(ids, new.attention_layers[0].kv_cache), config)


def _check_recoverable(old: Any, new: StoredLayers, subject: str) -> None:
    """Raise unless the old cache is None or has the layers of the new one, without recurrent states."""
    if new.irreversible_layers:
        fix = "generate with checkpoint=hf.Checkpoint(path), or prefill again"
        raise KernelError(subject, "a model without states", new.config.model_type, fix)
    if old is None:
        return
    subject = f"{subject} cache"
    if not isinstance(old, StoredLayers):
        fix = "pass the ShardedCache of this rank, or None on a new rank"
        raise KernelError(subject, "a ShardedCache", type(old).__name__, fix)
    _check_no_images(old, subject)
    layers = len(new.layers)
    if len(old.layers) != layers:
        given = f"one of {len(old.layers)} layers"
        raise KernelError(subject, f"a cache of {layers} layers", given, "pass the config of its model")
