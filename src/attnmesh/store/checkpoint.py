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
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.cache.cache import KVCache
from attnmesh.cache.cache_config import CacheConfig
from attnmesh.cache.cache_shard import CacheShard
from attnmesh.cache.local_shards import LocalShards, checked_placement
from attnmesh.cache.saved_cache import LayersToLoad
from attnmesh.errors import ShapeError, StoreError
from attnmesh.guard.agreement import Agreement
from attnmesh.mesh.axes import Axis, RankMesh, intersect
from attnmesh.runtime.memory import host_memory
from attnmesh.setup.init_mesh import device_fault, device_for
from attnmesh.store.layer_files import TOKEN_INDEX, LastPieceFile
from attnmesh.store.manifest import MORE, Manifest, checked_folder, read_manifest
from attnmesh.store.piece_files import PieceFile, growing_pieces, piece_files, with_length_now
from attnmesh.store.tensor_file import DAMAGED_FIX, TensorFile
from attnmesh.store.token_ids import TOKEN_IDS, TokenIds, ids_in

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
    options = {"device": device, "checked": checked, "copies": copies, "shares": shares}
    for attempt in range(MAX_ATTEMPTS):
        loaded = _load_once(make, path, device_mesh, to_load, options, again=attempt + 1 < MAX_ATTEMPTS)
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
    again: bool,
) -> tuple[list[Cache], dict[str, Tensor], str] | None:
    """Return what `load_layers` does; on all ranks None if the folder has changed meanwhile, to be read `again`."""
    mesh = RankMesh.of(device_mesh)
    before = _state_of(path)
    with Agreement(mesh, "load") as agreement:
        saved_layers = _unless_changed(
            lambda: _checked_layers(path, device_mesh, to_load, **options), path, before, again=again
        )
        own_manifest = None if saved_layers is None else saved_layers.manifest
        fields = {"of": None if again else own_manifest, "capacity": to_load.capacity, "shares": options["shares"]}
        numbers = [0, 0] if own_manifest is None else [int(own_manifest.name, 16) >> 2, own_manifest.length]
        table = agreement.compare(fields, payload=numbers)
    if saved_layers is None or len({name for name, _ in table}) > 1:
        return None
    manifest, folder, token_mask, extra_tensors = saved_layers
    length = min(length for _, length in table)  # ranks may have read a growing folder one after the other
    manifest = manifest._replace(length=length)
    if manifest.growing and "held" in extra_tensors:
        extra_tensors["held"] = extra_tensors["held"][:, :length]
    caches = make_alike(make, device_mesh, _configs_of(manifest, to_load), **options)

    def read() -> bool:
        fill([cache.local_shards for cache in caches], folder, manifest)
        return True

    with torch.no_grad():
        with Agreement(mesh, "load") as agreement:
            is_read = bool(_unless_changed(read, path, before, again=again))
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


def _unless_changed(read: Callable[[], T], path: object, before: FolderState, *, again: bool) -> T | None:
    """Return what `read` returns of a folder. If it changed since `before`, return None to read `again`, or raise."""
    try:
        return read()
    except StoreError as error:
        if (now := _state_of(path)) == before:
            raise
        if again:
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
    checked: bool | None,
    copies: int,
    shares: Sequence[float] | str | None,
) -> SavedLayers:
    """Return the saved layers of a folder. Raise if caches with these options could not take them on this rank."""
    target = device_for(device_mesh, device)
    if fault := device_fault("load", target, device):
        raise fault
    mesh = RankMesh.of(device_mesh)
    parts = checked_placement("load", copies, shares, mesh.queries.size * mesh.keys.size)
    share = 0.0 if shares == "auto" else held_part(parts, mesh)
    shard_device = target if to_load.hot is None else torch.device("cpu")
    return read_saved_layers(path, mesh, shard_device, to_load, copies * share)


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
    extra_tensors = {} if ids is None else {"held": ids}
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


def held_part(shares: Sequence[float] | None, mesh: RankMesh) -> float:
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


