"""Which ranks share a host, and what follows: the tree of merges, and the memory by which they exchange messages."""

import os
import socket
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from secrets import randbits

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from attnmesh import board
from attnmesh.board import Board
from attnmesh.exchange import share
from attnmesh.faults import Process, introduce, own_number
from attnmesh.mesh import Axis, Mesh, remembered
from attnmesh.tree import Round, by_residue, tree


@remembered()  # all ranks ask at once, the first time: none may forget before the others
def rounds(axis: Axis, canonical: bool) -> dict[int, list[Round]]:
    """The tree of an axis; the first time its ranks tell each other where they are."""
    return tree([by_residue(axis.size)] if canonical else hosts(axis))


@remembered()
def mesh_hosts(mesh: Mesh) -> list[int]:
    """For each shard of a mesh a number of its host; the first time its ranks tell each other."""
    return host_numbers(mesh.axes)


@remembered()
def board_of(axis: Axis, device: torch.device) -> Board | None:
    """The memory that this rank shares with others of its host; all ranks of the axis ask at the same time.

    The first rank of each host makes it. All tell whether they have it, and if one of a host has not, none uses it.
    """
    if device.type != "cpu" or axis.size == 1:
        return None
    members = next(host for host in hosts(axis) if axis.index in host)
    size, new = board.size_of(len(members)), axis.index == members[0]
    name = randbits(63)
    memory = board.opened(name, size, new=True) if size and new else None
    names = [row[0] for row in share([name], [axis])]
    name = names[members[0]]
    if size and not new:
        memory = board.opened(name, size, new=False)
    space = _number(Path("/proc/self/ns/pid"))
    said = share([memory is not None, os.getpid(), space], [axis])
    if new and size:
        board.forget(name)
    if memory is None or not all(said[rank][0] for rank in members):
        return None
    processes = [said[rank][1] if said[rank][2] == space else 0 for rank in members]
    cold = board.COLD if len(members) == axis.size else board.COLD_BESIDE_SOCKETS
    return Board(memory, members, axis.index, processes, _patience(axis, device), cold)


def _patience(axis: Axis, device: torch.device) -> float:
    """Seconds that the process group waits for a rank."""
    try:
        return float(axis.group._get_backend(device).options._timeout.total_seconds())  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):
        return default_pg_timeout.total_seconds()


def _number(file: Path) -> int:
    return os.stat(file).st_ino if file.exists() else 0


@remembered()
def hosts(axis: Axis) -> list[list[int]]:
    """The ranks of each host; the first time its ranks tell each other."""
    said = host_numbers([axis])
    return [[rank for rank, other in enumerate(said) if other == host] for host in dict.fromkeys(said)]


def host_numbers(axes: Sequence[Axis]) -> list[int]:
    """For each shard a number of its host, which is a name and a network of its own. All ranks ask at once."""
    name = f"{socket.gethostname()} {_number(Path('/proc/self/ns/net'))}"
    number = int.from_bytes(blake2b(name.encode(), digest_size=7).digest())
    rank = dist.get_rank() if any(axis.group is not None for axis in axes) else 0
    said = share([number, rank, own_number()], axes)
    introduce({rank: Process(host, number) for host, rank, number in said})
    return [host for host, *_ in said]
