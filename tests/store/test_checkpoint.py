"""Checkpoints: the previous save stays until the next is complete, decoding continues, and damaged files raise."""

import json
import math
import multiprocessing as mp
import os
import resource
import shutil
import sys
import time
import weakref
from contextlib import suppress
from fcntl import LOCK_EX, flock
from pathlib import Path
from threading import Event, Thread, current_thread
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

import attnmesh as am
from attnmesh.cache import saved_cache
from attnmesh.cli.launch import run_on_ranks
from attnmesh.core.digest import digest
from attnmesh.errors import StoreError
from attnmesh.mesh.shapes import AXES, Shape
from attnmesh.store import checkpoint, checkpoint_writer, tensor_file
from attnmesh.store.checkpoint import load_layers
from attnmesh.store.checkpoint_writer import save_layers
from attnmesh.store.tensor_file import TensorFile, link_or_write
from tests.support.mesh_problems import named_mesh
from tests.support.pool import Pool, on_each_rank
from tools.fuzz_store import DamagedCache


def cache_of(tokens: int, ranks: int = 1, width: int = 8) -> am.KVCache:
    mesh = None if ranks == 1 else named_mesh(Shape(1, 1, ranks), AXES)
    cache = am.KVCache(mesh, batch=1, kv_heads=2, head_dim=width, capacity=tokens + 40, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    cache.append(*torch.randn(2, 1, 2, tokens, width, generator=generator).unbind())
    return cache


def decoded(cache: am.KVCache) -> torch.Tensor:
    """Return the output of a fixed query."""
    width = cache.sizes.head_dim
    return am.decode(torch.randn(1, 4, 1, width, generator=torch.Generator().manual_seed(1)), cache)


def only_save_in(path: Path) -> Path:
    """Return the folder of the only save."""
    (folder,) = (each for each in path.iterdir() if each.is_dir())
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="/proc takes no folders")
def test_a_folder_that_cannot_be_made_is_no_other_job() -> None:
    with pytest.raises(StoreError, match=r"a folder that can be written to, given '/proc/no/folder' \(No such file"):
        cache_of(20).save("/proc/no/folder")


def test_a_save_to_an_impossible_folder_raises_and_two_to_one_succeed(tmp_path: Path) -> None:
    cache = am.KVCache(None, batch=1, kv_heads=1, head_dim=2, capacity=8, dtype=torch.float32)
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="save: expected a folder that can be written to"):
        cache.save(tmp_path / "file" / "folder")
    for _ in range(2):
        cache.save(tmp_path / "folder")
    assert am.KVCache.load(tmp_path / "folder", None).length == 0


@on_each_rank
def load_length(path: Path) -> int:
    return am.KVCache.load(path, named_mesh(Shape(1, 1, dist.get_world_size()), AXES)).length


@on_each_rank
def save_cache(path: Path) -> None:
    cache_of(50, 2).save(path)


