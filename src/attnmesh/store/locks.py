"""Locks on folders and files of a store, which end with the process that holds them."""

import gc
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
from pathlib import Path

from attnmesh.errors import StoreError

POLL = 0.02
"""Seconds between two tries to take a lock: at most as much is lost once it is free."""


def try_lock(handle: int, patience: float = 0.0, *, shared: bool = False) -> bool:
    """Lock a file or a folder until its handle is closed. Return False if others hold it for `patience` seconds.

    With `shared`, several processes hold it at once. On a file system without locks return True.
    """
    end = time.monotonic() + patience
    while True:
        try:
            flock(handle, (LOCK_SH if shared else LOCK_EX) | LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
        except OSError:
            return True
        time.sleep(POLL)


def lock_for_cache(handle: int, path: Path) -> None:
    """Lock what a cache in a folder writes, until its handle is closed. Raise if another writer has it."""
    if try_lock(handle):
        return
    gc.collect()  # a cache that nobody uses any more may still be in memory, with its locks
    if not try_lock(handle):
        given = f"{path}, which another cache writes"
        fix = "let go of it and of its errors, or end its process, or pass another folder"
        raise StoreError("KVCache folder", "one writer of a folder", given, fix)


class WriterLock:
    """Lock of a save's folder, which other jobs see as long as this process writes there, and no longer."""

    def __init__(self) -> None:
        self.release: Callable[[], object] = lambda: None

    def hold(self, folder: Path) -> None:
        """Hold the folder, on a file system that has locks."""
        handle = os.open(folder, os.O_RDONLY)
        self.release = weakref.finalize(self, os.close, handle)
        with suppress(OSError):
            flock(handle, LOCK_SH)


@contextmanager
def without_writers(folder: Path) -> Iterator[None]:
    """Hold a folder. Raise `OSError` if a process has its `WriterLock`, or the file system has no locks."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        flock(handle, LOCK_EX | LOCK_NB)
        yield
    finally:
        os.close(handle)
