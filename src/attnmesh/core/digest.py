"""Digests of tensors, which ranks compare to find out if they hold the same."""

import math
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

LOW_HALF = (1 << 32) - 1
"""The low half of the bits of an int64."""

SUM_ELEMENTS = 1 << 16
"""Elements in one weighted sum. The Triton program for digests takes at most this many."""

GOLDEN_GAMMA = -7046029254386353131
"""The odd integer nearest to 2^64 divided by the golden ratio, as int64. Its multiples modulo 2^64 spread evenly.

It is the increment of SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
"""

MIX_FACTOR = -4658895280553007687
"""The first factor of the mix of SplitMix64, as int64. A product with it carries each bit into the higher ones."""

DIGEST_VALUES = 1024
"""Values of each parameter in the digest that identifies a model. More take longer, and tell more models apart."""


def bits(x: Tensor) -> Tensor:
    """Return the bit patterns of a tensor's elements as integers, one after the other."""
    return x.contiguous().reshape(-1).view(_INTEGERS[x.element_size()])


def wide_size(row_bytes: int) -> int:
    """Return the bytes of the widest integers that rows of `row_bytes` bytes are made of: the fewest to add up."""
    return math.gcd(row_bytes, 8)


def wide_bits(x: Tensor) -> Tensor:
    """Return the bits of rows as the widest integers that each is made of."""
    size = wide_size(x.shape[-1] * x.element_size())
    x = x.contiguous().reshape(-1)
    return (x.clone() if x.data_ptr() % size else x).view(_INTEGERS[size])


def hash_each(numbers: Tensor) -> Tensor:
    """Return a hash of each integer. The Triton program for checksums computes the same."""
    x = numbers * GOLDEN_GAMMA
    x = (x ^ (x >> 29)) * MIX_FACTOR
    return x ^ (x >> 32)


def digest(x: Tensor) -> Tensor:
    """Return an int64 digest of a tensor's bits: weighted sums modulo 2^64, then of these sums."""
    numbers = _fold(bits(x))
    weights = cpu_weights() if x.is_cpu else _weights(min(len(numbers), SUM_ELEMENTS), x.device)
    while len(numbers) > SUM_ELEMENTS:
        parts = pad(numbers, (0, -len(numbers) % SUM_ELEMENTS)).view(-1, SUM_ELEMENTS)
        numbers = _fold((parts * weights).sum(1))
    return (numbers * weights[: len(numbers)]).sum()


def digest_of_sums(sums: Tensor) -> Tensor:
    """Return the digest of the elements whose weighted sums are these."""
    return sums[0] if len(sums) == 1 else digest(sums)


def digest_of_run(run: Tensor, start: int, slots: int) -> Tensor:
    """Return the digest of `wide_bits` of a tensor on the CPU that is zeros but for a run of slots from `start` on.

    The tensor is (heads, slots, width), and the run (heads, slots of the run, width). The zeros take no memory.
    """
    numbers = wide_bits(run).view(len(run), -1)
    width = numbers.shape[1] // run.shape[1]
    heads = torch.arange(len(run), device="cpu")[:, None] * slots * width
    places = heads + start * width + torch.arange(numbers.shape[1], device="cpu")
    sums = torch.zeros(-(-len(run) * slots * width // SUM_ELEMENTS), dtype=torch.int64, device="cpu")
    sums.index_add_(
        0, (places // SUM_ELEMENTS).flatten(), (_fold(numbers) * cpu_weights()[places % SUM_ELEMENTS]).flatten()
    )
    return digest_of_sums(sums)


def digest_each(rows: Tensor) -> Tensor:
    """Return the digest of each row of a matrix of int64 on the CPU, of no more columns than a weighted sum has."""
    return (_fold(rows) * cpu_weights()[: rows.shape[1]]).sum(1)


def _fold(numbers: Tensor) -> Tensor:
    """Copy the high bits of int64 into the low ones: modulo 2^64, changes in high bits alone could cancel.

    Different numbers stay different. Without the mask `LOW_HALF` the shift would repeat the sign: x and ~x were equal.
    """
    return numbers ^ ((numbers >> 32) & LOW_HALF) if numbers.dtype == torch.int64 else numbers


def _weights(count: int, device: torch.device) -> Tensor:
    """Return odd weights without a pattern. With 1, 3, 5, ... permuted small numbers would often collide."""
    return hash_each(torch.arange(1, count + 1, device=device)) | 1


@lru_cache
def cpu_weights() -> Tensor:
    """Return the weights of a sum on the CPU."""
    with torch.inference_mode(False):
        return _weights(SUM_ELEMENTS, torch.device("cpu"))


def chained_digest(before: int, values: Tensor | None) -> int:
    """Return a digest of all values so far: equal on two ranks if they were given equal values in equal order."""
    return before if values is None else (31 * before + int(digest(values)) + values.numel()) % 2**56


def fingerprints(tensors: Mapping[str, Tensor | None]) -> dict[str, str]:
    """Return dtype, shape and digest of each tensor as text; tensors that are None are left out."""
    present = {name: x for name, x in tensors.items() if x is not None}
    return {name: f"{x.dtype} {list(x.shape)} of digest {int(digest(x)) % 2**64:x}" for name, x in present.items()}
