"""Symmetric memory: GPU memory that all ranks of a host write to, and the merge in one launch that uses it."""

import math
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from attnmesh.comm.topology import agreed_hosts, dist_all_gather_ints
from attnmesh.core.partial import Partial
from attnmesh.kernels.stacked_merge import supports
from attnmesh.kernels.triton_runtime import launch, powers_covering
from attnmesh.mesh.axes import Axis
from attnmesh.runtime.counters import count_messages
from attnmesh.runtime.world import collective_once

BOX_ELEMENTS = 1 << 18
"""Elements of the longest message: 1 MiB of float32."""

MESSAGE_PROGRAM_ROWS = 8
"""Rows of a message that one program sends and merges. It is a choice: more make fewer programs, and fewer flags."""

BOX_FLAGS = BOX_ELEMENTS // MESSAGE_PROGRAM_ROWS
"""Programs of the longest message."""

SYMMETRIC = "torch.distributed._symmetric_memory"
"""Module of PyTorch with symmetric memory, imported where it is used."""

MAX_POLLS = 1 << 26
"""Polls of a flag until a rank counts as lost: half a minute at half a microsecond per poll."""


@dataclass(frozen=True)
class PeerMemory:
    """Memories of all ranks of an axis, to which each rank writes."""

    addresses: Tensor
    """Address of each rank's memory."""
    rank: int
    steps: Tensor
    """Merges so far, counted on the device so that a captured graph counts too."""
    kept: tuple[Any, ...] = ()
    """References that must live as long as the addresses are used."""

    longest = 4 * BOX_ELEMENTS
    """Bytes of the longest message."""

    def merge(
        self, message: Tensor, shape: tuple[int, ...], *, put: bool = True, take: bool = True
    ) -> tuple[Tensor, Partial]:
        """Return the merge of the messages of all ranks, and the maximum of their checksums.

        A launch puts the message into the memories of all ranks, and takes what they put. These are two launches in
        tests alone, where one process plays all ranks: all put first, and then all take.

        A rank with an error sends a message without rows. It does not know how many rows the others merge, so it sends
        the message to every program that they may run.
        """
        numbers = message.view(torch.float32)
        ranks = len(self.addresses)
        rows = math.prod(shape[:-1])
        checksum, out, lse = (numbers.new_empty(size) for size in ((2,), shape, shape[:-1]))
        first, second = powers_covering(shape[-1])
        if put:
            self.steps.add_(1)
        launch(
            "peers",
            "one_shot",
            (-(-rows // MESSAGE_PROGRAM_ROWS) or BOX_FLAGS,),
            message.device,
            message=numbers,
            memories=self.addresses,
            counter=self.steps,
            out=out,
            lse=lse,
            checksum=checksum,
            rank=self.rank,
            ranks=ranks,
            flags=BOX_FLAGS,
            box_size=BOX_ELEMENTS,
            rows=rows,
            value_width=shape[-1],
            max_polls=MAX_POLLS,
            ROWS=MESSAGE_PROGRAM_ROWS,
            V_0=first,
            V_1=second,
            SEND=put,
            RECEIVE=take,
            enable_fp_fusion=False,
        )
        count_messages(ranks - 1, len(message))
        return checksum, Partial(out, lse)


def memory_size(ranks: int) -> int:
    """Return the float32 elements of a rank's memory."""
    return ranks * BOX_FLAGS + 2 * ranks * BOX_ELEMENTS


@collective_once
def agreed_peer_memory(axis: Axis, device: torch.device) -> PeerMemory | None:
    """Return the memories of an axis whose ranks share a host, or None on all ranks. Collective at its first call."""
    if device.type != "cuda" or axis.size == 1:
        return None
    able = len(agreed_hosts(axis)) == 1 and supports(device)
    memory = _allocate(memory_size(axis.size), device) if able else None
    if not _on_all_ranks(memory is not None, axis):
        return None
    try:
        handle = import_module(SYMMETRIC).rendezvous(memory, axis.group)
    except RuntimeError:  # GPUs that do not see each other's memory
        handle = None
    if memory is None or not _on_all_ranks(handle is not None, axis):
        return None
    memory.zero_()
    handle.barrier()  # no rank writes before all have cleared their memory
    addresses = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
    return PeerMemory(addresses, axis.index, torch.zeros(1, dtype=torch.int32, device=device), (memory, handle))


def _allocate(numbers: int, device: torch.device) -> Tensor | None:
    """Return memory that other ranks can map, outside PyTorch's pools; None where there is none."""
    try:
        memory: Tensor = import_module(SYMMETRIC)._SymmetricMemory.empty_strided_p2p(
            (numbers,), (1,), torch.float32, device
        )
        return memory
    except (AttributeError, ImportError, RuntimeError):
        return None


def _on_all_ranks(flag: bool, axis: Axis) -> bool:
    return all(numbers[0] for numbers in dist_all_gather_ints([flag], [axis]))
