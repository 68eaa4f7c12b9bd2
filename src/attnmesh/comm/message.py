"""Messages of a merge: a partial and a checksum of the call (`comm/mismatch.py`), packed into bytes."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.comm.mailboxes import MESSAGE_BYTES
from attnmesh.core.partial import Partial, merge_stack
from attnmesh.kernels.stacked_merge import merge_stack_on_device, use_triton
from attnmesh.kernels.triton_runtime import interpreted


@dataclass(frozen=True)
class MessageForm:
    """Form of a message of bytes: (checksum, lse, out), the checksum in the dtype of lse.

    A message is (bytes,) of uint8, several are (messages, bytes). A checksum is (2,), and several are (messages, 2).
    """

    shape: tuple[int, ...]
    """Shape of out, (batch, heads, queries, value_dim). That of lse has no `value_dim`."""
    lse_dtype: torch.dtype
    out_dtype: torch.dtype

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows of out, which are the numbers of lse, and columns of out."""
        return math.prod(self.shape[:-1]), self.shape[-1]

    @cached_property
    def parts(self) -> tuple[slice, slice, slice]:
        """Bytes of the checksum, of lse and of out in a message."""
        rows, width = self.sizes
        first = 2 * self.lse_dtype.itemsize
        middle = first + rows * self.lse_dtype.itemsize
        start = _rounded_up(middle, self.out_dtype.itemsize)  # out is viewed in a dtype that may be wider
        return slice(0, first), slice(first, middle), slice(start, start + rows * width * self.out_dtype.itemsize)

    @cached_property
    def size(self) -> int:
        """Bytes of a message, rounded up to whole numbers in both dtypes: several messages are viewed in each."""
        return _rounded_up(int(self.parts[-1].stop), max(self.lse_dtype.itemsize, self.out_dtype.itemsize))

    @property
    def fits_native(self) -> bool:
        """True for messages that the native library merges through mailboxes: short ones, all in float32."""
        return self.lse_dtype == self.out_dtype == torch.float32 and self.size <= MESSAGE_BYTES and not interpreted()

    def blank(self, device: torch.device) -> Tensor:
        """Return memory for one message."""
        return torch.empty(self.size, dtype=torch.uint8, device=device)

    def partial_views(self, message: Tensor) -> tuple[Tensor, Partial]:
        """Return views of the checksum and the partial inside a message, to be written."""
        checksum, (out, lse) = self.read(message[None])
        return checksum[0], Partial(out[0], lse[0])

    def unpack(self, message: Tensor) -> tuple[Tensor, Partial]:
        """Return the checksum and the partial of a message, with `out` in the dtype of lse."""
        checksum, (out, lse) = self.partial_views(message)
        return checksum, Partial(out.to(self.lse_dtype), lse)

    def pack(self, checksum: Tensor, partial: Partial) -> Tensor:
        """Return the message of one rank."""
        out = partial.out.to(self.out_dtype).reshape(-1)
        if self.out_dtype == self.lse_dtype:
            return torch.cat((checksum, partial.lse.reshape(-1), out)).view(torch.uint8)
        head = torch.cat((checksum, partial.lse.reshape(-1))).view(torch.uint8)
        start, stop = self.parts[-1].start, self.parts[-1].stop
        gap, padding = head.new_zeros(start - head.nbytes), head.new_zeros(self.size - stop)
        return torch.cat([head, gap, out.view(torch.uint8), padding])

    def read(self, messages: Tensor) -> tuple[Tensor, Partial]:
        """Return the checksums and the partials of several messages, stacked."""
        checksum, lse, out = self.parts
        all_lse = messages[:, lse].view(self.lse_dtype).view(len(messages), *self.shape[:-1])
        all_out = messages[:, out].view(self.out_dtype).view(len(messages), *self.shape)
        return messages[:, checksum].view(self.lse_dtype), Partial(all_out, all_lse)

    def merge_to_message(self, messages: Tensor) -> Tensor:
        """Return the merge of several messages as one message."""
        checksums, partials = self.read(messages)
        if not use_triton(partials.lse):
            return self.pack(checksums.amax(0), merge_stack(partials))
        message = self.blank(messages.device)
        checksum, partial = self.partial_views(message)
        merge_stack_on_device(partials, partial, checksums=checksums, checksum=checksum)
        return message

    def merge(self, messages: Tensor) -> tuple[Tensor, Partial]:
        """Return the maximum of the checksums and the merge of the partials of several messages."""
        checksums, partials = self.read(messages)
        if not use_triton(partials.lse):
            return checksums.amax(0), merge_stack(partials)
        checksum = checksums.new_empty(2)
        return checksum, merge_stack_on_device(partials, checksums=checksums, checksum=checksum)


def _rounded_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


class BlankMessage(NamedTuple):
    """Memory for a message of a merge, and views of the checksum and the partial in it. A kernel writes the partial."""

    message: Tensor | None
    checksum: Tensor | None
    """None where the merge writes it."""
    partial: Partial | None


NO_MESSAGE = BlankMessage(None, None, None)
"""Passed where a kernel takes memory itself."""


def blank_message(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> BlankMessage:
    """Return memory for a message."""
    form = MessageForm(shape, dtype, dtype)
    message = form.blank(device)
    return BlankMessage(message, *form.partial_views(message))
