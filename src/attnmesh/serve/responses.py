"""Requests of /v1/responses: their fields, and those of the chat that they mean. Nothing is kept between requests."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from attnmesh.serve.chat import Check, Encoded, encode_chat
from attnmesh.serve.refused import Refused
from attnmesh.serve.schema import (
    CHAT,
    REQUIRED,
    SAMPLING,
    Only,
    Schema,
    Served,
    is_list_of,
    is_name,
    is_text,
    read_fields,
    shown,
)


def is_input(value: Any) -> bool:
    """Return whether a value is text, or a list of items."""
    return is_name(value) or is_list_of(dict)(value)


def is_reasoning(value: Any) -> bool:
    """Return whether a value says how long a model may think."""
    return isinstance(value, dict) and value.keys() <= {"effort", "summary"} and value.get("summary") is None


def is_text_format(value: Any) -> bool:
    """Return whether a value says what the text has to be."""
    return isinstance(value, dict) and value.keys() <= {"format", "verbosity"} and value.get("verbosity") is None


REFUSED = (
    *("access_programs", "background_options", "context_management", "conversation", "image", "max_tool_calls"),
    *("moderation", "prompt", "prompt_cache_options", "prompt_cache_retention"),
)
"""Fields that are refused whatever their value."""

RESPONSES: Schema = {
    "input": Served(is_input, "text, or a list of items", REQUIRED, "messages, calls, their outputs, and reasoning"),
    "instructions": Served(is_text, "text", None, "a message of role system before the input"),
    **{name: SAMPLING[name] for name in SAMPLING if name not in ("n", "stop", "stream_options", "logit_bias")},
    "max_output_tokens": CHAT["max_completion_tokens"],
    "tools": Served(is_list_of(dict, 0), "a list of functions", None, "name and parameters beside type function"),
    "tool_choice": Served(
        lambda value: isinstance(value, dict | str),
        '"auto", "none", "required", or {type: "function", name}',
        None,
        "as of chats",
    ),
    "parallel_tool_calls": CHAT["parallel_tool_calls"],
    "text": Served(is_text_format, "{format}", None, "text, json_object or json_schema with name and schema"),
    "reasoning": Served(is_reasoning, "{effort}", None, "where the chat template takes it"),
    "chat_template_kwargs": CHAT["chat_template_kwargs"],
    "previous_response_id": Only(),
    "store": Only((False,)),
    "include": Only(([],)),
    "truncation": Only(("disabled",)),
    "top_logprobs": Only((0,)),
    "service_tier": CHAT["service_tier"],
    "metadata": CHAT["metadata"],
    "safety_identifier": CHAT["safety_identifier"],
    "prompt_cache_key": CHAT["prompt_cache_key"],
    "stream_options": Served(
        lambda value: isinstance(value, dict) and value.get("include_obfuscation") in (None, False),
        "{include_obfuscation: false}",
        None,
    ),
    "background": Only((False,)),
    **dict.fromkeys(REFUSED, Only()),
}
"""Fields of /v1/responses."""


RENAMED = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Fields of chats by other names."""


@contextmanager
def naming_fields() -> Iterator[None]:
    """Name fields in errors as requests of /v1/responses do."""
    try:
        yield
    except Refused as error:
        for chats, name in RENAMED.items():
            if (error.param or "").startswith(chats):
                param = name if chats == "messages" else (error.param or "").replace(chats, name, 1)
                raise Refused(error.status, str(error).replace(chats, name), param, error.code) from None
        raise


def encode_response(encoder: Any, fields: Mapping[str, Any], check: Check = bool) -> Encoded:
    """Return the tokens of the chat that a request means."""
    with naming_fields():
        return encode_chat(encoder, chat_fields(fields), check)


