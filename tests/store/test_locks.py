"""Locks of a store: one writer, several readers, and none that outlives its handle."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from attnmesh.errors import StoreError
from attnmesh.store.locks import WriterLock, lock_for_cache, try_lock, without_writers

pytestmark = pytest.mark.quick


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A handle of its own, as another process has it: locks of `flock` belong to handles."""
    handle = os.open(path, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)


def test_one_handle_holds_a_lock_until_it_is_closed(tmp_path: Path) -> None:
    with opened(tmp_path) as other:
        with opened(tmp_path) as one:
            assert try_lock(one)
            assert try_lock(one), "who holds a lock may take it again"
            assert not try_lock(other)
            assert not try_lock(other, patience=0.03)
            assert not try_lock(other, shared=True)
        assert try_lock(other)


def test_several_share_a_lock_and_none_has_it_alone(tmp_path: Path) -> None:
    with opened(tmp_path) as one, opened(tmp_path) as other, opened(tmp_path) as third:
        assert try_lock(one, shared=True)
        assert try_lock(other, shared=True)
        assert not try_lock(third)


def test_a_second_cache_is_refused_by_the_path(tmp_path: Path) -> None:
    with opened(tmp_path) as one, opened(tmp_path) as other:
        lock_for_cache(one, tmp_path)
        with pytest.raises(StoreError, match=f"one writer of a folder, given {tmp_path}, which another cache writes"):
            lock_for_cache(other, tmp_path)


def test_a_folder_is_without_writers_once_their_locks_have_gone(tmp_path: Path) -> None:
    one, other = WriterLock(), WriterLock()
    one.hold(tmp_path)
    other.hold(tmp_path)
    one.release()
    with pytest.raises(BlockingIOError), without_writers(tmp_path):
        pass
    del other
    gc.collect()
    with without_writers(tmp_path), opened(tmp_path) as handle:
        assert not try_lock(handle, shared=True)
    with opened(tmp_path) as handle:
        assert try_lock(handle)
