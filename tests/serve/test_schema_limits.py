"""Limits of schemas: a schema ends if a value of it can be built, and work is counted over references."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnmesh.serve.refused import Refused
from attnmesh.serve.schema_limits import LEVELS, PATTERN_NAMES, PATTERNS, SchemaGraph, Work, checked_divisors, depth_of

pytestmark = pytest.mark.quick

NAMES = ("a", "b", "c")
REFERENCES = st.sampled_from(["#", *(f"#/$defs/{name}" for name in NAMES)]).map(lambda place: {"$ref": place})


def larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, min_size=1, max_size=2)
    objects = st.tuples(inner, st.sets(st.sampled_from("xy"))).map(
        lambda one: {"type": "object", "properties": {"x": one[0]}, "required": sorted(one[1])}
    )
    arrays = st.tuples(inner, st.integers(0, 1)).map(lambda one: {"type": "array", "items": one[0], "minItems": one[1]})
    return objects | arrays | lists.map(lambda some: {"anyOf": some})


SCHEMAS = st.recursive(REFERENCES | st.just({"type": "null"}), larger, max_leaves=4)
NONE = object()
"""Stands for no value within some schemas of each other."""


def value_of(schema: Any, root: dict[str, Any], depth: int) -> Any:
    """Return a value of a schema, made of at most `depth` schemas inside each other, or `NONE`."""
    if depth == 0:
        return NONE
    if schema is True:
        return 0
    if "$ref" in schema:
        place = schema["$ref"].removeprefix("#").removeprefix("/$defs/")
        return value_of(root["$defs"][place] if place else root, root, depth - 1)
    if "anyOf" in schema:
        values = (value_of(inner, root, depth - 1) for inner in schema["anyOf"])
        return next((value for value in values if value is not NONE), NONE)
    if schema["type"] == "array":
        items = [value_of(schema["items"], root, depth - 1)] * schema["minItems"]
        return NONE if NONE in items else items
    if schema["type"] == "object":
        found = {name: value_of(schema["properties"].get(name, True), root, depth - 1) for name in schema["required"]}
        return NONE if NONE in found.values() else found
    return None


@given(SCHEMAS, st.tuples(SCHEMAS, SCHEMAS, SCHEMAS))
def test_a_schema_ends_where_each_definition_that_it_reaches_has_a_value(
    schema: dict[str, Any], definitions: tuple[Any, ...]
) -> None:
    root = schema | {"$defs": dict(zip(NAMES, definitions, strict=True))}
    graph = SchemaGraph("f", root)
    reached = [one for one, _ in graph.defined.values()]
    ends = all(value_of(one, root, depth=40) is not NONE for one in reached)
    if ends:
        graph.check_ends()
    else:
        with pytest.raises(Refused, match="f: expected schemas of values that end"):
            graph.check_ends()


def chain(length: int, last: Any) -> dict[str, Any]:
    """Return a schema that refers to definitions, each of which refers to the next."""
    places = [{"items": {"$ref": f"#/$defs/{number + 1}"}} for number in range(length)]
    return {"$ref": "#/$defs/0", "$defs": {str(number): one for number, one in enumerate([*places, last])}}


def test_levels_are_counted_over_references() -> None:
    assert depth_of({"items": {"anyOf": [True, {"items": {"type": "null"}}]}}) == 4
    # The root is one level, each definition is two, and the last is one.
    whole = (LEVELS - 2) // 2
    SchemaGraph("f", chain(whole, {"type": "null"})).check_levels()
    with pytest.raises(Refused, match=f"at most {LEVELS} inside each other"):
        SchemaGraph("f", chain(whole, {"items": True})).check_levels()


def test_levels_of_definitions_in_a_circle_count_together() -> None:
    def deep(levels: int, last: Any) -> Any:
        return {"items": deep(levels - 1, last)} if levels > 1 else last

    def graph_of(levels: int) -> SchemaGraph:
        definitions = {"a": deep(levels, {"$ref": "#/$defs/b"}), "b": deep(LEVELS // 2, {"$ref": "#/$defs/a"})}
        return SchemaGraph("f", {"$ref": "#/$defs/a", "$defs": definitions})

    graph_of(LEVELS // 2 - 1).check_levels()  # with one level of the root
    with pytest.raises(Refused, match=f"at most {LEVELS} inside each other"):
        graph_of(LEVELS // 2).check_levels()


def test_patterns_add_up_where_they_hold_for_one_text() -> None:
    pattern = {"type": "string", "pattern": "a"}
    assert SchemaGraph("f", {"anyOf": [pattern] * 5}).work() == Work(1, 1)
    assert SchemaGraph("f", {"allOf": [pattern, pattern | {"format": "date"}]}).work() == Work(3, 1)
    assert SchemaGraph("f", {"properties": {"x": pattern, "y": pattern}}).work().patterns == 1
    checked_divisors("f", {"allOf": [pattern] * PATTERNS})
    with pytest.raises(Refused, match=f"at most {PATTERNS} patterns"):
        checked_divisors("f", {"allOf": [pattern] * (PATTERNS + 1)})


def test_divisors_multiply_where_they_hold_for_one_number() -> None:
    both = {"allOf": [{"multipleOf": 6}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"multipleOf": 10}}}
    assert SchemaGraph("f", both).work() == Work(0, 60)
    assert checked_divisors("f", both) == (6 + 10) * 60 // 10
    assert checked_divisors("f", {"anyOf": [{"multipleOf": 6}, {"multipleOf": 10}]}) == 16
    assert checked_divisors("f", {"type": "string"}) == 0


def test_references_and_addresses_that_lead_nowhere_are_refused_by_their_place() -> None:
    for place in ("#/$defs/b", "a", "#a", 5, "#/type"):
        with pytest.raises(Refused) as raised:
            checked_divisors("f", {"properties": {"x": {"$ref": place}}, "type": "object", "$defs": {"a": True}})
        assert raised.value.param == "f.properties.x.$ref"
    for place in ("99", "00", "00000000099", "0" * 5000, "9" * 5000, "-1", "\u0661", ""):
        with pytest.raises(Refused, match=r"^f\.anyOf\[1\]\.\$ref: expected ") as raised:
            checked_divisors("f", {"anyOf": [{"type": "null"}, {"$ref": f"#/anyOf/{place}"}]})
    checked_divisors("f", {"anyOf": [{"type": "null"}, {"$ref": "#/anyOf/0"}]})
    with pytest.raises(Refused, match=r"f.items.\$id: expected none within a schema"):
        checked_divisors("f", {"$id": "taken", "items": {"$id": "refused"}})
    many = {"patternProperties": {str(number): True for number in range(PATTERN_NAMES + 1)}}
    with pytest.raises(Refused, match=f"f.patternProperties: expected at most {PATTERN_NAMES}"):
        checked_divisors("f", many)


def test_a_choice_of_no_schema_is_refused_as_one() -> None:
    for keyword in ("anyOf", "oneOf"):
        with pytest.raises(Refused, match=rf"^f\.properties\.a\.{keyword}: expected at least one schema\.$"):
            checked_divisors("f", {"type": "object", "properties": {"a": {keyword: []}}, "required": ["a"]})
