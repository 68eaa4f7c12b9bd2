"""JSON of bodies: read as Python's reader reads it, or refused, in time that grows with the text alone."""

import json
import sys
from contextlib import suppress
from math import isfinite
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attnmesh.serve import json_reader
from attnmesh.serve.json_reader import DEPTH, JsonReader
from attnmesh.serve.refused import Refused

MOST = 1000
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4)
)
SIGNS = st.text('{}[]",:\\ \n\t/ubn0d8c19-+.eE\x00é😀Natrfsl', max_size=12)


def attempt(text: str) -> Any:
    """Return what is read, in a list; an empty one if it is refused."""
    with suppress(Refused):
        return [JsonReader(text, MOST).read()]
    return []


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError
    return dict(pairs)


def refuse(name: str) -> Any:
    raise ValueError


def finite(text: str) -> float:
    return float(text) if isfinite(float(text)) else refuse(text)


def expected(text: str) -> Any:
    try:
        return [json.loads(text, object_pairs_hook=once, parse_constant=refuse, parse_float=finite)]
    except ValueError:
        return []


@pytest.mark.parametrize("short", [7, 256])
@settings(max_examples=50)
@given(VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_json_is_read_as_python_reads_it(short: int, value: Any, ascii: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii, indent=indent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_reader, "SHORT", short)
        patch.setattr(json_reader, "LONG", short)
        assert attempt(text) == expected(text) == [value]


@given(st.lists(SIGNS | VALUES.map(json.dumps), max_size=5).map("".join))
@example('"\\ud83d\\ude00"')
@example('"a\\')
@example("[1,2,3,]")
@example("[1, 2,03, 4]")
@example('{"a": 1, "a": 2}')
@example("[1e308, -1e309]")
def test_what_python_refuses_is_refused(text: str) -> None:
    for short in (7, 256):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(json_reader, "SHORT", short)
            assert attempt(text) == expected(text), text


def test_limits_of_values_and_of_depth_are_exact() -> None:
    assert attempt("[" * DEPTH + "]" * DEPTH)
    assert not attempt("[" * (DEPTH + 1) + "]" * (DEPTH + 1))
    for spelled in ("1", "{}", '"x"', "{}"):
        assert attempt(f"[{', '.join([spelled] * (MOST - 1))}]")
        assert not attempt(f"[{', '.join([spelled] * MOST)}]")
    assert not attempt("{" + ",".join(f'"{i}":1' for i in range(MOST)) + "}")
    assert not attempt("[" * 100_000)


HOSTILE = {
    "names": lambda n: "{" + ",".join(f'"{i}":1' for i in range(n // 10)) + ',"0":1}',
    "a text": lambda n: f'"{"x" * n}"',
    "escapes": lambda n: '"' + "\\n" * (n // 2) + '"',
    "backslashes": lambda n: '"' + "\\" * n + '"',
    "quotes": lambda n: '"' + '\\"' * (n // 2) + '"',
    "halves": lambda n: '"' + "\\ud83d\\ude00" * (n // 12) + '"',
    "spaces": lambda n: " " * n,
    "digits": lambda n: "9" * n,
    "names that are long": lambda n: '{"' + "x" * n + '": 1}',
    "numbers": lambda n: "[" + "1," * (n // 2) + "1]",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_work_grows_with_the_text_alone(name: str) -> None:
    def steps(text: str) -> int:
        count = 0

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal count
            count += event == "line"
            return trace

        sys.settrace(trace)
        try:
            with suppress(Refused):
                JsonReader(text, 1 << 20).read()
        finally:
            sys.settrace(None)
        return count

    small, large = steps(HOSTILE[name](1 << 14)), steps(HOSTILE[name](1 << 16))
    assert large < 5 * small + 200
