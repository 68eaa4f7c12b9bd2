"""The native library: compiled once, of this user alone, and anew where its file is damaged."""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from attnmesh.kernels.native import build
from attnmesh.kernels.native.build import library

needs_library = pytest.mark.skipif(library().attend is None, reason="there is no C++ compiler")


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library of one function in an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "SOURCES", [source := tmp_path / "small.cpp"])
    source.write_text('extern "C" int attnmesh_append() { return 0; }')
    return build._built()


@needs_library
def test_the_library_is_compiled_once(compiled: Path) -> None:
    first = compiled
    made = first.stat().st_mtime_ns
    assert build._built() == first
    assert first.stat().st_mtime_ns == made
    assert {file.name for file in first.parent.iterdir()} == {first.name, "lock"}


def replaced_by_a_link(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.with_name("lock"))


FOREIGN: dict[str, Callable[[Path], object]] = {
    "empty": lambda file: file.write_bytes(b""),
    "cut off": lambda file: os.truncate(file, file.stat().st_size // 2),
    "changed": lambda file: file.write_bytes(file.read_bytes().replace(b"attnmesh", b"attnmess")),
    "writable": lambda file: file.chmod(0o722),
    "a link": replaced_by_a_link,
    "of another user": lambda file: os.chown(file, 65534, -1),
}


@needs_library
@pytest.mark.parametrize("kind", FOREIGN)
def test_a_file_that_this_user_has_not_written_whole_is_compiled_anew(compiled: Path, kind: str) -> None:
    if kind == "of another user" and os.geteuid():
        pytest.skip("only root can give files away")
    right = compiled.read_bytes()
    FOREIGN[kind](compiled)
    assert build._built() == compiled
    assert compiled.read_bytes() == right
    assert not compiled.is_symlink()
    assert compiled.stat().st_uid == os.geteuid()
    assert compiled.stat().st_mode & 0o777 == 0o700
    assert hasattr(ctypes.CDLL(str(compiled)), "attnmesh_append")


@needs_library
def test_folders_of_the_cache_are_this_users_alone(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in compiled.parents[:2]:
        assert folder.stat().st_mode & 0o777 == 0o700
        folder.chmod(0o777)
        build._built()
        assert folder.stat().st_mode & 0o777 == 0o700
    compiled.parents[2].chmod(0o777)  # whose owner may be anybody's: another user can replace what is in it
    with pytest.raises(build._MissingError, match=r"is one of other users: set XDG_CACHE_HOME to one of your own"):
        build._built()
    compiled.parents[2].chmod(0o1777)
    build._built()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(build._MissingError, match="is one of other users"):
        build._built()


@needs_library
def test_a_library_is_on_the_disk_before_it_has_its_name(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled.unlink()
    events = []
    fsync = os.fsync
    replace = os.replace
    monkeypatch.setattr(os, "fsync", lambda at: (events.append(Path(f"/proc/self/fd/{at}").readlink().name), fsync(at)))
    monkeypatch.setattr(os, "replace", lambda old, new: (events.append("named"), replace(old, new)))
    build._built()
    assert events == ["native.so", "named"]
