"""Files as memory: pages come before they are read, and leave after it where a file is not kept."""

import os
from pathlib import Path

import pytest
import torch

from attnmesh.runtime.mapped_file import PAGE, MappedFile


@pytest.fixture
def file(tmp_path: Path) -> MappedFile:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * (16 * PAGE // 256))
    return MappedFile(path)


def test_tensors_are_the_bytes_of_the_file(file: MappedFile) -> None:
    x = file.tensor(PAGE, torch.uint8, (2, 1, PAGE))
    assert x[1, 0, :3].tolist() == [0, 1, 2]
    x[1, 0, 1] = 9
    assert file.path.read_bytes()[2 * PAGE : 2 * PAGE + 3] == b"\x00\x09\x02"
    private = MappedFile(file.path, private=True)
    private.tensor(0, torch.uint8, (4,))[0] = 7
    assert file.path.read_bytes()[0] == 0


def test_ranges_are_the_pages_of_rows(file: MappedFile) -> None:
    x = file.tensor(0, torch.uint8, (1, 2, 8, PAGE))  # two heads of 8 slots, each a page
    assert [*file._ranges([x])] == [(0, 16 * PAGE)]
    assert [*file._ranges([x[:, :, 3:5]])] == [(3 * PAGE, 5 * PAGE), (11 * PAGE, 13 * PAGE)]
    assert [*file._ranges([x[:, :1, 3:5], x[:, :1, 5:6]])] == [(3 * PAGE, 6 * PAGE)]


def can_drop_pages(path: Path) -> bool:
    """Return whether the system drops the pages of a file that it is told not to keep."""
    path.write_bytes(bytes(4 * PAGE))
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)
    return not MappedFile(path)._in_memory(0, 4 * PAGE)


def test_pages_leave_a_file_that_is_not_kept(file: MappedFile, tmp_path: Path) -> None:
    x = file.tensor(0, torch.uint8, (16 * PAGE,))
    os.fsync(file.handle)
    int(x.sum())
    file.leave(x)
    assert file._in_memory(0, file.size)
    file.kept = False
    file.leave(x)
    inside = file._in_memory(0, file.size)
    file.fetch(x)
    assert int(x.sum()) == sum(range(256)) * (16 * PAGE // 256)
    if not can_drop_pages(tmp_path / "other"):
        pytest.skip("the file system keeps its pages in memory")
    assert not inside
