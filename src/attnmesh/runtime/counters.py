"""Counters of what a rank receives and of the time its merges take."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import perf_counter

from torch.profiler import record_function

from attnmesh.runtime.ranges import MERGE_RANGE, is_profiled
from attnmesh.runtime.tensors import Tensors, bytes_of


@dataclass
class ReceivedTraffic:
    """Counts of what a rank received, and the seconds of each of its merges across ranks.

    `vectors` are elements of q, k, v, out and their gradients. `scalars` are elements of lse and other values per row.
    Merges include the wait for other ranks: the last rank to arrive waits least.
    """

    vectors: int = 0
    scalars: int = 0
    bytes: int = 0
    merges: list[float] = field(default_factory=list)

    def add(self, received: Tensors) -> None:
        """Count tensors that were received."""
        for x in received:
            self.vectors += x.numel() if x.ndim == 4 else 0
            self.scalars += x.numel() if x.ndim == 3 else 0
        self.bytes += bytes_of(received)


current_traffic: ContextVar[ReceivedTraffic | None] = ContextVar("attnmesh traffic", default=None)
"""What is received now counts here; None where nobody counts."""


@contextmanager
def count_traffic() -> Iterator[ReceivedTraffic]:
    """Count what this rank receives, in this thread, while the block runs."""
    traffic = ReceivedTraffic()
    token = current_traffic.set(traffic)
    try:
        yield traffic
    finally:
        current_traffic.reset(token)


@contextmanager
def timed_merge() -> Iterator[None]:
    """Record the seconds of the block as one merge, if traffic is counted, and its range, if a profiler runs."""
    traffic = current_traffic.get()
    start = perf_counter()
    with record_function(MERGE_RANGE) if is_profiled() else nullcontext():
        yield
    if traffic is not None:
        traffic.merges.append(perf_counter() - start)


def count_messages(count: int, size: int) -> None:
    """Count messages of equal size that were received."""
    if (traffic := current_traffic.get()) is not None:
        traffic.bytes += count * size
