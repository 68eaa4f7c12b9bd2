"""A cache in a folder: the bits of one in memory, whole after any end of its process, and damage named."""

import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import attnmesh as am
from attnmesh.errors import InputError, KernelError, StoreError
from attnmesh.kernels.native.build import library
from attnmesh.mesh.shapes import AXES, Shape
from attnmesh.store import folder_shard, layer_files
from attnmesh.store.journal import RECORD_BYTES
from attnmesh.store.layer_files import PIECE_TOKENS
from tests.support.caches.growing_caches import SIZES, decoded, flip, grow, in_memory, opened, rows, same_outputs
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.tolerances import FLOAT32, FLOAT32_SUMS


@pytest.mark.parametrize(
    "sizes", [{}, {"batch": 2}, {"storage": "int8"}, {"values": "prefix", "value_dim": 8}], ids=lambda sizes: str(sizes)
)
def test_a_folder_has_the_bits_of_memory(tmp_path: Path, sizes: dict[str, Any]) -> None:
    def both(change: Callable[[am.KVCache], object]) -> None:
        for each in (cache, twin):
            change(each)
        assert same_outputs(cache, twin)
        assert torch.allclose(decoded(cache, 3), decoded(twin, 3), rtol=FLOAT32_SUMS, atol=FLOAT32)

    def append(more: int) -> Callable[[am.KVCache], None]:
        def appended(each: am.KVCache) -> None:
            k, v = rows(each.length, each.length + more, each.config.batch)
            each.append(k, None if "values" in sizes else v)

        return appended

    cache, twin = opened(tmp_path / "a", **sizes), am.KVCache(None, **{**SIZES, **sizes})
    for more in (3, 5, PIECE_TOKENS - 9, 1, 1, 1, PIECE_TOKENS + 3):
        both(append(more))
    for length in (2 * PIECE_TOKENS + 1, 2 * PIECE_TOKENS, 5000, PIECE_TOKENS, 17):
        both(lambda each, length=length: each.truncate(length))  # type: ignore[misc]
        both(append(3))
        del cache
        cache = opened(tmp_path / "a", **sizes)
        both(append(1))
    both(append(2 * PIECE_TOKENS))
    assert same_outputs(am.KVCache.load(tmp_path / "a", None), twin)


@pytest.mark.skipif(library().append_to_file is None, reason="no native library")
@pytest.mark.parametrize("parts", [(PIECE_TOKENS,), (3, 1, PIECE_TOKENS - 4)], ids=["one append", "three appends"])
@pytest.mark.parametrize("sizes", [{}, {"batch": 2, "value_dim": 3, "dtype": torch.bfloat16}], ids=str)
def test_a_piece_that_appends_have_filled_is_not_read_again(
    tmp_path: Path, parts: tuple[int, ...], sizes: dict[str, Any]
) -> None:
    cache, twin = opened(tmp_path, **sizes), am.KVCache(None, **{**SIZES, **sizes})
    shapes = twin.config
    with patch.object(layer_files, "tensor_checksum", side_effect=AssertionError):
        for part in (*parts, 1):
            both = [torch.randn(shapes.batch, shapes.kv_heads, part, width) for width in shapes.columns]
            new = [x.to(shapes.dtype) for x in both]
            cache.append(*new)
            twin.append(*new)
    del cache
    assert same_outputs(opened(tmp_path, **sizes), twin)


