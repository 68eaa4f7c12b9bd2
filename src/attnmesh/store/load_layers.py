"""Saved caches on disk, and loading them: each rank writes its own tokens, and any number of ranks reads them.

        cache.json                      the manifest, which names the current save; replaced atomically
        7-3f../0.1.0-4096.safetensors   seventh save: the first 4,096 tokens of one rank, all layers. The name starts
        7-3f../0.1.4096-5000.safet..    with the rank's indices along the heads and tokens axes
        7-3f../0.1.0-128.3.safetensors  its first 128 tokens that layers forget later, under the mask of layer 3
        7-3f../more.safetensors         tensors that belong to no rank, such as the token mask

Only `cache.json` makes a save current, so an interrupted save leaves the previous one valid. Each save has its own
folder, even where several jobs save to the same place. In a folder that grows (`kv_folder.py`) a cache lives: its last
tokens are in the files of `layer_files.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial as partial_of
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.cache.cache import KVCache
from attnmesh.cache.cache_config import CacheConfig
from attnmesh.cache.saved_cache import LayersToLoad
from attnmesh.errors import ShapeError, StoreError
from attnmesh.guard.agreement import Agreement
from attnmesh.mesh.axes import RankMesh
from attnmesh.mesh.shares import check_copies, checked_shares
from attnmesh.runtime.memory import host_memory
from attnmesh.setup.init_mesh import device_fault, device_for
from attnmesh.store.manifest import MORE, Manifest, checked_folder, read_manifest
from attnmesh.store.piece_files import fill_shards, with_length_now
from attnmesh.store.tensor_file import TensorFile
from attnmesh.store.token_ids import CACHED_IDS, TOKEN_IDS, TokenIds, ids_in

ALL_LAYERS = LayersToLoad()
"""All layers of a folder, with the capacity that was saved."""

T = TypeVar("T")

Cache = TypeVar("Cache", bound=KVCache)

MAX_ATTEMPTS = 8
"""Times that a folder is read, at most, if it changes each time: an append at each read would never end a load."""


def load_layers(
    make: Callable[..., Cache],
    path: str | Path,
    device_mesh: DeviceMesh | None,
    to_load: LayersToLoad = ALL_LAYERS,
    *,
    device: torch.device | str | None = None,
    checked: bool | None = None,
    copies: int = 1,
    shares: Sequence[float] | str | None = None,
) -> tuple[list[Cache], dict[str, Tensor], str]:
    """Return the caches that `save_layers` wrote, on any number of ranks, with its `extra_tensors` and its `note`.

    Every rank calls it. If another save replaces this one meanwhile, that is loaded. If a cache writes to the folder
    meanwhile, it is read anew. `make` is `KVCache`.
    """
    options = {"device": device, "copies": copies, "shares": shares}
    make_checked = partial_of(make, checked=checked)
    for attempt in range(MAX_ATTEMPTS):
        loaded = _load_once(make_checked, path, device_mesh, to_load, options, may_retry=attempt + 1 < MAX_ATTEMPTS)
        if loaded is not None:
            return loaded
    raise _never_at_rest(path)


def _load_once(
    make: Callable[..., Cache],
    path: str | Path,
    device_mesh: DeviceMesh | None,
    to_load: LayersToLoad,
    options: Mapping[str, Any],
    *,
    may_retry: bool,
) -> tuple[list[Cache], dict[str, Tensor], str] | None:
    """Return what `load_layers` does. With `may_retry` all ranks return None if the folder has changed meanwhile."""
    mesh = RankMesh.of(device_mesh)
    before = _state_of(path)
    with Agreement(mesh, "load") as agreement:
        saved_layers = _unless_changed(
            lambda: _checked_layers(path, device_mesh, to_load, **options), path, before, may_retry=may_retry
        )
        own_manifest = None if saved_layers is None else saved_layers.manifest
        fields = {
            "save": None if may_retry else own_manifest,
            "capacity": to_load.capacity,
            "shares": options["shares"],
        }
        numbers = [0, 0] if own_manifest is None else [own_manifest.name_bits, own_manifest.length]
        table = agreement.compare(fields, payload=numbers)
    if saved_layers is None or len({name for name, _ in table}) > 1:
        return None
    manifest, folder, token_mask, extra_tensors = saved_layers
    length = min(length for _, length in table)  # ranks may have read a growing folder one after the other
    manifest = manifest._replace(length=length)
    if manifest.growing and CACHED_IDS in extra_tensors:
        extra_tensors[CACHED_IDS] = extra_tensors[CACHED_IDS][:, :length]
    caches = make_alike(make, device_mesh, _configs_of(manifest, to_load), **options)

    def read() -> bool:
        fill_shards([cache.local_shards for cache in caches], folder, manifest)
        return True

    with torch.no_grad():
        with Agreement(mesh, "load") as agreement:
            is_read = bool(_unless_changed(read, path, before, may_retry=may_retry))
            table = agreement.compare(payload=[is_read])
        if not all(done for (done,) in table):
            return None
        for layer, (cache, start) in enumerate(zip(caches, manifest.window_starts, strict=True)):
            cache.local_shards.mark_present(manifest.length_of(layer), token_mask, start.oldest_kept_token)
    return caches, extra_tensors, manifest.note


def make_alike(
    make: Callable[..., Cache], device_mesh: DeviceMesh | None, layers: Sequence[CacheConfig], **options: Any
) -> list[Cache]:
    """Return a cache for each of these layers. All have the shares that are measured for the first."""
    caches: list[Cache] = []
    for config in layers:
        caches.append(make(device_mesh, **config.arguments(), **options))
        options["shares"] = caches[0].shares
    return caches


FolderState = tuple[object, ...]
"""Signs that a folder is written to: the name of its save, and sizes and times of journals."""


def _unless_changed(read: Callable[[], T], path: object, before: FolderState, *, may_retry: bool) -> T | None:
    """Return what `read` returns of a folder. If it changed since `before`, raise, or return None with `may_retry`."""
    try:
        return read()
    except StoreError as error:
        if (now := _state_of(path)) == before:
            raise
        if may_retry:
            return None
        if now[:1] != before[:1]:
            raise
        raise _never_at_rest(path) from error


def _never_at_rest(path: object) -> StoreError:
    """Return the error of a folder that changes each time it is read."""
    given, fix = f"{path}, which a cache writes meanwhile", "let go of that cache, or load it once it is at rest"
    return StoreError("load", "a folder at rest", given, fix)


def _state_of(path: object) -> FolderState:
    with suppress(StoreError, OSError):
        folder = checked_folder("load", path)
        manifest = read_manifest(folder)
        if not manifest.growing:
            return (manifest.name,)
        journals = sorted((folder / manifest.folder_name).glob("*.journal"))
        stats = [(journal.name, journal.stat()) for journal in journals]
        return manifest.name, *((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
    return ()


class SavedLayers(NamedTuple):
    """The layers of a folder, as they are to be loaded."""

    manifest: Manifest
    folder: Path
    token_mask: Tensor | None
    extra_tensors: dict[str, Tensor]
    """Tensors that belong to no rank."""


def _checked_layers(
    path: str | Path,
    device_mesh: DeviceMesh | None,
    to_load: LayersToLoad,
    *,
    device: torch.device | str | None,
    copies: int,
    shares: Sequence[float] | str | None,
) -> SavedLayers:
    """Return the saved layers of a folder. Raise if caches with these options could not take them on this rank."""
    target = device_for(device_mesh, device)
    if fault := device_fault("load", target, device):
        raise fault
    mesh = RankMesh.of(device_mesh)
    ranks = mesh.queries.size * mesh.keys.size
    check_copies("load", copies, ranks)
    known_shares = checked_shares("load", shares, ranks)
    part = 0.0 if shares == "auto" else part_of_rank(known_shares, mesh)
    shard_device = target if to_load.hot is None else torch.device("cpu")
    return read_saved_layers(path, mesh, shard_device, to_load, copies * part)


def read_saved_layers(
    path: object,
    mesh: RankMesh,
    device: torch.device,
    to_load: LayersToLoad,
    part: float,
) -> SavedLayers:
    """Return the saved layers of a folder. Raise if they cannot be loaded onto this mesh and device.

    `part` is the part of the tokens that this rank holds, copies included.
    """
    folder = checked_folder("load", path)
    manifest = with_length_now(folder, read_manifest(folder))
    if to_load.layers not in (None, len(manifest.configs)):
        model_fix = "pass the configuration of the model that was saved"
        fix = "call hf.ShardedCache(config, mesh).restore(path)" if to_load.layers == 1 else model_fix
        given = f"{len(manifest.configs)} in {folder}"
        raise StoreError("load", f"a cache of {to_load.layers} layer{'s' * (to_load.layers != 1)}", given, fix)
    configs = _configs_of(manifest, to_load)
    for layer, each in enumerate(configs):
        each.check(mesh.heads.size)
        keys = manifest.length_of(layer)
        if keys > each.capacity:
            tokens_per_key = to_load.tokens_per_key[layer] if to_load.tokens_per_key else 1
            fix = f"pass capacity={keys * tokens_per_key}"
            raise ShapeError(
                "load", "room for the keys that were saved", f"{keys} in a capacity of {each.capacity}", fix
            )
    _check_memory(configs, mesh, device, part, padded=manifest.padded)
    ids = ids_in(TokenIds(folder / manifest.folder_name), manifest) if manifest.configs else None
    extra_tensors = {} if ids is None else {CACHED_IDS: ids}
    if not manifest.has_extra:
        return SavedLayers(manifest, folder, None, extra_tensors)
    file = TensorFile(folder / manifest.folder_name / MORE)
    shape = manifest.configs[0].batch, manifest.length
    token_mask = file.read("real", torch.bool, shape) if manifest.padded else None
    names = (name for name in file.entries if name.startswith("more ") and name != TOKEN_IDS)
    extra_tensors |= {name.removeprefix("more "): file.read(name) for name in names}
    return SavedLayers(manifest, folder, token_mask, extra_tensors)


def _configs_of(manifest: Manifest, to_load: LayersToLoad) -> tuple[CacheConfig, ...]:
    """Return the configurations of the caches to be filled, with room for all tokens of a folder that grows."""
    configs = to_load.configs(manifest.configs)
    if manifest.growing and to_load.capacity is None:
        return tuple(replace(each, capacity=max(each.capacity, manifest.length)) for each in configs)
    return configs


def part_of_rank(shares: Sequence[float] | None, mesh: RankMesh) -> float:
    """Return the part of all tokens that this rank's shard holds."""
    if shares is None:
        return 1 / (mesh.queries.size * mesh.keys.size)
    return shares[mesh.queries.index * mesh.keys.size + mesh.keys.index] / sum(shares)


def _check_memory(
    layers: Sequence[CacheConfig], mesh: RankMesh, device: torch.device, part: float, *, padded: bool
) -> None:
    """Raise if the device could not hold the layers: a damaged manifest may give any capacity."""
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else host_memory()
    needed = 0
    for config in layers:
        tokens = ceil(part * config.kept)
        elements = config.batch * config.kv_heads // mesh.heads.size * sum(config.row_widths)
        needed += tokens * (elements * config.row_dtype.itemsize + 8)
        needed += config.batch * (config.capacity + 8 * tokens) if padded else 0
    if needed > memory:
        given = f"{needed / 1e9:,.1f} GB for a capacity of {layers[0].capacity:,}"
        raise StoreError("load", f"at most this device's {memory / 1e9:,.1f} GB", given, "pass a smaller capacity=")
