"""Digests of tensors, which ranks compare to find out if they hold the same."""

import math
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

LOW = (1 << 32) - 1
"""The low half of the bits of an int64."""

ROW = 1 << 16
"""Elements in one weighted sum. The Triton program for digests takes at most this many."""

DIGEST_VALUES = 1024
"""Values of each parameter in the digest that identifies a model."""


def bits(x: Tensor) -> Tensor:
    """Return the bit patterns of a tensor's elements as one row of integers."""
    return x.contiguous().reshape(-1).view(_INTEGERS[x.element_size()])


def wide_size(row_bytes: int) -> int:
    """Return the bytes of the widest integers that rows of so many bytes are made of: the fewest to add up."""
    return math.gcd(row_bytes, 8)


def wide_bits(x: Tensor) -> Tensor:
    """Return the bits of rows as the widest integers that each is made of."""
    size = wide_size(x.shape[-1] * x.element_size())
    x = x.contiguous().reshape(-1)
    return (x.clone() if x.data_ptr() % size else x).view(_INTEGERS[size])


def hash_each(numbers: Tensor) -> Tensor:
    """Return a hash of each integer."""
    x = numbers * -7046029254386353131
    x = (x ^ (x >> 29)) * -4658895280553007687
    return x ^ (x >> 32)


def digest(x: Tensor) -> Tensor:
    """Return an int64 digest of a tensor's bits: weighted sums of rows modulo 2^64, then of their sums."""
    numbers = _fold(bits(x))
    weights = cpu_weights() if x.device.type == "cpu" else _weights(min(len(numbers), ROW), x.device)
    while len(numbers) > ROW:
        rows = pad(numbers, (0, -len(numbers) % ROW)).view(-1, ROW)
        numbers = _fold((rows * weights).sum(1))
    return (numbers * weights[: len(numbers)]).sum()


def digest_of_sums(sums: Tensor) -> Tensor:
    """Return the digest of the elements whose weighted sums, row by row, are these."""
    return sums[0] if len(sums) == 1 else digest(sums)


def digest_of_run(runs: Tensor, start: int, slots: int) -> Tensor:
    """Return the digest of `wide_bits` of a tensor on the CPU that is zeros but for rows from `start` on.

    The tensor is (heads, slots, width), and `runs` are these rows, (heads, rows, width). Digests of runs need no memory
    for the zeros.
    """
    numbers = wide_bits(runs).view(len(runs), -1)
    row = numbers.shape[1] // runs.shape[1]
    heads = torch.arange(len(runs), device="cpu")[:, None] * slots * row
    places = heads + start * row + torch.arange(numbers.shape[1], device="cpu")
    sums = torch.zeros(-(-len(runs) * slots * row // ROW), dtype=torch.int64, device="cpu")
    sums.index_add_(0, (places // ROW).flatten(), (_fold(numbers) * cpu_weights()[places % ROW]).flatten())
    return digest_of_sums(sums)


def digest_each(rows: Tensor) -> Tensor:
    """Return the digest of each row of a matrix of int64 on the CPU, of no more columns than a weighted sum has."""
    return (_fold(rows) * cpu_weights()[: rows.shape[1]]).sum(1)


def _fold(numbers: Tensor) -> Tensor:
    """Copy the high bits of int64 into the low ones: modulo 2^64, changes in high bits alone could cancel.

    No two numbers become one: a shift that drew the sign after it would make x and ~x equal.
    """
    return numbers ^ ((numbers >> 32) & LOW) if numbers.dtype == torch.int64 else numbers


def _weights(count: int, device: torch.device) -> Tensor:
    """Return odd weights without a pattern. With 1, 3, 5, ... permuted small numbers would often collide."""
    return hash_each(torch.arange(1, count + 1, device=device)) | 1


@lru_cache
def cpu_weights() -> Tensor:
    """Return the weights of a row on the CPU."""
    with torch.inference_mode(False):
        return _weights(ROW, torch.device("cpu"))


def history_checksum(before: int, values: Tensor | None) -> int:
    """Return a checksum of all values so far: equal on two ranks if they were given equal values in equal order."""
    return before if values is None else (31 * before + int(digest(values)) + values.numel()) % 2**56


def fingerprints(tensors: Mapping[str, Tensor | None]) -> dict[str, str]:
    """Return dtype, shape and digest of each tensor as text; tensors that are None are left out."""
    present = {name: x for name, x in tensors.items() if x is not None}
    return {name: f"{x.dtype} {list(x.shape)} of digest {int(digest(x)) % 2**64:x}" for name, x in present.items()}
