"""Patterns of schemas: grammars let texts through that match, and what dialects read in several ways is refused."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from attnmesh.errors import GrammarError
from attnmesh.hf.serving.grammar_masks import Grammar, GrammarTokens
from attnmesh.serve.refused import Refused
from attnmesh.serve.schema_limits import checked_divisors
from attnmesh.serve.schema_patterns import write_patterns
from attnmesh.serve.tool_grammars import Rules
from tests.support.serving.grammars import BYTES, END, grammar_of, grammars_of, ids_of

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def grammar_tokens() -> Iterator[GrammarTokens]:
    made = GrammarTokens(BYTES)
    yield made
    made.close()


def fits(grammar_tokens: GrammarTokens, schema: Any, text: str) -> bool:
    """Return whether a text follows a schema."""
    matcher, ids = grammar_tokens.matcher(Rules({}).alone(schema)), ids_of(text)
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting())


PATTERNS = {
    "no quote": r'^[^"]$',
    "no backslash": r"^[^\\]$",
    "a name of a file": r'^[^\\/:*?"<>|]$',
    "neither": r'^(?:[^"\\\n]|\n)$',
    "control characters": r"^[\x00-\x1f]$",
    "and a blank": r"^[\u0000-\u0020]$",
    "not printable": r"^[^ -~]$",
    "all": r"^[\s\S]$",
    "brackets": r"^[^\[\]()]$",
    "letters": r"^[a-z\-&~]$",
    "no digit": r"^\D$",
    "any": r"^.$",
}
SIGNS = '"\\\n\t\x01\x1f /[]a5-&~é\x7f'


@pytest.mark.parametrize("name", PATTERNS)
def test_a_text_follows_its_pattern_and_others_do_not(grammar_tokens: GrammarTokens, name: str) -> None:
    pattern = PATTERNS[name]
    checked_divisors("f", {"type": "string", "pattern": pattern})
    for sign in SIGNS:
        escaped = {'"': r"\"", "\\": r"\\", "\n": r"\n", "\t": r"\t", "\x7f": r"\u007f"}.get(sign)
        text = f'"{escaped or (sign if sign >= " " else f"{chr(92)}u{ord(sign):04x}")}"'
        assert json.loads(text) == sign
        matches = re.search(pattern, sign) is not None
        assert fits(grammar_tokens, {"type": "string", "pattern": pattern}, text) == matches, sign
        names = {"type": "object", "patternProperties": {pattern: {}}, "additionalProperties": False}
        assert fits(grammar_tokens, names, f"{{{text}: 1}}") == matches, sign


def test_classes_by_name_have_no_quotes_that_they_exclude(grammar_tokens: GrammarTokens) -> None:
    for text, matches in ((r'"\""', False), (r'"\\"', False), ('"a"', True), (r'"\n"', True)):
        assert fits(grammar_tokens, {"type": "string", "pattern": r"^\P{P}$"}, text) == matches


def test_only_patterns_are_rewritten() -> None:
    same = {"const": {"pattern": "[^a]"}, "properties": {"pattern": {"enum": ["[^a]"]}}, "title": "[^a]"}
    assert write_patterns(same) == same
    within = {"anyOf": [{"items": {"pattern": "[^a]"}}, True], "$defs": {"b": {"patternProperties": {"[^a]": False}}}}
    written = json.loads(json.dumps(within).replace("[^a]", "[[^a]--\\\\x00]"))
    assert write_patterns(within) == written


@pytest.mark.parametrize(
    "pattern",
    ["[a[b]]", "[[:alpha:]]", "[a-z&&[^b]]", "[a-z--b]", "[+--]", "[a~~b]", "[]a]", "[^]a]", "[]", r"\x00|[^a]", "\0"],
)
def test_what_dialects_read_in_several_ways_is_refused_by_its_field(pattern: str) -> None:
    for schema, field in (
        ({"type": "array", "items": {"type": "string", "pattern": pattern}}, "f.items.pattern"),
        ({"patternProperties": {pattern: True}}, f"f.patternProperties.{pattern}"),
    ):
        with pytest.raises(Refused, match=r"expected classes without|expected no character of code 0") as raised:
            checked_divisors("f", schema)
        assert raised.value.param == field


def test_the_cause_of_a_pattern_that_is_none_is_told(grammar_tokens: GrammarTokens) -> None:
    for pattern, cause in (("(", "unclosed group"), (r"^\cA$", "unrecognized escape sequence")):
        with pytest.raises(GrammarError, match=f"regex parse error: {cause}"):
            grammar_tokens.begin(Grammar(Rules({}).alone({"type": "string", "pattern": pattern})), [END])
    asked = {"type": "json_schema", "json_schema": {"name": "f", "schema": {"type": "string", "pattern": "("}}}
    with grammars_of(BYTES) as (made, _), pytest.raises(Refused, match="unclosed group"):
        grammar_of(made, response_format=asked)
