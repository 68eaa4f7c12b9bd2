"""Calls of tools: the client of OpenAI beside scripted answers."""

from typing import Any

import openai
import pytest

from attnmesh.errors import GrammarError
from attnmesh.serve.answer_parts import AnswerParts, find_formats
from attnmesh.serve.chat import encode_chat
from attnmesh.serve.refused import Refused
from attnmesh.serve.request_fields import CHAT, read_fields
from attnmesh.serve.tool_formats import FORMATS_BY_NAME, ToolCall
from attnmesh_command.choices import TOOL_FORMATS
from tests.support.serving.fake_engine import HERMES, ThreadWorld, byte_tokenizer
from tests.support.serving.served import NAME, chat
from tests.support.serving.tool_calls import ARGUMENTS, TWO, WEATHER

TOOLS: list[Any] = [WEATHER]
MESSAGES: Any = [{"role": "user", "content": "Hi"}]


def ask(client: openai.OpenAI, world: ThreadWorld, script: str, **fields: Any) -> Any:
    world.engine.scripts.append(script)
    fields = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 2000} | fields
    return client.chat.completions.create(model=NAME, **fields)


def streamed(client: openai.OpenAI, world: ThreadWorld, script: str, **fields: Any) -> tuple[Any, list[Any]]:
    """Return the message that the client's helper makes of a stream, and the deltas."""
    world.engine.scripts.append(script)
    fields = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 2000} | fields
    with client.chat.completions.stream(model=NAME, **fields) as stream:
        chunks = [event.chunk.choices[0] for event in stream if event.type == "chunk" and event.chunk.choices]
        return stream.get_final_completion().choices[0], [chunk.delta for chunk in chunks]


def test_calls_come_whole_and_in_a_stream(client: openai.OpenAI, world: ThreadWorld) -> None:
    whole = ask(client, world, TWO).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content == "I look."
    assert [one.function.name for one in whole.message.tool_calls] == ["weather"] * 2
    assert [one.function.arguments for one in whole.message.tool_calls] == [*ARGUMENTS]
    choice, deltas = streamed(client, world, TWO)
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    assert [one.function.arguments for one in choice.message.tool_calls] == [*ARGUMENTS]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [one.index for one in calls if one.id] == [0, 1]
    for first in (one for one in calls if one.id):
        assert (first.type, first.function.name, first.function.arguments) == ("function", "weather", "")
    assert all(len(one.function.arguments) <= 256 and one.function.name is None for one in calls if not one.id)
    assert sum(one.index == 1 for one in calls) == 4


def test_an_answer_without_calls_is_text(client: openai.OpenAI, world: ThreadWorld) -> None:
    for text in ("Warm.", '<tool_call>\n{"name": "weather", "arguments": {"city": }}\n</tool_call>\n', "<tool_ca"):
        whole = ask(client, world, text).choices[0]
        assert (whole.finish_reason, whole.message.content, whole.message.tool_calls) == ("stop", text, None)
        choice, _ = streamed(client, world, text)
        assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", text, None)


def test_a_call_that_the_limit_cuts_short_is_text(client: openai.OpenAI, world: ThreadWorld) -> None:
    whole = ask(client, world, TWO, max_tokens=60).choices[0]
    assert (whole.finish_reason, whole.message.content) == ("length", TWO.encode()[:60].decode(errors="replace"))


def test_the_first_call_ends_the_answer_where_several_are_not_wanted(client: openai.OpenAI, world: ThreadWorld) -> None:
    whole = ask(client, world, TWO, parallel_tool_calls=False)
    assert whole.choices[0].finish_reason == "tool_calls"
    assert [one.function.arguments for one in whole.choices[0].message.tool_calls] == [ARGUMENTS[0]]
    assert whole.usage.completion_tokens < len(TWO.encode()) // 2
    world.engine.scripts.append(f"{'Let me see. ' * 20}{TWO}")
    chunks = [*ask(client, world, TWO, parallel_tool_calls=False, stream=True, n=2)]
    for index in range(2):
        choices = [one.choices[0] for one in chunks if one.choices[0].index == index]
        assert [one.finish_reason for one in choices if one.finish_reason] == ["tool_calls"]
        assert sum(call.id is not None for one in choices for call in one.delta.tool_calls or []) == 1


