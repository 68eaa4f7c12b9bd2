"""Saving: the previous save stays until the next is complete, decoding continues, and files are not trusted."""

import json
import math
import multiprocessing as mp
import os
import resource
import shutil
import time
import weakref
from contextlib import suppress
from fcntl import LOCK_EX, flock
from pathlib import Path
from threading import Event, Thread, current_thread
from typing import Any

import pytest
import torch
import torch.distributed as dist

import attnmesh as am
from attnmesh.cli.launch import run_on_ranks
from attnmesh.core.digest import digest
from attnmesh.decode import checkpoint_writer, tensor_file
from attnmesh.decode.checkpoint import load_layers
from attnmesh.decode.checkpoint_writer import save_layers
from attnmesh.decode.tensor_file import TensorFile, link_or_write
from attnmesh.errors import StoreError
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.mesh_problems import named_mesh
from tests.support.pool import Pool
from tests.tools.fuzz_store import Victim


def cache_of(tokens: int, ranks: int = 1, width: int = 8) -> am.KVCache:
    mesh = None if ranks == 1 else named_mesh(Shape(1, 1, ranks), AXES)
    cache = am.KVCache(mesh, batch=1, kv_heads=2, head_dim=width, capacity=tokens + 40, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    cache.append(*torch.randn(2, 1, 2, tokens, width, generator=generator).unbind())
    return cache


def answer(cache: am.KVCache) -> torch.Tensor:
    width = cache.sizes.head_dim
    return am.decode(torch.randn(1, 4, 1, width, generator=torch.Generator().manual_seed(1)), cache)


def saved_in(path: Path) -> Path:
    """The one saving of a folder."""
    (folder,) = (each for each in path.iterdir() if each.is_dir())
    return folder


def test_a_disk_that_is_full_leaves_what_was_saved_before(tmp_path: Path) -> None:
    small, large = cache_of(20), cache_of(20_000)
    small.save(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(StoreError, match=r"save: expected a folder that can be written to, given .*File too large"):
            large.save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert torch.equal(answer(am.KVCache.load(tmp_path, None)), answer(small))
    large.save(tmp_path)
    assert torch.equal(answer(am.KVCache.load(tmp_path, None)), answer(large))
    assert sorted(path.name.split("-")[0] for path in tmp_path.iterdir()) == ["2", "cache.json"]


def one_cannot_write(path: Path) -> list[str]:
    """Fill the disk of the second of two ranks: both raise, and both still load the previous save."""
    first, second = cache_of(20, 2), cache_of(20_000, 2)
    first.save(path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        second.save(path)
        said = "fine"
    except StoreError as error:
        said = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    same = torch.equal(answer(am.KVCache.load(path, first.device_mesh)), answer(first))
    return [said, str(same)]


def test_all_ranks_say_that_one_could_not_save(pool: Pool, tmp_path: Path) -> None:
    one, other = pool.run(2, one_cannot_write, tmp_path)
    assert one == other
    assert "File too large" in one[0]
    assert one[1] == "True"


def saved_while_decoding(path: Path) -> bool:
    cache, twin = cache_of(3000, 2), cache_of(3000, 2)
    saving = cache.save(path, wait=False)
    generator = torch.Generator().manual_seed(2)
    for _ in range(20):
        cache.append(*torch.randn(2, 1, 2, 1, 8, generator=generator).unbind())
        answer(cache)
    saving.wait()
    saving.wait()
    return saving.written and torch.equal(answer(am.KVCache.load(path, cache.device_mesh)), answer(twin))


def test_decoding_goes_on_while_a_cache_is_saved(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, saved_while_decoding, tmp_path) == [True] * 2


def test_what_is_being_saved_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`truncate` and `reorder` wait for the files: what comes after would lie where they are read from."""
    cache, twin = cache_of(3000), cache_of(3000)
    link_or_write = checkpoint_writer.link_or_write
    monkeypatch.setattr(
        checkpoint_writer, "link_or_write", lambda *args: (torch.randn(700_000).sort(), link_or_write(*args))
    )
    under_way = cache.save(tmp_path, wait=False)
    cache.truncate(100)
    assert under_way.written
    cache.append(*torch.zeros(2, 1, 2, 500, 8).unbind())
    under_way.wait()
    assert torch.equal(answer(am.KVCache.load(tmp_path, None)), answer(twin))


def test_a_saving_that_was_cut_short_is_as_if_it_had_not_been(tmp_path: Path) -> None:
    small = cache_of(20)
    small.save(tmp_path)
    cut = tmp_path / f"2-{7:016x}"
    cut.mkdir()
    (cut / "0.0.0-64.safetensors.part").write_bytes(b"half of it")
    (tmp_path / f"cache.json.{7:016x}").write_text('{"format": "attnm')
    assert torch.equal(answer(am.KVCache.load(tmp_path, None)), answer(small))
    small.append(*torch.ones(2, 1, 2, 3, 8).unbind())
    small.save(tmp_path)
    assert torch.equal(answer(am.KVCache.load(tmp_path, None)), answer(small))
    assert sorted(path.name for path in tmp_path.iterdir()) == [saved_in(tmp_path).name, "cache.json"]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are written, and not found or linked to."""
    names: list[str] = []
    really = tensor_file.write
    monkeypatch.setattr(tensor_file, "write", lambda path, *told: (names.append(path.name), really(path, *told)))
    return names


def test_a_cache_that_has_grown_is_saved_by_its_new_tokens(tmp_path: Path, written: list[str]) -> None:
    cache = cache_of(5000)
    cache.save(tmp_path)
    assert len(written) == 5
    written.clear()
    cache.append(*torch.ones(2, 1, 2, 30, 8).unbind())
    cache.save(tmp_path)
    assert written == ["0.0.4992-5030.safetensors"]
    assert torch.equal(answer(am.KVCache.load(tmp_path, None)), answer(cache))
    written.clear()
    cache.truncate(4999)
    cache.append(*torch.zeros(2, 1, 2, 2, 8).unbind())
    cache.save(tmp_path)
    assert written == ["0.0.4992-5001.safetensors"], "the same tokens, but other keys"
    assert torch.equal(answer(am.KVCache.load(tmp_path, None)), answer(cache))


def test_a_saving_goes_on_where_the_last_was_cut_short(
    tmp_path: Path, written: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, told = cache_of(5000), tensor_file.write
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(
        tensor_file, "write", lambda *its: told(*its) if len(written) < 3 else (_ for _ in ()).throw(full)
    )
    with pytest.raises(StoreError, match="No space left on device"):
        cache.save(tmp_path)
    monkeypatch.setattr(tensor_file, "write", told)
    (saved_in(tmp_path) / "0.0.0-9999.safetensors").write_bytes(b"of another cache")
    cache.save(tmp_path)
    assert len(written) == len(set(written)) == 5
    assert torch.equal(answer(am.KVCache.load(tmp_path, None)), answer(cache))


def test_a_disk_without_links_has_everything_written_again(
    tmp_path: Path, written: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError(1, "not here")))
    cache = cache_of(300)
    cache.save(tmp_path)
    cache.save(tmp_path)
    assert len(written) == 4
    assert torch.equal(answer(am.KVCache.load(tmp_path, None)), answer(cache))


def test_damaged_files_are_read_or_refused(tmp_path: Path) -> None:
    """2,000 of the inputs of `python -m tests.tools.fuzz_store`, of which 2,000,000 have been tried."""
    victim = Victim(tmp_path / "cache")
    came = [victim.load(seed) if seed % 10 == 0 else victim.read(seed) for seed in range(2000)]
    assert set(came) == {"read", "refused"}


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"version": 1}, "a cache of version 4, given version 1"),
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
def test_what_a_manifest_says_is_checked(tmp_path: Path, said: dict[str, object], message: str) -> None:
    cache_of(20).save(tmp_path)
    manifest = json.loads((tmp_path / "cache.json").read_text())
    (tmp_path / "cache.json").write_text(json.dumps(manifest | said))
    with pytest.raises(StoreError, match=message):
        am.KVCache.load(tmp_path, None)


def test_the_files_are_what_others_read_too(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {
        "a": torch.randn(3, 5).bfloat16(),
        "empty": torch.zeros(0, 4),
        "b": torch.arange(7),
        "c": torch.ones(2) > 0,
    }
    link_or_write(tmp_path / "ours", tensors)
    theirs = safetensors.load_file(tmp_path / "ours")
    ours = TensorFile(tmp_path / "ours")
    for name, x in tensors.items():
        assert torch.equal(theirs[name], x)
        assert torch.equal(ours.read(name), x)


def test_nothing_in_a_file_is_run(tmp_path: Path) -> None:
    """A file that Python would unpickle, and run, is refused."""

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str, ...]]:
            return os.system, (f"touch {tmp_path / 'run'}",)

    torch.save(Bomb(), tmp_path / "bomb")
    cache_of(20).save(tmp_path / "cache")
    (saved_in(tmp_path / "cache") / "0.0.0-20.safetensors").write_bytes((tmp_path / "bomb").read_bytes())
    with pytest.raises(StoreError, match=r"a file that KVCache\.save wrote"):
        am.KVCache.load(tmp_path / "cache", None)
    assert not (tmp_path / "run").exists()


