"""Writing caches to a folder: while decoding goes on, and only what is new.

What a saving that was cut short has written is not written again, nor what the last one had: the next links to it.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from errno import EACCES
from fcntl import LOCK_EX, LOCK_NB, flock
from functools import partial
from pathlib import Path
from secrets import randbits
from threading import Thread

from torch import Tensor

from attnmesh.comm.consensus import agree, attempt, describe_call
from attnmesh.comm.failures import deadline
from attnmesh.comm.p2p import all_gather_ints
from attnmesh.decode.checkpoint import (
    MANIFEST,
    MORE,
    NAME,
    Header,
    Layers,
    files_of,
    folder_of,
    opened,
    pieces,
    savings,
)
from attnmesh.decode.tensor_file import check_more, link_or_write, settle, whole
from attnmesh.errors import StoreError
from attnmesh.mesh.axes import Mesh

TIMEOUT = 60.0
"""Seconds for another job to be done with the folder."""

POLL_INTERVAL = 1.0
"""Seconds from one look whether all ranks have written to the next, or less if there is a deadline."""


def begin(folder: str | Path, layers: Layers, more: Mapping[str, Tensor], note: str = "") -> "Saving":
    """Begin to write; every rank calls it. `more` is the same on all, and `note` what a reader has to know of it."""
    mesh, first, speaks = layers.mesh, layers.rooms[0], layers.is_coordinator
    sizes = tuple(room.sizes for room in layers.rooms)

    def look() -> tuple[Path, Header, dict[str, Tensor]]:
        path = folder_of("save", folder)
        check_more(more)
        if len(set(layers.lengths)) > 1:
            given, fix = f"layers of {sorted(set(layers.lengths))} tokens", "truncate them to the same length"
            raise StoreError("save", "layers of the same tokens", given, fix)
        padded, length = layers.real is not None, layers.lengths[0]
        place = first.heads.size, first.block_cyclic.ranks, _next(path)
        header = Header(sizes, padded, padded or bool(more), length, *place, note, f"{0:016x}")
        header.text()  # or an error
        whole = {f"more {name}": x.clone() for name, x in more.items()} if speaks else {}
        return path, header, whole | ({"real": layers.real.clone()} if speaks and layers.real is not None else {})

    came, said = attempt(look, lambda found: describe_call("save", saving=found[1].saving, note=note))
    names = agree(mesh, said, [randbits(62)])
    path, header = came[0], came[1]._replace(name=f"{names[0][0]:016x}")
    write, publish = partial(_save, path, header, layers, came[2]), partial(_publish, path, header)
    return Saving(mesh, write, publish if speaks else _nothing)


def _nothing() -> None:
    pass


def check_writable(path: Path) -> None:
    """Raise unless a folder can be written to; it is made if it is not there."""
    with _writing(path):
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(EACCES, "Permission denied")


def _next(path: Path) -> int:
    """The number of the next saving; a folder that holds something else is left alone."""
    with _writing(path):
        if os.path.lexists(path / MANIFEST):
            try:
                return whole(opened(path).saving + 1)
            except ValueError as error:
                fix = "name another folder"
                given = error.args[2] if isinstance(error, StoreError) else str(error)
                raise StoreError("save", "a folder of savings, or a new one", given, fix) from error
        if path.exists() and not path.is_dir():
            raise StoreError("save", "a folder that can be written to", str(path), "check the path")
    return 1


def _save(path: Path, header: Header, layers: Layers, more: Mapping[str, Tensor]) -> None:
    """Write this rank's tokens, but those that an earlier saving has left."""
    folder, known = path / header.folder, layers.known
    with _writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        found = [other for other in savings(path) if other != folder]
        others = [*found[:2], *found[2:][-1:]]  # where the disk is full for long, many are cut short
        for start, stop in pieces(layers.used):
            tensors = {"columns": layers.rooms[0].token_index[start:stop]}
            for number, room in enumerate(layers.rooms):
                tensors[f"keys {number}"] = room.keys[:, :, start:stop]
                tensors[f"values {number}"] = room.values[:, :, start:stop]
            name = f"{layers.place}{start}-{stop}.safetensors"
            own = known.folder / name if known.folder is not None and (start, stop) in known else None
            there = [other / name for other in others]
            known[start, stop] = link_or_write(folder / name, tensors, there, own, known.get((start, stop)))
        if more:
            link_or_write(folder / MORE, more)
        known.folder = folder
        settle(folder, path, path.parent)