def test_damaged_or_foreign_folder_raises(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, save_cache, tmp_path / "good")
    assert pool.run(3, load_length, tmp_path / "good") == [50] * 3
    (tmp_path / "foreign").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "cache.json").write_text('{"format": "another", "version": 2}')
    data = max((tmp_path / "good").glob("1-*/*.safetensors"), key=lambda file: file.stat().st_size)
    content = bytearray(data.read_bytes())
    for place in range(len(content) // 4, len(content) // 2):
        content[place] ^= 0x40
    data.write_bytes(content)
    for name, message in (
        ("foreign", "a folder that KVCache.save wrote"),
        ("other", "a folder that KVCache.save wrote"),
        ("good", ""),
    ):
        results = pool.ask(3, load_length, tmp_path / name)
        assert [type(result) for result in results] == [StoreError] * 3
        assert len({str(result) for result in results}) == 1
        assert message in str(results[0])


def test_full_disk_leaves_the_previous_save(tmp_path: Path) -> None:
    small, large = cache_of(20), cache_of(20_000)
    small.save(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(StoreError, match=r"save: expected a folder that can be written to, given .*File too large"):
            large.save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert torch.equal(decoded(am.KVCache.load(tmp_path, None)), decoded(small))
    large.save(tmp_path)
    assert torch.equal(decoded(am.KVCache.load(tmp_path, None)), decoded(large))
    assert sorted(path.name.split("-")[0] for path in tmp_path.iterdir()) == ["2", "cache.json"]


@on_each_rank
def save_with_one_full_disk(path: Path) -> list[str]:
    """Fill the disk of rank 1. Return the rank's error, and "True" if it still loads the previous save."""
    first, second = cache_of(20, 2), cache_of(20_000, 2)
    first.save(path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        second.save(path)
        message = "no error"
    except StoreError as error:
        message = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    same = torch.equal(decoded(am.KVCache.load(path, first.device_mesh)), decoded(first))
    return [message, str(same)]


def test_full_disk_of_one_rank_raises_on_all(pool: Pool, tmp_path: Path) -> None:
    one, other = pool.run(2, save_with_one_full_disk, tmp_path)
    assert one == other
    assert "File too large" in one[0]
    assert one[1] == "True"


@on_each_rank
def save_while_decoding(path: Path) -> bool:
    cache, twin = cache_of(3000, 2), cache_of(3000, 2)
    saving = cache.save(path, wait=False)
    generator = torch.Generator().manual_seed(2)
    for _ in range(20):
        cache.append(*torch.randn(2, 1, 2, 1, 8, generator=generator).unbind())
        decoded(cache)
    saving.wait()
    saving.wait()
    return saving.written and torch.equal(decoded(am.KVCache.load(path, cache.device_mesh)), decoded(twin))


def test_decoding_continues_during_a_save(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, save_while_decoding, tmp_path) == [True] * 2


def test_truncate_waits_for_a_running_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens appended after `truncate` would overwrite slots that the save still reads."""
    cache, twin = cache_of(3000), cache_of(3000)
    link_or_write = checkpoint_writer.link_or_write
    monkeypatch.setattr(
        checkpoint_writer, "link_or_write", lambda *args: (torch.randn(700_000).sort(), link_or_write(*args))
    )
    saving = cache.save(tmp_path, wait=False)
    cache.truncate(100)
    assert saving.written
    cache.append(*torch.zeros(2, 1, 2, 500, 8).unbind())
    saving.wait()
    assert torch.equal(decoded(am.KVCache.load(tmp_path, None)), decoded(twin))


def test_interrupted_save_changes_nothing(tmp_path: Path) -> None:
    small = cache_of(20)
    small.save(tmp_path)
    cut = tmp_path / f"2-{7:016x}"
    cut.mkdir()
    (cut / "0.0.0-64.safetensors.part").write_bytes(b"half of it")
    (tmp_path / f"cache.json.{7:016x}").write_text('{"format": "attnm')
    assert torch.equal(decoded(am.KVCache.load(tmp_path, None)), decoded(small))
    small.append(*torch.ones(2, 1, 2, 3, 8).unbind())
    small.save(tmp_path)
    assert torch.equal(decoded(am.KVCache.load(tmp_path, None)), decoded(small))
    assert sorted(path.name for path in tmp_path.iterdir()) == [only_save_in(tmp_path).name, "cache.json"]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of files that are written rather than linked."""
    names: list[str] = []
    original = tensor_file.write_tensors
    monkeypatch.setattr(
        tensor_file, "write_tensors", lambda path, *arguments: (names.append(path.name), original(path, *arguments))
    )
    return names


def test_grown_cache_writes_only_new_tokens(tmp_path: Path, written: list[str]) -> None:
    cache = cache_of(5000)
    cache.save(tmp_path)
    assert len(written) == 5
    written.clear()
    cache.append(*torch.ones(2, 1, 2, 30, 8).unbind())
    cache.save(tmp_path)
    assert written == ["0.0.4992-5030.safetensors"]
    assert torch.equal(decoded(am.KVCache.load(tmp_path, None)), decoded(cache))
    written.clear()
    cache.truncate(4999)
    cache.append(*torch.zeros(2, 1, 2, 2, 8).unbind())
    cache.save(tmp_path)
    assert written == ["0.0.4992-5001.safetensors"], "the same tokens, but other keys"
    assert torch.equal(decoded(am.KVCache.load(tmp_path, None)), decoded(cache))


def save_until_killed(cache: am.KVCache, path: Path, files: int) -> None:
    """Save in a child that ends once it has written so many files, and has begun another."""
    child = os.fork()
    if not child:
        write, names = tensor_file.write_tensors, list[str]()

        def write_some(file: Path, *arguments: Any) -> None:
            names.append(file.name)
            if len(names) > files:
                file.with_name(f"{file.name}.part").write_bytes(b"half of it")
                os._exit(0)
            write(file, *arguments)

        tensor_file.write_tensors = write_some
        cache.save(path)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.filterwarnings("ignore:This process")
def test_save_continues_an_interrupted_one(tmp_path: Path, written: list[str]) -> None:
    cache = cache_of(5000)
    save_until_killed(cache, tmp_path, 3)
    (only_save_in(tmp_path) / "0.0.0-9999.safetensors").write_bytes(b"of another cache")
    written.clear()
    cache.save(tmp_path)
    assert len(written) == 2
    assert torch.equal(decoded(am.KVCache.load(tmp_path, None)), decoded(cache))


def files_in(path: Path) -> set[str]:
    """Return the names of all files and folders."""
    return {str(file.relative_to(path)) for file in path.rglob("*")}


def fail_after(files: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk be full in the middle of a file, after so many."""
    count, sync = iter(range(files)), os.fsync

    def fsync(handle: int) -> None:
        if os.path.isfile(f"/proc/self/fd/{handle}") and next(count, None) is None:
            raise OSError(28, "No space left on device")
        sync(handle)

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.filterwarnings("ignore:This process")
@pytest.mark.parametrize("files", [0, 2, 4])  # the fifth is the manifest
def test_a_save_that_fails_leaves_nothing(tmp_path: Path, files: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = cache_of(20), cache_of(5000)
    small.save(tmp_path)
    before = files_in(tmp_path)
    save_until_killed(large, tmp_path, 1)
    fail_after(files, monkeypatch)
    for _ in range(3):
        with pytest.raises(StoreError, match="No space left on device"):
            large.save(tmp_path)
        assert files_in(tmp_path) == before
    monkeypatch.undo()
    large.save(tmp_path)
    assert torch.equal(decoded(am.KVCache.load(tmp_path, None)), decoded(large))


@on_each_rank
def fail_on_one_rank(path: Path) -> bool:
    """Fill the disk of rank 1. Return whether all files of both are gone."""
    cache, count = cache_of(5000, 2), iter(range(1))
    write = tensor_file.write_tensors

    def write_one(*arguments: Any) -> None:
        if dist.get_rank() and next(count, None) is None:
            raise OSError(28, "No space left on device")
        write(*arguments)

    tensor_file.write_tensors = write_one
    try:
        with pytest.raises(StoreError, match="No space left on device"):
            cache.save(path)
    finally:
        tensor_file.write_tensors = write
    dist.barrier()
    return files_in(path) == set()


def test_a_save_that_fails_on_one_rank_leaves_nothing_of_any(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, fail_on_one_rank, tmp_path) == [True] * 2


def test_files_of_a_living_writer_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another save begins, and fails, while a first one has written a file."""
    one, other, (begun, go) = cache_of(5000), cache_of(300), hold_first_save(monkeypatch)
    first = one.save(tmp_path, wait=False)
    begun.wait()
    held = only_save_in(tmp_path)
    (held / "0.0.9-10.safetensors.part").write_bytes(b"half of it")
    before = files_in(tmp_path)
    fail_after(0, monkeypatch)
    with pytest.raises(StoreError, match="No space left on device"):
        other.save(tmp_path)
    assert files_in(tmp_path) == before
    monkeypatch.undo()
    go.set()
    first.wait()
    assert torch.equal(decoded(am.KVCache.load(tmp_path, None)), decoded(one))


def test_what_is_saved_is_private(tmp_path: Path) -> None:
    """Prompts can be read in it. Files of an earlier version become private when they are linked."""
    umask = os.umask(0o022)
    try:
        cache = cache_of(5000)
        save_layers([cache], tmp_path / "new" / "save", more={"tokens": torch.arange(3)})
        for file in (tmp_path / "new" / "save").rglob("*"):
            file.chmod(0o755 if file.is_dir() else 0o644)
        save_layers([cache], tmp_path / "new" / "save", more={"tokens": torch.arange(3)})
    finally:
        os.umask(umask)
    kept = [tmp_path / "new", tmp_path / "new" / "save", *(tmp_path / "new" / "save").rglob("*")]
    assert len(kept) == 10
    assert {(file.is_dir(), file.stat().st_mode & 0o777) for file in kept} == {(True, 0o700), (False, 0o600)}


@pytest.mark.parametrize("moment", ["_state_of", "inspect", "fill"])
def test_a_reader_whose_save_is_replaced_reads_the_newer_one(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, original = cache_of(300), cache_of(200), getattr(checkpoint, moment)
    old.save(tmp_path)
    saves = iter([lambda: new.save(tmp_path)])

    def replaced(*arguments: Any) -> Any:
        found = original(*arguments) if moment != "fill" else None
        next(saves, lambda: None)()
        return original(*arguments) if moment == "fill" else found

    monkeypatch.setattr(checkpoint, moment, replaced)
    loaded = am.KVCache.load(tmp_path, None)
    assert loaded.length == 200
    assert torch.equal(decoded(loaded), decoded(new))


@on_each_rank
def load_while_one_rank_saves(path: Path, moment: str) -> list[int]:
    """On a rank: the tokens loaded, where a save is published between the looks of two ranks."""
    one = am.KVCache(None, **SIZES)
    if dist.get_rank():
        one.append(*torch.ones(2, 1, 2, 9, 8).unbind())
        one.save(path)
    dist.barrier()
    original, lengths = getattr(checkpoint, moment), list[int]()
    saves = iter([lambda: one.save(path)] if dist.get_rank() else [])

    def replaced(*arguments: Any) -> Any:
        if dist.get_rank():
            one.append(*torch.ones(2, 1, 2, 1, 8).unbind())
        next(saves, lambda: None)()
        return original(*arguments)

    with patch.object(checkpoint, moment, replaced):
        lengths.append(am.KVCache.load(path, named_mesh(Shape(1, 1, 2), AXES)).length)
    return lengths


@pytest.mark.parametrize("moment", ["inspect", "fill"])
def test_all_ranks_read_the_same_save(pool: Pool, tmp_path: Path, moment: str) -> None:
    assert pool.run(2, load_while_one_rank_saves, tmp_path, moment) == [[10]] * 2


def test_disk_without_links_gets_all_files_again(
    tmp_path: Path, written: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError(1, "not here")))
    cache = cache_of(300)
    cache.save(tmp_path)
    cache.save(tmp_path)
    assert len(written) == 4
    assert torch.equal(decoded(am.KVCache.load(tmp_path, None)), decoded(cache))


def test_damaged_files_raise_or_load_the_same(tmp_path: Path) -> None:
    """Run 2,000 of the inputs of `python -m tools.fuzz_store`."""
    damaged = DamagedCache(tmp_path / "cache")
    results = [damaged.load(seed) if seed % 10 == 0 else damaged.read(seed) for seed in range(2000)]
    assert set(results) == {"read", "refused"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 1}, "a cache of version 7, given version 1"),
        ({"length": 10**9}, "the sizes of a cache"),
        ({"heads": 3}, "the sizes of a cache"),
        ({"ranks": 0}, "the sizes of a cache"),
        ({"sizes": [[1, 2, 8, 8, 2**47, 16, 1]]}, "at most this device's .* GB, given .* GB for a capacity of"),
        ({"sizes": [[1, 2, 8, 8, 60, 16, 99]]}, "the sizes of a cache"),
        ({"sizes": "many"}, "a folder that KVCache.save wrote"),
        ({"length": 21}, "every token once, given 20 of this rank's 21 tokens"),
        ({"length": 19}, "every token once"),
    ],
)
def test_manifest_values_are_checked(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    cache_of(20).save(tmp_path)
    manifest = json.loads((tmp_path / "cache.json").read_text())
    (tmp_path / "cache.json").write_text(json.dumps(manifest | changes))
    with pytest.raises(StoreError, match=message):
        am.KVCache.load(tmp_path, None)


def test_files_are_valid_safetensors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {
        "a": torch.randn(3, 5).bfloat16(),
        "empty": torch.zeros(0, 4),
        "b": torch.arange(7),
        "c": torch.ones(2) > 0,
    }
    link_or_write(tmp_path / "ours", tensors)
    others = safetensors.load_file(tmp_path / "ours")
    ours = TensorFile(tmp_path / "ours")
    for name, x in tensors.items():
        assert torch.equal(others[name], x)
        assert torch.equal(ours.read(name), x)


def test_loading_executes_nothing(tmp_path: Path) -> None:
    """A pickle that would run a command raises `StoreError`."""

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str, ...]]:
            return os.system, (f"touch {tmp_path / 'run'}",)

    torch.save(Bomb(), tmp_path / "bomb")
    cache_of(20).save(tmp_path / "cache")
    (only_save_in(tmp_path / "cache") / "0.0.0-20.safetensors").write_bytes((tmp_path / "bomb").read_bytes())
    with pytest.raises(StoreError, match=r"a file that KVCache\.save wrote"):
        am.KVCache.load(tmp_path / "cache", None)
    assert not (tmp_path / "run").exists()


