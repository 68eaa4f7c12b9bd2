"""Mailboxes in shared memory: short messages between ranks of one host, without sockets and without locks.

Each ordered pair of ranks has one box with two counters: messages sent, which the sender alone raises, and messages
received, which the receiver alone raises. The box is empty where both are equal. A rank's box to itself is its board:
all other ranks read what it writes there. Outputs of layers that ranks share have boards of their own, after the boxes.

    rank A    sent == received: writes the message, then raises sent to 1
    rank B    waits for sent to reach 1, reads the message, then raises received to 1
    rank A    waits for received to reach 1 before it writes the next message

A message, a whole merge, or a shared layer is one call of the native library. A rank that waits sleeps until another
wakes it. Ranks use sockets where a rank of the host has no library, where memory cannot be shared, and on processors
that are not in `PROCESSORS`.
"""

import fcntl
import mmap
import os
import platform
import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from enum import IntEnum
from functools import partial as partial_of
from pathlib import Path
from threading import Lock
from time import monotonic, time
from typing import NamedTuple, cast
from weakref import WeakSet

import torch
from torch import Tensor

from attnmesh.comm.mismatch import CallsDifferError
from attnmesh.kernels.native.build import library
from attnmesh.mesh.reduction_tree import Round
from attnmesh.runtime.memo import Memo
from attnmesh.runtime.private_file import open_without_links
from attnmesh.runtime.processes import RunningProcess
from attnmesh.runtime.world import WORLD

MESSAGE_BYTES = 1 << 18
"""Bytes of the longest message. A receiver has room for all of them, also where it expects a shorter message."""

MAX_MEMORY = 1 << 26
"""Bytes of the mailboxes of a host at most."""

BOX_HEADER_BYTES = 128
"""Bytes before a message: one cache line for each counter."""

MAX_MEMBERS = max(
    ranks for ranks in range(64) if ranks * (ranks + 1) * (BOX_HEADER_BYTES + MESSAGE_BYTES) <= MAX_MEMORY
)
"""Ranks of a host at most, 15. Hosts with more ranks use sockets."""

SIZE_WORD = 2
"""Word of a box that holds the bytes of its last message. Word 0 counts the messages that were sent."""

RECEIVED_WORD = 8
"""Word of a box that counts the messages that were received."""

LEFT_WORD = 2
"""Word of a rank's board that is 1 once the rank has lost another one and left."""

COMPARISONS_WORD = 8
"""Word of a rank's board that counts the comparisons of calls which the rank has begun."""

AWAITED_WORD = 9
"""Word of a rank's board that names the counter for which the rank waits: `expected count * WORDS + counter`."""

MAX_WORDS = MAX_MEMORY // 8
"""Words of the mailboxes of a host at most."""

PROCESSORS = ("x86_64", "amd64", "AMD64")
"""Kinds of processors that this was tested on. One sees the stores of another in the order of its program."""

SPIN = 50e-6
"""Seconds that a waiting rank stays awake before it sleeps, where every rank of the host has a core.

More keeps cores busy in longer waits; less adds a system call on either side to more messages. It is a choice: no bench
measures it.
"""

CHECK_INTERVAL = 0.5
"""Seconds between two checks that the other process is alive, and makes the same call."""

FOLDER = Path("/dev/shm")
"""Folder of Linux for memory that processes share by name."""

SECONDS_TO_LOCK = 60.0
"""Seconds between the making of a name and its lock, at most."""

MAX_NUMBERS = MESSAGE_BYTES // 16
"""Numbers of an exchange by the boards at most: half of a board."""

NativeCall = Callable[[bytes, int], int]
"""A native call of packed fields and the number of operations that are done. Returns that number after the call."""

EXCHANGE_FIELDS, OPERATION_FIELDS = struct.Struct("2P6q"), struct.Struct("3q")
"""Fields of `Exchange` and `Op` in `mailbox.cpp`."""


class OperationKind(IntEnum):
    """Work of a native call on a box, as in `mailbox.cpp`."""

    SEND = 0  # put the message into it
    COPY = 1  # take a message
    MERGE = 2  # take a message, and merge it into the own
    AWAIT = 3  # wait for one of many messages that are merged at the end
    OWN = 4  # this rank's own message among these
    TELL = 5  # count what this rank has written on its board
    FULL = 6  # wait until the box has a message
    EMPTY = 7  # wait until the message in the box is received


