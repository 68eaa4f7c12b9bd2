"""Journals: what is read is what was written last, and no other bytes are taken for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnmesh.errors import StoreError
from attnmesh.store.journal import RECORD_BYTES, Journal

pytestmark = pytest.mark.quick

Runs = list[tuple[int, int, int]]
"""Start, stop and digest of each run of rows: the first is of the whole pieces."""


@contextmanager
def written(path: Path) -> Iterator[Journal]:
    """A journal that this process writes, until the block ends."""
    journal = Journal(path, "rank 0")
    journal.open()
    try:
        yield journal
    finally:
        journal.close()


def runs_in(path: Path, identity: str = "rank 0") -> Runs:
    """Return the runs that a reader finds."""
    journal = Journal(path, identity)
    assert journal.read()
    return [(record.start, record.stop, record.digest) for record in journal.records]


def test_a_record_replaces_what_comes_after_its_start(tmp_path: Path) -> None:
    file = tmp_path / "journal"
    assert not Journal(file, "rank 0").read()
    with written(file) as journal:
        journal.begin(4096, 4096, chain=7)
        journal.add(4096, 4100, 4100, digest=1)
        journal.add(4100, 4101, 4101, digest=2)
        assert runs_in(file) == [(4096, 4096, 7), (4096, 4100, 1), (4100, 4101, 2)]
        journal.add(4100, 4103, 4103, digest=3)
        assert runs_in(file) == [(4096, 4096, 7), (4096, 4100, 1), (4100, 4103, 3)]
        assert journal.slot_counts == (4096, 4103, 4103)
        journal.begin(8192, 8200, chain=9, rows=[(8200, 4)])
    assert runs_in(file) == [(8192, 8192, 9), (8192, 8200, 4)]
    assert file.stat().st_size == 2 * RECORD_BYTES


@given(st.integers(0, 2**32))
def test_random_journals_have_the_runs_of_a_list(seed: int) -> None:
    random = Random(seed)
    with TemporaryDirectory() as folder, written(Path(folder) / "journal") as journal:
        expected: Runs = []
        for _ in range(random.randint(1, 12)):
            digest = random.randint(-(2**63), 2**63 - 1)
            if not expected or random.random() < 0.2:
                start = random.randint(0, 99)
                journal.begin(start, start, digest)
                expected = [(start, start, digest)]
            else:  # after all rows, or in place of the last runs
                kept = random.randint(1, len(expected))
                start = expected[kept - 1][1]
                stop = start + random.randint(1, 9)
                journal.add(start, stop, stop, digest)
                expected = [*expected[:kept], (start, stop, digest)]
            assert runs_in(journal.path) == expected
        assert [(one.start, one.stop, one.digest) for one in journal.records] == expected


def test_any_changed_byte_is_damage_and_a_record_that_was_begun_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "journal"
    with written(file) as journal:
        journal.begin(0, 0, chain=7)
        journal.add(0, 3, 3, digest=1)
    content = file.read_bytes()
    for place in range(len(content)):
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(StoreError, match=f"damage at byte {place // RECORD_BYTES * RECORD_BYTES} in"):
            Journal(file, "rank 0").read()
    for size in range(RECORD_BYTES, len(content)):
        file.write_bytes(content[:size])
        assert runs_in(file) == [(0, 0, 7)]
    for size in range(RECORD_BYTES):
        file.write_bytes(content[:size])
        with pytest.raises(StoreError, match=f"{size} bytes without a first record"):
            Journal(file, "rank 0").read()


def test_records_of_another_rank_are_damage(tmp_path: Path) -> None:
    with written(tmp_path / "journal") as journal:
        journal.begin(0, 0, chain=7)
    with pytest.raises(StoreError, match="damage at byte 0"):
        Journal(tmp_path / "journal", "rank 1").read()


def test_two_writers_and_a_file_that_was_removed_are_refused(tmp_path: Path) -> None:
    with written(tmp_path / "journal") as journal:
        journal.begin(0, 0, chain=7)
        with pytest.raises(StoreError, match="one writer of a folder"):
            Journal(journal.path, "rank 0").open()
        journal.path.unlink()
        with pytest.raises(FileNotFoundError):
            journal.add(0, 1, 1, digest=1)
        assert journal.slot_counts == (0, 0, 0)
