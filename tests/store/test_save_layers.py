"""Saves that fail or are interrupted: the previous one stays, and nothing of theirs."""

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

import attnmesh as am
from attnmesh.cache import saved_cache
from attnmesh.cli.launch import run_on_ranks
from attnmesh.errors import StoreError
from attnmesh.store import save_layers as save_module
from attnmesh.store import tensor_file
from tests.support.caches.saves import cache_of, decoded, hold_first_save, is_save_of, only_save_in, save_until_killed
from tests.support.ranks.pool import Pool, on_each_rank


def files_in(path: Path) -> set[str]:
    """Return the names of all files and folders."""
    return {str(file.relative_to(path)) for file in path.rglob("*")}


@contextmanager
def full_disk(files: int) -> Iterator[None]:
    """Let no file of this rank be longer than 64 kB, once so many are written."""
    write, count = tensor_file.write_tensors, iter(range(files))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def write_some(*arguments: Any) -> None:
        if next(count, None) is None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
        write(*arguments)

    try:
        with patch.object(tensor_file, "write_tensors", write_some):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class FailedSave(NamedTuple):
    """The error of a save, whether its files are gone, and whether the previous save loads."""

    error: str
    files_are_gone: bool
    previous_loads: bool


@on_each_rank
def save_with_one_full_disk(path: Path, files: int) -> FailedSave:
    """Fill the disk of rank 1."""
    first, second, message = cache_of(20, 2), cache_of(20_000, 2), "no error"
    first.save(path)
    before = files_in(path)
    with full_disk(files) if dist.get_rank() else nullcontext():
        try:
            second.save(path)
        except StoreError as error:
            message = str(error)
    dist.barrier()
    loaded = am.KVCache.load(path, first.device_mesh)
    return FailedSave(message, files_in(path) == before, torch.equal(decoded(loaded), decoded(first)))


@pytest.mark.parametrize("files", [0, 1])
def test_full_disk_of_one_rank_raises_on_all_and_leaves_nothing(pool: Pool, tmp_path: Path, files: int) -> None:
    one, other = pool.run(2, save_with_one_full_disk, tmp_path, files)
    assert one == other
    assert "File too large" in one.error
    assert one.files_are_gone
    assert one.previous_loads


@on_each_rank
def save_after_a_full_disk(path: Path) -> tuple[str, bool]:
    """Save again after a save that failed. Return the error, and whether a third one loads."""
    cache, message = cache_of(20_000, 2), "no error"
    with full_disk(1) if dist.get_rank() else nullcontext():
        saving = cache.save(path, wait=False)
        saving.finish_writing()
    try:
        cache.save(path, wait=False)
    except StoreError as error:
        message = str(error)
    assert not (path / "cache.json").exists()
    cache.save(path)
    return message, torch.equal(decoded(am.KVCache.load(path, cache.device_mesh)), decoded(cache))


def test_a_save_after_one_that_failed_says_that_neither_is_made(pool: Pool, tmp_path: Path) -> None:
    one, other = pool.run(2, save_after_a_full_disk, tmp_path)
    assert one == other
    assert one[0].startswith("save: expected the save before to be written, given")
    assert "File too large" in one[0]
    assert "neither save was made" in one[0]
    assert one[1]


def test_interrupted_save_changes_nothing(tmp_path: Path) -> None:
    small = cache_of(20)
    small.save(tmp_path)
    cut = tmp_path / f"2-{7:016x}"
    cut.mkdir()
    (cut / "0.0.0-64.safetensors.part").write_bytes(b"half of it")
    (tmp_path / f"cache.json.{7:016x}").write_text('{"format": "attnm')
    assert is_save_of(tmp_path, small)
    small.append(*torch.ones(2, 1, 2, 3, 8).unbind())
    small.save(tmp_path)
    assert is_save_of(tmp_path, small)
    assert sorted(path.name for path in tmp_path.iterdir()) == [only_save_in(tmp_path).name, "cache.json"]


def fail_after(files: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk be full in the middle of a file, after so many."""
    count, sync = iter(range(files)), os.fsync

    def fsync(handle: int) -> None:
        if os.path.isfile(f"/proc/self/fd/{handle}") and next(count, None) is None:
            raise OSError(28, "No space left on device")
        sync(handle)

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.filterwarnings("ignore:This process")
@pytest.mark.parametrize("files", [0, 2, 4])  # the fifth is the manifest
def test_a_save_that_fails_leaves_nothing(tmp_path: Path, files: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = cache_of(20), cache_of(5000)
    small.save(tmp_path)
    before = files_in(tmp_path)
    save_until_killed(large, tmp_path, 1)
    fail_after(files, monkeypatch)
    for _ in range(3):
        with pytest.raises(StoreError, match="No space left on device"):
            large.save(tmp_path)
        assert files_in(tmp_path) == before
    monkeypatch.undo()
    large.save(tmp_path)
    assert is_save_of(tmp_path, large)


def test_files_of_a_living_writer_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another save begins, and fails, while a first one has written a file."""
    one, other, (begun, go) = cache_of(5000), cache_of(300), hold_first_save(monkeypatch)
    first = one.save(tmp_path, wait=False)
    begun.wait()
    held = only_save_in(tmp_path)
    (held / "0.0.9-10.safetensors.part").write_bytes(b"half of it")
    before = files_in(tmp_path)
    fail_after(0, monkeypatch)
    with pytest.raises(StoreError, match="No space left on device"):
        other.save(tmp_path)
    assert files_in(tmp_path) == before
    monkeypatch.undo()
    go.set()
    first.wait()
    assert is_save_of(tmp_path, one)


def test_wait_raises_the_same_interruption_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = cache_of(20).save(tmp_path, wait=False)
    saving.finish_writing()
    monkeypatch.setattr(saved_cache, "Agreement", Mock(side_effect=KeyboardInterrupt))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            saving.wait()


@on_each_rank
def save_to_slow_disks(path: Path) -> int:
    """Return the length of a loaded save that rank 1 wrote, and rank 0 published, more slowly than the deadline."""
    cache = cache_of(20, 2)
    name = "link_or_write" if dist.get_rank() == 1 else "_check_complete"
    original = getattr(save_module, name)

    def slow(*arguments: Any) -> Any:
        time.sleep(4)
        return original(*arguments)

    setattr(save_module, name, slow)
    before = am.set_deadline(3.0)
    try:
        cache.save(path)
    finally:
        am.set_deadline(before)
    return am.KVCache.load(path, None).length


def test_slow_disk_may_exceed_the_deadline(tmp_path: Path) -> None:
    assert run_on_ranks(2, save_to_slow_disks, tmp_path) == [20, 20]
