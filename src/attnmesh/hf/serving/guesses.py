"""Ways to guess the next tokens of answers, and how many guesses a step checks.

A step that checks guesses of a row computes them beside its next token, and draws at each place in turn. A guess is
accepted where its token is drawn. It costs a token of a step, so its worth is weighed against that.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import combinations
from math import inf
from statistics import median_low

import numpy as np

from attnmesh.hf.serving.engine_request import EngineRequest

LEAST_RATE = 0.3
"""Share of a row's guesses that are accepted, below which no guess of the row is checked, whatever its time."""

MEASURED_TIMES = 3
"""Times of which the middle one counts: one may be wrong."""

LAST_STEPS = 5
"""Steps with guesses that show what a guess takes."""

LEAST_DIFFERENCE = 4
"""Guesses by which two steps differ at least whose times show what each guess takes."""

TRIAL_GUESSES = 8
"""Guesses of a step that tries whether they are worth their time."""

TRIAL_TIME_SHARE = 0.01
"""Share of the time that trials may lose, after the first ones."""

REPAID = 256
"""Steps without guesses that make up for any time that trials have lost."""

SOON, LATER = 8, 64
"""Steps with guesses before one without is measured: while guesses do not pay, and while they do."""

MAX_TIME_DRIFT = 0.25
"""Share by which the last step without guesses may differ from the middle one. Beyond it another is measured."""


class RowTimes:
    """Seconds of the last steps, by the number of their rows."""

    def __init__(self) -> None:
        self.seconds: dict[int, deque[float]] = {}

    def add(self, rows: int, seconds: float) -> None:
        """Take the time of a step."""
        self.seconds.setdefault(rows, deque(maxlen=MEASURED_TIMES)).append(seconds)

    def __call__(self, rows: int) -> float:
        """Return the seconds of a step of so many rows, between those of fewer and of more; 0 if none is known."""
        if rows in self.seconds:
            return median_low(self.seconds[rows])
        known = {count: median_low(self.seconds[count]) for count in sorted(self.seconds)}
        return float(np.interp(rows, [*known], [*known.values()])) if known else 0.0

    @property
    def of_row(self) -> float:
        """Seconds of each further row; infinite if steps had the same number of rows."""
        few = min(self.seconds)
        many = max(self.seconds)
        return (self(many) - self(few)) / (many - few) if many > few else inf