def called(act: str, path: Path) -> str:
    """What comes of a path that is one on the first rank alone."""
    cache, one = cache_of(20, 2), dist.get_rank() == 1
    paths: dict[str, object] = {"no path": None, "a number": 5, "too long": path / ("x" * 5000), "another": path / "b"}
    verb, kind = act.split(" ", 1)
    cache.save(path / "a")
    cache.append(*torch.ones(2, 1, 2, 1, 8).unbind())
    folder = paths[kind] if one else path / "a"
    try:
        cache.save(folder) if verb == "save" else am.KVCache.load(folder, cache.device_mesh)  # type: ignore[arg-type]
    except StoreError as error:
        return str(error)
    return "nothing"


SAID = {
    "save no path": "save: expected the path of a folder, given None of type NoneType. Fix: pass its path",
    "load no path": "load: expected the path of a folder, given None of type NoneType. Fix: pass its path",
    "save a number": "save: expected the path of a folder, given 5 of type int",
    "load a number": "load: expected the path of a folder, given 5 of type int",
    "save too long": "save: expected a folder that can be written to, given ",
    "load too long": "load: expected a folder that KVCache.save wrote, given ",
    "load another": "load: expected a folder that KVCache.save wrote, given ",
}


@pytest.mark.parametrize("act", SAID)
def test_a_path_that_one_rank_is_given_wrong_is_refused_by_all(pool: Pool, tmp_path: Path, act: str) -> None:
    one, other = pool.run(2, called, act, tmp_path)
    assert one == other
    assert one.startswith(SAID[act])


