"""How a merge finds that its ranks make different calls: each message of a merge begins with a checksum of the call.

        hash      a number of a text or of other values of Python, as `hash_of_call` of a call's options and shapes
        digest    a number of the bits of tensors (`core/digest.py`); of a call, its hash and the digests of its tensors
        checksum  what is sent or kept beside data; of a call with the digest n, the two numbers (n, -n)

A merge returns, for each of the two numbers, the maximum over all ranks. The sum of both maxima is 0 if ranks agree.
Calls with the digests 5 and 7 send (5, -5) and (7, -7): the maxima are (7, -5), and their sum is 2.

        a rank that      sends                      sum of the maxima
        makes a call     (n, -n), of its digest n   0 if all ranks make the same call, otherwise above 0
        asks to compare  (QUESTION, -QUESTION)      0 if all ranks ask, otherwise above 0
        has an error     (POISON, POISON)           infinite

A rank that compares its call sends no message: it waits in the comparison. A rank that waits for its message gets a
`CallsDifferError`, leaves the merge with UNEQUAL_CHECKSUM as the result, and compares too.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attnmesh.core.digest import SUM_ELEMENTS, digest
from attnmesh.kernels.native.native_digest import digest_of_call
from attnmesh.kernels.stacked_merge import launch_checksum, use_triton
from attnmesh.kernels.triton_runtime import interpreted

MODULUS = (1 << 24) - 3
"""Modulus of the digests in checksums: float32 holds all smaller integers exactly.

Two calls that differ have the same digest once in 17 million.
"""

QUESTION = float(MODULUS)
"""Number that no call has. A rank sends it for a digest to find out whether all ranks ask to compare their calls."""

POISON = math.inf
"""Checksum of a rank that takes part in a merge without a call, so that the others find its error."""

UNEQUAL_CHECKSUM = 1e38
"""Checksum of a merge that met a message of another call, also in `mailbox.cpp`. It is above others, below poison."""


class CallsDifferError(Exception):
    """The peer, for whose message this rank waits, makes another call, or compares its call."""

    def __init__(self, peer: int) -> None:
        super().__init__(peer)
        self.peer = peer


def cpu_reads_checksums(device: torch.device) -> bool:
    """Return whether the CPU reads merged checksums of a device.

    Those of a GPU stay there, so that no CPU waits for them, and those of kernels for GPUs that a CPU interprets.
    """
    return device.type == "cpu" and not interpreted()


def call_checksum(
    tensors: Sequence[Tensor], call_hash: int, device_counts: Tensor, like: Tensor, into: Tensor | None
) -> Tensor:
    """Return the checksum of a call hash, the bits of `tensors`, and the tokens of a cache.

    The first of its `device_counts` counts these tokens. The checksum is written to `into` if that is given.
    """
    fits = len(tensors) <= 2 and sum(x.numel() for x in tensors) <= SUM_ELEMENTS  # one program is faster than PyTorch
    if fits and use_triton(like):
        checksum = like.new_empty(2) if into is None else into
        return launch_checksum(tensors, call_hash, device_counts, MODULUS, checksum)
    if device_counts.is_cpu:
        total: int | Tensor = digest_of_call(tensors, call_hash, device_counts)
    else:
        total = sum(map(digest, tensors), start=call_hash + device_counts[0])
    checksum = checksum_of(total, like)
    return checksum if into is None else into.copy_(checksum)


def question_like(like: Tensor) -> Tensor:
    """Return (QUESTION, -QUESTION), as `checksum_of` returns a number."""
    checksum = like.new_full((2,), QUESTION)
    checksum[1].neg_()
    return checksum


def checksum_of(number: int | Tensor, like: Tensor) -> Tensor:
    """Return (number, -number), with the number modulo `MODULUS`."""
    if isinstance(number, int):  # filled without a copy from the CPU, which a CUDA graph cannot have
        checksum = like.new_full((2,), number % MODULUS)
        checksum[1].neg_()
        return checksum
    number = number.remainder(MODULUS).to(like.dtype)
    return torch.stack((number, -number))
