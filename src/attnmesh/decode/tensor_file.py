"""Tensors in a file of the safetensors format, each with a sum that tells damage; nothing that is read is ever run.

        8 bytes     the length of the header
        header      JSON: for each tensor its dtype, its shape, and from which byte to which it lies behind the header
        the rest    the tensors, one behind the other

What a file says of itself is checked against its own size before any memory is reserved.
"""

import ctypes
import errno
import json
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnmesh.core.digest import digest
from attnmesh.errors import StoreError

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
"""Those that a cache has, by their names in the format."""

LONGEST = 1 << 24
"""Bytes of the longest header that is read."""

FIX = "restore the folder from a copy, or save to another"

DIMS = 8
"""Dimensions that a tensor has at most."""


class Entry(NamedTuple):
    """A tensor in a file: what it is, where it lies, and its sum."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int
    sum: int


def link_or_write(
    path: Path,
    tensors: Mapping[str, Tensor],
    others: Iterable[Path] = (),
    own: Path | None = None,
    sums: Mapping[str, int] | None = None,
) -> Mapping[str, int]:
    """Write them, unless one of the others holds them, to which this file then becomes a link; gives their sums.

    Sums that are known are not made once more, and a file that is this process's `own` is not read.
    """
    sums = sums or {name: int(digest(x)) for name, x in tensors.items()}
    for other in others:
        if _holds(other, tensors, sums, read=other != own):
            with suppress(OSError):  # a disk that has no links has it written once more
                os.link(other, path)
                return sums
    write(path, tensors, sums)
    return sums


def _holds(path: Path, tensors: Mapping[str, Tensor], sums: Mapping[str, int], *, read: bool) -> bool:
    """Whether a file is of these tensors: by what it says, and if it is to be read by what it has."""
    try:
        stored = Stored(path)
        wanted = {name: (x.dtype, tuple(x.shape)) for name, x in tensors.items()}
        if {name: (entry.dtype, entry.shape) for name, entry in stored.entries.items()} != wanted:
            return False
        if any(entry.sum != sums[name] for name, entry in stored.entries.items()):
            return False
        for name, (dtype, shape) in wanted.items() if read else ():
            stored.read(name, dtype, shape)
    except StoreError:
        return False
    return True


def write(path: Path, tensors: Mapping[str, Tensor], sums: Mapping[str, int]) -> None:
    """All of them with their sums, in one go: the file has its name when the disk has all of it."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {name: str(number) for name, number in sums.items()}}
    place = 0
    for name, x in tensors.items():
        size = x.numel() * x.element_size()
        header[name] = {"dtype": names[x.dtype], "shape": list(x.shape), "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for x in tensors.values():
            flat = x.detach().contiguous().cpu()
            size = flat.numel() * flat.element_size()
            file.write((ctypes.c_char * size).from_address(flat.data_ptr()) if size else b"")
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def settle(*folders: Path) -> None:
    """Until the disk has the names that were given in these: a file that is whole may else be lost with its name."""
    for folder in folders:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno != errno.EINVAL:  # of file systems on which there is nothing to wait for
                raise
        finally:
            os.close(handle)


class Stored:
    """A file that `write` wrote, or that says so."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            size = path.stat().st_size
            if not path.is_file():  # to open a pipe would be to wait for whoever writes to it
                raise ValueError("no file")
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if not 2 <= length <= min(LONGEST, size - 8):
                    raise ValueError("a header of no such length")
                header = json.loads(file.read(length))
            self.start = 8 + length
            self.entries = _entries(header, size - self.start)
        except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
            expected, given = "a file that KVCache.save wrote", f"{path} ({type(error).__name__}: {error})"
            raise StoreError("load", expected, given, "check the path, or save again") from error

    def read(self, name: str, dtype: torch.dtype | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        """The tensor of that name; an error if it is not there, is another than is wanted, or not what was written."""
        if name not in self.entries:
            raise StoreError("load", "a cache that KVCache.save wrote", f"no {name!r} in {self.path}", FIX)
        entry = self.entries[name]
        if entry.dtype != (dtype or entry.dtype) or entry.shape != (entry.shape if shape is None else shape):
            given = f"{entry.dtype} {entry.shape} in {self.path}"
            raise StoreError("load", f"{name!r} as {dtype} {shape}", given, FIX)
        size = entry.stop - entry.start
        if size > memory():
            given = f"{size / 1e9:,.1f} GB in {name!r} in {self.path}"
            raise StoreError("load", f"at most this host's {memory() / 1e9:,.1f} GB", given, FIX)
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        try:
            with self.path.open("rb") as file:
                file.seek(self.start + entry.start)
                got = file.readinto((ctypes.c_char * size).from_address(tensor.data_ptr())) if size else 0
        except OSError as error:
            given = f"{name!r} in {self.path} ({error.strerror})"
            raise StoreError("load", "files as they were written", given, FIX) from error
        if got != size or int(digest(tensor)) != entry.sum:
            raise StoreError("load", "files as they were written", f"damage in {name!r} in {self.path}", FIX)
        return tensor


def _entries(header: Any, room: int) -> dict[str, Entry]:
    """What a header says, if that can be: whole numbers, and tensors that fill the room without a gap."""
    if not isinstance(header, dict):
        raise ValueError("a header that is none")
    sums = dict(header.pop("__metadata__"))
    entries, places = {}, []
    for name, said in header.items():
        start, stop = (whole(x) for x in said["data_offsets"])
        shape, dtype = tuple(whole(n) for n in said["shape"]), DTYPES[said["dtype"]]
        many = len(shape) > DIMS or math.prod(max(n, 1) for n in shape) > 1 << 48
        if many or start > stop or stop > room or math.prod(shape) * dtype.itemsize != stop - start:
            raise ValueError(f"{name!r} does not lie where it should")
        entries[name] = Entry(dtype, shape, start, stop, int(str(sums[name])))
        places.append((start, stop))
    places.sort()
    if [start for start, _ in places] + [room] != [0] + [stop for _, stop in places]:
        raise ValueError("tensors that overlap, or gaps between them")
    return entries


def check_more(more: object) -> None:
    """Raise unless these are named tensors that a file can hold."""
    fix = "pass a dict of names to tensors"
    if not isinstance(more, Mapping):
        raise StoreError("save more", "tensors by their names", type(more).__name__, fix)
    for name, x in more.items():
        if not isinstance(name, str) or not isinstance(x, Tensor):
            raise StoreError("save more", "tensors by their names", f"{name!r}: {type(x).__name__}", fix)
        if x.dtype not in DTYPES.values() or x.layout != torch.strided or x.ndim > DIMS:
            kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES.values())
            given = f"{name!r} as {x.dtype}, {x.layout}, of {x.ndim} dims"
            raise StoreError("save more", f"dense tensors of {kinds}, of {DIMS} dims at most", given, "convert it")


def memory() -> int:
    """Bytes that this host has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def whole(x: Any) -> int:
    """A number or a size that a file says, if it can be one."""
    if isinstance(x, bool) or not isinstance(x, int) or not 0 <= x < 1 << 48:
        raise ValueError(f"{str(x)[:20]!r} where a size should be")
    return x
