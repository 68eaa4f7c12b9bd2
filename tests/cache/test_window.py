"""Caches that forget: the same results as caches that keep every token, in the memory of a window."""

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import attnmesh as am
from attnmesh import errors
from attnmesh.cache.cache_config import CacheConfig
from attnmesh.cache.memory_shard import MemoryShard
from attnmesh.core.mask import Mask
from attnmesh.mesh.axes import RankMesh
from attnmesh.mesh.shapes import AXES, Shape
from attnmesh.store.load_layers import load_layers
from attnmesh.store.save_layers import save_layers
from tests.support.caches.make import empty_cache, mesh_or_none
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.tolerances import FLOAT32, FLOAT32_SUMS, assert_near, worst

MASKS = [am.Window(0), am.Window(37), am.Causal() & am.Chunks(50), am.Window(30) & am.Chunks(24)]


def window_cache(shape: Shape, mask: Mask | None, keep: int = 0, **options: Any) -> am.KVCache:
    return empty_cache(mesh_or_none(shape), batch=2, capacity=2000, mask=mask, keep=keep, **options)


def new(tokens: int, seed: int = 0) -> list[Tensor]:
    """Return q, k and v of new tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, heads, tokens, 8, generator=generator) for heads in (4, 2, 2)]


# --- the same bits, and less memory ---


@on_each_rank
def live_long(shape: Shape, mask: Mask, keep: int) -> list[Tensor]:
    """Return outputs of a long life. Raise unless a cache that keeps every token gives the same bits."""
    caches = [window_cache(shape, mask, keep), window_cache(shape, None)]
    outs = []
    random = torch.Generator().manual_seed(3)
    for step in range(70):
        tokens = {20: 9, 40: 130}.get(step, 1)
        q, k, v = new(tokens, step)
        for cache in caches:
            cache.append(k, v)
        both = [am.decode(q, cache, mask=mask, reproducible=True) for cache in caches]
        assert torch.equal(*both), step
        outs.append(both[0])
        if keep and step % 7 == 6:
            less = int(torch.randint(1, keep + 1, (1,), generator=random))
            for cache in caches:
                cache.truncate(cache.length - less)
            both = [am.decode(q[:, :, -1:], cache, mask=mask, reproducible=True) for cache in caches]
            assert torch.equal(*both), step
    forgets, whole = caches
    seen = min(mask.left + 1, *mask.chunks, 2000) + keep
    slots = seen / forgets.token_axis.size * 9 / 8 + 5 * 4 + 3
    assert forgets.keys.shape[2] <= slots, (forgets, forgets.keys.shape, slots)
    assert forgets.length == whole.length
    assert forgets.used < whole.used
    return outs


def lives_of() -> list[Any]:
    """Return masks and numbers of tokens that truncation may remove; one case is a sample, the others long tests."""
    cases = [(mask, keep) for mask in MASKS for keep in (0, 6)]
    return [pytest.param(*case, marks=[] if case == (MASKS[3], 6) else pytest.mark.long) for case in cases]


@pytest.mark.parametrize(("mask", "keep"), lives_of())
def test_bits_are_those_of_a_cache_that_keeps_every_token(pool: Pool, mask: Mask, keep: int) -> None:
    (alone,) = pool.run(1, live_long, Shape(1, 1, 1), mask, keep)
    for shape in (Shape(1, 1, 2), Shape(2, 1, 2)):
        for outs in pool.run(shape.ranks, live_long, shape, mask, keep):
            assert all(map(torch.equal, outs, alone)), shape


class Prefilled(NamedTuple):
    """The worst error after a sharded prefill in three parts, and the slots of a rank before and after steps."""

    error: float
    slots: int
    slots_after_steps: int


@on_each_rank
def prefill_in_parts(shape: Shape, layout: Any, padded: bool) -> Prefilled:
    mask, place = am.Window(20), RankMesh.of(mesh_or_none(shape))
    caches = [window_cache(shape, mask, 3), window_cache(shape, None)]
    errors = []
    for length, queries in ((700, 1), (90, 90), (400, 5)):
        q, k, v = new(length)
        real = torch.rand(2, length, generator=torch.Generator().manual_seed(1)) > 0.3 if padded else None
        mine = layout.positions(length, place.shape.ranks, place.shard_index)
        for cache in caches:
            positions = cache.length + mine
            cache.append_shard(k[:, :, mine], v[:, :, mine], positions, token_mask=real, queries=queries)
        one, other = (am.decode(q[:, :, -queries:], cache, mask=mask) for cache in caches)
        errors.append(float((one - other).abs().max()))
    slots = caches[0].keys.shape[2]
    for step in range(10):
        q, k, v = new(1, step)
        for cache in caches:
            cache.append(k, v)
        one, other = (am.decode(q, cache, mask=mask) for cache in caches)
        errors.append(float((one - other).abs().max()))
    return Prefilled(worst(errors), slots, caches[0].keys.shape[2])


@pytest.mark.parametrize(
    ("layout", "padded"),
    [
        (am.Contiguous(), True),
        pytest.param(am.Striped(4), False, marks=pytest.mark.long),
        pytest.param(am.Striped(4), True, marks=pytest.mark.long),
        pytest.param(am.Contiguous(), False, marks=pytest.mark.long),
    ],
)
def test_a_sharded_prefill_keeps_the_window_alone(pool: Pool, layout: Any, padded: bool) -> None:
    for shape in (Shape(1, 1, 1), Shape(1, 1, 3), Shape(2, 1, 2)):
        for prefilled in pool.run(shape.ranks, prefill_in_parts, shape, layout, padded):
            assert prefilled.error < FLOAT32_SUMS
            assert max(prefilled.slots, prefilled.slots_after_steps) < 90, "of 1,190 tokens"


@on_each_rank
def check_a_copy() -> None:
    cache, mask = window_cache(Shape(1, 1, 2), am.Window(30), 2), am.Window(30)
    cache.append(*new(200)[1:])
    other, (q, k, v) = deepcopy(cache), new(1, 1)
    other.append(k, v)
    before = am.decode(q, other, mask=mask)
    for step in range(80):
        cache.append(*new(1, step)[1:])
    assert_near(am.decode(q, other, mask=mask), before)
    assert other.length == 201, other.length


def test_a_copy_forgets_by_itself(pool: Pool) -> None:
    pool.run(2, check_a_copy)


def test_an_append_without_memory_takes_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU writes new tokens after the slots that the CPU has counted."""
    cache = window_cache(Shape(1, 1, 1), am.Window(30), storage="int8")
    cache.append(*new(20)[1:])

    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(CacheConfig, "rows_of", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            cache.append(*new(1, 1)[1:])
    assert cache.local_shards.counter.used_slots[0] == cache.used == 20
    for step in range(50):
        cache.append(*new(1, step)[1:])
        assert cache.local_shards.counter.used_slots[0] == cache.used


@pytest.mark.parametrize(("inner", "tokens"), [("try_append_run", 1), ("append_rows_at", 5)])
def test_tokens_before_a_failed_append_are_decoded_again(
    monkeypatch: pytest.MonkeyPatch, inner: str, tokens: int
) -> None:
    cache = window_cache(Shape(1, 1, 1), am.Window(30))
    for count in (100, 1, 1):
        q, k, v = new(count)
        cache.append(k, v)
    before = am.decode(q, cache, mask=am.Window(30))

    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(MemoryShard, inner, no_memory)
    _, k, v = new(tokens)
    append = partial(cache.append, k, v)
    append_shard = partial(cache.append_shard, k, v, torch.arange(102, 102 + tokens))
    with pytest.raises(torch.OutOfMemoryError):
        (append if tokens == 1 else append_shard)()
    assert am.decode(q, cache, mask=am.Window(30)).equal(before)
    cache.truncate(102)


# --- saving, loading and recovering ---

LAYERS = am.Window(37), None, am.Window(37), am.Causal() & am.Chunks(64)


def filled_cache(shape: Shape, mask: Mask | None, padded: bool) -> am.KVCache:
    cache = window_cache(shape, mask, keep=0 if mask is None else 4, copies=min(2, shape.queries * shape.keys))
    real = torch.rand(2, 300, generator=torch.Generator().manual_seed(1)) > 0.3 if padded else None
    cache.append(*new(300)[1:], token_mask=real)
    for step in range(20):
        cache.append(*new(1, step)[1:])
    return cache


def later_outputs(caches: list[am.KVCache], masks: Any = LAYERS) -> list[Tensor]:
    """Return outputs after a truncation and more tokens."""
    outs = []
    for step in range(12):
        q, k, v = new(1, 200 + step)
        for cache, mask in zip(caches, masks, strict=True):
            if step == 8:
                cache.truncate(cache.length - 2)
            cache.append(k, v)
            outs.append(am.decode(q, cache, mask=mask or am.Causal()))
    return outs


@on_each_rank
def save_while_decoding(shape: Shape, padded: bool, path: Path) -> list[Tensor]:
    caches = [filled_cache(shape, mask, padded) for mask in LAYERS]
    save_layers(caches, path).wait()
    saving = save_layers(caches, path, wait=False)
    outs = later_outputs(caches)
    saving.wait()
    return outs


@on_each_rank
def load_and_continue(shape: Shape, path: Path) -> list[Tensor]:
    caches, _, _ = load_layers(am.KVCache, path, mesh_or_none(shape))
    assert [cache.config.mask for cache in caches] == list(LAYERS)
    return later_outputs(caches)


@pytest.mark.parametrize("padded", [pytest.param(False, marks=pytest.mark.long), True])
def test_layers_of_several_windows_are_saved_and_loaded_on_other_ranks(
    pool: Pool, tmp_path: Path, padded: bool
) -> None:
    expected = pool.run(2, save_while_decoding, Shape(1, 1, 2), padded, tmp_path)[0]
    for shape in (Shape(1, 1, 1), Shape(1, 1, 3), Shape(2, 1, 2)):
        for outs in pool.run(shape.ranks, load_and_continue, shape, tmp_path):
            assert all(torch.allclose(*both, atol=FLOAT32_SUMS) for both in zip(outs, expected, strict=True))


@on_each_rank
def recover_and_continue(padded: bool, after: Shape, ahead: int) -> list[Tensor] | str:
    caches = [filled_cache(Shape(1, 1, 3), mask, padded) for mask in LAYERS]
    if dist.get_rank() == 2:  # steps ahead of the others
        for cache in caches[:2]:
            cache.guard.checked = False
            for step in range(ahead):
                cache.append(*new(1, step)[1:])
    try:
        found = am.recover(None if dist.get_rank() == 1 else caches, named_mesh(after, AXES), copies=2)
    except errors.MeshError as error:
        return str(error)
    return later_outputs(found)


@pytest.mark.parametrize("padded", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_recovered_window_continues_as_before(pool: Pool, padded: bool) -> None:
    alone = later_outputs([filled_cache(Shape(1, 1, 1), mask, padded) for mask in LAYERS])
    for after, ahead in ((Shape(1, 1, 3), 0), (Shape(1, 3, 1), 1)):
        for outs in pool.run(3, recover_and_continue, padded, after, ahead):
            assert not isinstance(outs, str), outs
            assert all(torch.allclose(*both, atol=FLOAT32_SUMS) for both in zip(outs, alone, strict=True))


def test_ranks_too_far_apart_are_refused(pool: Pool) -> None:
    messages = pool.run(3, recover_and_continue, False, Shape(1, 1, 3), 40)
    assert len(set(messages)) == 1
    assert str(messages[0]).startswith("recover: expected ranks as far as each other, given ranks that have forgotten")


def test_a_step_decodes_in_one_graph() -> None:
    cache, mask = window_cache(Shape(1, 1, 1), am.Window(20)), am.Window(20)
    step = torch.compile(lambda q: am.decode(q, cache, mask=mask), backend="eager", fullgraph=True)
    for seed in range(40):
        q, k, v = new(1, seed)
        cache.append(k, v)
        with torch.no_grad():
            assert torch.equal(step(q), am.decode(q, cache, mask=mask))


def test_an_empty_batch_with_padding_is_saved(tmp_path: Path) -> None:
    cache = window_cache(Shape(1, 1, 1), am.Window(20))
    cache.append(*new(30)[1:], token_mask=torch.arange(30).ge(9).expand(2, 30))
    cache.truncate(0)
    cache.save(tmp_path)
    assert am.KVCache.load(tmp_path, None).length == 0


def test_a_window_that_is_truncated_decodes_as_one_that_was_not_filled_further() -> None:
    cache, mask = window_cache(Shape(1, 1, 1), am.Window(20)), am.Window(20)
    q, k, v = new(15)
    cache.append(k, v)
    cache.truncate(2)  # nothing has been forgotten
    whole = am.attend(q, k, v, mask=mask).out
    assert torch.allclose(am.decode(q[:, :, 1:2], cache, mask=mask), whole[:, :, 1:2], atol=FLOAT32)
    for _ in range(5):
        cache.append(k, v)
    cache.truncate(0)
    cache.append(k, v)
    assert torch.allclose(am.decode(q, cache, mask=mask), whole, atol=FLOAT32)
