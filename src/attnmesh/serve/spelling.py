"""Tokens as they are spelled within a text: the bytes of each, and which no text shows."""

import re
from codecs import getincrementaldecoder
from collections.abc import Sequence
from functools import cached_property
from typing import Any

PRINTED = (*range(33, 127), *range(161, 173), *range(174, 256))
"""Bytes that byte-level tokenizers write as the character of that number. Other bytes are characters from 256 on."""

SIGNS = {chr(byte): byte for byte in PRINTED}
SIGNS |= {chr(256 + index): byte for index, byte in enumerate(sorted({*range(256)} - {*PRINTED}))}

BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
"""Token of one byte, as SentencePiece writes it."""

OPTIONS = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
"""Options by which a tokenizer's `decode` shows what a model writes."""


class Spelling:
    """The decoding side of a tokenizer. Tokens are kept, so that each is spelled once.

    The beginning, end and padding have no text: a model does not say anything by them.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.dropped = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
        self._known: dict[int, bytes] = {}

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        text: str = self.tokenizer.decode([id for id in ids if not self.drops(id)], **OPTIONS)
        return text

    def drops(self, id: int) -> bool:
        """Return whether a token is one of those without text."""
        return id in self.dropped

    def bytes_of(self, id: int) -> bytes:
        """Return the bytes of a token, those of half a character too, with the space that it begins with."""
        if id not in self._known:
            self._known[id] = self._spell(id)
        return self._known[id]

    @cached_property
    def between_words(self) -> list[int]:
        """A token after which others are not the first of a text, whose space tokenizers drop."""
        return [*self.tokenizer("a", add_special_tokens=False)["input_ids"][-1:]]

    def _spell(self, id: int) -> bytes:
        before, both = (self.tokenizer.decode([*self.between_words, *more], **OPTIONS) for more in ([], [id]))
        if "\ufffd" not in both:
            return str(both[len(before) :]).encode()
        sign = str(self.tokenizer.convert_ids_to_tokens(id))
        if byte := BYTE.fullmatch(sign):
            return bytes.fromhex(byte[1])
        in_bytes = all(character in SIGNS for character in sign)
        return bytes(SIGNS[character] for character in sign) if in_bytes else str(both[len(before) :]).encode()

    def spell(self, id: int, escape: str = "") -> str:
        """Return a token as responses write it: its text, or its bytes where they are not whole characters."""
        token_bytes = self.bytes_of(id)
        if is_whole(token_bytes):
            return token_bytes.decode()
        return escape + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def is_whole(encoded: bytes) -> bool:
    r"""Return whether bytes are whole characters.

    >>> is_whole(b" a"), is_whole(b"\xf0\x9f")
    (True, False)
    """
    try:
        encoded.decode()
    except UnicodeDecodeError:
        return False
    return True


def goes_on(begun: bytes, encoded: bytes) -> bool:
    r"""Return whether bytes go on with the character that others have begun.

    >>> goes_on(b"\xf0\x9f", b"\x98"), goes_on(b"\xf0\x9f", b"a")
    (True, False)
    """
    try:
        getincrementaldecoder("utf-8")().decode(begun + encoded[:1])
    except UnicodeDecodeError:
        return False
    return True
