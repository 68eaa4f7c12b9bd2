"""Text of a growing list of tokens: whole characters alone, held back where a stop string may begin."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from attnmesh.serve.detokenizer import Detokenizer
from attnmesh.serve.spelling import Spelling, goes_on


class SentToken(NamedTuple):
    """A token that ranks send, with the log-probabilities that were asked for."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Piece(NamedTuple):
    """New text, and the tokens that begin in it, each with its first character's place in all text."""

    text: str
    sent_tokens: tuple[tuple[int, SentToken], ...] = ()


class Text:
    """The text of one choice. Joined pieces are the tokenizer's text of all tokens, up to the first stop string."""

    def __init__(self, spelling: Spelling, stops: tuple[str, ...], before: Sequence[int] = ()) -> None:
        self.spelling = spelling
        self.stops = stops
        self.stopped = False
        self.detokenizer = Detokenizer(spelling, before)
        self.count = 0
        self.held_back = ""
        self.sent = 0
        """Characters that pieces had."""
        self.made = 0
        """Characters of all text so far."""
        self.waiting: deque[tuple[int, SentToken]] = deque()
        """Tokens that no piece had, each with the character that it begins at."""

    def add(self, token: SentToken) -> Piece:
        """Return what can be sent after one more token."""
        self.count += 1
        incomplete = self.detokenizer.incomplete_bytes
        data = b"" if self.spelling.drops(token.id) else self.spelling.bytes_of(token.id)
        broken = bool(incomplete) and not goes_on(incomplete, data)  # its bytes become a character before this token's
        self.waiting.append((self.made + broken, token))
        text = self.detokenizer.add(token.id)
        return self._grow(text) if text else Piece("")

    def end(self) -> Piece:
        """Return what was held back, after the last token."""
        piece = self._grow(self.detokenizer.end())
        if self.stopped:
            return piece
        rest = self._send(self.held_back)
        last = tuple(self.waiting)
        return Piece(piece.text + rest.text, piece.sent_tokens + rest.sent_tokens + last)

    def _grow(self, text: str) -> Piece:
        """Return the held and the new text as far as no stop string may begin in it."""
        self.held_back += text
        self.made += len(text)
        ends = [index for stop in self.stops if (index := self.held_back.find(stop)) >= 0]
        if ends:
            self.stopped = True
            return self._send(self.held_back[: min(ends)])
        beginnings = (n for stop in self.stops for n in range(1, len(stop)) if self.held_back.endswith(stop[:n]))
        return self._send(self.held_back[: len(self.held_back) - max(beginnings, default=0)])

    def _send(self, text: str) -> Piece:
        self.held_back = "" if self.stopped else self.held_back[len(text) :]
        self.sent += len(text)
        sent_tokens = []
        while self.waiting and self.waiting[0][0] < self.sent:
            sent_tokens.append(self.waiting.popleft())
        return Piece(text, tuple(sent_tokens))