@on_each_rank
def error_of_path(act: str, path: Path) -> str:
    """Return the error of a save or load whose path is bad on rank 1."""
    cache, bad = cache_of(20, 2), dist.get_rank() == 1
    paths: dict[str, object] = {"no path": None, "a number": 5, "too long": path / ("x" * 5000), "another": path / "b"}
    verb, kind = act.split(" ", 1)
    cache.save(path / "a")
    cache.append(*torch.ones(2, 1, 2, 1, 8).unbind())
    folder = paths[kind] if bad else path / "a"
    try:
        cache.save(folder) if verb == "save" else am.KVCache.load(folder, cache.device_mesh)  # type: ignore[arg-type]
    except StoreError as error:
        return str(error)
    return "no error"


PATH_ERRORS = {
    "save no path": "save: expected the path of a folder, given None of type NoneType. Fix: pass its path",
    "load no path": "load: expected the path of a folder, given None of type NoneType. Fix: pass its path",
    "save a number": "save: expected the path of a folder, given 5 of type int",
    "load a number": "load: expected the path of a folder, given 5 of type int",
    "save too long": "save: expected a folder that can be written to, given ",
    "load too long": "load: expected a folder that KVCache.save wrote, given ",
    "load another": "load: expected a folder that KVCache.save wrote, given ",
}


