"""Guesses of one row, and the rate at which they were right."""

import pytest

from attnmesh.hf.serving.ngram_guesses import RowText
from attnmesh.hf.serving.row_guesses import DECAY, RowGuesses


def test_guesses_that_nobody_checked_are_compared() -> None:
    new, row = RowGuesses(), RowGuesses(ids=[4, 5, 6, 1])
    row.compare([4, 9])
    accepted, proposed = DECAY * new.accepted + 1, DECAY * new.proposed + 2  # 4 was right, of two that were compared
    assert (row.ids, row.accepted, row.proposed) == ([], accepted, proposed)
    row.ids = [9, 9]
    row.compare([4, 9, 9, 9, 9])
    assert (row.accepted, row.proposed) == pytest.approx((DECAY * accepted + 2, DECAY * proposed + 2))


def test_a_rate_follows_an_answer() -> None:
    row, text, answer = RowGuesses(), RowText([*range(20)]), list[int]()

    def follows(*tokens: int) -> float:
        for token in tokens:
            answer.append(token)
            text.add([token])
            row.compare(answer)
            row.ids = text.find_next(4)
        return row.acceptance_rate

    assert follows(9, 9, 9, *range(8)) > 0.7
    assert follows(1, 2, 3, 1, 2, 3, 9, 1, 2, 3, 8) < 0.7
