"""Mailboxes in shared memory: short messages between ranks of one host, without sockets and without locks.

Each ordered pair of ranks has one box with two counters: messages sent, which the sender alone raises, and messages
received, which the receiver alone raises. The box is empty where they are equal. Other processors have to see stores in
program order, as on x86. On other machines, and where memory cannot be shared, ranks use sockets.

Where every rank of a host has the native library, a whole merge is one call, and a rank that waits sleeps until another
wakes it. Elsewhere it yields the processor.
"""

import mmap
import os
import platform
import struct
from collections.abc import Callable, Iterable, Sequence
from ctypes import CDLL, memmove, string_at
from math import isinf
from pathlib import Path
from time import monotonic, sleep
from typing import cast

import torch
from torch import Tensor

from attnmesh.kernels.native.build import library
from attnmesh.mesh.reduction_tree import Round
from attnmesh.runtime.world import WORLD

SLOT = 1 << 18
"""Bytes of the longest message. Receivers have room for as many, also where they expect fewer."""

MAX_MEMORY = 1 << 26
"""Bytes of the mailboxes of a host at most. More than 15 ranks a host use sockets."""

HEAD = 128
"""Bytes before a message: one cache line for each counter."""

SIZE, RECEIVED = 2, 8
"""Words of a box after the first, which counts messages sent: the bytes of the last one, and messages received."""

DIFFERENT = 1e38
"""Checksum of a message of another call. It is larger than others, and finite, since poison is infinite."""

ORDERED = ("x86_64", "amd64", "AMD64")
"""Processors that see the stores of another processor in program order."""

SPIN = 50e-6
"""Seconds that a waiting rank stays awake before it sleeps, where every rank of the host has a core."""

SPINS, YIELD_SECONDS, NAP = 100, 0.02, 0.0002
"""Without the library a rank polls so many times, then yields for so many seconds, then sleeps between polls."""

YIELD_SECONDS_BESIDE_SOCKETS = 0.0003
"""As `YIELD_SECONDS`, where other hosts send at the same time: gloo's threads need the processor to receive."""

CHECK_INTERVAL = 0.5
"""Seconds between two checks that the other process is alive."""

FOLDER = Path("/dev/shm")

Exchange = Callable[[bytes, int], int]

FIELDS, STEP = struct.Struct("2P6q"), struct.Struct("3q")
"""Fields of `Exchange` and `Step` in `mailbox.cpp`."""

SEND, COPY, MERGE, AWAIT, OWN = range(5)
"""Kinds of steps, as there."""

_yield = CDLL(None).sched_yield if os.name == "posix" else int
"""Yield the processor, also to other threads of this process."""


class CallsDifferError(Exception):
    """A rank compares its call with the others', while this one waits for a message in another call."""


class PeerLostError(RuntimeError):
    """A rank that this one waits for does not answer."""

    def __init__(self, peer: int, why: str) -> None:
        super().__init__(why)
        self.peer = peer


