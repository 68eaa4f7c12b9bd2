"""Incremental saves of caches to a folder while decoding continues.

A save links to the files of the previous save, and of interrupted ones, instead of writing the same tokens again. The
files of one that fails are removed. Those of one whose process was ended stay until the next save: its folder is locked
as long as a process writes there.
"""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from errno import EACCES
from functools import partial as partial_of
from pathlib import Path
from secrets import randbits
from typing import NamedTuple

from torch import Tensor

from attnmesh.cache.cache import KVCache
from attnmesh.cache.cache_shard import CacheShard
from attnmesh.cache.local_shards import LocalShards
from attnmesh.cache.saved_cache import SavedPieces, Saving
from attnmesh.errors import StoreError
from attnmesh.guard.agreement import Agreement
from attnmesh.store.layer_files import PIECE_TOKENS, TOKEN_INDEX, kv_names
from attnmesh.store.locks import WriterLock, try_lock, without_writers
from attnmesh.store.manifest import (
    MANIFEST,
    MORE,
    SAVE_NAME,
    Manifest,
    checked_folder,
    read_manifest,
    save_folders,
    write_manifest,
)
from attnmesh.store.piece_files import piece_files
from attnmesh.store.private_folder import make_folders
from attnmesh.store.tensor_file import (
    PART_SUFFIX,
    check_extra_tensors,
    checked_size,
    link_or_write,
    sync_folders,
)

PUBLISH_SECONDS = 60.0
"""Seconds to wait for another job that publishes to the same folder."""

MAX_PIECE_TOKENS = PIECE_TOKENS
"""Tokens of the longest file."""

MIN_PIECE_TOKENS = 64
"""Tokens of the shortest file but the last. A smaller number would make more files, and write fewer tokens again."""


class SavedGroup(NamedTuple):
    """This rank's tokens of layers that keep the same tokens, in tensors that an append leaves as they are."""

    leader: int
    """The first of these layers."""
    is_rewritten: bool
    """True if each save writes all files anew: slots may hold other tokens, or layers were in another group."""
    token_index: Tensor
    tensors: dict[str, Tensor]
    """Tensors by their names in a file."""

    @staticmethod
    def of(shards: Sequence[CacheShard], layers: Sequence[int], manifest: Manifest) -> "SavedGroup":
        """Return the group of these layers."""
        first = shards[layers[0]]
        saved_slots = slice(first.count_before(manifest.window_starts[layers[0]].oldest_kept_token), first.used_slots)
        kv_tensors = {
            name: x for layer in layers for name, x in zip(kv_names(layer), shards[layer].kv_tensors, strict=False)
        }
        tensors = {name: x[:, :, saved_slots] for name, x in kv_tensors.items()}
        rewritten = first.config.mask is not None or manifest.length_of(layers[0]) != manifest.length
        return SavedGroup(layers[0], rewritten, first.token_index[saved_slots], tensors)


def save_layers(
    caches: Sequence[KVCache],
    path: str | Path,
    *,
    extra_tensors: Mapping[str, Tensor] | None = None,
    note: str = "",
    wait: bool = True,
    lengths_differ: bool = False,
) -> Saving:
    """Write caches of the same tokens to one folder, as `KVCache.save` writes one. Every rank calls it.

    `extra_tensors` are the same on all ranks, and `note` is a text. `load_layers` returns both. `lengths_differ` says
    that keys of some layers stand for several tokens. A key of the first layer stands for one.
    """
    for cache in caches:
        if cache.saved_pieces.last is not None and not cache.saved_pieces.last.concluded:
            _wait_for_last(cache.saved_pieces.last)  # two saves at once would write the same files
    mesh = caches[0].rank_mesh
    saved_pieces = caches[0].saved_pieces
    shards = [cache.local_shards for cache in caches]
    is_shared = all(cache.saved_pieces is saved_pieces for cache in caches)
    if saved_pieces.cache_ids != tuple(map(id, caches)) or not is_shared:
        saved_pieces = SavedPieces(caches)
    is_coordinator = mesh.shard_index == 0
    with Agreement(mesh, "save") as agreement:
        own_shards = [cache.local_shards.join_pieces() for cache in caches]
        prepared = _prepare(path, shards, extra_tensors or {}, note, is_coordinator, lengths_differ)
        folder, manifest, tensors = prepared
        table = agreement.compare({"saving": manifest.save_number, "note": note}, payload=[randbits(62)])
    manifest = manifest._replace(name=f"{table[0][0]:016x}")
    groups = [SavedGroup.of(own_shards, layers, manifest) for layers in manifest.groups.values()]
    coordinates = (own_shards[0].heads_axis.index, own_shards[0].index)
    lock = WriterLock()
    write = partial_of(_write, folder, manifest, coordinates, groups, saved_pieces, tensors, lock)
    publish = partial_of(_publish, folder, manifest) if is_coordinator else lambda: None
    saved_pieces.last = Saving(mesh, write, publish, partial_of(_end, folder, manifest, coordinates, lock))
    for cache in caches:
        cache.saved_pieces = saved_pieces
    if wait:
        saved_pieces.last.wait()
    return saved_pieces.last


