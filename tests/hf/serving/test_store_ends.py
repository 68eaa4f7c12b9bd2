"""Ends of a store and of its engines: the folder is another's once no thread writes, and after each error."""

from pathlib import Path
from threading import Event
from time import sleep
from typing import Any

import pytest
import torch

import attnmesh.hf as hf
from attnmesh.errors import InputError, RankFailure, StoreError
from attnmesh.hf.serving import prefix_store, rank_store, store_scheduler
from attnmesh.hf.serving.engine import Engine
from attnmesh.hf.serving.prefix_store import OpenStore
from attnmesh.hf.serving.rank_store import RankStore
from attnmesh.mesh.axes import RankMesh
from attnmesh.mesh.shapes import AXES, Shape
from attnmesh.store.block_folder import BlockFolder, FolderLock
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.serving.engines import PLACE, model_of
from tests.support.truth.mesh_problems import named_mesh


def is_free(folder: Path) -> bool:
    """Return whether another engine could take a folder."""
    try:
        FolderLock(folder).release()
    except StoreError:
        return False
    return True


@pytest.mark.parametrize("at_once", [True, False])
def test_the_folder_is_held_until_its_thread_has_ended(
    at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_store, "CLOSE_SECONDS", 0.05)
    store = RankStore(OpenStore(BlockFolder(tmp_path), "", FolderLock(tmp_path)), RankMesh.of(None), {})
    begun, go, later = Event(), Event(), Event()

    def write() -> None:
        begun.set()
        go.wait(60)

    store.later(write)
    store.later(later.set)
    begun.wait(60)
    store.close(at_once=at_once)
    assert not is_free(tmp_path)
    go.set()
    store._thread.join(60)
    assert is_free(tmp_path)
    assert not later.is_set()


def test_what_is_left_is_written_at_the_end(tmp_path: Path) -> None:
    store = RankStore(OpenStore(BlockFolder(tmp_path), "", FolderLock(tmp_path)), RankMesh.of(None), {})
    later = Event()
    store.later(sleep, 0.1)
    store.later(later.set)
    store.close(at_once=False)
    assert later.is_set()
    assert is_free(tmp_path)


@on_each_rank
def begin_after_an_error(ranks: int, folder: Path) -> None:
    """Make an engine whose first look at the folder fails, and another one at once."""
    model, mesh = model_of("llama"), named_mesh(Shape(1, 1, ranks), AXES)
    store = hf.PrefixStore(folder / PLACE)

    def failing(*_: Any) -> None:
        raise StoreError("store", "a folder that can be read", "none", "read it")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_scheduler.StoreScheduler, "_read_layers", failing)
        with pytest.raises(InputError):
            Engine(model, mesh, store=store)
    if not torch.distributed.get_rank():
        assert is_free(folder / PLACE)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_that_cannot_begin_lets_go_of_its_folder(ranks: int, pool: Pool, tmp_path: Path) -> None:
    pool.run(ranks, begin_after_an_error, ranks, tmp_path)


@on_each_rank
def end_while_another_rank_writes(folder: Path) -> None:
    """Make an engine while the second rank of one that has ended still writes, and once it has written."""
    model, mesh = model_of("llama"), named_mesh(Shape(1, 1, 2), AXES)
    store, go = hf.PrefixStore(folder / PLACE), Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_store, "CLOSE_SECONDS", 0.05)
        patch.setattr(prefix_store, "RELEASE_SECONDS", 0.2)
        first = Engine(model, mesh, store=store).worker
        assert first.store is not None
        if torch.distributed.get_rank():
            first.store.later(go.wait, 60)
        first.close()
        with pytest.raises(StoreError, match="which another server uses"):
            Engine(model, mesh, store=store)
        go.set()
        first.store._thread.join(60)
        torch.distributed.barrier()
        Engine(model, mesh, store=store).worker.close()


def test_the_folder_is_held_until_each_rank_has_written(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, end_while_another_rank_writes, tmp_path)


def test_a_folder_named_as_a_part_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.part").mkdir()
    (tmp_path / "half.part").write_bytes(b"half")
    assert BlockFolder(tmp_path).scan() == {}
    assert [path.name for path in tmp_path.iterdir()] == ["mine.part"]


@on_each_rank
def follow_a_lost_rank() -> list[bool]:
    """Return how a follower ends what goes on beside its plans, after a failure."""
    model, mesh, ends = model_of("llama"), named_mesh(Shape(1, 1, 2), AXES), list[bool]()
    engine = Engine(model, mesh)

    def lost(*_: Any) -> None:
        raise RankFailure([], "a plan", "keys", "lost")

    engine.step_exchange.exchange = lost  # type: ignore[method-assign,assignment]
    engine.worker.close = lambda *, at_once=False: ends.append(at_once)  # type: ignore[method-assign]
    part = engine.follow if torch.distributed.get_rank() else engine.run
    with pytest.raises(RankFailure):
        part()
    return ends


def test_ranks_end_their_threads_after_a_failure(pool: Pool) -> None:
    assert pool.run(2, follow_a_lost_rank) == [[True], [True]]
