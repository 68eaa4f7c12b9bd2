"""A cache that stores 8 bits: attention is exact over the stored numbers, which no change of the cache changes."""

from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import attnmesh as am
from attnmesh import errors
from attnmesh.core.storage import STORAGES, columns_of
from attnmesh.decoding.index_search import top_k_tokens
from attnmesh.kernels import quantized
from attnmesh.mesh.axes import RankMesh
from attnmesh.mesh.shapes import Shape
from tests.support.caches.make import empty_cache, mesh_or_none
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth import histories
from tests.support.truth.dense import truth
from tests.support.truth.seeds import in_turn, pairs, rotated, seeds

HEADS, WIDTH, TOKENS = (4, 2), 8, 75

empty = partial(empty_cache, batch=2, capacity=160)
each_storage = pytest.mark.parametrize("storage", STORAGES)


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rows(x: Tensor, storage: str) -> Tensor:
    return STORAGES[storage].quantize(x).view(torch.int8)


@pytest.mark.parametrize("seed", seeds(5, 300))
def test_random_lives_agree_with_float64(pool: Pool, tmp_path: Path, seed: int) -> None:
    drawn = replace(histories.draw(seed + 5000), storage=in_turn(STORAGES, seed))
    histories.check(drawn, pool, tmp_path)


def is_held(cache: am.KVCache, x: Tensor, storage: str) -> bool:
    """Return whether this rank's rows are those of its tokens."""
    held = cache.keys[:, :, : cache.used]
    columns_of(held)
    index = cache.own_shard.token_index[: cache.used]
    return (
        torch.equal(held.view(torch.int8), rows(x, storage)[:, cache.rank_mesh.heads.slice_of(HEADS[1])][:, :, index])
        and columns_of(held) == x.shape[-1]
    )


@on_each_rank
def live_in_8_bits(shape: tuple[int, ...], storage: str, values: str, folder: Path, lost: int) -> dict[str, bool]:
    """Fill, change, fork, save, load and recover a cache. Return after which steps it holds the rows of its tokens."""
    mesh = mesh_or_none(Shape(*shape))
    place, copies = RankMesh.of(mesh), min(2, shape[1] * shape[2])
    cache = empty(mesh, storage=storage, values=values, copies=copies)

    def new(tokens: int, seed: int) -> tuple[Tensor, Tensor | None]:
        k, v = numbers(2, 2, HEADS[1], tokens, WIDTH, seed=seed)
        return k, v if values == "separate" else None

    (keys, v), mine = new(37, 0), am.Zigzag().positions(37, place.shape.ranks, place.shard_index)
    cache.append_shard(keys[:, :, mine], None if v is None else v[:, :, mine], mine)
    right = {"fill": is_held(cache, keys, storage)}
    for step, tokens in enumerate((9, 1, 1, 5)):
        cache.append(*new(tokens, 1 + step))
        keys = torch.cat((keys, new(tokens, 1 + step)[0]), 2)
    right["append"] = is_held(cache, keys, storage)
    cache.truncate(40)
    cache.reserve(200)
    cache.reorder(torch.tensor([1, 0]))
    keys = keys[[1, 0], :, :40]
    right["truncate, reserve, reorder"] = is_held(cache, keys, storage)
    other, apart = cache.fork(), deepcopy(cache)
    other.append(*new(3, 20))
    other.truncate(41)
    right["fork"] = is_held(other, torch.cat((keys, new(3, 20)[0][:, :, :1]), 2), storage)
    right |= {"copy": is_held(apart, keys, storage), "beside both": is_held(cache, keys, storage)}
    cache.save(folder)
    found = {"load": am.KVCache.load(folder, mesh)}
    if copies > 1:
        (found["recover"],) = am.recover(None if dist.get_rank() == lost else [cache], mesh)
    return right | {
        step: each.config.storage == storage and is_held(each, keys, storage) for step, each in found.items()
    }


@each_storage
@pytest.mark.parametrize("values", ["separate", "prefix", "none"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, 3), (2, 1, 2)])
def test_a_life_keeps_the_stored_rows(
    pool: Pool, tmp_path: Path, shape: tuple[int, ...], storage: str, values: str
) -> None:
    for right in pool.run(
        Shape(*shape).ranks, live_in_8_bits, shape, storage, values, tmp_path, Shape(*shape).ranks - 1
    ):
        assert right == dict.fromkeys(right, True)


