"""Codes that the C++ sources and their callers share."""

import torch

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Dtypes of numbers."""

STORED = {torch.int8: 3, torch.float8_e4m3fn: 4}
"""Dtypes of numbers of rows in 8 bits. A kernel takes them without the scales, which follow them in memory."""

NO_MEMORY_CODE = -1
"""Code of a call that got no memory. Others below 0 are of other exceptions in C++; 1 is of numbers not finite."""


def error_of(code: int) -> Exception:
    """Return the error of a call that returned a code below 0."""
    if code == NO_MEMORY_CODE:
        return MemoryError("the native kernel gets no memory")
    return RuntimeError("the native kernel has failed: ATTNMESH_NATIVE=0 turns it off")