def _wait_for_last(last: Saving) -> None:
    """Wait until the save before is made, on all ranks. Raise if it failed, which no call has raised so far."""
    try:
        last.wait()
    except StoreError as error:
        _, _, reason, fix = error.args
        given, fix = f"one that failed: {reason}", f"{fix}, and call save again: neither save was made"
        raise StoreError("save", "the save before to be written", given, fix) from error


def _prepare(
    path: str | Path,
    layers: Sequence[LocalShards],
    extra_tensors: Mapping[str, Tensor],
    note: str,
    is_coordinator: bool,
    lengths_differ: bool,
) -> tuple[Path, Manifest, dict[str, Tensor]]:
    """Return the folder, the manifest without a name, and on the coordinator copies of tensors of no rank."""
    folder = checked_folder("save", path)
    shards = [layer.own for layer in layers]
    first = shards[0]
    check_extra_tensors(extra_tensors)
    by_layer = tuple(shard.length for shard in shards) if lengths_differ else ()
    lengths = sorted({shard.length for shard in (shards[:1] if lengths_differ else shards)})
    if len(lengths) > 1:
        given, fix = f"layers of {lengths} tokens", f"call truncate({lengths[0]}) on each layer"
        raise StoreError("save", "layers of the same tokens", given, fix)
    token_mask = first.token_mask
    configs = tuple(shard.config for shard in shards)
    padded = token_mask is not None
    manifest = Manifest(
        configs=configs,
        padded=padded,
        has_extra=padded or bool(extra_tensors),
        length=lengths[0],
        head_ranks=first.heads_axis.size,
        token_ranks=first.block_cyclic.ranks,
        save_number=_next_number(folder),
        note=note,
        name=f"{0:016x}",
        window_starts=tuple(layer.window_start for layer in layers),
        lengths=by_layer,
    )
    manifest.to_json()  # raises if it could not be read back
    if not is_coordinator:
        return folder, manifest, {}
    tensors = {f"more {name}": x.clone() for name, x in extra_tensors.items()}
    return folder, manifest, tensors | ({} if token_mask is None else {"real": token_mask.clone()})


def make_writable_folder(path: Path) -> None:
    """Make a folder if it is missing. Raise unless it can be written to."""
    with _store_errors(path):
        make_folders(path)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(EACCES, "Permission denied")


def _next_number(path: Path) -> int:
    """Return the number of the next save. Raise if the folder holds something else."""
    with _store_errors(path):
        if os.path.lexists(path / MANIFEST):
            try:
                return checked_size(read_manifest(path).save_number + 1)
            except ValueError as error:
                given = error.args[2] if isinstance(error, StoreError) else str(error)
                raise StoreError("save", "a folder of saves, or a new one", given, "pass another folder") from error
        if path.exists() and not path.is_dir():
            raise StoreError("save", "a folder that can be written to", str(path), "pass another path")
    return 1


def piece_slots(used: int) -> Iterator[tuple[int, int]]:
    """Yield the slots of each file: a cache that has grown keeps all its files but a few at the end.

    >>> list(piece_slots(4096 + 128 + 64 + 5))
    [(0, 4096), (4096, 4224), (4224, 4288), (4288, 4293)]
    """
    start = 0
    while start < used:
        size = MAX_PIECE_TOKENS
        while size > MIN_PIECE_TOKENS and start + size > used:
            size //= 2
        yield start, min(start + size, used)
        start += size


def _sweep(path: Path, manifest: Manifest, *, wholly: bool) -> None:
    """Remove what ended processes have left in interrupted saves: files that are cut off, or with `wholly` all.

    A folder in which a process writes is locked, and stays. So does every folder on a file system without locks.
    """
    current = _current(path)
    for save in save_folders(path):
        if save.name in (current, manifest.folder_name):
            continue
        with suppress(OSError), without_writers(save):
            if wholly:
                shutil.rmtree(save, ignore_errors=True)
            for file in save.glob(f"*{PART_SUFFIX}"):
                file.unlink(missing_ok=True)


def _current(path: Path) -> str | None:
    """Return the folder of the save that loads, None if there is none."""
    return read_manifest(path).folder_name if os.path.lexists(path / MANIFEST) else None


