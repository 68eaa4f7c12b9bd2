"""Caches in a folder: each rank writes its own tokens; on any number of ranks each reads those dealt to it.

        cache.json                      what is said of the whole, and which saving it is: replaced in one go
        7-3f../0.1.0-4096.safetensors   of the seventh saving: the first 4,096 tokens that a rank held, of all layers,
        7-3f../0.1.4096-5000.safet..    and the others; the rank by its place along heads and tokens
        7-3f../more.safetensors         what does not belong to a rank, as which tokens are real

Which saving holds is said by `cache.json` alone, so one that is cut short leaves the one before it as it was. No two
savings have a folder in common, whoever else saves here.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from attnmesh.decode.cache_config import Sizes
from attnmesh.decode.cache_shard import CacheShard
from attnmesh.decode.tensor_file import FIX, whole
from attnmesh.errors import StoreError
from attnmesh.mesh.axes import Mesh

VERSION = 4

MANIFEST, MORE = "cache.json", "more.safetensors"

LONGEST = 1 << 20
"""Bytes of the longest manifest that is read."""

NAME = re.compile("[0-9a-f]{16}")

FOLDER = re.compile("([0-9]{1,15})-[0-9a-f]{16}")

PIECE_NAME = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})\.([0-9]{1,15})-([0-9]{1,15})\.safetensors")

PIECE, LEAST = 4096, 64
"""Tokens of the longest file, and of the shortest but the last."""


class SavedPieces(dict[tuple[int, int], Mapping[str, int]]):
    """The sums of files that were saved, by the slots that they hold, as long as what is in these stays the same."""

    def __init__(self, caches: Sequence[object] = ()) -> None:
        self.of = tuple(map(id, caches))  # layer by layer
        self.folder: Path | None = None  # where this process has written them

    def forget(self, used: int = 0) -> None:
        """Slots from `used` on are to hold something else."""
        for start, stop in [piece for piece in self if piece[1] > used]:
            del self[start, stop]


@dataclass(frozen=True)
class Layers:
    """The layers of a model, all of the same tokens, as this rank has them."""

    mesh: Mesh
    rooms: tuple[CacheShard, ...]
    lengths: tuple[int, ...]  # of all layers, which are to be the same
    used: int
    real: Tensor | None
    known: SavedPieces

    @property
    def place(self) -> str:
        """How the names of this rank's files begin."""
        return f"{self.rooms[0].heads.index}.{self.rooms[0].index}."

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank speaks for the whole."""
        return self.mesh.shard == 0


class Header(NamedTuple):
    """What is said of the whole."""

    sizes: tuple[Sizes, ...]
    padded: bool
    more: bool  # whether there is a file of what belongs to no rank
    length: int
    heads: int
    ranks: int
    saving: int
    note: str
    name: str  # that no other saving has

    @property
    def folder(self) -> str:
        """Where its files are."""
        return f"{self.saving}-{self.name}"

    def text(self) -> str:
        """As it is written; an error if it could not be read."""
        said = {"format": "attnmesh cache", "version": VERSION, "sizes": [sizes.encode() for sizes in self.sizes]}
        said |= {name: value for name, value in self._asdict().items() if name != "sizes"}
        if not isinstance(self.note, str):
            raise StoreError("save note", "a str", type(self.note).__name__, "write it down as one, as json.dumps does")
        text = json.dumps(said)
        if len(text) > LONGEST:
            fix = "keep in more= what is long"
            raise StoreError("save", f"a note of less than {LONGEST} letters", f"{len(self.note)}", fix)
        return text


def folder_of(subject: str, folder: object) -> Path:
    """A path, if it is one."""
    if not isinstance(folder, (str, os.PathLike)) or not isinstance(os.fspath(folder), str):
        fix = "pass its path as a str or a pathlib.Path"
        raise StoreError(subject, "the path of a folder", f"{folder!r} of type {type(folder).__name__}", fix)
    if "\0" in os.fspath(folder):
        raise StoreError(subject, "the path of a folder", repr(os.fspath(folder)), "leave the null byte out")
    return Path(folder).absolute()


def opened(path: Path) -> Header:
    """What is said of saved caches."""
    version, said = None, {}
    try:
        if not (path / MANIFEST).is_file():
            raise FileNotFoundError(MANIFEST)
        with (path / MANIFEST).open() as file:
            said = json.loads(file.read(LONGEST))
        if said["format"] != "attnmesh cache":
            raise ValueError("of something else")
        version = said["version"]
        numbers = [whole(said[name]) for name in ("length", "heads", "ranks", "saving")]
        sizes, padded, more = said["sizes"], said["padded"] is True, said["padded"] is True or said["more"] is True
        note, name = str(said["note"]), str(said["name"])
        codes = [[whole(x) for x in code] for code in sizes]
        if version != VERSION or not NAME.fullmatch(name):
            raise ValueError("of another version, or no saving")
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        if version not in (None, VERSION):
            given, fix = f"version {str(version)[:20]}", "load it with the version of attnmesh that saved it"
            raise StoreError("load", f"a cache of version {VERSION}", given, fix) from error
        expected, given = "a folder that KVCache.save wrote", f"{path} ({type(error).__name__})"
        raise StoreError("load", expected, given, "check the path, or save again") from error
    try:
        length, heads, ranks, saving = numbers
        header = Header(tuple(map(Sizes.decode, codes)), padded, more, length, heads, ranks, saving, note, name)
    except (ValueError, IndexError, TypeError) as error:
        raise StoreError("load", "the sizes of a cache", f"{sizes!r} in {path}", FIX) from error
    if not header.sizes or not header.heads or not header.ranks or not all(_fits(header, x) for x in header.sizes):
        raise StoreError("load", "the sizes of a cache", f"{header} in {path}", FIX)
    return header


def _fits(header: Header, sizes: Sizes) -> bool:
    """Whether these can be the sizes of a layer of what is said of the whole."""
    like = sizes.block == header.sizes[0].block and sizes.batch == header.sizes[0].batch
    return like and sizes.fault(1) is None and not sizes.kv_heads % header.heads and header.length <= sizes.capacity


def savings(path: Path) -> list[Path]:
    """The folders of all savings, those that were cut short and at the end the one that holds, from the last on."""
    found = []
    for other in path.iterdir():
        with suppress(FileNotFoundError):  # it may be removed meanwhile
            if named := FOLDER.fullmatch(other.name):
                found.append((int(named[1]), other.stat().st_mtime_ns, other))
    return [other for *_, other in sorted(found, reverse=True)]


class File(NamedTuple):
    """A file of a saving: its rank's place along heads and tokens, from where to where its slots go, and its path."""

    heads: int
    tokens: int
    start: int
    stop: int
    path: Path


def files_of(path: Path, header: Header) -> Iterator[File]:
    """Those of a saving."""
    folder = path / header.folder
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise StoreError("load", "a folder that KVCache.save wrote", f"{folder} ({error.strerror})", FIX) from error
    for name in names:
        if named := PIECE_NAME.fullmatch(name):
            heads, tokens, start, stop = map(int, named.groups())
            file = File(heads, tokens, start, stop, folder / name)
            if file.heads < header.heads and file.tokens < header.ranks and file.start < file.stop <= header.length:
                yield file


def pieces(used: int) -> Iterator[tuple[int, int]]:
    """From where to where each file goes: the same for a cache that has grown, but for a few at its end.

    >>> list(pieces(4096 + 128 + 64 + 5))
    [(0, 4096), (4096, 4224), (4224, 4288), (4288, 4293)]
    """
    start = 0
    while start < used:
        size = PIECE
        while size > LEAST and start + size > used:
            size //= 2
        yield start, min(start + size, used)
        start += size
