"""A cache in a folder: each rank writes its own tokens; on any number of ranks each reads those dealt to it.

        cache.json          what is said of the whole, and which saving it is: replaced in one go when all is written
        7/0.0.safetensors   of the seventh saving, what the first rank held, by its place along heads and tokens
        7/0.1.safetensors

A saving that is cut short leaves the one before it as it was.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.deal import Deal
from attnmesh.errors import StoreError
from attnmesh.mesh import Axis, Mesh
from attnmesh.padding import Padding
from attnmesh.sizes import Sizes
from attnmesh.store import FIX, Stored, whole, write

VERSION = 2

MANIFEST = "cache.json"

PIECE = 4096
"""Tokens that are saved as one tensor, so that a rank need not read all of another's to find its own."""


class Share(NamedTuple):
    """A rank's tensors, and which part of the whole they are."""

    keys: Tensor
    values: Tensor
    columns: Tensor  # the token in each slot
    sizes: Sizes
    heads: Axis
    tokens: Axis
    deal: Deal

    @property
    def first(self) -> bool:
        """Whether this rank speaks for the whole."""
        return self.heads.index == self.tokens.index == 0


class Header(NamedTuple):
    """What is said of the whole."""

    sizes: Sizes
    padded: bool
    length: int
    heads: int
    ranks: int
    saving: int


# --- saving ---


def next_saving(path: Path) -> int:
    """The number of the next saving; a folder that holds something else is left alone."""
    if (path / MANIFEST).exists():
        return opened(path).saving + 1
    if path.exists() and not path.is_dir():
        raise StoreError("save", "a folder that can be written to", str(path), "check the path")
    return 1


def save(path: Path, saving: int, share: Share, used: int, padding: Padding | None, length: int) -> None:
    """Write `used` tokens of this rank; the first rank adds which are real."""
    tensors = {"columns": share.columns[:used]}
    for piece, start in enumerate(range(0, used, PIECE)):
        for name, x in (("keys", share.keys), ("values", share.values)):
            tensors[f"{name} {piece}"] = x[:, :, start : min(start + PIECE, used)]
    if share.first and padding is not None:
        tensors["real"] = padding.real[:, :length]
    with _writing(path):
        (path / str(saving)).mkdir(parents=True, exist_ok=True)
        write(_file(path, saving, share.heads.index, share.tokens.index), tensors)


def publish(path: Path, header: Header) -> None:
    """From now on this saving is the one that is loaded; older ones go."""
    said = {"format": "attnmesh cache", "version": VERSION, "sizes": header.sizes.encode()}
    said |= {name: getattr(header, name) for name in ("padded", "length", "heads", "ranks", "saving")}
    fresh = path / f"{MANIFEST}.part"
    with _writing(path), fresh.open("w") as file:
        json.dump(said, file)
        file.flush()
        os.fsync(file.fileno())
        os.replace(fresh, path / MANIFEST)
    for other in path.iterdir():
        if other.is_dir() and other.name.isdigit() and other.name != str(header.saving):
            shutil.rmtree(other, ignore_errors=True)


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
    """What is said of a saved cache."""
    try:
        with (path / MANIFEST).open() as file:
            said = json.loads(file.read(1 << 16))
        version = said["version"] if said["format"] == "attnmesh cache" else None
        numbers = [whole(said[name]) for name in ("length", "heads", "ranks", "saving")]
        sizes, padded = said["sizes"], said["padded"]
        code = [whole(x) for x in sizes]
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        expected, given = "a folder that KVCache.save wrote", f"{path} ({type(error).__name__})"
        raise StoreError("load", expected, given, "check the path, or save again") from error
    if version != VERSION:
        fix = "load it with the version of attnmesh that saved it"
        raise StoreError("load", f"a cache of version {VERSION}", f"version {version!r}", fix)
    try:
        header = Header(Sizes.decode(code), padded is True, *numbers)
    except (ValueError, IndexError, TypeError) as error:
        raise StoreError("load", "the sizes of a cache", f"{sizes!r} in {path}", FIX) from error
    fault = header.sizes.fault(1)
    even = header.heads > 0 and header.ranks > 0 and header.sizes.kv_heads % header.heads == 0
    if fault is not None or not even or header.length > header.sizes.capacity:
        raise StoreError("load", "the sizes of a cache", f"{header} in {path}", FIX)
    return header


