"""Ways to guess the next tokens of answers, and how many guesses a step checks.

A step that checks guesses of a row computes them beside its next token, and draws at each place in turn. A guess stands
where its token is drawn. It costs a token of a step, so its worth is weighed against that.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence

import numpy as np

from attnmesh.hf.serving.stream import Stream

STEPS = 64
"""Steps whose times are known. A cost that no step has shown since is measured again."""

LEAST = 0.3
"""Share of a row's guesses that stand, below which none is checked: their time need not be known then."""


class StepTimes:
    """The times of the last steps, by which guesses are chosen."""

    def __init__(self) -> None:
        self.steps: deque[tuple[int, int, float]] = deque(maxlen=STEPS)
        """Rows, guesses and seconds of each step."""

    def add(self, rows: int, guesses: int, seconds: float) -> None:
        """Take the time of a step."""
        self.steps.append((rows, guesses, seconds))

    def choose(self, rates: Sequence[float], offered: Sequence[int], passes: Sequence[float] = ()) -> list[int]:
        """Return how many of the guesses that each row may have give most tokens in a second.

        The chance of guess i of a row is its rate to the i. The likeliest are taken as long as all together give more.

        Args:
            rates: Share of the guesses of each row that stand.
            offered: Guesses that each row may have at most.
            passes: Seconds in which one token is guessed in so many rows, from 0 on; none if that takes no time.
        """
        places = {row: range(1, offered[row] + 1) for row, rate in enumerate(rates) if rate >= LEAST}
        likely = sorted((-(rates[row] ** place), place, row) for row, own in places.items() for place in own)
        if not likely:
            return [0] * len(rates)
        base, of_row, of_guess = self.fitted()
        tokens, seconds = most, least = float(len(rates)), base + of_row * len(rates)
        taken, rows_of = 0, Counter[int]()
        for count, (chance, place, _) in enumerate(likely, 1):
            tokens, seconds = tokens - chance, seconds + of_guess
            if passes:
                seconds += passes[rows_of[place] + 1] - passes[rows_of[place]]
            rows_of[place] += 1
            if tokens * least >= most * seconds:
                most, least, taken = tokens, seconds, count
        chosen = Counter(row for *_, row in likely[:taken])
        return [chosen[row] for row in range(len(rates))]

    def fitted(self) -> tuple[float, float, float]:
        """Return the seconds of a step, those of each row in it, and of each guess, as they fit the last steps.

        A guess takes none if no step had one.
        """
        if not self.steps:
            return 0.0, 0.0, 0.0
        count, guesses, seconds = np.array(self.steps).T
        known = np.stack((np.ones_like(count), count, guesses), 1)
        (base, of_row, of_guess), *_ = np.linalg.lstsq(known, seconds, rcond=None)
        return float(base), float(of_row), max(float(of_guess), 0.0)


class NoGuesses:
    """Stands for a way to guess where there is none."""

    def guess(self, rows: Sequence[Stream], times: StepTimes, free: Callable[[], int]) -> None:
        """Set the guesses of rows that the next step checks. `free` says how many bytes of caches are free."""

    def release(self) -> bool:
        """Give memory of caches back. Return whether there was some."""
        return False

    def metrics(self) -> dict[str, float]:
        """Return counts and sizes."""
        return {}