@pytest.mark.parametrize("act", PATH_ERRORS)
def test_bad_path_on_one_rank_raises_on_all(pool: Pool, tmp_path: Path, act: str) -> None:
    one, other = pool.run(2, error_of_path, act, tmp_path)
    assert one == other
    assert one.startswith(PATH_ERRORS[act])


@on_each_rank
def save_to_separate_folders(path: Path) -> list[str]:
    """Save to one folder per rank, and load other caches per rank, as hosts without a shared disk do."""
    cache, messages = cache_of(200, 2), []
    mesh = cache.device_mesh
    try:
        cache.save(path / str(dist.get_rank()))
    except StoreError as error:
        messages.append(str(error))
    twins = [am.KVCache(None, **SIZES) for _ in range(2)]
    for number, twin in enumerate(twins):
        twin.append(*torch.full((2, 1, 2, 9, 8), float(number)).unbind())
    if dist.get_rank() == 0:
        for number, twin in enumerate(twins):
            twin.save(path / f"twin {number}")
    dist.barrier()
    try:
        am.KVCache.load(path / f"twin {dist.get_rank()}", mesh)
    except ValueError as error:
        messages.append(str(error))
    return messages


SIZES = {"batch": 1, "kv_heads": 2, "head_dim": 8, "capacity": 20, "dtype": torch.float32}


