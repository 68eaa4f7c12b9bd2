"""A text that grows while it is read: readers are generators, which yield None where they need more of it."""

import re
from collections.abc import Generator, Iterable
from typing import Any, TypeVar

T = TypeVar("T")

Reader = Generator[Any, None, T]
"""Result that a reader yields: None where it needs more text, else a part of an answer that is certain."""

_SPACE = r"[ \t\n\r]*+"
_STRING = r'"[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+)*+"'
_SCALAR = r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?+(?:[eE][+-]?[0-9]++)?+|true|false|null"

VALUE = re.compile(rf"{_SPACE}(?:([{{\[])|{_STRING}|{_SCALAR})")
"""A value of JSON, or the bracket at which one begins."""
FIRST_MEMBER = {"{": re.compile(rf"{_SPACE}(?:{_STRING}{_SPACE}:|(}}))"), "[": re.compile(rf"(?:{_SPACE}(\]))?")}
NEXT_MEMBER = {
    "{": re.compile(rf"{_SPACE}(?:,{_SPACE}{_STRING}{_SPACE}:|(}}))"),
    "[": re.compile(rf"{_SPACE}(?:,|(\]))"),
}
"""What stands in an object and a list before the first value, and after each one: what leads to a value, or the end."""

SPACE, WORD = re.compile(r"\s*"), re.compile(r"[\w.:/-]*", re.ASCII)
BRACKET, QUOTE, PLAIN = re.compile(r'["{}\[\]]'), re.compile(r'["\\]'), re.compile(r"[-+.\w]*", re.ASCII)


class NoMatch(Exception):
    """Raised when a text is not what a reader reads."""


