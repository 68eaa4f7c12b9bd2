"""What it takes to launch a program of Triton: that it is installed, and how a width is cut.

PyTorch alone imports this; Triton itself is imported when a program is first asked for.
"""

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


@cache
def programs(name: str) -> ModuleType:
    """A file of programs, imported when they are first needed."""
    return import_module(f"attnmesh.kernel.programs.{name}")


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
