"""When ranks compare steps and calls of caches: the error that all raise where they differ, or NaN if none compares."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import attnmesh as am
from attnmesh.comm import gather
from attnmesh.errors import InputError, MeshError, UnforeseenError
from attnmesh.guard.agreement import Agreement
from attnmesh.kernels.implementations import native
from attnmesh.kernels.implementations.native import BoundNative
from attnmesh.kernels.native.build import Library, library
from attnmesh.mesh.axes import RankMesh
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.caches.make import empty_cache, random_cache
from tests.support.emulation.interpreted import interpreting
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh

WIDTH = 16
F32 = torch.float32
STEPS = {
    "another query": lambda one: {"q": query() + one},
    "another mask": lambda one: {"q": query(), "mask": am.Window(3) if one else am.Causal()},
    "more queries": lambda one: {"q": query(2 if one else 1)},
    "an error": lambda one: {"q": query(), "scale": "big" if one else None},
}


def query(rows: int = 1) -> Tensor:
    return torch.ones(1, 4, rows, WIDTH)


def outcome_of(act: Callable[[], Tensor]) -> str:
    """Return the text of the error, "NaN" or "numbers"."""
    try:
        return "NaN" if bool(act().isnan().all()) else "numbers"
    except InputError as error:
        return str(error)


@on_each_rank
def take_steps_that_differ(kernel: str, checked: bool | None, shape: tuple[int, int, int]) -> list[str]:
    """Return the outcome of each step that differs on one rank, each followed by one that is equal on all."""
    one = dist.get_rank() == 1
    found = []
    with interpreting(kernel):
        for step in STEPS.values():
            cache = random_cache(20, named_mesh(Shape(*shape), AXES), head_dim=WIDTH, checked=checked)
            found.append(outcome_of(lambda step=step, cache=cache: am.decode(cache=cache, kernel=kernel, **step(one))))
            found.append(outcome_of(lambda cache=cache: am.decode(query(), cache, kernel=kernel)))
    return found


@pytest.mark.parametrize("shape", [(1, 1, 2), (2, 1, 2)])
@pytest.mark.parametrize(("kernel", "checked"), [("cpu", None), ("cpu", True), ("triton", None), ("triton", True)])
def test_a_step_that_differs_raises_the_same_on_all_ranks(
    pool: Pool, kernel: str, checked: bool | None, shape: tuple[int, int, int]
) -> None:
    answers = pool.run(Shape(*shape).ranks, take_steps_that_differ, kernel, checked, shape)
    for step, texts in zip(STEPS, zip(*(answer[::2] for answer in answers), strict=True), strict=True):
        assert len(set(texts)) == 1, (step, texts)
        assert texts[0].startswith("decode"), (step, texts)
        assert ("\n    1  " in texts[0]) == (step != "an error"), (step, texts)
    assert {each for answer in answers for each in answer[1::2]} == {"numbers"}


@pytest.mark.parametrize("kernel", ["cpu", "triton"])
def test_uncompared_steps_that_differ_give_nan(pool: Pool, kernel: str) -> None:
    first, second = pool.run(2, take_steps_that_differ, kernel, False, (1, 1, 2))
    assert first == ["NaN", "numbers"] * len(STEPS)
    assert second[:-2] == first[:-2]
    assert second[-2].startswith("decode scale: expected")


@on_each_rank
def take_a_later_step_that_differs(checked: bool | None) -> str:
    """Steps that stay on the device compare the first of each signature alone."""
    with interpreting("triton"):
        cache = random_cache(20, named_mesh(Shape(1, 1, 2), AXES), head_dim=WIDTH, checked=checked)
        am.decode(query(), cache, kernel="triton")
        return outcome_of(lambda: am.decode(query() + dist.get_rank(), cache, kernel="triton"))


def test_checked_compares_every_step_of_a_signature(pool: Pool) -> None:
    assert pool.run(2, take_a_later_step_that_differs, None) == ["NaN"] * 2
    one, other = pool.run(2, take_a_later_step_that_differs, True)
    assert one == other
    assert "ranks  q\n    0      torch.float32 [1, 4, 1, 16] of digest" in one


CALLS: dict[str, Callable[[am.KVCache, bool], Any]] = {
    "append": lambda cache, one: cache.append(*torch.full((2, 1, 2, 1, WIDTH), float(one)).unbind()),
    "truncate": lambda cache, one: cache.truncate(cache.length - 1 - one),
    "reorder": lambda cache, one: cache.reorder(torch.tensor([0] * (1 + one))),
    "reserve": lambda cache, one: cache.reserve(100 + one),
}


def numbers_after(call: Callable[[am.KVCache, bool], object], cache: am.KVCache, unlike: bool) -> Tensor:
    """Call, and return numbers as a step does."""
    call(cache, unlike)
    return torch.ones(1)


@on_each_rank
def call_cache_with_one_unlike(name: str, checked: bool | None, times: int) -> list[str]:
    options = {"mesh": named_mesh(Shape(1, 1, 2), AXES), "head_dim": WIDTH, "checked": checked}
    cache = empty_cache(**options) if name == "append" else random_cache(20, **options)
    found = []
    for time in range(times):
        unlike = dist.get_rank() == 1 and time == times - 1
        found.append(outcome_of(partial(numbers_after, CALLS[name], cache, unlike)))
    return found


@pytest.mark.parametrize(("checked", "times"), [(None, 1), (True, 2)])
@pytest.mark.parametrize("name", CALLS)
def test_calls_of_a_cache_are_compared(pool: Pool, name: str, checked: bool | None, times: int) -> None:
    one, other = pool.run(2, call_cache_with_one_unlike, name, checked, times)
    assert one == other
    assert one[:-1] == ["numbers"] * (times - 1)
    assert one[-1].startswith(f"{name}: expected the same call on every rank, given:\n    ranks  ")


def counted_exchanges() -> AbstractContextManager[mock.Mock]:
    """Return what counts the exchanges of a `with`, in which ranks compare."""
    return mock.patch("attnmesh.guard.agreement.all_gather_ints", wraps=gather.all_gather_ints)


def test_values_that_mean_nothing_are_refused() -> None:
    with pytest.raises(InputError, match="KVCache checked: expected None, True or False, given 'yes'"):
        am.KVCache(None, batch=1, kv_heads=1, head_dim=1, capacity=1, dtype=torch.float32, checked="yes")  # type: ignore[arg-type]
    x = torch.ones(1, 1, 1, 1)
    with pytest.raises(InputError, match="attention checked: expected None, True or False, given 1"):
        am.attention(x, x, x, checked=1)  # type: ignore[arg-type]


@on_each_rank
def decode_after_different_histories(change: str) -> str:
    """Return the outcome on two ranks with different padding, or another order of sequences."""
    cache = am.KVCache(named_mesh(Shape(1, 1, 2), AXES), batch=4, kv_heads=2, head_dim=4, capacity=40, dtype=F32)
    cache.append(*torch.ones(2, 4, 2, 4, 4).unbind())
    cache.guard.checked = False
    other = dist.get_rank() == 1
    if change == "padding":
        real = torch.tensor([[False, True, True, False] if other else [True, False, False, True]]).expand(4, 4)
        cache.append(*torch.ones(2, 4, 2, 4, 4).unbind(), token_mask=real)
    else:
        cache.reorder(torch.tensor([2, 0, 1, 3] if other else [0, 3, 1, 2]))
    try:
        am.decode(torch.ones(4, 2, 1, 4), cache, checked=True)
    except MeshError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("change", ["padding", "order"])
def test_the_history_of_a_cache_is_compared(pool: Pool, change: str) -> None:
    one, other = pool.run(2, decode_after_different_histories, change)
    assert one == other
    assert "padding and order" in one


@on_each_rank
def decode_with_a_scale() -> tuple[int, ...]:
    """By a whole number, which the second rank has used before as a float, alone."""
    mesh = named_mesh(Shape(2, 1, 1), AXES)
    cache = am.KVCache(mesh, batch=1, kv_heads=2, head_dim=4, capacity=40, dtype=F32)
    cache.append(*torch.ones(2, 1, 2, 4, 4).unbind())
    if dist.get_rank() == 1:
        alone = am.KVCache(None, batch=1, kv_heads=2, head_dim=4, capacity=40, dtype=F32)
        alone.append(*torch.ones(2, 1, 2, 4, 4).unbind())
        am.decode(torch.ones(1, 4, 1, 4), alone, scale=1.0)
    return tuple(am.decode(torch.ones(1, 4, 1, 4), cache, scale=1).shape)


def test_a_scale_is_the_same_as_a_float(pool: Pool) -> None:
    assert pool.run(2, decode_with_a_scale) == [(1, 4, 1, 4)] * 2


@on_each_rank
def make_cache_without_memory() -> str:
    """The second rank has no room for a cache."""
    room = mock.patch(
        "attnmesh.cache.make_shards.MemoryShard", side_effect=MemoryError("no more") if dist.get_rank() else None
    )
    try:
        with room:
            am.KVCache(named_mesh(Shape(1, 1, 2), AXES), batch=1, kv_heads=2, head_dim=4, capacity=40, dtype=F32)
    except (MemoryError, UnforeseenError) as error:
        return f"{type(error).__name__}: {error}"
    return "made"


def test_an_unforeseen_error_is_raised_on_all_ranks(pool: Pool) -> None:
    assert pool.run(2, make_cache_without_memory) == [
        "UnforeseenError: KVCache: expected what each rank can do, given MemoryError: no more. "
        "Fix: see the error of the rank that raised.",
        "MemoryError: no more",
    ]


class Ends(NamedTuple):
    """How a step ends whose kernel fails on the second rank after some others, and whether the next one is right."""

    of_step: str
    next_is_right: bool


@on_each_rank
def step_without_memory(before: int, options: dict[str, Any]) -> Ends:
    cache = am.KVCache(named_mesh(Shape(1, 1, 2), AXES), batch=1, kv_heads=2, head_dim=4, capacity=40, dtype=F32)
    cache.append(*torch.ones(2, 1, 2, 40, 4).unbind())
    step = partial(am.decode, torch.ones(1, 4, 1, 4), cache, **options)
    for _ in range(before):
        step()
    fails = mock.patch.object(BoundNative, "attend", side_effect=MemoryError("no more"))
    try:
        with fails if dist.get_rank() else nullcontext():
            found = "NaN" if step().isnan().all() else "numbers"
    except (MemoryError, UnforeseenError) as error:
        found = f"{type(error).__name__}: {error}"
    return Ends(found, bool((step() == 1).all()))


@pytest.mark.skipif(library().attend is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("options", [{}, {"merge": "tree"}, {"checked": False}])
def test_a_step_that_fails_on_one_rank_keeps_no_other_waiting(before: int, options: dict[str, Any], pool: Pool) -> None:
    first, second = pool.run(2, step_without_memory, before, options)
    seen = "UnforeseenError: decode: expected what each rank can do, given MemoryError: no more. "
    seen += "Fix: see the error of the rank that raised."
    assert first.of_step == ("NaN" if "checked" in options else seen)
    assert second.of_step == "MemoryError: no more"
    assert first.next_is_right
    assert second.next_is_right


class InTheWith(NamedTuple):
    """What a rank gets: the payloads of all, or the type of the error of a rank that describes its call."""

    found: object
    exchanges: int


@on_each_rank
def compare_in_the_with(fails: bool) -> InTheWith:
    mesh = RankMesh.of(am.init_mesh((1, 1, 2)))
    found: object = None
    with counted_exchanges() as exchanges:
        try:
            with Agreement(mesh, "save") as agreement:
                found = agreement.compare(
                    lambda: {"note": 1 // (1 - mesh.keys.index * fails)}, payload=[mesh.keys.index]
                )
        except (ZeroDivisionError, UnforeseenError) as error:
            found = type(error)
    return InTheWith(found, exchanges.call_count)


def test_ranks_compare_once_where_the_with_compares(pool: Pool) -> None:
    assert pool.run(2, compare_in_the_with, False) == [InTheWith(found=[[0], [1]], exchanges=1)] * 2


def test_an_error_in_what_a_rank_compares_is_raised_on_all(pool: Pool) -> None:
    first, second = pool.run(2, compare_in_the_with, True)
    assert first.found is UnforeseenError
    assert second.found is ZeroDivisionError
    assert first.exchanges == second.exchanges == 2  # the comparison, and the numbers of the ranks for its table


@on_each_rank
def attend_without_a_compiler_on_rank_1() -> list[str]:
    """On a rank: the error of a call with a kernel that rank 1 does not have, and whether the next call is right."""
    mesh, reason = am.init_mesh((1, 2, 1)), "there is no C++ compiler"
    q, k, v = torch.randn(3, 1, 2, 8, 4, generator=torch.Generator().manual_seed(0)).unbind()
    layout = am.Contiguous()
    shards = [am.shard(x, mesh, layout=layout) for x in (q, k, v)]
    missing = Library(reason=reason) if mesh.get_rank() else library()
    messages = []
    for graded in (False, True):
        given = [x.detach().requires_grad_(graded) for x in shards]
        with mock.patch.object(native, "library", return_value=missing), pytest.raises(InputError) as caught:
            am.attention(*given, mesh=mesh, layout=layout, kernel="native")
        assert reason in str(caught.value)
        messages.append(f"{type(caught.value).__name__}: {caught.value}")
    out = am.attention(*shards, mesh=mesh, layout=layout, kernel="native")
    assert torch.allclose(am.unshard(out, mesh, layout=layout), am.attend(q, k, v, mask=am.Causal()).out, atol=1e-6)
    return messages


@pytest.mark.skipif(library().attend is None, reason="no native library")
def test_a_kernel_that_one_rank_lacks_is_refused_on_all(pool: Pool) -> None:
    first, second = pool.run(2, attend_without_a_compiler_on_rank_1)
    assert first == second


@on_each_rank
def append_beside_a_failure(rows: bool) -> str:
    """On a rank: the error of a step whose new token has no memory on rank 1."""
    mesh = am.init_mesh((1, 1, 2))
    cache = am.KVCache(mesh, batch=1, kv_heads=2, head_dim=4, capacity=64, dtype=torch.float32)
    q, k, v = torch.randn(3, 1, 2, 1, 4, generator=torch.Generator().manual_seed(0)).unbind()
    step: Any = (lambda: am.decode_rows(q, [cache], k=k, v=v)) if rows else (lambda: am.decode(q, cache, k=k, v=v))
    for _ in range(2):
        step()
    failing = MemoryError("no more") if mesh.get_rank() else None
    with mock.patch.object(am.KVCache, "append", side_effect=failing):
        try:
            step()
        except (MemoryError, UnforeseenError) as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("rows", [False, True], ids=["decode", "decode_rows"])
def test_a_step_whose_token_one_rank_cannot_store_raises_on_all(rows: bool, pool: Pool) -> None:
    first, second = pool.run(2, append_beside_a_failure, rows)
    assert second == "MemoryError: no more"
    assert "expected what each rank can do, given MemoryError: no more" in first