def test_folders_on_separate_disks_raise(pool: Pool, tmp_path: Path) -> None:
    one, other = pool.run(2, save_to_separate_folders, tmp_path)
    assert one == other
    assert len(one) == 2
    assert "expected a folder that all ranks write to, given 104 of 200 tokens in " in one[0]
    assert "load: expected the same call on every rank, given:\n    ranks  of" in one[1]


def test_next_save_ignores_files_of_an_interrupted_one(tmp_path: Path) -> None:
    """The interrupted save has a token mask, the next one has none."""
    sizes = {**SIZES, "batch": 2}
    padded, plain = am.KVCache(None, **sizes), am.KVCache(None, **sizes)
    padded.append(*torch.ones(2, 2, 2, 9, 8).unbind(), token_mask=torch.rand(2, 9) > 0.5)
    plain.append(*torch.ones(2, 2, 2, 9, 8).unbind())
    padded.save(tmp_path)
    (tmp_path / "cache.json").unlink()
    plain.save(tmp_path)
    assert am.KVCache.load(tmp_path, None).lengths.tolist() == [9, 9]


def test_second_save_waits_for_the_first(tmp_path: Path) -> None:
    cache = cache_of(300)
    first = cache.save(tmp_path, wait=False)
    cache.append(*torch.ones(2, 1, 2, 30, 8).unbind())
    second = cache.save(tmp_path, wait=False)
    assert first.concluded
    first.wait()
    second.wait()
    assert torch.equal(decoded(am.KVCache.load(tmp_path, None)), decoded(cache))


