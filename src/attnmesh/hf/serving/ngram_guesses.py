"""Guesses by look-up: the last tokens of a row are found earlier in it, and what follows there is guessed."""

from array import array
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

from attnmesh.hf.serving.engine_request import EngineRequest
from attnmesh.hf.serving.guesses import Guesser, StepTimes

NGRAM = 3
"""Number of last tokens that are looked up: fewer are found more often, and what follows is wrong more often."""


class RowText:
    """The tokens of a row: the prompt, and the answer so far."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.token_bytes = bytearray()
        """All tokens, four bytes each."""
        self.prompt_tokens = len(prompt)
        self.add(prompt)

    def add(self, ids: Sequence[int]) -> None:
        """Take new tokens."""
        self.token_bytes += array("i", ids).tobytes()

    @property
    def answered(self) -> int:
        """Tokens of the answer."""
        return len(self.token_bytes) // array("i").itemsize - self.prompt_tokens

    def find_next(self, most: int) -> list[int]:
        """Return `most` tokens after the last earlier place of the last `NGRAM` tokens; none without such a place.

        Where fewer follow, the text is taken to repeat itself: they begin again.
        """
        size = array("i").itemsize
        width = NGRAM * array("i").itemsize
        last = self.token_bytes[-width:]
        position = len(self.token_bytes) - width
        while (position := self.token_bytes.rfind(last, 0, max(position + width - 1, 0))) % size:
            if position < 0:
                return []
        after = array("i", bytes(self.token_bytes[position + width : position + width + max(most, 0) * size]))
        return [after[number % len(after)] for number in range(most if after else 0)]


class NgramGuesser(Guesser):
    """Guesses by look-up.

    All guesses are compared with the answer, which costs nothing. Steps check guesses of a row once some were right.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.texts = WeakKeyDictionary[EngineRequest, RowText]()

    def guess(self, rows: Sequence[EngineRequest], times: StepTimes, free: Callable[[], int]) -> None:
        """Look up the next tokens of each row, and check those that are worth their time."""
        for request in rows:
            if (text := self.texts.get(request)) is None:
                text = self.texts[request] = RowText(request.prompt)
            text.add(request.answer[text.answered :])
            request.guesses.ids = text.find_next(min(self.most, request.room))
        guesses = [request.guesses for request in rows]
        counts = times.choose([guess.acceptance_rate for guess in guesses], [len(guess.ids) for guess in guesses])
        for guess, count in zip(guesses, counts, strict=True):
            guess.checked = guess.ids[:count]
