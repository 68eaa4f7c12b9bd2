"""Journal of a rank's tokens in a folder: which rows of the last piece are whole, and the digest of each run of them.

A record is written after its rows, so that rows of the last record are those of the last append that returned. One rule
reads a journal: a record of rows `start` to `stop` replaces all after `start`. The first record says how many rows are
in whole pieces, and has the chain of their checksums: a piece of another cache would change it.
"""

import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from errno import ENOENT, ENOSPC
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple

import torch

from attnmesh.core.digest import digest_each
from attnmesh.errors import StoreError
from attnmesh.runtime.private_file import open_without_links
from attnmesh.store.locks import lock_for_cache
from attnmesh.store.tensor_file import DAMAGED_FIX, PRIVATE_FILE

RECORD = struct.Struct("8q")
"""Fields of a record, their digest with the journal's key, and two zeros. `cache.cpp` writes records too.

Their size divides a page, so that none is written in part when a process is killed.
"""

RECORD_BYTES = RECORD.size


def read_file(path: Path) -> bytes:
    """Return the content of a file. Raise `StoreError` for what is no file, as a pipe that would never end."""
    try:
        handle = open_without_links(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreError("load", "files as they were written", f"{path} ({error.strerror})", DAMAGED_FIX) from error
    with os.fdopen(handle, "rb") as file:
        if not S_ISREG(os.fstat(handle).st_mode):
            raise StoreError("load", "files as they were written", f"{path}, which is no regular file", DAMAGED_FIX)
        return file.read()


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
        self.path = path
        self.key = int.from_bytes(blake2b(identity.encode(), digest_size=8).digest(), signed=True)
        """Number that tells the records of other ranks, layers and folders apart."""
        self.records: list[Record] = []
        self.handle = -1
        self.writer = 0
        """Process that opened the file. A process forked from it has its handle and its lock, but is another writer."""

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Let others write the file."""
        if self.handle >= 0:
            os.close(self.handle)
        self.handle = -1

    @property
    def last(self) -> Record:
        """The last record."""
        return self.records[-1]

    @property
    def slot_counts(self) -> tuple[int, int, int]:
        """Slots in whole pieces, all slots in use, and the tokens of all ranks, by the records."""
        first, last = self.records[0], self.records[-1]
        return first.stop, last.stop, last.length

    @property
    def record_bytes(self) -> int:
        """Bytes of the file that are records."""
        return (self.last.serial - self.records[0].serial + 1) * RECORD_BYTES if self.records else 0

    def read(self) -> bool:
        """Read the records of the file. Return False if there is none; raise where the file is damaged."""
        try:
            content = read_file(self.path)
        except FileNotFoundError:
            return False
        records = list[Record]()
        serial = None
        stop = 0
        fields = [*RECORD.iter_unpack(content[: len(content) // RECORD_BYTES * RECORD_BYTES])]
        checks = self._digests([Record(*numbers[:5]) for numbers in fields])
        for (*numbers, stored, first_zero, second_zero), expected in zip(fields, checks, strict=True):
            if (stored, first_zero, second_zero) != (expected, 0, 0):
                raise self._damage_error(f"damage at byte {stop}")
            record = Record(*numbers)
            if serial is not None and record.serial != serial + 1:
                break  # a record from before the journal was begun anew
            serial = record.serial
            stop = stop + RECORD_BYTES
            self._put(records, record)
        if not records or records[0].start != records[0].stop:
            raise self._damage_error(f"{len(content)} bytes without a first record")
        if any(earlier.stop != later.start for earlier, later in pairwise(records)):
            raise self._damage_error("records with gaps between their rows")
        self.records = records
        return True

    def _damage_error(self, given: str) -> StoreError:
        return StoreError("load", "a journal as it was written", f"{given} in {self.path}", DAMAGED_FIX)

    @staticmethod
    def _put(records: list[Record], record: Record) -> None:
        """Add a record, which replaces records of rows after its start, and records without rows."""
        while len(records) > 1 and (records[-1].stop > record.start or records[-1].start == records[-1].stop):
            records.pop()
        records.append(record)

    def open(self) -> None:
        """Open the file to write after its records, alone."""
        self.handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE_FILE)
        lock_for_cache(self.handle, self.path)
        self.writer = os.getpid()
        os.ftruncate(self.handle, self.record_bytes)

    def check_writer(self) -> None:
        """Raise in a process that was forked from the one that opened the file."""
        if os.getpid() != self.writer:
            given = f"a process that was forked from its writer, process {self.writer}"
            fix = "append in the process that made the cache, or on cache.fork(), whose new tokens are in memory"
            raise StoreError("KVCache folder", "one writer of a folder", given, fix)

    def begin(self, start: int, length: int, chain: int, rows: Sequence[tuple[int, int]] = ()) -> None:
        """Begin anew after `start` rows in whole pieces. `rows` are (stop, digest) of the runs after these rows."""
        serial = self.records[-1].serial + 1 if self.records else 0
        records = [Record(serial, start, start, length, chain)]
        for stop, digest in rows:
            records.append(Record(serial + len(records), records[-1].stop, stop, length, digest))
        self._write(records, 0)
        self.records = records
        with suppress(OSError):  # records that stay have older serials, and are not read
            os.ftruncate(self.handle, self.record_bytes)

    def add(self, start: int, stop: int, length: int, digest: int) -> None:
        """Write a record of rows that are written."""
        record = Record(self.records[-1].serial + 1, start, stop, length, digest)
        self._write([record], self.record_bytes)
        self.count_written(record)

    def count_written(self, record: Record) -> None:
        """Count a record that is in the file, after the others."""
        self._put(self.records, record)

    def _write(self, records: Sequence[Record], offset: int) -> None:
        """Write records. Raise if the file was removed, so that they would be lost, or if the disk is full."""
        if not os.fstat(self.handle).st_nlink:
            raise OSError(ENOENT, os.strerror(ENOENT))
        packed = b"".join(
            RECORD.pack(*record, check, 0, 0) for record, check in zip(records, self._digests(records), strict=True)
        )
        if os.pwrite(self.handle, packed, offset) != len(packed):
            raise OSError(ENOSPC, os.strerror(ENOSPC))

    def _digests(self, records: Sequence[Record]) -> list[int]:
        """Return the digest of each record with the key."""
        keyed = [(self.key, *record) for record in records]
        return digest_each(torch.tensor(keyed, dtype=torch.int64, device="cpu").view(len(keyed), 6)).tolist()