def test_old_save_is_removed_after_the_new_one_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power failure keeps flushed files and folders alone, so their order matters."""
    cache = cache_of(128)
    cache.save(tmp_path)
    before = only_save_in(tmp_path)
    cache.append(*torch.ones(2, 1, 2, 2, 8).unbind())
    events = []
    fsync, replace, remove = os.fsync, os.replace, shutil.rmtree
    monkeypatch.setattr(os, "fsync", lambda at: (events.append(Path(f"/proc/self/fd/{at}").readlink()), fsync(at)))
    monkeypatch.setattr(os, "replace", lambda old, new: (events.append(f"named {new.name}"), replace(old, new)))
    monkeypatch.setattr(
        shutil, "rmtree", lambda path, **options: (events.append(f"gone {path.name}"), remove(path, **options))
    )
    cache.save(tmp_path)
    steps = [str(event.relative_to(tmp_path.parent)) if isinstance(event, Path) else event for event in events]
    root, folder, file, manifest = tmp_path.name, only_save_in(tmp_path).name, "0.0.128-130.safetensors", "cache.json"
    flushed = [f"{root}/{folder}/{file}.part", f"named {file}", f"{root}/{folder}", root, "."]
    published = [f"{root}/{manifest}.{folder.split('-')[1]}", f"named {manifest}", root]
    assert steps == [*flushed, *published, f"gone {before.name}"]


def test_layers_of_different_lengths_raise(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"layers of the same tokens, given layers of \[20, 30\] tokens"):
        save_layers([cache_of(20), cache_of(30)], tmp_path)


def test_foreign_files_in_the_folder_stay(tmp_path: Path) -> None:
    """The names resemble those of saves."""
    others = [tmp_path / name for name in ("2024/thesis.txt", "7/photo", "1/0.0.notes.txt", "cache.json.bak")]
    for other in others:
        other.parent.mkdir(exist_ok=True)
        other.write_text("mine")
    cache = cache_of(20)
    cache.save(tmp_path)
    cache.save(tmp_path)
    assert [other.read_text() for other in others] == ["mine"] * 4


def hold_first_save(monkeypatch: pytest.MonkeyPatch) -> tuple[Event, Event]:
    """Let the next save write one file. Return an event that it sets then, and one that it waits for."""
    begun, go, first, original = Event(), Event(), list[Thread](), tensor_file.write_tensors

    def write(*arguments: Any) -> None:
        original(*arguments)
        first.append(current_thread())
        if first[0] is current_thread():
            begun.set()
            go.wait()

    monkeypatch.setattr(tensor_file, "write_tensors", write)
    return begun, go


def test_concurrent_saves_of_two_caches_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other, (begun, go) = cache_of(5000), cache_of(5000), hold_first_save(monkeypatch)
    other.truncate(0)
    other.append(*torch.ones(2, 1, 2, 5000, 8).unbind())
    first = one.save(tmp_path, wait=False)
    begun.wait()
    second = other.save(tmp_path, wait=False)
    second.finish_writing()
    go.set()
    first.wait()
    assert torch.equal(decoded(am.KVCache.load(tmp_path, None)), decoded(one))
    with pytest.raises(
        StoreError, match=r"expected one save at a time in a folder, given .*, where another job saved first"
    ):
        second.wait()
    assert torch.equal(decoded(am.KVCache.load(tmp_path, None)), decoded(one))


def test_save_without_wait_does_not_disturb_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of(5000)
    begun, go = hold_first_save(monkeypatch)
    left = cache_of(4000).save(tmp_path, wait=False)
    begun.wait()
    cache.save(tmp_path)
    go.set()
    left.finish_writing()
    assert torch.equal(decoded(am.KVCache.load(tmp_path, None)), decoded(cache))


def test_damaged_file_is_not_linked_into_the_next_save(tmp_path: Path) -> None:
    cache_of(300).save(tmp_path)
    file = only_save_in(tmp_path) / "0.0.0-256.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    with pytest.raises(StoreError, match=r"damage in .*\. Fix: restore the folder from a copy, or save to another"):
        am.KVCache.load(tmp_path, None)
    cache = cache_of(300)
    cache.save(tmp_path)
    assert torch.equal(decoded(am.KVCache.load(tmp_path, None)), decoded(cache))


def test_changed_signs_are_saved(tmp_path: Path) -> None:
    """A weighted sum of float64 bits modulo 2^64 would miss an even number of changed signs."""
    cache = am.KVCache(None, batch=1, kv_heads=2, head_dim=8, capacity=40, dtype=torch.float64)
    k = torch.randn(1, 2, 20, 8).double()
    cache.append(k, k)
    cache.save(tmp_path)
    cache.truncate(0)
    k[:, :, 7] *= -1
    cache.append(k, k)
    cache.save(tmp_path)
    assert torch.equal(am.KVCache.load(tmp_path, None).keys[:, :, :20], k)


def test_repeated_token_raises(tmp_path: Path) -> None:
    cache_of(20).save(tmp_path)
    file = only_save_in(tmp_path) / "0.0.0-20.safetensors"
    stored = TensorFile(file)
    tensors = {name: stored.read(name) for name in stored.entries}
    tensors["columns"][5] = 4
    tensor_file.write_tensors(file, tensors, {name: int(digest(x)) for name, x in tensors.items()})
    with pytest.raises(StoreError, match="every token once, given some twice"):
        am.KVCache.load(tmp_path, None)


@pytest.mark.parametrize("name", ["cache.json", "0.0.0-20.safetensors"])
def test_pipe_in_place_of_a_file_raises_at_once(tmp_path: Path, name: str) -> None:
    cache_of(20).save(tmp_path)
    (file,) = tmp_path.rglob(name)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(StoreError, match="expected a f"):
        am.KVCache.load(tmp_path, None)


@pytest.mark.parametrize("shape", [[0, 1 << 47, 1 << 47], [1 << 43], [(1 << 48) - 1] * 200_000, [1] * 9])
def test_impossible_shapes_raise(tmp_path: Path, shape: list[int]) -> None:
    """The sparse file is as long as its header says, so only a check before the allocation can raise."""
    size = math.prod(shape) if len(shape) < 9 else 1
    header = {"__metadata__": {"x": "0"}, "x": {"dtype": "U8", "shape": shape, "data_offsets": [0, size]}}
    text = json.dumps(header).encode()
    with (tmp_path / "file").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)
    with pytest.raises(StoreError):
        TensorFile(tmp_path / "file").read("x")


@pytest.mark.parametrize(("note", "message"), [("n" * (1 << 20), "a note of less than"), ({1, 2}, "a str, given set")])
def test_invalid_note_raises(tmp_path: Path, note: Any, message: str) -> None:
    cache = cache_of(20)
    cache.save(tmp_path)
    with pytest.raises(StoreError, match=message):
        save_layers([cache], tmp_path, note=note)
    assert am.KVCache.load(tmp_path, None).length == 20


def test_finished_save_keeps_no_tensors_alive(tmp_path: Path) -> None:
    cache = cache_of(20)
    cache.save(tmp_path)
    keys = weakref.ref(cache.keys)
    cache.reserve(1000)
    assert keys() is None


def test_wait_raises_the_same_interruption_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = cache_of(20).save(tmp_path, wait=False)
    saving.finish_writing()
    monkeypatch.setattr(saved_cache, "Agreement", Mock(side_effect=KeyboardInterrupt))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            saving.wait()


def test_later_changes_of_arguments_do_not_reach_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of `more` and the working folder change while the save runs."""
    monkeypatch.chdir(tmp_path)
    (_, go), more = hold_first_save(monkeypatch), {"real": torch.zeros(3)}
    saving = save_layers([cache_of(300)], "here", more=more, wait=False)
    more["real"] += 1
    monkeypatch.chdir("/")
    go.set()
    saving.wait()
    _, found, _ = load_layers(am.KVCache, tmp_path / "here", None)
    assert torch.equal(found["real"], torch.zeros(3))


