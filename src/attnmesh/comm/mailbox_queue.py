"""Pending messages: those under way through the mailboxes of a host, which are sent and received in order.

A box holds one message. The next one waits until it is free. Each wait of this rank moves all messages that can move,
not only the awaited one: two ranks that each wait to send the next one would wait for ever. While this rank waits for
its process group, a thread moves them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Lock, Thread
from time import monotonic

from torch import Tensor

from attnmesh.comm.mailboxes import CHECK_INTERVAL, Mailboxes, MismatchWatch, PeerLostError
from attnmesh.comm.mismatch import CallsDifferError
from attnmesh.runtime.world import WORLD

MAX_WAIT = 0.0002
"""Seconds of a wait at most while other messages may move."""


@dataclass(eq=False)
class PendingMessage:
    """A message of bytes to a peer, or memory for the next one from it. Those of one `line` move in order.

    With `is_fixed_size`, one of another size than `message` is of another call.
    """

    mailboxes: Mailboxes
    peer: int
    message: Tensor
    on_lost_peer: Callable[[int, RuntimeError], Exception]
    """Returns the error for a lost peer."""
    sends: bool
    is_fixed_size: bool = False
    differs: bool = False

    def __post_init__(self) -> None:
        self.line = id(self.mailboxes), self.peer, self.sends


PENDING_MESSAGES: list[PendingMessage] = []
"""Messages under way, of all threads."""

LOCK = Lock()
"""Guards them."""

WORLD.on_close(PENDING_MESSAGES.clear)


def begin_pending(messages: Sequence[PendingMessage]) -> None:
    """Begin to send and receive messages."""
    with LOCK:
        PENDING_MESSAGES.extend(messages)
    _move()


def finish_pending(pending: PendingMessage) -> None:
    """Wait for a message. Raise `CallsDifferError` if its peer makes another call, or has begun to compare calls."""
    try:
        _wait_for(pending)
    except PeerLostError as error:
        raise pending.on_lost_peer(error.peer, error) from error


def _wait_for(pending: PendingMessage) -> None:
    mailboxes = pending.mailboxes
    peer = pending.peer
    sends = pending.sends
    began = monotonic()
    watch = MismatchWatch(mailboxes)
    try:
        while pending in PENDING_MESSAGES:
            if _move():
                continue
            watch.poll(mailboxes.awaited(peer, sends=sends))
            seconds = CHECK_INTERVAL if len(PENDING_MESSAGES) == 1 else MAX_WAIT
            mailboxes.wait(peer, sends=sends, seconds=seconds, since=began)
    finally:
        mailboxes.say_awaited()
    if pending.differs:
        raise CallsDifferError(peer)


def finish_pending_of(mailboxes: Mailboxes) -> None:
    """Finish the messages of a call that was broken off, which come before what is sent by these mailboxes next."""
    for pending in tuple(PENDING_MESSAGES):
        if pending.mailboxes is mailboxes:
            finish_pending(pending)


def drop_pending_of(mailboxes: Mailboxes) -> None:
    """Forget the messages of calls that were broken off. Only those in the boxes were sent."""
    with LOCK:
        PENDING_MESSAGES[:] = [pending for pending in PENDING_MESSAGES if pending.mailboxes is not mailboxes]


def _move() -> bool:
    """Move all messages that need not wait, each after those before it on its line. Return whether any has moved."""
    with LOCK:
        count = len(PENDING_MESSAGES)
        waiting = set[tuple[int, int, bool]]()
        for pending in tuple(PENDING_MESSAGES):
            mailboxes, peer, message = pending.mailboxes, pending.peer, pending.message
            if pending.line in waiting or not mailboxes.is_ready(peer, sends=pending.sends):
                waiting.add(pending.line)
                continue
            if pending.sends:
                mailboxes.send(peer, message)
            else:
                pending.differs = pending.is_fixed_size and mailboxes.size_of_next(peer) != message.nbytes
                mailboxes.recv(peer, message)
            PENDING_MESSAGES.remove(pending)
        return len(PENDING_MESSAGES) < count


@contextmanager
def moved_by_thread() -> Iterator[None]:
    """Move messages by a thread, as long as this one waits for something else. Then raise the thread's error."""
    ended = Event()
    errors = list[Exception]()

    def run() -> None:
        try:
            while PENDING_MESSAGES and not ended.wait(MAX_WAIT):
                _move()
        except Exception as error:
            errors.append(error)

    thread = Thread(target=run, name="attnmesh messages", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        if errors:
            raise errors[0]
