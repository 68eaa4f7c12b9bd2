"""A folder where ranks end, disks are full and paths are odd: never a mixture, and the same error on all ranks."""

import gc
import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import attnmesh as am
from attnmesh.errors import StoreError
from attnmesh.mesh.shapes import AXES, Shape
from attnmesh.store import folder_shard, load_layers, piece_files
from attnmesh.store.journal import Journal
from attnmesh.store.layer_files import PIECE_TOKENS
from attnmesh.store.manifest import read_manifest
from attnmesh.store.token_ids import TokenIds
from tests.support.caches.growing_caches import (
    SIZES,
    decoded,
    flip,
    full_journal,
    grow,
    in_memory,
    opened,
    rows,
    same_outputs,
)
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.seeds import rotated
from tests.support.truth.tolerances import FLOAT32

TWO = Shape(1, 1, 2)

LENGTH, LEFT, NEW = 2 * PIECE_TOKENS + 90, (2 * PIECE_TOKENS + 40, 70), 50
"""Tokens of two ranks, those that a truncation leaves, in the last pieces or before them, and new ones after it."""

FREEZE = 0.15
"""Seconds in which the other rank goes on as far as it can."""


def history(left: int, length: int) -> am.KVCache:
    """Return a cache in memory of so many tokens, of which those from `left` on are the new ones."""
    cache = in_memory(min(left, length))
    if length > left:
        k, v = rows(left, length)
        cache.append(k + 1, v - 1)
    return cache


@on_each_rank
def freeze_one_rank(path: Path, frozen: int, point: str, left: int) -> dict[str, bool]:
    """On a rank: truncate and append, while one rank stops at some point. Return what is right in the files then.

    Copies of the files there are what is left if that rank is killed, and later the other one.
    """
    mesh, copies = named_mesh(TWO, AXES), [path / "before", path / "after"]
    cache = am.KVCache(mesh, **SIZES, folder=path / "lives")
    grow(cache, LENGTH)
    owner, original = (Journal, Journal._write) if point == "record" else (folder_shard, folder_shard.native_append)
    left_over = iter(copies)

    def stops(*arguments: Any) -> Any:
        for moment in (0, 1):
            if (copy := next(left_over, None)) is not None:
                time.sleep(FREEZE)
                shutil.copytree(path / "lives", copy)
            if not moment:
                found = original(*arguments)
        return found

    with patch.object(owner, original.__name__, stops if dist.get_rank() == frozen else original):
        cache.truncate(left)
        for more in (1, 17, NEW - 18):
            k, v = rows(cache.length, cache.length + more)
            cache.append(k + 1, v - 1)
    dist.barrier()
    del cache
    gc.collect()
    right = {}
    for copy in copies:
        reopened = am.KVCache(mesh, **SIZES, folder=copy)
        length = reopened.length
        wanted = [history(LENGTH, length)] if length <= LENGTH else []
        wanted += [history(left, length)] if length <= left + NEW else []
        outputs = (torch.allclose(decoded(reopened), decoded(each), atol=FLOAT32) for each in wanted)
        right |= {f"tokens {copy.name}": any(outputs), f"length {copy.name}": left <= length}
        del reopened
        gc.collect()
        dist.barrier()
    return right


@pytest.mark.parametrize(("frozen", "point", "left"), rotated([0, 1], ["record", "append"], LEFT, every=2))
def test_ranks_that_are_killed_leave_no_mixture(frozen: int, point: str, left: int, pool: Pool, tmp_path: Path) -> None:
    for right in pool.run(2, freeze_one_rank, tmp_path, frozen, point, left):
        assert right == dict.fromkeys(right, True)


def said_by_steps(cache: am.KVCache, shards: bool) -> str:
    """Append and decode, with tokens of each rank or the same on all, until an error. Return what it says."""
    rank = dist.get_rank()
    try:
        for _ in range(40):
            if shards:
                k, v = (x[:, :, rank, None] for x in rows(cache.length, cache.length + 2))
                cache.append_shard(k, v, torch.tensor([cache.length + rank]))
            else:
                grow(cache, 1)
            decoded(cache)
    except StoreError as error:
        return str(error)
    return ""


