"""Letters: messages under way through the mailboxes of a host, which are sent and received in order.

A box holds one message. A letter that finds its box full waits. Each wait of this rank moves all letters that can move,
not only the awaited one: two ranks that each wait to send the next letter would wait for ever. While this rank waits
for its process group, a thread moves them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from time import monotonic

from torch import Tensor

from attnmesh.comm.shared_memory import CHECK_INTERVAL, CallsDifferError, Mailboxes
from attnmesh.runtime.world import WORLD

NAP = 0.0002
"""Seconds of a wait at most while other letters may move."""


class Letter:
    """A message of bytes to a peer, or memory for the next one from it. Letters of one `line` move in order."""

    def __init__(self, mailboxes: Mailboxes, peer: int, message: Tensor, *, sends: bool) -> None:
        self.mailboxes, self.peer, self.message, self.sends = mailboxes, peer, message, sends
        self.line = id(mailboxes), peer, sends


def begin_letters(letters: Sequence[Letter]) -> None:
    """Begin to send and receive letters."""
    WORLD.letters += letters
    _move()


def finish_letter(letter: Letter) -> None:
    """Wait for a letter. Raise `CallsDifferError` if its peer has begun to compare calls instead."""
    since, mailboxes, peer, sends = monotonic(), letter.mailboxes, letter.peer, letter.sends
    while letter in WORLD.letters:
        if _move():
            continue
        seconds = CHECK_INTERVAL if len(WORLD.letters) == 1 else NAP
        was_ahead = mailboxes.is_ahead(peer)  # before the wait, which finds what the peer has sent before that
        mailboxes.wait(peer, sends=sends, seconds=seconds, since=since)
        if was_ahead and not mailboxes.is_ready(peer, sends=sends):
            raise CallsDifferError(peer)


def _move() -> bool:
    """Move all letters that need not wait, each after those before it on its line. Return whether any has moved."""
    count, waiting = len(WORLD.letters), set[tuple[int, int, bool]]()
    for letter in tuple(WORLD.letters):
        if letter.line in waiting or not letter.mailboxes.is_ready(letter.peer, sends=letter.sends):
            waiting.add(letter.line)
            continue
        (letter.mailboxes.send if letter.sends else letter.mailboxes.recv)(letter.peer, letter.message)
        WORLD.letters.remove(letter)
    return len(WORLD.letters) < count


@contextmanager
def moved_by_thread() -> Iterator[None]:
    """Move letters by a thread, as long as this one waits for something else."""
    ended = Event()

    def run() -> None:
        while WORLD.letters and not ended.wait(NAP):
            _move()

    thread = Thread(target=run, name="attnmesh letters", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
