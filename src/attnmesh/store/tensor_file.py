"""Tensors in a safetensors file, each with a checksum; reading executes nothing.

        8 bytes     length of the header
        header      JSON: dtype, shape and byte range of each tensor, and its checksum as metadata
        the rest    the tensors without gaps

The `safetensors` package cannot replace this file: the core depends on torch alone, and the package verifies no
checksums. All sizes in a header are checked against the file's own size before any memory is reserved.
"""

import ctypes
import errno
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from attnmesh.core.digest import wide_bits
from attnmesh.errors import StoreError
from attnmesh.kernels.native.native_digest import digest_on_cpu
from attnmesh.runtime.mapped_file import PAGE, MappedFile
from attnmesh.runtime.memory import host_memory

DTYPES_BY_NAME = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
"""Supported dtypes, by their names in the format."""

MAX_HEADER = 1 << 24
"""Bytes of a header that is read, at most: a damaged length must not take more memory."""

MAX_SIZE = 1 << 48
"""Limit of any single number in a header."""

MAX_DIMS = 8
"""Dimensions of a tensor that is read, at most."""

ALWAYS_FITS_BYTES = 1 << 26
"""Bytes of a tensor that fits any memory: to find out how much there is takes a millisecond."""

PRIVATE_FILE = 0o600
"""Mode of what is saved: prompts can be read in keys and tokens."""

PART_SUFFIX = ".part"
"""End of the name of a file that is being written."""

DAMAGED_FIX = "restore the folder from a copy, or save to another"


class Entry(NamedTuple):
    """Tensor in a file: its dtype, shape, byte range and checksum."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int
    checksum: int


def link_or_write(
    path: Path,
    tensors: Mapping[str, Tensor],
    candidates: Iterable[Path] = (),
    trusted: Path | None = None,
    checksums: Mapping[str, int] | None = None,
) -> Mapping[str, int]:
    """Link `path` to one of `candidates` that holds the tensors, or write them. Return their checksums.

    Known `checksums` are not computed again. A `trusted` file, written by this process, is not read to verify it.
    """
    checksums = checksums or checksums_of(tensors)
    for candidate in candidates:
        if _holds(candidate, tensors, checksums, verify=candidate != trusted):
            with suppress(OSError):  # a file system without links
                os.link(candidate, path)
                path.chmod(PRIVATE_FILE)  # it may be of an earlier version
                return checksums
    write_tensors(path, tensors, checksums)
    return checksums


def _holds(path: Path, tensors: Mapping[str, Tensor], checksums: Mapping[str, int], *, verify: bool) -> bool:
    """Return True if a file's header describes these tensors and, with `verify`, its contents match the header."""
    expected = {name: (x.dtype, tuple(x.shape), checksums[name]) for name, x in tensors.items()}
    try:
        file = TensorFile(path)
        if {name: (entry.dtype, entry.shape, entry.checksum) for name, entry in file.entries.items()} != expected:
            return False
        for name in expected if verify else ():
            file.read(name)
    except StoreError:
        return False
    return True