def saved_apart(path: Path) -> list[str]:
    """Each rank has a folder of its own, as where hosts share no disk; then both load what the other does not have."""
    cache, said = cache_of(200, 2), []
    mesh = cache.device_mesh
    try:
        cache.save(path / str(dist.get_rank()))
    except StoreError as error:
        said.append(str(error))
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
        said.append(str(error))
    return said


SIZES = {"batch": 1, "kv_heads": 2, "head_dim": 8, "capacity": 20, "dtype": torch.float32}


def test_folders_of_one_name_on_disks_of_their_own_are_noticed(pool: Pool, tmp_path: Path) -> None:
    one, other = pool.run(2, saved_apart, tmp_path)
    assert one == other
    assert len(one) == 2
    assert "expected a folder that all ranks write to, given 104 of 200 tokens in " in one[0]
    assert "load: expected the same call on every rank, given:\n    shards  of" in one[1]


def test_what_a_saving_that_was_cut_short_left_is_not_taken_for_the_next(tmp_path: Path) -> None:
    """Which tokens were real: the next has no padding."""
    sizes = {**SIZES, "batch": 2}
    padded, plain = am.KVCache(None, **sizes), am.KVCache(None, **sizes)
    padded.append(*torch.ones(2, 2, 2, 9, 8).unbind(), token_mask=torch.rand(2, 9) > 0.5)
    plain.append(*torch.ones(2, 2, 2, 9, 8).unbind())
    padded.save(tmp_path)
    (tmp_path / "cache.json").unlink()
    plain.save(tmp_path)
    assert am.KVCache.load(tmp_path, None).lengths.tolist() == [9, 9]


