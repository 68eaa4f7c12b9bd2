"""Steps and appends that are refused: all ranks raise the same error, and the cache stays as it is."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import attnmesh as am
from attnmesh import errors
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.mesh_problems import named_mesh
from tests.support.pool import Pool, on_each_rank
from tests.support.problems import numbers
from tests.support.refusals import BadCall

HEADS, KV_HEADS, WIDTH = 4, 2, 8
TOKENS, CAPACITY = 30, 32


def cache_of(ranks: int, batch: int = 1, tokens: int = 0, capacity: int = CAPACITY, **options: Any) -> am.KVCache:
    sizes: dict[str, Any] = {"kv_heads": KV_HEADS, "head_dim": WIDTH, "capacity": capacity, "dtype": torch.float32}
    cache = am.KVCache(named_mesh(Shape(1, 1, ranks), AXES), batch=batch, **sizes | options)
    if tokens:
        cache.append(*numbers(2, batch, KV_HEADS, tokens, WIDTH))
    return cache


def query(tokens: int = 1, width: int = WIDTH, dtype: torch.dtype = torch.float32) -> Tensor:
    return numbers(1, HEADS, tokens, WIDTH)[..., :width].to(dtype)


def rows(tokens: int, batch: int = 1, heads: int = KV_HEADS) -> Tensor:
    return torch.ones(batch, heads, tokens, WIDTH)


# --- bad calls ---


BAD_CALLS = {
    "queries of other numbers": BadCall(
        lambda cache, odd: am.decode(query() + odd, cache),
        errors.MeshError,
        r"same call on .*:\n    ranks  q\n    0, 2   torch.float32 \[1, 4, 1, 8\] of digest \w+\n    1  ",
    ),
    "more queries": BadCall(
        lambda cache, odd: am.decode(query(1 + odd), cache),
        errors.MeshError,
        r"same call on .*:\n.*\n    0, 2 .*\[1, 4, 1, 8\].*\n    1 .*\[1, 4, 2, 8\]",
    ),
    "queries of another width": BadCall(
        lambda cache, odd: am.decode(query(width=4 if odd else 8), cache),
        errors.ShapeError,
        r"decode q: expected shape \(1, 'heads', 'length', 8\), given \(1, 4, 1, 4\)",
    ),
    "queries of another dtype": BadCall(
        lambda cache, odd: am.decode(query(dtype=torch.float64 if odd else torch.float32), cache),
        errors.DtypeError,
        r"decode q: expected torch.float32 on cpu, given torch.float64",
    ),
    "another mask": BadCall(
        lambda cache, odd: am.decode(query(), cache, mask=am.Window(3) if odd else am.Causal()),
        errors.MeshError,
        r"ranks  mask\n    0, 2   Causal\(\)\n    1      Window\(3\)\nFix: ",
    ),
    "dropout": BadCall(
        lambda cache, odd: am.decode(query(), cache, **({"dropout_p": 0.1} if odd else {})),
        errors.KernelError,
        "exact softmax attention under a mask of positions, given dropout_p=",
    ),
    "an unknown option": BadCall(
        lambda cache, odd: am.decode(query(), cache, **({"mesk": 0.1} if odd else {})),
        errors.ArgumentError,
        "the arguments of its signature, given mesk=",
    ),
    "other sinks": BadCall(
        lambda cache, odd: am.decode(query(), cache, sinks=torch.full((4,), float(odd))),
        errors.MeshError,
        r"ranks  sinks\n    0, 2   .*\n    1  ",
    ),
    "a scale in a long message": BadCall(
        lambda cache, odd: am.decode(query().expand(1, 4, 30, 8), cache, scale="big" if odd else None),
        errors.DtypeError,
        "decode scale: expected None, 0 or a number",
    ),
    "a scale in a merge that gathers": BadCall(
        lambda cache, odd: am.decode(query(), cache, merge="gather", scale="big" if odd else None),
        errors.DtypeError,
        "decode scale: expected None, 0 or a number",
    ),
    "more queries in a collective merge": BadCall(
        lambda cache, odd: am.decode(query(1 + odd), cache, merge="allreduce"),
        errors.MeshError,
        "same call on every rank",
    ),
    "more queries than tokens": BadCall(
        lambda cache, odd: am.decode(query(31), cache),
        errors.ShapeError,
        "given 31 queries and 30 of 32 tokens in the cache",
    ),
    "reproducible on three ranks": BadCall(
        lambda cache, odd: am.decode(query(), cache, reproducible=True),
        errors.KernelError,
        "ranks along queries and keys, and a tree, given 3 ranks",
    ),
    "tokens beyond the capacity": BadCall(
        lambda cache, odd: cache.append(rows(3), rows(3)),
        errors.ShapeError,
        "append: expected room .* given 30 tokens and 3 more in a cache of 32",
    ),
    "tokens of fewer heads": BadCall(
        lambda cache, odd: cache.append(rows(3, heads=1), rows(3, heads=1)),
        errors.ShapeError,
        r"append k: expected shape \(1, 2, tokens, 8\), given \(1, 1, 3, 8\)",
    ),
    "truncation to more tokens": BadCall(
        lambda cache, odd: cache.truncate(31),
        errors.ShapeError,
        "truncate: expected a length from 0 to 30, given 31 of type int. Fix: pass an int that is no more",
    ),
    "an order of other sequences": BadCall(
        lambda cache, odd: cache.reorder(torch.tensor([1])),
        errors.ShapeError,
        "reorder: expected a number of a sequence below 1 for each",
    ),
    "a position without a token": BadCall(
        lambda cache, odd: cache.append_shard(rows(0), rows(0), torch.zeros(int(odd), dtype=torch.long)),
        errors.ShapeError,
        r"append_shard positions: expected shape \(0,\), one position a token, given shape \(1,\)",
    ),
    "one position on all ranks": BadCall(
        lambda cache, odd: cache.append_shard(rows(1), rows(1), torch.tensor([30])),
        errors.LayoutError,
        "positions from 30 to 32, each on one rank, given 3 positions with gaps or repeats",
    ),
    "a token mask of two sequences": BadCall(
        lambda cache, odd: cache.append(rows(1), rows(1), token_mask=torch.ones(2, 1, dtype=torch.bool)),
        errors.ShapeError,
        r"append token_mask: expected torch.bool \(1, 1\)",
    ),
}


@on_each_rank
def make_bad_call(name: str) -> None:
    cache = cache_of(3, tokens=TOKENS, block=16)
    before = am.decode(query(), cache)
    try:
        BAD_CALLS[name].make(cache, dist.get_rank() == 1)
    finally:
        assert torch.equal(am.decode(query(), cache), before), "the cache has changed"


@pytest.mark.parametrize("name", BAD_CALLS)
def test_all_ranks_raise_alike_and_continue(name: str, pool: Pool) -> None:
    _, error, message = BAD_CALLS[name]
    results = pool.ask(3, make_bad_call, name)
    assert [type(result) for result in results] == [error] * 3
    assert len({str(result) for result in results}) == 1
    with pytest.raises(error, match=message):
        raise results[0]


@on_each_rank
def decode_bad_query_on_one_rank(options: dict[str, object]) -> str:
    cache = cache_of(4, tokens=TOKENS, block=16)
    q = query(width=3 if dist.get_rank() == 1 else WIDTH)
    try:
        am.decode(q, cache, **options)
    except errors.ShapeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("options", [{"reproducible": True}, {"merge": "tree"}, {"merge": "direct"}, {}])
def test_bad_query_on_one_rank_raises_on_all(pool: Pool, options: dict[str, object]) -> None:
    for message in pool.run(4, decode_bad_query_on_one_rank, options):
        assert "decode q: expected shape (1, 'heads', 'length', 8), given (1, 4, 1, 3)" in message


# --- calls that differ ---


class DifferentCall(NamedTuple):
    """A call on a cache of two sequences, told whether this is the odd rank, and a part of the error's text."""

    make: Callable[[am.KVCache, bool], object]
    message: str