class Mailboxes:
    """Boxes of this rank. `members` are the ranks of the axis that share the memory.

    A receive times out after `timeout` seconds, or when the sender's process ends. `processes` are process ids, 0 for a
    process that is not visible from here. A waiting rank yields for `yield_seconds` before it sleeps. With `native` all
    members use the native library.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        members: Sequence[int],
        index: int,
        processes: Sequence[int],
        timeout: float,
        yield_seconds: float = YIELD_SECONDS,
        native: bool = False,
    ) -> None:
        self.members = {rank: place for place, rank in enumerate(members)}
        self.mine = self.members[index]
        self.words, self.memory = memoryview(memory).cast("q"), torch.frombuffer(memory, dtype=torch.uint8)
        self.start = self.memory.data_ptr()
        self.sent, self.received = (dict.fromkeys(members, 0) for _ in range(2))
        self.processes = dict(zip(members, processes, strict=True))
        self.timeout, self.yield_seconds, self.native = timeout, yield_seconds, native
        self.spin = int(SPIN * 1e9) if len(members) <= len(os.sched_getaffinity(0)) else 0
        self.agreements = 0
        """Comparisons of calls that this rank has begun with the other members."""
        self.ranks = frozenset[int]()
        """Ranks of the world along the axis, for which `topology` made these boxes."""
        WORLD.mailboxes.add(self)

    def serves(self, peer: int, size: int) -> bool:
        """Return whether messages of that size to and from a rank go through these mailboxes."""
        return size <= SLOT and peer in self.members

    def holds(self, step: Round) -> bool:
        """Return whether all ranks of a round are members."""
        return step.recv in self.members and all(peer in self.members for peer in step.send)

    def send(self, peer: int, message: Tensor) -> None:
        """Copy a message of bytes into the box to a peer, once the previous one is received."""
        if self.native:
            self._exchange([self._sending(peer)], message)
            return
        box = self._box(self.mine, self.members[peer])
        self._wait(box // 8 + RECEIVED, self.sent[peer], peer)
        memmove(self.start + box + HEAD, message.data_ptr(), len(message))
        self.words[box // 8 + SIZE] = len(message)
        self.sent[peer] += 1
        self.words[box // 8] = self.sent[peer]  # after the message itself

    def recv(self, peer: int, into: Tensor) -> None:
        """Wait for the next message of a peer, and copy it. The checksum of one of another size becomes `DIFFERENT`."""
        if self.native:
            self._exchange([self._receiving(COPY, peer)], into)
            return
        box = self._box(self.members[peer], self.mine)
        self.received[peer] += 1
        self._wait(box // 8, self.received[peer], peer)
        if self.words[box // 8 + SIZE] == len(into):
            memmove(into.data_ptr(), self.start + box + HEAD, len(into))
        else:
            mark = _mark_of(string_at(self.start + box + HEAD, 16))
            memmove(into.data_ptr(), mark, min(len(into), len(mark)))
        self.words[box // 8 + RECEIVED] = self.received[peer]

    def merge_along_tree(self, message: Tensor, rounds: Iterable[Round], rows: int, width: int) -> None:
        """Merge a message in float32 with those of the other ranks, in place, by the rounds of a tree."""
        steps = []
        for send, recv in rounds:
            steps += [self._sending(peer) for peer in send]
            steps.append(self._receiving(MERGE, recv))
        self._exchange(steps, message, rows, width)

    def merge_all(self, message: Tensor, rows: int, width: int) -> None:
        """Merge a message in float32 with those of all members, in place, in their order: one exchange."""
        others = [peer for peer in self.members if self.members[peer] != self.mine]
        steps = [self._sending(peer) for peer in others]
        for peer, place in self.members.items():
            steps.append((OWN, peer, 0) if place == self.mine else self._receiving(AWAIT, peer))
        self._exchange(steps, message, rows, width)

    def _sending(self, peer: int) -> tuple[int, int, int]:
        """Return the step (kind, peer, count) that sends the next message to a peer."""
        self.sent[peer] += 1
        return SEND, peer, self.sent[peer] - 1

    def _receiving(self, kind: int, peer: int) -> tuple[int, int, int]:
        """Return the step that receives the next message of a peer."""
        self.received[peer] += 1
        return kind, peer, self.received[peer]

    def _exchange(self, steps: Sequence[tuple[int, int, int]], message: Tensor, rows: int = 0, width: int = 0) -> None:
        """Perform steps in one native call, which returns now and then to look after silent ranks."""
        nap, sizes = int(CHECK_INTERVAL * 1e9), (message.nbytes, rows, width)
        fields = FIELDS.pack(self.start, message.data_ptr(), *sizes, self.spin, nap, len(steps))
        for kind, peer, count in steps:
            writer, reader = (self.mine, self.members[peer])[:: 1 if kind == SEND else -1]
            fields += STEP.pack(kind, self._box(writer, reader), count)
        function, done, blocked, since, is_ahead = cast(Exchange, library().exchange), 0, -1, 0.0, False
        while (done := function(fields, done)) < len(steps):
            peer = steps[done][1]
            if done != blocked:
                blocked, since, is_ahead = done, monotonic(), False
            if is_ahead:  # before the last wait, which would have found its message
                raise CallsDifferError
            is_ahead = self._is_ahead(peer)
            self._check_alive(peer, since)

    def _box(self, writer: int, reader: int) -> int:
        """Return the offset of a box."""
        return (writer * len(self.members) + reader) * (HEAD + SLOT)

    def _wait(self, word: int, count: int, peer: int) -> None:
        """Wait until a counter reaches a count."""
        words = self.words
        for _ in range(SPINS):
            if words[word] >= count:
                return
        start = checked = monotonic()
        while words[word] < count:
            _yield()
            now = monotonic()
            if now - start > self.yield_seconds:
                sleep(NAP)
            if now - checked > CHECK_INTERVAL:
                checked = now
                if self._is_ahead(peer) and words[word] < count:
                    raise CallsDifferError
                self._check_alive(peer, start)

    def _is_ahead(self, peer: int) -> bool:
        """Return whether a member has begun a comparison of calls that this rank has not."""
        place = self.members[peer]
        return bool(self.words[self._box(place, place) // 8 + RECEIVED] > self.agreements)

    def _check_alive(self, peer: int, since: float) -> None:
        process = self.processes[peer]
        if process and not alive(process):
            raise PeerLostError(peer, f"its process {process} has ended")
        place = self.members[peer]
        if self.words[self._box(place, place) // 8]:
            raise PeerLostError(peer, "it has lost a rank itself, and left")
        timeout = WORLD.deadline or self.timeout
        if monotonic() - since > timeout:
            raise PeerLostError(peer, f"timed out: it has sent nothing for {timeout:.0f} seconds")

    def enter_agreement(self) -> None:
        """Publish that this rank begins to compare its call with those of the other members, before it waits for them.

        A member that waits for a message of another call then raises `CallsDifferError`, and joins them.
        """
        self.agreements += 1
        self.words[self._box(self.mine, self.mine) // 8 + RECEIVED] = self.agreements

    def realign(self) -> None:
        """Drop the messages that no call of this rank has received, after ranks have made calls that differ.

        No rank sends meanwhile: all ranks are between two exchanges of their agreement. Of a call that was broken off,
        only the messages in the boxes were sent.
        """
        for peer, place in self.members.items():
            if place != self.mine:
                box = self._box(place, self.mine) // 8
                self.received[peer] = self.words[box + RECEIVED] = self.words[box]
                self.sent[peer] = self.words[self._box(self.mine, place) // 8]

    def abort(self) -> None:
        """Make every rank that waits for this one raise: a flag in this rank's box to itself, which is unused."""
        self.words[self._box(self.mine, self.mine) // 8] = 1


def _mark_of(head: bytes) -> bytes:
    """Return the checksum in place of that of a message whose sender has another call: its own if it is poison."""
    if isinf(struct.unpack("f", head[:4])[0]):
        return head[:8]
    return head if isinf(struct.unpack("d", head[:8])[0]) else struct.pack("4f", *[DIFFERENT] * 4)


def alive(process: int) -> bool:
    """Return whether a process runs. A zombie, whose parent has not read its exit status, does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def size_of(ranks: int) -> int:
    """Return the bytes of the mailboxes of so many ranks; 0 where there can be none."""
    size = ranks * ranks * (HEAD + SLOT)
    able = platform.machine() in ORDERED and FOLDER.is_dir() and hasattr(os, "posix_fallocate")
    return size if able and ranks > 1 and size <= MAX_MEMORY else 0


def opened(name: int, size: int, *, new: bool) -> mmap.mmap | None:
    """Return the memory of that name, which the first rank of a host makes; None where that fails."""
    flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if new else 0)
    try:
        file = os.open(_path(name), flags, 0o600)
    except OSError:
        return None
    try:
        if new:
            os.posix_fallocate(file, 0, size)  # without it a write to a full /dev/shm kills the process
        return mmap.mmap(file, size)
    except (OSError, ValueError):
        return None
    finally:
        os.close(file)


def unlink(name: int) -> None:
    """Remove the name. The memory lives as long as a rank maps it."""
    _path(name).unlink(missing_ok=True)


def _path(name: int) -> Path:
    return FOLDER / f"attnmesh-{name:016x}"