def test_two_savings_at_a_time_are_one_after_the_other(tmp_path: Path) -> None:
    cache = cache_of(300)
    first = cache.save(tmp_path, wait=False)
    cache.append(*torch.ones(2, 1, 2, 30, 8).unbind())
    second = cache.save(tmp_path, wait=False)
    assert first.concluded
    first.wait()
    second.wait()
    assert torch.equal(answer(am.KVCache.load(tmp_path, None)), answer(cache))


def test_the_disk_has_the_new_saving_before_the_old_one_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and the folders that name them, as a power failure would have it."""
    cache = cache_of(128)
    cache.save(tmp_path)
    before = saved_in(tmp_path)
    cache.append(*torch.ones(2, 1, 2, 2, 8).unbind())
    acts = []
    fsync, replace, remove = os.fsync, os.replace, shutil.rmtree
    monkeypatch.setattr(os, "fsync", lambda at: (acts.append(Path(f"/proc/self/fd/{at}").readlink()), fsync(at)))
    monkeypatch.setattr(os, "replace", lambda old, new: (acts.append(f"named {new.name}"), replace(old, new)))
    monkeypatch.setattr(shutil, "rmtree", lambda path, **so: (acts.append(f"gone {path.name}"), remove(path, **so)))
    cache.save(tmp_path)
    told = [str(act.relative_to(tmp_path.parent)) if isinstance(act, Path) else act for act in acts]
    root, folder, file, manifest = tmp_path.name, saved_in(tmp_path).name, "0.0.128-130.safetensors", "cache.json"
    settled = [f"{root}/{folder}/{file}.part", f"named {file}", f"{root}/{folder}", root, "."]
    published = [f"{root}/{manifest}.{folder.split('-')[1]}", f"named {manifest}", root]
    assert told == [*settled, *published, f"gone {before.name}"]


def test_layers_of_other_lengths_are_not_saved_as_one(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"layers of the same tokens, given layers of \[20, 30\] tokens"):
        save_layers([cache_of(20), cache_of(30)], tmp_path)


def test_what_is_not_of_a_saving_stays(tmp_path: Path) -> None:
    """Folders of numbers, and files that are named like ours."""
    others = [tmp_path / name for name in ("2024/thesis.txt", "7/photo", "1/0.0.notes.txt", "cache.json.bak")]
    for other in others:
        other.parent.mkdir(exist_ok=True)
        other.write_text("mine")
    cache = cache_of(20)
    cache.save(tmp_path)
    cache.save(tmp_path)
    assert [other.read_text() for other in others] == ["mine"] * 4


def held_up(monkeypatch: pytest.MonkeyPatch) -> tuple[Event, Event]:
    """The first saving from now on writes one file, which an event tells, and no more until the other lets it go on."""
    begun, go, first, really = Event(), Event(), list[Thread](), tensor_file.write

    def write(*told: Any) -> None:
        really(*told)
        first.append(current_thread())
        if first[0] is current_thread():
            begun.set()
            go.wait()

    monkeypatch.setattr(tensor_file, "write", write)
    return begun, go


def test_savings_of_two_caches_in_one_folder_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other, (begun, go) = cache_of(5000), cache_of(5000), held_up(monkeypatch)
    other.truncate(0)
    other.append(*torch.ones(2, 1, 2, 5000, 8).unbind())
    first = one.save(tmp_path, wait=False)
    begun.wait()
    second = other.save(tmp_path, wait=False)
    second.finish_writing()
    go.set()
    first.wait()
    assert torch.equal(answer(am.KVCache.load(tmp_path, None)), answer(one))
    with pytest.raises(
        StoreError, match=r"expected one saving at a time in a folder, given .*, where another was done first"
    ):
        second.wait()
    assert torch.equal(answer(am.KVCache.load(tmp_path, None)), answer(one))


def test_a_saving_that_nobody_waits_for_harms_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of(5000)
    begun, go = held_up(monkeypatch)
    left = cache_of(4000).save(tmp_path, wait=False)
    begun.wait()
    cache.save(tmp_path)
    go.set()
    left.finish_writing()
    assert torch.equal(answer(am.KVCache.load(tmp_path, None)), answer(cache))


def test_a_damaged_file_is_not_taken_over(tmp_path: Path) -> None:
    cache_of(300).save(tmp_path)
    file = saved_in(tmp_path) / "0.0.0-256.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    with pytest.raises(StoreError, match=r"damage in .*\. Fix: restore the folder from a copy, or save to another"):
        am.KVCache.load(tmp_path, None)
    cache = cache_of(300)
    cache.save(tmp_path)
    assert torch.equal(answer(am.KVCache.load(tmp_path, None)), answer(cache))


def test_signs_that_have_changed_are_saved(tmp_path: Path) -> None:
    """Of an even number of float64 numbers: sums modulo 2^64 of weighed first bits would not tell."""
    cache = am.KVCache(None, batch=1, kv_heads=2, head_dim=8, capacity=40, dtype=torch.float64)
    k = torch.randn(1, 2, 20, 8).double()
    cache.append(k, k)
    cache.save(tmp_path)
    cache.truncate(0)
    k[:, :, 7] *= -1
    cache.append(k, k)
    cache.save(tmp_path)
    assert torch.equal(am.KVCache.load(tmp_path, None).keys[:, :, :20], k)


def test_a_token_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    cache_of(20).save(tmp_path)
    file = saved_in(tmp_path) / "0.0.0-20.safetensors"
    stored = TensorFile(file)
    tensors = {name: stored.read(name) for name in stored.entries}
    tensors["columns"][5] = 4
    tensor_file.write(file, tensors, {name: int(digest(x)) for name, x in tensors.items()})
    with pytest.raises(StoreError, match="every token once, given some twice"):
        am.KVCache.load(tmp_path, None)


@pytest.mark.parametrize("name", ["cache.json", "0.0.0-20.safetensors"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    cache_of(20).save(tmp_path)
    (file,) = tmp_path.rglob(name)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(StoreError, match="expected a f"):
        am.KVCache.load(tmp_path, None)


@pytest.mark.parametrize("shape", [[0, 1 << 47, 1 << 47], [1 << 43], [(1 << 48) - 1] * 200_000, [1] * 9])
def test_shapes_that_cannot_be_are_refused(tmp_path: Path, shape: list[int]) -> None:
    """At once, and before there is memory for them; the file is as long as it says, and sparse."""
    size = math.prod(shape) if len(shape) < 9 else 1
    header = {"__metadata__": {"x": "0"}, "x": {"dtype": "U8", "shape": shape, "data_offsets": [0, size]}}
    text = json.dumps(header).encode()
    with (tmp_path / "file").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)
    with pytest.raises(StoreError):
        TensorFile(tmp_path / "file").read("x")


@pytest.mark.parametrize(("note", "message"), [("n" * (1 << 20), "a note of less than"), ({1, 2}, "a str, given set")])
def test_a_note_that_could_not_be_read_is_refused(tmp_path: Path, note: Any, message: str) -> None:
    cache = cache_of(20)
    cache.save(tmp_path)
    with pytest.raises(StoreError, match=message):
        save_layers([cache], tmp_path, note=note)
    assert am.KVCache.load(tmp_path, None).length == 20


def test_a_saving_that_is_over_keeps_no_tensors(tmp_path: Path) -> None:
    cache = cache_of(20)
    cache.save(tmp_path)
    keys = weakref.ref(cache.keys)
    cache.reserve(1000)
    assert keys() is None


def test_a_saving_whose_end_was_interrupted_says_so_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    under_way = cache_of(20).save(tmp_path, wait=False)
    under_way.finish_writing()
    monkeypatch.setattr(checkpoint_writer, "agree", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            under_way.wait()


def test_what_is_saved_is_what_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it is changed meanwhile, and the working folder too."""
    monkeypatch.chdir(tmp_path)
    (_, go), more = held_up(monkeypatch), {"real": torch.zeros(3)}
    under_way = save_layers([cache_of(300)], "here", more=more, wait=False)
    more["real"] += 1
    monkeypatch.chdir("/")
    go.set()
    under_way.wait()
    _, found, _ = load_layers(am.KVCache, tmp_path / "here", None)
    assert torch.equal(found["real"], torch.zeros(3))


