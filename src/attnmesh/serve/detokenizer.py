"""Text of tokens that come one by one, of whole characters, each decoded beside few of the tokens before it."""

from typing import Any

PARTIAL = 3
"""Tokens of a character that is not whole, at most: one of UTF-8 has up to four bytes."""

CONTEXT = 16
"""Tokens before a new one that its text may depend on, where bytes form no character for long."""


class Detokenizer:
    """The text of a list of tokens that grows. A token costs the same, however many came before.

    Joined results are the tokenizer's text of all tokens. Bytes that form no character are U+FFFD.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.window: list[int] = []
        """The last tokens: those of the latest whole text, which is the context of what follows, and those after it."""
        self.context, self.returned = 0, 0
        """Tokens of the window that are context, and characters of its text that were returned."""

    def add(self, id: int) -> str:
        """Return the text that one more token makes certain."""
        self.window.append(id)
        text = self._decode()
        certain = len(text) - _partial(text)
        new = text[self.returned : certain]
        self.returned += len(new)
        if new and certain == len(text):
            self._forget(self.context, 0)
        elif len(self.window) > 2 * CONTEXT:
            self._forget(len(self.window) - CONTEXT, len(text) - self.returned)
        return new

    def end(self) -> str:
        """Return the rest, after the last token."""
        return self._decode()[self.returned :]

    def _forget(self, tokens: int, held: int) -> None:
        """Drop the first tokens of the window. The last `held` characters of its text were not returned."""
        self.window = self.window[tokens:]
        self.context = 0 if held else len(self.window)
        self.returned = max(0, len(self._decode()) - held)

    def _decode(self) -> str:
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        text: str = self.tokenizer.decode(self.window, **options)
        return text


def _partial(text: str) -> int:
    """Return how many characters at the end may still become others.

    >>> _partial("a"), _partial("a\ufffd"), _partial("\ufffd" * 9)
    (0, 1, 3)
    """
    return min(PARTIAL, len(text) - len(text.rstrip("\ufffd")))