def test_tools_that_must_not_be_called_leave_text(client: openai.OpenAI, world: ThreadWorld) -> None:
    for fields in ({"tool_choice": "none"}, {"tools": openai.NOT_GIVEN}):
        whole = ask(client, world, TWO, **fields).choices[0]
        assert (whole.finish_reason, whole.message.content) == ("stop", TWO)


def test_a_stream_that_fails_raises_what_the_server_says(client: openai.OpenAI, world: ThreadWorld) -> None:
    failure = GrammarError("response_format", "an answer that can go on", "one that no token follows", "change it")
    world.engine.scripts.append(("Warm", failure))
    found = []
    with pytest.raises(openai.APIError, match="response_format: expected an answer that can go on"):
        found.extend(client.chat.completions.create(model=NAME, messages=MESSAGES, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in found) == "Warm"


def test_log_probabilities_are_those_of_all_tokens(client: openai.OpenAI, world: ThreadWorld) -> None:
    for stream in (False, True):
        found = ask(client, world, TWO, logprobs=True, stream=stream)
        choices = [chunk.choices[0] for chunk in found] if stream else found.choices
        tokens = [one for choice in choices if choice.logprobs for one in choice.logprobs.content or []]
        assert b"".join(bytes(one.bytes) for one in tokens).decode() == TWO


def test_the_format_is_found_or_named() -> None:
    assert ("auto", "none", *FORMATS_BY_NAME) == TOOL_FORMATS
    assert find_formats(byte_tokenizer(HERMES)).tool_format is FORMATS_BY_NAME["hermes"]
    assert find_formats(byte_tokenizer(HERMES), "none").tool_format is None
    for name in FORMATS_BY_NAME:
        assert find_formats(byte_tokenizer(), name).tool_format is FORMATS_BY_NAME[name]
    named: Any = {"default": "{{ messages }}", "tool_use": HERMES}
    assert find_formats(byte_tokenizer(named)).tool_format is FORMATS_BY_NAME["hermes"]


def test_a_template_that_breaks_on_tools_names_them() -> None:
    template = "{% if tools %}{{ raise_exception('no such tools') }}{% endif %}{{ messages[0].content }}"
    with pytest.raises(Refused, match="tools: the chat template refuses them: no such tools") as raised:
        encode_chat(byte_tokenizer(template), read_fields(chat(tools=TOOLS), CHAT))
    assert raised.value.param == "tools"


SAID = [{"role": "user", "content": "Hi"}]
RESULTS = [
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "a1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Bern"}'}}
    ]},
    {"role": "tool", "tool_call_id": "a1", "content": "warm"},
]  # fmt: skip


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        ("{{ c.function.arguments | tojson }}", '{"city": "Bern"}'),
        ("{{ c.function | tojson }}", '{"name": "weather", "arguments": {"city": "Bern"}}'),
        ("{{ 'f' + c.function.arguments }}", 'f{"city":"Bern"}'),
        ("{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
         "{{ c.function.arguments | tojson }}{% endif %}", '{"city":"Bern"}'),
        ("{% for k, v in c.function.arguments.items() %}{{ k }}:{{ v }}{% endfor %}", "city:Bern"),
        ("{ {%- if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
         "{% for k, v in c.function.arguments.items() %}{{ k }}:{{ v }}{% endfor %}{% endif %}}", "{city:Bern}"),
    ],
)  # fmt: skip
def test_arguments_have_the_shape_that_the_template_takes(shown: str, text: str) -> None:
    template = (
        "{% if tools %}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.name }}"
        f"{{% for c in m.tool_calls or [] %}}{shown}{{% endfor %}}{{% endfor %}}"
    )
    tokenizer = byte_tokenizer(template)
    fields = read_fields(chat(tools=TOOLS) | {"messages": SAID + RESULTS}, CHAT)
    said = tokenizer.decode(encode_chat(tokenizer, fields).ids)
    assert said == f"<user>Hi<assistant>{text}<tool>warmweather"


def test_each_call_has_an_id_of_its_own() -> None:
    one = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    parts = AnswerParts(FORMATS_BY_NAME["kimi"], {"f": {}})
    calls = parts.add(f"<|tool_calls_section_begin|>{one}{one}<|tool_calls_section_end|>") + parts.end()
    assert [one.index for one in calls if isinstance(one, ToolCall)] == [0, 1]
    first, second = (one.id for one in calls if isinstance(one, ToolCall))
    assert (first, len(second)) == ("functions.f:0", 9)
