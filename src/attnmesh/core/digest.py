"""Digests of tensors and of calls, by which ranks compare what they hold."""

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad


def bits(x: Tensor) -> Tensor:
    """A tensor's bits, in a row, as whole numbers."""
    return x.contiguous().reshape(-1).view(_INTEGERS[x.element_size()])


def mixed(numbers: Tensor) -> Tensor:
    """Other numbers for whole numbers, as a hash table would have them."""
    x = numbers * -7046029254386353131
    x = (x ^ (x >> 29)) * -4658895280553007687
    return x ^ (x >> 32)


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


ROW = 1 << 16
"""Numbers that are weighed together; a kernel that does the like is given no more."""


NUMBERS = 4
"""That a rank may tell of beside its call: always as many, so that ranks hear each other whatever they call."""


SAID = 2 + NUMBERS
"""Numbers that a rank says, when all agree: the first two are of its call."""


def digest(x: Tensor) -> Tensor:
    """A number that tells a tensor's bits from others, modulo 2^64: rows of them are weighed, and then the rows."""
    numbers = _folded(bits(x))
    weights = _weights() if x.device.type == "cpu" else _made_weights(min(len(numbers), ROW), x.device)
    while len(numbers) > ROW:
        rows = pad(numbers, (0, -len(numbers) % ROW)).view(-1, ROW)
        numbers = _folded((rows * weights).sum(1))
    return (numbers * weights[: len(numbers)]).sum()


def _folded(numbers: Tensor) -> Tensor:
    """The first bits also where the last are: modulo 2^64, changes of the first alone could cancel out."""
    return numbers ^ (numbers >> 32) if numbers.dtype == torch.int64 else numbers


def _made_weights(count: int, device: torch.device) -> Tensor:
    """Odd numbers without a pattern: with 1, 3, 5, ... small numbers in another order would often weigh the same."""
    return mixed(torch.arange(1, count + 1, device=device)) | 1


@lru_cache
def _weights() -> Tensor:
    with torch.inference_mode(False):
        return _made_weights(ROW, torch.device("cpu"))


def history_checksum(before: int, said: Tensor | None) -> int:
    """A number for all that ranks were told so far: the same if they were told the same in turn."""
    return before if said is None else (31 * before + int(digest(said)) + said.numel()) % 2**56


def fingerprints(tensors: Mapping[str, Tensor | None]) -> dict[str, str]:
    """Tensors as ranks tell each other of them: by what they are, and a number for all that is in them."""
    there = {name: x for name, x in tensors.items() if x is not None}
    return {name: f"{x.dtype} {list(x.shape)} of digest {int(digest(x)) % 2**64:x}" for name, x in there.items()}
