"""Steps over caches of two memories on GPUs, whose older tokens all go one way."""

from collections.abc import Callable
from typing import Any, Protocol
from unittest.mock import patch

from attnmesh.kernels import link, tiered_attention
from tests.support.pool import on_each_rank

PART = 2048
"""Bytes of a part, so that short caches have several."""


class Runs(Protocol):
    """What runs a function on ranks."""

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return every rank's result."""
        ...


class OneWay:
    """Ranks on which older tokens are all attended on the CPU, or are all brought to the device."""

    def __init__(self, ranks: Runs, *, brought: bool) -> None:
        self.ranks, self.brought = ranks, brought

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return every rank's result."""
        return self.ranks.run(size, one_way, self.brought, function, *arguments)


@on_each_rank
def one_way(brought: bool, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function on a rank, with all older tokens going one way."""
    choice = patch.object(tiered_attention.TieredAttention, "_is_link_faster", lambda *_: brought)
    with choice, patch.object(link, "PART", PART):
        return function(*arguments)
