"""Files of one layer's tokens on one rank, of a folder in which a cache grows.

        0.1.0-4096.3.safetensors     a whole piece: 4,096 tokens of one rank, layer 3, as a save writes them
        0.1.4096-8192.3.filling      the last piece: a file of the same size, whose first rows are tokens
        0.1.3.journal                which rows are whole, each run with its digest

A piece of a save may have all layers. One that this layer has filled since has its tokens alone, and comes first.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from ctypes import c_int64
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.core.digest import SUM_ELEMENTS, chained_digest, digest_of_sums, wide_size
from attnmesh.errors import StoreError
from attnmesh.kernels.native.native_digest import digest_of_rows, wrapped
from attnmesh.runtime.mapped_file import MappedFile
from attnmesh.store.journal import Journal
from attnmesh.store.tensor_file import DAMAGED_FIX, PRIVATE_FILE, TensorFile, header_of, tensor_checksum

PIECE_TOKENS = 4096
"""Tokens of a whole piece: a number of runs of the native kernel, so that pieces have the bits of one call."""

TOKEN_INDEX = "columns"
"""Name of the tensor with the index of each token."""


class LayerFiles(NamedTuple):
    """Files of a layer: the folder of a save, the rank's indices along heads and tokens, the layer."""

    folder: Path
    head_rank: int
    token_rank: int
    layer: int
    leader: int
    """First of the layers that keep the same tokens. Files of all these layers have its number."""

    def whole(self, piece_index: int) -> Path:
        """Return the file of a whole piece of this layer alone."""
        return self._file(piece_index, self.layer, "safetensors")

    def filling(self, piece_index: int) -> Path:
        """Return the file of a piece that is being filled."""
        return self._file(piece_index, self.layer, "filling")

    def whole_or_shared(self, piece_index: int) -> Path:
        """Return the file of a whole piece: of this layer alone if it exists, otherwise of all layers."""
        whole = self.whole(piece_index)
        return whole if whole.exists() else self._file(piece_index, self.leader, "safetensors")

    def _file(self, piece_index: int, layer: int, kind: str) -> Path:
        suffix = f".{layer}" if layer else ""
        start = piece_index * PIECE_TOKENS
        return self.folder / f"{self.head_rank}.{self.token_rank}.{start}-{start + PIECE_TOKENS}{suffix}.{kind}"

    def journal(self) -> Journal:
        """Return the journal, unread. Its records are of these files alone."""
        path = self.folder / f"{self.head_rank}.{self.token_rank}.{self.layer}.journal"
        return Journal(path, f"{self.folder.name} {self.head_rank} {self.token_rank} {self.layer}")


def kv_names(layer: int) -> tuple[str, str]:
    """Return the names of a layer's keys and values in files. A layer that keeps keys alone has the first."""
    return f"keys {layer}", f"values {layer}"


class RowShapes(NamedTuple):
    """Dtype of rows, and the shape of the keys and values of a piece."""

    dtype: torch.dtype
    batch: int
    heads: int
    widths: tuple[int, ...]

    def named(self, layer: int, tokens: int = PIECE_TOKENS) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return dtype and shape of the tensors of a file, by their names."""
        names = zip(kv_names(layer), self.widths, strict=False)
        rows = {name: (self.dtype, (self.batch, self.heads, tokens, width)) for name, width in names}
        return {**rows, TOKEN_INDEX: (torch.int64, (tokens,))}


class MappedPiece(NamedTuple):
    """Tokens of a layer in a mapped file: rows of keys and values, with a slot more, and the index of each token."""

    file: MappedFile
    kv_tensors: list[Tensor]
    token_index: Tensor

    def digest(self, start: int, stop: int, rows: Sequence[Tensor] | None = None) -> int:
        """Return the digest of rows `start` to `stop`. A caller that has them elsewhere too passes `rows`.

        It is computed from the checksums that the piece would have if all other rows were zeros.
        """
        rows = [x[:, :, start:stop] for x in self.kv_tensors] if rows is None else rows
        digests = [digest_of_rows(x, start, PIECE_TOKENS) for x in (*rows, self.token_index[start:stop])]
        return wrapped(sum((2 * index + 1) * digest for index, digest in enumerate(digests)))


class PieceSums:
    """Weighted sums of the elements of a piece, from which its checksums follow. Native calls add those of new tokens.

    Other writes and cuts do not keep them up. Then checksums are computed from the piece.
    """

    def __init__(self, shapes: RowShapes, used: int) -> None:
        entries = shapes.named(0).values()
        bytes_of = [
            (dtype.itemsize * math.prod(shape), wide_size(dtype.itemsize * shape[-1])) for dtype, shape in entries
        ]
        self.counts = [-(-size // width // SUM_ELEMENTS) for size, width in bytes_of]
        self.memory = (c_int64 * (1 + sum(self.counts)))()
        """The number of tokens that the sums are of, and the sums of each tensor."""
        if used:
            self.forget()

    def forget(self) -> None:
        """Mark the sums of this piece as incomplete: native calls then add nothing."""
        self.memory[0] = -1

    def checksums(self) -> list[int] | None:
        """Return the checksums of a full piece; None if the sums are not of all its tokens."""
        if self.memory[0] != PIECE_TOKENS:
            return None
        return [int(digest_of_sums(sums)) for sums in torch.tensor(self.memory[1:], device="cpu").split(self.counts)]


def extend_chain(chain: int, file: TensorFile, names: Sequence[str]) -> int:
    """Return the chain of checksums of the pieces so far and of one more."""
    return chained_digest(chain, torch.tensor([file.entry(name).checksum for name in names], device="cpu"))


def check_chain(files: LayerFiles, journal: Journal, chain: int) -> None:
    """Raise unless whole pieces with this chain are those before the journal's rows."""
    if journal.records[0].digest != chain:
        raise StoreError("load", "pieces of this cache", f"a piece of another one in {files.folder}", DAMAGED_FIX)


