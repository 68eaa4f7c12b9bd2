"""Files of stored prefixes that are damaged, half written or another's, and disks that are full: answers stay right."""

import os
from errno import ENOSPC
from pathlib import Path
from typing import Any

import pytest
import torch

import attnmesh.hf as hf
from attnmesh.errors import InputError
from attnmesh.hf.serving.engine import Engine
from attnmesh.mesh.shapes import AXES, Shape
from attnmesh.store.block_folder import BlockFolder
from attnmesh.store.block_names import StoredBlock
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.serving.engines import (
    NEW,
    PLACE,
    TEXT,
    asked,
    greedy,
    ids,
    model_of,
    running,
    schedule_of,
    storing,
    until,
    until_stored,
)
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.seeds import some


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)


def renamed(path: Path) -> None:
    other = min(each for each in path.parent.glob("*-*.safetensors") if each != path)
    path.write_bytes(other.read_bytes())


def gone(path: Path) -> None:
    path.unlink()


DAMAGE = {one.__name__: one for one in (cut, emptied, flipped, renamed, gone)}


@on_each_rank
def check_damage(kind: str, name: str, ranks: int, folder: Path) -> None:
    """Damage a file while the engine runs, after it has looked at their names."""
    model, mesh = model_of(name), named_mesh(Shape(1, 1, ranks), AXES)
    first, place = ids(TEXT), folder / PLACE
    answer = greedy(model, first, NEW, mesh=mesh)
    turn = first + answer + ids(5, seed=1)
    wanted = greedy(model, turn, NEW, mesh=mesh)
    with storing(model, mesh, folder) as engine:
        if engine is not None:
            assert asked(engine, first)[0] == answer
    with storing(model, mesh, folder) as engine:
        if engine is not None:
            known = {StoredBlock.of_file(path.name): path for path in place.glob("*-*.safetensors")}
            states = [path for found, path in known.items() if found is not None and found[0].is_state]
            block = next((path for found, path in known.items() if found is not None and found[0].start == 64), None)
            DAMAGE[kind](block if block is not None and not states else states[-1])
            given, held = asked(engine, turn)
            assert given == wanted
            assert held == (0 if states else 64)
            assert engine.metrics()["store_blocks_damaged"] == 1
            until_stored(engine)
    with storing(model, mesh, folder) as engine:
        if engine is not None:  # what was computed again is whole
            assert asked(engine, turn + wanted + ids(3))[1] > TEXT - 20


@pytest.mark.parametrize("kind", some([*DAMAGE], *DAMAGE.keys() - {"emptied"}))
def test_a_damaged_file_is_computed_again(kind: str, pool: Pool, tmp_path: Path) -> None:
    pool.run(1, check_damage, kind, "llama", 1, tmp_path)


@pytest.mark.parametrize("name", ["gemma3_text", pytest.param("llama", marks=pytest.mark.long)])
def test_a_damaged_file_of_one_rank_is_computed_again(name: str, pool: Pool, tmp_path: Path) -> None:
    pool.run(2, check_damage, "flipped", name, 2, tmp_path)


@on_each_rank
def leave_half_written(folder: Path) -> None:
    """Leave what a killed process leaves: a part of a file, and some pieces of a block."""
    model, text, place = model_of("llama"), ids(TEXT), folder / PLACE
    with storing(model, None, folder) as engine:
        assert engine is not None
        asked(engine, text)
    path = next(path for path in place.glob("*.64-80.0-1.safetensors"))
    path.rename(place / path.name.replace("0-1", "0-2"))
    (place / f"{path.name}.part").write_bytes(b"half")
    with storing(model, None, folder) as engine:
        assert engine is not None
        assert not [*place.glob("*.part"), *place.glob("*.0-2.*")]
        assert asked(engine, text)[1] == 64
        assert engine.metrics()["store_blocks_damaged"] == 0


def test_what_a_killed_process_leaves_is_removed(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, leave_half_written, tmp_path)