@on_each_rank
def decode_reproducibly_in_8_bits(
    shape: tuple[int, ...], storage: str, values: str, block: int, pieces: tuple[int, ...]
) -> list[Tensor]:
    cache = empty(mesh_or_none(Shape(*shape)), storage=storage, values=values, block=block)
    k, v = numbers(2, 2, HEADS[1], TOKENS, WIDTH)
    q = numbers(2, HEADS[0], 2, WIDTH, seed=1)
    for part in torch.arange(TOKENS).split(pieces):
        cache.append(k[:, :, part], v[:, :, part] if values == "separate" else None)
    return [
        am.decode(q[:, :, :rows], cache, mask=mask, reproducible=True)
        for rows in (1, 2)
        for mask in (am.Causal(), am.Window(29))
    ]


@each_storage
@pytest.mark.parametrize(("values", "block"), pairs(["separate", "prefix"], [4, 16]))
def test_bits_are_the_same_on_any_ranks_and_in_any_pieces(pool: Pool, storage: str, values: str, block: int) -> None:
    expected = pool.run(1, decode_reproducibly_in_8_bits, (1, 1, 1), storage, values, block, (TOKENS,))[0]
    shapes = [((1, 1, 1), (1, 30, 44)), ((1, 1, 2), (TOKENS,)), ((1, 2, 2), (60, 15)), ((1, 1, 8), (TOKENS,))]
    shapes.append(((2, 1, 2), (TOKENS,)))
    for shape, pieces in shapes:
        for found in pool.run(
            Shape(*shape).ranks, decode_reproducibly_in_8_bits, shape, storage, values, block, pieces
        ):
            assert all(map(torch.equal, found, expected)), shape


@on_each_rank
def read_rows_after_load(shape: tuple[int, ...], storage: str, folder: Path) -> Tensor:
    """Fill and save a cache on four ranks, or load it on others; append more. Return the rows of all tokens."""
    mesh = mesh_or_none(Shape(*shape))
    saves = shape[2] == 4
    cache = empty(mesh, storage=storage) if saves else am.KVCache.load(folder, mesh)
    k, v = numbers(2, 2, HEADS[1], TOKENS, WIDTH)
    if saves:
        cache.append(k, v)
        cache.save(folder)
    cache.append(k[:, :, :9], v[:, :, :9])
    index = cache.own_shard.token_index[: cache.used]
    held = torch.zeros(2, HEADS[1], TOKENS + 9, cache.keys.shape[-1] + cache.values.shape[-1], dtype=torch.int8)
    held[:, :, index] = torch.cat((cache.keys, cache.values), -1)[:, :, : cache.used].view(torch.int8)
    if mesh is not None:
        dist.all_reduce(held)
    return held


@each_storage
def test_saved_on_four_continues_on_three(pool: Pool, tmp_path: Path, storage: str) -> None:
    expected = pool.run(4, read_rows_after_load, (1, 1, 4), storage, tmp_path)[0]
    for found in pool.run(3, read_rows_after_load, (1, 1, 3), storage, tmp_path):
        assert torch.equal(found, expected)


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
KERNELS = ["auto", "cpu", "reference"]


@each_storage
@pytest.mark.parametrize(("dtype", "widths", "kernel"), rotated(DTYPES, [(192, 128), (576, 512)], KERNELS, every=2))
def test_wide_rows_and_many_tiles_agree_with_float64(
    monkeypatch: pytest.MonkeyPatch, storage: str, dtype: torch.dtype, widths: tuple[int, int], kernel: str
) -> None:
    monkeypatch.setattr(quantized, "QUANTIZED_TILE_KEYS", 32)
    values = "prefix" if widths[0] > 256 else "separate"
    sizes = {"head_dim": widths[0], "value_dim": widths[1], "dtype": dtype, "values": values}
    cache = empty(**sizes, storage=storage)
    k, v = (numbers(2, HEADS[1], 150, width, seed=width, dtype=dtype) for width in widths)
    q = numbers(2, HEADS[0], 3, widths[0], seed=1, dtype=dtype)
    cache.append(k, v if values == "separate" else None)
    k, v = (STORAGES[storage].dequantize(STORAGES[storage].quantize(x), torch.float64) for x in (k, v))
    v = k[..., : widths[1]] if values == "prefix" else v
    visible = am.Causal().visible(torch.arange(147, 150), torch.arange(150))
    expected = truth([q, k, v], visible, widths[0] ** -0.5, torch.zeros(*q.shape[:-1], widths[1]))
    expected.check("out", am.decode(q, cache, kernel=kernel))


@each_storage
def test_a_token_takes_half_the_bytes(storage: str) -> None:
    plain, held = (empty(head_dim=128, dtype=torch.bfloat16, storage=each) for each in (None, storage))
    for cache in (plain, held):
        cache.append(*numbers(2, 2, HEADS[1], TOKENS, 128, dtype=torch.bfloat16))
    assert held.nbytes == held.own_shard.token_bytes == 2 * 2 * HEADS[1] * TOKENS * 130
    assert held.nbytes < 0.53 * plain.nbytes


