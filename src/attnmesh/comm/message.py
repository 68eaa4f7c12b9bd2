"""Messages of a merge: a partial and a checksum of the call, packed into bytes.

The checksum is two numbers, of which each rank gets the maximum over all ranks. Their sum is 0 if ranks agree.

        a rank           sends                      the sum of the maxima
        makes a call     (n, -n), n of the call     0 if all ranks make the same call, else more
        asks to compare  (QUESTION, -QUESTION)      0 if all ranks ask
        has an error     (POISON, POISON)           infinite
        compares         nothing: it waits in the comparison. A rank that expects its message gets a `CallsDifferError`
                         instead, and gives up the merge with UNEQUAL_CHECKSUM
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.comm.mailboxes import MESSAGE_BYTES
from attnmesh.core.digest import SUM_ELEMENTS, digest
from attnmesh.core.partial import Partial, merge_stack
from attnmesh.kernels.cache_view import LENGTH
from attnmesh.kernels.native.native_digest import digest_on_cpu, wrapped
from attnmesh.kernels.stacked_merge import launch_checksum, merge_stacked, use_triton
from attnmesh.kernels.triton_runtime import interpreted

MODULUS = (1 << 24) - 3
"""Modulus of checksums: float32 holds smaller integers exactly."""

QUESTION = float(MODULUS)
"""Checksum of no call: a rank sends it to find out whether all ranks ask to compare their calls."""

POISON = math.inf
"""Checksum of a rank that takes part in a merge without a call, so that the others find its error."""


@dataclass(frozen=True)
class MessageForm:
    """Form of a message of bytes: (checksum, lse, out), the checksum in the dtype of lse."""

    shape: tuple[int, ...]
    lse_dtype: torch.dtype
    out_dtype: torch.dtype

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows, and columns of out."""
        return math.prod(self.shape[:-1]), self.shape[-1]

    @property
    def size(self) -> int:
        """Bytes of a message."""
        rows, width = self.sizes
        head, out = (2 + rows) * self.lse_dtype.itemsize, rows * width * self.out_dtype.itemsize
        # A whole count of numbers in the dtype of lse, as which a message is viewed.
        return head + -(-out // self.lse_dtype.itemsize) * self.lse_dtype.itemsize

    @property
    def is_native(self) -> bool:
        """True for messages that the native library merges through mailboxes: short ones, all in float32."""
        return self.lse_dtype == self.out_dtype == torch.float32 and self.size <= MESSAGE_BYTES and not interpreted()

    def blank(self, device: torch.device) -> Tensor:
        """Return memory for one message."""
        return torch.empty(self.size, dtype=torch.uint8, device=device)

    def partial_views(self, message: Tensor) -> tuple[Tensor, Partial]:
        """Return views of the checksum and the partial inside a message, to be written."""
        checksum, (out, lse) = self.read(message[None])
        return checksum[0], Partial(out[0], lse[0])

    def unpacked(self, message: Tensor) -> tuple[Tensor, Partial]:
        """Return the checksum and the partial of a message, with `out` in the dtype of lse."""
        checksum, (out, lse) = self.partial_views(message)
        return checksum, Partial(out.to(self.lse_dtype), lse)

    def packed(self, checksum: Tensor, partial: Partial) -> Tensor:
        """Return the message of one rank."""
        out = partial.out.to(self.out_dtype).reshape(-1)
        if self.out_dtype == self.lse_dtype:
            return torch.cat((checksum, partial.lse.reshape(-1), out)).view(torch.uint8)
        head = torch.cat((checksum, partial.lse.reshape(-1))).view(torch.uint8)
        padding = head.new_zeros(self.size - head.nbytes - out.nbytes)
        return torch.cat([head, out.view(torch.uint8), padding])

    def read(self, messages: Tensor) -> tuple[Tensor, Partial]:
        """Return the checksums and the partials of several messages, stacked."""
        size = self.lse_dtype.itemsize
        first = 2 * self.lse_dtype.itemsize
        count = math.prod(self.shape[:-1])
        middle = first + count * size
        lse = messages[:, first:middle].view(self.lse_dtype).view(len(messages), *self.shape[:-1])
        out = messages[:, middle : middle + count * self.shape[-1] * self.out_dtype.itemsize].view(self.out_dtype)
        return messages[:, :first].view(self.lse_dtype), Partial(out.view(len(messages), *self.shape), lse)

    def merged_message(self, messages: Tensor) -> Tensor:
        """Return the merge of several messages as one message."""
        checksums, partials = self.read(messages)
        if not use_triton(partials.lse):
            return self.packed(checksums.amax(0), merge_stack(partials))
        message = self.blank(messages.device)
        checksum, partial = self.partial_views(message)
        merge_stacked(partials, partial, checksums=checksums, checksum=checksum)
        return message

    def merged_partial(self, messages: Tensor) -> tuple[Tensor, Partial]:
        """Return the maximum of the checksums and the merge of the partials of several messages."""
        checksums, partials = self.read(messages)
        if not use_triton(partials.lse):
            return checksums.amax(0), merge_stack(partials)
        checksum = checksums.new_empty(2)
        return checksum, merge_stacked(partials, checksums=checksums, checksum=checksum)


class BlankMessage(NamedTuple):
    """Memory for a message of a merge, and views of the checksum and the partial in it. A kernel writes the partial."""

    message: Tensor | None
    checksum: Tensor | None  # None where the merge writes it
    partial: Partial | None


NO_MESSAGE = BlankMessage(None, None, None)
"""Stands for memory that a kernel takes itself."""


def blank_message(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> BlankMessage:
    """Return memory for a message."""
    form = MessageForm(shape, dtype, dtype)
    message = form.blank(device)
    return BlankMessage(message, *form.partial_views(message))


def call_checksum(
    tensors: Sequence[Tensor], call_hash: int, device_counts: Tensor, like: Tensor, into: Tensor | None
) -> Tensor:
    """Return the checksum of a call and of bits of tensors. `device_counts` of its cache begin with the length."""
    fits = len(tensors) <= 2 and sum(x.numel() for x in tensors) <= SUM_ELEMENTS  # one program is faster than PyTorch
    if fits and use_triton(like):
        return launch_checksum(tensors, call_hash, device_counts, MODULUS, like.new_empty(2) if into is None else into)
    if device_counts.device.type == "cpu":
        number: int | Tensor = wrapped(
            call_hash + int(device_counts.tolist()[LENGTH]) + sum(map(digest_on_cpu, tensors))
        )
    else:
        number = sum(map(digest, tensors), start=call_hash + device_counts[LENGTH])
    checksum = checksum_of(number, like)
    return checksum if into is None else into.copy_(checksum)


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
