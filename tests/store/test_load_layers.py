"""Saves and loads: which files a save writes and removes, in which order, what is loaded, and what no save can hold."""

import os
import shutil
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import attnmesh as am
from attnmesh.cache.saved_cache import LayersToLoad
from attnmesh.errors import ShapeError, StoreError
from attnmesh.store import tensor_file
from attnmesh.store.load_layers import load_layers
from attnmesh.store.save_layers import save_layers
from tests.support.caches.make import random_cache
from tests.support.caches.saves import SIZES, cache_of, decoded, is_save_of, only_save_in, save_until_killed
from tests.support.ranks.pool import Pool, on_each_rank


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
    assert is_save_of(tmp_path, cache)
    written.clear()
    cache.truncate(4999)
    cache.append(*torch.zeros(2, 1, 2, 2, 8).unbind())
    cache.save(tmp_path)
    assert written == ["0.0.4992-5001.safetensors"], "the same tokens, but other keys"
    assert is_save_of(tmp_path, cache)


@pytest.mark.filterwarnings("ignore:This process")
def test_save_continues_an_interrupted_one(tmp_path: Path, written: list[str]) -> None:
    cache = cache_of(5000)
    save_until_killed(cache, tmp_path, 3)
    (only_save_in(tmp_path) / "0.0.0-9999.safetensors").write_bytes(b"of another cache")
    written.clear()
    cache.save(tmp_path)
    assert len(written) == 2
    assert is_save_of(tmp_path, cache)


def test_what_is_saved_is_private(tmp_path: Path) -> None:
    """Prompts can be read in it. Files of an earlier version become private when they are linked."""
    umask = os.umask(0o022)
    try:
        cache = cache_of(5000)
        save_layers([cache], tmp_path / "new" / "save", extra_tensors={"tokens": torch.arange(3)})
        for file in (tmp_path / "new" / "save").rglob("*"):
            file.chmod(0o755 if file.is_dir() else 0o644)
        save_layers([cache], tmp_path / "new" / "save", extra_tensors={"tokens": torch.arange(3)})
    finally:
        os.umask(umask)
    kept = [tmp_path / "new", tmp_path / "new" / "save", *(tmp_path / "new" / "save").rglob("*")]
    assert len(kept) == 10
    assert {(file.is_dir(), file.stat().st_mode & 0o777) for file in kept} == {(True, 0o700), (False, 0o600)}


def test_disk_without_links_gets_all_files_again(
    tmp_path: Path, written: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError(1, "not here")))
    cache = cache_of(300)
    cache.save(tmp_path)
    cache.save(tmp_path)
    assert len(written) == 4
    assert is_save_of(tmp_path, cache)


@on_each_rank
def catch_error_of_path(act: str, path: Path) -> str:
    """Return the error of a save or load whose path is bad on rank 1."""
    cache = cache_of(20, 2)
    bad = dist.get_rank() == 1
    paths: dict[str, object] = {"no path": None, "a number": 5, "too long": path / ("x" * 5000), "another": path / "b"}
    verb, kind = act.split(" ", 1)
    cache.save(path / "a")
    cache.append(*torch.ones(2, 1, 2, 1, 8).unbind())
    folder = paths[kind] if bad else path / "a"
    try:
        if verb == "save":
            cache.save(folder)  # type: ignore[arg-type]
        else:
            am.KVCache.load(folder, cache.device_mesh)  # type: ignore[arg-type]
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
    one, other = pool.run(2, catch_error_of_path, act, tmp_path)
    assert one == other
    assert one.startswith(PATH_ERRORS[act])


@on_each_rank
def save_to_separate_folders(path: Path) -> list[str]:
    """Save to one folder per rank, and load other caches per rank, as hosts without a shared disk do."""
    cache = cache_of(200, 2)
    messages = []
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


def test_folders_on_separate_disks_raise(pool: Pool, tmp_path: Path) -> None:
    one, other = pool.run(2, save_to_separate_folders, tmp_path)
    assert one == other
    assert len(one) == 2
    assert "expected a folder that all ranks write to, given 104 of 200 tokens in " in one[0]
    assert "load: expected the same call on every rank, given:\n    ranks  save" in one[1]


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


def test_layers_of_the_same_tokens_may_have_unequal_heads(tmp_path: Path) -> None:
    caches = [random_cache(20), random_cache(20, kv_heads=4), random_cache(20, kv_heads=1)]
    save_layers(caches, tmp_path)
    loaded, _, _ = load_layers(am.KVCache, tmp_path, None)
    for found, wanted in zip(loaded, caches, strict=True):
        for x, y in zip(found.own_shard.kv_tensors, wanted.own_shard.kv_tensors, strict=True):
            assert torch.equal(x[:, :, :20], y[:, :, :20])


def test_layers_of_a_model_need_restore(tmp_path: Path) -> None:
    save_layers([cache_of(20), cache_of(20)], tmp_path)
    message = r"a cache of 1 layer, given 2 in .*\. Fix: call hf\.ShardedCache\(config, mesh\)\.restore\(path\)\."
    with pytest.raises(StoreError, match=message):
        am.KVCache.load(tmp_path, None)


def test_too_little_room_is_told_in_the_tokens_that_keys_stand_for(tmp_path: Path) -> None:
    """The second layer has a key of every 3 tokens, and is loaded as one with a key of every 10."""
    save_layers([cache_of(30), cache_of(10)], tmp_path, lengths_differ=True)
    with pytest.raises(
        ShapeError, match=r"keys that were saved, given 30 in a capacity of 20\. Fix: pass capacity=30\."
    ):
        load_layers(am.KVCache, tmp_path, None, LayersToLoad(2, 20, [1, 3]))
    with pytest.raises(
        ShapeError, match=r"keys that were saved, given 10 in a capacity of 3\. Fix: pass capacity=100\."
    ):
        load_layers(am.KVCache, tmp_path, None, LayersToLoad(2, 30, [1, 10]))
    assert load_layers(am.KVCache, tmp_path, None, LayersToLoad(2, 100, [1, 10]))[0][1].length == 10


def test_layers_in_another_order_are_written_anew(tmp_path: Path) -> None:
    one, other = cache_of(300), cache_of(300)
    other.truncate(0)
    other.append(*torch.ones(2, 1, 2, 300, 8).unbind())
    for caches in ([one, other], [other, one]):
        save_layers(caches, tmp_path)
        loaded, _, _ = load_layers(am.KVCache, tmp_path, None)
        assert all(torch.equal(decoded(a), decoded(b)) for a, b in zip(loaded, caches, strict=True))