@on_each_rank
def fill_the_disk(ranks: int, folder: Path) -> None:
    """Fill the disk after some blocks of the last rank."""
    model, mesh = model_of("llama"), named_mesh(Shape(1, 1, ranks), AXES)
    texts = [ids(TEXT, seed=seed) for seed in range(3)]
    wanted, write, left = [greedy(model, text, NEW, mesh=mesh) for text in texts], BlockFolder.write, [2]

    def failing(*args: Any) -> None:
        left[0] -= 1
        if left[0] < 0 and torch.distributed.get_rank() == ranks - 1:
            raise OSError(ENOSPC, os.strerror(ENOSPC))
        write(*args)

    with pytest.MonkeyPatch.context() as patch, pytest.WarningsRecorder(_ispytest=True) as warned:
        patch.setattr(BlockFolder, "write", failing)
        with storing(model, mesh, folder) as engine:
            if engine is None:
                return
            given = []
            for text in texts:
                given.append(asked(engine, text)[0])
                until(lambda: not engine.scheduler.busy)
            until(lambda: bool(engine.metrics()["store_stopped"]))
            given.append(asked(engine, texts[0][:100] + texts[1])[0])
        said = [str(one.message) for one in warned if "no more prefixes" in str(one.message)]
        assert given[:3] == wanted
        assert len(said) == 1
        assert f"rank {ranks - 1} cannot write to" in said[0]
        assert os.strerror(ENOSPC) in said[0]


def test_a_full_disk_ends_the_storing_alone(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, fill_the_disk, 2, tmp_path)


@on_each_rank
def fill_the_disk_at_first(folder: Path) -> None:
    """Fill the disk before the sizes of layers are written."""

    def failing(*_: Any) -> None:
        raise OSError(ENOSPC, os.strerror(ENOSPC))

    model, text = model_of("llama"), ids(TEXT)
    with pytest.MonkeyPatch.context() as patch, pytest.WarningsRecorder(_ispytest=True):
        patch.setattr(BlockFolder, "write_layers", failing)
        with running(model, None, store=hf.PrefixStore(folder / PLACE)) as engine:
            assert engine is not None
            asked(engine, text)
            until(lambda: bool(engine.metrics()["store_stopped"]) and not engine.scheduler.busy)
            assert not schedule_of(engine).is_writing


def test_a_disk_that_is_full_at_first_keeps_no_engine_busy(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, fill_the_disk_at_first, tmp_path)


@on_each_rank
def check_refused_folders(ranks: int, folder: Path) -> None:
    """Open a folder that another engine has, and folders of others."""
    model, mesh = model_of("llama"), named_mesh(Shape(1, 1, ranks), AXES)
    first = not torch.distributed.get_rank()

    def said(place: Path, **options: Any) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("attnmesh.hf.serving.prefix_store.RELEASE_SECONDS", 0.0)
            with pytest.raises(InputError) as raised:
                Engine(model, mesh, store=hf.PrefixStore(place, **options))
        return str(raised.value)

    engine = Engine(model, mesh, store=hf.PrefixStore(folder / PLACE))
    assert "which another server uses" in said(folder / PLACE)
    engine.worker.close()
    Engine(model, mesh, store=hf.PrefixStore(folder / PLACE)).worker.close()
    place = folder / PLACE
    assert place.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in place.iterdir()} == {0o600}
    torch.distributed.barrier()
    place.chmod(0o770)
    assert "others can write to" in said(place)
    torch.distributed.barrier()
    place.chmod(0o700)
    if os.getuid() == 0:
        os.chown(place, 12345, -1)
        assert "which is another's" in said(place)
        torch.distributed.barrier()
        if first:
            os.chown(place, 0, -1)
    assert "whole number" in said(place, memory=0)
    assert "a folder" in said(Path("/proc/nowhere"))


def test_folders_of_others_are_refused(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, check_refused_folders, 2, tmp_path)
