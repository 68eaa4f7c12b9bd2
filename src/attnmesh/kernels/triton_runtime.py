"""Launching Triton programs. Triton itself is imported at the first launch, so that attnmesh works without it."""

import os
from contextlib import nullcontext
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch


def launch(file: str, name: str, grid: tuple[int, ...], device: torch.device, /, **arguments: Any) -> None:
    """Launch a program of a file on the device of its tensors, which may not be the current device."""
    program = getattr(programs(file), f"{name}_program")
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        program[grid](**arguments)


@cache
def programs(file: str) -> ModuleType:
    """Return a module of programs, imported on first use."""
    return import_module(f"attnmesh.kernels.programs.{file}")


@cache
def installed() -> bool:
    """Return True if Triton is installed."""
    return find_spec("triton") is not None


def interpreted() -> bool:
    """Return True if Triton's interpreter runs programs, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def powers_covering(width: int) -> tuple[int, int]:
    """Return two powers of two, 16 or more, that cover a width. The second is 0 if the first is enough.

    >>> [powers_covering(width) for width in (8, 64, 80, 192, 576)]
    [(16, 0), (64, 0), (64, 16), (128, 64), (512, 64)]
    """
    first = max(16, 1 << (width.bit_length() - 1))
    remainder = width - first
    return first, max(16, 1 << (remainder - 1).bit_length()) if remainder > 0 else 0
