"""Folders of this user alone."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from attnmesh.store.private_folder import make_folders


def test_only_missing_folders_are_made(tmp_path: Path) -> None:
    made = list[Path]()
    make = os.mkdir

    def mkdir(path: Path, *args: Any, **options: Any) -> None:
        made.append(Path(path))
        make(path, *args, **options)

    with mock.patch.object(os, "mkdir", mkdir):
        make_folders(tmp_path / "a" / "b")
        make_folders(tmp_path / "a" / "b")
    assert made == [tmp_path / "a", tmp_path / "a" / "b"]
    assert {path.stat().st_mode & 0o777 for path in made} == {0o700}


def test_a_file_in_the_way_raises(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "folder"):
        with pytest.raises(FileExistsError):
            make_folders(path)
