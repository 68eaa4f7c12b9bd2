"""Ctrl-C at any point of a call: wherever Python may raise it in the code of the package."""

import dis
import sys
from collections.abc import Callable
from functools import cache
from itertools import count, pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

import attnmesh as am

PACKAGE = str(Path(am.__file__).parent)

AFTER = {"RESUME", "CALL", "CALL_KW", "CALL_FUNCTION_EX"}
"""Instructions after which Python looks for signals."""


@cache
def interruptible(code: CodeType) -> frozenset[int]:
    """Return the instructions of a function before which Python may raise: its first one, and those after calls."""
    after = (next_op.offset for op, next_op in pairwise(dis.get_instructions(code)) if op.opname in AFTER)
    return frozenset(after)


class Place(NamedTuple):
    """Where a call was interrupted."""

    file: str
    line: int


def interrupt(function: Callable[[], object], number: int) -> Place | None:
    """Call a function, with Ctrl-C at this point of the package's code. Return where; None if it has fewer points."""
    points = count()
    found = list[Place]()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode" and frame.f_lasti in interruptible(frame.f_code) and next(points) == number:
            sys.settrace(None)
            found.append(Place(frame.f_code.co_filename.removeprefix(PACKAGE), frame.f_lineno))
            raise KeyboardInterrupt
        return trace

    before, has_gradients = sys.gettrace(), torch.is_grad_enabled()
    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        return found[0]
    finally:
        sys.settrace(before)
        torch.set_grad_enabled(has_gradients)  # the trace may raise where a `with` ends, before Python would
    return None
