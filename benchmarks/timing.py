"""Timing and memory of calls: rivals take turns in one process, and each time is a median with quartiles."""

import gc
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

Call = Callable[[], Any]

CLEAR_REFS = Path("/proc/self/clear_refs")
"""The file that resets a process's highest resident size on Linux, when 5 is written to it."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: the median and the quartiles around it."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(seconds: list[float]) -> "Timing":
        """Return median and quartiles."""
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return Timing(*(round(1e3 * x, 4) for x in (median, low, high)))

    def __str__(self) -> str:
        digits = max(0, 2 - len(str(int(self.median))) + 1)
        return f"{self.median:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"

    @property
    def in_two_lines(self) -> str:
        """The median, and the quartiles below it, for a narrow column."""
        return str(self).replace(" [", "\n[")


@dataclass(frozen=True)
class Comparison:
    """Our time beside a rival's, and the ratio to reach, if any."""

    case: str
    rival: str
    theirs: Timing
    ours: Timing
    goal: float | None
    gigabytes_a_second: float | None = None
    share_of_limit: float | None = None

    @property
    def ratio(self) -> float:
        """The rival's time divided by ours."""
        return self.theirs.median / self.ours.median

    @property
    def met(self) -> bool | None:
        """True if the goal is reached, None without a goal."""
        return None if self.goal is None else self.ratio >= self.goal

    def record(self) -> dict[str, Any]:
        """Return the row for JSON."""
        return {**asdict(self), "ratio": round(self.ratio, 3), "met": self.met}


def race(
    calls: dict[str, Call],
    device: torch.device,
    *,
    seconds: float = 4.0,
    rounds: int = 31,
    before: Call | None = None,
    repeat: int = 1,
) -> dict[str, Timing]:
    """Return the timing of each call, taken in turns after a warm-up round.

    The order of a round is drawn anew, alike on all ranks, since a call can leave caches and ranks in a state that
    slows the next one. A turn is `repeat` calls in a row, after a fifth as many that are not timed: ranks leave a
    barrier one after the other. There are at least 5 rounds; then `seconds` or `rounds` end it. `before` is called
    before each turn, for a barrier.
    """
    measured: dict[str, list[float]] = {name: [] for name in calls}
    names, end, order = list(calls), None, random.Random(0)
    for count in range(rounds + 1):
        order.shuffle(names)
        for name in names:
            if before is not None:
                before()
            for _ in range(repeat // 5):
                calls[name]()
            measured[name].append(_timed(_repeated(calls[name], repeat), device) / repeat)
        end = end or time.perf_counter() + seconds
        if count >= 5 and time.perf_counter() > end:
            break
    return {name: Timing.of(times[1:]) for name, times in measured.items()}


def _repeated(call: Call, repeat: int) -> Call:
    return call if repeat == 1 else lambda: [call() for _ in range(repeat)]


def _timed(call: Call, device: torch.device) -> float:
    if device.type == "cuda":
        return _timed_cuda(call, device)
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _timed_cuda(call: Call, device: torch.device) -> float:
    """Time a call by CUDA events, with an empty L2 cache and a full queue, so that launches are hidden."""
    _l2_flush(device).zero_()
    torch.cuda._sleep(200_000)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    call()
    after.record()
    torch.cuda.synchronize(device)
    return float(before.elapsed_time(after)) / 1e3


@cache
def _l2_flush(device: torch.device) -> torch.Tensor:
    """Return a tensor larger than the L2 cache; writing it evicts the rest."""
    return torch.empty(1 << 28, dtype=torch.int8, device=device)


def peak_memory(call: Call, device: torch.device) -> int | None:
    """Return the peak of bytes that a call allocates, or None where the system does not count them."""
    call()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    if not CLEAR_REFS.exists():
        return None
    # Memory freed by other threads lowers a reading, so the largest of three is taken.
    return max(_growth(call) for _ in range(3))


@contextmanager
def exact_memory() -> Iterator[None]:
    """Let ranks that are spawned in the block free memory at once: what is resident is then what is held.

    Their calls are slow.
    """
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    try:
        yield
    finally:
        del os.environ["MALLOC_MMAP_THRESHOLD_"]


def _growth(call: Call) -> int:
    gc.collect()
    CLEAR_REFS.write_text("5")
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before


def resident(name: str) -> int:
    """Return the resident bytes of this process now ("VmRSS") or at their peak ("VmHWM"), on Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
