"""The tools of a request: functions with a name, a description and a schema of parameters, or they are refused."""

import re
from collections.abc import Iterator
from typing import Any

from attnmesh.serve.refused import Refused
from attnmesh.serve.request_fields import is_text, wrong_value
from attnmesh.serve.tool_formats import Tools

MAX_TOOLS = 1024
"""Tools of a request at most."""

MAX_TOOL_CHARACTERS = 1 << 20
"""Characters of all tools of a request at most."""

MAX_SCHEMA_DEPTH = 32
"""Schemas inside each other at most."""

FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""Names of functions: OpenAI's, and points."""

JSON_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value has schemas by name."""
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE = ("items", "additionalItems", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else")


def check_tools(tools: list[dict[str, Any]]) -> None:
    """Raise on the first field of a tool that is not served."""
    if len(tools) > MAX_TOOLS:
        raise Refused(400, f"tools: expected at most {MAX_TOOLS} tools, given {len(tools)}", "tools")
    names = set[str]()
    characters = 0
    for index, tool in enumerate(tools):
        field = f"tools[{index}]"
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict) or tool.keys() - {"type", "function"}:
            raise wrong_value(field, "type function, and function with a name and parameters", tool)
        if more := function.keys() - {"name", "description", "parameters", "strict"}:
            raise wrong_value(f"{field}.function", "name, description, parameters and strict alone", sorted(more))
        name, description = function.get("name"), function.get("description")
        if not isinstance(name, str) or not FUNCTION_NAME.fullmatch(name):
            raise wrong_value(
                f"{field}.function.name", "1 to 64 of letters, digits, underscores, dashes and points", name
            )
        if name in names:
            raise wrong_value(f"{field}.function.name", "a name that no other tool has", name)
        names.add(name)
        if description is not None and not is_text(description):
            raise wrong_value(f"{field}.function.description", "text in UTF-8", description)
        if not isinstance(function.get("strict"), bool | None):
            raise wrong_value(f"{field}.function.strict", "true or false", function["strict"])
        parameters = function.get("parameters")
        if parameters is not None:
            if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
                raise wrong_value(f"{field}.function.parameters", "a schema of type object", parameters)
            check_schema(f"{field}.function.parameters", parameters)
        for place, text in _texts(function, f"{field}.function"):
            characters += len(text)
            if characters > MAX_TOOL_CHARACTERS:
                raise wrong_value(place, f"at most {MAX_TOOL_CHARACTERS:,} characters of all tools", text)


def properties_of(tools: list[dict[str, Any]]) -> Tools:
    """Return the properties of each tool's parameters."""
    functions = [tool["function"] for tool in tools]
    return {function["name"]: (function.get("parameters") or {}).get("properties") or {} for function in functions}


def check_schema(field: str, schema: Any, depth: int = MAX_SCHEMA_DEPTH) -> None:
    """Raise unless a value is a schema, as far as chat templates read it."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict) or not depth:
        raise wrong_value(field, f"a schema of at most {MAX_SCHEMA_DEPTH} inside each other", schema)
    types = schema.get("type", [])
    for kind in types if isinstance(types, list) else [types]:
        if kind not in JSON_TYPES:
            raise wrong_value(f"{field}.type", f"one of {', '.join(JSON_TYPES)}, or a list of them", types)
    for keyword, kind in (("required", list), ("enum", list), ("description", str), ("title", str)):
        value = schema.get(keyword)
        if value is not None and (not isinstance(value, kind) or (keyword == "required" and not _are_names(value))):
            raise wrong_value(
                f"{field}.{keyword}", {"required": "a list of names", "enum": "a list"}.get(keyword, "text"), value
            )
    for place, inner in inner_schemas(field, schema):
        check_schema(place, inner, depth - 1)


def check_texts(field: str, value: Any) -> None:
    """Raise on a text within a value that is no UTF-8."""
    for _ in _texts(value, field):
        pass


def _are_names(values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def inner_schemas(field: str, schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas within one."""
    for keyword, value in schema.items():
        place = f"{field}.{keyword}"
        if keyword in OF_SCHEMAS:
            if not isinstance(value, dict):
                raise wrong_value(place, "an object of schemas", value)
            yield from ((f"{place}.{name[:60]}", inner) for name, inner in value.items())
        elif keyword in LISTS:
            if not isinstance(value, list):
                raise wrong_value(place, "a list of schemas", value)
            yield from ((f"{place}[{index}]", inner) for index, inner in enumerate(value))
        elif keyword in SINGLE:
            several = isinstance(value, list) and keyword == "items"
            yield from (
                ((f"{place}[{index}]", inner) for index, inner in enumerate(value)) if several else [(place, value)]
            )


def _texts(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """Yield each text within a value, with the field that it is in; raise on one that is no UTF-8."""
    if isinstance(value, str):
        if not is_text(value):
            raise wrong_value(place, "text in UTF-8", value)
        yield place, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _texts(name, place)
            yield from _texts(inner, f"{place}.{name[:60]}" if is_text(name) else place)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _texts(inner, f"{place}[{index}]")
