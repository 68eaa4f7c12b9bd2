"""Journal of a rank's tokens in a folder: which rows of the last piece are whole, and the digest of each run of them.

A record is written after its rows, so that rows of the last record are those of the last append that returned. One rule
reads a journal: a record of rows `start` to `stop` replaces all after `start`. The first record says how many rows are
in whole pieces before, and has the chain of their checksums, by which a piece of another cache is found.
"""

import gc
import os
import struct
from collections.abc import Sequence
from fcntl import LOCK_EX, LOCK_NB, flock
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from attnmesh.errors import StoreError, require
from attnmesh.store.tensor_file import FIX, PRIVATE_FILE

FIELDS, CHECK = struct.Struct("5q"), 24
"""Fields of a record, and the bytes of the checksum after them."""

SIZE = FIELDS.size + CHECK
"""Bytes of a record. It divides a page, so that no record is written in part when a process is killed."""


def lock(handle: int, path: Path) -> None:
    """Lock a file or a folder until its handle is closed, on a file system that has locks.

    Raise if another writer has it.
    """
    if not _locked(handle):
        gc.collect()  # a cache that nobody uses any more may still be in memory, with its locks
        given, fix = f"{path}, which another cache writes", "let go of it or end its process, or pass another folder"
        require(_locked(handle), StoreError, "KVCache folder", "one writer of a folder", given, fix)


def _locked(handle: int) -> bool:
    """Lock a file. Return False if another writer has it."""
    try:
        flock(handle, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks
    return True


class Record(NamedTuple):
    """Rows from `start` up to `stop`, after which a rank has all its tokens of the first `length`."""

    serial: int
    start: int
    stop: int
    length: int
    digest: int


class Journal:
    """Records of one rank's rows of one layer, in a file that this process alone writes."""

    def __init__(self, path: Path, identity: str) -> None:
        self.path, self.key = path, identity.encode()[:64]
        self.records: list[Record] = []
        self._stop = 0  # bytes of the file that are records
        self._handle: int | None = None

    def __del__(self) -> None:
        if self._handle is not None:
            os.close(self._handle)

    @property
    def last(self) -> Record:
        """The last record."""
        return self.records[-1]

    def read(self) -> bool:
        """Read the records of the file. Return False if there is none; raise where the file is damaged."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return False
        found, serial = list[Record](), None
        for place in range(0, len(content) - SIZE + 1, SIZE):
            fields = content[place : place + FIELDS.size]
            self._require(content[place + FIELDS.size : place + SIZE] == self._check(fields), f"damage at byte {place}")
            record = Record(*FIELDS.unpack(fields))
            if serial is not None and record.serial != serial + 1:
                break  # of before the journal was begun anew
            serial, self._stop = record.serial, place + SIZE
            self._put(found, record)
        self._require(bool(found) and found[0].start == found[0].stop, f"{len(content)} bytes without a first record")
        fits = all(one.stop == other.start for one, other in pairwise(found))
        self._require(fits, "records with gaps between their rows")
        self.records = found
        return True

    def _require(self, fits: object, given: str) -> None:
        require(bool(fits), StoreError, "load", "a journal as it was written", f"{given} in {self.path}", FIX)

    @staticmethod
    def _put(records: list[Record], record: Record) -> None:
        """Add a record, which replaces all after its start, and those without rows."""
        while len(records) > 1 and (records[-1].stop > record.start or records[-1].start == records[-1].stop):
            records.pop()
        records.append(record)

    def open(self) -> None:
        """Open the file to write after its records, alone."""
        self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE_FILE)
        lock(self._handle, self.path)
        os.ftruncate(self._handle, self._stop)
        os.lseek(self._handle, 0, os.SEEK_END)

    def begin(self, start: int, length: int, chain: int, rows: Sequence[tuple[int, int]] = ()) -> None:
        """Begin anew after `start` rows in whole pieces, with (stop, digest) of those after them, if there are any."""
        assert self._handle is not None
        serial = self.records[-1].serial + 1 if self.records else 0
        records = [Record(serial, start, start, length, chain)]
        for stop, digest in rows:
            records.append(Record(serial + len(records), records[-1].stop, stop, length, digest))
        os.pwrite(self._handle, b"".join(map(self._packed, records)), 0)
        os.ftruncate(self._handle, len(records) * SIZE)
        os.lseek(self._handle, 0, os.SEEK_END)
        self.records = records

    def add(self, start: int, stop: int, length: int, digest: int) -> None:
        """Write a record of rows that are written."""
        assert self._handle is not None
        record = Record(self.records[-1].serial + 1, start, stop, length, digest)
        packed = self._packed(record)
        if os.write(self._handle, packed) != SIZE:
            raise OSError(28, "No space left on device")
        self._put(self.records, record)

    def _packed(self, record: Record) -> bytes:
        fields = FIELDS.pack(*record)
        return fields + self._check(fields)

    def _check(self, fields: bytes) -> bytes:
        return blake2b(fields, digest_size=CHECK, key=self.key).digest()
