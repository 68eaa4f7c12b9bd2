"""Numbers and texts of all ranks of a mesh by shard, as CPUs hold them, and word that a rank compares its call."""

from collections.abc import Sequence
from itertools import chain

import torch
import torch.distributed as dist

from attnmesh.comm.mailbox_queue import drop_pending_of
from attnmesh.comm.mailboxes import MAILBOXES_OF_MESHES, OPEN_MAILBOXES, Mailboxes
from attnmesh.comm.topology import agreed_mesh_hosts
from attnmesh.comm.transport import Transport, agreed_transport
from attnmesh.mesh.axes import Axis, RankMesh, agreed_flat_axis
from attnmesh.mesh.shapes import AXES
from attnmesh.runtime.world import collective_once


def all_gather_ints(numbers: Sequence[int], mesh: RankMesh) -> list[list[int]]:
    """Return the int64 values of all ranks of a mesh by shard. Inside a host `dist_all_gather_ints` takes longer.

    Collective. The first call also makes the transports of the axes, by exchanges that later calls do not have.
    """
    flat = [*numbers]
    for transport in _agreed_transports(mesh):
        flat = list(chain.from_iterable(transport.all_gather_ints(flat)))
    return [flat[start : start + len(numbers)] for start in range(0, len(flat), len(numbers))]


def all_gather_texts(text: str, mesh: RankMesh) -> list[str]:
    """Return the texts of all ranks by shard. A text may be a path that no encoding has."""
    encoded = text.encode(errors="backslashreplace")
    lengths = [numbers[0] for numbers in all_gather_ints([len(encoded)], mesh)]
    padded = [*encoded, *[0] * (max(lengths) - len(encoded))]
    codes = all_gather_ints(padded, mesh)
    return [bytes(code[:length]).decode() for code, length in zip(codes, lengths, strict=True)]


@collective_once
def agreed_flat_mesh(mesh: RankMesh) -> tuple[RankMesh, tuple[int, ...]]:
    """Return a mesh of all ranks along one axis, and the shard of each. Collective at its first call."""
    long = [axis for axis in mesh.axes if axis.size > 1]
    axis = long[0] if len(long) == 1 else agreed_flat_axis(mesh.device_mesh, AXES)
    indices = [index for (index,) in all_gather_ints([axis.index], mesh)]  # one for each shard
    return RankMesh(Axis(), axis, Axis()), tuple(sorted(range(len(indices)), key=indices.__getitem__))


@collective_once
def _agreed_transports(mesh: RankMesh) -> list[Transport]:
    """Return the transports along the axes of several ranks, the innermost first."""
    agreed_mesh_hosts(mesh)  # found now: after a failure nobody can ask lost ranks for their hosts
    return [agreed_transport(axis, torch.device("cpu")) for axis in reversed(mesh.axes) if axis.size > 1]


def announce_comparison(mesh: RankMesh) -> None:
    """Tell peers, in mailboxes, that this rank compares its call.

    If rank A compares its call while rank B waits in a merge for a message of A, that message never comes. B sees what
    A has published, raises `CallsDifferError`, and compares too.
    """
    for mailboxes in _mailboxes_of(mesh):
        mailboxes.announce_comparison()


def drop_unreceived(mesh: RankMesh) -> None:
    """Drop all messages that no call has received. Ranks call it between two exchanges of numbers: none sends then."""
    for mailboxes in _mailboxes_of(mesh):
        drop_pending_of(mailboxes)
        mailboxes.drop_unreceived()


def _mailboxes_of(mesh: RankMesh) -> Sequence[Mailboxes]:
    """Return the open mailboxes between ranks of the mesh: of one of its axes, or of all its ranks."""
    if (known := MAILBOXES_OF_MESHES.get(mesh)) is not None:
        return known
    lines = [frozenset(dist.get_process_group_ranks(axis.group)) for axis in mesh.axes if axis.group is not None]
    found = [boxes for boxes in tuple(OPEN_MAILBOXES) if boxes.ranks in lines or _are_all(boxes.ranks, mesh, lines)]
    return MAILBOXES_OF_MESHES.keep(mesh, found)


def _are_all(ranks: frozenset[int], mesh: RankMesh, lines: Sequence[frozenset[int]]) -> bool:
    return len(ranks) == mesh.ranks and all(line <= ranks for line in lines)
