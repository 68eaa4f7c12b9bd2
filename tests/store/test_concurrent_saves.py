"""Saves beside decoding, readers, and other saves: one complete save at a time is read."""

import multiprocessing as mp
import os
from contextlib import suppress
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import attnmesh as am
from attnmesh.errors import StoreError
from attnmesh.mesh.shapes import AXES, Shape
from attnmesh.store import load_layers as load_module
from attnmesh.store import save_layers as save_module
from attnmesh.store.load_layers import load_layers
from attnmesh.store.save_layers import save_layers
from tests.support.caches.saves import SIZES, cache_of, decoded, hold_first_save, is_save_of
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.tolerances import assert_near


@on_each_rank
def save_while_decoding(path: Path) -> None:
    cache, twin = cache_of(3000, 2), cache_of(3000, 2)
    saving = cache.save(path, wait=False)
    generator = torch.Generator().manual_seed(2)
    for _ in range(20):
        cache.append(*torch.randn(2, 1, 2, 1, 8, generator=generator).unbind())
        decoded(cache)
    saving.wait()
    saving.wait()
    assert saving.written
    assert_near(decoded(am.KVCache.load(path, cache.device_mesh)), decoded(twin))


def test_decoding_continues_during_a_save(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, save_while_decoding, tmp_path)


def test_truncate_waits_for_a_running_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens appended after `truncate` would overwrite slots that the save still reads."""
    cache, twin = cache_of(3000), cache_of(3000)
    link_or_write = save_module.link_or_write
    monkeypatch.setattr(save_module, "link_or_write", lambda *args: (torch.randn(700_000).sort(), link_or_write(*args)))
    saving = cache.save(tmp_path, wait=False)
    cache.truncate(100)
    assert saving.written
    cache.append(*torch.zeros(2, 1, 2, 500, 8).unbind())
    saving.wait()
    assert is_save_of(tmp_path, twin)


@pytest.mark.parametrize("moment", ["_state_of", "read_saved_layers", "fill_shards"])
def test_a_reader_whose_save_is_replaced_reads_the_newer_one(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, original = cache_of(300), cache_of(200), getattr(load_module, moment)
    old.save(tmp_path)
    saves = iter([lambda: new.save(tmp_path)])

    def replaced(*arguments: Any) -> Any:
        found = original(*arguments) if moment != "fill_shards" else None
        next(saves, lambda: None)()
        return original(*arguments) if moment == "fill_shards" else found

    monkeypatch.setattr(load_module, moment, replaced)
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
    original, lengths = getattr(load_module, moment), list[int]()
    saves = iter([lambda: one.save(path)] if dist.get_rank() else [])

    def replaced(*arguments: Any) -> Any:
        if dist.get_rank():
            one.append(*torch.ones(2, 1, 2, 1, 8).unbind())
        next(saves, lambda: None)()
        return original(*arguments)

    with patch.object(load_module, moment, replaced):
        lengths.append(am.KVCache.load(path, named_mesh(Shape(1, 1, 2), AXES)).length)
    return lengths


@pytest.mark.parametrize("moment", ["read_saved_layers", "fill_shards"])
def test_all_ranks_read_the_same_save(pool: Pool, tmp_path: Path, moment: str) -> None:
    assert pool.run(2, load_while_one_rank_saves, tmp_path, moment) == [[10]] * 2


def test_second_save_waits_for_the_first(tmp_path: Path) -> None:
    cache = cache_of(300)
    first = cache.save(tmp_path, wait=False)
    cache.append(*torch.ones(2, 1, 2, 30, 8).unbind())
    second = cache.save(tmp_path, wait=False)
    assert first.concluded
    first.wait()
    second.wait()
    assert is_save_of(tmp_path, cache)


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
    assert is_save_of(tmp_path, one)
    with pytest.raises(
        StoreError, match=r"expected one save at a time in a folder, given .*, where another job saved first"
    ):
        second.wait()
    assert is_save_of(tmp_path, one)


def test_save_without_wait_does_not_disturb_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of(5000)
    begun, go = hold_first_save(monkeypatch)
    left = cache_of(4000).save(tmp_path, wait=False)
    begun.wait()
    cache.save(tmp_path)
    go.set()
    left.finish_writing()
    assert is_save_of(tmp_path, cache)


def test_later_changes_of_arguments_do_not_reach_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of `extra_tensors` and the working folder change while the save runs."""
    monkeypatch.chdir(tmp_path)
    (_, go), more = hold_first_save(monkeypatch), {"real": torch.zeros(3)}
    saving = save_layers([cache_of(300)], "here", extra_tensors=more, wait=False)
    more["real"] += 1
    monkeypatch.chdir("/")
    go.set()
    saving.wait()
    _, found, _ = load_layers(am.KVCache, tmp_path / "here", None)
    assert torch.equal(found["real"], torch.zeros(3))


def save_repeatedly(path: Path, rank: int, done: Any) -> None:
    """Save 60 times as a job of one rank. Put errors other than "another job saved first" into a queue."""
    cache = cache_of(20 + rank)
    errors = []
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
    monkeypatch.setattr(save_module, "PUBLISH_SECONDS", 0.2)
    cache, held = cache_of(20), os.open(tmp_path, os.O_RDONLY)
    flock(held, LOCK_EX)
    with pytest.raises(StoreError, match=r"expected one save at a time in a folder, given .*, locked for 0.2 s"):
        cache.save(tmp_path)
    os.close(held)
    cache.save(tmp_path)
    assert am.KVCache.load(tmp_path, None).length == 20
