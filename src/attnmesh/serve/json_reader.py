"""Strict JSON that other threads need not wait for: Python's own parser keeps them from running until all is read."""

import json
import re
from json.decoder import scanstring  # type: ignore[attr-defined]
from math import isfinite
from typing import Any, NoReturn

from attnmesh.serve.refused import Refused

MAX_JSON_VALUES = 1 << 16
"""Values that a text may have beside the tokens of a prompt."""

DEPTH = 64
"""Lists and objects inside each other, at most."""

SHORT = 256
"""Characters of the first part that a string is read in."""

LONG = 1 << 18
"""Characters of the longest parts."""

JSON_SPACE = re.compile(r"[ \t\n\r]{0,65536}")
NUMBER_OR_NAME = re.compile(r"[-+.\w]{1,4096}")
"""Numbers, and the names true, false and null."""
WHOLE_NUMBERS = re.compile(r"(?: ?\d{1,18},){2,4096}")
"""Items of a list, as token ids are."""

HIGH_SURROGATES, LOW_SURROGATES = "\ud800\udbff", "\udc00\udfff"
"""First and last of the two halves that JSON can spell a character by."""


class JsonReader:
    """Reads one text with a number of values at most. A call of C that it makes takes little time."""

    def __init__(self, text: str, most: int) -> None:
        self.text = text
        self.at = 0
        self.most = most
        self.left = most

    def read(self) -> Any:
        """Return the value of the text, or raise."""
        value = self._value(DEPTH)
        if self._peek():
            self._fail("the end")
        return value

    def _fail(self, expected: str) -> NoReturn:
        raise Refused(400, f"body: expected JSON, with {expected} at character {self.at}")

    def _peek(self) -> str:
        """Return the next character that is no space; empty at the end."""
        while (end := JSON_SPACE.match(self.text, self.at).end()) > self.at:  # type: ignore[union-attr]
            self.at = end
        return self.text[self.at : self.at + 1]

    def _expect(self, signs: str) -> str:
        """Pass one of some characters and return it, or raise."""
        sign = self._peek()
        if not sign or sign not in signs:
            self._fail(" or ".join(signs))
        self.at += 1
        return sign

    def _count(self, values: int) -> None:
        self.left -= values
        if self.left < 0:
            raise Refused(400, f"body: expected JSON of at most {self.most:,} values")

    def _value(self, depth: int) -> Any:
        self._count(1)
        match self._peek():
            case '"':
                return self._string()
            case "{" | "[" if not depth:
                raise Refused(400, f"body: expected JSON with at most {DEPTH} lists and objects inside each other")
            case "{":
                return self._object(depth - 1)
            case "[":
                return self._list(depth - 1)
        return self._plain()

    def _object(self, depth: int) -> dict[str, Any]:
        self.at += 1
        members: dict[str, Any] = {}
        if self._peek() == "}":
            self.at += 1
            return members
        while True:
            if self._peek() != '"':
                self._fail("a name")
            name = self._string()
            if name in members:
                raise Refused(400, f"body: expected JSON, given two fields {json.dumps(name[:60])}")
            self._expect(":")
            members[name] = self._value(depth)
            if self._expect(",}") == "}":
                return members

    def _list(self, depth: int) -> list[Any]:
        self.at += 1
        items: list[Any] = []
        if self._peek() == "]":
            self.at += 1
            return items
        while True:
            if (numbers := WHOLE_NUMBERS.match(self.text, self.at)) is not None:
                self.at = numbers.end()
                more = self._loads(f"[{numbers[0][:-1]}]")
                self._count(len(more))
                items += more
            items.append(self._value(depth))
            if self._expect(",]") == "]":
                return items

    def _plain(self) -> Any:
        match = NUMBER_OR_NAME.match(self.text, self.at)
        if match is None:
            self._fail("a value")
        value = self._loads(match[0])
        self.at = match.end()
        return value

    def _loads(self, text: str) -> Any:
        def refuse(name: str) -> NoReturn:
            raise Refused(400, f"body: expected JSON, given {name}")

        def number(text: str) -> float:
            value = float(text)
            return value if isfinite(value) else refuse(f"a number beyond those of 64 bits: {text[:60]}")

        try:
            return json.loads(text, parse_constant=refuse, parse_float=number)
        except ValueError:
            self._fail("a value")

    def _string(self) -> str:
        """Return the string that begins here, read in parts."""
        self.at += 1
        parts = [""]
        size = SHORT
        while True:
            part = self.text[self.at : self.at + size]
            is_last = self.at + size >= len(self.text)
            part = part if is_last else part[: _whole_escapes(part)]
            try:
                string, end = scanstring(part + '"', 0, True)
            except ValueError:
                self._fail("a string")
            parts[-1:] = _rejoin(parts[-1], string)
            if end <= len(part):
                self.at += end
                return "".join(parts)
            if is_last:
                self._fail("the end of a string")
            self.at += len(part)
            size = min(2 * size, LONG)


def _whole_escapes(part: str) -> int:
    """Return how much of a string's beginning has only whole escapes.

    >>> [_whole_escapes(part) for part in ("ab", "ab\\\\n", "a" * 9 + "\\\\u00e", "a" * 9 + 4 * "\\\\")]
    [2, 2, 9, 13]
    """
    last = part.rfind("\\", max(0, len(part) - 6))
    run = last + 1 - len(part[: last + 1].rstrip("\\"))
    return last if run % 2 else len(part)


def _rejoin(before: str, after: str) -> list[str]:
    """Return two parts of a string, in which no character is cut in halves."""
    if HIGH_SURROGATES[0] <= before[-1:] <= HIGH_SURROGATES[1] and LOW_SURROGATES[0] <= after[:1] <= LOW_SURROGATES[1]:
        pair = (before[-1] + after[0]).encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        return [before[:-1], pair + after[1:]]
    return [before, after]
