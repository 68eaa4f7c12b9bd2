"""Known steps: the same bits as the first, on caches that change in every way, and alike on all ranks."""

import copy
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import attnmesh as am
from attnmesh.decoding import known_steps
from attnmesh.decoding.prepared_step import new_prepared_step
from attnmesh.errors import InputError, LayoutError, MaskError
from attnmesh.kernels.native.build import library
from tests.support.caches.altered import append_on_this_rank_alone, forget_known_calls
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.seeds import pairs
from tests.support.truth.tolerances import assert_near, largest_difference, worst

needs_library = pytest.mark.skipif(library().attend is None, reason="there is no C++ compiler")


def tokens(count: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, 2, 2, count, 24, generator=generator).to(dtype)
    return k, v


def query(rows: int = 1, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, 6, rows, 24, generator=torch.Generator().manual_seed(seed)).to(dtype)


def cache_on(ranks: int, dtype: torch.dtype = torch.float32, **options: object) -> am.KVCache:
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("keys",)) if ranks > 1 else None
    sizes = {"batch": 2, "kv_heads": 2, "head_dim": 24, "capacity": 200, "block": 4}
    return am.KVCache(mesh, dtype=dtype, **{**sizes, **options})  # type: ignore[arg-type]


def _difference_of_known_step(cache: am.KVCache, q: Tensor, **options: object) -> float:
    """Return by how much a known step, and one that is prepared anew, differ from the first of their signature."""
    first = am.decode(q, cache, **options)  # type: ignore[arg-type]
    known = am.decode(q, cache, **options)  # type: ignore[arg-type]
    forget_known_calls(cache)
    anew = am.decode(q, cache, **options)  # type: ignore[arg-type]
    return worst([largest_difference(first, known), largest_difference(first, anew)])


@on_each_rank
def live_by_known_steps(dtype: torch.dtype) -> dict[str, float]:
    """On a rank: change a cache in every way. Return by how much known steps differ from first ones after each."""
    cache, differences = cache_on(dist.get_world_size() if dist.is_initialized() else 1, dtype), dict[str, float]()

    def steps(cache: am.KVCache, change: str) -> None:
        for mask in (am.Causal(), am.Window(5), am.Full()):
            for count, options in ((1, {}), (1, {"output": "heads"}), (3, {})):
                if cache.length >= count:
                    found = _difference_of_known_step(cache, query(count, dtype=dtype), mask=mask, **options)
                    differences[f"{change}: {mask}, {count} queries, {options}"] = found

    for number in range(9):
        cache.append(*tokens(1, number, dtype))  # some ranks hold nothing at first
        steps(cache, f"token {number}")
    cache.append(*tokens(40, 10, dtype))
    steps(cache, "40 more")
    cache.truncate(22)
    steps(cache, "truncate")
    other = cache.fork()
    steps(other, "fork")
    for name, x in (("first", cache), ("fork", other), ("copy", copy.deepcopy(cache))):
        x.append(*tokens(3, 11, dtype))
        steps(x, f"append to the {name}")
    cache.reorder(torch.tensor([1, 0]))
    steps(cache, "reorder")
    cache.reserve(400)
    steps(cache, "reserve")
    cache.append(*tokens(2, 12, dtype), token_mask=torch.tensor([[True, True], [False, True]]))
    steps(cache, "padding")
    return differences


@pytest.mark.parametrize(("ranks", "dtype"), pairs([1, 2, 3, 4], [torch.float32, torch.bfloat16], 3))
def test_a_known_step_has_the_bits_of_its_first_one(ranks: int, dtype: torch.dtype, pool: Pool) -> None:
    for differences in pool.run(ranks, live_by_known_steps, dtype):
        assert len(differences) > 60
        assert {step: difference for step, difference in differences.items() if difference != 0} == {}


