"""Pending messages: those under way through the mailboxes of a host, which are sent and received in order.

A box holds one message: the next waits until the box is free. Ranks A and B each send two messages to the other, and
then receive two. A's second message waits until B takes the first, and B's until A takes the first. Both would wait for
ever if a wait moved the awaited message alone. So each wait moves all messages that can move. While this rank waits for
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
"""Seconds between two looks at all messages under way, at most. More delays them, less wakes the rank for nothing.

It is a choice: no bench measures it.
"""


@dataclass(eq=False)
class PendingMessage:
    """A message of bytes to a peer, or memory for the next one from it.

    Messages of one `line`, to one peer or from it, move in the order in which they began.
    """

    mailboxes: Mailboxes
    peer: int
    message: Tensor
    on_lost_peer: Callable[[int, RuntimeError], Exception]
    """Returns the error for a lost peer."""
    sends: bool
    """True for a message to the peer, False for one from it."""
    is_fixed_size: bool = False
    """True if a message of another size than `message` shows that the peer makes another call."""
    differs: bool = False
    """True once a message has shown that."""

    def __post_init__(self) -> None:
        self.line = id(self.mailboxes), self.peer, self.sends


PENDING_MESSAGES: list[PendingMessage] = []
"""Messages under way, of all threads."""

PENDING_LOCK = Lock()
"""Lock of `PENDING_MESSAGES`."""

WORLD.on_close(PENDING_MESSAGES.clear)


def begin_pending(messages: Sequence[PendingMessage]) -> None:
    """Begin to send and receive messages."""
    with PENDING_LOCK:
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
    """Wait for the messages that a broken-off call has left: boxes keep their order, so they precede the next ones."""
    for pending in tuple(PENDING_MESSAGES):
        if pending.mailboxes is mailboxes:
            finish_pending(pending)


def drop_pending_of(mailboxes: Mailboxes) -> None:
    """Forget the pending messages of broken-off calls. What is in a box already, `Mailboxes.drop_unreceived` drops."""
    with PENDING_LOCK:
        PENDING_MESSAGES[:] = [pending for pending in PENDING_MESSAGES if pending.mailboxes is not mailboxes]


def _move() -> bool:
    """Move each message that need not wait, unless one before it on its line waits. Return whether any has moved."""
    with PENDING_LOCK:
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
    """Move messages by another thread while this one waits for its process group. Then raise that thread's error."""
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
