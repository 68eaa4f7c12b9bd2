"""The text of tokens that come one by one: joined, it is the tokenizer's text of all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnmesh.serve.detokenizer import Detokenizer
from attnmesh.serve.spelling import Spelling
from tests.support.serving.fake_engine import byte_tokenizer, sentencepiece_tokenizer

pytestmark = pytest.mark.quick

SPELLINGS = {"bytes": Spelling(byte_tokenizer()), "pieces": Spelling(sentencepiece_tokenizer())}
TEXTS = st.text("ab é😀TPris.", max_size=12)


def test_a_character_comes_when_it_is_whole() -> None:
    spelling = SPELLINGS["bytes"]
    growing, ids = Detokenizer(spelling), spelling.tokenizer("aé😀")["input_ids"]
    assert [growing.add(id) for id in ids[:5]] == ["a", "", "é", "", ""]
    assert growing.incomplete_bytes == "😀".encode()[:2]
    assert growing.end() == "\ufffd"
    assert growing.incomplete_bytes == b""


def test_a_character_that_is_broken_off_comes_with_the_next() -> None:
    spelling = SPELLINGS["bytes"]
    growing, ids = Detokenizer(spelling), spelling.tokenizer("😀a")["input_ids"]
    assert [growing.add(id) for id in (ids[0], ids[-1])] == ["", "\ufffda"]


def test_a_word_begins_with_its_space_after_another_and_not_at_first() -> None:
    spelling = SPELLINGS["pieces"]
    before = spelling.tokenizer("The capital is", add_special_tokens=False)["input_ids"]
    word = spelling.tokenizer.convert_tokens_to_ids("▁Paris")
    assert Detokenizer(spelling, before).add(word) == " Paris"
    assert Detokenizer(spelling).add(word) == "Paris"


@given(st.sampled_from(sorted(SPELLINGS)), TEXTS, TEXTS)
def test_pieces_join_to_the_text_that_comes_after_what_was_before(kind: str, before: str, text: str) -> None:
    tokenizer = SPELLINGS[kind].tokenizer
    first, ids = tokenizer(before)["input_ids"], tokenizer(before + text)["input_ids"]
    if ids[: len(first)] == first:  # or a token is of both
        growing = Detokenizer(SPELLINGS[kind], first)
        assert "".join(map(growing.add, ids[len(first) :])) + growing.end() == text
        assert len(growing.window) <= 8
