"""Layers of a cache that live in a folder: its files are their keys and values, and the tokens' ids stand beside."""

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from attnmesh.cache.cache import KVCache
from attnmesh.cache.saved_cache import FolderLayer
from attnmesh.errors import StoreError, require
from attnmesh.guard.agreement import Agreement
from attnmesh.hf.cache.layer import ShardedLayer
from attnmesh.hf.cache.stored_layers import StoredLayers
from attnmesh.hf.images.inputs import shift_of
from attnmesh.mesh.axes import Mesh, flat_axis
from attnmesh.store.kv_folder import KeyFolder


class FolderLayers(StoredLayers):
    """Layers of a `ShardedCache` that may live in a folder."""

    folder: KeyFolder | None = None
    """The folder in which the keys and values are; None if they are in memory."""
    _tokens: Tensor | None = None

    @property
    def tokens(self) -> Tensor | None:
        """Ids of the cached tokens, with -1 for padding and -2 - id for image tokens.

        After an interrupted generation, the ids to continue from. None if the tokens were not cached by
        `attnmesh.hf.generate`. A folder has them, too.
        """
        return self._tokens

    @tokens.setter
    def tokens(self, tokens: Tensor | None) -> None:
        self._tokens = tokens
        if self.folder is not None and tokens is not None:
            self.folder.write_ids(tokens)

    def open_folder(self, folder: str | Path) -> None:
        """Open a folder, and the caches and token ids that are in it."""
        place = Mesh.of(self.mesh)
        self.folder = opened = KeyFolder(
            folder, place, flat_axis(self.mesh, ("queries", "keys")), "ShardedCache folder"
        )
        saved = opened.manifest.sizes
        with Agreement(place, "ShardedCache folder"):
            fits, given = len(saved) <= self.caches, f"{len(saved)} in {folder}"
            expected, fix = f"a folder of {self.caches} layers", "pass the folder of this model, or another one"
            require(fits, StoreError, "ShardedCache folder", expected, given, fix)
            ids = opened.read_ids(saved[0].batch) if saved else None
        found = [
            KVCache(self.mesh, **vars(sizes), device="cpu", checked=self.checked, folder=FolderLayer(opened, number))
            for number, sizes in enumerate(map(replace, saved))
        ]
        if len(found) == self.caches:
            self._fill(found)
        else:  # the first forward pass has not reached all layers
            for layer, kv in zip(self.attention_layers, found, strict=False):
                layer.fill([kv])
                self.block = kv.sizes.block
        length = min([0 if ids is None else ids.shape[1], *(kv.length for kv in found)])
        length = length if len(found) == self.caches else 0
        for kv in found:
            kv.truncate(length)
        self.tokens = None if ids is None else ids[:, :length]
        self.shift = shift_of(self.tokens, self.config)

    def folder_of(self, layer: ShardedLayer) -> FolderLayer | None:
        """Return the place of a layer in the folder; None without a folder."""
        return None if self.folder is None else FolderLayer(self.folder, self.attention_layers.index(layer))
