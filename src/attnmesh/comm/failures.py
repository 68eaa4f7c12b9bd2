"""A rank that others wait for is dead, stopped or cut off: every survivor says which, at what step, along which axis.

Who loses a rank leaves a note in the store that all ranks share, and hangs up on everyone. Whoever waited for it finds
the line dead at once, reads the note, and blames the same rank and not the one that hung up. So all fail within moments
of the first, who fails when a line breaks, or at the deadline.

        host 0   rank 0   waits for rank 2 ... deadline: leaves "here", hangs up, asks for notes ... "2 and 3 are lost"
                 rank 1   waits for rank 0 .......... a dead line: leaves "here", asks rank 0 ...... "2 and 3 are lost"
                                                        |  the line between hosts is cut
        host 1   rank 2   waits for rank 0 ... deadline: hangs up, cannot reach the store ......... "0 and 1 are lost"
                 rank 3   waits for rank 2 .......... a dead line, cannot reach the store ......... "0 and 1 are lost"

A host of which nobody leaves a note is lost as a whole. Who cannot reach the store is cut off from where it is kept:
from the first rank, and from all on its host.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from secrets import randbits
from threading import Thread
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from attnmesh.errors import MeshError, RankFailure
from attnmesh.mesh.axes import Axis, backends

GRACE_PERIOD = 2.0
"""Seconds that a rank which was not heard has to leave a note, as it may be waiting itself; and the store to answer."""

LONGEST = 1e8
"""Seconds below which a deadline is one: three years."""

MOMENT = timedelta(milliseconds=1)
"""So long a rank waits for a message that nobody sends, to hang up."""

_deadline: list[float | None] = [None]

_lines: "WeakSet[Any]" = WeakSet()

_processes: "dict[int, Process]" = {}


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


class Process(NamedTuple):
    """Where a rank runs: a number of its host, and one of its own, which no other job's has."""

    host: int
    number: int


@lru_cache
def own_number() -> int:
    """This process's own number."""
    return randbits(62)


def introduce(processes: Mapping[int, Process]) -> None:
    """Tell whose notes are to be believed, and who stands beside whom, by ranks of the world."""
    _processes.update(processes)


def part() -> None:
    """Forget who the ranks were: their numbers are another world's now."""
    _processes.clear()


def awaited(work: Any, kind: str, axis: Axis, step: str, peer: int | None = None) -> None:
    """Wait for a message of a peer, or for a collective, on such devices, no longer than the deadline.

    On NCCL that is the device's affair, and the process group's own timeout holds: to time it here would stop the host.
    """
    seconds = deadline() if axis.group is None or backends(axis.group)[kind] == "gloo" else None
    with Watched(axis, step, peer):
        work.wait(*() if seconds is None else (timedelta(seconds=seconds),))


def collective(axis: Axis, step: str, call: Any, *arguments: Any) -> None:
    """One of `torch.distributed`'s along an axis, no longer than the deadline."""
    with Watched(axis, step):
        work = call(*arguments, group=axis.group, async_op=True)
    kind = next(x.device.type for x in arguments if isinstance(x, torch.Tensor))
    awaited(work, kind, axis, step)


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
    asked = [rank for rank in ranks if rank != dist.get_rank()] if peer is None else [ranks[peer]]
    late = peer is None or "timed out" in str(error).lower()  # a line that breaks tells who is lost, or has hung up
    heard = _leave([])  # here, and blaming nobody yet
    _hang_up()  # all have to find that something is broken, to say that they are there
    missing = _missing(asked, late=late) if heard else _out_of_reach(asked)
    if heard:
        _leave(missing)
    if dist.get_rank() == 0:
        _go_last(missing)
    why = str(error).splitlines()[0] if str(error) else type(error).__name__
    return RankFailure(missing, step, axis.name, why)


def _missing(ranks: Sequence[int], *, late: bool) -> list[int]:
    """Of these ranks those that leave no note; or whom those blame who do, on their hosts.

    A line that breaks says more than a late word, but not at once: of a rank that has waited in vain, gloo breaks all
    lines before it can leave its note. Who has left one but blames nobody yet is asking others: one that is silent
    itself is found out meanwhile.
    """
    start, patience = time.monotonic(), GRACE_PERIOD if late else GRACE_PERIOD / 2
    while (notes := _notes(_beside(ranks))) is not None:
        blamed = sorted({other for note in notes.values() for other in note or []})
        silent = [rank for rank in ranks if notes[rank] is None]
        waited = time.monotonic() - start
        if blamed:
            return blamed
        if silent and waited > patience:
            return _with_hosts(silent, notes) if late else silent
        if waited > 2 * GRACE_PERIOD:
            return _only(ranks)
        time.sleep(0.02)
    return _out_of_reach(ranks)


