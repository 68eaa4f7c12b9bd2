"""Ways to guess the next tokens of answers, and how many guesses a step checks.

A step computes the guesses of a row beside its next token, and rank 0 then draws a token at each place in turn. A guess
is accepted if the drawn token is the guess. Each guess makes the step longer, so a guess is checked only where the
tokens that it may save are worth more than its time.
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
"""Times of which the middle one counts, so that one wrong time does no harm."""

LAST_STEPS = 5
"""Last steps with guesses, whose times show the time of a guess."""

LEAST_DIFFERENCE = 4
"""Least difference in guesses of two steps whose times show the time of a guess: noise hides a smaller one."""

TRIAL_GUESSES = 8
"""Guesses of a trial step, which measures whether guesses are worth their time."""

TRIAL_TIME_SHARE = 0.01
"""Share of all time that trial steps may lose, after the first ones."""

REPAID = 256
"""Steps without guesses after which no loss of a trial counts any more."""

SOON, LATER = 8, 64
"""Steps with guesses after which a step without guesses is measured: while guesses do not pay, and while they do."""

MAX_TIME_DRIFT = 0.25
"""Share by which the last step without guesses may differ from the middle one, before another is measured."""


class RowTimes:
    """Seconds of the last steps for each number of rows."""

    def __init__(self) -> None:
        self.seconds: dict[int, deque[float]] = {}

    def add(self, rows: int, seconds: float) -> None:
        """Take the time of a step."""
        self.seconds.setdefault(rows, deque(maxlen=MEASURED_TIMES)).append(seconds)

    def __call__(self, rows: int) -> float:
        """Return the seconds of a step of `rows` rows, interpolated between known numbers; 0 if none is known."""
        if rows in self.seconds:
            return median_low(self.seconds[rows])
        known = {count: median_low(self.seconds[count]) for count in sorted(self.seconds)}
        return float(np.interp(rows, [*known], [*known.values()])) if known else 0.0

    @property
    def seconds_per_row(self) -> float:
        """Seconds of each further row; infinite if all steps had the same number of rows."""
        few = min(self.seconds)
        many = max(self.seconds)
        return (self(many) - self(few)) / (many - few) if many > few else inf


class StepTimes:
    """The times of the last steps, by which guesses are chosen.

    The median of several steps counts. While no guess is worth its time, a trial step checks a few guesses now and
    then, as long as trials lose less than `TRIAL_TIME_SHARE` of the time.
    """

    def __init__(self) -> None:
        self.without_guesses = RowTimes()
        """Times of steps without guesses."""
        self.since = Counter[int]()
        """Steps with guesses since the last step without guesses, by rows."""
        self.wait = SOON
        """Steps with guesses after which a step without guesses is due."""
        self.added: deque[tuple[int, int, float]] = deque(maxlen=LAST_STEPS)
        """Rows, guesses and extra time of the last steps with guesses. The time is a share of a step without."""
        self.pays = False
        """True if guesses are worth their time."""
        self.debt = 0.0
        """Seconds that trials have lost, less those that later steps have made up for."""

    def add(self, rows: int, guesses: int, seconds: float, accepted: int = 0, guessing: float = 0.0) -> None:
        """Take the seconds of a step, its guesses, how many were accepted, and the seconds for which they were made."""
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
        """Return the number of guesses of each row that gives most tokens in a second.

        Guess i of a row is accepted with the probability rate^i. Guesses are taken in order of their probability, up to
        the number that gives most tokens in a second.

        Args:
            rates: Share of the guesses of each row that are accepted.
            offered: Guesses that each row may have at most.
            passes: Entry n is the seconds in which one token is guessed in each of n rows; empty if this takes no time.
            tries: Whether a trial step may be chosen.
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
        """Return whether the time of a step without guesses has to be measured again."""
        known = self.without_guesses.seconds.get(rows)
        return not known or self.since[rows] >= self.wait or abs(known[-1] / median_low(known) - 1) > MAX_TIME_DRIFT

    def _worth(self, likely: Sequence[tuple[float, int, int]], rows: int, passes: Sequence[float]) -> int:
        """Return how many of the likeliest guesses give most tokens in a second."""
        if not self.added:
            return 0
        fixed, guess_seconds = self._prices()
        least = self.without_guesses(rows)
        tokens = float(rows)
        seconds = least + fixed
        most = float(rows)
        taken = 0
        rows_of = Counter[int]()
        for count, (chance, position, _) in enumerate(likely, 1):
            tokens, seconds = tokens - chance, seconds + guess_seconds
            if passes:
                seconds += passes[rows_of[position] + 1] - passes[rows_of[position]]
            rows_of[position] += 1
            if tokens * least >= most * seconds:
                most, least, taken = tokens, seconds, count
        return taken

    def _trial(self, rows: int) -> int:
        """Return the guesses of a trial step: together they take about as long as a step without guesses, at most."""
        guess_seconds = self._prices()[1] if self.added else 0.0
        most = min(TRIAL_GUESSES, self.without_guesses(rows) / guess_seconds) if guess_seconds else TRIAL_GUESSES
        return max(1, int(most))

    def _prices(self) -> tuple[float, float]:
        """Return the fixed seconds that any guesses add to a step, and the seconds of each guess.

        Without two steps that differ enough in guesses, the seconds of a guess are at most those of a row.
        """
        steps = sorted((guesses, share * self.without_guesses(rows)) for rows, guesses, share in self.added)
        pairs = combinations(steps, 2)
        slopes = [(more - less) / (many - few) for (few, less), (many, more) in pairs if many - few >= LEAST_DIFFERENCE]
        if not slopes:
            per_guess = median_low(added / guesses for guesses, added in steps)
            slopes = [min(self.without_guesses.seconds_per_row, per_guess)]
        guess_seconds = max(0.0, median_low(slopes))
        return max(0.0, median_low(added - guess_seconds * guesses for guesses, added in steps)), guess_seconds


class Guesser:
    """A way to guess the next tokens of rows, on rank 0. This one guesses none, and others are subclasses."""

    def guess(self, rows: Sequence[EngineRequest], times: StepTimes, free: Callable[[], int]) -> None:
        """Set the guesses of rows that the next step checks. `free` returns the bytes that are free for caches."""

    def release(self) -> bool:
        """Free memory of the guesser's caches. Return whether there was any."""
        return False

    def metrics(self) -> dict[str, float]:
        """Return counts and sizes."""
        return {}