@on_each_rank
def append_known_and_checked(calls: int, more: int) -> tuple[list[Tensor], list[Tensor]]:
    """On a rank: the tokens that it holds after appends of a known signature, and after appends that are checked."""
    found = []
    for known in (True, False):
        cache = cache_on(dist.get_world_size())
        for number in range(calls):
            cache.append(*tokens(more, number))
            if not known:
                forget_known_calls(cache)
        found.append([x[:, :, : cache.used] for x in (cache.keys, cache.values)] + [cache.own_shard.device_counts])
    return found[0], found[1]


@pytest.mark.parametrize("more", [1, 3, 5])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_known_tokens_are_stored_as_others(ranks: int, more: int, pool: Pool) -> None:
    for known, others in pool.run(ranks, append_known_and_checked, 30, more):
        for one, other in zip(known, others, strict=True):
            assert torch.equal(one, other)


class BothWays(NamedTuple):
    """The outputs of steps that append, and of steps after an append."""

    at_once: Tensor
    one_by_one: Tensor
    length: int


@on_each_rank
def append_in_steps_and_before() -> BothWays:
    one, other = (cache_on(dist.get_world_size()) for _ in range(2))
    ends = []
    for number in range(20):
        k, v = tokens(1, number)
        ends.append(am.decode(query(seed=number), one, k=k, v=v))
        other.append(k, v)
        ends.append(am.decode(query(seed=number), other))
    return BothWays(torch.stack(ends[::2]), torch.stack(ends[1::2]), one.length)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_step_may_append_its_tokens(ranks: int, pool: Pool) -> None:
    for steps in pool.run(ranks, append_in_steps_and_before):
        assert torch.equal(steps.at_once, steps.one_by_one)
        assert steps.length == 20


def test_tokens_that_do_not_fit_are_refused_once_appends_are_known() -> None:
    cache = cache_on(1, capacity=8)
    for number in range(8):
        am.decode(query(), cache, k=tokens(1, number)[0], v=tokens(1, number)[1])
    with pytest.raises(InputError, match="room for the new tokens") as raised:
        cache.append(*tokens(1, 0))
    assert "reserve(9)" in str(raised.value)
    assert cache.length == 8


@pytest.mark.parametrize(
    ("k", "v", "message"),
    [
        (tokens(1, 0)[0], None, "append v"),
        (None, tokens(1, 0)[1], "append k"),
        (tokens(1, 0)[0], tokens(2, 0)[1], "the same tokens"),
        (tokens(1, 0)[0].double(), tokens(1, 0)[1], "append"),
        (tokens(1, 0)[0][:1], tokens(1, 0)[1][:1], "append k"),
    ],
)
def test_bad_tokens_are_refused_once_appends_are_known(k: Tensor | None, v: Tensor | None, message: str) -> None:
    cache = cache_on(1)
    for number in range(3):
        am.decode(query(), cache, k=tokens(1, number)[0], v=tokens(1, number)[1])
    with pytest.raises(InputError, match=message):
        am.decode(query(), cache, k=k, v=v)
    assert cache.length == 3


@pytest.mark.parametrize(
    ("q", "options"),
    [
        (query()[:, :5], {}),
        (query()[:1], {}),
        (query().double(), {}),
        (query(7), {}),
        (query(), {"scale": True}),
        (query(), {"merge": "nonsense"}),
        (query(), {"reproducible": 1}),
        (query(), {"checked": 1}),
        (query().requires_grad_(), {}),
    ],
)
def test_bad_steps_are_refused_once_steps_are_known(q: Tensor, options: dict[str, object]) -> None:
    cache = cache_on(1)
    cache.append(*tokens(5, 0))
    for each in ({}, {"scale": 1.0}):
        am.decode(query(), cache, **each)  # type: ignore[arg-type]
        am.decode(query(5), cache, **each)  # type: ignore[arg-type]
    with pytest.raises(InputError):
        am.decode(q, cache, **options)  # type: ignore[arg-type]


def test_a_known_reproducible_step_is_refused_once_tokens_are_padded() -> None:
    cache = cache_on(1)
    cache.append(*tokens(9, 0))
    for _ in range(2):
        am.decode(query(), cache, reproducible=True)
    cache.append(*tokens(2, 1), token_mask=torch.tensor([[True, True], [False, True]]))
    with pytest.raises(LayoutError, match="given a padded batch"):
        am.decode(query(), cache, reproducible=True)