def _with_hosts(silent: Sequence[int], notes: Mapping[int, list[int] | None]) -> list[int]:
    """These ranks, and the whole of hosts on which all are silent."""
    hosts = [_beside([rank]) for rank in silent]
    return sorted({*silent, *(rank for host in hosts if all(notes[x] is None for x in host) for rank in host)})


def _go_last(missing: Sequence[int]) -> None:
    """The first rank may keep the store, which goes with it: others have read it once they say whom they miss."""
    others = [rank for rank in range(1, dist.get_world_size()) if rank not in missing]
    end = time.monotonic() + GRACE_PERIOD
    while time.monotonic() < end and (notes := _notes(others)) is not None and not all(notes.values()):
        time.sleep(0.02)


def _only(ranks: Sequence[int]) -> list[int]:
    """The one to blame; of several nobody can tell which."""
    return list(ranks) if len(ranks) == 1 else []


def _out_of_reach(ranks: Sequence[int]) -> list[int]:
    """Whom to blame without the store: the first rank, where it is kept, with all on its host if that is another."""
    keepers, here = _beside([0]), dist.get_rank()
    if here == 0:
        return _only(ranks)
    return [0] if here in keepers else keepers


def _beside(ranks: Sequence[int]) -> list[int]:
    """These ranks, and those that are known to stand on the same hosts."""
    known = {rank: process.host for rank, process in _processes.items() if rank < dist.get_world_size()}
    hosts = {known[rank] for rank in ranks if rank in known}
    return sorted({*ranks, *(rank for rank, host in known.items() if host in hosts)})


# --- notes that survivors leave in the store: whom they miss ---


def _notes(ranks: Sequence[int]) -> dict[int, list[int] | None] | None:
    """Whom these ranks have said to miss, None for one that has said nothing; None if nobody can be asked."""

    def read(store: Any) -> dict[int, list[int] | None]:
        keys = {rank: _key(rank, _processes[rank].number if rank in _processes else None) for rank in ranks}
        return {rank: json.loads(store.get(key)) if store.check([key]) else None for rank, key in keys.items()}

    return _asked(read)  # type: ignore[no-any-return]


def _leave(missing: Sequence[int]) -> bool:
    """Say whom this rank misses, to those who know it and to those who do not yet; whether it has been heard."""
    keys = [_key(dist.get_rank(), number) for number in (None, own_number())]

    def write(store: Any) -> bool:
        for key in keys:
            store.set(key, json.dumps(list(missing)))
        return bool(store.check(keys))  # that a line takes what is written says nothing

    return _asked(write) is True


def _asked(ask: Callable[[Any], Any]) -> Any:
    """What comes of asking the store; None if it has gone, or is out of reach: one would wait for it for minutes."""
    answers: list[Any] = []

    def wait() -> None:
        with suppress(Exception):
            answers.append(ask(distributed_c10d._get_default_store()))

    thread = Thread(target=wait, name="attnmesh asking", daemon=True)
    thread.start()
    thread.join(GRACE_PERIOD)
    return answers[0] if answers else None


def _key(rank: int, number: int | None) -> str:
    """Where a rank's note lies: a rank of another job that has strayed to this store has another number."""
    return f"attnmesh lost {rank}" if number is None else f"attnmesh lost {rank} {number}"


def _hang_up() -> None:
    """Close all lines of this process: gloo closes a group's when a message does not come in time.

    A line that is dead already closes no other, so each of a group is tried.
    """
    for line in list(_lines):
        line.abort()
    for group in list(distributed_c10d._world.pg_map):
        if isinstance(group, ProcessGroup) and group.size() > 1 and backends(group).get("cpu") == "gloo":
            for peer in (peer for peer in range(group.size()) if peer != group.rank()):
                with suppress(RuntimeError, ValueError):
                    group.recv([torch.empty(1)], peer, 2**30).wait(MOMENT)
