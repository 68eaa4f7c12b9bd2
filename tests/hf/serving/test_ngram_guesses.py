"""Guesses of a text: what followed its last tokens before."""

from random import Random

import pytest

from attnmesh.hf.serving.ngram_guesses import RowText


def test_a_guess_is_what_followed_the_last_tokens_before() -> None:
    text = RowText([1, 2, 3, 4, 5, 6, 1, 2, 3])
    assert text.find_next(4) == [4, 5, 6, 1]
    text.add([4, 9])
    assert text.find_next(4) == []
    text.add([1, 2, 3])
    assert (text.find_next(9), text.answered) == ([4, 9, 1, 2, 3, 4, 9, 1, 2], 5)  # the last place counts, and repeats
    assert text.find_next(0) == []


@pytest.mark.parametrize("tokens", [[], [7], [7, 7], [7, 7, 7], [256, 1, 0, 65536, 256, 1]])
def test_few_tokens_give_no_guess(tokens: list[int]) -> None:
    assert RowText(tokens).find_next(4) == []


def test_a_place_is_found_between_tokens_alone() -> None:
    """Bytes of tokens may be found within others."""
    assert RowText([0, 0, 0, 1 << 8, 1 << 8, 5, 0, 0, 0]).find_next(2) == [1 << 8, 1 << 8]


def test_random_texts_are_looked_up_as_lists_are() -> None:
    random = Random(3)
    for _ in range(300):
        text = [random.choice([0, 1, 256, 65536, 1 << 24]) for _ in range(random.randint(3, 40))]
        places = [place for place in range(len(text) - 3) if text[place : place + 3] == text[-3:]]
        after = text[places[-1] + 3 :] if places else []
        assert RowText(text).find_next(6) == [after[number % len(after)] for number in range(6 if places else 0)]
