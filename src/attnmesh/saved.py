"""Caches in a folder: each rank writes its own tokens; on any number of ranks each reads those dealt to it.

        cache.json                    what is said of the whole, and which saving it is: replaced in one go
        7/0.1.0-4096.safetensors      of the seventh saving: the first 4,096 tokens that a rank held, of all layers,
        7/0.1.4096-5000.safetensors   and the others; the rank by its place along heads and tokens
        7/more.safetensors            what does not belong to a rank, as which tokens are real

Which saving holds is said by `cache.json` alone, so one that is cut short leaves the one before it as it was.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from attnmesh.deal import Deal
from attnmesh.errors import StoreError
from attnmesh.mesh import Axis, Mesh
from attnmesh.sizes import Sizes
from attnmesh.store import FIX, whole

VERSION = 3

MANIFEST, MORE = "cache.json", "more.safetensors"

LONGEST = 1 << 20
"""Bytes of the longest manifest that is read."""

PIECE, LEAST = 4096, 64
"""Tokens of the longest file, and of the shortest but the last."""


class Share(NamedTuple):
    """A rank's tensors of a layer, and which part of the whole they are."""

    keys: Tensor
    values: Tensor
    columns: Tensor  # the token in each slot
    sizes: Sizes
    heads: Axis
    tokens: Axis
    deal: Deal


class Known(dict[tuple[int, int], Mapping[str, int]]):
    """The sums of files that were saved, by the slots that they hold, as long as what is in these stays the same."""

    def __init__(self, layers: int) -> None:
        self.layers = layers

    def forget(self, used: int = 0) -> None:
        """Slots from `used` on are to hold something else."""
        for start, stop in [piece for piece in self if piece[1] > used]:
            del self[start, stop]


@dataclass(frozen=True)
class Layers:
    """The layers of a model, all of the same tokens, as this rank has them."""

    mesh: Mesh
    shares: tuple[Share, ...]
    lengths: tuple[int, ...]  # of all layers, which are to be the same
    used: int
    padded: bool
    known: "Known"

    @property
    def place(self) -> str:
        """How the names of this rank's files begin."""
        return f"{self.shares[0].heads.index}.{self.shares[0].tokens.index}."

    @property
    def first(self) -> bool:
        """Whether this rank speaks for the whole."""
        return self.mesh.shard == 0


class Header(NamedTuple):
    """What is said of the whole."""

    sizes: tuple[Sizes, ...]
    padded: bool
    length: int
    heads: int
    ranks: int
    saving: int
    note: str
    name: str = ""  # that no other saving has


def folder_of(subject: str, folder: object) -> Path:
    """A path, if it is one."""
    if not isinstance(folder, (str, os.PathLike)) or not isinstance(os.fspath(folder), str):
        fix = "pass its path as a str or a pathlib.Path"
        raise StoreError(subject, "the path of a folder", f"{folder!r} of type {type(folder).__name__}", fix)
    return Path(folder)


def opened(path: Path) -> Header:
    """What is said of saved caches."""
    try:
        with (path / MANIFEST).open() as file:
            said = json.loads(file.read(LONGEST))
        version = said["version"] if said["format"] == "attnmesh cache" else None
        numbers = [whole(said[name]) for name in ("length", "heads", "ranks", "saving")]
        sizes, padded, note, name = said["sizes"], said["padded"], str(said["note"]), str(said["name"])
        codes = [[whole(x) for x in code] for code in sizes] if version == VERSION else []
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        expected, given = "a folder that KVCache.save wrote", f"{path} ({type(error).__name__})"
        raise StoreError("load", expected, given, "check the path, or save again") from error
    if version != VERSION:
        fix = "load it with the version of attnmesh that saved it"
        raise StoreError("load", f"a cache of version {VERSION}", f"version {version!r}", fix)
    try:
        length, heads, ranks, saving = numbers
        header = Header(tuple(map(Sizes.decode, codes)), padded is True, length, heads, ranks, saving, note, name)
    except (ValueError, IndexError, TypeError) as error:
        raise StoreError("load", "the sizes of a cache", f"{sizes!r} in {path}", FIX) from error
    if not header.sizes or not header.heads or not header.ranks or not all(_fits(header, x) for x in header.sizes):
        raise StoreError("load", "the sizes of a cache", f"{header} in {path}", FIX)
    return header


def _fits(header: Header, sizes: Sizes) -> bool:
    """Whether these can be the sizes of a layer of what is said of the whole."""
    like = sizes.block == header.sizes[0].block and sizes.batch == header.sizes[0].batch
    return like and sizes.fault(1) is None and not sizes.kv_heads % header.heads and header.length <= sizes.capacity


def files_of(path: Path, header: Header) -> Iterator[tuple[int, int, int, Path]]:
    """Those of a saving, each with its place along heads and tokens and how many of its tokens come before its end."""
    folder = path / str(header.saving)
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise StoreError("load", "a folder that KVCache.save wrote", f"{folder} ({error.strerror})", FIX) from error
    for name in names:
        numbers = re.fullmatch(r"([0-9]{1,9})\.([0-9]{1,9})\.[0-9]{1,15}-([0-9]{1,15})\.safetensors", name)
        if numbers and int(numbers[1]) < header.heads and int(numbers[2]) < header.ranks:
            yield int(numbers[1]), int(numbers[2]), int(numbers[3]), folder / name


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