def append_padding(cache: am.KVCache, odd: bool) -> None:
    cache.append(rows(6, batch=2), rows(6, batch=2), token_mask=torch.full((2, 6), not odd))


def append_shard(cache: am.KVCache, **options: Any) -> None:
    mine = am.Contiguous().positions(6, 2, dist.get_rank())
    cache.append_shard(rows(6, batch=2)[:, :, mine], rows(6, batch=2)[:, :, mine], mine, **options)


def append_and_reorder(cache: am.KVCache, odd: bool) -> None:
    cache.append(rows(6, batch=2), rows(6, batch=2))
    cache.reorder(torch.tensor([int(odd), 0]))


def append_shard_and_truncate(cache: am.KVCache, odd: bool) -> None:
    append_shard(cache)
    cache.truncate(100 if odd else 1)


def decode_many_queries(cache: am.KVCache, odd: bool) -> None:
    cache.append(rows(5000, batch=2), rows(5000, batch=2))
    am.decode(torch.ones(2, HEADS, 5000 if odd else 1, WIDTH), cache)


def make_a_cache_elsewhere(cache: am.KVCache, odd: bool) -> None:
    cache_of(2, device="foo" if odd else None)


def merge_another_length(cache: am.KVCache, odd: bool) -> None:
    out = torch.ones(1, 2, 3 + odd, 4)
    am.merge_across(am.Partial(out, out[..., 0]), dist.group.WORLD)


