"""Text of a growing list of tokens: whole characters alone, held back where a stop string may begin."""

from typing import Any, NamedTuple


class Token(NamedTuple):
    """A token that ranks send, with the log-probabilities that were asked for."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Piece(NamedTuple):
    """New text, and the tokens that begin in it."""

    text: str
    tokens: tuple[Token, ...] = ()


class Text:
    """The text of one choice. Joined pieces are the tokenizer's text of all tokens, up to the first stop string."""

    def __init__(self, tokenizer: Any, stops: tuple[str, ...]) -> None:
        self.tokenizer, self.stops, self.stopped = tokenizer, stops, False
        self.ids: list[int] = []
        self.first, self.read = 0, 0
        """Tokens before `first` are no longer decoded; those before `read` have their text."""
        self.held = ""
        self.sent, self.made = 0, 0
        """Characters that pieces had, and characters of all text so far."""
        self.waiting: list[tuple[int, Token]] = []
        """Tokens that no piece had, each with the character that it begins at."""

    def add(self, token: Token) -> Piece:
        """Return what can be sent after one more token."""
        self.waiting.append((self.made, token))
        self.ids.append(token.id)
        known, text = self._decode(self.first, self.read), self._decode(self.first, len(self.ids))
        if len(text) <= len(known) or text.endswith("\ufffd"):
            return Piece("")  # a character that is not whole, or a token without text
        self.first, self.read = self.read, len(self.ids)
        return self._grow(text[len(known) :])

    def end(self) -> Piece:
        """Return what was held back, after the last token."""
        known, text = self._decode(self.first, self.read), self._decode(self.first, len(self.ids))
        self.read = len(self.ids)
        piece = self._grow(text[len(known) :])
        if self.stopped:
            return piece
        rest = self._send(self.held)
        return Piece(piece.text + rest.text, piece.tokens + rest.tokens)

    def _decode(self, first: int, end: int) -> str:
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        text: str = self.tokenizer.decode(self.ids[first:end], **options)
        return text

    def _grow(self, text: str) -> Piece:
        """Return the held and the new text as far as no stop string may begin in it."""
        self.held += text
        self.made += len(text)
        found = [place for stop in self.stops if (place := self.held.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._send(self.held[: min(found)])
        beginnings = (n for stop in self.stops for n in range(1, len(stop)) if self.held.endswith(stop[:n]))
        return self._send(self.held[: len(self.held) - max(beginnings, default=0)])

    def _send(self, text: str) -> Piece:
        self.held = "" if self.stopped else self.held[len(text) :]
        self.sent += len(text)
        tokens = tuple(token for begin, token in self.waiting if begin < self.sent)
        self.waiting = [(begin, token) for begin, token in self.waiting if begin >= self.sent]
        return Piece(text, tokens)
