"""How everything here is measured: rivals take turns in one process, and each figure comes with its spread."""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

Call = Callable[[], Any]

FORGET = Path("/proc/self/clear_refs")
"""Where Linux is told to forget the highest memory of a process."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: the median and the quartiles around it."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(seconds: list[float]) -> "Timing":
        """The middle half of what was measured."""
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return Timing(*(round(1e3 * x, 4) for x in (median, low, high)))

    def divided(self, count: int) -> "Timing":
        """Of one call, when so many were timed together."""
        return Timing(*(round(x / count, 4) for x in (self.median, self.low, self.high)))

    def __str__(self) -> str:
        digits = max(0, 2 - len(str(int(self.median))) + 1)
        return f"{self.median:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def race(
    calls: dict[str, Call],
    device: torch.device,
    *,
    seconds: float = 4.0,
    rounds: int = 31,
    before: Call | None = None,
) -> dict[str, Timing]:
    """Time the calls in turns, after a round to warm up: at least 5 rounds, then up to so many rounds or seconds.

    `before` each call, ranks may wait for each other.
    """
    measured: dict[str, list[float]] = {name: [] for name in calls}
    end = None
    for count in range(rounds + 1):
        for name, call in calls.items():
            if before is not None:
                before()
            measured[name].append(_timed(call, device))
        end = end or time.perf_counter() + seconds
        if count >= 5 and time.perf_counter() > end:
            break
    return {name: Timing.of(times[1:]) for name, times in measured.items()}


def _timed(call: Call, device: torch.device) -> float:
    if device.type == "cuda":
        return _timed_there(call, device)
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _timed_there(call: Call, device: torch.device) -> float:
    """As the GPU tells, what it kept from the last call forgotten, its queue so full that no launch is waited for."""
    _forgotten(device).zero_()
    torch.cuda._sleep(200_000)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    call()
    after.record()
    synchronize(device)
    return float(before.elapsed_time(after)) / 1e3


@cache
def _forgotten(device: torch.device) -> torch.Tensor:
    """More than a GPU's own cache holds."""
    return torch.empty(1 << 28, dtype=torch.int8, device=device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def read_rate(device: torch.device, megabytes: int = 512) -> float:
    """The rate at which memory is read in one stream, GB/s: what a decode step cannot beat."""
    stream = torch.ones(megabytes * 2**20 // 4, device=device)
    timing = race({"read": lambda: stream.amax()}, device, seconds=1.0)["read"]
    return stream.numel() * 4 / timing.median / 1e6


def peak_memory(call: Call, device: torch.device) -> int | None:
    """The most bytes beyond the present ones that a call held at once; None where the system does not tell."""
    call()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    if not FORGET.exists():
        return None
    # What others free meanwhile lowers the reading: the largest of a few is right.
    return max(_growth(call) for _ in range(3))


def _growth(call: Call) -> int:
    gc.collect()
    FORGET.write_text("5")  # the kernel forgets the highest resident size so far
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before


def resident(name: str) -> int:
    """Bytes that this process has in memory ("VmRSS"), or has had at the most ("VmHWM"), as Linux tells."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
