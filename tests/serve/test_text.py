from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from attnmesh.serve.text import Piece, Text, Token
from tests.support.fake_engine import byte_tokenizer

TOKENIZER = byte_tokenizer()
BYTES = st.text("ab é😀\ufffd", max_size=20).map(lambda text: TOKENIZER(text)["input_ids"])
IDS = st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=30) | BYTES
STOPS = st.lists(st.text("ab é😀", min_size=1, max_size=3), max_size=3).map(tuple)


def pieces(ids: list[int], stops: tuple[str, ...]) -> tuple[list[Piece], Text]:
    """Return all pieces, with the last tokens unread if a stop string came before."""
    text, found = Text(TOKENIZER, stops), []
    for id in ids:
        found.append(text.add(Token(id)))
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
    sent = [token.id for piece in found for token in piece.tokens]
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
    text = Text(TOKENIZER, ("END",))
    sent = [text.add(Token(id)).text for id in TOKENIZER("aEENxEND")["input_ids"]]
    assert sent == ["a", "", "E", "", "ENx", "", "", ""]
    assert text.stopped


def test_half_a_character_is_held_back() -> None:
    text = Text(TOKENIZER, ())
    ids = TOKENIZER("é😀")["input_ids"]
    assert [text.add(Token(id)).text for id in ids] == ["", "é", "", "", "", "😀"]
    assert text.end() == Piece("")
    assert Text(TOKENIZER, ()).add(Token(ids[0])) == Piece("")
