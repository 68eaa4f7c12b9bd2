"""Numbers of schemas: what is not refused by its field is written exactly, and no number ends the process."""

import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from attnmesh.hf.serving.grammar_masks import Grammar, GrammarTokens
from attnmesh.serve.grammars import AskedGrammar, check_schema_size
from attnmesh.serve.refused import Refused
from attnmesh.serve.schema_numbers import check_numbers
from attnmesh.serve.tool_grammars import Rules
from tests.support.serving.grammars import BYTES, END, grammar_of, grammars_of, ids_of

pytestmark = pytest.mark.quick

LEAST = -(1 << 63)
INEXACT: dict[str, tuple[Any, str]] = {
    "the least integer of 64 bits": ({"const": LEAST}, ".const"),
    "one that is rounded to it": ({"enum": [0, LEAST + 1]}, ".enum[1]"),
    "within a list": ({"properties": {"a": {"const": [{"b": LEAST}]}}}, ".properties.a.const[0].b"),
    "an id": ({"enum": [175928847299117063]}, ".enum[0]"),
    "the first that no float holds": ({"const": 9007199254740993}, ".const"),
    "the first beyond 64 bits": ({"const": 1 << 63}, ".const"),
    "many digits": ({"const": 10**400}, ".const"),
    "17 digits": ({"const": 94.95886283158103}, ".const"),
    "least bound": ({"type": "integer", "minimum": LEAST}, ".minimum"),
    "bound": ({"type": "integer", "minimum": 10**20, "maximum": 10**20 + 5}, ".minimum"),
    "bound of floats": ({"type": "number", "maximum": (1 << 60)}, ".maximum"),
    "next to a bound": ({"type": "integer", "exclusiveMinimum": 1 << 62}, ".exclusiveMinimum"),
    "exclusive": ({"type": "integer", "maximum": 1 << 62, "exclusiveMaximum": True}, ".maximum"),
    "behind a reference": (
        {"type": "array", "items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"const": LEAST}}},
        ".$defs.a.const",
    ),
}


@pytest.mark.parametrize("name", INEXACT)
def test_a_number_that_a_grammar_cannot_hold_is_refused_by_its_field(name: str) -> None:
    schema, field = INEXACT[name]
    with pytest.raises(Refused, match="expected a number that a float of 64 bits holds, given ") as raised:
        check_schema_size(AskedGrammar(content=schema, field="response_format"))
    assert (raised.value.status, raised.value.param) == (400, f"response_format.json_schema.schema{field}")


def test_numbers_of_strict_tools_are_refused_too() -> None:
    parameters = {"type": "object", "properties": {"id": {"const": LEAST}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}
    with grammars_of(BYTES, "hermes") as (made, _), pytest.raises(Refused) as raised:
        grammar_of(made, tools=[tool])
    assert raised.value.param == "tools[0].function.parameters.properties.id.const"


@pytest.fixture(scope="module")
def grammar_tokens() -> Iterator[GrammarTokens]:
    made = GrammarTokens(BYTES)
    yield made
    made.close()


def only_text(grammar_tokens: GrammarTokens, schema: Any) -> str:
    """Return the one text that follows a schema."""
    state, ids = grammar_tokens.begin(Grammar(Rules({}).alone(schema)), [END]), list[int]()
    while not (mask := state.mask()).is_whole:
        (id,) = mask.allowed.nonzero().flatten().tolist()
        ids.append(id)
        state.advance(id)
    return str(BYTES.decode(ids))


NUMBERS = (
    st.integers(-(1 << 65), 1 << 65)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.floats(-180, 180)
    | st.tuples(st.integers(-999, 999), st.integers(0, 25)).map(lambda one: one[0] * 10 ** one[1])
    | st.tuples(st.integers(50, 64), st.integers(-2, 2)).map(lambda one: (1 << one[0]) + one[1])
)


@given(NUMBERS)
@example(10**18)
@example((1 << 63) - 1)
@example(-8_000_000_000_000_000_000)
@example(1e22)
@example(5e-324)
def test_a_number_that_is_served_is_written_exactly(grammar_tokens: GrammarTokens, number: int | float) -> None:
    try:
        check_numbers("f", {"const": number})
    except Refused:
        assume(False)
    assert Decimal(only_text(grammar_tokens, {"const": number})) == Decimal(repr(number))


@pytest.mark.parametrize("number", [0, -1, 0.1, 25.99, 1e22, 1 << 53, -(1 << 53), 10**18, (1 << 63) - 1])
def test_common_numbers_are_served(number: int | float) -> None:
    check_numbers("f", {"const": number, "enum": [[number, True], {"a": number}]})


def fits(grammar_tokens: GrammarTokens, schema: Any, number: int) -> bool:
    """Return whether a number follows a schema."""
    matcher = grammar_tokens.matcher(Rules({}).alone(schema))
    ids = ids_of(json.dumps(number))
    return bool(matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting())


@given(NUMBERS, st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]))
@example((1 << 63) - 1, "maximum")
@example((1 << 53) - 1, "exclusiveMaximum")
@example(-8.110693713770806e16, "minimum")
def test_a_bound_that_is_served_is_where_it_is_said(
    grammar_tokens: GrammarTokens, bound: int | float, keyword: str
) -> None:
    schema = {"type": "integer", keyword: bound}
    try:
        check_numbers("f", schema)
    except Refused:
        assume(False)
    assume(not grammar_tokens.matcher(Rules({}).alone(schema)).is_error())  # refused by its schema
    exact = Decimal(repr(bound))
    for number in {int(exact) + step for step in (-1, 0, 1)}:
        inside = number >= exact if "inimum" in keyword else number <= exact
        assert fits(grammar_tokens, schema, number) == (
            inside and not (keyword.startswith("exclusive") and number == exact)
        )
