"""Topology: numbers of all ranks, the ranks that share a host, the tree of merges over hosts, and their mailboxes."""

import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from secrets import randbits

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout

from attnmesh.comm.failures import run_collective
from attnmesh.comm.mailboxes import Mailboxes, mailboxes_size, open_mailboxes, unlink_mailboxes
from attnmesh.comm.merges import Merge, fastest_merge
from attnmesh.cost import machine_constants
from attnmesh.cost.cluster import PRESETS, Cluster
from attnmesh.cost.merge_cost import MergeGroup
from attnmesh.kernels.native.build import library
from attnmesh.mesh.axes import Axis, RankMesh, backends, device_type_of
from attnmesh.mesh.reduction_tree import Round, bit_reversed, reduction_rounds
from attnmesh.mesh.shapes import Shape
from attnmesh.runtime.world import WORLD, RankProcess, collective_once


def dist_all_gather_ints(numbers: Sequence[int], axes: Sequence[Axis]) -> list[list[int]]:
    """Return the int64 values of all ranks by shard. `axes` go from the outermost to the innermost. Collective."""
    table = torch.tensor([numbers], dtype=torch.int64, device="cpu")
    for axis in reversed(axes):
        if axis.group is not None:
            tables = [torch.empty_like(table) for _ in range(axis.size)]
            run_collective(agreed_cpu_axis(axis), "comparing calls", dist.all_gather, tables, table)
            table = torch.cat(tables)
    numbers_by_rank: list[list[int]] = table.tolist()
    return numbers_by_rank


@collective_once
def agreed_cpu_axis(axis: Axis) -> Axis:
    """Return the axis with a group that sends tensors of a CPU. Collective at its first call.

    Beside a group of NCCL alone a group of gloo is made. On NCCL, a rank whose peers do not compare would block its
    GPU, and no deadline of attnmesh ends that.
    """
    if axis.group is None or "cpu" in backends(axis.group):
        return axis
    return replace(axis, group=agreed_subgroup(axis, tuple(range(axis.size)), "gloo"))


@collective_once
def agreed_subgroup(axis: Axis, members: tuple[int, ...], backend: str | None = None) -> dist.ProcessGroup:
    """Return a group of some ranks of an axis, and keep it. Collective over the whole axis at its first call.

    PyTorch names the group by its ranks and by the number of groups that the calling rank is in. Rank A, which is in 3
    groups, would name it `g3`. Rank B, in 2, would name it `g2`: they would wait for each other. So B first makes a
    group of itself alone, after which B is in 3 groups too.

    The group is never released. Otherwise the next group could get its name, and ranks would find the old addresses.
    """
    assert axis.group is not None
    group_count = torch.tensor([len(distributed_c10d._world.pg_names)], device=device_type_of(axis.group))
    numbers = [torch.empty_like(group_count) for _ in range(axis.size)]
    run_collective(axis, "counting groups", dist.all_gather, numbers, group_count)
    for _ in range(int(torch.cat(numbers).max() - group_count)):
        dist.new_group([dist.get_rank()], backend=backend, use_local_synchronization=True)
    ranks = [dist.get_global_rank(axis.group, rank) for rank in members]
    group: dist.ProcessGroup = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
    return group


@collective_once
def agreed_merge_rounds(axis: Axis, *, reproducible: bool) -> dict[int, list[Round]]:
    """Return the rounds of an axis' tree by rank. Collective at its first call."""
    return reduction_rounds([bit_reversed(axis.size)] if reproducible else agreed_hosts(axis))


def agreed_mesh_hosts(mesh: RankMesh) -> list[int]:
    """Return for each shard of a mesh the number of its host. Collective at its first call."""
    return agreed_host_numbers(tuple(axis for axis in mesh.axes if axis.size > 1))