class StepTimes:
    """The times of the last steps, by which guesses are chosen.

    Guesses are chosen by middle times of several steps. Where no guess is worth its time by them, a few are tried now
    and then, as long as trials lose less than a small share of the time.
    """

    def __init__(self) -> None:
        self.without_guesses = RowTimes()
        """Times of steps without guesses."""
        self.since = Counter[int]()
        """Steps with guesses since the last one without, by rows."""
        self.wait = SOON
        """Steps with guesses after which one without is due."""
        self.added: deque[tuple[int, int, float]] = deque(maxlen=LAST_STEPS)
        """Rows and guesses of the last steps with guesses, and by what share they took longer than steps without."""
        self.pays = False
        """True if guesses are worth their time."""
        self.debt = 0.0
        """Seconds that trials have lost, and that are not made up for."""

    def add(self, rows: int, guesses: int, seconds: float, accepted: int = 0, guessing: float = 0.0) -> None:
        """Take the time of a step, how many of its guesses were accepted, and the seconds of guessing."""
        plain = self.without_guesses(rows)
        lost = guessing - TRIAL_TIME_SHARE * seconds
        if guesses:
            self.added.append((rows, guesses, seconds / plain - 1 if plain else 0.0))
            self.since[rows] += 1 if seconds > (1 - MAX_TIME_DRIFT) * plain else LATER  # guesses add time to a step
            lost += seconds - plain * (1 + accepted / rows)
        else:
            self.without_guesses.add(rows, seconds)
            self.since[rows] = 0
            self.wait = LATER if self.pays else SOON
        if not self.pays:
            self.debt = min(max(0.0, self.debt + lost), REPAID * TRIAL_TIME_SHARE * plain)

    def choose(
        self, rates: Sequence[float], offered: Sequence[int], passes: Sequence[float] = (), *, tries: bool = True
    ) -> list[int]:
        """Return how many of the guesses that each row may have give most tokens in a second.

        The chance of guess i of a row is the row's rate to the i. The likeliest guesses are taken, as long as one more
        makes more tokens in a second.

        Args:
            rates: Share of the guesses of each row that are accepted.
            offered: Guesses that each row may have at most.
            passes: Seconds in which one token is guessed in so many rows, from 0 on; none if that takes no time.
            tries: Whether guesses may be chosen to find the time that they take.
        """
        positions = {row: range(1, offered[row] + 1) for row, rate in enumerate(rates) if rate >= LEAST_RATE}
        likely = sorted(
            (-(rates[row] ** position), position, row) for row, own in positions.items() for position in own
        )
        taken = 0
        if likely and not self._needs_plain(len(rates)):
            taken = self._worth(likely, len(rates), passes)
            self.pays = bool(taken) or (self.pays and not tries)
            if tries and not taken and (len(self.added) < MEASURED_TIMES or not self.debt):
                taken = self._trial(len(rates))
        chosen = Counter(row for *_, row in likely[:taken])
        return [chosen[row] for row in range(len(rates))]

    def _needs_plain(self, rows: int) -> bool:
        """Return whether the next step has no guesses, to measure it."""
        known = self.without_guesses.seconds.get(rows)
        return not known or self.since[rows] >= self.wait or abs(known[-1] / median_low(known) - 1) > MAX_TIME_DRIFT

    def _worth(self, likely: Sequence[tuple[float, int, int]], rows: int, passes: Sequence[float]) -> int:
        """Return how many of the likeliest guesses give most tokens in a second."""
        if not self.added:
            return 0
        fixed, of_guess = self._prices()
        least = self.without_guesses(rows)
        tokens = float(rows)
        seconds = least + fixed
        most = float(rows)
        taken = 0
        rows_of = Counter[int]()
        for count, (chance, position, _) in enumerate(likely, 1):
            tokens, seconds = tokens - chance, seconds + of_guess
            if passes:
                seconds += passes[rows_of[position] + 1] - passes[rows_of[position]]
            rows_of[position] += 1
            if tokens * least >= most * seconds:
                most, least, taken = tokens, seconds, count
        return taken

    def _trial(self, rows: int) -> int:
        """Return how many guesses are tried: no more than take about as long as a step."""
        of_guess = self._prices()[1] if self.added else 0.0
        return max(1, int(min(TRIAL_GUESSES, self.without_guesses(rows) / of_guess))) if of_guess else TRIAL_GUESSES

    def _prices(self) -> tuple[float, float]:
        """Return the seconds that guesses add to a step, however many there are, and those of each guess.

        A guess takes no more than a row does.
        """
        steps = sorted((guesses, share * self.without_guesses(rows)) for rows, guesses, share in self.added)
        pairs = combinations(steps, 2)
        slopes = [(more - less) / (many - few) for (few, less), (many, more) in pairs if many - few >= LEAST_DIFFERENCE]
        slopes = slopes or [min(self.without_guesses.of_row, median_low(added / guesses for guesses, added in steps))]
        of_guess = max(0.0, median_low(slopes))
        return max(0.0, median_low(added - of_guess * guesses for guesses, added in steps)), of_guess


class Guesser:
    """A way to guess the next tokens of rows."""

    def guess(self, rows: Sequence[EngineRequest], times: StepTimes, free: Callable[[], int]) -> None:
        """Set the guesses of rows that the next step checks. `free` says how many bytes of caches are free."""
        raise NotImplementedError

    def release(self) -> bool:
        """Give memory of caches back. Return whether there was some."""
        return False

    def metrics(self) -> dict[str, float]:
        """Return counts and sizes."""
        return {}


class NoGuesses(Guesser):
    """Guesses nothing."""

    def guess(self, rows: Sequence[EngineRequest], times: StepTimes, free: Callable[[], int]) -> None:
        """Set no guesses."""
