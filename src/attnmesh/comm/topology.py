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

from attnmesh.comm import shared_memory
from attnmesh.comm.failures import Process, introduce, own_number
from attnmesh.comm.p2p import all_gather_ints
from attnmesh.comm.shared_memory import Mailboxes
from attnmesh.mesh.axes import Axis, Mesh, cached_per_world
from attnmesh.mesh.reduction_tree import Round, by_residue, tree
from attnmesh.mesh.shapes import Shape
from attnmesh.planner import auto
from attnmesh.planner.cluster import Cluster
from attnmesh.planner.hardware import PRESETS


@cached_per_world()  # all ranks ask at once, the first time: none may forget before the others
def rounds(axis: Axis, canonical: bool) -> dict[int, list[Round]]:
    """The tree of an axis; the first time its ranks tell each other where they are."""
    return tree([by_residue(axis.size)] if canonical else hosts(axis))


@cached_per_world()
def mesh_hosts(mesh: Mesh) -> list[int]:
    """For each shard of a mesh a number of its host; the first time its ranks tell each other."""
    return host_numbers(mesh.axes)


@cached_per_world()
def mailboxes_of(axis: Axis, device: torch.device) -> Mailboxes | None:
    """The memory that this rank shares with others of its host; all ranks of the axis ask at the same time.

    The first rank of each host makes it. All tell whether they have it, and if one of a host has not, none uses it.
    """
    if device.type != "cpu" or axis.size == 1:
        return None
    members = next(host for host in hosts(axis) if axis.index in host)
    size, new = shared_memory.size_of(len(members)), axis.index == members[0]
    name = randbits(63)
    memory = shared_memory.opened(name, size, new=True) if size and new else None
    names = [row[0] for row in all_gather_ints([name], [axis])]
    name = names[members[0]]
    if size and not new:
        memory = shared_memory.opened(name, size, new=False)
    space = _number(Path("/proc/self/ns/pid"))
    said = all_gather_ints([memory is not None, os.getpid(), space], [axis])
    if new and size:
        shared_memory.forget(name)
    if memory is None or not all(said[rank][0] for rank in members):
        return None
    processes = [said[rank][1] if said[rank][2] == space else 0 for rank in members]
    cold = shared_memory.COLD if len(members) == axis.size else shared_memory.COLD_BESIDE_SOCKETS
    return Mailboxes(memory, members, axis.index, processes, _patience(axis, device), cold)


def _patience(axis: Axis, device: torch.device) -> float:
    """Seconds that the process group waits for a rank."""
    try:
        return float(axis.group._get_backend(device).options._timeout.total_seconds())  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):
        return default_pg_timeout.total_seconds()


def _number(file: Path) -> int:
    return os.stat(file).st_ino if file.exists() else 0


@cached_per_world()
def hosts(axis: Axis) -> list[list[int]]:
    """The ranks of each host; the first time its ranks tell each other."""
    said = host_numbers([axis])
    return [[rank for rank, other in enumerate(said) if other == host] for host in dict.fromkeys(said)]


def host_numbers(axes: Sequence[Axis]) -> list[int]:
    """For each shard a number of its host, which is a name and a network of its own. All ranks ask at once."""
    name = f"{socket.gethostname()} {_number(Path('/proc/self/ns/net'))}"
    number = int.from_bytes(blake2b(name.encode(), digest_size=7).digest())
    rank = dist.get_rank() if any(axis.group is not None for axis in axes) else 0
    said = all_gather_ints([number, rank, own_number()], axes)
    introduce({rank: Process(host, number) for host, rank, number in said})
    return [host for host, *_ in said]


@cached_per_world()  # all ranks ask at once, the first time: none may forget before the others
def surroundings(mesh: Mesh, device: torch.device) -> tuple[Cluster, Shape]:
    """Return the cluster that a mesh is on, and the tile of the mesh that one host holds."""
    return auto.cluster_and_tile(mesh_hosts(mesh), mesh.shape, _preset(mesh.axes, device))


@cached_per_world()
def best_merge(axis: Axis, device: torch.device) -> str:
    """Return the fastest merge of short messages along an axis. All ranks call it at once, the first time."""
    found = hosts(axis)
    near = len(found[0]) if len({len(host) for host in found}) == 1 else 1
    return auto.best_merge(axis.size, near, _preset((axis,), device))


def _preset(axes: Sequence[Axis], device: torch.device) -> str:
    """Return the preset that all ranks use: the first, in the table's order, that any rank is like."""
    names = list(PRESETS)
    mine = names.index(auto.preset_for(device))
    return names[min(row[0] for row in all_gather_ints([mine], axes))]
