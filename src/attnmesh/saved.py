"""Caches in a folder: each rank writes its own tokens; on any number of ranks each reads those dealt to it.

        cache.json                    what is said of the whole, and which saving it is: replaced in one go
        7/0.1.0-4096.safetensors      of the seventh saving: the first 4,096 tokens that a rank held, of all layers,
        7/0.1.4096-5000.safetensors   and the others; the rank by its place along heads and tokens
        7/more.safetensors            what does not belong to a rank, as which tokens are real

A saving that is cut short leaves the one before it as it was. What it has written the next does not write again, nor
what the last one had, to which it links: a cache that has grown is saved by its new tokens alone.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import NamedTuple
from uuid import uuid4

import torch
from torch import Tensor

from attnmesh.agree import agree, agreed, told
from attnmesh.deal import Deal
from attnmesh.errors import StoreError
from attnmesh.mesh import Axis, Mesh
from attnmesh.sizes import Sizes
from attnmesh.store import FIX, Stored, keep, whole

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
    device: torch.device
    shares: tuple[Share, ...]
    length: int
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


# --- saving ---


def begin(folder: str | Path, layers: Layers, more: Mapping[str, Tensor], note: str = "") -> "Saving":
    """Begin to write; every rank calls it. `more` is the same on all, and `note` what a reader has to know of it."""
    mesh, device, first = layers.mesh, layers.device, layers.shares[0]

    def look() -> tuple[Path, int]:
        path = folder_of("save", folder)
        return path, _next(path)

    path, saving = agreed(mesh, device, look, lambda found: told("save", saving=found[1], note=note))
    sizes = tuple(share.sizes for share in layers.shares)
    heads, ranks = first.heads.size, first.tokens.size
    header = Header(sizes, layers.padded, layers.length, heads, ranks, saving, note, uuid4().hex)

    def conclude(error: StoreError | None) -> None:
        agree(mesh, device, error or "save")
        agreed(mesh, device, lambda: _publish(path, header) if layers.first else None, "save")

    return Saving(lambda: _save(path, saving, layers, more if layers.first else {}), conclude)


def folder_of(subject: str, folder: object) -> Path:
    """A path, if it is one."""
    if not isinstance(folder, (str, os.PathLike)) or not isinstance(os.fspath(folder), str):
        fix = "pass its path as a str or a pathlib.Path"
        raise StoreError(subject, "the path of a folder", f"{folder!r} of type {type(folder).__name__}", fix)
    return Path(folder)


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
        for other in folder.glob(f"{layers.place}*"):  # of a saving that was cut short
            if other.name not in names:
                other.unlink()


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
    for other in path.iterdir():
        if other.is_dir() and other.name.isdigit() and other.name != str(header.saving):
            shutil.rmtree(other, ignore_errors=True)


def _check_whole(path: Path, header: Header) -> None:
    """Raise unless all ranks' files are here: hosts may have folders of that name on disks of their own."""
    stops: dict[tuple[int, int], int] = {}
    for heads, tokens, stop, _ in _files(path, header):
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
        self._concluded = False
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
        if not self._concluded:
            self._concluded = True
            self._conclude(self._error)


# --- loading ---


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


def check_memory(layers: Sequence[Sizes], mesh: Mesh, device: torch.device) -> None:
    """A file may say anything: nothing is reserved that the device could not hold."""
    if device.type == "cuda":
        room = torch.cuda.get_device_properties(device).total_memory
    else:
        room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needed = 0
    for sizes in layers:
        tokens = -(-sizes.capacity // (mesh.queries.size * mesh.keys.size)) + sizes.block
        columns = sizes.batch * sizes.kv_heads // mesh.heads.size * (sizes.head_dim + sizes.value_dim)
        needed += tokens * (columns * sizes.dtype.itemsize + 8)
    if needed > room:
        given = f"{needed / 1e9:,.1f} GB for a capacity of {layers[0].capacity:,}"
        raise StoreError("load", f"at most this device's {room / 1e9:,.1f} GB", given, "say a smaller capacity=")


def more_of(path: Path, header: Header) -> dict[str, Tensor]:
    """What was saved that belongs to no rank."""
    file = path / str(header.saving) / MORE
    stored = Stored(file) if file.exists() else None
    more = {} if stored is None else {name: stored.read(name) for name in stored.entries}
    real = more.get("real")
    shape = header.sizes[0].batch, header.length
    if header.padded and (real is None or real.dtype != torch.bool or tuple(real.shape) != shape):
        given = "nothing" if real is None else f"{real.dtype} {tuple(real.shape)}"
        raise StoreError("load", f"which of {shape} tokens are real", f"{given} in {file}", FIX)
    return more


def fill(shares: Sequence[Share], path: Path, header: Header) -> int:
    """Read this rank's tokens, wherever they were; how many they are."""
    share = shares[0]
    held, found = share.deal.count(share.tokens.index, header.length), [0] * len(shares)
    for h, _, _, file in _files(path, header):
        stored = Stored(file)
        columns = stored.read("columns")
        if columns.dtype != torch.int64 or columns.ndim != 1:
            raise StoreError("load", "the token in each slot", f"{columns.dtype} in {file}", FIX)
        mine = (share.deal.owner(columns) == share.tokens.index).nonzero().flatten()
        slots = share.deal.slot(columns[mine])
        if len(mine) and (int(columns.min()) < 0 or int(slots.max()) >= held):
            raise StoreError("load", "every token once", f"tokens beyond the last in {file}", FIX)
        for layer, each in enumerate(shares) if len(mine) else ():
            found[layer] += len(mine) * _copy(each, stored, layer, (h, header.heads), mine, slots, len(columns))
        share.columns[slots.to(share.columns.device)] = columns[mine].to(share.columns.device)
    for layer, each in enumerate(shares):
        own = each.sizes.kv_heads // each.heads.size
        if found[layer] != held * own:
            given = f"{found[layer] // own} of this rank's {held} tokens in {path}"
            raise StoreError("load", "every token once", given, FIX)
        each.columns[:held] = share.columns[:held]
    return held


def _files(path: Path, header: Header) -> Iterator[tuple[int, int, int, Path]]:
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


def _copy(
    share: Share, stored: Stored, layer: int, heads: tuple[int, int], mine: Tensor, slots: Tensor, tokens: int
) -> int:
    """Of a file of the h-th of so many along the heads axis, this rank's heads and tokens; how many heads."""
    own, theirs = _heads(share.sizes, share.heads.index, share.heads.size), _heads(share.sizes, *heads)
    both = range(max(own.start, theirs.start), min(own.stop, theirs.stop))
    if not both:
        return 0
    into, of = (slice(both.start - x.start, both.stop - x.start) for x in (own, theirs))
    sizes, device = share.sizes, share.keys.device
    for name, x, width in (("keys", share.keys, sizes.head_dim), ("values", share.values, sizes.value_dim)):
        read, shape = stored.read(f"{name} {layer}"), (sizes.batch, len(theirs), tokens, width)
        if tuple(read.shape) != shape or read.dtype != x.dtype:
            given = f"{read.dtype} {tuple(read.shape)} in {stored.path}"
            raise StoreError("load", f"{x.dtype} {shape}", given, FIX)
        x[:, into].index_copy_(2, slots.to(device), read[:, of, mine].to(device))
    return len(both)


def _heads(sizes: Sizes, index: int, axis: int) -> range:
    """The key heads of a rank along the heads axis."""
    return range(index * sizes.kv_heads // axis, (index + 1) * sizes.kv_heads // axis)