def checksums_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the checksum of each tensor."""
    return {name: tensor_checksum(x.cpu()) for name, x in tensors.items()}


def tensor_checksum(x: Tensor) -> int:
    """Return the checksum of a tensor in a file: the digest of the widest integers that its rows are made of."""
    return digest_on_cpu(wide_bits(torch.atleast_1d(x)))


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], checksums: Mapping[str, int], *, waits_for_disk: bool = True
) -> None:
    """Write tensors and their checksums. The file appears under its name only once it has all of them, on the disk too.

    Without `waits_for_disk` a machine that loses power may leave the name of a file that is not whole.
    """
    begin, _ = header_of({name: (x.dtype, tuple(x.shape)) for name, x in tensors.items()}, checksums)
    with appearing(path, path.with_name(f"{path.name}{PART_SUFFIX}"), waits_for_disk=waits_for_disk) as file:
        file.write(begin)
        for x in tensors.values():
            flat = x.detach().contiguous().cpu()  # a name keeps the buffer's memory alive
            file.write(_buffer(flat))


def header_of(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], checksums: Mapping[str, int]
) -> tuple[bytes, int]:
    """Return the first bytes of a file of these tensors, in whole pages, and the size of the file.

    The number of first bytes does not depend on the checksums: a file may get its checksums once its tensors are whole.
    """
    names = {dtype: name for name, dtype in DTYPES_BY_NAME.items()}
    header: dict[str, Any] = {"__metadata__": {name: f"{checksum:+021d}" for name, checksum in checksums.items()}}
    start = 0
    for name, (dtype, shape) in tensors.items():
        stop = start + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    return len(text).to_bytes(8, "little") + text, 8 + len(text) + start


@contextmanager
def appearing(path: Path, part: Path, *, waits_for_disk: bool = True) -> Iterator[BinaryIO]:
    """Open a file of this user alone, which gets its name at the end. One that fails is removed."""
    try:
        with open(part, "wb", opener=lambda name, flags: os.open(name, flags, PRIVATE_FILE)) as file:
            yield file
            file.flush()
            if waits_for_disk:
                os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def _buffer(x: Tensor) -> Any:
    """Return the memory of a contiguous tensor as a buffer, without a copy."""
    return (ctypes.c_char * x.nbytes).from_address(x.data_ptr()) if x.nbytes else bytearray()


def sync_folders(*folders: Path) -> None:
    """Flush folders to disk. Otherwise a power failure may lose the name of a complete file."""
    for folder in folders:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno != errno.EINVAL:  # raised by file systems that cannot flush folders
                raise
        finally:
            os.close(handle)


class TensorFile:
    """File of tensors with a checked header. Each tensor is checked when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            size = path.stat().st_size
            if not path.is_file():  # opening a pipe would wait for a writer
                raise ValueError("not a regular file")
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if not 2 <= length <= min(MAX_HEADER, size - 8):
                    raise ValueError(f"a header of {length} bytes in a file of {size}")
                header = json.loads(file.read(length))
            self.start = 8 + length
            self.entries = _entries(header, size - self.start)
        except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
            expected, given = "a file that KVCache.save wrote", f"{path} ({type(error).__name__}: {error})"
            raise StoreError("load", expected, given, "check the path, or save again") from error

    def read(self, name: str, dtype: torch.dtype | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        """Return a tensor. Raise if it is missing, damaged, or not of the expected dtype and shape."""
        entry = self.entry(name, dtype, shape)
        size = entry.stop - entry.start
        if size > ALWAYS_FITS_BYTES and size > host_memory():
            given = f"{size / 1e9:,.1f} GB in {name!r} in {self.path}"
            raise StoreError("load", f"at most this host's {host_memory() / 1e9:,.1f} GB", given, DAMAGED_FIX)
        tensor = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        try:
            with self.path.open("rb") as file:
                file.seek(self.start + entry.start)
                byte_count = file.readinto(_buffer(tensor))
        except OSError as error:
            given = f"{name!r} in {self.path} ({error.strerror})"
            raise StoreError("load", "files as they were written", given, DAMAGED_FIX) from error
        self.check(name, tensor, byte_count == size)
        return tensor

    def entry(self, name: str, dtype: torch.dtype | None = None, shape: tuple[int, ...] | None = None) -> Entry:
        """Return what the header has of a tensor. Raise if it is missing, or not of the expected dtype and shape."""
        if name not in self.entries:
            raise StoreError("load", "a cache that KVCache.save wrote", f"no {name!r} in {self.path}", DAMAGED_FIX)
        entry = self.entries[name]
        if dtype not in (None, entry.dtype) or shape not in (None, entry.shape):
            raise StoreError(
                "load", f"{name!r} as {dtype} {shape}", f"{entry.dtype} {entry.shape} in {self.path}", DAMAGED_FIX
            )
        return entry

    def map_tensor(self, file: MappedFile, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor in place, unchecked. Raise if it is missing, or not of the expected dtype and shape."""
        return file.tensor(self.start + self.entry(name, dtype, shape).start, dtype, shape)

    def check(self, name: str, tensor: Tensor, whole: bool = True) -> None:
        """Raise unless a tensor was read whole and is as it was written."""
        if not whole or tensor_checksum(tensor) != self.entries[name].checksum:
            raise StoreError("load", "files as they were written", f"damage in {name!r} in {self.path}", DAMAGED_FIX)


def _entries(header: Any, size: int) -> dict[str, Entry]:
    """Return the entries of a header. Raise unless its tensors fill `size` bytes without gap or overlap."""
    if not isinstance(header, dict):
        raise ValueError(f"a header of type {type(header).__name__}")
    checksums = dict(header.pop("__metadata__"))
    entries = {}
    for name, fields in header.items():
        start, stop = (checked_size(x) for x in fields["data_offsets"])
        shape = tuple(checked_size(dim_size) for dim_size in fields["shape"])
        dtype = DTYPES_BY_NAME[fields["dtype"]]
        large = len(shape) > MAX_DIMS or math.prod(max(dim_size, 1) for dim_size in shape) > MAX_SIZE
        if large or start > stop or stop > size or math.prod(shape) * dtype.itemsize != stop - start:
            raise ValueError(f"{name!r} has a byte range that does not match its shape or the file")
        entries[name] = Entry(dtype, shape, start, stop, int(str(checksums[name])))
    ranges = sorted((entry.start, entry.stop) for entry in entries.values())
    if [start for start, _ in ranges] + [size] != [0] + [stop for _, stop in ranges]:
        raise ValueError("tensors that overlap, or gaps between them")
    return entries


def check_extra_tensors(extra_tensors: object) -> None:
    """Raise unless `extra_tensors` maps names to tensors that a file can hold."""
    fix = "pass a dict of names to tensors"
    if not isinstance(extra_tensors, Mapping):
        raise StoreError("save more", "tensors by their names", type(extra_tensors).__name__, fix)
    for name, x in extra_tensors.items():
        if not isinstance(name, str) or not isinstance(x, Tensor):
            raise StoreError("save more", "tensors by their names", f"{name!r}: {type(x).__name__}", fix)
        if x.dtype not in DTYPES_BY_NAME.values() or x.layout != torch.strided or x.ndim > MAX_DIMS:
            dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES_BY_NAME.values())
            expected = f"dense tensors of {dtypes}, of {MAX_DIMS} dims at most"
            given, fix = f"{name!r} as {x.dtype}, {x.layout}, of {x.ndim} dims", "call .to_dense() and .to() on it"
            raise StoreError("save more", expected, given, fix)


def checked_size(x: Any) -> int:
    """Return `x` if it is an integer that a size can be. Raise otherwise."""
    if isinstance(x, bool) or not isinstance(x, int) or not 0 <= x < MAX_SIZE:
        raise ValueError(f"{str(x)[:20]!r} where a size should be")
    return x
