"""What it takes to launch a program of Triton: that it is installed, and how a width is cut.

PyTorch alone imports this; Triton itself is imported when a program is first asked for.
"""

import os
from contextlib import nullcontext
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch


def launch(file: str, name: str, grid: tuple[int, ...], device: torch.device, /, **arguments: Any) -> None:
    """A program, by its file and its name, on the device that its tensors are on, which need not be the current one."""
    program = getattr(programs(file), f"{name}_program")
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        program[grid](**arguments)


@cache
def programs(file: str) -> ModuleType:
    """A file of programs, imported when they are first needed."""
    return import_module(f"attnmesh.kernels.programs.{file}")


@cache
def installed() -> bool:
    """Whether Triton is here."""
    return find_spec("triton") is not None


def interpreted() -> bool:
    """Whether Triton's programs are to run on the CPU, in its interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def parts(width: int) -> tuple[int, int]:
    """A width as two powers of two of 16 or more, the second 0 if the first is enough.

    >>> [parts(width) for width in (8, 64, 80, 192, 576)]
    [(16, 0), (64, 0), (64, 16), (128, 64), (512, 64)]
    """
    first = max(16, 1 << (width.bit_length() - 1))
    rest = width - first
    return first, max(16, 1 << (rest - 1).bit_length()) if rest > 0 else 0
