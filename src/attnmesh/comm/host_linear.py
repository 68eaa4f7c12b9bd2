"""Linear layers of one input of few rows, whose outputs the ranks of a host share, as one native call."""

import struct
from collections.abc import Sequence
from functools import partial as partial_of
from threading import RLock
from typing import cast

import torch
from torch import Tensor
from torch.nn import Parameter

from attnmesh.comm.failures import disconnect_and_diagnose
from attnmesh.comm.mailbox_queue import PENDING_MESSAGES, finish_pending_of
from attnmesh.comm.mailboxes import (
    BOX_HEADER_BYTES,
    CHECK_INTERVAL,
    MESSAGE_BYTES,
    CounterWait,
    Mailboxes,
    NativeCall,
    PeerLostError,
)
from attnmesh.comm.mismatch import CallsDifferError
from attnmesh.comm.topology import agreed_axis_mailboxes
from attnmesh.kernels.native.abi import DTYPE_CODES, error_of
from attnmesh.kernels.native.build import library
from attnmesh.mesh.axes import Axis
from attnmesh.runtime.counters import count_messages
from attnmesh.runtime.world import collective_once

LINEAR_CALL, LINEAR_FIXED, LINEAR_LAYER = struct.Struct("2P4q"), struct.Struct("P10q"), struct.Struct("2P3q")
"""Fields of `Linear` in `linear.cpp`: those of each call, those of all calls of the layers, and those of each layer."""

MAX_SHARED_ROWS = {torch.float32: 160, torch.bfloat16: 16, torch.float16: 16}
"""Rows of a call at most, by dtype. On some processors PyTorch multiplies more rows sooner on one rank."""

COLUMN_MULTIPLE = 32
"""Divisor of the columns of a weight: `PAIR` of `vectors.h`, the numbers of two loads, for the widest vectors."""

HALF = MESSAGE_BYTES // 2
"""Bytes of a half of a board."""

TAG_BYTES = 64
"""Bytes before the outputs of a half."""

BOARD_BYTES = HALF - TAG_BYTES
"""Bytes of outputs that a rank writes between two exchanges, at most."""

TAG_ROWS = 256
"""Factor of a call's tag, `number * TAG_ROWS + rows`. It is above the rows of any call, so tags of calls differ."""

DIFFERENT_CALL = -3
"""Code of a native call if rank 0 of the axis has made another call; `DIFFERENT_CALL - r` if rank r has.

Other codes below 0 are of exceptions in C++.
"""

Weights = tuple[Tensor, Tensor | None]
"""Weight, (outputs, columns) in either order of memory, and bias of a layer."""


def memory_of(weight: Tensor, bias: Tensor | None) -> tuple[object, ...]:
    """Return the addresses, shapes, strides and dtypes of a layer's tensors, which a call reads in place."""
    memory = weight.data_ptr(), weight.shape, weight.stride(), weight.dtype
    return memory if bias is None else (*memory, bias.data_ptr(), bias.shape, bias.stride(), bias.dtype)


class LayerBoards:
    """Boards of an axis for the outputs of the layers that its ranks share, of all models. One rank has none."""

    def __init__(self, axis: Axis, mailboxes: Mailboxes | None) -> None:
        self.axis, self.mailboxes = axis, mailboxes
        self.lock = RLock()
        """Lock that a thread holds while the ranks share its step."""
        self.taken = 0
        """Numbers of layers that are in use."""

    @property
    def drops(self) -> int:
        """How often the ranks have dropped messages of calls that differ."""
        return 0 if self.mailboxes is None else self.mailboxes.drops

    def reserve_numbers(self, count: int) -> int:
        """Reserve `count` consecutive numbers that no other layer has, and return the first."""
        self.taken += count
        return self.taken - count


def agreed_layer_boards(axis: Axis) -> LayerBoards | None:
    """Return the boards of an axis, or None if its ranks are not on one host. Collective at its first call."""
    return LayerBoards(axis, None) if axis.size == 1 else _agreed_boards(axis)


@collective_once
def _agreed_boards(axis: Axis) -> LayerBoards | None:
    mailboxes = agreed_axis_mailboxes(axis)
    return None if mailboxes is None else LayerBoards(axis, mailboxes)


