"""`save` and `load` of a `KVCache`."""

from pathlib import Path
from typing import Self

import torch
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.store.checkpoint import load_layers
from attnmesh.store.checkpoint_writer import Saving, save_layers


class SavedCache:
    """A cache that is saved to a folder, and loaded from it on any number of ranks."""

    def save(self, path: str | Path, *, wait: bool = True) -> Saving:
        """Write the cache to a folder, each rank its own tokens. The previous save stays until this one is complete.

        Args:
            path: Folder that all ranks can write to; it is made if it is missing.
            wait: False to decode while the files are written. Every rank then calls `wait()` on the result.

        Returns:
            The save, concluded if `wait`.

        Raises:
            StoreError: The folder cannot be written to, or holds something else.

        >>> import tempfile
        >>> from attnmesh import KVCache
        >>> cache = KVCache(None, batch=1, kv_heads=2, head_dim=4, capacity=100, dtype=torch.float32)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     cache.save(folder).written
        True
        """
        return save_layers([self], path, wait=wait)  # type: ignore[list-item]

    @classmethod
    def load(
        cls,
        path: str | Path,
        mesh: DeviceMesh | None,
        *,
        capacity: int | None = None,
        device: torch.device | str | None = None,
        checked: bool | None = None,
        copies: int = 1,
    ) -> Self:
        """Return a saved cache on any number of ranks, its tokens block-cyclic. Every rank calls it.

        Args:
            path: Folder that `save` wrote.
            mesh: Mesh of all ranks, or None for one device.
            capacity: Tokens to reserve memory for; the saved capacity by default.
            device: As in `KVCache`.
            checked: As in `KVCache`.
            copies: As in `KVCache`.

        Returns:
            The cache.

        Raises:
            StoreError: The folder holds no cache, is damaged, or exceeds the device's memory.
            ShapeError: `capacity` is less than the saved tokens, or the heads axis does not divide the key heads.

        >>> import tempfile
        >>> from attnmesh import KVCache
        >>> cache = KVCache(None, batch=1, kv_heads=2, head_dim=4, capacity=100, dtype=torch.float32)
        >>> cache.append(*torch.randn(2, 1, 2, 5, 4))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saved = cache.save(folder)
        ...     KVCache.load(folder, None).length
        5
        """
        options = {"capacity": capacity, "device": device, "checked": checked, "copies": copies}
        (cache,), _, _ = load_layers(cls, path, mesh, layers=1, **options)  # type: ignore[arg-type, type-var]
        return cache