def open_whole(path: Path, layer: int, shapes: RowShapes) -> tuple[TensorFile, MappedPiece]:
    """Return a whole piece in place, unread."""
    file = TensorFile(path)
    return file, _map_piece(file, MappedFile(path, private=True), shapes.named(layer))


def check_whole_piece(file: TensorFile, piece: MappedPiece, names: Sequence[str]) -> None:
    """Read a whole piece. Raise unless it is as it was written."""
    for name, x in zip(names, (*(x[:, :, :PIECE_TOKENS] for x in piece.kv_tensors), piece.token_index), strict=True):
        file.check(name, x)


def open_filling(files: LayerFiles, piece_index: int, shapes: RowShapes) -> MappedPiece:
    """Return the piece that is being filled, in place."""
    path = files.filling(piece_index)
    return _map_piece(TensorFile(path), MappedFile(path), shapes.named(files.layer))


def make_filling(files: LayerFiles, piece_index: int, shapes: RowShapes) -> MappedPiece:
    """Make the file of a piece, with room on the disk for all its rows."""
    entries = shapes.named(files.layer)
    path = files.filling(piece_index)
    begin, size = header_of(entries, dict.fromkeys(entries, 0))
    path.unlink(missing_ok=True)  # left by a process that was ended before it wrote rows
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE_FILE)
        try:
            os.posix_fallocate(handle, 0, size)
            os.pwrite(handle, begin, 0)
        finally:
            os.close(handle)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    piece = open_filling(files, piece_index, shapes)
    # Otherwise the system would load pages of zeros around an index, before the rows in them are written.
    piece.file.read_alone(piece.token_index)
    return piece


def make_whole(
    files: LayerFiles, piece_index: int, shapes: RowShapes, piece: MappedPiece, checksums: Sequence[int] | None = None
) -> tuple[TensorFile, MappedPiece]:
    """Give a piece that is full its checksums and its name, unless it got them in a call that was broken off.

    Known `checksums` are not computed again.
    """
    entries = shapes.named(files.layer)
    path = files.filling(piece_index)
    whole_file = files.whole(piece_index)
    if whole_file.exists() and not path.exists():
        return open_whole(whole_file, files.layer, shapes)
    rows = (*(x[:, :, :PIECE_TOKENS] for x in piece.kv_tensors), piece.token_index)
    begin, _ = header_of(entries, dict(zip(entries, checksums or map(tensor_checksum, rows), strict=True)))
    handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(handle, begin, 0)
    finally:
        os.close(handle)
    os.replace(path, whole_file)
    return open_whole(whole_file, files.layer, shapes)


def _map_piece(
    file: TensorFile, mapped: MappedFile, entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
) -> MappedPiece:
    """Return tensors of a file in place. The slot after the last row, which kernels expect, is memory that follows."""
    *rows, token_index = (file.map_tensor(mapped, name, dtype, shape) for name, (dtype, shape) in entries.items())
    wider = [x.as_strided((*x.shape[:2], x.shape[2] + 1, x.shape[3]), x.stride()) for x in rows]
    return MappedPiece(mapped, wider, token_index)


class LastPieceFile:
    """Rows of the last piece for `load`, as `TensorFile` has those of a whole one."""

    def __init__(self, path: Path, journal: Journal, shapes: RowShapes, layer: int) -> None:
        file = TensorFile(path)
        self.path = path
        try:
            self.piece = _map_piece(file, MappedFile(path, private=True), shapes.named(layer))
        except OSError as error:
            raise StoreError("load", "files as they were written", f"{path} ({error.strerror})", DAMAGED_FIX) from error
        check_filling(path, self.piece, journal)
        self.count = journal.last.stop - journal.records[0].stop
        """Rows that are tokens."""
        self.tensors = dict(zip(shapes.named(layer), (*self.piece.kv_tensors, self.piece.token_index), strict=True))

    def read(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return the rows of a tensor that are tokens."""
        x = self.tensors[name]
        return x[:, :, : self.count].clone() if x.ndim == 4 else x[: self.count].clone()


def check_filling(path: Path, piece: MappedPiece, journal: Journal) -> None:
    """Raise unless the rows of the last piece that are tokens are as they were written."""
    base = journal.records[0].stop
    for _, start, stop, _, digest in journal.records[1:]:
        fits = 0 <= start - base <= stop - base <= PIECE_TOKENS
        if not fits or (start < stop and piece.digest(start - base, stop - base) != digest):
            raise StoreError("load", "files as they were written", f"damage in {path}", DAMAGED_FIX)


def read_piece(path: Path, layer: int, shapes: RowShapes, tokens: int) -> list[Tensor]:
    """Return rows of a layer in a piece of a save, and the index of each token."""
    file = TensorFile(path)
    return [file.read(name, dtype, shape) for name, (dtype, shape) in shapes.named(layer, tokens).items()]


def pieces_of_save(files: LayerFiles, paths: Mapping[tuple[int, int], Path]) -> Iterator[tuple[int, int, Path]]:
    """Yield (start, stop, file) of the pieces of a save, in order and without gaps. Raise where one is missing."""
    end = 0
    for start, stop in sorted(paths):
        if start != end:
            given = f"none of slots {end} to {start} of rank {files.head_rank}.{files.token_rank} in {files.folder}"
            raise StoreError("load", "every token once", given, DAMAGED_FIX)
        end = stop
        yield start, stop, paths[start, stop]
