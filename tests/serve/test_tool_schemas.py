"""Tools of requests: those that are none are refused by their field."""

from typing import Any

import pytest

from attnmesh.serve.chat import encode_chat
from attnmesh.serve.refused import Refused
from attnmesh.serve.request_fields import CHAT, read_fields
from attnmesh.serve.tool_schemas import MAX_TOOL_CHARACTERS, MAX_TOOLS
from tests.support.serving.fake_engine import HERMES, byte_tokenizer
from tests.support.serving.served import chat
from tests.support.serving.tool_calls import WEATHER

TOOLS: list[Any] = [WEATHER]


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {}} | fields}


def parameters(**properties: Any) -> dict[str, Any]:
    return function(parameters={"type": "object", "properties": properties})


DEEP: dict[str, Any] = {}
for _ in range(40):
    DEEP = {"items": DEEP}


BAD: dict[str, tuple[list[Any], str]] = {
    "type": ([{"type": "custom"}], "tools[0]"),
    "no function": ([WEATHER, {"type": "function", "function": "f"}], "tools[1]"),
    "name with quotes": ([function(name='f"} {{ x }}')], "tools[0].function.name"),
    "no name": ([{"type": "function", "function": {}}], "tools[0].function.name"),
    "long name": ([function(name="f" * 65)], "tools[0].function.name"),
    "twice": ([function(), function()], "tools[1].function.name"),
    "unknown": ([function(returns={})], "tools[0].function"),
    "description": ([function(description=["x"])], "tools[0].function.description"),
    "half a character": ([function(description="\ud800")], "tools[0].function.description"),
    "half a character within": (
        [parameters(x={"enum": ["\ud800"]})],
        "tools[0].function.parameters.properties.x.enum[0]",
    ),
    "half a character as a name": ([parameters(**{"\ud800": 1})], "tools[0].function.parameters.properties.?"),
    "strict": ([function(strict="yes")], "tools[0].function.strict"),
    "parameters": ([function(parameters=[])], "tools[0].function.parameters"),
    "another type": ([function(parameters={"type": "array"})], "tools[0].function.parameters"),
    "properties": ([function(parameters={"properties": []})], "tools[0].function.parameters.properties"),
    "a property": ([parameters(x=1)], "tools[0].function.parameters.properties.x"),
    "type of a property": ([parameters(x={"type": "text"})], "tools[0].function.parameters.properties.x.type"),
    "required": ([function(parameters={"required": [1]})], "tools[0].function.parameters.required"),
    "any": ([parameters(x={"anyOf": {}})], "tools[0].function.parameters.properties.x.anyOf"),
    "deep": ([parameters(x=DEEP)], "tools[0].function.parameters.properties.x" + 31 * ".items"),
    "many": ([function(name=f"f{i}") for i in range(MAX_TOOLS + 1)], "tools"),
    "huge": ([function(description="x" * (MAX_TOOL_CHARACTERS + 1))], "tools[0].function.description"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_tool_that_is_none_is_refused_by_its_field(name: str) -> None:
    tools, field = BAD[name]
    fields = read_fields(chat(tools=tools), CHAT)
    with pytest.raises(Refused) as raised:
        encode_chat(byte_tokenizer(HERMES), fields)
    assert (raised.value.status, raised.value.param) == (400, field)
    assert str(raised.value).startswith(f"{field}: expected ")


def test_a_format_beside_calls_that_must_be_is_text_in_utf_8_too() -> None:
    """A response of /v1/responses repeats it, though no grammar is made of it."""
    format = {"type": "json_schema", "json_schema": {"name": "f", "schema": {"enum": ["\ud800"]}}}
    fields = read_fields(chat(tools=TOOLS, tool_choice="required", response_format=format), CHAT)
    with pytest.raises(Refused, match=r"^response_format\.json_schema\.schema\.enum\[0\]: expected text in UTF-8"):
        encode_chat(byte_tokenizer(HERMES), fields)


def test_schemas_of_frameworks_are_taken() -> None:
    made = {
        "$defs": {"Unit": {"enum": ["C", "F"], "title": "Unit", "type": "string"}},
        "additionalProperties": False,
        "properties": {
            "unit": {"anyOf": [{"$ref": "#/$defs/Unit"}, {"type": "null"}], "default": None},
            "days": {"items": {"type": ["integer", "string"], "minimum": 0}, "type": "array"},
            "any": True,
        },
        "type": "object",
    }
    tools = [
        function(parameters=made, description=None, strict=False),
        function(name="no.parameters-1", parameters=None),
    ]
    encode_chat(byte_tokenizer(HERMES), read_fields(chat(tools=tools), CHAT))