@pytest.mark.parametrize("change", ["truncated", "in Python", "reopened"])
def test_a_piece_of_other_changes_is_read_again(tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = opened(tmp_path)
    grow(cache, 7)
    if change == "truncated":
        cache.truncate(4)
    elif change == "reopened":
        del cache
        cache = opened(tmp_path)
    else:
        with monkeypatch.context() as patched:
            patched.setattr(folder_shard, "native_append", lambda *_: False)
            grow(cache, 2)
    grow(cache, PIECE_TOKENS + 1 - cache.length)
    del cache
    assert same_outputs(opened(tmp_path), in_memory(PIECE_TOKENS + 1))


def test_windows_and_selections_read_a_folder(tmp_path: Path) -> None:
    cache, twin = opened(tmp_path), in_memory(2 * PIECE_TOKENS + 100)
    grow(cache, twin.length)
    chosen = am.Selection(torch.randperm(twin.length)[:50].int().view(1, 1, 1, 50))
    for options in ({"mask": am.Window(5000)}, {"mask": am.Window(50)}, {"selected": chosen}, {"reproducible": True}):
        assert torch.allclose(decoded(cache, **options), decoded(twin, **options), rtol=FLOAT32_SUMS, atol=FLOAT32)


def test_a_fork_is_in_memory_and_leaves_the_files(tmp_path: Path) -> None:
    cache, twin = opened(tmp_path), in_memory(PIECE_TOKENS + 9)
    grow(cache, twin.length)
    fork = cache.fork()
    grow(fork, 5)
    assert same_outputs(cache, twin)
    cache.truncate(10)
    assert same_outputs(fork, in_memory(PIECE_TOKENS + 14))
    assert cache.nbytes < fork.nbytes


def inodes(path: Path) -> dict[str, int]:
    return {file.name: file.stat().st_ino for file in path.glob("1-*/*.safetensors")}


def test_a_saved_cache_opens_in_place(tmp_path: Path) -> None:
    twin = in_memory(PIECE_TOKENS + 70)
    twin.save(tmp_path)
    before = inodes(tmp_path)
    cache = opened(tmp_path)
    assert cache.own_shard.earlier_pieces[0].file is not None
    assert inodes(tmp_path) == before
    del cache
    for _ in range(2):
        cache = opened(tmp_path)
        assert same_outputs(cache, twin)
        grow(cache, PIECE_TOKENS)
        grow(twin, PIECE_TOKENS)
        assert same_outputs(cache, twin)
        del cache
    assert inodes(tmp_path).items() >= {(name, before[name]) for name in before if name.startswith("0.0.0-")}
    assert same_outputs(am.KVCache.load(tmp_path, None), twin)


def test_a_saved_cache_of_whole_pieces_opens_in_place(tmp_path: Path) -> None:
    twin = in_memory(PIECE_TOKENS)
    twin.save(tmp_path)
    cache = opened(tmp_path)
    assert same_outputs(cache, twin)
    grow(cache, 3)
    grow(twin, 3)
    assert same_outputs(cache, twin)


@on_each_rank
def open_a_short_save(path: Path) -> bool:
    """On a rank: save a cache of which the second rank has no tokens, and open it in place. Return what is right."""
    mesh = named_mesh(Shape(1, 1, 2), AXES)
    twin = in_memory(5, mesh)
    twin.save(path)
    cache = am.KVCache(mesh, **SIZES, folder=path)
    for each in (cache, twin):
        grow(each, 30)
    return same_outputs(cache, twin)


def test_a_save_of_ranks_without_tokens_opens_in_place(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, open_a_short_save, tmp_path) == [True, True]


@on_each_rank
def live_on_ranks(path: Path, shape: Shape) -> dict[str, bool]:
    """On a rank: grow a cache in a folder by shards and by appends, and open it again. Return what is right then."""
    mesh = named_mesh(shape, AXES)
    right = {}
    cache, twin = am.KVCache(mesh, **SIZES, folder=path), am.KVCache(mesh, **SIZES)
    length, shards = 2 * PIECE_TOKENS + 37, shape.queries * shape.keys
    positions = am.Zigzag().positions(length, shards, cache.token_axis.index)
    if shape.heads == 1:
        part = [x[:, :, positions] for x in rows(0, length)]
        cache.append_shard(*part, positions)
        twin.append_shard(*part, positions)
    else:
        grow(cache, length)
        grow(twin, length)
    for more in (1, 1, 40):
        grow(cache, more)
        grow(twin, more)
        right[f"{cache.length} tokens"] = same_outputs(cache, twin)
    cache.truncate(PIECE_TOKENS + 5)
    twin.truncate(PIECE_TOKENS + 5)
    del cache
    gc.collect()
    dist.barrier()
    cache = am.KVCache(mesh, **SIZES, folder=path)
    grow(cache, 33)
    grow(twin, 33)
    right["open again"] = same_outputs(cache, twin)
    loaded = am.KVCache.load(path, mesh)
    return right | {"load": same_outputs(loaded, twin) or torch.allclose(decoded(cache), decoded(twin))}


@pytest.mark.parametrize("shape", [Shape(1, 1, 2), Shape(1, 1, 3), Shape(2, 1, 1)], ids=str)
def test_ranks_have_files_of_their_own(pool: Pool, tmp_path: Path, shape: Shape) -> None:
    for right in pool.run(shape.ranks, live_on_ranks, tmp_path, shape):
        assert right == dict.fromkeys(right, True)
    assert torch.allclose(decoded(am.KVCache.load(tmp_path, None)), decoded(in_memory(PIECE_TOKENS + 38)), atol=FLOAT32)
    with pytest.raises(StoreError, match=r"expected a folder of 1 x 1 ranks .*Fix: load it with KVCache.load"):
        opened(tmp_path)


@on_each_rank
def damage_one_rank(path: Path) -> str:
    """On a rank: what is said where the files of rank 1 alone are damaged."""
    mesh = named_mesh(Shape(1, 1, 2), AXES)
    cache = am.KVCache(mesh, **SIZES, folder=path)
    grow(cache, 100)
    del cache
    gc.collect()
    dist.barrier()
    if dist.get_rank() == 1:
        flip(next(path.glob("1-*/0.1.*.filling")), 5000)
    dist.barrier()
    try:
        am.KVCache(mesh, **SIZES, folder=path)
    except StoreError as error:
        return str(error)
    return ""


def test_damage_of_one_rank_raises_on_all(pool: Pool, tmp_path: Path) -> None:
    one, other = pool.run(2, damage_one_rank, tmp_path)
    assert one == other
    assert "damage in" in one


def cut(file: Path, size: int) -> None:
    os.truncate(file, size)


def of_another_cache(file: Path) -> None:
    other = opened(file.parents[2] / "other")
    k, v = rows(0, PIECE_TOKENS + 200)
    other.append(k + 1, v)
    found = next((file.parents[2] / "other").glob(f"1-*/{file.name}"))
    file.write_bytes(found.read_bytes())


DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a byte of a piece": ("0-4096.safetensors", lambda file: flip(file, 70_000), "damage in 'keys 0' in"),
    "a byte of a header": (
        "0-4096.safetensors",
        lambda file: flip(file, 10),
        "expected a file that KVCache.save wrote",
    ),
    "a short piece": ("0-4096.safetensors", lambda file: cut(file, 70_000), "expected a file that KVCache.save wrote"),
    "no piece": ("0-4096.safetensors", Path.unlink, "expected a file that KVCache.save wrote"),
    "a foreign piece": ("0-4096.safetensors", of_another_cache, "a piece of another one"),
    "a byte of the last piece": ("4096-8192.filling", lambda file: flip(file, 5000), "damage in"),
    "an index of the last piece": ("4096-8192.filling", lambda file: flip(file, -PIECE_TOKENS * 8), "damage in"),
    "a short last piece": ("4096-8192.filling", lambda file: cut(file, 70_000), "expected a file that KVCache.save"),
    "no last piece": ("4096-8192.filling", Path.unlink, "expected a file that KVCache.save wrote"),
    "a foreign last piece": ("4096-8192.filling", of_another_cache, "damage in"),
    "a byte of the journal": ("0.journal", lambda file: flip(file, RECORD_BYTES + 9), "damage at byte 64"),
    "an empty journal": ("0.journal", lambda file: cut(file, 0), "0 bytes without a first record"),
    "a foreign journal": ("0.journal", of_another_cache, "damage at byte 0"),
    "no journal": ("0.journal", Path.unlink, "expected a journal of each rank and layer"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_files_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    cache = opened(tmp_path / "a")
    grow(cache, PIECE_TOKENS + 100)
    grow(cache, 100)
    del cache
    gc.collect()
    name, harm, said = DAMAGE[kind]
    (file,) = (tmp_path / "a").glob(f"1-*/0.0.{name}")
    harm(file)
    for read in (lambda: opened(tmp_path / "a"), lambda: am.KVCache.load(tmp_path / "a", None)):
        with pytest.raises(StoreError, match=said) as error:
            read()
        assert str(tmp_path) in str(error.value)


def test_a_record_that_was_begun_is_no_token(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    grow(cache, 30)
    del cache
    (journal,) = tmp_path.glob("1-*/*.journal")
    with journal.open("ab") as file:
        file.write(b"half of it")
    cache = opened(tmp_path)
    assert same_outputs(cache, in_memory(30))
    grow(cache, 1)
    del cache
    assert same_outputs(opened(tmp_path), in_memory(31))


def test_what_is_no_folder_of_this_cache_is_refused(tmp_path: Path) -> None:
    cache = opened(tmp_path / "a")
    grow(cache, 5)
    with pytest.raises(StoreError, match=r"expected one writer of a folder, given .*which another cache writes"):
        am.KVCache(None, **SIZES, folder=tmp_path / "a")
    del cache
    with pytest.raises(StoreError, match=r"expected a cache of the sizes in .*head_dim=16.*, given .*head_dim=8"):
        opened(tmp_path / "a", head_dim=8)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match=r"expected an empty folder, given \['notes.txt'\]"):
        opened(tmp_path / "b")
    manifest = tmp_path / "a" / "cache.json"
    fields = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**fields, "version": 4}))
    with pytest.raises(
        StoreError, match=r"expected a cache of version 7, given version 4 .*Fix: load it with the attn"
    ):
        opened(tmp_path / "a")
    manifest.write_text(json.dumps(fields)[:-30])
    with pytest.raises(StoreError, match=r"expected a folder that KVCache.save wrote"):
        opened(tmp_path / "a")