def fill(layers: Sequence[LocalShards], path: Path, manifest: Manifest) -> None:
    """Write this rank's tokens into its shards, one per layer, from the files of all ranks that saved."""
    for layer, (shards, start) in enumerate(zip(layers, manifest.window_starts, strict=True)):
        shards.prepare(manifest.length_of(layer), start)
    if manifest.growing:
        for layer, shards in enumerate(layers):
            _fill_group({layer: shards.own.join_pieces()}, path, manifest, [*growing_pieces(path, manifest, layer)])
        return
    pieces = list(piece_files(path, manifest))
    for leader, group in manifest.groups.items():
        own = {layer: layers[layer].own.join_pieces() for layer in group}
        _fill_group(own, path, manifest, [piece for piece in pieces if piece.leader == leader])


def _fill_group(shards: Mapping[int, CacheShard], path: Path, manifest: Manifest, pieces: Sequence[PieceFile]) -> None:
    """Write this rank's tokens into its shards of layers that keep the same tokens."""
    leader, first = next(iter(shards.items()))
    start = manifest.window_starts[leader].oldest_kept_token
    end = manifest.length_of(leader)
    forgotten = first.turn.count(start)
    used = first.turn.count(end) - forgotten
    # Tokens read, by their file's index along heads.
    filled = torch.zeros(manifest.head_ranks, used, dtype=torch.bool, device="cpu")
    for piece in pieces:
        file = piece.open()
        tokens = file.read(TOKEN_INDEX, torch.int64, (piece.stop - piece.start,))
        own_indices = (first.turn.holds(tokens) & (tokens < end)).nonzero().flatten()
        slots = first.turn.slot(tokens[own_indices]) - forgotten
        if len(tokens) and (int(tokens.min()) < start or (int(tokens.max()) >= end and not manifest.growing)):
            raise StoreError("load", "every token once", f"tokens beyond the last in {piece.path}", DAMAGED_FIX)
        if bool(filled[piece.head_rank, slots].any()) or len(slots.unique()) < len(slots):
            raise StoreError("load", "every token once", f"some twice in {piece.path}", DAMAGED_FIX)
        filled[piece.head_rank, slots] = True
        for layer, shard in shards.items() if len(own_indices) else ():
            _copy_heads(shard, file, layer, Axis(manifest.head_ranks, piece.head_rank), own_indices, slots, len(tokens))
        first.token_index[slots.to(first.device)] = tokens[own_indices].to(first.device)
    for shard in shards.values():
        shared = [
            _shared_heads(shard, Axis(manifest.head_ranks, head_rank))[0] for head_rank in range(manifest.head_ranks)
        ]
        needed = [to.start < to.stop for to in shared]
        if not bool(filled[needed].all()):
            given = f"{int(filled[needed].all(0).sum())} of this rank's {used} tokens in {path}"
            raise StoreError("load", "every token once", given, DAMAGED_FIX)
        shard.token_index[:used] = first.token_index[:used]


def _copy_heads(
    shard: CacheShard,
    file: TensorFile | LastPieceFile,
    layer: int,
    file_axis: Axis,
    own_indices: Tensor,
    slots: Tensor,
    token_count: int,
) -> None:
    """Copy this rank's heads and tokens of a file written at `file_axis` of the heads."""
    to, source = _shared_heads(shard, file_axis)
    if to.start >= to.stop:
        return
    config = shard.config
    heads = file_axis.slice_of(shard.config.kv_heads)
    for kind, x in zip(("keys", "values"), shard.kv_tensors, strict=False):
        file_tensor = file.read(
            f"{kind} {layer}", x.dtype, (config.batch, heads.stop - heads.start, token_count, x.shape[3])
        )
        x[:, to].index_copy_(2, slots.to(shard.device), file_tensor[:, source, own_indices].to(shard.device))


def _shared_heads(shard: CacheShard, file_axis: Axis) -> tuple[slice, slice]:
    """Return slices of the heads of a shard and of a saved file that are the same heads; they may be empty."""
    return intersect(shard.heads_axis.slice_of(shard.config.kv_heads), file_axis.slice_of(shard.config.kv_heads))
