"""A rank that others wait for is dead, stopped or cut off: every survivor says which, at what step, along which axis.

Who loses a rank leaves a note in the store that all ranks share, and hangs up on everyone. Whoever waited for it finds
the line dead at once, reads the note, and blames the same rank and not the one that hung up. So all fail within moments
of the first, who fails when a line breaks, or at the deadline.
"""

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from attnmesh.errors import MeshError, RankFailure
from attnmesh.mesh import Axis

GRACE = 2.0
"""Seconds that a rank which was not heard has to leave a note: it may be waiting itself."""

LONGEST = 1e8
"""Seconds below which a deadline is one: three years."""

MOMENT = timedelta(milliseconds=1)
"""So long a rank waits for a message that nobody sends, to hang up."""

_deadline: list[float | None] = [None]

_lines: "WeakSet[Any]" = WeakSet()


def set_deadline(seconds: float | None) -> float | None:
    """Give up a rank that has sent nothing for so long, in every exchange of this process; say what held before.

    None leaves it at what each process group was made with, of gloo half an hour. All ranks set the same.

    >>> before = set_deadline(30.0)
    >>> set_deadline(before)
    30.0
    """
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if seconds is not None and not (number and 0 < seconds < LONGEST):
        fix = "pass seconds, or None for the process groups' own"
        raise MeshError("set_deadline", "more than 0 seconds, or None", repr(seconds), fix)
    before, _deadline[0] = _deadline[0], seconds
    return before


def deadline() -> float | None:
    """What was set, if anything was."""
    return _deadline[0]


def hung_up_with(line: Any) -> None:
    """Have `line.hang_up()` called when a rank is lost."""
    _lines.add(line)


def awaited(work: Any, axis: Axis, step: str, peer: int | None = None) -> None:
    """Wait for a message of a peer, or for a collective, no longer than the deadline.

    On NCCL that is the device's affair, and the process group's own timeout holds: to time it here would stop the host.
    """
    seconds = deadline() if dist.get_backend(axis.group) == "gloo" else None
    with Watched(axis, step, peer):
        work.wait(*() if seconds is None else (timedelta(seconds=seconds),))


def collective(axis: Axis, step: str, call: Any, *arguments: Any) -> None:
    """One of `torch.distributed`'s along an axis, no longer than the deadline."""
    with Watched(axis, step):
        work = call(*arguments, group=axis.group, async_op=True)
    awaited(work, axis, step)


class Watched:
    """What breaks in the block is the loss of a rank: of a peer along the axis, or of any in it."""

    __slots__ = "axis", "peer", "step"

    def __init__(self, axis: Axis, step: str, peer: int | None = None) -> None:
        self.axis, self.step, self.peer = axis, step, peer

    def __enter__(self) -> None:
        """Nothing: messages are short, and this is entered for each."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Tell who is lost, unless nobody is or it has been told."""
        if isinstance(error, RuntimeError) and not isinstance(error, RankFailure):
            raise _lost(self.axis, self.step, self.peer, error) from error


def _lost(axis: Axis, step: str, peer: int | None, error: RuntimeError) -> RankFailure:
    """Find out who is missing, tell the others, and hang up."""
    ranks = dist.get_process_group_ranks(axis.group)
    _leave([])  # here, and blaming nobody yet
    if peer is None:  # a collective does not say whom it missed: all in it have to find that it is broken
        _hang_up()
        missing = _missing([rank for rank in ranks if rank != dist.get_rank()], patient=True)
        _leave(missing)
    else:  # the note first: who finds the line dead reads it
        missing = _missing([ranks[peer]], patient="timed out" in str(error).lower())
        _leave(missing)
        _hang_up()
    why = str(error).splitlines()[0] if str(error) else type(error).__name__
    return RankFailure(missing, step, axis.name, why)


def _missing(ranks: Sequence[int], *, patient: bool) -> list[int]:
    """Of these ranks those that leave no note; or whom they blame, who do. A broken line is news, a late word is not.

    Who has left a note but blames nobody yet is asking others: one that is silent itself is found out meanwhile.
    """
    start = time.monotonic()
    while True:
        notes = {rank: _note(rank) for rank in ranks}
        blamed = sorted({other for note in notes.values() for other in note or []})
        silent = [rank for rank, note in notes.items() if note is None]
        waited = time.monotonic() - start
        if blamed or (silent and (not patient or waited > GRACE)) or waited > 2 * GRACE:
            return blamed or silent or list(ranks)[: len(ranks) == 1]
        time.sleep(0.02)


# --- notes that survivors leave in the store: whom they miss ---


def _note(rank: int) -> list[int] | None:
    """Whom a rank has said to miss, or None if it has said nothing."""
    with suppress(Exception):  # the store may have gone with the rank that kept it
        store = distributed_c10d._get_default_store()
        if store.check([_key(rank)]):
            return [int(other) for other in json.loads(store.get(_key(rank)))]
    return None


def _leave(missing: Sequence[int]) -> None:
    """Say whom this rank misses."""
    with suppress(Exception):
        distributed_c10d._get_default_store().set(_key(dist.get_rank()), json.dumps(list(missing)))


def _key(rank: int) -> str:
    return f"attnmesh lost {rank}"


def _hang_up() -> None:
    """Close all lines of this process: gloo closes a group's when a message does not come in time."""
    for line in list(_lines):
        line.hang_up()
    for group in list(distributed_c10d._world.pg_map):
        if isinstance(group, ProcessGroup) and group.size() > 1 and dist.get_backend(group) == "gloo":
            with suppress(RuntimeError, ValueError):
                group.recv([torch.empty(1)], (group.rank() + 1) % group.size(), 2**30).wait(MOMENT)
