"""Letters: messages under way through the mailboxes of a host, which are sent and received in order.

A box holds one message. A letter that finds its box full waits. Each wait of this rank moves all letters that can move,
not only the awaited one: two ranks that each wait to send the next letter would wait for ever. While this rank waits
for its process group, a thread moves them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Thread
from time import monotonic

from torch import Tensor

from attnmesh.comm.mailboxes import CHECK_INTERVAL, CallsDifferError, Mailboxes, MismatchWatch, PeerLostError
from attnmesh.runtime.world import WORLD

MAX_WAIT = 0.0002
"""Seconds of a wait at most while other letters may move."""


@dataclass(eq=False)
class Letter:
    """A message of bytes to a peer, or memory for the next one from it. Letters of one `line` move in order.

    With `exact`, one of another size than `message` is of another call. `failure` returns the error for a lost peer.
    """

    mailboxes: Mailboxes
    peer: int
    message: Tensor
    failure: Callable[[int, RuntimeError], Exception]
    sends: bool
    exact: bool = False
    differs: bool = False

    def __post_init__(self) -> None:
        self.line = id(self.mailboxes), self.peer, self.sends


def begin_letters(letters: Sequence[Letter]) -> None:
    """Begin to send and receive letters."""
    with WORLD.lock:
        WORLD.letters += letters
    _move()


def finish_letter(letter: Letter) -> None:
    """Wait for a letter. Raise `CallsDifferError` if its peer makes another call, or has begun to compare calls."""
    try:
        _wait_for(letter)
    except PeerLostError as error:
        raise letter.failure(error.peer, error) from error


def _wait_for(letter: Letter) -> None:
    mailboxes = letter.mailboxes
    peer = letter.peer
    sends = letter.sends
    began = monotonic()
    watch = MismatchWatch(mailboxes)
    try:
        while letter in WORLD.letters:
            if _move():
                continue
            watch.poll(mailboxes.awaited(peer, sends=sends))
            seconds = CHECK_INTERVAL if len(WORLD.letters) == 1 else MAX_WAIT
            mailboxes.wait(peer, sends=sends, seconds=seconds, since=began)
    finally:
        mailboxes.say_awaited()
    if letter.differs:
        raise CallsDifferError(peer)


def finish_letters_of(mailboxes: Mailboxes) -> None:
    """Finish the letters of a call that was broken off, which come before what is sent by these mailboxes next."""
    for letter in tuple(WORLD.letters):
        if letter.mailboxes is mailboxes:
            finish_letter(letter)


def _move() -> bool:
    """Move all letters that need not wait, each after those before it on its line. Return whether any has moved."""
    with WORLD.lock:
        count = len(WORLD.letters)
        waiting = set[tuple[int, int, bool]]()
        for letter in tuple(WORLD.letters):
            mailboxes, peer, message = letter.mailboxes, letter.peer, letter.message
            if letter.line in waiting or not mailboxes.is_ready(peer, sends=letter.sends):
                waiting.add(letter.line)
                continue
            if letter.sends:
                mailboxes.send(peer, message)
            else:
                letter.differs = letter.exact and mailboxes.size_of_next(peer) != message.nbytes
                mailboxes.recv(peer, message)
            WORLD.letters.remove(letter)
        return len(WORLD.letters) < count


@contextmanager
def moved_by_thread() -> Iterator[None]:
    """Move letters by a thread, as long as this one waits for something else."""
    ended = Event()

    def run() -> None:
        while WORLD.letters and not ended.wait(MAX_WAIT):
            _move()

    thread = Thread(target=run, name="attnmesh letters", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
