"""Guesses of the next tokens of a row, and how many of them were accepted."""

from collections.abc import Sequence
from dataclasses import dataclass, field

DECAY = 0.9
"""Factor of the counts of a row's guesses at each step, so that old steps count less."""


@dataclass
class RowGuesses:
    """Guesses of the next tokens of a row, and how many earlier guesses were accepted."""

    answered: int = 0
    """Number of the answer's tokens that have been compared with guesses."""
    ids: list[int] = field(default_factory=list)
    """Guesses of the next tokens."""
    checked: list[int] = field(default_factory=list)
    """The first of these guesses, which the next step checks."""
    pending: list[int] = field(default_factory=list)
    """Guesses that the last step put into the cache, and that no draw has accepted so far."""
    accepted: float = 0.25
    """Count of accepted guesses, in which recent ones weigh most."""
    proposed: float = 1.0
    """Count of guesses up to the first wrong one of each step, in which recent ones weigh most."""

    @property
    def acceptance_rate(self) -> float:
        """Share of the guesses that are accepted."""
        return self.accepted / self.proposed

    def assume_rate(self, rate: float, proposed: float) -> None:
        """Count `proposed` guesses of which the share `rate` was accepted, and none before."""
        self.accepted = proposed * rate
        self.proposed = proposed

    def compare(self, answer: Sequence[int]) -> None:
        """Count how many guesses the new tokens of the answer confirm, also of guesses that no step has checked."""
        pairs = [*zip(self.ids, answer[self.answered :], strict=False)]
        accepted = next((index for index, (guess, token) in enumerate(pairs) if guess != token), len(pairs))
        if pairs:
            self.accepted = DECAY * self.accepted + accepted
            self.proposed = DECAY * self.proposed + min(accepted + 1, len(pairs))
        self.answered = len(answer)
        self.ids = []
        self.checked = []

    def note_cached(self) -> None:
        """Note that the checked guesses are in the cache."""
        self.pending = self.checked
        self.checked = []

    def give_up(self) -> None:
        """Let the next step check no guess."""
        self.checked = []

    def pop_rejected(self) -> int:
        """Return how many guesses of the last step no draw has accepted, and forget them."""
        rejected = len(self.pending)
        self.pending = []
        return rejected

    def accept(self, token: int) -> bool:
        """Accept the next guess if it is the drawn token. Return whether it is.

        The logits at the next place are then those of the answer, and its token can be drawn.
        """
        if not self.pending or self.pending[0] != token:
            return False
        del self.pending[0]
        return True
