"""Spelling: the bytes of tokens join to the bytes of a text, and characters are whole where Python decodes them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnmesh.serve.spelling import SIGNS, Spelling, goes_on, is_whole
from tests.support.serving.fake_engine import byte_tokenizer, sentencepiece_tokenizer

pytestmark = pytest.mark.quick

SPELLINGS = {"bytes": Spelling(byte_tokenizer()), "pieces": Spelling(sentencepiece_tokenizer())}


def test_each_byte_has_a_sign_and_a_token() -> None:
    spelling = SPELLINGS["bytes"]
    assert sorted(SIGNS.values()) == [*range(256)]
    for sign, byte in SIGNS.items():
        assert spelling.bytes_of(spelling.tokenizer.convert_tokens_to_ids(sign)) == bytes([byte])


@given(st.sampled_from(sorted(SPELLINGS)), st.text("ab é😀TPris.", max_size=12))
def test_tokens_of_a_text_join_to_its_bytes(kind: str, text: str) -> None:
    spelling = SPELLINGS[kind]
    after = spelling.tokenizer("a", add_special_tokens=False)["input_ids"]
    ids = spelling.tokenizer(f"a{text}", add_special_tokens=False)["input_ids"]
    if ids[: len(after)] == after:  # or the first letters are one token
        assert b"".join(map(spelling.bytes_of, ids[len(after) :])) == text.encode()


def test_half_a_character_is_spelled_by_its_bytes() -> None:
    spelling = SPELLINGS["bytes"]
    first, second = spelling.tokenizer("é")["input_ids"]
    assert (spelling.spell(first), spelling.spell(second, "bytes:")) == (r"\xc3", r"bytes:\xa9")
    assert spelling.spell(spelling.tokenizer("a")["input_ids"][0]) == "a"
    assert not spelling.drops(first)
    assert spelling.drops(spelling.tokenizer.eos_token_id)
    assert spelling.decode([spelling.tokenizer.eos_token_id, first, second]) == "é"


@given(st.characters(exclude_categories=["Cs"]), st.integers(0, 255))
def test_bytes_go_on_with_a_character_up_to_its_end(character: str, other: int) -> None:
    data = character.encode()
    assert is_whole(data)
    for count in range(1, len(data)):
        assert not is_whole(data[:count])
        assert goes_on(data[:count], data[count : count + 1] + b"\xff"), "the first byte alone says so"
        # A byte goes on with a character unless it makes what no text in UTF-8 has.
        texts = (data[:count] + bytes([other]) + bytes(more) for more in ((), (0x80,), (0xBF,), (0x80, 0x80)))
        can_go_on = any(is_whole(text) for text in texts)
        assert goes_on(data[:count], bytes([other])) == can_go_on