def check_fits(sizes: Sizes, mesh: Mesh, device: torch.device) -> None:
    """A file may say anything: nothing is reserved that the device could not hold."""
    if device.type == "cuda":
        room = torch.cuda.get_device_properties(device).total_memory
    else:
        room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    tokens = -(-sizes.capacity // (mesh.queries.size * mesh.keys.size)) + sizes.block
    columns = sizes.batch * sizes.kv_heads // mesh.heads.size * (sizes.head_dim + sizes.value_dim)
    if (needed := tokens * (columns * sizes.dtype.itemsize + 8)) > room:
        given = f"{needed / 1e9:,.1f} GB for a capacity of {sizes.capacity:,}"
        raise StoreError("load", f"at most this device's {room / 1e9:,.1f} GB", given, "say a smaller capacity=")


def real_tokens(path: Path, header: Header) -> Tensor:
    """Which tokens are not padding, (batch, length)."""
    real = Stored(_file(path, header.saving, 0, 0)).read("real")
    if real.dtype != torch.bool or tuple(real.shape) != (header.sizes.batch, header.length):
        raise StoreError("load", "which tokens are real", f"{real.dtype} {tuple(real.shape)} in {path}", FIX)
    return real


def fill(share: Share, path: Path, header: Header) -> int:
    """Read this rank's tokens, wherever they were; how many they are."""
    held, found = share.deal.count(share.tokens.index, header.length), 0
    for stored, into, of, heads in _shards(share, path, header):
        found += (into.stop - into.start) * _fill_from(share, stored, into, of, heads, held)
    own = share.sizes.kv_heads // share.heads.size
    if found != held * own:
        given = f"{found // own} of this rank's {held} tokens in {path}"
        raise StoreError("load", "every token once", given, FIX)
    return held


def _shards(share: Share, path: Path, header: Header) -> Iterator[tuple[Stored, slice, slice, int]]:
    """The saved shards that have some of this rank's heads, and which: by its own counting, and by the shard's."""
    own = _heads(share.sizes.kv_heads, share.heads.size, share.heads.index)
    for h, t in ((h, t) for h in range(header.heads) for t in range(header.ranks)):
        theirs = _heads(share.sizes.kv_heads, header.heads, h)
        both = range(max(own.start, theirs.start), min(own.stop, theirs.stop))
        if both:
            into, of = (slice(both.start - x.start, both.stop - x.start) for x in (own, theirs))
            yield Stored(_file(path, header.saving, h, t)), into, of, len(theirs)


def _fill_from(share: Share, stored: Stored, into: slice, of: slice, heads: int, held: int) -> int:
    """How many of a saved shard's tokens are dealt to this rank here."""
    columns, found, device = stored.read("columns"), 0, share.keys.device
    if columns.dtype != torch.int64 or columns.ndim != 1:
        raise StoreError("load", "the token in each slot", f"{columns.dtype} in {stored.path}", FIX)
    for piece, tokens in enumerate(columns.split(PIECE) if len(columns) else ()):
        mine = (share.deal.owner(tokens) == share.tokens.index).nonzero().flatten()
        if len(mine):
            slots = share.deal.slot(tokens[mine])
            if int(tokens.min()) < 0 or int(slots.max()) >= held:
                raise StoreError("load", "every token once", f"tokens beyond the last in {stored.path}", FIX)
            share.columns[slots.to(device)] = tokens[mine].to(device)
            for name, x, width in (
                ("keys", share.keys, share.sizes.head_dim),
                ("values", share.values, share.sizes.value_dim),
            ):
                read = stored.read(f"{name} {piece}")
                shape = (share.sizes.batch, heads, len(tokens), width)
                if tuple(read.shape) != shape or read.dtype != x.dtype:
                    given = f"{read.dtype} {tuple(read.shape)} in {stored.path}"
                    raise StoreError("load", f"{x.dtype} {shape}", given, FIX)
                x[:, into].index_copy_(2, slots.to(device), read[:, of, mine].to(device))
            found += len(mine)
    return found


def _heads(count: int, axis: int, index: int) -> range:
    """The key heads of a rank along the heads axis."""
    return range(index * count // axis, (index + 1) * count // axis)


def _file(path: Path, saving: int, heads: int, tokens: int) -> Path:
    return path / str(saving) / f"{heads}.{tokens}.safetensors"
