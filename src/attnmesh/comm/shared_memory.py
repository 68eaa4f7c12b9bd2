"""Short messages between ranks of one host go through memory that they share: no socket, no thread that has to wake.

Each pair of ranks has a box in each direction, with two counters: how many messages were put in, and how many were
taken out. The writer alone raises the first, the reader alone the second, so there is nothing to lock:

        rank 0 -> rank 1     [ put 7 | taken 7 | bytes ...       ]      empty: rank 0 may put the eighth
        rank 1 -> rank 0     [ put 8 | taken 7 | bytes ...       ]      full: rank 0 may take the eighth

That needs stores to be seen in the order in which they were made, which x86 promises and other processors do not: there
ranks go on by sockets, as they do where memory cannot be shared.
"""

import mmap
import os
import platform
from collections.abc import Sequence
from ctypes import CDLL, memmove
from pathlib import Path
from time import monotonic, sleep

import torch
from torch import Tensor

from attnmesh.comm.failures import deadline, hung_up_with

SLOT = 1 << 18
"""Bytes of the longest message, and of those that ranks can hear although they expect others."""

LARGEST = 1 << 26
"""Bytes of memory that a board may take: beyond, for more than 15 ranks a host, ranks go by sockets."""

HEAD = 128
"""Bytes before a message: each counter in a cache line of its own."""

ORDERED = ("x86_64", "amd64", "AMD64")
"""Processors on which all see stores in the order in which one makes them."""

HOT, COLD, NAP = 100, 0.02, 0.0002
"""A rank that waits looks so many times; then for so many seconds it lets others go first; then it naps between."""

COLD_BESIDE_SOCKETS = 0.0003
"""As `COLD`, where messages of other hosts come meanwhile: who hears them needs the processor that the waiting use."""

CHECK = 0.5
"""Seconds after which a rank that waits looks whether the other is still alive."""

FOLDER = Path("/dev/shm")

_yield = CDLL(None).sched_yield if os.name == "posix" else int
"""Let others go first: also other threads of this process, which would not if Python's own way were taken."""


class Mailboxes:
    """This rank's boxes; `members` are the ranks that share the memory, by their numbers along an axis.

    A rank waits for as many seconds as `patience` for another, and no longer than that one's process lives, where its
    number is known: 0 is that of a process that cannot be seen from here. After `cold` seconds it naps.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        members: Sequence[int],
        index: int,
        processes: Sequence[int],
        patience: float,
        cold: float = COLD,
    ) -> None:
        self.members = {rank: place for place, rank in enumerate(members)}
        self.mine = self.members[index]
        self.words, self.memory = memoryview(memory).cast("q"), torch.frombuffer(memory, dtype=torch.uint8)
        self.start = self.memory.data_ptr()
        self.put, self.taken = (dict.fromkeys(members, 0) for _ in range(2))
        self.processes, self.patience = dict(zip(members, processes, strict=True)), patience
        self.cold = cold
        hung_up_with(self)

    def serves(self, peer: int, size: int) -> bool:
        """Whether messages of that size go to and from a rank by this board."""
        return size <= SLOT and peer in self.members

    def send(self, peer: int, message: Tensor) -> None:
        """Put a message, bytes in a row, into the box to a peer, once the last is out of it."""
        box = self._box(self.mine, self.members[peer])
        self._wait(box // 8 + 8, self.put[peer], peer)
        memmove(self.start + box + HEAD, message.data_ptr(), len(message))
        self.put[peer] += 1
        self.words[box // 8] = self.put[peer]  # after the message itself: see above

    def recv(self, peer: int, into: Tensor) -> None:
        """The beginning of what a peer put into the box to this rank, once it is there."""
        box = self._box(self.members[peer], self.mine)
        self.taken[peer] += 1
        self._wait(box // 8, self.taken[peer], peer)
        memmove(into.data_ptr(), self.start + box + HEAD, len(into))
        self.words[box // 8 + 8] = self.taken[peer]

    def _box(self, writer: int, reader: int) -> int:
        """Where a box begins."""
        return (writer * len(self.members) + reader) * (HEAD + SLOT)

    def _wait(self, word: int, count: int, peer: int) -> None:
        """Until a counter is so far."""
        words = self.words
        for _ in range(HOT):
            if words[word] >= count:
                return
        start = checked = monotonic()
        while words[word] < count:
            _yield()
            now = monotonic()
            if now - start > self.cold:
                sleep(NAP)
            if now - checked > CHECK:
                checked = now
                self._check_alive(peer, start)

    def _check_alive(self, peer: int, since: float) -> None:
        process = self.processes[peer]
        if process and not alive(process):
            raise RuntimeError(f"its process {process} has ended")
        there = self.members[peer]
        if self.words[self._box(there, there) // 8]:
            raise RuntimeError("it has lost a rank itself, and left")
        patience = deadline() or self.patience
        if monotonic() - since > patience:
            raise RuntimeError(f"timed out: it has sent nothing for {patience:.0f} seconds")

    def abort(self) -> None:
        """Tell all who wait for this rank that nothing will come: in its box to itself, which is of no other use."""
        self.words[self._box(self.mine, self.mine) // 8] = 1


def alive(process: int) -> bool:
    """Whether a process runs: one that has ended may still be listed, if nobody has asked how."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def size_of(ranks: int) -> int:
    """Bytes of a board, and 0 if there can be none here."""
    size = ranks * ranks * (HEAD + SLOT)
    here = platform.machine() in ORDERED and FOLDER.is_dir() and hasattr(os, "posix_fallocate")
    return size if here and ranks > 1 and size <= LARGEST else 0


def opened(name: int, size: int, *, new: bool) -> mmap.mmap | None:
    """The memory of that name, made by the first of those who share it; None where that cannot be."""
    flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if new else 0)
    try:
        file = os.open(_path(name), flags, 0o600)
    except OSError:
        return None
    try:
        if new:
            os.posix_fallocate(file, 0, size)  # to touch what is not there would end the process
        return mmap.mmap(file, size)
    except (OSError, ValueError):
        return None
    finally:
        os.close(file)


def forget(name: int) -> None:
    """The name; the memory is there as long as somebody has it open."""
    _path(name).unlink(missing_ok=True)


def _path(name: int) -> Path:
    return FOLDER / f"attnmesh-{name:016x}"