def test_folders_of_others_are_refused(tmp_path: Path) -> None:
    grow(opened(tmp_path / "a"), 5)
    (tmp_path / "a").chmod(0o770)
    with pytest.raises(StoreError, match="expected a folder that no other user may write to"):
        opened(tmp_path / "a")
    (tmp_path / "a").chmod(0o700)
    (save,) = (tmp_path / "a").glob("1-*")
    save.chmod(0o702)
    with pytest.raises(StoreError, match="expected a folder that no other user may write to"):
        opened(tmp_path / "a")
    save.chmod(0o700)
    assert {file.stat().st_mode & 0o777 for file in save.iterdir()} == {0o600}
    if os.geteuid() == 0:
        os.chown(tmp_path / "a", 12345, -1)
        with pytest.raises(StoreError, match="expected a folder that no other user may write to"):
            opened(tmp_path / "a")


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"mask": am.Window(7)}, "a cache that keeps all tokens, given mask=Window"),
        ({"copies": 2}, "KVCache copies: expected 1 to 1"),
        ({"block": 48}, "a block that divides 4096, given 48"),
        ({"folder": 7}, "the path of a folder, given 7 of type int"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(tmp_path: Path, sizes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        am.KVCache(None, **{**SIZES, "folder": tmp_path, **sizes})


def test_calls_that_would_move_the_keys_are_refused(tmp_path: Path) -> None:
    cache = opened(tmp_path / "a", batch=2)
    grow(cache, 20)
    refused: list[Callable[[], object]] = [
        lambda: cache.reorder(torch.tensor([1, 0])),
        lambda: cache.save(tmp_path / "b"),
        lambda: cache.keys,
    ]
    for call in refused:
        with pytest.raises(StoreError, match=r"KVCache folder: .*Fix: call it on cache.fork\(\)"):
            call()
    with pytest.raises(KernelError, match="append token_mask: expected sequences without padding in a folder"):
        cache.append(*rows(20, 21, 2), token_mask=torch.tensor([[True], [False]]))
    assert same_outputs(cache, in_memory(20, batch=2))
    cache.fork().save(tmp_path / "b")
    assert same_outputs(am.KVCache.load(tmp_path / "b", None), cache)
