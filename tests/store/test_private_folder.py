"""Folders of a store are this user's alone, and what others may write to is refused by name."""

import os
from pathlib import Path
from typing import Any

import pytest

from attnmesh.errors import StoreError
from attnmesh.store.private_folder import check_private, lock_private_folder, make_folders, make_private

pytestmark = pytest.mark.quick


def test_folders_are_made_for_their_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    before = os.umask(0)
    try:
        make_private("call", folder)
        make_private("call", folder)
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent)] == [0o700, 0o700]


def test_only_missing_folders_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[Path]()
    make = os.mkdir

    def mkdir(path: Path, *args: Any, **options: Any) -> None:
        made.append(Path(path))
        make(path, *args, **options)

    monkeypatch.setattr(os, "mkdir", mkdir)
    make_folders(tmp_path / "a" / "b")
    make_folders(tmp_path / "a" / "b")
    assert made == [tmp_path / "a", tmp_path / "a" / "b"]


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o722])
def test_a_folder_that_others_can_write_to_is_refused(mode: int, tmp_path: Path) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(StoreError, match=rf"which others can write to\. Fix: run chmod go-w {tmp_path}"):
        check_private("call", tmp_path)
    tmp_path.chmod(mode & ~0o022)
    check_private("call", tmp_path)


def test_files_and_folders_of_others_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(StoreError, match=r"expected a folder, given .*/file, a file"):
        make_private("call", file)
    with pytest.raises(FileExistsError):
        make_folders(file / "folder")
    folder = tmp_path / "own"
    make_private("call", folder)
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(StoreError, match=r"/own, which is another's"):
        check_private("call", folder)


def test_a_folder_that_is_taken_is_another_caches(tmp_path: Path) -> None:
    handle = lock_private_folder("call", tmp_path / "keys")
    handles = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StoreError, match="another cache writes"):
        lock_private_folder("call", tmp_path / "keys")
    assert len(os.listdir("/proc/self/fd")) == handles, "a refusal leaves no handle open"
    os.close(handle)
    os.close(lock_private_folder("call", tmp_path / "keys"))
