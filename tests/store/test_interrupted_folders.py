"""Changes of a cache in a folder that end on the way: a full disk, an interrupt, a killed process."""

import gc
import os
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest

from attnmesh.errors import StoreError
from attnmesh.store import folder_shard
from attnmesh.store.journal import Journal
from attnmesh.store.layer_files import PIECE_TOKENS
from tests.support.caches.growing_caches import full_journal, grow, in_memory, opened, same_outputs


@pytest.fixture(params=[True, False], ids=["native", "python"])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Write rows by the native call, or without it."""
    if not request.param:
        monkeypatch.setattr(folder_shard, "native_append", lambda *_: False)
    return bool(request.param)


def test_a_full_disk_leaves_the_cache_usable(tmp_path: Path, native: bool) -> None:
    cache = opened(tmp_path)
    grow(cache, PIECE_TOKENS - 1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with patch.object(os, "posix_fallocate", full):
        grow(cache, 1)
        with pytest.raises(StoreError, match=r"\(No space left on device\). Fix: free space there, and append again"):
            grow(cache, 1)
    assert same_outputs(cache, in_memory(PIECE_TOKENS))
    grow(cache, 1)
    with full_journal(cache):
        for more in (1, 50):
            with pytest.raises(StoreError, match="No space left on device"):
                grow(cache, more)
        with pytest.raises(StoreError, match="No space left on device"):
            cache.truncate(PIECE_TOKENS)
    assert same_outputs(cache, in_memory(PIECE_TOKENS + 1))
    grow(cache, 50)
    del cache
    assert same_outputs(opened(tmp_path), in_memory(PIECE_TOKENS + 51))


class Killed(BaseException):
    """The end of a process at some point."""


@pytest.mark.parametrize(
    "point", ["make_filling", "make_whole", "os.replace", "Journal.begin", "Journal.add", "native_append"]
)
@pytest.mark.parametrize("after", [False, True])
def test_any_point_of_a_change_leaves_a_whole_state(
    tmp_path: Path, point: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = point.rpartition(".")[2]
    owner = {"os": os, "Journal": Journal}.get(point.rpartition(".")[0], folder_shard)
    original = getattr(owner, name)

    def ends(*arguments: Any) -> None:
        if after:
            original(*arguments)
        raise Killed

    for kind, begun, change, lengths in (
        ("growth", PIECE_TOKENS, lambda cache: grow(cache, 2), {PIECE_TOKENS, PIECE_TOKENS + 1, PIECE_TOKENS + 2}),
        ("cut", PIECE_TOKENS + 5, lambda cache: cache.truncate(10), {10, PIECE_TOKENS + 5}),
    ):
        cache = opened(tmp_path / kind)
        grow(cache, begun)
        monkeypatch.setattr(owner, name, ends)
        if point == "Journal.add":
            monkeypatch.setattr(folder_shard, "native_append", lambda *_: False)
        try:
            change(cache)
        except Killed:
            cache.own_shard.journal.close()
        monkeypatch.undo()
        del cache
        cache = opened(tmp_path / kind)
        assert cache.length in lengths
        assert same_outputs(cache, in_memory(cache.length))
        grow(cache, 3)
        assert same_outputs(cache, in_memory(cache.length))
        del cache


@pytest.mark.parametrize(
    "point",
    ["make_filling", "make_whole", "os.replace", "Journal.begin", "Journal.add", "Journal.count_written"]
    + ["native_append", "FolderShard._fill", "FolderShard._set_counts", "FolderShard._with_whole"],
)
@pytest.mark.parametrize("after", [False, True])
def test_a_cache_goes_on_after_an_interrupt(
    tmp_path: Path, point: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, _, name = point.rpartition(".")
    owner = {"os": os, "Journal": Journal, "FolderShard": folder_shard.FolderShard}.get(place, folder_shard)
    original, ended = getattr(owner, name), list[str]()

    def ends(*arguments: Any) -> Any:
        found = original(*arguments) if after or ended else None
        if not ended:
            ended.append(name)
            raise KeyboardInterrupt
        return found

    cache = opened(tmp_path)
    grow(cache, PIECE_TOKENS - 1)
    lengths = []
    for change in (
        lambda cache: grow(cache, 1),
        lambda cache: grow(cache, 2),
        lambda cache: cache.truncate(cache.length - 1),
        lambda cache: cache.truncate(10),
    ):
        ended.clear()
        monkeypatch.setattr(owner, name, ends)
        if name in ("add", "_set_counts"):
            monkeypatch.setattr(folder_shard, "native_append", lambda *_: False)
        with suppress(KeyboardInterrupt):
            change(cache)
        monkeypatch.undo()
        assert same_outputs(cache, in_memory(cache.length))
        grow(cache, 2)
        assert same_outputs(cache, in_memory(cache.length))
        lengths.append(cache.length)
        del cache
        gc.collect()
        cache = opened(tmp_path)
        assert same_outputs(cache, in_memory(lengths[-1]))


def test_tokens_of_others_are_counted_once_after_an_interrupt(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    grow(cache, 5)
    shard, count_written = cache.own_shard, Journal.count_written

    def ends(*arguments: Any) -> None:
        count_written(*arguments)
        raise KeyboardInterrupt

    with patch.object(Journal, "count_written", ends), pytest.raises(KeyboardInterrupt):
        shard._skip_run(16, 5, 5)
    assert cache.length == 5
    grow(cache, 3)
    del cache, shard
    assert same_outputs(opened(tmp_path), in_memory(8))


def test_a_full_disk_where_a_piece_begins_is_told(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    grow(cache, PIECE_TOKENS)
    with patch.object(Journal, "begin", side_effect=OSError(28, "No space left on device")):
        for _ in range(2):
            with pytest.raises(StoreError, match="append again from token 4096 on"):
                grow(cache, 4)
    grow(cache, 4)
    del cache
    assert same_outputs(opened(tmp_path), in_memory(PIECE_TOKENS + 4))


def append_until_killed(path: Path, seed: int, promised: int) -> None:
    """Append and truncate at random, and write the length after each call to a pipe."""
    random, cache = Random(seed), opened(path)
    while True:
        if cache.length > 9000 or random.random() < 0.02:
            cache.truncate(cache.length - random.randint(0, min(cache.length, 6000)))
        else:
            grow(cache, random.choice((1, 1, 1, 2, 64, 900)))
        os.write(promised, cache.length.to_bytes(8, "little"))


def kill_and_look(path: Path, seed: int) -> None:
    """Kill a process at a random moment. Raise unless what it has promised is whole."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            append_until_killed(path, seed, write)
        finally:
            os._exit(1)
    os.close(write)
    content = os.read(read, 8)
    time.sleep(Random(seed).random() * 0.3)
    os.kill(child, signal.SIGKILL)
    while more := os.read(read, 1 << 16):
        content += more
    os.close(read)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    promised = int.from_bytes(content[-8:], "little")
    cache = opened(path)
    # The call that was cut off may have appended some of its tokens, or have truncated.
    assert promised <= cache.length <= promised + 900 or promised - 6000 <= cache.length < promised
    assert same_outputs(cache, in_memory(cache.length))


