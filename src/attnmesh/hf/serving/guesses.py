"""Guesses of the next tokens of answers: what followed the last few tokens where they stood before.

A step that checks guesses of a row computes them beside its next token, and draws at each place in turn. A guess stands
where its token is drawn. It costs a token of a step, so its worth is weighed against that.
"""

import re
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from attnmesh.errors import ArgumentError, KernelError, require
from attnmesh.hf.cache.layer import StatefulLayer
from attnmesh.hf.cache.sharded_cache import ShardedCache
from attnmesh.hf.cache.state_layer import StateLayer

SUBJECT = "hf.Engine speculate"

NGRAM = 3
"""Last tokens that are looked up."""

MOST = 8
"""Guesses of a row in a step at most, if no other number is given."""

MOST_GUESSES = 64
"""The largest number that may be given."""

FORGET = 0.9
"""Weight of what is known of a row's guesses, at each later step."""

STEPS = 64
"""Steps whose times are known. A cost that no step has shown since is measured again."""

LEAST = 0.3
"""Share of a row's guesses that stand, below which none is checked: their time need not be known then."""


@dataclass(frozen=True)
class Speculation:
    """How an engine guesses tokens: at most so many of each row in a step."""

    most: int = MOST

    @staticmethod
    def of(text: object, cache: ShardedCache, *, is_causal: bool) -> "Speculation | None":
        """Return what "ngram" or "ngram:12" says, None for None; or raise unless it is possible.

        An empty cache of the model shows whether its caches take tokens back.
        """
        if text is None:
            return None
        found = re.fullmatch("ngram(?::([1-9][0-9]?))?", text) if isinstance(text, str) else None
        most = MOST if found is None or found[1] is None else int(found[1])
        expected, fix = f"ngram, or ngram:N with N from 1 to {MOST_GUESSES}", "write one of these, or leave it out"
        require(found is not None and most <= MOST_GUESSES, ArgumentError, SUBJECT, expected, repr(text), fix)
        states = any(isinstance(layer, (StateLayer, StatefulLayer)) for layer in cache.layers)
        expected, given = "a model whose caches take tokens back", "one with recurrent layers or others with a state"
        require(not states, KernelError, SUBJECT, expected, given, "leave it out")
        given = "one in which several tokens see each other"
        require(is_causal, KernelError, SUBJECT, "a causal model", given, "leave it out")
        expected = "no reproducible=True beside it: products of several tokens are rounded in another way"
        require(not cache.reproducible, KernelError, SUBJECT, expected, "True", "leave one of them out")
        return Speculation(most)


@dataclass
class RowGuesses:
    """The tokens of a row, what may come next, and how often that came."""

    text: bytearray = field(default_factory=bytearray)
    """The prompt and the answer, four bytes a token."""
    answered: int = 0
    """Tokens of the answer in the text."""
    next: list[int] = field(default_factory=list)
    """The tokens that may come next."""
    checked: list[int] = field(default_factory=list)
    """The first of them, which a step checks."""
    left: list[int] = field(default_factory=list)
    """Those of the last step that are in the cache, and have not been drawn."""
    stood: float = 0.25
    tried: float = 1.0
    """How often a guess stood, and was tried: late ones count most. At first none is checked, until one stands."""

    @property
    def rate(self) -> float:
        """Share of the guesses that stand."""
        return self.stood / self.tried

    def follow(self, prompt: Sequence[int], answer: Sequence[int], most: int) -> None:
        """Take the new tokens of the answer, and guess what comes next: at most so many tokens.

        Guesses that no step has checked are compared as well, so that a row shows for nothing when they begin to stand.
        """
        if not self.text:
            self.text += array("i", prompt).tobytes()
        new = answer[self.answered :]
        pairs = [*zip(self.next, new, strict=False)]
        right = next((place for place, (guess, token) in enumerate(pairs) if guess != token), len(pairs))
        if pairs:
            self.stood = FORGET * self.stood + right
            self.tried = FORGET * self.tried + min(right + 1, len(pairs))
        self.text += array("i", new).tobytes()
        self.answered, self.next, self.checked = len(answer), self._found(most), []

    def _found(self, most: int) -> list[int]:
        """Return the tokens after the last place where the last few stood before.

        Where there are too few, they begin again: the text repeats itself.
        """
        size, width = array("i").itemsize, NGRAM * array("i").itemsize
        last, place = self.text[-width:], len(self.text) - width
        while (place := self.text.rfind(last, 0, max(place + width - 1, 0))) % size:
            if place < 0:
                return []
        after = array("i", bytes(self.text[place + width : place + width + max(most, 0) * size]))
        return [after[number % len(after)] for number in range(most if after else 0)]

    def begin(self) -> None:
        """Note that the checked guesses are in the cache."""
        self.left, self.checked = self.checked, []

    def stands(self, token: int) -> bool:
        """Return whether the next guess is this token, which was drawn. Then the next place has logits."""
        if not self.left or self.left[0] != token:
            return False
        del self.left[0]
        return True


class StepTimes:
    """The times of the last steps, by which guesses are chosen."""

    def __init__(self) -> None:
        self.steps: deque[tuple[int, int, float]] = deque(maxlen=STEPS)
        """Rows, guesses and seconds of each step."""

    def add(self, rows: int, guesses: int, seconds: float) -> None:
        """Take the time of a step."""
        self.steps.append((rows, guesses, seconds))

    def choose(self, rows: Sequence[RowGuesses]) -> None:
        """Let each row check as many guesses as give most tokens in a second.

        The chance of guess i of a row is its rate to the i. The likeliest is taken as long as it gives more of a token
        for its time than the step does without it.
        """
        likely = [row for row in rows if row.next and row.rate >= LEAST]
        if not likely:
            return
        without, of_guess = self.fitted(len(rows))
        tokens, seconds = float(len(rows)), without
        chances = [
            (row.rate**place, number) for number, row in enumerate(likely) for place in range(1, len(row.next) + 1)
        ]
        for chance, number in sorted(chances, reverse=True):
            if chance * seconds < of_guess * tokens:
                break
            tokens, seconds, row = tokens + chance, seconds + of_guess, likely[number]
            row.checked.append(row.next[len(row.checked)])

    def fitted(self, rows: int) -> tuple[float, float]:
        """Return the seconds of a step of so many rows without guesses, and of a guess, as they fit the last steps.

        A guess takes none if no step had one.
        """
        if not self.steps:
            return 0.0, 0.0
        count, guesses, seconds = np.array(self.steps).T
        known = np.stack((np.ones_like(count), count, guesses), 1)
        (base, of_row, of_guess), *_ = np.linalg.lstsq(known, seconds, rcond=None)
        return float(base + of_row * rows), max(float(of_guess), 0.0)
