"""Failures of ranks: every survivor raises the same `RankFailure`, which names the ranks, the step and the axis.

Rank A loses rank C: A leaves a note with C's number in the store that all ranks share, and closes its connections.
Rank B, which waits for A, finds a broken connection at once. B reads A's note, and so names C and not A.

If no rank of a host leaves a note, the whole host is lost. A rank that cannot reach the store has lost rank 0, which
keeps the store, and all ranks on the host of rank 0.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from attnmesh.comm.mailbox_queue import PENDING_MESSAGES, moved_by_thread
from attnmesh.comm.mailboxes import OPEN_MAILBOXES
from attnmesh.errors import MeshError, RankFailure
from attnmesh.mesh.axes import Axis, backends
from attnmesh.runtime.world import WORLD

GRACE_PERIOD = 2.0
"""Seconds in which a silent rank may leave a note, as it may be waiting itself; and in which the store may answer.

Survivors wait for notes twice as long at most: docs/faults.md says that they raise within five seconds.
"""

MAX_DEADLINE = 1e8
"""Seconds below which a deadline is accepted: three years."""

INSTANT = timedelta(milliseconds=1)
"""Timeout of a receive that nobody answers, which makes gloo close its connections."""


def set_deadline(seconds: float | None) -> float | None:
    """Set the timeout of every exchange of this process, and return the previous one.

    Args:
        seconds: Seconds after which a silent rank counts as lost. None leaves the timeouts to the process groups, half
            an hour for gloo. All ranks set the same.

    Returns:
        The deadline that held before.

    Raises:
        MeshError: `seconds` is no positive number.

    >>> before = set_deadline(30.0)
    >>> set_deadline(before)
    30.0
    """
    if seconds is not None and not is_timeout(seconds):
        fix = "pass seconds, or None for the process groups' own"
        raise MeshError("set_deadline", "more than 0 seconds, or None", repr(seconds), fix)
    before, WORLD.deadline = WORLD.deadline, seconds
    return before


def is_timeout(seconds: object) -> bool:
    """Return True for a number of seconds above 0 and below `MAX_DEADLINE`."""
    return isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and 0 < seconds < MAX_DEADLINE


def wait_for(work: Any, device_type: str, axis: Axis, activity: str, peer: int | None = None) -> None:
    """Wait for a message or a collective on devices of this type, until the deadline at most.

    NCCL keeps the timeout of its process group: a deadline here would block the host.
    """
    seconds = WORLD.deadline if axis.group is None or backends(axis.group)[device_type] == "gloo" else None
    try:
        with moved_by_thread() if PENDING_MESSAGES else nullcontext():
            work.wait(*() if seconds is None else (timedelta(seconds=seconds),))
    except RuntimeError as error:
        raise disconnect_and_diagnose(axis, activity, peer, error) from error


def run_collective(axis: Axis, activity: str, op: Any, *arguments: Any) -> None:
    """Run a collective of `torch.distributed` along an axis, until the deadline at most."""
    try:
        work = op(*arguments, group=axis.group, async_op=True)
    except RuntimeError as error:
        raise disconnect_and_diagnose(axis, activity, None, error) from error
    device_type = "cpu"
    for x in arguments:
        device_type = x.device.type if isinstance(x, torch.Tensor) else device_type
    wait_for(work, device_type, axis, activity)


def disconnect_and_diagnose(axis: Axis, activity: str, peer: int | None, error: RuntimeError) -> RankFailure:
    """Leave a note, close the connections, wait for the notes of others, and return the failure of an exchange.

    `error` is the error of the exchange. `peer` is the index along the axis of the rank that it waited for, or None for
    all ranks of the axis.
    """
    ranks = dist.get_process_group_ranks(axis.group)
    suspects = [rank for rank in ranks if rank != dist.get_rank()] if peer is None else [ranks[peer]]
    # If nothing was late, a connection broke: the peer is lost, or has closed it.
    late = peer is None or "timed out" in str(error).lower()
    why = str(error).splitlines()[0] if str(error) else type(error).__name__
    _report(suspects, activity, axis, why)
    reachable = _leave_note([])  # alive, and no suspicion yet
    _close_connections()  # so that all ranks find an error and leave notes
    missing = _missing(suspects, late=late) if reachable else _cut_off(suspects)
    if reachable:
        _leave_note(missing)
    if dist.get_rank() == 0:
        _outlast_readers(missing)
    return RankFailure(missing, activity, axis.name, why + _likely_cause(late, dist.get_rank() in missing))


def _likely_cause(late: bool, is_this_rank: bool) -> str:
    """Return what may have made a rank late, to end the text of its own error, or of a rank that waited for it."""
    compiler: Any = sys.modules.get("torch._dynamo.utils")
    cause = "; the other ranks had given this one up at their deadline" if is_this_rank else ""
    if (late or is_this_rank) and compiler is not None and compiler.counters["stats"]:
        cause += "; compilation by torch.compile may take longer than the deadline, see set_deadline"
    return cause


def _report(suspects: Sequence[int], activity: str, axis: Axis, why: str) -> None:
    """Print the first failure of this rank, before it closes its connections.

    After that the others may end at once with an error of the backend, as in a barrier, and torchrun ends this rank
    before its own error is printed.
    """
    if not WORLD.has_failed:
        WORLD.has_failed = True
        peers = f"rank{'s' * (len(suspects) > 1)} {', '.join(map(str, suspects))}"
        where, advice = f"along the {axis.name} axis, {activity}: {why}", "Ranks that work all have to make this call."
        print(f"attnmesh: rank {dist.get_rank()} waited for {peers} {where}. {advice}", file=sys.stderr, flush=True)


def _missing(ranks: Sequence[int], *, late: bool) -> list[int]:
    """Return the lost ranks, by the notes of the suspected `ranks` and of the other ranks of their hosts.

        notes                                                lost ranks
        some name ranks                                      those named
        a suspect has left none by the end of the period     the suspect; if `late`, also hosts without any note
        all have left one, but without names                 the only suspect; nobody if there are several
        none can be read                                     by `_cut_off`

    A rank whose note has no names is still reading notes. The period is shorter for a broken connection, which proves
    more than a late message. It is not 0: gloo breaks the connections of a rank that timed out before its note is left.
    """
    start = time.monotonic()
    timeout = GRACE_PERIOD if late else GRACE_PERIOD / 2
    while (notes := _notes(_with_neighbours(ranks))) is not None:
        lost = sorted({other for note in notes.values() for other in note or []})
        silent = [rank for rank in ranks if notes[rank] is None]
        waited = time.monotonic() - start
        if lost:
            return lost
        if silent and waited > timeout:
            return _with_hosts(silent, notes) if late else silent
        if waited > 2 * GRACE_PERIOD:
            return _only_suspect(ranks)
        time.sleep(0.02)
    return _cut_off(ranks)


def _with_hosts(silent: Sequence[int], notes: Mapping[int, list[int] | None]) -> list[int]:
    """Return these ranks, and all ranks of hosts on which every rank is silent."""
    hosts = [_with_neighbours([rank]) for rank in silent]
    return sorted({*silent, *(rank for host in hosts if all(notes[x] is None for x in host) for rank in host)})


def _outlast_readers(missing: Sequence[int]) -> None:
    """Wait until the others have named the missing ranks. Rank 0 calls it: the store may end with its process."""
    survivors = [rank for rank in range(1, dist.get_world_size()) if rank not in missing]
    end = time.monotonic() + GRACE_PERIOD
    while time.monotonic() < end and (notes := _notes(survivors)) is not None and not all(notes.values()):
        time.sleep(0.02)


def _cut_off(ranks: Sequence[int]) -> list[int]:
    """Return the missing ranks where the store is out of reach.

    Rank 0, which keeps it, names the only suspect. The ranks of its host name rank 0; all others name the whole host.
    """
    keepers = _with_neighbours([0])
    rank = dist.get_rank()
    if rank == 0:
        return _only_suspect(ranks)
    return [0] if rank in keepers else keepers


def _only_suspect(ranks: Sequence[int]) -> list[int]:
    """Return the only suspect; nothing if there are several."""
    return list(ranks) if len(ranks) == 1 else []


def _with_neighbours(ranks: Sequence[int]) -> list[int]:
    """Return these ranks, and the ranks that are known to share a host with one of them."""
    host_of = {rank: process.host for rank, process in WORLD.processes.items() if rank < dist.get_world_size()}
    hosts = {host_of[rank] for rank in ranks if rank in host_of}
    return sorted({*ranks, *(rank for rank, host in host_of.items() if host in hosts)})


def _notes(ranks: Sequence[int]) -> dict[int, list[int] | None] | None:
    """Return, by rank, the ranks that its note names; None without a note. Return None if no store is in reach."""

    def read(store: Any) -> dict[int, list[int] | None]:
        random_ids = {rank: process.random_id for rank, process in WORLD.processes.items()}
        keys = {rank: _key(rank, random_ids.get(rank)) for rank in ranks}
        return {rank: json.loads(store.get(key)) if store.check([key]) else None for rank, key in keys.items()}

    return _within_grace(read)  # type: ignore[no-any-return]


def _leave_note(missing: Sequence[int]) -> bool:
    """Write the ranks that this rank misses. Return whether the store has them."""
    keys = [_key(dist.get_rank(), known) for known in (None, WORLD.random_id)]  # readers may know this process, or not

    def write(store: Any) -> bool:
        for key in keys:
            store.set(key, json.dumps(list(missing)))
        return bool(store.check(keys))  # a connection may accept what never arrives

    return _within_grace(write) is True


def _within_grace(ask: Callable[[Any], Any]) -> Any:
    """Return what `ask` returns of the store, or None after the grace period: a lost store blocks for minutes."""
    answers: list[Any] = []

    def wait() -> None:
        with suppress(Exception):
            answers.append(ask(distributed_c10d._get_default_store()))

    thread = Thread(target=wait, name="attnmesh notes", daemon=True)
    thread.start()
    thread.join(GRACE_PERIOD)
    return answers[0] if answers else None


def _key(rank: int, random_id: int | None) -> str:
    """Return the key of a rank's note. `random_id` tells it from the note of another job that reached this store."""
    return f"attnmesh lost {rank}" if random_id is None else f"attnmesh lost {rank} {random_id}"


def _close_connections() -> None:
    """Close all connections of this process. Gloo closes those of a group when a receive times out.

    A connection that is broken already closes no other, so one receive is posted to each peer of each group.
    """
    for mailboxes in list(OPEN_MAILBOXES):
        mailboxes.abort()
    for group in list(distributed_c10d._world.pg_map):
        if isinstance(group, ProcessGroup) and group.size() > 1 and backends(group).get("cpu") == "gloo":
            for peer in (peer for peer in range(group.size()) if peer != group.rank()):
                with suppress(RuntimeError, ValueError):
                    group.recv([torch.empty(1, device="cpu")], peer, 2**30).wait(INSTANT)
