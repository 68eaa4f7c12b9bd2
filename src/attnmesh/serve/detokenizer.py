"""Text of tokens that come one by one, of whole characters, each decoded beside few of the tokens before it."""

from codecs import getincrementaldecoder
from collections.abc import Sequence

from attnmesh.serve.spelling import Spelling, is_whole

CONTEXT = 8
"""Tokens before a new one that its text may depend on, as by a space between words."""


class Detokenizer:
    """The text of a list of tokens that grows. A token costs the same, however many came before.

    Joined results are the tokenizer's text of all tokens, as it stands after the tokens `before`. Bytes that form no
    character are U+FFFD.
    """

    def __init__(self, spelling: Spelling, before: Sequence[int] = ()) -> None:
        self.spelling = spelling
        self.window: list[int] = []
        """The last tokens of whole characters."""
        self.characters = getincrementaldecoder("utf-8")("replace")
        for id in before[-CONTEXT:]:
            self.add(id)

    @property
    def incomplete_bytes(self) -> bytes:
        """Bytes of a character that is not whole."""
        return self.characters.getstate()[0]

    def add(self, id: int) -> str:
        """Return the text that one more token makes certain."""
        token_bytes = self.spelling.bytes_of(id)
        if self.spelling.drops(id) or not token_bytes:
            return ""
        if not is_whole(token_bytes):
            self.window = [*self.spelling.between_words]
            return self.characters.decode(token_bytes)
        broken = self.characters.decode(b"", final=True)
        self.window.append(id)
        known, text = self.spelling.decode(self.window[:-1]), self.spelling.decode(self.window)
        del self.window[:-CONTEXT]
        return broken + text[len(known) :]

    def end(self) -> str:
        """Return the rest, after the last token."""
        return self.characters.decode(b"", final=True)
