"""Damaged, foreign and forged folders: all ranks raise, and nothing in a file is trusted."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import attnmesh as am
from attnmesh.core.digest import digest
from attnmesh.errors import StoreError
from attnmesh.mesh.shapes import AXES, Shape
from attnmesh.store import tensor_file
from attnmesh.store.tensor_file import TensorFile
from tests.support.caches.saves import cache_of, is_save_of, only_save_in
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tools.fuzz_store import DamagedCache


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


def test_damaged_files_raise_or_load_the_same(tmp_path: Path) -> None:
    """Run 2,000 of the inputs of `python -m tools.fuzz_store`."""
    damaged = DamagedCache(tmp_path / "cache")
    results = [damaged.load(seed) if seed % 10 == 0 else damaged.read(seed) for seed in range(2000)]
    assert set(results) == {"read", "refused"}


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
    assert is_save_of(tmp_path, cache)


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
