"""Memory of each GPU that the other ranks of its host may write to, and the merge that takes one launch by it."""

import math
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from attnmesh.comm.counters import count_messages
from attnmesh.comm.p2p import all_gather_ints
from attnmesh.comm.topology import hosts
from attnmesh.core.partial import Partial
from attnmesh.kernels.merge import supports
from attnmesh.kernels.triton_runtime import launch, parts
from attnmesh.mesh.axes import Axis
from attnmesh.mesh.world import cached_per_world

ROOM = 1 << 18
"""Numbers of the longest message: 1 MiB."""

ROWS = 8
"""Rows of a program."""

FLAGS = ROOM // ROWS
"""Programs of the longest message there can be."""

TIMEOUT = 1 << 26
"""Looks at a flag until a rank is given up: half a minute, if a look takes half a microsecond."""


@dataclass(frozen=True)
class SymmetricMemory:
    """The memories of all ranks of an axis, by their addresses; `kept` is what has to live as long."""

    addresses: Tensor
    rank: int
    steps: Tensor  # so far, counted on the device: a captured graph goes on counting
    kept: tuple[Any, ...] = ()

    longest = 4 * ROOM
    """Bytes of a message that fits."""

    def merge(
        self, message: Tensor, shape: tuple[int, ...], *, put: bool = True, take: bool = True
    ) -> tuple[Tensor, Partial]:
        """The messages of all ranks as one partial of that shape, and the maximum of their checksums.

        A message of no rows is that of a rank that cannot go on: it is put for all programs that others may have.
        """
        numbers, ranks, rows = message.view(torch.float32), len(self.addresses), math.prod(shape[:-1])
        checksum, out, lse = (numbers.new_empty(size) for size in ((2,), shape, shape[:-1]))
        first, second = parts(shape[-1])
        if put:
            self.steps.add_(1)
        launch(
            "peers",
            "one_shot",
            (-(-rows // ROWS) or FLAGS,),
            message.device,
            message=numbers,
            memories=self.addresses,
            counter=self.steps,
            out=out,
            lse=lse,
            checksum=checksum,
            rank=self.rank,
            ranks=ranks,
            flags=FLAGS,
            box_size=ROOM,
            rows=rows,
            values=shape[-1],
            max_polls=TIMEOUT,
            ROWS=ROWS,
            V_0=first,
            V_1=second,
            SEND=put,
            RECEIVE=take,
            enable_fp_fusion=False,
        )
        count_messages(ranks - 1, len(message))
        return checksum, Partial(out, lse)


def numbers_of(ranks: int) -> int:
    """How many numbers a rank's memory has room for."""
    return ranks * FLAGS + 2 * ranks * ROOM


@cached_per_world()
def symmetric_memory_of(axis: Axis, device: torch.device) -> SymmetricMemory | None:
    """The memories of an axis whose ranks share a host; all ask at the same time, and if one cannot, none does."""
    if device.type != "cuda" or axis.size == 1:
        return None
    able = len(hosts(axis)) == 1 and supports(device)
    memory = _made(numbers_of(axis.size), device) if able else None
    if not _all(memory is not None, axis, device):
        return None
    try:
        handle = import_module(SYMMETRIC).rendezvous(memory, axis.group)
    except RuntimeError:  # GPUs that do not see each other's memory
        handle = None
    if memory is None or not _all(handle is not None, axis, device):
        return None
    memory.zero_()
    handle.barrier()  # nobody writes before all have cleared theirs
    addresses = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
    return SymmetricMemory(addresses, axis.index, torch.zeros(1, dtype=torch.int32, device=device), (memory, handle))


SYMMETRIC = "torch.distributed._symmetric_memory"


def _made(numbers: int, device: torch.device) -> Tensor | None:
    """Memory that others may be let into, apart from PyTorch's pools; None where there is no such."""
    try:
        made: Tensor = import_module(SYMMETRIC)._SymmetricMemory.empty_strided_p2p(
            (numbers,), (1,), torch.float32, device
        )
        return made
    except (AttributeError, ImportError, RuntimeError):
        return None


def _all(said: bool, axis: Axis, device: torch.device) -> bool:
    return all(row[0] for row in all_gather_ints([said], [axis]))
