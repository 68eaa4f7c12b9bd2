"""A folder of stored blocks, which one engine uses at a time.

        lock                                        held by the first rank as long as an engine uses the folder
        writers                                     held by each other rank until it has written its last file
        5f3a..e1.0-128.0-1.safetensors              the first 128 tokens, of all key heads
        77c0..09.992-1003.state.2-4.safetensors     what the third of four ranks knew after 1,003 tokens
        9d41..5a.layers.safetensors                 configurations of the layers of one model

A file is named by the hash of what its keys were computed from, and says so inside. It gets its name once it is whole,
so that a killed process leaves parts, which no one reads and the next engine removes.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from secrets import randbits

import torch
from torch import Tensor

from attnmesh.cache.cache_config import CacheConfig
from attnmesh.errors import StoreError
from attnmesh.store.block_names import StoredBlock
from attnmesh.store.locks import try_lock
from attnmesh.store.manifest import checked_folder
from attnmesh.store.private_folder import check_private, make_folders
from attnmesh.store.tensor_file import (
    DAMAGED_FIX,
    PART_SUFFIX,
    PRIVATE_FILE,
    TensorFile,
    checksums_of,
    write_tensors,
)

STORE_SUBJECT = "store"
"""First word of errors about a folder of blocks."""

LOCK_FILE, WRITERS, NAME_TENSOR = "lock", "writers", "name"

LAYERS_SUFFIX = ".layers.safetensors"
"""End of the name of a file with the configurations of layers."""


def make_private_folder(path: object) -> Path:
    """Make a folder of this user alone if it is missing, and return it. Raise if others own it, or can write to it."""
    folder = checked_folder(STORE_SUBJECT, path)
    try:
        make_folders(folder)
        check_private(STORE_SUBJECT, folder)
    except OSError as error:
        given, fix = f"{folder} ({error.strerror})", "name another folder"
        raise StoreError(STORE_SUBJECT, "a folder that can be made", given, fix) from None
    return folder


class FolderLock:
    """A lock on a folder until `release` or the end of the process. With `shared` several processes hold it at once.

    On a file system without locks it keeps no process out.
    """

    def __init__(self, folder: Path, name: str = LOCK_FILE, *, patience: float = 0.0, shared: bool = False) -> None:
        """Take the lock within `patience` seconds, or raise."""
        try:
            self.handle = os.open(folder / name, os.O_RDWR | os.O_CREAT, PRIVATE_FILE)
        except OSError as error:
            given, fix = f"{folder} ({error.strerror})", "name another folder"
            raise StoreError(STORE_SUBJECT, "a folder that can be written to", given, fix) from None
        if not try_lock(self.handle, patience, shared=shared):
            os.close(self.handle)
            given, fix = f"{folder}, which another server uses", "name another folder, or end that server"
            raise StoreError(STORE_SUBJECT, "a folder of one server", given, fix)

    def write_number(self) -> int:
        """Leave a number in the file, by which other hosts see that they have the same folder."""
        number = randbits(62)
        os.pwrite(self.handle, f"{number:020}".encode(), 0)
        return number

    def release(self) -> None:
        """Let others use the folder."""
        os.close(self.handle)


def check_seen(folder: Path, number: int) -> None:
    """Raise unless the lock of a folder has this number."""
    with suppress(OSError, ValueError):
        if int((folder / LOCK_FILE).read_text(encoding="utf-8")) == number:
            return
    given, fix = f"{folder} of another host", "name a folder on a disk that all ranks share"
    raise StoreError(STORE_SUBJECT, "a folder that all ranks see", given, fix)


class BlockFolder:
    """The files of a folder. Their names are hashes, so the files of several models may stand beside each other."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def scan(self) -> dict[StoredBlock, int]:
        """Return the bytes of each whole block, least recently used first. Remove what is not whole.

        The caller holds the folder's lock, so no other process writes here.
        """
        stats_by_block: dict[StoredBlock, dict[int, os.stat_result]] = {}
        for entry in os.scandir(self.path):
            if not entry.is_file(follow_symlinks=False):
                continue
            if entry.name.endswith(PART_SUFFIX):
                Path(entry.path).unlink(missing_ok=True)
            elif (named := StoredBlock.of_file(entry.name)) is not None:
                block, file_number = named
                stats_by_block.setdefault(block, {})[file_number] = entry.stat(follow_symlinks=False)
        block_bytes = {}
        for block, stats in sorted(stats_by_block.items(), key=lambda item: max(x.st_mtime for x in item[1].values())):
            if {*stats} == {*range(block.file_count)}:
                block_bytes[block] = sum(x.st_size for x in stats.values())
            else:
                self.remove(block)
        return block_bytes

    def size(self, block: StoredBlock) -> int:
        """Return the bytes of a block; 0 if not all of it is there."""
        try:
            return sum(path.stat().st_size for path in self._files(block))
        except OSError:
            return 0

    def write(self, block: StoredBlock, file_number: int, tensors: Mapping[str, Tensor]) -> None:
        """Write one file of a block, which appears once it is whole.

        This does not wait for the disk. A file that was not there when power failed is damaged: its block is computed
        again.
        """
        with_name = {NAME_TENSOR: _bytes_of(block.name), **tensors}
        write_tensors(self.path / block.file(file_number), with_name, checksums_of(with_name), waits_for_disk=False)

    def read(self, block: StoredBlock, file_number: int) -> dict[str, Tensor]:
        """Return the tensors of one file of a block. Raise if it is missing or damaged, or is another block's."""
        return _tensors_of(self.path / block.file(file_number), block.name)

    def remove(self, block: StoredBlock) -> None:
        """Remove the files of a block."""
        for path in self._files(block):
            with suppress(OSError):
                path.unlink()

    def touch(self, block: StoredBlock) -> None:
        """Note in the files that a block was used now, for engines that use the folder later."""
        for path in self._files(block):
            with suppress(OSError):
                os.utime(path)

    def _files(self, block: StoredBlock) -> list[Path]:
        return [self.path / block.file(file_number) for file_number in range(block.file_count)]

    def write_layers(self, name: str, layers: Sequence[CacheConfig]) -> None:
        """Write the configurations of a model's layers."""
        tensors = {str(layer): torch.tensor(config.to_code(), device="cpu") for layer, config in enumerate(layers)}
        with_name = {NAME_TENSOR: _bytes_of(name), **tensors}
        write_tensors(self.path / f"{name}{LAYERS_SUFFIX}", with_name, checksums_of(with_name), waits_for_disk=False)

    def read_layers(self, name: str) -> list[CacheConfig]:
        """Return the configurations of a model's layers. Raise if there are none, or if they are damaged."""
        tensors = _tensors_of(self.path / f"{name}{LAYERS_SUFFIX}", name)
        try:
            return [CacheConfig.from_code(tensors[str(layer)].tolist()) for layer in range(len(tensors))]
        except (KeyError, ValueError, IndexError, TypeError) as error:
            given = f"{self.path} ({type(error).__name__})"
            raise StoreError("load", "sizes of layers", given, DAMAGED_FIX) from error


def _tensors_of(path: Path, name: str) -> dict[str, Tensor]:
    file = TensorFile(path)
    tensors = {name: file.read(name) for name in file.entries}
    own = tensors.pop(NAME_TENSOR, torch.empty(0, dtype=torch.uint8, device="cpu"))
    if own.dtype != torch.uint8 or bytes(own.flatten().tolist()).hex() != name:
        raise StoreError("load", f"a file of {name}", f"another's in {path}", DAMAGED_FIX)
    return tensors


def _bytes_of(name: str) -> Tensor:
    return torch.tensor([*bytes.fromhex(name)], dtype=torch.uint8, device="cpu")