def test_layers_of_a_model_need_restore(tmp_path: Path) -> None:
    save_layers([cache_of(20), cache_of(20)], tmp_path)
    message = r"a cache of 1 layer, given 2 in .*\. Fix: call hf\.ShardedCache\(config, mesh\)\.restore\(path\)\."
    with pytest.raises(StoreError, match=message):
        am.KVCache.load(tmp_path, None)


def test_layers_in_another_order_are_written_anew(tmp_path: Path) -> None:
    one, other = cache_of(300), cache_of(300)
    other.truncate(0)
    other.append(*torch.ones(2, 1, 2, 300, 8).unbind())
    for caches in ([one, other], [other, one]):
        save_layers(caches, tmp_path)
        loaded, _, _ = load_layers(am.KVCache, tmp_path, None)
        assert all(torch.equal(decoded(a), decoded(b)) for a, b in zip(loaded, caches, strict=True))


@on_each_rank
def save_to_slow_disks(path: Path) -> int:
    """Return the length of a loaded save that rank 1 wrote, and rank 0 published, more slowly than the deadline."""
    cache = cache_of(20, 2)
    name = "link_or_write" if dist.get_rank() == 1 else "_check_complete"
    original = getattr(checkpoint_writer, name)
    setattr(checkpoint_writer, name, lambda *arguments: (time.sleep(1.6), original(*arguments))[1])
    before = am.set_deadline(1.0)
    try:
        cache.save(path)
    finally:
        am.set_deadline(before)
    return am.KVCache.load(path, None).length