def chat_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the chat that a request means, or raise."""
    body = {name: fields[name] for name in SAMPLING if name in fields and name != "stream_options"}
    body |= {name: fields[name] for name in ("parallel_tool_calls", "chat_template_kwargs")}
    body["max_completion_tokens"] = fields["max_output_tokens"]
    body["messages"] = messages_of(fields)
    body["tools"] = [chat_tool(f"tools[{i}]", one) for i, one in enumerate(fields["tools"] or [])] or None
    choice = fields["tool_choice"]
    if isinstance(choice, dict) and choice.keys() == {"type", "name"}:
        choice = {"type": choice["type"], "function": {"name": choice["name"]}}
    body["tool_choice"] = choice
    body["reasoning_effort"] = (fields["reasoning"] or {}).get("effort")
    body["response_format"] = response_format((fields["text"] or {}).get("format"))
    return read_fields(body, CHAT)


def response_format(format: Any) -> Any:
    """Return a format as chats have it."""
    if not isinstance(format, dict) or format.get("type") != "json_schema":
        return format
    return {"type": "json_schema", "json_schema": {name: one for name, one in format.items() if name != "type"}}


def chat_tool(field: str, tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as chats have it, or raise on one that is no function."""
    if tool.get("type") != "function":
        raise Refused(400, f"{field}.type: expected function, given {shown(tool.get('type'))}", f"{field}.type")
    return {"type": "function", "function": {name: one for name, one in tool.items() if name != "type"}}


def messages_of(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a chat: calls and thoughts of one answer are one message."""
    messages: list[dict[str, Any]] = []
    if fields["instructions"]:
        messages.append({"role": "system", "content": fields["instructions"]})
    given = fields["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    for message in (one for i, item in enumerate(items) for one in _message(f"input[{i}]", item)):
        last = messages[-1] if messages else {}
        joins = message["role"] == last.get("role") == "assistant" and not (last["content"] and message["content"])
        if not joins or (message.get("reasoning_content") and "tool_calls" in last):
            messages.append(message)
            continue
        last["content"] = last["content"] or message["content"]
        if "reasoning_content" in message:
            last["reasoning_content"] = last.get("reasoning_content", "") + message["reasoning_content"]
        if "tool_calls" in message:
            last["tool_calls"] = last.get("tool_calls", []) + message["tool_calls"]
    return messages


def _message(field: str, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the message of an item, or raise on one that is not served."""
    match item.get("type", "message"):
        case "message":
            yield {"role": item.get("role"), "content": _content(field, item.get("content"))}
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            yield {"role": "assistant", "content": None, "tool_calls": [call]}
        case "function_call_output":
            yield {
                "role": "tool",
                "tool_call_id": item.get("call_id"),
                "content": _content(field, item.get("output")),
            }
        case "reasoning":
            parts = item.get("content") or []
            thought = "".join(_text(field, one) for one in parts) if isinstance(parts, list) else ""
            if thought:
                yield {"role": "assistant", "content": None, "reasoning_content": thought}
        case kind:
            known = "message, function_call, function_call_output or reasoning"
            raise Refused(400, f"{field}.type: expected {known}, given {shown(kind)}", f"{field}.type")


def _content(field: str, content: Any) -> Any:
    """Return the content of a message as chats have it."""
    if not isinstance(content, list):
        return content
    parts = [_part(field, one) for one in content]
    texts = [one["text"] for one in parts if one["type"] == "text"]
    return texts[0] if len(texts) == len(parts) == 1 else parts


def _part(field: str, part: Any) -> dict[str, Any]:
    if isinstance(part, dict) and part.get("type") == "input_image":
        return {"type": "image_url", "image_url": {"url": part.get("image_url")}}
    return {"type": "text", "text": _text(field, part)}


def _text(field: str, part: Any) -> str:
    """Return the text of a part, or raise."""
    kinds = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
    if not isinstance(part, dict) or part.get("type") not in kinds or not is_text(part.get("text")):
        expected = "parts of type input_text, output_text or input_image"
        raise Refused(400, f"{field}.content: expected {expected}, given {shown(part)}", f"{field}.content")
    return str(part["text"])
