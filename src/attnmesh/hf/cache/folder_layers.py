"""Layers of a cache that live in a folder, whose files are their keys, their values and the ids of the tokens."""

from pathlib import Path

import torch
from torch import Tensor

from attnmesh.cache.cache import KVCache
from attnmesh.cache.make_shards import FolderLayer
from attnmesh.cache.saved_cache import LayersToLoad
from attnmesh.errors import KernelError, StoreError
from attnmesh.guard.agreement import Agreement, CallGuard
from attnmesh.hf.cache.history import CacheHistory
from attnmesh.hf.cache.stored_layers import StoredLayers
from attnmesh.hf.transformers_names import CacheLayerMixin
from attnmesh.mesh.axes import RankMesh, agreed_flat_axis
from attnmesh.store.kv_folder import KVFolder


class FolderLayers(StoredLayers):
    """Layers of a `ShardedCache` that may live in a folder."""

    folder: KVFolder | None = None
    """The folder in which the keys and values are; None if they are in memory."""

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

    def restore(
        self, path: str | Path, *, device: torch.device | str | None = None, capacity: int | None = None
    ) -> tuple[dict[str, Tensor], str]:
        """Replace the cached tokens as `StoredLayers.restore` does. Raise if this cache is itself in a folder."""
        if self.folder is not None:
            fix = "open the folder that was saved, or restore into hf.ShardedCache(config, mesh)"
            raise KernelError("restore", "a cache in memory", "one in a folder", fix)
        return super().restore(path, device=device, capacity=capacity)

    def open_folder(self, folder: str | Path) -> None:
        """Open a folder, and the caches and token ids that are in it."""
        token_axis = agreed_flat_axis(self.mesh, ("queries", "keys"))
        self.folder = opened = KVFolder(folder, RankMesh.of(self.mesh), token_axis, "ShardedCache folder")
        with opened.released_on_error():
            self._read_folder(opened)

    def _read_folder(self, opened: KVFolder) -> None:
        """Take the caches and token ids of a folder."""
        folder, layer_configs = opened.path, opened.manifest.configs
        with Agreement(opened.mesh, "ShardedCache folder"):
            if len(layer_configs) not in (0, self.num_kv_caches):
                expected, fix = f"a folder of {self.num_kv_caches} layers", "pass that of this model, or a new one"
                raise StoreError("ShardedCache folder", expected, f"{len(layer_configs)} in {folder}", fix)
            ids = opened.read_ids()
            if layer_configs and ids is None:
                given = f"none in {folder}"
                fix = "fill a new one by hf.generate, or restore this one into memory"
                raise StoreError("ShardedCache folder", "a folder with the ids of its tokens", given, fix)
        settings = self.settings
        options = {"device": "cpu" if settings.hot is None else None, "checked": settings.checked}  # None: the mesh's
        room = LayersToLoad(self.num_kv_caches, settings.capacity, self.tokens_per_key, settings.hot)
        kv_caches = [
            KVCache(self.mesh, **{**config.arguments(), **options}, folder=FolderLayer(opened, index))
            for index, config in enumerate(room.configs(layer_configs) if layer_configs else ())
        ]
        if ids is None:
            return
        shortest = min(kv_cache.length for kv_cache in kv_caches)
        if ids.shape[1] == 0 and shortest > 0:
            given, fix = f"no ids of {shortest} tokens in {folder}", "restore it into memory, or fill a new one"
            raise StoreError("ShardedCache folder", "ids of its tokens", given, fix)
        self._set_kv_caches(kv_caches)
        length = min(ids.shape[1], shortest)
        for kv_cache in kv_caches:
            kv_cache.truncate(length)
        self.tokens = ids[:, :length]
        self.history = CacheHistory.of(self.tokens, self.config)

    def folder_of(self, layer: CacheLayerMixin) -> FolderLayer | None:
        """Return a layer with its folder; None without a folder."""
        return None if self.folder is None else FolderLayer(self.folder, self.attention_layers.index(layer))
