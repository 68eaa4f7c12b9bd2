"""The switch between ranks of an emulated NCCL: it serves their messages by NCCL's rules, and says where each hangs.

A message meets its peer (rendezvous). Each communicator runs its operations in the order that each rank has issued
them, and the first one only after all ranks have joined. There are no tags. Counts and types have to be equal.
"""

import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Outcome:
    """Outcome of a world: each rank's result or exception, and the operations on which NCCL would have hung."""

    answers: list[Any]
    hang: str | None
    mismatches: list[str]

    def results(self) -> list[Any]:
        """Return every rank's result. Raise if a rank raised or hung, or if messages did not match."""
        failed = {rank: x for rank, x in enumerate(self.answers) if isinstance(x, BaseException)}
        if failed or self.hang or self.mismatches:
            notes = ["\n".join([repr(x), *getattr(x, "__notes__", [])]) for x in failed.values()]
            raise AssertionError("\n".join([self.hang or "no rank hangs", *self.mismatches, *notes]))
        return self.answers


Communicator = tuple[str, tuple[int, ...]]
"""Name of a process group, and its ranks."""


@dataclass
class Message:
    """One send or receive of a rank, or its share of a collective."""

    kind: str  # "send", "recv" or the name of a collective
    count: int
    dtype: torch.dtype
    data: Tensor | None = None
    peer: int | None = None
    number: int = 0
    done: bool = False

    def __str__(self) -> str:
        peer = "" if self.peer is None else f" {'to' if self.kind == 'send' else 'from'} rank {self.peer}"
        return f"{self.kind}{peer} of {self.count} {self.dtype}{', done' if self.done else ''}"

    @property
    def size(self) -> tuple[int, torch.dtype]:
        """Number of elements and dtype, which have to be equal at both ends."""
        return self.count, self.dtype


@dataclass
class Operation:
    """What a rank has issued on a communicator: a batch of messages, or a collective."""

    communicator: Communicator
    messages: list[Message]
    result: dict[int, Any] = field(default_factory=dict)
    done: bool = False
    mismatched: bool = False

    @property
    def is_batch(self) -> bool:
        """Return whether it sends to and receives from peers."""
        return self.messages[0].kind in ("send", "recv")

    def __str__(self) -> str:
        return f"{self.communicator[0]}: {'; '.join(map(str, self.messages))}"


@dataclass
class Waiting:
    """A wait of a rank: until all ranks join a communicator, or until an operation is done."""

    communicator: Communicator
    operation: Operation | None = None