def merge_with_a_wrong_base(cache: am.KVCache, odd: bool) -> None:
    out = torch.ones(1, 2, 3, 4)
    am.merge_across(am.Partial(out, out[..., 0]), dist.group.WORLD, base="3" if odd else "e")


DIFFERENT_CALLS = {
    "padding": DifferentCall(
        append_padding, "append: expected the same call on every rank, given:\n    ranks  token_mask\n    0 "
    ),
    "padding of a shard": DifferentCall(
        lambda cache, odd: append_shard(cache, token_mask=torch.full((2, 6), not odd)),
        "append_shard: expected the same call on every rank",
    ),
    "padding of another length": DifferentCall(
        lambda cache, odd: append_shard(cache, token_mask=torch.ones(2, 6 + odd) > 0),
        "append_shard: expected the same call on every rank",
    ),
    "an order": DifferentCall(append_and_reorder, "ranks  to\n    0      ["),
    "a truncation": DifferentCall(append_shard_and_truncate, "truncate: expected a length from 0 to 6, given 100"),
    "a long step": DifferentCall(decode_many_queries, "decode: expected the same call on every rank"),
    "a device": DifferentCall(
        make_a_cache_elsewhere, "KVCache device: expected a device that PyTorch knows, given 'foo'"
    ),
    "a merge": DifferentCall(merge_another_length, "merge_across: expected the same call on every rank"),
    "a base": DifferentCall(merge_with_a_wrong_base, "merge_across base: expected one of e, 2, given '3'"),
}

UNCOMPARED_CALLS = {
    "padding": DifferentCall(append_padding, "ranks  padding and order\n    0      "),
    "an order": DifferentCall(append_and_reorder, "ranks  padding and order\n    0      "),
}
"""Calls that a cache with `checked=False` does not compare. A checked step does."""


def error_of(call: DifferentCall, checked: bool | None) -> str:
    cache = cache_of(2, batch=2, capacity=1 << 14, block=4, checked=checked)
    try:
        call.make(cache, dist.get_rank() == 1)
        am.decode(torch.ones(2, HEADS, 1, WIDTH), cache, checked=True)
    except errors.InputError as error:
        return str(error)
    return "no error"


@on_each_rank
def error_of_different_call(name: str) -> str:
    return error_of(DIFFERENT_CALLS[name], checked=None)


@on_each_rank
def error_after_uncompared_call(name: str) -> str:
    return error_of(UNCOMPARED_CALLS[name], checked=False)


@pytest.mark.parametrize("name", DIFFERENT_CALLS)
def test_different_calls_raise_on_all_ranks(name: str, pool: Pool) -> None:
    for message in pool.run(2, error_of_different_call, name):
        assert DIFFERENT_CALLS[name].message in message


@pytest.mark.parametrize("name", UNCOMPARED_CALLS)
def test_a_checked_step_finds_what_differs_in_a_cache_that_compares_nothing(name: str, pool: Pool) -> None:
    for message in pool.run(2, error_after_uncompared_call, name):
        assert UNCOMPARED_CALLS[name].message in message


def test_tensors_with_gradients_are_refused() -> None:
    cache = am.KVCache(None, batch=1, kv_heads=1, head_dim=2, capacity=8, dtype=torch.float32)
    learned = torch.ones(1, 1, 1, 2, requires_grad=True)
    with pytest.raises(errors.KernelError, match="append k: expected a tensor without gradients"):
        cache.append(learned, learned)
    with torch.no_grad():
        cache.append(learned, learned)
        am.decode(learned, cache)
    with pytest.raises(errors.KernelError, match="decode q: expected a tensor without gradients"):
        am.decode(learned, cache)