def test_slow_disk_may_exceed_the_deadline(tmp_path: Path) -> None:
    assert run_on_ranks(2, save_to_slow_disks, tmp_path) == [20, 20]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([1], "tensors by their names, given list"),
        ({"x": [1]}, "tensors by their names, given 'x': list"),
        ({3: torch.ones(2)}, "tensors by their names, given 3: Tensor"),
        ({"x": torch.ones(2, dtype=torch.int32)}, r"dense tensors of bool, .*, given 'x' as torch.int32"),
        ({"x": torch.ones(2).to_sparse()}, r"dense tensors of .*, given 'x' as torch.float32, torch.sparse_coo"),
    ],
)
def test_tensors_that_no_file_can_hold_raise(tmp_path: Path, more: Any, message: str) -> None:
    with pytest.raises(StoreError, match=f"save more: expected {message}"):
        save_layers([cache_of(20)], tmp_path, more=more)
    assert not list(tmp_path.iterdir())


def save_repeatedly(path: Path, rank: int, done: Any) -> None:
    """Save 60 times as a job of one rank. Put errors other than "another job saved first" into a queue."""
    cache, errors = cache_of(20 + rank), []
    for _ in range(60):
        try:
            cache.save(path)
        except StoreError as error:
            errors += [] if "one save at a time in a folder" in str(error) else [str(error)]
    done.put(errors)


def test_concurrent_jobs_leave_one_complete_save(tmp_path: Path) -> None:
    context = mp.get_context("forkserver")
    done = context.Queue()
    jobs = [context.Process(target=save_repeatedly, args=(tmp_path, rank, done)) for rank in range(2)]
    for job in jobs:
        job.start()
    while any(job.is_alive() for job in jobs):
        if (tmp_path / "cache.json").exists():
            with suppress(StoreError):  # the other job may remove the files while they are read
                assert am.KVCache.load(tmp_path, None).length in (20, 21)
    assert am.KVCache.load(tmp_path, None).length in (20, 21)
    assert len(list(tmp_path.iterdir())) == 2
    assert [done.get(timeout=20) for _ in jobs] == [[], []]


def test_waiting_for_another_job_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_writer, "TIMEOUT", 0.2)
    cache, held = cache_of(20), os.open(tmp_path, os.O_RDONLY)
    flock(held, LOCK_EX)
    with pytest.raises(StoreError, match=r"expected one save at a time in a folder, given .*, locked for 0.2 s"):
        cache.save(tmp_path)
    os.close(held)
    cache.save(tmp_path)
    assert am.KVCache.load(tmp_path, None).length == 20