@pytest.mark.filterwarnings("ignore:This process")
def test_a_killed_process_leaves_what_it_promised(tmp_path: Path) -> None:
    for seed in range(3):
        kill_and_look(tmp_path, seed)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:This process")
def test_twenty_killed_processes_leave_what_they_promised(tmp_path: Path) -> None:
    for seed in range(3, 23):
        kill_and_look(tmp_path, seed)


@pytest.mark.parametrize("sizes", [{}, {"hot": 4, "block": 2}], ids=["files", "two memories"])
def test_a_forked_process_is_another_writer(tmp_path: Path, native: bool, sizes: dict[str, Any]) -> None:
    """It has the handles and the locks of the process that it was forked from, and its own counts of the same rows."""
    cache = opened(tmp_path, **sizes)
    grow(cache, 8)
    if not (child := os.fork()):
        code = 1
        with suppress(BaseException):
            for write in (partial(grow, cache, 8), *([] if sizes else [partial(cache.truncate, 3)])):
                with pytest.raises(StoreError, match=r"given a process that was forked from its writer, process \d+\."):
                    write()
            code = 0 if same_outputs(cache, in_memory(8, **sizes)) else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    grow(cache, 8)
    assert same_outputs(cache, in_memory(16, **sizes))
    cache.flush()
    del cache
    gc.collect()
    assert same_outputs(opened(tmp_path, **sizes), in_memory(16, **sizes))