def _publish(path: Path, header: Header) -> None:
    """From now on this saving is the one that is loaded; older ones go. One at a time, of all jobs that save here."""
    fresh = path / f"{MANIFEST}.{header.name}"
    with _writing(path), _alone(path):
        os.stat(path / header.folder)
        _check_whole(path, header)
        with fresh.open("w") as file:
            file.write(header.text())
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path / MANIFEST)
        settle(path)
        with suppress(OSError):  # what is published is; the rest is tidying up
            for other in savings(path):
                if other.name != header.folder:
                    shutil.rmtree(other, ignore_errors=True)
            for part in path.glob(f"{MANIFEST}.*"):  # of a saving that was cut short
                if NAME.fullmatch(part.suffix[1:]):
                    part.unlink(missing_ok=True)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """While no other process does the same, on a disk that has locks."""
    handle, end = os.open(path, os.O_RDONLY), time.monotonic() + TIMEOUT
    try:
        with suppress(OSError):
            while not _locked(handle):
                if time.monotonic() > end:
                    given, fix = f"{path}, where another does not end", "name another folder, or end it"
                    raise StoreError("save", "one saving at a time in a folder", given, fix)
                time.sleep(0.02)
        yield
    finally:
        os.close(handle)


def _locked(handle: int) -> bool:
    try:
        flock(handle, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _check_whole(path: Path, header: Header) -> None:
    """Raise unless all ranks' files are here: hosts may have folders of that name on disks of their own."""
    found = sum(file.stop - file.start for file in files_of(path, header)) // header.heads
    if found != header.length:
        given, fix = f"{found} of {header.length} tokens in {path}", "name one folder, on a disk that all ranks share"
        raise StoreError("save", "a folder that all ranks write to", given, fix)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """What the system refuses is told as an error of ours."""
    try:
        yield
    except FileNotFoundError as error:  # who is done first removes what others have begun
        given, fix = f"{path}, where another was done first", "name a folder for each cache"
        raise StoreError("save", "one saving at a time in a folder", given, fix) from error
    except OSError as error:
        given, fix = f"{str(path)!r} ({error.strerror})", "check the path and the room on the disk"
        raise StoreError("save", "a folder that can be written to", given, fix) from error


class Saving:
    """A saving under way. Every rank calls `wait`; until then the saving before it is the one that is loaded."""

    def __init__(self, mesh: Mesh, write: Callable[[], None], publish: Callable[[], None]) -> None:
        """Begin to `write`; when all ranks have, `publish`, or raise on all what went wrong on one."""
        self.concluded = False
        self._mesh, self._publish = mesh, publish
        self._error: StoreError | None = None
        self._failure: BaseException | None = None
        self._begin(write)

    def _begin(self, act: Callable[[], None]) -> None:
        self._all_done = False
        self._thread = Thread(target=self._run, args=[act], name="attnmesh saving")
        self._thread.start()

    def _run(self, act: Callable[[], None]) -> None:
        try:
            act()
        except StoreError as error:
            self._error = error
        except Exception as error:  # it is to be raised where it is waited for
            given = f"{type(error).__name__}: {error}"
            self._error = StoreError("save", "tensors that can be written", given, "save again")

    @property
    def written(self) -> bool:
        """Whether this rank's part is on the disk, or has failed."""
        return self.concluded or not self._thread.is_alive()

    def finish_writing(self) -> None:
        """Wait until all ranks' parts are on the disk, or have failed: afterwards what was saved may change.

        Every rank calls it. They ask each other again and again: a slow disk is no lost rank.
        """
        while not self._all_done:
            self._thread.join(min(POLL_INTERVAL, (deadline() or POLL_INTERVAL) / 4))
            self._all_done = all(done for (done,) in all_gather_ints([not self._thread.is_alive()], self._mesh.axes))

    def wait(self) -> None:
        """Until all ranks have written and what they wrote is what is loaded."""
        self.finish_writing()
        if not self.concluded:
            self.concluded = True
            try:
                agree(self._mesh, self._error or "save")
                self._begin(self._publish)
                self.finish_writing()
                agree(self._mesh, self._error or "save")
            except BaseException as error:
                self._failure = error
                raise
        elif self._failure is not None:
            raise self._failure