@on_each_rank
def fill_one_disk(path: Path, shape: Shape, shards: bool) -> str:
    """On a rank: what is said where the disk of rank 1 alone is full."""
    mesh = named_mesh(shape, AXES)
    cache = am.KVCache(mesh, **SIZES, folder=path)
    grow(cache, 20)
    decoded(cache)
    grow(cache, 1)  # of a known signature
    with full_journal(cache) if dist.get_rank() == 1 else nullcontext():
        said = said_by_steps(cache, shards)
    held = cache.length
    del cache
    gc.collect()
    dist.barrier()
    again = am.KVCache(mesh, **SIZES, folder=path)
    assert again.length <= held
    assert torch.allclose(decoded(again), decoded(in_memory(again.length)), atol=FLOAT32)
    grow(again, 1)
    return said


@pytest.mark.parametrize(
    ("shape", "shards"),
    [pytest.param(TWO, False, marks=pytest.mark.long), (TWO, True), (Shape(2, 1, 1), False)],
    ids=str,
)
def test_a_full_disk_of_one_rank_raises_on_all(shape: Shape, shards: bool, pool: Pool, tmp_path: Path) -> None:
    one, other = pool.run(2, fill_one_disk, tmp_path, shape, shards)
    assert one == other
    assert "(No space left on device). Fix: free space there, and open the folder again" in one


@on_each_rank
def fill_one_disk_in_a_step(path: Path, one_row: bool) -> str:
    """On a rank: what steps that append say where the disk of rank 1 alone is full. All ranks go on after it."""
    am.set_deadline(20)
    cache = am.KVCache(named_mesh(TWO, AXES), **SIZES, folder=path)
    grow(cache, 20)

    def step() -> torch.Tensor:
        q, (k, v) = torch.ones(1, 4, 1, 16), rows(cache.length, cache.length + 1)
        return am.decode_rows(q, [cache], k=k, v=v) if one_row else am.decode(q, cache, k=k, v=v)

    step()
    step()
    with full_journal(cache) if dist.get_rank() == 1 else nullcontext(), pytest.raises(StoreError) as caught:
        step()
    cache.truncate(22)
    assert torch.allclose(decoded(cache), decoded(in_memory(22)), atol=FLOAT32)
    step()
    assert torch.allclose(decoded(cache), decoded(in_memory(23)), atol=FLOAT32)
    return str(caught.value)


@pytest.mark.parametrize("one_row", [False, True])
def test_a_full_disk_of_one_rank_within_a_step_raises_on_all(one_row: bool, pool: Pool, tmp_path: Path) -> None:
    one, other = pool.run(2, fill_one_disk_in_a_step, tmp_path, one_row)
    assert one == other
    assert "No space left on device" in one


def a_pipe(folder: Path) -> Path:
    (journal,) = folder.glob("1-*/*.journal")
    journal.unlink()
    os.mkfifo(journal)
    return folder


def a_linked(name: str) -> Callable[[Path], Path]:
    def linked(folder: Path) -> Path:
        (file,) = folder.glob(f"1-*/{name}")
        file.rename(folder.parent / "elsewhere")
        file.symlink_to(folder.parent / "elsewhere")
        return folder

    return linked


def a_file(folder: Path) -> Path:
    return next(folder.glob("1-*/*.journal"))


def under_a_file(folder: Path) -> Path:
    return a_file(folder) / "cache"


ODD: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a pipe as journal": (a_pipe, "0.journal, which is no regular file"),
    "a linked journal": (a_linked("*.journal"), r"0.journal \(Too many levels of symbolic links\)"),
    "a linked piece": (a_linked("*.safetensors"), r"4096.safetensors' \(Too many levels of symbolic links\)"),
    "a linked last piece": (a_linked("*.filling"), r"8192.filling' \(Too many levels of symbolic links\)"),
    "a file": (a_file, r"expected a folder, given .*0\.journal, a file"),
    "a path under a file": (under_a_file, r"0.journal.* \(Not a directory\)"),
    "a long name": (lambda folder: folder / ("x" * 300), r"\(File name too long\)"),
    "no name": (lambda folder: Path(), "the path of a folder, given ''"),
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_places_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    cache = opened(tmp_path / "a")
    grow(cache, PIECE_TOKENS + 10)
    del cache
    gc.collect()
    change, said = ODD[kind]
    place = change(tmp_path / "a")
    with pytest.raises(StoreError, match=said) as raised:
        am.KVCache(None, **SIZES, folder="" if place == Path() else place)
    assert "free space there, and append" not in str(raised.value)


def test_an_error_that_is_kept_keeps_no_lock(tmp_path: Path) -> None:
    grow(opened(tmp_path), 9)
    (journal,) = tmp_path.glob("1-*/*.journal")
    content = journal.read_bytes()
    flip(journal, -1)
    with pytest.raises(StoreError, match="damage at byte") as kept:
        opened(tmp_path)
    journal.write_bytes(content)
    assert same_outputs(opened(tmp_path), in_memory(9))
    assert kept.value.__traceback__ is not None