class GrowingText:
    """A text, and the place in it up to which it was read.

    A mark with a `special` token in it stands where that token was written, and not where others spell it: a model that
    quotes a mark does not mean it.
    """

    def __init__(self, special: Iterable[str] = ()) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self.is_thought = False
        """True while what comes is what a model thinks."""
        names = sorted(special, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names))) if names else None
        self._begins = set[int]()
        """Places in all text at which special tokens begin."""
        self._first = 0
        """Place in all text of the first character."""

    def add(self, text: str, begins: Iterable[int] = ()) -> None:
        """Take more text, and the places in all text at which special tokens begin."""
        self.text += text
        self._begins.update(begins)

    def is_at(self, mark: str, place: int) -> bool:
        """Return whether a mark stands at a place."""
        if not self.text.startswith(mark, place):
            return False
        matches = self._special.finditer(mark) if self._special else ()
        return all(self._first + place + token.start() in self._begins for token in matches)

    def find(self, mark: str, start: int = 0) -> int:
        """Return the first place from `start` on at which a mark stands, or -1."""
        place = self.text.find(mark, start)
        while place >= 0 and not self.is_at(mark, place):
            place = self.text.find(mark, place + 1)
        return place

    def cut(self, count: int) -> str:
        """Take some of the first characters away, and read on from the beginning of the rest."""
        taken = self.text[:count]
        self.text = self.text[count:]
        self.at = 0
        self._first += count
        return taken

    def more(self) -> Reader[None]:
        """Wait for more text, or raise at the end."""
        if self.ended:
            raise NoMatch
        yield None

    def has(self, mark: str) -> Reader[bool]:
        """Return whether the text goes on with a mark, and pass it then."""
        while not self.ended and len(self.text) - self.at < len(mark) and mark.startswith(self.text[self.at :]):
            yield None
        follows = self.is_at(mark, self.at)
        self.at += len(mark) if follows else 0
        return follows

    def expect(self, *marks: str) -> Reader[str]:
        """Pass one of several marks and return it, or raise."""
        for mark in marks:
            if (yield from self.has(mark)):
                return mark
        raise NoMatch

    def close(self, mark: str) -> Reader[None]:
        """Pass space, and a mark or the end of the text."""
        yield from self.space()
        if not (yield from self.has(mark)) and not (self.ended and self.at == len(self.text)):
            raise NoMatch

    def space(self) -> Reader[None]:
        """Pass space."""
        yield from self._run(SPACE)

    def word(self) -> Reader[str]:
        """Pass the name of a function, or an id, and return it."""
        name = yield from self._run(WORD)
        if not name:
            raise NoMatch
        return name

    def _run(self, pattern: re.Pattern[str]) -> Reader[str]:
        """Pass characters as long as they match."""
        start = self.at
        while (end := pattern.match(self.text, self.at).end()) == len(self.text) and not self.ended:  # type: ignore[union-attr]
            self.at = end
            yield None
        self.at = end
        return self.text[start:end]

    def until(self, mark: str) -> Reader[str]:
        """Return the text before a mark, and pass both."""
        start = self.at
        while (place := self.find(mark, self.at)) < 0:
            self.at = max(start, len(self.text) - len(mark) + 1)
            yield from self.more()
        self.at = place + len(mark)
        return self.text[start:place]

    def pieces(self, *marks: str) -> Reader[None]:
        """Yield the text before the first of some marks as it comes, or all of it, and pass the mark."""
        while True:
            begins = [(place, mark) for mark in marks if (place := self.find(mark, self.at)) >= 0]
            mark_length = 0 if self.ended else partial_mark_length(self.text[self.at :], marks)
            place, mark = min(begins, default=(len(self.text) - mark_length, ""))
            piece = self.text[self.at : place]
            self.at = place + len(mark)
            if piece:
                yield piece
            if mark or self.ended:
                return
            yield None

    # --- JSON ---

    def json_text(self) -> Reader[str]:
        """Pass a value of JSON and return its text, of which brackets and strings are known to end."""
        start = self.at
        depth = 0
        while self.at == len(self.text):
            yield from self.more()
        if self.text[self.at] not in '"{[':
            return (yield from self._run(PLAIN))
        while True:
            match (yield from self._sign(BRACKET)):
                case '"':
                    while (yield from self._sign(QUOTE)) == "\\":
                        while self.at == len(self.text):
                            yield from self.more()
                        self.at += 1
                case "{" | "[":
                    depth += 1
                case _:
                    depth -= 1
            if depth <= 0:
                return self.text[start : self.at]

    def _sign(self, pattern: re.Pattern[str]) -> Reader[str]:
        """Pass the next of some signs and return it."""
        while (sign := pattern.search(self.text, self.at)) is None:
            self.at = len(self.text)
            yield from self.more()
        self.at = sign.end()
        return sign[0]

    def members(self, names: frozenset[str]) -> Reader[dict[str, str]]:
        """Pass an object of JSON that has no other names, and return the text of each value."""
        members: dict[str, str] = {}
        yield from self.expect("{")
        while True:
            yield from self.space()
            yield from self.expect('"')
            name = yield from self.word()
            if name in members or name not in names:
                raise NoMatch
            yield from self.expect('"')
            yield from self.space()
            yield from self.expect(":")
            yield from self.space()
            members[name] = yield from self.json_text()
            yield from self.space()
            if (yield from self.expect(",", "}")) == "}":
                return members


def partial_mark_length(text: str, marks: tuple[str, ...]) -> int:
    """Return how many of a text's last characters may begin a mark.

    >>> partial_mark_length("a <to", ("<tool>", "</think>")), partial_mark_length("a", ("<tool>",))
    (3, 0)
    """
    return max((length for mark in marks for length in range(1, len(mark)) if text.endswith(mark[:length])), default=0)


def check_json(text: str) -> None:
    """Raise unless a text is one value of JSON.

    Grammars let names come twice, and numbers and brackets be of any size, so that Python would not read some values.

    >>> check_json('{"a": [1e999, {}], "a": "\\\\ud800"}')
    """
    inside = list[str]()
    at = 0
    while True:
        at, begun = _passed(VALUE, text, at)
        inside += [begun] if begun else []
        between = FIRST_MEMBER if begun else NEXT_MEMBER
        while inside:
            at, ended = _passed(between[inside[-1]], text, at)
            if not ended:
                break
            inside.pop()
            between = NEXT_MEMBER
        else:
            if text[at:].strip(" \t\n\r"):
                raise NoMatch
            return


def check_object(text: str) -> None:
    """Raise unless a text is an object of JSON."""
    check_json(text)
    if text.lstrip()[0] != "{":
        raise NoMatch


def _passed(pattern: re.Pattern[str], text: str, at: int) -> tuple[int, str]:
    """Return the place after a pattern, and the bracket in it."""
    match = pattern.match(text, at)
    if match is None:
        raise NoMatch
    return match.end(), match[1] or ""
