"""Requests of /v1/responses: their fields, and those of the chat that they mean. Nothing is kept between requests."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from attnmesh.serve.refused import Refused
from attnmesh.serve.request_fields import (
    CHAT,
    FORMAT_PARTS,
    REQUIRED,
    SAMPLING,
    NeutralField,
    RequestFields,
    ServedField,
    is_list_of,
    is_name,
    is_response_format,
    is_text,
    read_fields,
    wrong_value,
)
from attnmesh.serve.responses_input import InputMessages


def is_input(value: Any) -> bool:
    """Return whether a value is text, or a list of items."""
    return is_name(value) or is_list_of(dict)(value)


def is_reasoning(value: Any) -> bool:
    """Return whether a value says how long a model may think."""
    return isinstance(value, dict) and value.keys() <= {"effort", "summary"} and value.get("summary") is None


def is_text_format(value: Any) -> bool:
    """Return whether a value says what the text has to be."""
    return isinstance(value, dict) and value.keys() <= {"format", "verbosity"} and value.get("verbosity") is None


def is_stream_of_events(value: Any) -> bool:
    """Return whether a value is an object of stream options that asks for no obfuscation. Usage always comes."""
    known = isinstance(value, dict) and value.keys() <= {"include_obfuscation"}
    return known and value.get("include_obfuscation") in (None, False)


def is_named(value: Any) -> bool:
    """Return whether a value names a function."""
    named = isinstance(value, dict) and value.keys() == {"type", "name"} and value["type"] == "function"
    return named and is_name(value["name"])


TEXT_FORMAT_EXPECTED = f'type "text" or "json_object", or "json_schema" with {FORMAT_PARTS}'
"""Types of the text of a response."""

REFUSED_RESPONSE_FIELDS = (
    "access_programs",
    "background_options",
    "context_management",
    "conversation",
    "image",
    "max_tool_calls",
    "moderation",
    "prompt",
    "prompt_cache_options",
    "prompt_cache_retention",
)
"""Fields that are refused whatever their value."""

RESPONSES: RequestFields = {
    "input": ServedField(
        is_input, "text, or a list of items", REQUIRED, "messages, calls, their outputs, and reasoning"
    ),
    "instructions": ServedField(is_text, "text", None, "a message of role system before the input"),
    **{name: SAMPLING[name] for name in SAMPLING if name not in ("n", "stop", "stream_options", "logit_bias")},
    "max_output_tokens": CHAT["max_completion_tokens"],
    "tools": ServedField(
        is_list_of(dict, 0),
        "a list of functions",
        None,
        "name, parameters and strict, by default false, beside type function",
    ),
    "tool_choice": ServedField(
        lambda value: value in ("auto", "none", "required") or is_named(value),
        '"auto", "none", "required", or {type: "function", name}',
        None,
        "as of chats",
    ),
    "parallel_tool_calls": CHAT["parallel_tool_calls"],
    "text": ServedField(
        is_text_format,
        "{format}",
        None,
        "text, json_object or json_schema with name and schema, which hold whether strict is set or not",
    ),
    "reasoning": ServedField(is_reasoning, "{effort}", None, "where the chat template takes it"),
    "chat_template_kwargs": CHAT["chat_template_kwargs"],
    "previous_response_id": NeutralField(),
    "store": NeutralField((False,)),
    "include": NeutralField(([],)),
    "truncation": NeutralField(("disabled",)),
    "top_logprobs": NeutralField((0,)),
    "service_tier": CHAT["service_tier"],
    "metadata": CHAT["metadata"],
    "safety_identifier": CHAT["safety_identifier"],
    "prompt_cache_key": CHAT["prompt_cache_key"],
    "stream_options": ServedField(
        is_stream_of_events,
        "{include_obfuscation: false}",
        None,
    ),
    "background": NeutralField((False,)),
    **dict.fromkeys(REFUSED_RESPONSE_FIELDS, NeutralField()),
}
"""Fields of /v1/responses."""


RENAMED_FIELDS = {
    "messages": "input",
    "prompt": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Fields of chats by other names."""


class ResponseRequest:
    """One request: its fields, once they were read, and the fields of the chat that it means."""

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}
        self.names: dict[str, str] = {}
        """Field of the request that a field of the chat came from."""

    def read(self, body: Any, defaults: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        """Return the fields of the chat that a body means, or raise."""
        fields = read_fields(body, RESPONSES, defaults)
        chat, names = chat_fields(fields)
        self.fields = fields
        self.names = names
        return read_fields(chat, CHAT)

    def forget_input(self) -> None:
        """Let go of all fields, and of the names of messages, which no error has once they are tokens."""
        tools = len(self.fields["tools"] or [])
        self.fields = {}
        self.names = RENAMED_FIELDS | names_of_tools(tools)

    @contextmanager
    def naming_fields(self) -> Iterator[None]:
        """Name fields in errors as the request does."""
        try:
            yield
        except Refused as error:
            raise self.rename(error) from None

    def rename(self, error: Refused) -> Refused:
        """Return an error that names the field of the request. An engine's has it in its text alone."""
        field = error.param or str(error).partition(":")[0]
        text = str(error)
        known = field
        while known not in self.names:  # a look at each name would hold up the event loop
            known = known[: max(known.rfind("."), known.rfind("["), 0)]
            if not known:
                return error
        name = self.names[known] + field[len(known) :]
        return Refused(error.status, text.replace(field, name, 1), name, error.code)


def chat_fields(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields of the chat that a request means, and the fields of the request that these came from."""
    body = {name: fields[name] for name in SAMPLING if name in fields and name != "stream_options"}
    body |= {name: fields[name] for name in ("parallel_tool_calls", "chat_template_kwargs")}
    body["max_completion_tokens"] = fields["max_output_tokens"]
    read = InputMessages()
    if fields["instructions"]:
        read.add("system", fields["instructions"], "instructions")
    if isinstance(fields["input"], str):
        read.add("user", fields["input"], "input")
    else:
        read.add_items(fields["input"])
    body["messages"] = read.messages()
    body["tools"] = [chat_tool(f"tools[{index}]", tool) for index, tool in enumerate(fields["tools"] or [])] or None
    choice = fields["tool_choice"]
    body["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}} if is_named(choice) else choice
    body["reasoning_effort"] = (fields["reasoning"] or {}).get("effort")
    body["response_format"] = response_format((fields["text"] or {}).get("format"))
    return body, RENAMED_FIELDS | names_of_tools(len(body["tools"] or [])) | read.names


def names_of_tools(count: int) -> dict[str, str]:
    """Return the fields of a request that the functions of a chat's tools came from."""
    return {f"tools[{index}].function": f"tools[{index}]" for index in range(count)}


def response_format(format: Any) -> Any:
    """Return a format as chats have it, or raise on one that is not served."""
    made = format
    if isinstance(format, dict) and format.get("type") == "json_schema":
        made = {"type": "json_schema", "json_schema": {name: one for name, one in format.items() if name != "type"}}
    if made is not None and not is_response_format(made):
        raise wrong_value("text.format", TEXT_FORMAT_EXPECTED, format)
    return made


def chat_tool(field: str, tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as chats have it, or raise on one that is no function."""
    if tool.get("type") != "function":
        raise wrong_value(f"{field}.type", "function", tool.get("type"))
    function = {name: one for name, one in tool.items() if name != "type" and one is not None}
    return {"type": "function", "function": function}