def test_layers_in_another_order_are_other_layers(tmp_path: Path) -> None:
    one, other = cache_of(300), cache_of(300)
    other.truncate(0)
    other.append(*torch.ones(2, 1, 2, 300, 8).unbind())
    for caches in ([one, other], [other, one]):
        save_layers(caches, tmp_path)
        loaded, _, _ = load_layers(am.KVCache, tmp_path, None)
        assert all(torch.equal(answer(a), answer(b)) for a, b in zip(loaded, caches, strict=True))


def saved_by_a_slow_disk(path: Path) -> int:
    """The second of two ranks writes for longer than the deadline, and the first publishes for longer."""
    cache = cache_of(20, 2)
    name = "link_or_write" if dist.get_rank() == 1 else "_check_complete"
    really = getattr(checkpoint_writer, name)
    setattr(checkpoint_writer, name, lambda *told: (time.sleep(3), really(*told))[1])
    before = am.set_deadline(1.0)
    try:
        cache.save(path)
    finally:
        am.set_deadline(before)
    return am.KVCache.load(path, None).length


def test_a_slow_disk_is_no_lost_rank(tmp_path: Path) -> None:
    assert run_on_ranks(2, saved_by_a_slow_disk, tmp_path) == [20, 20]


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
def test_what_no_file_can_hold_is_refused(tmp_path: Path, more: Any, message: str) -> None:
    with pytest.raises(StoreError, match=f"save more: expected {message}"):
        save_layers([cache_of(20)], tmp_path, more=more)
    assert not list(tmp_path.iterdir())