class Switch:
    """Serve the messages of all ranks until each has answered or hangs."""

    def __init__(self, connections: Sequence[Connection], patience: float) -> None:
        self.connections, self.patience = connections, patience
        self.answers: dict[int, Any] = {}
        self.streams: dict[tuple[int, Communicator], list[Operation]] = {}
        self.joined: dict[Communicator, set[int]] = {}
        self.operations: dict[tuple[int, int], Operation] = {}
        self.waiting: dict[int, Waiting] = {}
        self.mismatches: list[str] = []
        self.hang: str | None = None

    def serve(self) -> Outcome:
        """Serve until each rank has answered or hangs. Return the outcome."""
        last = time.monotonic()
        while len(self.answers) < len(self.connections):
            alive = {c: rank for rank, c in enumerate(self.connections) if rank not in self.answers}
            ready = wait(list(alive), timeout=0.5)
            for connection in ready:
                self._receive(alive[connection])
            self._move()
            idle = time.monotonic() - last
            last = time.monotonic() if ready else last
            left = [rank for rank in alive.values() if rank not in self.answers]
            if left and (all(rank in self.waiting for rank in left) or (not ready and idle > self.patience)):
                self._report_hang(left)
        return Outcome([self.answers[rank] for rank in range(len(self.connections))], self.hang, self.mismatches)

    def _receive(self, rank: int) -> None:
        """Take one request of a rank: to issue an operation, to wait for one, or to answer."""
        try:
            kind, *request = pickle.loads(self.connections[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self.answers[rank] = RuntimeError(f"rank {rank} died")
            return
        if kind == "answer":
            self.answers[rank] = request[0]
        elif kind == "issue":
            number, communicator, messages = request
            operation = Operation(communicator, messages)
            self.operations[rank, number] = operation
            self.streams.setdefault((rank, communicator), []).append(operation)
            self.joined.setdefault(communicator, set()).add(rank)
            self.waiting[rank] = Waiting(communicator)
        else:
            operation = self.operations[rank, request[0]]
            self.waiting[rank] = Waiting(operation.communicator, operation)

    def _move(self) -> None:
        """Carry out all operations that can be, and let the ranks that waited for them go on."""
        complete = [x for x, ranks in self.joined.items() if set(x[1]) == ranks]
        while any(self._match(communicator) for communicator in complete):
            pass
        for rank, what in list(self.waiting.items()):
            if what.operation is None and what.communicator in complete:
                self._release(rank, ("joined", None))
            elif what.operation is not None and what.operation.done:
                self._release(rank, ("done", what.operation.result))

    def _release(self, rank: int, reply: tuple[str, Any]) -> None:
        del self.waiting[rank]
        try:
            self.connections[rank].send_bytes(pickle.dumps(reply))
        except (BrokenPipeError, ConnectionResetError):
            self.answers.setdefault(rank, RuntimeError(f"rank {rank} died"))

    def _match(self, communicator: Communicator) -> bool:
        """Carry out the messages in which the first open operations of all ranks match. Return whether any did."""
        ranks = communicator[1]
        heads = {rank: head for rank in ranks if (head := self._head(rank, communicator)) is not None}
        if len(heads) == len(ranks) and not any(head.is_batch or head.mismatched for head in heads.values()):
            return self._match_collective([heads[rank] for rank in ranks])
        moved = [self._match_messages(a, b, heads) for a in heads for b in heads if a != b]
        return any(moved)

    def _head(self, rank: int, communicator: Communicator) -> Operation | None:
        stream = self.streams.get((rank, communicator), [])
        while stream and stream[0].done:
            stream.pop(0)
        return stream[0] if stream else None

    def _match_collective(self, operations: Sequence[Operation]) -> bool:
        messages = [operation.messages[0] for operation in operations]
        if len({(message.kind, message.size) for message in messages}) > 1:
            self.mismatches.append("; ".join(f"{message}" for message in messages))
            for operation in operations:
                operation.mismatched = True
            return False
        result = _carried_out(messages[0].kind, [message.data for message in messages])
        for operation in operations:
            operation.result, operation.done = {0: result}, True
        return True

    def _match_messages(self, sender: int, receiver: int, heads: dict[int, Operation]) -> bool:
        """Carry the next message from `sender` to `receiver`, if it is next on both. Return whether it was."""
        operations = heads[sender], heads[receiver]
        sent = _next(operations[0], "send", receiver)
        received = _next(operations[1], "recv", sender)
        if sent is None or received is None:
            return False
        if sent.size != received.size:
            name = operations[0].communicator[0]
            self.mismatches.append(f"{name}: rank {sender}: {sent}; rank {receiver}: {received}")
            for operation in operations:
                operation.mismatched = True
            return False
        sent.done = received.done = True
        operations[1].result[received.number] = sent.data
        for operation in operations:
            operation.done = all(message.done for message in operation.messages)
        return True

    def _report_hang(self, left: Sequence[int]) -> None:
        """Note the operation in which each rank waits, and let the waiting ranks raise `Hang`."""
        self.hang = "\n".join(f"rank {rank}: {self._where(rank)}" for rank in range(len(self.connections)))
        stuck = [rank for rank in left if rank in self.waiting]
        for rank in stuck:
            self._release(rank, ("hang", self.hang))
        if not stuck:
            for rank in left:
                self.answers[rank] = RuntimeError(f"rank {rank} did not answer for {self.patience} seconds")

    def _where(self, rank: int) -> str:
        if rank in self.answers:
            return f"answered {type(self.answers[rank]).__name__}"
        if rank not in self.waiting:
            return "on the CPU"
        what = self.waiting[rank]
        if what.operation is None:
            joined, (name, ranks) = sorted(self.joined[what.communicator]), what.communicator
            return f"joins {name}, as have {joined} of {list(ranks)}"
        return f"waits for {self._head(rank, what.communicator)}"


def _next(operation: Operation, kind: str, peer: int) -> Message | None:
    """Return the first open message of a batch with that peer."""
    if operation.mismatched:
        return None
    return next((m for m in operation.messages if m.kind == kind and m.peer == peer and not m.done), None)


def _carried_out(kind: str, data: Sequence[Any]) -> Any:
    name, *rest = kind.split(" ")
    if name == "all_gather":
        return list(data)
    if name == "broadcast":
        return data[int(rest[0])]
    stacked = torch.stack(list(data))
    return stacked.amax(0) if rest == ["MAX"] else stacked.sum(0)