@each_storage
def test_what_is_not_finite_gives_nan(storage: str) -> None:
    for fault in (torch.inf, torch.nan):
        for place in (0, 1):
            kv = numbers(2, 2, HEADS[1], TOKENS, WIDTH)
            kv[place, 0, 1, 50, 3] = fault
            cache = empty(storage=storage)
            cache.append(*kv)
            out = am.decode(numbers(2, HEADS[0], 1, WIDTH), cache)
            assert bool(out[0, 2:].isnan().all())
            assert bool(out[0, :2].isfinite().all())
            assert bool(out[1].isfinite().all())


@each_storage
def test_pages_of_rows_are_appended_as_they_are(storage: str) -> None:
    cache, other = empty(storage=storage, block=25), empty(storage=storage, block=25)
    cache.append(*numbers(2, 2, HEADS[1], TOKENS, WIDTH))
    (pages,) = cache.pages()
    other.append_pages(pages.keys, pages.values, pages.block_table)
    q = numbers(2, HEADS[0], 1, WIDTH, seed=1)
    assert torch.equal(*(am.decode(q, each, reproducible=True) for each in (cache, other)))
    with pytest.raises(errors.DtypeError, match="append_pages keys"):
        empty(storage=storage, block=25).append_pages(*numbers(2, 6, 25, HEADS[1], WIDTH + 2), pages.block_table)
    wrong = pages.keys[..., :WIDTH]
    with pytest.raises(errors.ShapeError, match="append_pages keys"):
        empty(storage=storage, block=25).append_pages(wrong, wrong, pages.block_table)


@each_storage
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_index_keys_select_by_the_stored_numbers(storage: str, dtype: torch.dtype) -> None:
    keys, q = numbers(2, 1, TOKENS, WIDTH, dtype=dtype), numbers(2, 3, WIDTH, seed=1, dtype=dtype)
    read = STORAGES[storage].dequantize(rows(keys, storage).view(STORAGES[storage].dtype)).to(dtype)
    caches = [empty(kv_heads=1, values="none", dtype=dtype, storage=each) for each in (storage, None)]
    for cache, x in zip(caches, (keys, read), strict=True):
        cache.append(x)
    found = [top_k_tokens(cache, lambda k, operands: operands[0] @ k.mT, [q], 5) for cache in caches]
    assert torch.equal(*found)


def in_a_graph(storage: str) -> bool:
    cache, q = empty(storage=storage), numbers(2, HEADS[0], 1, WIDTH, seed=1)
    k, v = numbers(2, 2, HEADS[1], TOKENS, WIDTH)
    cache.append(k, v)

    @torch.compile(backend="eager", fullgraph=True)
    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache.append(k, v)
        return am.decode(q, cache)

    given = step(q, k[:, :, :1], v[:, :, :1])
    return torch.equal(given, am.decode(q, cache))


@each_storage
def test_a_step_compiles_to_a_graph(storage: str) -> None:
    assert in_a_graph(storage)


def test_wrong_storages_and_rows_are_refused() -> None:
    with pytest.raises(errors.ArgumentError, match="KVCache storage: expected None or one of int8, fp8_e4m3"):
        empty(storage="int4")
    with pytest.raises(errors.ArgumentError, match="KVCache storage"):
        empty(storage=8)
    with pytest.raises(errors.ShapeError, match="KVCache head_dim: expected an even number"):
        empty(head_dim=7, storage="int8")
    with pytest.raises(errors.ShapeError, match="KVCache value_dim: expected an even number"):
        empty(value_dim=5, storage="int8")
    cache = empty(storage="int8")
    with pytest.raises(errors.KernelError, match="gradients"):
        cache.append(*numbers(2, 2, HEADS[1], 3, WIDTH).requires_grad_())
    with pytest.raises(errors.DtypeError, match="append: expected one dtype"):
        cache.append(*rows(numbers(2, 2, HEADS[1], 3, WIDTH), "int8"))


@on_each_rank
def catch_errors_of_two_storages(folder: Path) -> list[str]:
    """Return the errors of ranks whose caches are stored in two ways."""
    mesh = mesh_or_none(Shape(1, 1, 2))
    found = []
    other = "int8" if dist.get_rank() else None
    for call in (lambda: empty(mesh, storage=other), lambda: am.recover([empty(None, storage=other)], mesh)):
        try:
            call()
        except errors.MeshError as error:
            found.append(str(error))
    return found


def test_caches_of_two_storages_are_refused_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    for found in pool.run(2, catch_errors_of_two_storages, tmp_path):
        assert len(found) == 2
        assert "storage" in found[0]
