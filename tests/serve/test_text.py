"""The text of an answer: that of all its tokens up to the first stop string, each token with its place."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnmesh.serve.spelling import Spelling
from attnmesh.serve.text import Piece, SentToken, Text
from tests.support.serving.fake_engine import byte_tokenizer, sentencepiece_tokenizer

TOKENIZER = byte_tokenizer()
SPELLING = Spelling(TOKENIZER)
PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
"""Bytes that a byte-level tokenizer spells as themselves; the others are signs from 256 on."""
SIGNS = {chr(value): value for value in PRINTED}
SIGNS |= {chr(256 + n): value for n, value in enumerate(sorted({*range(256)} - {*PRINTED}))}
BYTES = st.text("ab é😀\ufffd", max_size=20).map(lambda text: TOKENIZER(text)["input_ids"])
IDS = st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=30) | BYTES
STOPS = st.lists(st.text("ab é😀", min_size=1, max_size=3), max_size=3).map(tuple)

SPELLED = {value: TOKENIZER.convert_tokens_to_ids(sign) for sign, value in SIGNS.items()}
"""The token of each byte."""


def pieces(ids: list[int], stops: tuple[str, ...]) -> tuple[list[Piece], Text]:
    """Return all pieces, with the last tokens unread if a stop string came before."""
    text = Text(SPELLING, stops)
    found = []
    for id in ids:
        found.append(text.add(SentToken(id)))
        if text.stopped:
            return found, text
    return [*found, text.end()], text


def whole(ids: list[int]) -> str:
    text: Any = TOKENIZER.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return str(text)


@given(IDS)
def test_pieces_join_to_the_text_of_all_tokens(ids: list[int]) -> None:
    found, text = pieces(ids, ())
    assert "".join(piece.text for piece in found) == whole(ids)
    sent = [token.id for piece in found for _, token in piece.sent_tokens]
    assert [id for id in sent if id < 256] == [id for id in ids if id < 256]
    assert not text.stopped


@given(BYTES, STOPS)
def test_text_ends_before_the_first_stop_string(ids: list[int], stops: tuple[str, ...]) -> None:
    found, text = pieces(ids, stops)
    said, all_text = "".join(piece.text for piece in found), whole(ids)
    places = [place for stop in stops if (place := all_text.find(stop)) >= 0]
    assert text.stopped == bool(places)
    if not places:
        assert said == all_text
        return
    # Of two stop strings that overlap, the one that ends first counts: it is found before the other is whole.
    ends = min(all_text.find(stop) + len(stop) for stop in stops if stop in all_text)
    places = [all_text[:ends].find(stop) for stop in stops]
    assert said == all_text[: min(place for place in places if place >= 0)]
    assert not any(stop in said for stop in stops)


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    text = Text(SPELLING, ("END",))
    sent = [text.add(SentToken(id)).text for id in TOKENIZER("aEENxEND")["input_ids"]]
    assert sent == ["a", "", "E", "", "ENx", "", "", ""]
    assert text.stopped


def test_half_a_character_is_held_back() -> None:
    text = Text(SPELLING, ())
    ids = TOKENIZER("é😀")["input_ids"]
    assert [text.add(SentToken(id)).text for id in ids] == ["", "é", "", "", "", "😀"]
    assert text.end() == Piece("")
    assert Text(SPELLING, ()).add(SentToken(ids[0])) == Piece("")


class Counting:
    """A tokenizer that counts the tokens that it decodes."""

    decoded = 0
    bos_token_id, eos_token_id, pad_token_id = None, TOKENIZER.eos_token_id, None

    def decode(self, ids: list[int], **options: Any) -> str:
        self.decoded += len(ids)
        return str(TOKENIZER.decode(ids, **options))

    def __call__(self, text: str, **options: Any) -> Any:
        return TOKENIZER(text, **options)

    def convert_ids_to_tokens(self, id: int) -> str:
        return str(TOKENIZER.convert_ids_to_tokens(id))


ENDLESS = {"no character": SPELLED[0x80], "half a character": SPELLED[0xF0], "no text": 256, "a letter": SPELLED[0x41]}


@pytest.mark.parametrize("id", ENDLESS.values(), ids=ENDLESS)
def test_a_token_costs_the_same_however_many_came_before(id: int) -> None:
    counting = Counting()
    text, ids, said = Text(Spelling(counting), ("END",)), [id] * 1000, ""
    for count, one in enumerate(ids, 1):
        said += text.add(SentToken(one)).text
        assert len(said) >= len(whole(ids[:count])) - 3
    assert said + text.end().text == whole(ids)
    assert counting.decoded < 100 * len(ids)


@given(st.lists(st.sampled_from([0x80, 0xC3, 0xA9, 0xF0, 0x9F, 0x98, 0x80, 0x41]), min_size=40, max_size=120))
def test_long_nonsense_is_the_tokenizers_text(values: list[int]) -> None:
    ids = [SPELLED[value] for value in values]
    found, _ = pieces(ids, ())
    assert "".join(piece.text for piece in found) == whole(ids)


def test_a_stop_string_is_seen_among_bytes_that_form_no_character() -> None:
    ids = [SPELLED[0x80]] * 50 + TOKENIZER("END")["input_ids"]
    found, text = pieces(ids, ("END",))
    assert text.stopped
    assert "".join(piece.text for piece in found) == "\ufffd" * 50
    assert found[10].text


PIECES = sentencepiece_tokenizer()
KINDS = {"bytes": byte_tokenizer(), "pieces": PIECES}
SAID = st.text("ab é😀TPris.", min_size=1, max_size=12)


def said_after(tokenizer: Any, prompt: list[int], ids: list[int]) -> tuple[str, list[tuple[int, SentToken]]]:
    """Return the text of an answer after a prompt, and its tokens with their places."""
    text, found = Text(Spelling(tokenizer), (), prompt), list[Piece]()
    for id in ids:
        found.append(text.add(SentToken(id)))
    found.append(text.end())
    return "".join(one.text for one in found), [token for one in found for token in one.sent_tokens]


def test_an_answer_goes_on_with_the_prompts_last_word() -> None:
    prompt, answer = PIECES("The capital is")["input_ids"], PIECES("x Paris.", add_special_tokens=False)["input_ids"]
    answer = answer[answer.index(PIECES.convert_tokens_to_ids("▁Paris")) :]
    assert said_after(PIECES, prompt, answer)[0] == " Paris."
    assert said_after(PIECES, [], answer)[0] == "Paris."  # a message of its own
    assert said_after(PIECES, [PIECES.bos_token_id], answer)[0] == "Paris."
    half = TOKENIZER("é")["input_ids"]
    assert said_after(TOKENIZER, half[:1], half[1:] + TOKENIZER("s")["input_ids"])[0] == "és"


def test_marks_that_a_model_writes_stay_and_stop() -> None:
    mark, pad = (PIECES.convert_tokens_to_ids(sign) for sign in ("<|channel|>", "<pad>"))
    word = PIECES.convert_tokens_to_ids("▁a")
    assert said_after(PIECES, [], [mark, word, pad, mark, word])[0] == "<|channel|> a<|channel|> a"
    text = Text(Spelling(PIECES), ("<|channel|>",))
    assert [text.add(SentToken(id)).text for id in (word, word, mark)] == ["a", " a", ""]
    assert text.stopped


@given(st.sampled_from(sorted(KINDS)), SAID, SAID)
def test_places_and_bytes_are_those_of_the_text(kind: str, prompt: str, answer: str) -> None:
    tokenizer = KINDS[kind]
    before = tokenizer(prompt)["input_ids"]
    ids = tokenizer(prompt + answer)["input_ids"][len(before) :]
    if not ids or tokenizer(prompt + answer)["input_ids"][: len(before)] != before:
        return  # a token of both
    text, tokens = said_after(tokenizer, before, ids)
    assert text == answer
    spelled = [Spelling(tokenizer).bytes_of(token.id) for _, token in tokens]
    assert b"".join(spelled) == answer.encode()
    whole = [b"".join(spelled[:count]) for count in range(len(spelled))]
    assert [place for place, _ in tokens] == [len(some.decode(errors="ignore")) for some in whole]


def test_bytes_that_form_no_character_have_places() -> None:
    ids = [SPELLED[value] for value in (0xF0, 0x9F, 0x41, 0x80, 0x80, 0xF0, 0x9F, 0x98, 0x80, 0x42)]
    text, tokens = said_after(TOKENIZER, [], ids)
    assert text == whole(ids) == "\ufffdA\ufffd\ufffd😀B"
    assert [place for place, _ in tokens] == [0, 0, 1, 2, 3, 4, 4, 4, 4, 5]
