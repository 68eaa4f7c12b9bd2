"""Layers of a cache that are saved in a folder: keys and values in shares, recurrent states whole."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import Cache

from attnmesh.decode.cache import KVCache
from attnmesh.decode.saved_cache import Saving
from attnmesh.errors import KernelError, ShapeError, StoreError, require
from attnmesh.guard.consensus import run_agreed
from attnmesh.hf.cache.layer import ShardedLayer
from attnmesh.hf.cache.state_layer import StateLayer, set_states, states_of
from attnmesh.mesh.axes import Mesh
from attnmesh.store.checkpoint import load_layers
from attnmesh.store.checkpoint_writer import save_layers
from attnmesh.store.tensor_file import check_more

STATES = "recurrent."
"""First part of the names of recurrent states in a folder."""


class StoredLayers(Cache):  # type: ignore[misc]
    """Layers of a `ShardedCache`, and how they go to a folder and back."""

    mesh: DeviceMesh | None
    capacity: int | None
    block: int
    checked: bool | None
    copies: int
    tokens: Tensor | None

    @property
    def attention_layers(self) -> list[ShardedLayer]:
        """Layers that hold keys and values."""
        return [layer for layer in self.layers if isinstance(layer, ShardedLayer)]

    @property
    def kvs(self) -> list[KVCache]:
        """The caches of all layers that have been made."""
        return [kv for layer in self.attention_layers for kv in layer.kvs]

    @property
    def caches(self) -> int:
        """The number of these caches when all have been made."""
        return sum(layer.caches for layer in self.attention_layers)

    @property
    def state_layers(self) -> list[StateLayer]:
        """Layers that hold recurrent states."""
        return [layer for layer in self.layers if isinstance(layer, StateLayer)]

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
        kvs = self.kvs

        def check() -> None:
            check_more({} if more is None else more)
            expected, fix = "a cache with layers of attention", "prefill again instead"
            require(
                bool(self.attention_layers), KernelError, "ShardedCache save", expected, "recurrent states alone", fix
            )
            filled = len(kvs) == self.caches and all(kv.length for kv in kvs)
            expected, fix = "a cache with tokens in all layers", "prefill a prompt first"
            require(filled, ShapeError, "ShardedCache save", expected, repr(self.attention_layers[0]), fix)
            taken = [name for name in more or {} if name == "held" or name.startswith(STATES)]
            expected = f"names other than held and {STATES}*"
            require(not taken, StoreError, "save more", expected, ", ".join(taken), "rename it")

        run_agreed(Mesh.of(self.mesh), check, "save")
        held = {"held": self.tokens.cpu()} if self.tokens is not None and kvs[0].length == self.tokens.shape[1] else {}
        states = {STATES + name: x.cpu().clone() for name, x in states_of(self.layers).items()}
        return save_layers(kvs, path, more={**held, **states, **(more or {})}, note=note, wait=wait)

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
            InputError: The folder has no complete save of such a cache, or ranks differ.
        """
        options = self._kv_options | ({} if capacity is None else {"capacity": capacity})
        kvs, more, note = load_layers(KVCache, path, self.mesh, layers=self.caches, device=device, **options)
        states = {name: more.pop(name) for name in [*more] if name.startswith(STATES)}
        states = {name.removeprefix(STATES): x for name, x in states.items()}
        self._fill(kvs)
        set_states(self.layers, states, kvs[0].device)
        self.capacity = options["capacity"]
        self.tokens = more.pop("held", None)
        return more, note

    @property
    def _kv_options(self) -> dict[str, Any]:
        """Options of the `KVCache` of each layer."""
        return {"capacity": self.capacity, "checked": self.checked, "copies": self.copies}

    def _fill(self, kvs: Sequence[KVCache]) -> None:
        """Set the `KVCache` of each layer."""
        given = iter(kvs)
        for layer in self.attention_layers:
            layer.fill([next(given) for _ in range(layer.caches)])
        self.block = kvs[0].sizes.block
