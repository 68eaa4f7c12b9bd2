"""Tensors in flash-attn's order, (batch, length, heads, dim): suspected aloud, and hardly ever without reason."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor

import attnmesh as am
from attnmesh import errors
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh

T = torch.zeros
HINT = r"Fix: (.*; )?if these are \(batch, length, heads, dim\), pass x\.transpose\(1, 2\)"


def heads(length: int = 40, q: int = 8, k: int = 2, keys: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """As flash-attn takes them."""
    keys = length if keys is None else keys
    return T(1, length, q, 4), T(1, keys, k, 4), T(1, keys, k, 4)


def cache(kv_heads: int = 2, tokens: int = 6) -> am.KVCache:
    made = am.KVCache(None, batch=1, kv_heads=kv_heads, head_dim=4, capacity=1000, dtype=torch.float32)
    made.append(*T(2, 1, kv_heads, tokens, 4))
    return made


SAID: list[tuple[Callable[[], Any], str]] = [
    (lambda: am.attention(*heads()), "as many queries as keys"),  # grouped heads are taken for lengths
    (lambda: am.attention(*heads(), mask=am.Window(3)), "as many queries as keys"),
    (lambda: am.attention(*heads(keys=77), mask=am.Full()), "query heads a multiple of key heads"),
    (lambda: am.attention(T(1, 8, 41, 4), *heads(41)[1:]), "query heads a multiple of key heads"),  # k and v alone
    (lambda: am.attention(*heads(k=8), length=40), "length to count the tokens given"),
    (lambda: am.attention(*heads(k=8), sinks=T(8)), "shape"),
    (lambda: am.attention(*heads(k=8), mask=am.Full() & am.Documents([10, 30])), "documents that add up to 8 tokens"),
    (lambda: am.attend(T(1, 1, 8, 4), *heads()[1:]), "query heads a multiple of key heads"),
    (lambda: am.attend(*heads(), q_positions=torch.arange(40)), "one position a token"),
    (lambda: am.attend(*heads(k=8), mask=am.Full() & am.Documents([10, 30])), "documents that add up to 8 tokens"),
    (lambda: am.decode(T(1, 1, 8, 4), cache()), "query heads a multiple of key heads"),
    (lambda: am.decode(T(1, 2, 8, 4), cache()), "as many queries as tokens in the cache"),
    (lambda: cache().append(*T(2, 1, 5, 2, 4)), "shape"),
]


@pytest.mark.parametrize(("call", "expected"), SAID)
def test_errors_about_heads_and_lengths_hint_at_the_order(call: Callable[[], Any], expected: str) -> None:
    with pytest.raises(errors.InputError, match=f"expected .*{expected}(.|\n)*{HINT}"):
        call()


UNSAID: list[Callable[[], Any]] = [
    lambda: am.attention(T(1, 8, 1, 4), *T(2, 1, 2, 40, 4)),  # a decode step
    lambda: am.attention(T(1, 7, 40, 4), *T(2, 1, 2, 40, 4)),
    lambda: am.attention(T(1, 8, 40, 4), *T(2, 1, 2, 40, 4), length=39),
    lambda: am.decode(T(1, 3, 1, 4), cache()),
    lambda: am.decode(T(1, 2, 7, 4), cache()),
    lambda: cache().append(*T(2, 1, 3, 5, 4)),
]


@pytest.mark.parametrize("call", UNSAID)
def test_other_errors_do_not_name_transpose(call: Callable[[], Any]) -> None:
    with pytest.raises(errors.InputError) as caught:
        call()
    assert "transpose" not in str(caught.value)


def warnings_of_call(call: Callable[[], Any]) -> list[tuple[str, bool]]:
    errors._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
        call()
    errors._warned.clear()
    return [(str(w.message), w.filename == __file__) for w in caught if w.category is UserWarning]


def long_cache() -> am.KVCache:
    return cache(tokens=40)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("attention", lambda: am.attention(*heads(600, 8, 8))),
        ("attend", lambda: am.attend(*heads(600, 8, 2))),
        ("attend", lambda: am.attend(*heads(640, 8, 8, keys=64))),
        ("decode", lambda: am.decode(T(1, 600, 8, 4), long_cache())),
    ],
)
def test_dims_that_are_very_likely_transposed_warn_once(name: str, call: Callable[[], Any]) -> None:
    text = f"{name}: q has more than 256 heads and at most 128 tokens in dims (batch, heads, length, dim); "
    text += "if these are (batch, length, heads, dim), pass x.transpose(1, 2)."
    assert warnings_of_call(call) == [(text, True)]


@pytest.mark.parametrize(
    ("q", "k"),
    [
        ((128, 1), (128, 1)),  # decoding, from its first token on
        ((128, 16), (128, 16)),
        ((128, 1), (8, 700)),
        ((256, 8), (8, 8)),
        ((512, 1), (512, 700)),  # a batch folded into the heads
        ((512, 3), (512, 0)),
        ((300, 129), (300, 129)),
        ((512, 0), (512, 8)),
    ],
)
def test_problems_that_there_are_do_not_warn(q: tuple[int, int], k: tuple[int, int]) -> None:
    q, k = T(1, *q, 1), T(1, *k, 1)
    assert warnings_of_call(lambda: am.attend(q, k, k)) == []
    assert warnings_of_call(lambda: am.attention(q, k, k, mask=am.Full())) == []


def test_compiled_it_is_one_graph_and_does_not_warn() -> None:
    q, k, v = heads(300, 2, 2)

    def layer(q: Tensor) -> Tensor:
        return am.attention(q, k, v) + am.attend(q, k, v).out

    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert warnings_of_call(lambda: compiled(q)) == []


@on_each_rank
def check_on_a_mesh(case: str) -> None:
    mesh = named_mesh(Shape(1, 2, 1), AXES)
    q, k, v = heads(20)
    options: dict[str, Any] = {"mesh": mesh, "layout": am.Contiguous()}
    match case:
        case "lengths":
            am.attention(q, k, v, **options)
        case "shards":
            am.attention(q, q, q, length=40, **options)
        case "DTensors":
            am.attention(*[distribute_tensor(x, mesh["queries"], [Shard(1)]) for x in (q, q, q)])


@pytest.mark.parametrize("case", ["lengths", "shards", "DTensors"])
def test_on_a_mesh_all_ranks_hint_alike(pool: Pool, case: str) -> None:
    one, other = pool.ask(2, check_on_a_mesh, case)
    assert str(one) == str(other)
    with pytest.raises(errors.InputError, match=HINT):
        raise one