class HostLinear:
    """Layers of one input. `number` tells them from all other layers that the ranks of the axis share.

    Collective: the ranks of the axis hold the same weights, and call the same layers with the same inputs in the same
    order.
    """

    def __init__(self, number: int, layers: Sequence[Weights], axis: Axis, mailboxes: Mailboxes | None) -> None:
        self.number, self.layers, self.axis, self.mailboxes = number, layers, axis, mailboxes
        weight, _ = layers[0]
        self.sizes, self.memories = [len(weight) for weight, _ in layers], [memory_of(*layer) for layer in layers]
        self.out_features = sum(self.sizes)
        self.function = cast(NativeCall, library().linear)
        board, spin = 0, 0
        if mailboxes is not None:
            board = mailboxes.start + min(mailboxes.output_boards.values())
            spin = mailboxes.spin
        exchange_fields = BOX_HEADER_BYTES + MESSAGE_BYTES, HALF, axis.size, axis.index, spin, int(CHECK_INTERVAL * 1e9)
        self.fixed_fields = LINEAR_FIXED.pack(
            board, DTYPE_CODES[weight.dtype], weight.shape[1], *exchange_fields, self.out_features, len(layers)
        )
        for weight, bias in layers:
            bias_address = 0 if bias is None else bias.data_ptr()
            transposed = weight.stride(1) != 1
            self.fixed_fields += LINEAR_LAYER.pack(
                weight.data_ptr(), bias_address, len(weight), weight.stride(int(transposed)), transposed
            )

    @staticmethod
    def takes(weight: Tensor, bias: Tensor | None) -> bool:
        """Return whether the native call takes a layer of these weights, as they are."""
        return weight.is_cpu and (bias is None or bias.is_cpu) and HostLinear.would_take(weight, bias)

    @staticmethod
    def would_take(weight: Tensor, bias: Tensor | None) -> bool:
        """Return whether the native call would take these weights on a CPU. One dim of each has the stride 1."""
        tensors = [weight] if bias is None else [weight, bias]
        plain = all(type(x) in (Tensor, Parameter) and 1 in x.stride() for x in tensors)
        alike = bias is None or (bias.dtype == weight.dtype and bias.shape == weight.shape[:1])
        return (
            plain
            and alike
            and weight.dtype in DTYPE_CODES
            and weight.shape[1] % COLUMN_MULTIPLE == 0
            and weight.numel() > 0
        )

    def run(self, x: Tensor) -> Sequence[Tensor]:
        """Return the outputs of each layer for a contiguous input of at most `MAX_SHARED_ROWS`.

        Raise `CallsDifferError` if another rank has called other layers, or these with another number of rows.
        """
        rows = x.numel() // x.shape[-1]
        mailboxes = self.mailboxes
        out = x.new_empty(rows * self.out_features)
        pieces_before = 0 if mailboxes is None else mailboxes.published
        tag = self.number * TAG_ROWS + rows
        threads = torch.get_num_threads()
        fields = LINEAR_CALL.pack(x.data_ptr(), out.data_ptr(), rows, tag, pieces_before, threads) + self.fixed_fields
        code = self.function(fields, 0) if mailboxes is None else self._share(mailboxes, fields, rows, pieces_before)
        if code < 0:
            raise error_of(code)
        count_messages(self.axis.size - 1, 4 * rows * self.out_features // self.axis.size)
        if len(self.sizes) == 1:
            return [out.view(*x.shape[:-1], self.out_features)]
        parts = out.split_with_sizes([rows * size for size in self.sizes])
        return [part.view(*x.shape[:-1], size) for part, size in zip(parts, self.sizes, strict=True)]

    def _share(self, mailboxes: Mailboxes, fields: bytes, rows: int, pieces_before: int) -> int:
        """Compute and exchange the outputs piece by piece. Return what the native call returns."""
        pieces = -(-self.out_features // (self.axis.size * (BOARD_BYTES // 4 // rows)))
        operations_per_piece = self.axis.size + 1
        try:
            if mailboxes.has_left:
                raise mailboxes.error_after_loss(
                    next(member for member in mailboxes.members if member != self.axis.index)
                )
            if PENDING_MESSAGES:
                finish_pending_of(mailboxes)
            code = self.function(fields, 0)
            if 0 <= code < pieces * operations_per_piece:

                def awaited(done: int) -> CounterWait:
                    # The first operation of each piece computes, and waits for no rank.
                    piece, operation = divmod(done, operations_per_piece)
                    member = operation - 1
                    return CounterWait(member, mailboxes.output_boards[member] // 8, pieces_before + piece + 1)

                code = mailboxes.go_on(partial_of(self.function, fields), code, pieces * operations_per_piece, awaited)
        except PeerLostError as error:
            raise disconnect_and_diagnose(self.axis, "sharing a layer", error.peer, error) from error
        if code <= DIFFERENT_CALL:
            raise CallsDifferError(DIFFERENT_CALL - code)
        return code
