"""Guesses of the next tokens of a row, and how many of them were accepted."""

from collections.abc import Sequence
from dataclasses import dataclass, field

DECAY = 0.9
"""Weight of the counts of a row's guesses, at each later step."""


@dataclass
class RowGuesses:
    """Tokens that may come next in a row, and how often such guesses were accepted."""

    answered: int = 0
    """Tokens of the answer that were compared with guesses."""
    tokens: list[int] = field(default_factory=list)
    """Tokens that may come next."""
    checked: list[int] = field(default_factory=list)
    """The first tokens of the draft, which a step checks."""
    pending: list[int] = field(default_factory=list)
    """Guesses of the last step that are in the cache, and have not been drawn."""
    accepted: float = 0.25
    """Count of guesses that were accepted, of which late ones weigh most."""
    proposed: float = 1.0
    """Count of guesses up to the first wrong one, of which late ones weigh most."""

    @property
    def acceptance_rate(self) -> float:
        """Share of the guesses that are accepted."""
        return self.accepted / self.proposed

    def compare(self, answer: Sequence[int]) -> None:
        """Compare the new tokens of the answer with the guesses, also with those that no step has checked."""
        pairs = [*zip(self.tokens, answer[self.answered :], strict=False)]
        accepted = next((index for index, (guess, token) in enumerate(pairs) if guess != token), len(pairs))
        if pairs:
            self.accepted = DECAY * self.accepted + accepted
            self.proposed = DECAY * self.proposed + min(accepted + 1, len(pairs))
        self.answered = len(answer)
        self.tokens = []
        self.checked = []

    def note_cached(self) -> None:
        """Note that the checked guesses are in the cache."""
        self.pending = self.checked
        self.checked = []

    def accept(self, token: int) -> bool:
        """Accept the next guess if it is the drawn token. Return whether it is: then the next place has logits."""
        if not self.pending or self.pending[0] != token:
            return False
        del self.pending[0]
        return True
