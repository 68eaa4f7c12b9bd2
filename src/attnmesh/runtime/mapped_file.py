"""Files as memory: pages are read before they are needed, and given back after it where a file exceeds memory."""

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE
"""Bytes of a page of memory."""

ADVICE = 1 << 19
"""Bytes of one advice to read: Linux reads no more of a longer one than its disk takes at once."""

POPULATE_READ = 22
"""Advice to read pages and to map them, on Linux 5.14 and newer."""

SAMPLES = 4
"""Pages of a range that are looked at, to know whether it is in memory. Each is a system call."""


class MappedFile:
    """File whose bytes are memory. Writing to tensors of it writes to the file, unless it is mapped `private`."""

    def __init__(self, path: Path, *, private: bool = False) -> None:
        self.path = path
        self.kept = True
        """False for a file whose pages are given back once they were read."""
        self._ready = False
        """True once pages of the file were awaited."""
        flags = os.O_RDONLY if private else os.O_RDWR
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._close = weakref.finalize(self, os.close, handle)
        self.size = os.fstat(handle).st_size
        kind = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
        access = mmap.PROT_READ | mmap.PROT_WRITE
        self._map = mmap.mmap(handle, self.size, flags=kind, prot=access)
        self.handle = handle
        """Descriptor of the file; closed if it is private."""
        if private:
            self._close()
        with torch.inference_mode(False):  # a tensor that can be written to in any mode
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.address = self._bytes.data_ptr()

    def tensor(self, start: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Return the bytes from `start` on as a tensor."""
        with torch.inference_mode(False):
            count = torch.Size(shape).numel() * dtype.itemsize
            return self._bytes[start : start + count].view(dtype).view(*shape)

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Write rows to slots of a tensor of this file, by `pwrite`: to map the pages of many rows takes longer."""
        for to, row in zip(slots.flatten(0, 1), rows.flatten(0, 1), strict=True) if rows.numel() else ():
            whole = row.contiguous()
            content = (ctypes.c_char * whole.nbytes).from_address(whole.data_ptr())
            if os.pwrite(self.handle, content, to.data_ptr() - self.address) < whole.nbytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def await_pages(self, *tensors: Tensor) -> None:
        """Wait until tensors, or slots of them, are in memory: their pages come at once, not one by one."""
        if self._ready and self.kept:
            return
        self._ready = True
        for start, stop in self._ranges(tensors):
            with suppress(OSError, ValueError):  # an older Linux
                self._map.madvise(POPULATE_READ, start, stop - start)

    def read_alone(self, *tensors: Tensor) -> None:
        """Let pages of tensors that are not in memory come one by one, without those around them."""
        for start, stop in self._ranges(tensors):
            self._map.madvise(mmap.MADV_RANDOM, start, stop - start)

    def fetch(self, *tensors: Tensor) -> None:
        """Begin to read tensors of this file, or slots of them, unless they are in memory."""
        for start, stop in self._ranges(tensors):
            if not self._in_memory(start, stop):
                for first in range(start, stop, ADVICE):
                    self._map.madvise(mmap.MADV_WILLNEED, first, min(ADVICE, stop - first))

    def leave(self, *tensors: Tensor) -> None:
        """Give back the pages of tensors, unless the file is kept. Pages that are not on the disk yet stay."""
        if self.kept:
            return
        with suppress(OSError):  # the file may have gone: its pages go with the last who maps it
            handle = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                for start, stop in self._ranges(tensors):
                    self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)
                    os.posix_fadvise(handle, start, stop - start, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)

    def _ranges(self, tensors: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) in the file, ascending, each from the start of a page. Neighbouring ranges are joined."""
        runs = list[tuple[int, int]]()
        for x in tensors:
            whole = x.is_contiguous()
            for part in [x] if whole else x.flatten(0, 1):
                start = part.data_ptr() - self.address
                runs.append((start // PAGE * PAGE, min(self.size, start + part.numel() * part.itemsize)))
        last = None
        for start, stop in sorted(runs):
            if last is not None and start <= last[1] + PAGE:
                last = last[0], max(last[1], stop)
                continue
            if last is not None:
                yield last
            last = start, stop
        if last is not None:
            yield last

    def _in_memory(self, start: int, stop: int) -> bool:
        """Return whether a sample of a range's pages is in memory: the first, the last and some between."""
        state = ctypes.c_ubyte()
        step = max(PAGE, (stop - start - 1) // (SAMPLES - 1) // PAGE * PAGE)
        for page in {*range(start, stop, step), (stop - 1) // PAGE * PAGE}:
            failed = _libc().mincore(ctypes.c_void_p(self.address + page), ctypes.c_size_t(PAGE), ctypes.byref(state))
            if failed or not state.value & 1:
                return False
        return True


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)
