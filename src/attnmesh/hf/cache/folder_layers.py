"""Layers of a cache that live in a folder, whose files are their keys, their values and the ids of the tokens."""

from dataclasses import replace
from pathlib import Path

from attnmesh.cache.cache import KVCache
from attnmesh.cache.make_shards import FolderLayer
from attnmesh.cache.saved_cache import LayersToLoad
from attnmesh.errors import StoreError
from attnmesh.guard.agreement import Agreement
from attnmesh.hf.cache.history import CacheHistory
from attnmesh.hf.cache.stored_layers import StoredLayers
from attnmesh.mesh.axes import RankMesh, agreed_flat_axis
from attnmesh.store.kv_folder import KVFolder


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
    settings = cache.settings
    options = {"device": "cpu" if settings.hot is None else None, "checked": settings.checked}  # None: the mesh's
    room = LayersToLoad(cache.num_kv_caches, settings.capacity, cache.tokens_per_key, settings.hot)
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