def _end(path: Path, manifest: Manifest, coordinates: tuple[int, int], lock: WriterLock, *, failed: bool) -> None:
    """Leave the folder of a save. Remove this rank's files there if it has failed, and what is left of others."""
    folder = path / manifest.folder_name
    with suppress(OSError, StoreError):  # a manifest that cannot be read may be of this save
        if failed and _current(path) != folder.name:
            for file in folder.glob("{}.{}.*".format(*coordinates)):
                file.unlink(missing_ok=True)
            if coordinates == (0, 0):
                (folder / MORE).unlink(missing_ok=True)
            with suppress(OSError):  # other ranks' files are still there
                folder.rmdir()
            _sweep(path, manifest, wholly=True)
    lock.release()


def _write(
    path: Path,
    manifest: Manifest,
    coordinates: tuple[int, int],
    groups: Sequence[SavedGroup],
    saved_pieces: SavedPieces,
    extra_tensors: Mapping[str, Tensor],
    lock: WriterLock,
) -> None:
    """Write this rank's tokens, linking to files of earlier saves that hold the same."""
    folder = path / manifest.folder_name
    with _store_errors(path):
        make_folders(folder)
        lock.hold(folder)
        with suppress(StoreError):
            _sweep(path, manifest, wholly=False)
        saves = [other for other in save_folders(path) if other != folder]
        earlier = [*saves[:2], *saves[2:][-1:]]  # not all: a full disk may leave many interrupted saves
        group_pieces = ((group, piece) for group in groups for piece in piece_slots(len(group.token_index)))
        for group, (start, stop) in group_pieces:
            tensors = {name: x[:, :, start:stop] for name, x in group.tensors.items()}
            tensors |= {TOKEN_INDEX: group.token_index[start:stop]}
            suffix = f".{group.leader}" if group.leader else ""
            name = "{}.{}.{}-{}{}.safetensors".format(*coordinates, start, stop, suffix)
            if group.is_rewritten:
                link_or_write(folder / name, tensors)
                continue
            checksums = saved_pieces.get((start, stop))
            trusted = None if saved_pieces.folder is None or checksums is None else saved_pieces.folder / name
            paths = [other / name for other in earlier]
            saved_pieces[start, stop] = link_or_write(folder / name, tensors, paths, trusted, checksums)
        if extra_tensors:
            link_or_write(folder / MORE, extra_tensors)
        saved_pieces.folder = folder
        sync_folders(folder, path, path.parent)


def _publish(path: Path, manifest: Manifest) -> None:
    """Make this save the current one and remove older ones, while no other job publishes to the folder."""
    with _store_errors(path), _lock_folder(path):
        os.stat(path / manifest.folder_name)
        _check_complete(path, manifest)
        write_manifest(path, manifest)
        with suppress(OSError):  # this save is published, so older ones may stay
            for save in save_folders(path):
                if save.name != manifest.folder_name:
                    shutil.rmtree(save, ignore_errors=True)
            for interrupted in path.glob(f"{MANIFEST}.*"):  # manifests of interrupted saves
                if SAVE_NAME.fullmatch(interrupted.suffix[1:]):
                    interrupted.unlink(missing_ok=True)


@contextmanager
def _lock_folder(path: Path) -> Iterator[None]:
    """Hold the lock of a folder, on a file system that has locks."""
    handle = os.open(path, os.O_RDONLY)
    try:
        if not try_lock(handle, PUBLISH_SECONDS):
            given, fix = f"{path}, locked for {PUBLISH_SECONDS:g} s", "pass another folder, or end the other job"
            raise StoreError("save", "one save at a time in a folder", given, fix)
        yield
    finally:
        os.close(handle)


def _check_complete(path: Path, manifest: Manifest) -> None:
    """Raise unless all ranks' files are in the folder: hosts may have local disks at the same path."""
    tokens = sum(piece.stop - piece.start for piece in piece_files(path, manifest)) // manifest.head_ranks
    if tokens != manifest.tokens_in_files:
        given = f"{tokens} of {manifest.tokens_in_files} tokens in {path}"
        fix = "pass one folder, on a disk that all ranks share"
        raise StoreError("save", "a folder that all ranks write to", given, fix)


@contextmanager
def _store_errors(path: Path) -> Iterator[None]:
    """Raise the system's errors as `StoreError`."""
    try:
        yield
    except OSError as error:
        if isinstance(error, FileNotFoundError) and path.is_dir():
            # The job that publishes first removes the files of others.
            given, fix = f"{path}, where another job saved first", "pass a folder of its own to each job"
            raise StoreError("save", "one save at a time in a folder", given, fix) from error
        given, fix = f"{str(path)!r} ({error.strerror})", "check the path and the free space"
        raise StoreError("save", "a folder that can be written to", given, fix) from error
