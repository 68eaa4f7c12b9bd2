"""Steps over caches of two memories on GPUs, whose older tokens all go one way."""

from collections.abc import Callable
from typing import Any, Protocol
from unittest.mock import patch

from attnmesh.kernels import tiered_attention, upload
from tests.support.ranks.pool import on_each_rank

PART = 2048
"""Bytes of a part, so that short caches have several."""


class Runs(Protocol):
    """What runs a function on ranks."""

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return every rank's result."""
        ...


class OneWay:
    """Ranks on which older tokens are all attended on the CPU, or are all uploaded to the device."""

    def __init__(self, ranks: Runs, *, uploaded: bool) -> None:
        self.ranks, self.uploaded = ranks, uploaded

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return every rank's result."""
        return self.ranks.run(size, run_one_way, self.uploaded, function, *arguments)


@on_each_rank
def run_one_way(uploaded: bool, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function on a rank, with all older tokens going one way."""
    choice = patch.object(tiered_attention.TieredAttention, "_is_upload_faster", lambda *_: uploaded)
    with choice, patch.object(upload, "PART_BYTES", PART):
        return function(*arguments)
