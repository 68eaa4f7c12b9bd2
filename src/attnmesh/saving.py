"""Writing caches to a folder: while decoding goes on, and only what is new.

What a saving that was cut short has written is not written again, nor what the last one had, to which the next links.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from uuid import uuid4

from torch import Tensor

from attnmesh.agree import agree, agreed, told
from attnmesh.errors import StoreError
from attnmesh.saved import MANIFEST, MORE, VERSION, Header, Layers, files_of, folder_of, opened, pieces
from attnmesh.store import keep, settle


def begin(folder: str | Path, layers: Layers, more: Mapping[str, Tensor], note: str = "") -> "Saving":
    """Begin to write; every rank calls it. `more` is the same on all, and `note` what a reader has to know of it."""
    mesh, first = layers.mesh, layers.shares[0]

    def look() -> tuple[Path, int]:
        path = folder_of("save", folder)
        if len(set(layers.lengths)) > 1:
            given, fix = f"layers of {sorted(set(layers.lengths))} tokens", "truncate them to the same length"
            raise StoreError("save", "layers of the same tokens", given, fix)
        return path, _next(path)

    path, saving = agreed(mesh, look, lambda found: told("save", saving=found[1], note=note))
    sizes = tuple(share.sizes for share in layers.shares)
    heads, ranks = first.heads.size, first.tokens.size
    header = Header(sizes, layers.padded, layers.lengths[0], heads, ranks, saving, note, uuid4().hex)

    def conclude(error: StoreError | None) -> None:
        agree(mesh, error or "save")
        agreed(mesh, lambda: _publish(path, header) if layers.first else None, "save")

    return Saving(lambda: _save(path, saving, layers, more if layers.first else {}), conclude)


def _next(path: Path) -> int:
    """The number of the next saving; a folder that holds something else is left alone."""
    with _writing(path):
        if (path / MANIFEST).exists():
            return opened(path).saving + 1
        if path.exists() and not path.is_dir():
            raise StoreError("save", "a folder that can be written to", str(path), "check the path")
    return 1


def _save(path: Path, saving: int, layers: Layers, more: Mapping[str, Tensor]) -> None:
    """Write this rank's tokens, but those that an earlier saving has left."""
    folder, last = path / str(saving), path / str(saving - 1)
    with _writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        names = set()
        for start, stop in pieces(layers.used):
            tensors = {"columns": layers.shares[0].columns[start:stop]}
            for number, share in enumerate(layers.shares):
                tensors[f"keys {number}"] = share.keys[:, :, start:stop]
                tensors[f"values {number}"] = share.values[:, :, start:stop]
            name = f"{layers.place}{start}-{stop}.safetensors"
            known = layers.known.get((start, stop))
            layers.known[start, stop] = keep(folder / name, tensors, last / name, known)
            names.add(name)
        if more:
            keep(folder / MORE, more)
        elif layers.first:
            (folder / MORE).unlink(missing_ok=True)  # of a saving that was cut short
        for other in folder.glob(f"{layers.place}*"):  # of a saving that was cut short
            if other.name not in names:
                other.unlink()
        settle(folder, path, path.parent)


def _publish(path: Path, header: Header) -> None:
    """From now on this saving is the one that is loaded; older ones go."""
    said = {"format": "attnmesh cache", "version": VERSION, "sizes": [sizes.encode() for sizes in header.sizes]}
    said |= {name: value for name, value in header._asdict().items() if name != "sizes"}
    _check_whole(path, header)
    fresh = path / f"{MANIFEST}.part"
    with _writing(path), fresh.open("w") as file:
        json.dump(said, file)
        file.flush()
        os.fsync(file.fileno())
        os.replace(fresh, path / MANIFEST)
        settle(path)
        for other in path.iterdir():
            if other.is_dir() and other.name.isdigit() and other.name != str(header.saving):
                shutil.rmtree(other, ignore_errors=True)


def _check_whole(path: Path, header: Header) -> None:
    """Raise unless all ranks' files are here: hosts may have folders of that name on disks of their own."""
    stops: dict[tuple[int, int], int] = {}
    for heads, tokens, stop, _ in files_of(path, header):
        stops[heads, tokens] = max(stop, stops.get((heads, tokens), 0))
    found = sum(stops.values()) // header.heads
    if found != header.length:
        given, fix = f"{found} of {header.length} tokens in {path}", "name one folder, on a disk that all ranks share"
        raise StoreError("save", "a folder that all ranks write to", given, fix)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """What the system refuses is told as an error of ours."""
    try:
        yield
    except OSError as error:
        given, fix = f"{str(path)!r} ({error.strerror})", "check the path and the room on the disk"
        raise StoreError("save", "a folder that can be written to", given, fix) from error


class Saving:
    """A saving under way. Every rank calls `wait`; until then the saving before it is the one that is loaded."""

    def __init__(self, act: Callable[[], None], conclude: Callable[[StoreError | None], None]) -> None:
        """Begin to `act`; when all ranks have, `conclude`, or raise on all what went wrong on one."""
        self._act, self._conclude = act, conclude
        self._error: StoreError | None = None
        self.concluded = False
        self._failure: Exception | None = None
        self._thread = Thread(target=self._run, name="attnmesh saving")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._act()
        except StoreError as error:
            self._error = error
        except Exception as error:  # it is to be raised where it is waited for
            given = f"{type(error).__name__}: {error}"
            self._error = StoreError("save", "tensors that can be written", given, "save again")

    @property
    def written(self) -> bool:
        """Whether this rank's part is on the disk, or has failed."""
        return not self._thread.is_alive()

    def finish_writing(self) -> None:
        """Wait for this rank's part alone: afterwards what was saved may change."""
        self._thread.join()

    def wait(self) -> None:
        """Until all ranks have written and what they wrote is what is loaded."""
        self.finish_writing()
        if not self.concluded:
            self.concluded = True
            try:
                self._conclude(self._error)
            except Exception as error:
                self._failure = error
                raise
        elif self._failure is not None:
            raise self._failure
