"""Merges between ranks of one host as one native call, with operations that are found once for each kind of partial."""

import struct
from collections.abc import Sequence
from ctypes import memmove, string_at
from time import perf_counter
from typing import cast

import torch
from torch import Tensor

from attnmesh.comm.failures import disconnect_and_diagnose
from attnmesh.comm.mailbox_queue import PENDING_MESSAGES, finish_pending_of
from attnmesh.comm.mailboxes import Mailboxes, PeerLostError
from attnmesh.comm.merges import Merge, Pattern
from attnmesh.comm.message import BlankMessage, MessageForm
from attnmesh.comm.mismatch import MODULUS, UNEQUAL_CHECKSUM, CallsDifferError
from attnmesh.comm.topology import agreed_axis_mailboxes, agreed_merge_rounds
from attnmesh.core.partial import Partial
from attnmesh.mesh.axes import Axis
from attnmesh.mesh.reduction_tree import Round
from attnmesh.runtime.counters import current_traffic
from attnmesh.runtime.world import cached_per_world

CHECKSUM = struct.Struct("2f")
"""The checksum of a call, with which a message begins."""

ALIGN_FLOATS = 16
"""Float32 numbers in 64 bytes, PyTorch's tensor alignment."""


class HostMerge:
    """The merge of partials of one form in float32, along an axis whose ranks share a host and the native library."""

    def __init__(self, axis: Axis, form: MessageForm, merge: Merge, mailboxes: Mailboxes) -> None:
        self.axis, self.shape, self.mailboxes = axis, form.shape, mailboxes
        self.rows, self.width = form.sizes
        itemsize = form.lse_dtype.itemsize
        parts = (slice(x.start // itemsize, x.stop // itemsize) for x in form.parts)
        self.checksum_numbers, self.lse_numbers, self.out_numbers = parts
        """Numbers of a message that are its checksum, its lse and its out."""
        self.padding_numbers = -self.out_numbers.start % ALIGN_FLOATS
        """Unused numbers before a message."""
        self.numbers = self.padding_numbers + self.out_numbers.stop
        self.rounds = (
            agreed_merge_rounds(axis, reproducible=False)[axis.index] if merge.pattern is Pattern.ROUNDS else None
        )

    def blank_message(self) -> BlankMessage:
        """Return memory for a message. `run` writes its checksum.

        `out` begins at a multiple of 64 bytes, as a tensor of its own does. Elsewhere a product of matrices may round
        differently: two ranks would go on with different bits.
        """
        message = torch.empty(self.numbers, dtype=torch.float32, device="cpu")[self.padding_numbers :]
        out = message[self.out_numbers].view(self.shape)
        lse = message[self.lse_numbers].view(self.shape[:-1])
        return BlankMessage(message, None, Partial(out, lse))

    def heads_of_output(self, output: str) -> slice | None:
        """Return this rank's share of the heads, or None for all."""
        return self.axis.slice_of(self.shape[1]) if output == "heads" else None

    def run(self, message: Tensor, digest: int) -> bool:
        """Merge the messages of all ranks in place. Return whether the digests of their calls are equal."""
        digest %= MODULUS
        start = message.data_ptr()
        memmove(start, CHECKSUM.pack(digest, -digest), CHECKSUM.size)
        traffic = current_traffic.get()
        began = perf_counter()
        try:
            merge_in_host(message, self.rows, self.width, self.axis, self.mailboxes, self.rounds)
            if traffic is not None:
                traffic.merges.append(perf_counter() - began)
        except CallsDifferError:  # of a peer that compares its call: the caller sees unequal calls, and compares too
            message[self.checksum_numbers] = UNEQUAL_CHECKSUM
            return False
        first, second = cast(tuple[float, float], CHECKSUM.unpack(string_at(start, CHECKSUM.size)))
        return first + second == 0


@cached_per_world(1024)
def agreed_host_merge(axis: Axis, shape: tuple[int, ...], merge: Merge) -> HostMerge | None:
    """Return the merge of float32 partials of this shape, or None if one native call cannot do it.

    Collective at its first call along an axis. The bound is safe: a result made anew sends nothing, as
    `agreed_axis_mailboxes` keeps what it found.
    """
    mailboxes = agreed_axis_mailboxes(axis)
    form = MessageForm(shape, torch.float32, torch.float32)
    if mailboxes is None or not form.fits_native or merge.pattern is None:
        return None
    return HostMerge(axis, form, merge, mailboxes)


def merge_in_host(
    message: Tensor, rows: int, width: int, axis: Axis, mailboxes: Mailboxes, own_rounds: Sequence[Round] | None
) -> None:
    """Merge with ranks of this host in one native call, in place: by `own_rounds` of a tree, or all at once if None."""
    try:
        if PENDING_MESSAGES:
            finish_pending_of(mailboxes)
        if own_rounds is None:
            mailboxes.merge_at_once(message, rows, width)
        else:
            mailboxes.merge_in_rounds(message, own_rounds, rows, width)
    except PeerLostError as error:
        raise disconnect_and_diagnose(axis, "merging", error.peer, error) from error
    if (traffic := current_traffic.get()) is not None:  # `count_messages`, inlined: hot path
        traffic.bytes += message.nbytes * (axis.size - 1 if own_rounds is None else len(own_rounds))
