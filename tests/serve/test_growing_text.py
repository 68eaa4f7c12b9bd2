"""A text that grows: readers find the same, however the text is cut while it comes."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from attnmesh.serve.growing_text import GrowingText, NoMatch, Reader, check_json, check_object, partial_mark_length

pytestmark = pytest.mark.quick


def read(pieces: list[str], reader: Callable[[GrowingText], Reader[Any]]) -> tuple[list[str], Any, str]:
    """Return the parts that a reader yields of a text that comes in pieces, its result, and the text after it."""
    text, coming, parts = GrowingText(), iter(pieces), list[str]()
    reading = reader(text)
    while True:
        try:
            part = next(reading)
        except StopIteration as end:
            return parts, end.value, (text.text + "".join(coming))[text.at :]
        except NoMatch:
            return parts, NoMatch, ""
        if part is not None:
            parts.append(part)
        elif (piece := next(coming, None)) is not None:
            text.add(piece)
        else:
            assert not text.ended, "a reader ends with the text"
            text.ended = True


READERS: dict[str, Callable[[GrowingText], Reader[Any]]] = {
    "until": lambda text: text.until("</a>"),
    "pieces": lambda text: text.pieces("</a>", "</ab>"),
    "expect": lambda text: text.expect("<a>", "<ab>", "{"),
    "close": lambda text: text.close("</a>"),
    "word": lambda text: text.word(),
    "json": lambda text: text.json_text(),
    "members": lambda text: text.members(frozenset(("a", "b"))),
}
TEXTS = st.lists(
    st.sampled_from(["<a>", "</a>", "</ab>", "<", "/a", '{"a":', '"b"', "1", ",", "}", "[", "]", '\\"', " "])
)


@given(st.sampled_from(sorted(READERS)), TEXTS.map("".join), st.data())
def test_a_text_in_pieces_is_read_as_the_whole(name: str, text: str, data: st.DataObject) -> None:
    places = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[start:stop] for start, stop in zip([0, *places], [*places, len(text)], strict=True)]
    parts, result, rest = read(pieces, READERS[name])
    whole_parts, whole_result, whole_rest = read([text], READERS[name])
    assert ("".join(parts), result, rest) == ("".join(whole_parts), whole_result, whole_rest)


def test_text_before_a_mark_comes_as_soon_as_it_is_certain() -> None:
    assert read(["ab<", "/", "c</a", ">d"], READERS["pieces"]) == (["ab", "</c"], None, "d")
    assert read(["ab</"], READERS["pieces"]) == (["ab", "</"], None, "")
    assert read(["ab<", "/a>d"], READERS["until"]) == ([], "ab", "d")
    assert read(["ab</a"], READERS["until"])[1] is NoMatch


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('a"\\{}[]é', max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('a"}', max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES, st.sampled_from([None, 1]))
def test_a_value_of_json_ends_where_pythons_reader_ends(value: Any, indent: int | None) -> None:
    text = json.dumps(value, indent=indent)
    _, found, rest = read([*text, "] }"], READERS["json"])
    assert (found, rest) == (text, "] }")
    check_json(found)


def test_members_are_those_of_an_object_each_once() -> None:
    assert read(['{"a" : [1, {}], "b":"}"} x'], READERS["members"])[1:] == ({"a": "[1, {}]", "b": '"}"'}, " x")
    for text in ('{"c": 1}', '{"a": 1, "a": 2}', "{}", '{"a": 1', "[1]"):
        assert read([text], READERS["members"])[1] is NoMatch


@given(st.lists(st.sampled_from([*'{}[],:"', '"a"', "1", "-0.5e3", "null", " ", "\\n"])).map("".join))
@example('{"a": [1, {"b": []}], "c": "\\u00e9"}')
@example("[1,]")
@example('{"a":1,}')
@example("01")
@example("")
@example('"\n"')
def test_what_is_json_for_python_is_json(text: str) -> None:
    try:
        json.loads(text)
    except ValueError:
        with pytest.raises(NoMatch):
            check_json(text)
    else:
        check_json(text)


@pytest.mark.parametrize(
    "text", ["1e999", '{"a": 1, "a": 1}', "9" * 5000, "[" * 100_000 + "]" * 100_000, '{"a":' * 5000 + "1" + "}" * 5000]
)
def test_values_that_python_would_not_read_are_json(text: str) -> None:
    check_json(text)
    assert read([f"{text} "], READERS["json"])[1:] == (text, " ")


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", "[1", "[" * 100_000, '"' + "a" * 100_000, '"' + "\\n" * 100_000])
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(NoMatch):
        check_json(text)


def test_an_object_is_no_list() -> None:
    check_object(' {"a": [1.5]}')
    for text in ("[]", "1", "", " "):
        with pytest.raises(NoMatch):
            check_object(text)


def test_a_mark_stands_where_its_token_was_written_and_not_where_it_is_spelled() -> None:
    text = GrowingText(special=["<a>"])
    text.add("x<a>y<a>", begins=[5])
    assert (text.find("<a>"), text.find("y")) == (5, 4)
    assert text.cut(5) == "x<a>y"
    assert text.is_at("<a>", 0)
    text.add("<a>", begins=[11])
    assert (text.find("<a>", 1), text.find("<a><a>")) == (-1, -1)  # the second begins at 8 of all text


@given(st.text("<a/>", max_size=8))
def test_the_end_that_may_begin_a_mark_is_the_longest(text: str) -> None:
    marks = ("<a>", "</a>")
    begun = [n for n in range(4) if any(mark.startswith(text[len(text) - n :]) and n < len(mark) for mark in marks)]
    assert partial_mark_length(text, marks) == max(n for n in begun if n <= len(text))