def saves_again_and_again(path: Path, rank: int, done: Any) -> None:
    """A job of its own, of one rank; what it was told, other than that another was done first."""
    cache, told = cache_of(20 + rank), []
    for _ in range(60):
        try:
            cache.save(path)
        except StoreError as error:
            told += [] if "one saving at a time in a folder" in str(error) else [str(error)]
    done.put(told)


def test_jobs_that_save_to_one_folder_leave_one_of_their_savings(tmp_path: Path) -> None:
    context = mp.get_context("forkserver")
    done = context.Queue()
    jobs = [context.Process(target=saves_again_and_again, args=(tmp_path, rank, done)) for rank in range(2)]
    for job in jobs:
        job.start()
    while any(job.is_alive() for job in jobs):
        if (tmp_path / "cache.json").exists():
            with suppress(StoreError):  # its files may go while they are read
                assert am.KVCache.load(tmp_path, None).length in (20, 21)
    assert am.KVCache.load(tmp_path, None).length in (20, 21)
    assert len(list(tmp_path.iterdir())) == 2
    assert [done.get(timeout=20) for _ in jobs] == [[], []]


def test_a_job_that_does_not_end_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_writer, "TIMEOUT", 0.2)
    cache, held = cache_of(20), os.open(tmp_path, os.O_RDONLY)
    flock(held, LOCK_EX)
    with pytest.raises(StoreError, match=r"expected one saving at a time in a folder, given .* does not end"):
        cache.save(tmp_path)
    os.close(held)
    cache.save(tmp_path)
    assert am.KVCache.load(tmp_path, None).length == 20