def test_documents_are_compared_with_the_tokens_at_each_step() -> None:
    cache, mask = cache_on(1), am.Causal() & am.Documents([2, 3])
    cache.append(*tokens(5, 0))
    for _ in range(2):
        am.decode(query(), cache, mask=mask)
    cache.append(*tokens(1, 1))
    with pytest.raises(MaskError, match="documents that add up to 6 tokens"):
        am.decode(query(), cache, mask=mask)


@on_each_rank
def step_while_one_disagrees(difference: str, odd: int, checked: bool | None) -> str:
    """On a rank: a known step in which one rank differs. All go on afterwards."""
    cache, q = cache_on(dist.get_world_size()), query()
    cache.append(*tokens(9, 0))
    for _ in range(3):
        am.decode(q, cache, checked=checked)
    if dist.get_rank() == odd:
        if difference == "query":
            q = q + 1
        else:
            append_on_this_rank_alone(cache, *tokens(1, 3))
    try:
        out = am.decode(q, cache, checked=checked)
    except InputError as error:
        text = str(error)
    else:
        text = "NaN" if bool(out.isnan().all()) else "numbers"
    cache.truncate(8)
    assert bool(am.decode(query(), cache).isfinite().all())
    return text


@pytest.mark.parametrize("difference", ["query", "length"])
@pytest.mark.parametrize("odd", [0, 2])
def test_ranks_that_differ_in_a_known_step_raise_alike_or_get_nan(difference: str, odd: int, pool: Pool) -> None:
    (text,) = set(pool.run(3, step_while_one_disagrees, difference, odd, None))
    assert "the same call on every rank" in text
    assert ("digest" in text) == (difference == "query")
    assert set(pool.run(3, step_while_one_disagrees, difference, odd, False)) == {"NaN"}


@on_each_rank
def check_other_defaults() -> None:
    """On a rank: known steps have the same bits with other defaults of PyTorch."""
    cache, q = cache_on(dist.get_world_size()), query()
    cache.append(*tokens(9, 0))
    own = am.attend(q, *tokens(9, dist.get_rank()))
    first = [(am.decode(q, cache), am.merge_across(own, dist.group.WORLD).out) for _ in range(2)]
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            again = am.decode(q, cache), am.merge_across(own, dist.group.WORLD).out
    finally:
        torch.set_default_dtype(before)
    for pair in first:
        for x, y in zip(pair, again, strict=True):
            assert_near(x, y)


@needs_library
@pytest.mark.parametrize("ranks", [2, 4])
def test_defaults_of_pytorch_do_not_matter(ranks: int, pool: Pool) -> None:
    pool.run(ranks, check_other_defaults)


@on_each_rank
def step_without_memory_to_prepare(name: str) -> list[str]:
    """On a rank: the errors of steps of which rank 1 cannot prepare the first, and the error of a later one."""
    cache, q = cache_on(dist.get_world_size(), batch=1), query()[:1]
    cache.append(*(x[:1] for x in tokens(12, 0)))
    step = {"decode": lambda: am.decode(q, cache), "decode_rows": lambda: am.decode_rows(q, [cache])}[name]
    found = []
    for fails in (dist.get_rank() == 1, False):
        error = MemoryError("no room") if fails else None
        try:
            with mock.patch.object(known_steps, "new_prepared_step", side_effect=error, wraps=new_prepared_step):
                step()
            found.append("none")
        except (InputError, MemoryError) as raised:
            found.append(f"{type(raised).__name__}: {raised}")
    return found


@pytest.mark.parametrize("name", ["decode", "decode_rows"])
def test_all_ranks_raise_where_one_cannot_prepare_a_step(name: str, pool: Pool) -> None:
    other, own = pool.run(2, step_without_memory_to_prepare, name)
    assert own == ["MemoryError: no room", "none"]
    assert other[0].startswith("UnforeseenError: ")
    assert "no room" in other[0]
    assert other[1] == "none"
