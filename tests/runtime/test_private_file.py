"""Files that other users may have made are not taken for this user's."""

import os
from pathlib import Path

import pytest

from attnmesh.runtime.private_file import is_of_this_user_alone, open_without_links


def test_a_file_is_opened_and_a_link_to_it_is_not(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text")
    handle = open_without_links(tmp_path / "file")
    assert os.read(handle, 9) == b"text"
    os.close(handle)
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        open_without_links(tmp_path / "link")


def test_a_pipe_without_a_writer_opens_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    os.close(open_without_links(tmp_path / "pipe"))


@pytest.mark.parametrize(("mode", "alone"), [(0o600, True), (0o644, True), (0o620, False), (0o602, False)])
def test_a_file_that_others_may_write_is_not_of_this_user_alone(tmp_path: Path, mode: int, alone: bool) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "file").chmod(mode)
    assert is_of_this_user_alone((tmp_path / "file").stat()) is alone
