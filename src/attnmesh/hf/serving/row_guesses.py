"""Guesses of the next tokens of a row, and how many of them stood."""

from collections.abc import Sequence
from dataclasses import dataclass, field

FORGET = 0.9
"""Weight of what is known of a row's guesses, at each later step."""


@dataclass
class RowGuesses:
    """Tokens that may come next in a row, and how often such guesses were right."""

    answered: int = 0
    """Tokens of the answer that were compared with guesses."""
    next: list[int] = field(default_factory=list)
    """The tokens that may come next."""
    checked: list[int] = field(default_factory=list)
    """The first of `next`, which a step checks."""
    left: list[int] = field(default_factory=list)
    """Guesses of the last step that are in the cache, and have not been drawn."""
    stood: float = 0.25
    tried: float = 1.0
    """How often a guess stood, and how often one was tried: late guesses count most."""

    @property
    def rate(self) -> float:
        """Share of the guesses that stand."""
        return self.stood / self.tried

    def compare(self, answer: Sequence[int]) -> None:
        """Compare the new tokens of the answer with the guesses, also with those that no step has checked."""
        pairs = [*zip(self.next, answer[self.answered :], strict=False)]
        right = next((place for place, (guess, token) in enumerate(pairs) if guess != token), len(pairs))
        if pairs:
            self.stood = FORGET * self.stood + right
            self.tried = FORGET * self.tried + min(right + 1, len(pairs))
        self.answered, self.next, self.checked = len(answer), [], []

    def begin(self) -> None:
        """Note that the checked guesses are in the cache."""
        self.left, self.checked = self.checked, []

    def stands(self, token: int) -> bool:
        """Return whether the next guess is this token, which was drawn. Then the next place has logits."""
        if not self.left or self.left[0] != token:
            return False
        del self.left[0]
        return True
