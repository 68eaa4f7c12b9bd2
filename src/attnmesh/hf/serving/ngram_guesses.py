"""Guesses that are copied: what followed the last few tokens of a row where they stood before."""

from array import array
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

from attnmesh.hf.serving.guesses import NoGuesses, StepTimes
from attnmesh.hf.serving.stream import Stream

NGRAM = 3
"""Last tokens that are looked up."""


class RowText:
    """The tokens of a row: the prompt, and the answer so far."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.data = bytearray()  # four bytes a token
        self.prompt = len(prompt)
        self.add(prompt)

    def add(self, tokens: Sequence[int]) -> None:
        """Take new tokens."""
        self.data += array("i", tokens).tobytes()

    @property
    def answered(self) -> int:
        """Tokens of the answer."""
        return len(self.data) // array("i").itemsize - self.prompt

    def found(self, most: int) -> list[int]:
        """Return at most so many tokens after the last place where the last few stood before.

        Where there are too few, they begin again: the text repeats itself.
        """
        size = array("i").itemsize
        width = NGRAM * array("i").itemsize
        last = self.data[-width:]
        place = len(self.data) - width
        while (place := self.data.rfind(last, 0, max(place + width - 1, 0))) % size:
            if place < 0:
                return []
        after = array("i", bytes(self.data[place + width : place + width + max(most, 0) * size]))
        return [after[number % len(after)] for number in range(most if after else 0)]


class NgramGuesses(NoGuesses):
    """Guesses by look-up. At first none is checked, until one is right: those that are not are compared for nothing."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.texts = WeakKeyDictionary[Stream, RowText]()

    def guess(self, rows: Sequence[Stream], times: StepTimes, free: Callable[[], int]) -> None:
        """Look up the next tokens of each row, and check those that are worth their time."""
        for stream in rows:
            if (text := self.texts.get(stream)) is None:
                text = self.texts[stream] = RowText(stream.prompt)
            text.add(stream.answer[text.answered :])
            stream.guesses.draft = text.found(min(self.most, stream.room))
        guesses = [stream.guesses for stream in rows]
        counts = times.choose([guess.acceptance_rate for guess in guesses], [len(guess.draft) for guess in guesses])
        for guess, count in zip(guesses, counts, strict=True):
            guess.checked = guess.draft[:count]
