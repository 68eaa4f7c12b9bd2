"""The row of the tables of this folder: a call that is refused. What the calls share: sizes, a cache, a place."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import attnmesh as am
from attnmesh.errors import InputError
from tests.support.truth.problems import numbers
from tests.support.truth.tolerances import FLOAT32_SUMS

T = torch.zeros
Q_HEADS, HEADS, WIDTH, TOKENS = 12, 6, 4, 10
SIZES: dict[str, Any] = {
    "batch": 1,
    "kv_heads": HEADS,
    "head_dim": WIDTH,
    "capacity": 32,
    "block": 4,
    "dtype": torch.float32,
}
LEARNED = T(1, HEADS, 1, WIDTH, requires_grad=True)
NO_VALUES = torch.empty(1, dtype=torch.int64, device="meta")
INTS = {name: T(1, HEADS, 4, WIDTH, dtype=torch.int32) for name in "qkv"}


class Fixed(NamedTuple):
    """What a user calls who has read the error, and what that has to return."""

    call: Callable[[], Any]
    expected: Callable[[], Any]
    tolerance: float

    def check(self) -> None:
        """Assert that the call is right."""
        found, expected = self.call(), self.expected()
        if isinstance(expected, Tensor):
            near = self.tolerance if expected.is_floating_point() else 0.0
            torch.testing.assert_close(found, expected, rtol=near, atol=near, check_dtype=False)
        else:
            assert found == expected


class Refusal(NamedTuple):
    """A call that is refused: the arguments that make it bad, its error, a pattern of the text, and what mends it.

    On ranks a call is told its `Place` first.
    """

    call: Callable[..., Any]
    change: dict[str, Any]
    error: type[Exception]
    text: str
    fixed: Fixed | None = None

    def __str__(self) -> str:
        name = self.call.__name__.replace("<lambda>", self.text.replace("\\", "").split("*")[-1][-60:])
        return f"{name}: {', '.join(self.change)}".removesuffix(": ")


def by_fix(
    call: Callable[[], Any],
    fix: str,
    mended: Callable[[], Any],
    expected: Callable[[], Any],
    tolerance: float = FLOAT32_SUMS,
) -> Refusal:
    """Return the row of a call whose error gives a fix, of the call that follows it, and of what that returns."""
    return Refusal(call, {}, InputError, rf"Fix: [^\0]*{re.escape(fix)}", Fixed(mended, expected, tolerance))


Table = dict[Callable[..., Any], list[tuple[dict[str, Any], type[Exception], str]]]
"""What is refused of each call."""


def refusals(*tables: Table) -> list[Refusal]:
    """Return the rows of tables."""
    return [Refusal(call, *row) for table in tables for call, rows in table.items() for row in rows]


@dataclass(frozen=True)
class Place:
    """Where a rank makes its call."""

    mesh: DeviceMesh
    folder: Path

    @property
    def rank(self) -> int:
        return dist.get_rank()


def new_cache(at: Place, **changes: Any) -> am.KVCache:
    return am.KVCache(**SIZES | {"mesh": at.mesh} | changes)


def filled(at: Place, tokens: int = TOKENS) -> am.KVCache:
    """It has been appended to, and is asked about all the same."""
    cache = new_cache(at, checked=True)
    cache.append(*numbers(2, 1, HEADS, tokens, WIDTH))
    return cache


@contextmanager
def unchanged(cache: am.KVCache) -> Iterator[am.KVCache]:
    """Raise if what is refused inside has changed the cache."""
    q = numbers(cache.config.batch, Q_HEADS, 1, cache.config.head_dim)
    options = {"mask": cache.config.mask or am.Causal()}
    before = am.decode(q, cache, **options)
    try:
        yield cache
    except ValueError:
        assert torch.equal(am.decode(q, cache, **options), before), "the cache has changed"
        raise