def test_a_cache_holds_its_folder_by_name(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    grow(cache, 9)
    cache.own_shard.reserve_memory = lambda _: True  # type: ignore[attr-defined]
    gc.collect()
    with pytest.raises(StoreError, match="one writer of a folder"):
        opened(tmp_path)
    del cache
    gc.collect()
    assert same_outputs(opened(tmp_path), in_memory(9))


def test_a_folder_that_goes_under_a_cache_is_named(tmp_path: Path) -> None:
    cache = opened(tmp_path / "a")
    grow(cache, 30)
    shutil.rmtree(tmp_path / "a")
    for change in (lambda: grow(cache, 1), lambda: grow(cache, 50), lambda: cache.truncate(3)):
        with pytest.raises(StoreError, match=r"/a/1-.*' \(No such file or directory\). Fix: call cache.fork"):
            change()
    assert same_outputs(cache, in_memory(30))
    cache.fork().save(tmp_path / "b")
    assert same_outputs(am.KVCache.load(tmp_path / "b", None), in_memory(30))


def test_a_reader_beside_a_writer_reads_a_whole_state(tmp_path: Path) -> None:
    cache, twin = opened(tmp_path), in_memory(300)
    grow(cache, 300)
    original, writes = piece_files.LastPieceFile, iter(range(2))

    def beside(*arguments: Any) -> Any:
        if next(writes, None) is not None:
            cache.truncate(100)
            twin.truncate(100)
            k, v = rows(100, 300)
            cache.append(k + 1, v)
            twin.append(k + 1, v)
        return original(*arguments)

    with patch.object(piece_files, "LastPieceFile", beside):
        assert same_outputs(am.KVCache.load(tmp_path, None), twin)


class Loaded(NamedTuple):
    """A cache that is loaded from a folder, and the ids of its tokens."""

    length: int
    capacity: int
    ids: list[list[int]]


@on_each_rank
def load_while_it_grows(path: Path, tokens: int) -> Loaded:
    """Load a folder in which tokens arrive between the looks of two ranks."""
    original = load_layers.read_saved_layers
    late = dist.get_rank() == 1

    def write(length: int) -> None:
        TokenIds(path / read_manifest(path).folder_name).write(torch.arange(length)[None])
        cache.reserve(max(length, 60))
        grow(cache, length - cache.length)

    if late:
        cache = opened(path, capacity=60)
        write(50)
    dist.barrier()

    def inspected(*arguments: Any) -> Any:
        if late:
            dist.barrier()
            write(tokens)
            return original(*arguments)
        saved_layers = original(*arguments)
        dist.barrier()
        return saved_layers

    with patch.object(load_layers, "read_saved_layers", inspected):
        (loaded,), tensors, _ = load_layers.load_layers(am.KVCache, path, named_mesh(TWO, AXES))
    return Loaded(loaded.length, loaded.config.capacity, tensors["held"].tolist())


@pytest.mark.parametrize("tokens", [55, 70])
def test_ranks_load_the_tokens_that_all_have_seen(tokens: int, pool: Pool, tmp_path: Path) -> None:
    expected = Loaded(length=50, capacity=60, ids=[list(range(50))])
    assert pool.run(2, load_while_it_grows, tmp_path, tokens) == [expected] * 2


def test_a_reader_of_a_folder_that_never_rests_says_so(tmp_path: Path) -> None:
    cache, original, numbers = opened(tmp_path), piece_files.LastPieceFile, count(1)
    grow(cache, 300)

    def beside(*arguments: Any) -> Any:
        cache.truncate(100)
        k, v = rows(100, 300)
        cache.append(k + next(numbers), v)
        return original(*arguments)

    with (
        patch.object(piece_files, "LastPieceFile", beside),
        pytest.raises(StoreError, match="expected a folder at rest, given"),
    ):
        am.KVCache.load(tmp_path, None)


def test_a_thread_that_writes_is_no_damage(tmp_path: Path) -> None:
    cache, ends = opened(tmp_path), threading.Event()
    grow(cache, 200)

    def write() -> None:
        while not ends.is_set():
            grow(cache, 1)
            if cache.length > 260:
                cache.truncate(200)
            time.sleep(0.002)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(5):
            loaded = am.KVCache.load(tmp_path, None)
            assert same_outputs(loaded, in_memory(loaded.length))
    finally:
        ends.set()
        writer.join()
