"""Memory that a process has resident, on Linux."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

CLEAR_REFS = Path("/proc/self/clear_refs")
"""The file that resets the highest resident size, when 5 is written to it."""


def resident(name: str = "VmRSS") -> int:
    """Return the resident bytes now ("VmRSS") or at their peak ("VmHWM")."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def peak_memory(call: Callable[[], Any]) -> int | None:
    """Return the peak of bytes that a second call takes; None where the system does not count them.

    Memory that other threads free lowers a reading, so the largest of three is taken.
    """
    call()
    return max(_growth(call) for _ in range(3)) if CLEAR_REFS.exists() else None


def _growth(call: Callable[[], Any]) -> int:
    gc.collect()
    CLEAR_REFS.write_text("5")
    before = resident()
    call()
    return resident("VmHWM") - before