SEND, COPY, MERGE, AWAIT, OWN, *_ = OperationKind
"""Kinds that merges use, as globals: before Python 3.12 `OperationKind.SEND` takes 0.2 us, several times a step."""

MailboxOperation = tuple[OperationKind, int, int, int]
"""Kind of an operation, the peer that it waits for, the offset of its box, and its count of messages."""


class CounterWait(NamedTuple):
    """A wait of a rank, until a peer has raised a counter to `messages`."""

    peer: int
    counter: int
    """Word of the memory that counts messages."""
    messages: int


class PeerLostError(RuntimeError):
    """A rank that this one waits for does not answer."""

    def __init__(self, peer: int, why: str) -> None:
        super().__init__(why)
        self.peer = peer


class Mailboxes:
    """Boxes of this rank. `members` are the ranks that share the memory, by index of the axis; `index` is this one.

    A receive fails after `timeout` seconds, or when the sender's process ends. `processes` are the process ids of the
    members, or 0 for a process that is not visible from here. `ranks` are those of the axis, by their number in the
    world.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        members: Sequence[int],
        index: int,
        processes: Sequence[int],
        timeout: float,
        ranks: frozenset[int] = frozenset(),
    ) -> None:
        count = len(members)
        size = BOX_HEADER_BYTES + MESSAGE_BYTES
        own_member = list(members).index(index)
        self.members = tuple(members)
        self.index = index
        self.boxes_to = {rank: (own_member * count + member) * size for member, rank in enumerate(members)}
        self.boxes_from = {rank: (member * count + own_member) * size for member, rank in enumerate(members)}
        self.boards = {rank: (member * count + member) * size for member, rank in enumerate(members)}
        self.output_boards = {rank: (count * count + member) * size for member, rank in enumerate(members)}
        """Boards of the outputs of layers."""
        self.words = memoryview(memory).cast("q")
        self.memory = torch.frombuffer(memory, dtype=torch.uint8)
        self.start = self.memory.data_ptr()
        self.sent, self.received = (dict.fromkeys(members, 0) for _ in range(2))
        """Messages of all operations so far, to each member and from it: the next operation waits for these counts."""
        running = (RunningProcess.of(pid) if pid else None for pid in processes)
        self.processes = dict(zip(members, running, strict=True))
        self.timeout = timeout
        self.spin = int(SPIN * 1e9) if len(members) <= len(os.sched_getaffinity(0)) else 0
        self.comparisons = 0
        """Comparisons of calls that this rank has begun with the other members."""
        self.has_left = False
        """True once this rank has lost another one."""
        self.gathers = 0
        """Exchanges of numbers by the boards."""
        self.drops = 0
        """Times that the ranks have dropped messages of calls that differ."""
        self.ranks = ranks
        self.lock = Lock()
        OPEN_MAILBOXES.add(self)
        MAILBOXES_OF_MESHES.clear()

    def holds(self, merge_round: Round) -> bool:
        """Return whether all ranks of a round are members."""
        return merge_round.recv in self.members and all(peer in self.members for peer in merge_round.send)

    def is_ready(self, peer: int, *, sends: bool) -> bool:
        """Return whether the next message to a peer, or from it, would not wait."""
        if sends:
            return bool(self.words[self.boxes_to[peer] // 8 + RECEIVED_WORD] >= self.sent[peer])
        return bool(self.words[self.boxes_from[peer] // 8] > self.received[peer])

    def size_of_next(self, peer: int) -> int:
        """Return the bytes of the message from a peer that is ready."""
        return self.words[self.boxes_from[peer] // 8 + SIZE_WORD]

    def wait(self, peer: int, *, sends: bool, seconds: float, since: float) -> None:
        """Wait until `is_ready`, `seconds` at most. Raise if the peer is lost, or silent since `since` for too long."""
        kind = OperationKind.EMPTY if sends else OperationKind.FULL
        self._run_operations([(kind, peer, *self._next(peer, sends=sends))], max_wait=seconds)
        if not self.is_ready(peer, sends=sends):
            self._check_alive(peer, since)

    def send(self, peer: int, message: Tensor) -> None:
        """Copy a message of bytes into the box to a peer, once the previous one is received."""
        self._run_operations([self._send_operation(peer)], message)

    def recv(self, peer: int, into: Tensor) -> None:
        """Wait for the next message of a peer, and copy it.

        If it has another size than `into`, `UNEQUAL_CHECKSUM` is written instead, or the poison that it carries.
        """
        self._run_operations([self._receive_operation(COPY, peer)], into)

    def all_gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of all members, at most `MAX_NUMBERS` each, in the order of members. Collective.

        The two halves of a board take turns. In exchange 3 rank A writes to the half of exchange 1, which rank B has
        read: A has waited for B's numbers of exchange 2, and B wrote these after it had read those of exchange 1.
        """
        self.gathers += 1
        half = BOX_HEADER_BYTES // 8 + self.gathers % 2 * MAX_NUMBERS
        own_board = self.boards[self.index]
        first = own_board // 8 + half
        self.words[first : first + len(numbers)] = memoryview(array("q", numbers))
        operations = [(OperationKind.TELL, self.index, own_board, self.gathers)]
        for peer, board in self.boards.items():
            if board != own_board:
                operations.append((OperationKind.FULL, peer, board, self.gathers))
        self._run_operations(operations)
        table = []
        for board in self.boards.values():
            start = board // 8 + half
            table.append(self.words[start : start + len(numbers)].tolist())
        return table

    def merge_in_rounds(self, message: Tensor, rounds: Iterable[Round], rows: int, width: int) -> None:
        """Merge a message in float32 with the messages of the other ranks, in place, by the rounds of a tree."""
        operations = []
        for send, recv in rounds:
            operations += [self._send_operation(peer) for peer in send]
            operations.append(self._receive_operation(MERGE, recv))
        self._run_operations(operations, message, rows, width)

    def merge_at_once(self, message: Tensor, rows: int, width: int) -> None:
        """Merge a message in float32 with all members' messages, in place and in the members' order: one exchange."""
        operations = [self._send_operation(peer) for peer in self.members if peer != self.index]
        for peer in self.members:
            operations.append((OWN, peer, 0, 0) if peer == self.index else self._receive_operation(AWAIT, peer))
        self._run_operations(operations, message, rows, width)

    def _next(self, peer: int, *, sends: bool) -> tuple[int, int]:
        """Return the box of the next message to a peer, or from it, and the count of messages that it waits for."""
        return (self.boxes_to[peer], self.sent[peer]) if sends else (self.boxes_from[peer], self.received[peer] + 1)

    def awaited(self, peer: int, *, sends: bool) -> CounterWait:
        """Return what the next message to a peer, or from it, waits for."""
        box, count = self._next(peer, sends=sends)
        return CounterWait(peer, box // 8 + RECEIVED_WORD * sends, count)

    def _send_operation(self, peer: int) -> MailboxOperation:
        """Return the operation that sends the next message to a peer. The message counts as sent."""
        operation = SEND, peer, *self._next(peer, sends=True)
        self.sent[peer] += 1
        return operation

    def _receive_operation(self, kind: OperationKind, peer: int) -> MailboxOperation:
        """Return the operation that receives the next message of a peer. The message counts as received."""
        operation = kind, peer, *self._next(peer, sends=False)
        self.received[peer] += 1
        return operation

    def _run_operations(
        self,
        operations: Sequence[MailboxOperation],
        message: Tensor | None = None,
        rows: int = 0,
        width: int = 0,
        max_wait: float | None = None,
    ) -> None:
        """Perform operations in one native call. `go_on` repeats the call where a wait is long.

        With `max_wait` there is one call, which waits for `max_wait` seconds at most and may leave operations undone.
        """
        if self.has_left:
            raise self.error_after_loss(operations[0][1])
        buffer = (self.start, 0) if message is None else (message.data_ptr(), message.nbytes)
        longest = int((CHECK_INTERVAL if max_wait is None else max_wait) * 1e9)
        fields = EXCHANGE_FIELDS.pack(self.start, *buffer, rows, width, self.spin, longest, len(operations))
        for kind, _, box, count in operations:
            fields += OPERATION_FIELDS.pack(kind, box, count)
        function = cast(NativeCall, library().exchange)
        done = function(fields, 0)
        if done < len(operations) and max_wait is None:

            def awaited(done: int) -> CounterWait:
                kind, peer, box, count = operations[done]
                return CounterWait(peer, box // 8 + RECEIVED_WORD * (kind in (SEND, OperationKind.EMPTY)), count)

            self.go_on(partial_of(function, fields), done, len(operations), awaited)

    def go_on(
        self, function: Callable[[int], int], done: int, count: int, awaited: Callable[[int], CounterWait]
    ) -> int:
        """Call a native function until `count` operations are done, of which `done` are. Return its result.

        The function returns in long waits. Then this rank looks whether the peer that it waits for is alive, and raises
        `CallsDifferError` if the peer makes another call. `awaited` returns what an operation waits for.
        """
        blocked = -1
        since = 0.0
        watch = MismatchWatch(self)
        try:
            while 0 <= done < count:
                if done != blocked:
                    blocked = done
                    since = monotonic()
                    watch = MismatchWatch(self)
                wait = awaited(done)
                watch.poll(wait)
                self._check_alive(wait.peer, since)
                done = function(done)
        finally:
            self.say_awaited()
        return done

    @property
    def published(self) -> int:
        """Pieces of layers' outputs that this rank has published. After an interrupt, none is published twice."""
        return self.words[self.output_boards[self.index] // 8]

    def error_after_loss(self, peer: int) -> PeerLostError:
        """Return the error of a later call of this rank, which has lost a rank: others do not expect its messages."""
        return PeerLostError(peer, "this rank has lost a rank before: start the ranks again")

    def crosses(self, wait: CounterWait) -> bool:
        """Return whether this rank and the peer wait for each other in calls of two kinds: neither would ever go on.

            this rank waits for               while the peer waits for
            outputs of a layer                a message of this rank, or room in its box to this rank
            message, or room in a box         this rank's outputs of a layer

        The peer may have got what it waits for since it published that: so its counter is looked at too.
        """
        peer = wait.peer
        own_counter = self.output_boards[self.index] // 8
        expected, counter = divmod(self.words[self.boards[peer] // 8 + AWAITED_WORD], MAX_WORDS)
        messages = self.boxes_to[peer] // 8, self.boxes_from[peer] // 8 + RECEIVED_WORD
        counters = messages if wait.counter == self.output_boards[peer] // 8 else (own_counter,)
        return counter in counters and bool(self.words[counter] < expected)

    def say_awaited(self, counter: int = 0, messages: int = 0) -> None:
        """Publish which counter this rank waits for; by default none."""
        self.words[self.boards[self.index] // 8 + AWAITED_WORD] = messages * MAX_WORDS + counter

    def is_ahead(self, peer: int) -> bool:
        """Return whether a member has begun more comparisons of calls than this rank."""
        return bool(self.words[self.boards[peer] // 8 + COMPARISONS_WORD] > self.comparisons)

    def _check_alive(self, peer: int, since: float) -> None:
        """Raise if the process of a peer has ended, if it has left, or if it is silent since `since` for too long."""
        process = self.processes[peer]
        if process is not None and not process.is_alive():
            raise PeerLostError(peer, f"its process {process.pid} has ended")
        if self.words[self.boards[peer] // 8 + LEFT_WORD]:
            raise PeerLostError(peer, "it has lost a rank itself, and left")
        timeout = WORLD.deadline or self.timeout
        if monotonic() - since > timeout:
            raise PeerLostError(peer, f"timed out: it has sent nothing for {timeout:.0f} seconds")

    def announce_comparison(self) -> None:
        """Count on the own board that this rank begins to compare its call, before it waits for the other members."""
        with self.lock:  # threads may compare calls at the same time
            self.comparisons += 1
            self.words[self.boards[self.index] // 8 + COMPARISONS_WORD] = self.comparisons

    def drop_unreceived(self) -> None:
        """Drop the messages that no call of this rank has received, after ranks have made calls that differ.

        All members call it between the same two exchanges of their agreement: none of them sends meanwhile.
        """
        self.drops += 1
        for peer in self.members:
            if peer != self.index:
                box = self.boxes_from[peer] // 8
                self.received[peer] = self.words[box + RECEIVED_WORD] = self.words[box]
                self.sent[peer] = self.words[self.boxes_to[peer] // 8]
        self.words[self.output_boards[self.index] // 8] = max(
            self.words[board // 8] for board in self.output_boards.values()
        )

    def abort(self) -> None:
        """Make every rank that waits for this one raise, and this one if it goes on."""
        self.has_left = True
        self.words[self.boards[self.index] // 8 + LEFT_WORD] = 1


OPEN_MAILBOXES = WeakSet[Mailboxes]()
"""All mailboxes of this process."""

MAILBOXES_OF_MESHES = Memo[Sequence[Mailboxes]]()
"""Mailboxes between the ranks of each mesh, as `gather.py` finds them; cleared when others are opened."""
WORLD.on_close(MAILBOXES_OF_MESHES.clear)


class MismatchWatch:
    """Looks whether the member that this rank waits for makes another call.

    Such a member has begun a comparison of calls, or waits for this rank in a call of another kind (`crosses`).
    """

    def __init__(self, mailboxes: Mailboxes) -> None:
        self.mailboxes = mailboxes
        self.comparisons: int | None = None
        """Number of comparisons of this rank, while the member makes another call; None otherwise."""
        self.since = 0.0

    def poll(self, wait: CounterWait) -> None:
        """Publish the wait. Raise `CallsDifferError` if the member has made another call for `CHECK_INTERVAL`.

        It does not raise at first sight. The member may have sent the awaited message before its comparison: then this
        rank finds it before the next poll. Or another thread of this rank may begin the same comparison meanwhile.
        """
        boxes = self.mailboxes
        now = monotonic()
        if wait.counter == boxes.boards[wait.peer] // 8:
            return  # this rank waits for the numbers of a comparison
        boxes.say_awaited(wait.counter, wait.messages)
        if not (boxes.is_ahead(wait.peer) or boxes.crosses(wait)):
            self.comparisons = None
        elif self.comparisons != boxes.comparisons:
            self.comparisons, self.since = boxes.comparisons, now
        elif now - self.since >= CHECK_INTERVAL:
            raise CallsDifferError(wait.peer)


def mailboxes_size(ranks: int) -> int:
    """Return the bytes of the mailboxes of `ranks` ranks; 0 where there can be none."""
    size = ranks * (ranks + 1) * (BOX_HEADER_BYTES + MESSAGE_BYTES)
    able = platform.machine() in PROCESSORS and FOLDER.is_dir() and hasattr(os, "posix_fallocate")
    return size if able and 1 < ranks <= MAX_MEMBERS else 0


def open_mailboxes(number: int, size: int, *, new: bool) -> mmap.mmap | None:
    """Return the memory of this number, made if it is `new`; None where that fails. A host's first rank makes it."""
    flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if new else 0)
    try:
        file = os.open(_path(number), flags, 0o600)
    except OSError:
        return None
    try:
        if new:
            fcntl.flock(file, fcntl.LOCK_SH)  # held while the mapping lives, which keeps a duplicate of `file`
            _remove_names_of_the_dead()
            os.posix_fallocate(file, 0, size)  # without it a write to a full /dev/shm kills the process
        return mmap.mmap(file, size)
    except (OSError, ValueError):
        return None
    finally:
        os.close(file)


def _remove_names_of_the_dead() -> None:
    """Remove names that killed ranks have left: no process holds the lock of their memory."""
    for path in FOLDER.glob("attnmesh-*"):
        with suppress(OSError):
            file = open_without_links(path)  # other users may make names there, too
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time() - os.fstat(file).st_mtime > SECONDS_TO_LOCK:
                    path.unlink()
            finally:
                os.close(file)


def unlink_mailboxes(number: int) -> None:
    """Remove the name. The memory lives as long as a rank maps it."""
    _path(number).unlink(missing_ok=True)


def _path(number: int) -> Path:
    return FOLDER / f"attnmesh-{number:016x}"
