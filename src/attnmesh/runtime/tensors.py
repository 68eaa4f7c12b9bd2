"""Tensors that travel or are kept together, their bytes, and their order in memory."""

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]
"""Tensors of the same tokens, such as keys and values."""


def is_dtensor(x: object) -> bool:
    """Return whether x is a DTensor. Its class is slow to import, so it is known by its name."""
    return type(x).__name__ == "DTensor"


def bytes_of(tensors: Tensors) -> int:
    """Return the bytes of all these tensors."""
    size = 0
    for x in tensors:
        size += x.nbytes
    return size


def empty_length_major(x: Tensor, width: int) -> Tensor:
    """Return an empty tensor like x with another width, in the memory order of `length_major`."""
    return torch.empty_permuted((*x.shape[:-1], width), (0, 2, 1, 3), dtype=x.dtype, device=x.device)


def length_major(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in memory order (batch, length, heads, dim), which an output projection reads; never a view."""
    if x.dtype == dtype and x.transpose(1, 2).is_contiguous() and not x._is_view():
        return x
    return empty_length_major(x.to(dtype), x.shape[-1]).copy_(x)  # a copy, since users may write to it
