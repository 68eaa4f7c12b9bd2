"""How a merge finds that its ranks make different calls: each message of a merge begins with a checksum of the call.

The checksum is two numbers, of which each rank gets the maximum over all ranks. Their sum is 0 if ranks agree.

        a rank           sends                      the sum of the maxima
        makes a call     (n, -n), of its digest n   0 if all ranks make the same call, else more
        asks to compare  (QUESTION, -QUESTION)      0 if all ranks ask
        has an error     (POISON, POISON)           infinite
        compares         nothing: it waits in the comparison. A rank that expects its message gets a `CallsDifferError`
                         instead, and gives up the merge with UNEQUAL_CHECKSUM
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attnmesh.core.digest import SUM_ELEMENTS, digest
from attnmesh.kernels.native.native_digest import digest_on_cpu
from attnmesh.kernels.stacked_merge import launch_checksum, use_triton

MODULUS = (1 << 24) - 3
"""Modulus of checksums: float32 holds smaller integers exactly."""

QUESTION = float(MODULUS)
"""Checksum of no call: a rank sends it to find out whether all ranks ask to compare their calls."""

POISON = math.inf
"""Checksum of a rank that takes part in a merge without a call, so that the others find its error."""

UNEQUAL_CHECKSUM = 1e38
"""Checksum of a message of another call, also in `mailbox.cpp`. It is larger than others, and finite: poison is not."""


class CallsDifferError(Exception):
    """A peer compares its call with the others', while this rank waits for a message of it in another call."""

    def __init__(self, peer: int) -> None:
        super().__init__(peer)
        self.peer = peer


def call_checksum(
    tensors: Sequence[Tensor], call_hash: int, length: Tensor, like: Tensor, into: Tensor | None
) -> Tensor:
    """Return the checksum of a call, of bits of tensors, and of a cache's length, with which `length` begins."""
    fits = len(tensors) <= 2 and sum(x.numel() for x in tensors) <= SUM_ELEMENTS  # one program is faster than PyTorch
    if fits and use_triton(like):
        return launch_checksum(tensors, call_hash, length, MODULUS, like.new_empty(2) if into is None else into)
    if length.device.type == "cpu":
        total: int | Tensor = call_digest(tensors, call_hash, length)
    else:
        total = sum(map(digest, tensors), start=call_hash + length[0])
    checksum = checksum_of(total, like)
    return checksum if into is None else into.copy_(checksum)


def call_digest(tensors: Sequence[Tensor], call_hash: int, length: Tensor) -> int:
    """Return the digest of a call on CPUs, of which a checksum is made modulo `MODULUS`."""
    tokens: int = length.tolist()[0]
    return tokens + call_hash + sum(map(digest_on_cpu, tensors))


def question_like(like: Tensor) -> Tensor:
    """Return `QUESTION` as `checksum_of` returns a number: the maxima over all ranks sum to 0 if all ranks ask."""
    checksum = like.new_full((2,), QUESTION)
    checksum[1].neg_()
    return checksum


def checksum_of(number: int | Tensor, like: Tensor) -> Tensor:
    """Return (number, -number): the maxima over all ranks sum to 0 if the numbers are equal."""
    if isinstance(number, int):  # without a copy from the CPU, which a CUDA graph cannot have
        checksum = like.new_full((2,), number % MODULUS)
        checksum[1].neg_()
        return checksum
    number = number.remainder(MODULUS).to(like.dtype)
    return torch.stack((number, -number))
