"""Bad arguments of a cache that forgets what its window hides, and of what is called on it."""

from typing import Any

import torch

import attnmesh as am
from attnmesh.errors import KernelError, MaskError, MeshError, ShapeError
from tests.refusals.refusal import HEADS, Q_HEADS, WIDTH, Place, T, Table, new_cache, unchanged
from tests.support.truth.problems import numbers

WINDOW = am.Window(20)


def window(at: Place, **changes: Any) -> am.KVCache:
    return new_cache(at, **{"batch": 2, "capacity": 2000, "mask": WINDOW, "keep": 3} | changes)


def forgetful(at: Place) -> am.KVCache:
    cache = window(at)
    for step in range(60):
        cache.append(*numbers(2, 2, HEADS, 3, WIDTH, seed=step))
    return cache


def truncate_window(at: Place, length: int = 178) -> None:
    with unchanged(forgetful(at)) as cache:
        cache.truncate(length)


def decode_window(at: Place, **changes: Any) -> None:
    with unchanged(forgetful(at)) as cache:
        am.decode(**{"q": T(2, Q_HEADS, 1, WIDTH), "cache": cache, "mask": WINDOW} | changes)


def append_nothing(at: Place, queries: int = 1) -> None:
    nothing = T(2, HEADS, 0, WIDTH)
    with unchanged(forgetful(at)) as cache:
        cache.append_shard(nothing, nothing, torch.zeros(0, dtype=torch.long), queries=queries)


def append_in_a_graph(at: Place) -> None:
    with unchanged(forgetful(at)) as cache:
        torch.compile(lambda: cache.append(*T(2, 2, HEADS, 3, WIDTH)), backend="eager")()


def decode_in_a_graph(at: Place) -> None:
    with unchanged(forgetful(at)) as cache:
        torch.compile(lambda: am.decode(T(2, Q_HEADS, 2, WIDTH), cache, mask=WINDOW), backend="eager")()


ON_ONE_RANK: Table = {
    window: [
        ({"keep": -1}, ShapeError, r"KVCache keep: expected a whole number, 0 or more, given -1"),
        ({"keep": 4}, MeshError, r"KVCache: expected the same call .*:\n    ranks  .*keep\n(.*\n)*.*  4\n"),
        ({"mask": None}, ShapeError, r"KVCache keep: expected 0 without mask=, given 3"),
        ({"mask": 20}, MaskError, r"KVCache mask: expected Full\(\), Causal\(\), .* given int"),
        (
            {"mask": am.Causal() & am.Documents([20])},
            MaskError,
            r"KVCache mask: expected a mask that does not depend on the length, given Causal\(\) & Documents",
        ),
    ],
    truncate_window: [
        (
            {"length": 150},
            ShapeError,
            r"truncate: expected 0, or at least 17\d: the cache has forgotten .*given 150 of 180 tokens.*Fix: make",
        ),
    ],
    decode_window: [
        (
            {"mask": am.Causal()},
            MaskError,
            r"decode mask: expected Window\(20\), by which .*given Causal\(\). Fix: pass mask=",
        ),
        (
            {"mask": am.Window(21)},
            MaskError,
            r"decode mask: expected Window\(20\), by which .*given Window\(21\)",
        ),
        (
            {"q": T(2, Q_HEADS, 30, WIDTH)},
            ShapeError,
            r"decode q: expected queries of token 17\d and later ones: .* given queries of the tokens from 150 to 179",
        ),
    ],
    append_nothing: [
        ({"queries": 0}, ShapeError, r"append_shard queries: expected a whole number, 1 or more, given 0"),
        ({"queries": 2}, MeshError, r"append_shard: expected the same call on every rank"),
    ],
}

ON_ALL_RANKS: Table = {
    truncate_window: [
        (
            {"length": 150},
            ShapeError,
            r"truncate: expected 0, or at least 17\d: the cache has forgotten what earlier .* Fix: make",
        ),
    ],
    decode_window: [
        ({"mask": am.Causal()}, MaskError, r"decode mask: expected Window\(20\), by which .*given Causal\(\)"),
        ({"q": T(2, Q_HEADS, 30, WIDTH)}, ShapeError, r"decode q: expected queries of token 17\d and later ones"),
    ],
    append_in_a_graph: [({}, KernelError, r"append: expected no graph around a cache that forgets")],
    decode_in_a_graph: [({}, KernelError, r"decode: expected no graph around a cache that forgets")],
}
