"""Fields of requests: each field of OpenAI's is read, neutral or refused by its name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnmesh.serve.chat import encode_chat, encode_text, template_message
from attnmesh.serve.refused import Refused
from attnmesh.serve.request_fields import (
    CHAT,
    COMPLETION,
    OF_MESSAGES,
    REQUIRED,
    TOKENIZE,
    NeutralField,
    RequestFields,
    ServedField,
    read_fields,
)
from attnmesh.serve.responses_request import RESPONSES
from tests.support.serving.fake_engine import byte_tokenizer, sentencepiece_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
LEAST: dict[str, dict[str, Any]] = {
    "chat": {"model": "m", "messages": [{"role": "user", "content": "Hi"}]},
    "completion": {"model": "m", "prompt": "Hi"},
    "responses": {"model": "m", "input": "Hi"},
}
SCHEMAS = {"chat": CHAT, "completion": COMPLETION, "responses": RESPONSES}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def row(name: str, field: ServedField | NeutralField) -> str:
    """Return a row of the table in the documentation."""
    if isinstance(field, NeutralField):
        values = " or ".join(dict.fromkeys(map(json.dumps, field.neutral)))
        return f"| `{name}` | refused{f', unless it is {values}' if values else ''} |"
    default = "required" if field.default is REQUIRED else f"by default {json.dumps(field.default)}"
    parts = [field.expected, *([] if field.default is None else [default]), *([field.note] if field.note else [])]
    return f"| `{name}` | served: {'; '.join(parts)} |"


@pytest.mark.parametrize("kind", SCHEMAS)
def test_the_table_in_the_documentation_is_that_of_the_schema(kind: str) -> None:
    rows = [row(name, field) for name, field in SCHEMAS[kind].items()]
    assert "\n".join(["| field | |", "|---|---|", *rows]) in PAGE.read_text()


def test_each_field_of_openai_is_in_the_schemas() -> None:
    chats = pytest.importorskip("openai.types.chat.completion_create_params")
    texts = pytest.importorskip("openai.types.completion_create_params")
    items = pytest.importorskip("openai.types.responses.response_create_params")
    ours = {"stream", "top_k", "min_p", "repetition_penalty", "cache_salt"}
    assert CHAT.keys() == chats.CompletionCreateParamsBase.__annotations__.keys() | ours | {"chat_template_kwargs"}
    more = {"seed", "frequency_penalty", "presence_penalty", "chat_template_kwargs"}
    assert RESPONSES.keys() == items.ResponseCreateParamsBase.__annotations__.keys() | ours | more
    assert COMPLETION.keys() == texts.CompletionCreateParamsBase.__annotations__.keys() | ours


@pytest.mark.parametrize("kind", SCHEMAS)
def test_null_is_the_same_as_nothing(kind: str) -> None:
    optional = {name: None for name, field in SCHEMAS[kind].items() if name not in LEAST[kind]}
    assert read_fields(LEAST[kind] | optional, SCHEMAS[kind]) == read_fields(LEAST[kind], SCHEMAS[kind])


@pytest.mark.parametrize("kind", SCHEMAS)
@pytest.mark.parametrize("value", [7, 1.5, "x", True, False, [], ["x"], {}, {"x": 1}])
def test_a_refused_field_is_neutral_or_named(kind: str, value: Any) -> None:
    schema: RequestFields = SCHEMAS[kind]
    for name, field in schema.items():
        if isinstance(field, NeutralField) and not any(type(value) is type(x) and value == x for x in field.neutral):
            with pytest.raises(Refused, match=f"^{name}: expected null.* Leave it out") as raised:
                read_fields(LEAST[kind] | {name: value}, schema)
            assert raised.value.body["error"]["param"] == name


def attempt(read: Callable[[], Any]) -> tuple[Any, Refused | None]:
    """Return what was read, or what was refused; any other error is raised."""
    try:
        return read(), None
    except Refused as error:
        return None, error


INVALID: dict[str, list[Any]] = {
    "messages": [None, [], "Hi", ["Hi"]],
    "temperature": [-0.1, 2.1, "1", True, [1]],
    "top_p": [-1, 1.01, "x"],
    "top_k": [-1, 1.0, 1 << 40],
    "seed": [1.0, 1 << 63, "1"],
    "n": [0, 17, 1.0, True],
    "stop": ["", [""], ["a"] * 5, [1], 7, "x" * 257, "\ud800"],
    "stream": [1, "true"],
    "stream_options": [[], {"include_usage": 1}, {"include_obfuscation": True}, {"other": True}],
    "max_tokens": [0, -1, 1.0, "1", True],
    "logprobs": [1, "true"],
    "top_logprobs": [-1, 21, True],
    "tools": [{}, ["x"]],
    "tool_choice": ["any", {"type": "function"}, {"type": "function", "function": {"name": ""}}],
    "response_format": [
        "json_object",
        {"type": "json_schema"},
        {"type": "json_object", "x": 1},
        {"type": "json_schema", "json_schema": {"name": "x" * 65, "schema": {}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "description": "x" * ((1 << 16) + 1)}},
    ],
    "user": [1, "\udfff", "x" * 513],
    "safety_identifier": [1, "x" * 65],
    "prompt_cache_key": [1, "x" * 65],
    "frequency_penalty": [-2.1, "1", True],
    "logit_bias": [
        [],
        {"the": 1},
        {"1": 101},
        {"1": "1"},
        {"-1": 1},
        {"1": 2, "01": 3},
        {str(i): 1 for i in range(1025)},
    ],
    "reasoning_effort": ["most", 1],
    "chat_template_kwargs": [[], "x"],
    "parallel_tool_calls": [1, "no"],
    "unknown": [None, 1],
}


def test_a_refusal_names_what_would_be_served() -> None:
    for fields, text in (
        ({"messages": []}, "messages: expected a list of one message or more, given []"),
        ({"max_tokens": 0}, "max_tokens: expected 1 to what the context leaves beside the prompt, given 0"),
        ({"cache_salt": ""}, 'cache_salt: expected text of one character or more, given ""'),
    ):
        with pytest.raises(Refused) as raised:
            read_fields(LEAST["chat"] | fields, CHAT)
        assert str(raised.value) == text


@pytest.mark.parametrize("name", INVALID)
def test_invalid_values_are_refused_by_name(name: str) -> None:
    for value in INVALID[name]:
        with pytest.raises(Refused) as raised:
            read_fields(LEAST["chat"] | {name: value}, CHAT)
        assert (raised.value.status, raised.value.param) == (400, name)
        assert name in str(raised.value)


@pytest.mark.parametrize("name", OF_MESSAGES)
def test_a_prompt_is_no_chat(name: str) -> None:
    """What changes the tokens of messages alone is refused beside a text."""
    values = {"tools": [{}], "tool_choice": "none", "reasoning_effort": "low", "chat_template_kwargs": {"a": 1}}
    assert read_fields({"messages": [{}], name: values[name]}, TOKENIZE)[name] == values[name]
    with pytest.raises(Refused) as raised:
        read_fields({"prompt": "Hi", name: values[name]}, TOKENIZE)
    assert raised.value.param == name


def test_half_a_character_as_a_name_is_answered() -> None:
    with pytest.raises(Refused) as raised:
        read_fields(LEAST["chat"] | {"\ud800": 1}, CHAT)
    json.dumps(raised.value.body, ensure_ascii=False).encode()


@given(st.sampled_from(sorted(CHAT.keys() - LEAST["chat"].keys())), VALUES)
def test_any_value_is_read_or_refused(name: str, value: Any) -> None:
    field, default = CHAT[name], getattr(CHAT[name], "default", None)
    read, error = attempt(lambda: field.read(name, value))
    assert error is None or error.param == name
    assert error is not None or read == (default if value is None else value)


@given(VALUES)
def test_any_message_is_read_or_refused(value: Any) -> None:
    for message in ({"role": "user", "content": value}, {"role": "assistant", "content": "", "tool_calls": value}):
        read, error = attempt(lambda: template_message("messages[0]", message))  # noqa: B023 (called at once)
        assert error is None or error.status == 400
        assert error is not None or isinstance(read["content"], (str, list))


MESSAGES: dict[str, Any] = {
    "role: expected one of system": {"role": "robot", "content": "x"},
    "given null": {"role": "user"},
    "a part of type text": {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]},
    "expected text in UTF-8": {"role": "user", "content": "\ud800"},
    "unsupported field": {"role": "user", "content": "x", "cache": 1},
    "expected a name in messages of role tool": {"role": "user", "content": "x", "name": "Ann"},
    "expected tool_calls of assistants": {"role": "user", "content": "x", "tool_calls": [{}]},
    "expected id, type function": {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]},
    "arguments: expected JSON": {
        "role": "assistant",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}],
    },
    "arguments: expected the text of a JSON object, given 0": {
        "role": "assistant",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": 0}}],
    },
    "of assistants, and the tool_call_id": {"role": "user", "content": "x", "tool_calls": {}},
    "no developers": {"role": "developer", "content": "x"},
}


@pytest.mark.parametrize("text", MESSAGES)
def test_invalid_messages_are_refused_by_place(text: str) -> None:
    fields = read_fields(LEAST["chat"] | {"messages": [MESSAGES[text]]}, CHAT)
    with pytest.raises(Refused, match=text) as raised:
        encode_chat(byte_tokenizer(), fields)
    assert str(raised.value.param).startswith("messages")


def test_tools_reach_the_template_or_are_refused() -> None:
    tokenizer = byte_tokenizer()
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    said = [*LEAST["chat"]["messages"], {"role": "assistant", "tool_calls": [call]}]
    said += [{"role": "tool", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]}]
    fields = read_fields(LEAST["chat"] | {"messages": said, "tools": tools}, CHAT)
    assert tokenizer.decode(encode_chat(tokenizer, fields).ids) == "[1 tools]<user>Hi<assistant><tool>1\n2<assistant>"
    assert "tools" not in tokenizer.decode(encode_chat(tokenizer, fields | {"tool_choice": "none"}).ids)
    for template, text in (("{{ messages }} tools", "has no tools"), (None, "no chat template")):
        with pytest.raises(Refused, match=text):
            encode_chat(byte_tokenizer(template), fields)
    for messages, place in ((said[:2], "messages[1]"), (said[:1] + said[2:], "messages[1]")):
        with pytest.raises(Refused) as raised:
            encode_chat(byte_tokenizer("{{ messages }}"), fields | {"messages": messages, "tools": None})
        assert str(raised.value).startswith(f"{place}: the model's chat template has no tools. Leave out calls and")
        assert raised.value.param == place


def test_templates_by_name_need_a_default() -> None:
    fields = read_fields(LEAST["chat"], CHAT)
    with pytest.raises(Refused, match="none is named default"):
        encode_chat(byte_tokenizer({"rag": "x", "tool_use": "y"}), fields)  # type: ignore[arg-type]
    assert encode_chat(byte_tokenizer({"default": PRINTS, "tool_use": "{{ tools }}"}), fields).ids  # type: ignore[arg-type]


def test_a_completion_that_begins_with_the_mark_of_a_text_has_it_once() -> None:
    tokenizer = sentencepiece_tokenizer()
    plain = tokenizer("The")["input_ids"]
    for text in ("The", "<s>The"):
        ids = encode_text(tokenizer, {"prompt": text}).ids
        assert ids.count(tokenizer.bos_token_id) == 1
    assert encode_text(tokenizer, {"prompt": "The"}).ids == plain


ITERATES = (
    "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
)
PRINTS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
EITHER = (
    "{% macro shown(c) %}{% if c is string %}{{ c }}{% else %}"
    "{% for p in c %}{{ p.text }}{% endfor %}{% endif %}{% endmacro %}"
    "{% for m in messages %}<{{ m.role }}>{{ shown(m.content) }}{% endfor %}"
)


@pytest.mark.parametrize("template", [ITERATES, PRINTS, EITHER])
@pytest.mark.parametrize("content", ["Hi", [{"type": "text", "text": "Hi"}]])
def test_messages_have_the_shape_that_the_template_takes(template: str, content: Any) -> None:
    tokenizer = byte_tokenizer(template)
    said = [{"role": role, "content": content} for role in ("system", "user", "assistant", "user")]
    fields = read_fields(LEAST["chat"] | {"messages": said}, CHAT)
    assert tokenizer.decode(encode_chat(tokenizer, fields).ids) == "<system>Hi<user>Hi<assistant>Hi<user>Hi"
