"""The modules that are being called, found on Python's stack: a model needs no hook."""

import sys
from inspect import signature
from types import FrameType
from typing import Any, NamedTuple

from torch import nn

MODULE_CALL = nn.Module._call_impl.__name__
"""Function of PyTorch that calls a module."""


class CalledModule(NamedTuple):
    """A module that is being called, and its arguments."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def arguments(self) -> dict[str, Any]:
        """Return the arguments by name, and None for those of its signature that it was not given."""
        names = signature(self.module.forward).parameters
        return {**dict.fromkeys(names), **dict(zip(names, self.args, strict=False)), **self.kwargs}


def called_modules() -> list[CalledModule]:
    """Return the modules that are being called, from the outermost to the innermost."""
    modules: list[CalledModule] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        # Only these frames are read: Python before 3.13 keeps the locals of each frame that is.
        if frame.f_code.co_name == MODULE_CALL:
            variables = frame.f_locals
            args, kwargs = variables.get("args", ()), variables.get("kwargs", {})
            modules.append(CalledModule(variables["self"], args, kwargs))
        frame = frame.f_back
    return modules[::-1]
