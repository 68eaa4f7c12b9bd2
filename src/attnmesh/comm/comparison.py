"""Comparisons of calls as mailboxes know them: announced before, and what is dropped where calls have differed."""

from collections.abc import Sequence

import torch.distributed as dist

from attnmesh.comm.mailbox_queue import drop_pending_of
from attnmesh.comm.mailboxes import OPEN_MAILBOXES, Mailboxes
from attnmesh.mesh.axes import RankMesh
from attnmesh.runtime.world import cached_per_world


def announce_comparison(mesh: RankMesh) -> None:
    """Tell the mesh that this rank begins to compare its call. Ranks that wait for another call's message learn it."""
    for mailboxes in _mailboxes_of(mesh, len(OPEN_MAILBOXES)):
        mailboxes.announce_comparison()


def drop_unreceived(mesh: RankMesh) -> None:
    """Drop the messages that no call has received, between two exchanges of numbers."""
    for mailboxes in _mailboxes_of(mesh, len(OPEN_MAILBOXES)):
        drop_pending_of(mailboxes)
        mailboxes.drop_unreceived()


@cached_per_world(1024)
def _mailboxes_of(mesh: RankMesh, _: int) -> list[Mailboxes]:
    """Return the mailboxes between ranks of the mesh: those of one of its axes, or of all its ranks.

    They are found anew where the process has got more mailboxes: their number is a part of the key.
    """
    lines = [frozenset(dist.get_process_group_ranks(axis.group)) for axis in mesh.axes if axis.group is not None]
    return [boxes for boxes in tuple(OPEN_MAILBOXES) if boxes.ranks in lines or _are_all(boxes.ranks, mesh, lines)]


def _are_all(ranks: frozenset[int], mesh: RankMesh, lines: Sequence[frozenset[int]]) -> bool:
    return len(ranks) == mesh.ranks and all(line <= ranks for line in lines)
