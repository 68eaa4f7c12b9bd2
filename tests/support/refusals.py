"""What the tables of `tests/guard/refusals` share: sizes, a cache, and where a rank makes its call."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import attnmesh as am
from attnmesh.errors import InputError
from tests.support.problems import numbers

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

Table = dict[Callable[..., Any], list[tuple[dict[str, Any], type[Exception], str]]]
"""The rows of each call: what is changed, the error, and an expression that finds its text."""


class BadCall(NamedTuple):
    """A call on a cache, told whether this is the odd rank; its error, and an expression for its text."""

    make: Callable[[am.KVCache, bool], object]
    error: type[InputError]
    message: str


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


def filled(at: Place) -> am.KVCache:
    """It has been appended to, and is asked about all the same."""
    cache = new_cache(at, checked=True)
    cache.append(*numbers(2, 1, HEADS, TOKENS, WIDTH))
    return cache