@collective_once
def agreed_host_mailboxes(axis: Axis) -> Mailboxes | None:
    """Return the mailboxes of this rank's host, or None. Collective at its first call.

    The first rank of each host makes the memory. If one rank of a host cannot map it, or has no native library, no rank
    of that host uses it.
    """
    if axis.size == 1:
        return None
    members = next(host for host in agreed_hosts(axis) if axis.index in host)
    size = mailboxes_size(len(members))
    is_first = axis.index == members[0]
    number = randbits(63)
    memory = open_mailboxes(number, size, new=True) if size and is_first else None
    try:
        numbers = [payload[0] for payload in dist_all_gather_ints([number], [axis])]
        number = numbers[members[0]]
        if size and not is_first:
            memory = open_mailboxes(number, size, new=False)
        pid_namespace = _inode(Path("/proc/self/ns/pid"))
        payloads = dist_all_gather_ints(
            [memory is not None, os.getpid(), pid_namespace, library().exchange is not None], [axis]
        )
    finally:
        if is_first and size:
            unlink_mailboxes(number)
    if memory is None or not all(payloads[rank][0] and payloads[rank][3] for rank in members):
        return None
    processes = [payloads[rank][1] if payloads[rank][2] == pid_namespace else 0 for rank in members]
    ranks = frozenset(dist.get_process_group_ranks(axis.group))
    return Mailboxes(memory, members, axis.index, processes, _timeout(axis), ranks)


def agreed_axis_mailboxes(axis: Axis) -> Mailboxes | None:
    """Return the mailboxes that connect all ranks of an axis, or None. Collective at its first call."""
    mailboxes = agreed_host_mailboxes(axis)
    return mailboxes if mailboxes is not None and len(mailboxes.members) == axis.size else None


def _timeout(axis: Axis) -> float:
    """Return the timeout in seconds of the axis' group that sends tensors of a CPU."""
    group = agreed_cpu_axis(axis).group
    try:
        return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):
        return default_pg_timeout.total_seconds()


def _inode(file: Path) -> int:
    return os.stat(file).st_ino if file.exists() else 0


@collective_once
def agreed_hosts(axis: Axis) -> list[list[int]]:
    """Return the ranks of an axis by host, hosts in order of their first ranks. Collective at its first call."""
    numbers = agreed_host_numbers((axis,))
    return [[rank for rank, other in enumerate(numbers) if other == host] for host in dict.fromkeys(numbers)]


@collective_once  # by axes: a mesh made of known axes is known on all of its ranks, or on none
def agreed_host_numbers(axes: tuple[Axis, ...]) -> list[int]:
    """Return for each shard the number of its host: a hash of name and network. Collective at its first call.

    The processes of these ranks are kept in `WORLD`, by which failures name them.
    """
    name = f"{socket.gethostname()} {_inode(Path('/proc/self/ns/net'))}"
    host_number = int.from_bytes(blake2b(name.encode(), digest_size=7).digest())
    rank = dist.get_rank() if any(axis.group is not None for axis in axes) else 0
    payloads = dist_all_gather_ints([host_number, rank, WORLD.random_id], axes)
    WORLD.processes.update({rank: RankProcess(host, random_id) for host, rank, random_id in payloads})
    return [host for host, *_ in payloads]


@collective_once
def agreed_cluster_and_tile(mesh: RankMesh, device: torch.device) -> tuple[Cluster, Shape]:
    """Return the cluster that a mesh is on, and the tile that one host holds. Collective at its first call."""
    return machine_constants.cluster_and_tile(agreed_mesh_hosts(mesh), mesh.shape, *_constants(mesh.axes, device))


@collective_once
def agreed_best_merge(axis: Axis, device: torch.device) -> Merge:
    """Return the merge that is predicted to be fastest for short messages. Collective at its first call."""
    ranks_by_host = agreed_hosts(axis)
    ranks_per_host = len(ranks_by_host[0]) if len({len(host) for host in ranks_by_host}) == 1 else 1
    cluster = machine_constants.cluster_of(axis.size // ranks_per_host, ranks_per_host, *_constants((axis,), device))
    return fastest_merge(MergeGroup(axis.size, ranks_per_host), cluster)


def _constants(axes: Sequence[Axis], device: torch.device) -> tuple[Cluster, str, float]:
    """Return the constants that all ranks use, the name of their preset, and the largest share of a host's cores.

    The preset is the first of `PRESETS` that some rank resembles. Its constants are used unless `attnmesh probe` has
    kept measured ones, the same on all ranks. The share is the most that a rank needs of its host's cores.
    """
    names = list(PRESETS)
    measured = machine_constants.measured_machine(device.type)
    own_numbers = [names.index(machine_constants.preset_for(device)), 0 if measured is None else measured[1]]
    payloads = dist_all_gather_ints([*own_numbers, int(1e6 * machine_constants.share_of_cores(device))], axes)
    presets, files, shares = zip(*payloads, strict=True)
    preset = names[min(presets)]
    cluster = measured[0] if measured is not None and len(set(files)) == 1 else Cluster.preset(preset)
    return cluster, preset, max(shares) / 1e6
