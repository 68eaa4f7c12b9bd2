"""Comparisons of calls in mailboxes: they are announced, and messages of calls that differed are dropped."""

from collections.abc import Sequence

import torch.distributed as dist

from attnmesh.comm.mailbox_queue import drop_pending_of
from attnmesh.comm.mailboxes import OPEN_MAILBOXES, Mailboxes
from attnmesh.mesh.axes import RankMesh
from attnmesh.runtime.memo import Memo
from attnmesh.runtime.world import WORLD

MAILBOXES_OF_MESHES = Memo[Sequence[Mailboxes]]()
"""Mailboxes between the ranks of each mesh. Cleared when others are opened, and with the world."""
WORLD.on_close(MAILBOXES_OF_MESHES.clear)


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
