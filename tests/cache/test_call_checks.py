"""What the tokens of a cache allow: steps that they serve, and new tokens that fit them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import attnmesh as am
from attnmesh.cache.block_cyclic import BlockCyclic
from attnmesh.cache.call_checks import (
    StepFault,
    check_dtype_and_device,
    check_eager,
    check_eager_tensors,
    check_new,
    check_step,
    needs_cpu,
    step_fault,
)
from attnmesh.cache.local_shards import LocalShards
from attnmesh.cache.memory_shard import MemoryShard
from attnmesh.errors import ArgumentError, DtypeError, KernelError, LayoutError, ShapeError
from attnmesh.kernels.cache_view import LENGTH
from attnmesh.mesh.axes import Axis

pytestmark = pytest.mark.quick

CPU = torch.device("cpu")


def cache_of(length: int, real: Tensor | None = None, **options: object) -> am.KVCache:
    """Return a cache of two sequences with room for twenty tokens, `length` of which are appended one by one."""
    sizes = {"batch": 2, "kv_heads": 2, "head_dim": 4, "capacity": 20, "block": 4, "dtype": torch.float32}
    cache = am.KVCache(None, **{**sizes, **options})  # type: ignore[arg-type]
    for token in range(length):
        mask = None if real is None else real[:, token : token + 1]
        cache.append(*torch.ones(2, 2, 2, 1, 4), token_mask=mask)
    return cache


def fault_of(cache: am.KVCache, queries: int | None, *, reproducible: bool = False) -> StepFault | None:
    return step_fault(cache.local_shards, queries, reproducible=reproducible)


def test_a_step_has_as_many_queries_as_there_are_tokens_at_most() -> None:
    cache = cache_of(3)
    assert [fault_of(cache, queries) for queries in (1, 2, 3, 4)] == [None, None, None, StepFault.LENGTH]
    assert fault_of(cache_of(0), 1) is StepFault.LENGTH
    assert fault_of(cache_of(0), None) is None, "a graph reads no length"
    full = cache_of(20)
    assert fault_of(full, 1) is None
    full.own_shard.device_counts[LENGTH] += 1  # as a graph that appends once more
    assert fault_of(full, 1) is StepFault.LENGTH


@pytest.mark.parametrize("keep", [0, 1, 3])
def test_a_window_serves_the_queries_whose_tokens_it_keeps(keep: int) -> None:
    """A window that has appended one token at a time serves its last query and those that may be taken back."""
    cache, whole = cache_of(12, mask=am.Window(3), keep=keep), cache_of(12)
    for queries in range(1, 7):
        assert fault_of(cache, queries) is (None if queries <= 1 + keep else StepFault.FORGOTTEN), queries
        assert fault_of(whole, queries) is None


def test_reproducible_steps_need_even_blocks_in_turn_that_no_other_cache_shares() -> None:
    padded = cache_of(3, torch.tensor([[False, True, True], [True, True, True]]))
    cache = cache_of(9)
    forked = cache.fork()
    for faulty, fault in ((padded, StepFault.LAYOUT), (cache, StepFault.SHARED), (forked, StepFault.SHARED)):
        assert fault_of(faulty, 1, reproducible=True) is fault
        assert fault_of(faulty, 1) is None
    assert fault_of(cache_of(9), 1, reproducible=True) is None
    check_step(cache.local_shards, "decode", "", torch.ones(2, 2, 1, 4), in_graph=False, reproducible=True)


def uneven_shards() -> LocalShards:
    """Return the shards of the first of two ranks, which has three blocks of four."""
    config, blocks = cache_of(0).config, BlockCyclic.of(4, 2, (3, 1))
    return LocalShards(Axis(2, 0), 1, lambda index: MemoryShard(config, Axis(), blocks, CPU, index))


@pytest.mark.parametrize(
    ("shards", "queries", "error", "expected"),
    [
        (lambda: cache_of(2).local_shards, 3, ShapeError, "given 3 queries and 2 of 20 tokens in the cache"),
        (
            lambda: cache_of(9, mask=am.Window(3)).local_shards,
            2,
            ShapeError,
            "expected queries of token 8 and later ones: .* given queries of the tokens from 7 to 8",
        ),
        (lambda: cache_of(2, torch.tensor([[False, True]] * 2)).local_shards, 1, LayoutError, "given a padded batch"),
        (uneven_shards, 1, KernelError, "decode reproducible: expected even shares"),
    ],
    ids=["length", "forgotten", "layout", "shares"],
)
def test_each_fault_has_an_error(
    shards: Callable[[], LocalShards], queries: int, error: type[Exception], expected: str
) -> None:
    q = torch.ones(2, 2, queries, 4)
    with pytest.raises(error, match=expected):
        check_step(shards(), "decode", "", q, in_graph=False, reproducible=error is not ShapeError)


def test_new_tokens_have_the_heads_and_columns_of_the_cache() -> None:
    config, k = cache_of(0).config, torch.ones(2, 2, 3, 4)
    check_new("append", config, k, k, CPU)
    latents = cache_of(0, value_dim=3, values="prefix").config
    check_new("append", latents, k, None, CPU)
    with pytest.raises(ArgumentError, match="append v: expected None, for values are columns of k"):
        check_new("append", latents, k, k, CPU)
    with pytest.raises(ArgumentError, match="append v: expected a tensor of values, given None"):
        check_new("append", config, k, None, CPU)
    with pytest.raises(ShapeError, match=r"append v: expected shape \(2, 2, tokens, 4\), given \(2, 2, 3, 5\)"):
        check_new("append", config, k, torch.ones(2, 2, 3, 5), CPU)
    with pytest.raises(ShapeError, match="k and v of the same tokens, given 3 and 2 tokens"):
        check_new("append", config, k, k[:, :, 1:], CPU)
    with pytest.raises(ShapeError, match=r"transpose\(1, 2\)"):
        check_new("append", config, k.transpose(1, 2), k.transpose(1, 2), CPU)


def test_tensors_have_the_dtype_of_the_cache_or_of_its_rows() -> None:
    config = cache_of(0, storage="int8").config
    check_dtype_and_device("test", config, torch.ones(1), CPU)
    check_dtype_and_device("test", config, torch.ones(1, dtype=torch.int8), CPU, rows=True)
    for x, rows in ((torch.ones(1), True), (torch.ones(1, dtype=torch.int8), False), (torch.ones(1).half(), False)):
        with pytest.raises(DtypeError):
            check_dtype_and_device("test", config, x, CPU, rows=rows)
    with pytest.raises(DtypeError, match=r"given torch\.float32 on meta"):
        check_dtype_and_device("test", config, torch.ones(1, device="meta"), CPU)


def test_a_tensor_that_requires_gradients_is_refused_where_they_are_enabled() -> None:
    tensors = {"k": torch.ones(1), "v": torch.ones(1, requires_grad=True), "w": None}
    with torch.no_grad():
        check_eager_tensors("append", tensors)
    with pytest.raises(KernelError, match="append v: expected a tensor without gradients"):
        check_eager_tensors("append", tensors)


def test_a_graph_holds_no_cache_that_moves_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, window, tiers = (cache_of(0, **options).config for options in ({}, {"mask": am.Window(3)}, {"hot": 4}))
    assert [needs_cpu(config, 1) for config in (plain, window, tiers)] == [False, False, True]
    assert [needs_cpu(config, 2) for config in (plain, window, tiers)] == [False, True, True]
    for config in (plain, window, tiers):
        check_eager("append", config, CPU)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    check_eager("append", plain, CPU)
    for config, kind in ((window, "forgets"), (tiers, "has two memories")):
        with pytest.raises(KernelError, match=f"no graph around a cache that {kind}"):
            check_eager("append", config, CPU)


class _Wrapper(torch.Tensor):
    """A tensor whose numbers are in another one, as those of DTensor and of asynchronous collectives are."""

    @staticmethod
    def __new__(cls, plain: torch.Tensor) -> "_Wrapper":
        wrapper = torch.Tensor._make_wrapper_subclass(cls, plain.shape, dtype=plain.dtype)
        assert isinstance(wrapper, _Wrapper)
        wrapper.plain = plain
        return wrapper

    def wait(self) -> torch.Tensor:
        return self.plain

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> None:
        raise AssertionError("no operator reads the tensor")


def test_a_tensor_without_memory_of_its_own_is_refused_before_a_kernel_reads_it() -> None:
    cache, rows = cache_of(3), torch.ones(2, 2, 1, 4)
    for call in (lambda: cache.append(_Wrapper(rows), rows), lambda: am.decode(_Wrapper(rows), cache)):
        with pytest.raises(DtypeError, match=r"given _Wrapper\. Fix: pass the plain tensor in it: x\.wait\(\)"):
            call()
    cache.append(_Wrapper(rows).wait(), rows)
    assert cache.length == 4


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_a_call_inside_a_transform_is_refused_and_leaves_nothing_behind(transform: Any) -> None:
    cache, q = cache_of(3), torch.ones(2, 2, 3, 4)
    for call in (lambda: am.decode(q, cache).sum(), lambda: cache.append(q, q)):
        with pytest.raises(KernelError, match=r"a call outside of torch\.func's transforms, given one inside"):
            transform(lambda x, call=call: (call(), x)[1])(torch.ones(() if transform is torch.func.grad else 1))
    assert am.decode(q, cache).isfinite().all()  # an index that this call keeps was not made inside
    assert cache.length == 3
