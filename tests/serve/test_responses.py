"""`/v1/responses` with the client of OpenAI: text, thoughts, calls and formats, whole and as events."""

import json
from typing import Any

import openai
import pytest

from attnmesh.serve.responses import RESPONSES, chat_fields
from attnmesh.serve.schema import read_fields
from tests.serve.test_tools import TWO
from tests.support.fake_engine import ThreadWorld
from tests.support.served import NAME, Served

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "The weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
THOUGHT = "<think>\nHm.\n</think>\n\n"


def ask(client: openai.OpenAI, world: ThreadWorld, script: str, **fields: Any) -> Any:
    world.engine.scripts.append(script)
    return client.responses.create(**{"model": NAME, "input": "Hi", "max_output_tokens": 2000} | fields)


def test_text_comes_whole_and_in_a_stream(client: openai.OpenAI, world: ThreadWorld) -> None:
    whole = ask(client, world, "Warm.", instructions="Be short.", temperature=0)
    assert (whole.output_text, whole.status, whole.store) == ("Warm.", "completed", False)
    assert (whole.usage.output_tokens, whole.instructions, whole.temperature) == (5, "Be short.", 0)
    world.engine.scripts.append("Warm.")
    with client.responses.stream(model=NAME, input="Hi") as stream:
        events = [*stream]
        assert stream.get_final_response().output_text == "Warm."
    assert [one.sequence_number for one in events if hasattr(one, "sequence_number")] == [*range(len(events))]
    assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == "Warm."


def test_thoughts_messages_and_calls_are_items(client: openai.OpenAI, world: ThreadWorld) -> None:
    script = THOUGHT + TWO
    whole = ask(client, world, script, tools=[WEATHER])
    assert [one.type for one in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    assert (whole.output[0].content[0].text, whole.output_text) == ("Hm.", "I look.")
    assert [json.loads(one.arguments)["city"] for one in whole.output[2:]] == ["Zürich", "Bern"]
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    world.engine.scripts.append(script)
    with client.responses.stream(model=NAME, input="Hi", tools=[WEATHER], max_output_tokens=2000) as stream:
        kinds = [one.type for one in stream]
        final = stream.get_final_response()
    assert [(one.type, getattr(one, "arguments", None)) for one in final.output] == [
        (one.type, getattr(one, "arguments", None)) for one in whole.output
    ]
    for kind in ("output_item.added", "output_item.done"):
        assert kinds.count(f"response.{kind}") == 4
    assert kinds.count("response.function_call_arguments.done") == 2
    assert kinds[-1] == "response.completed"


def test_an_answer_that_is_cut_short_is_incomplete(client: openai.OpenAI, world: ThreadWorld) -> None:
    whole = ask(client, world, "Warm and dry.", max_output_tokens=4)
    assert (whole.status, whole.incomplete_details.reason, whole.output_text) == (
        "incomplete",
        "max_output_tokens",
        "Warm",
    )
    events = [*ask(client, world, "Warm and dry.", max_output_tokens=4, stream=True)]
    assert events[-1].type == "response.incomplete"


def test_the_items_of_an_answer_are_its_message() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "a1", "name": "weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "a2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a1", "output": "warm"},
        {"type": "function_call_output", "call_id": "a2", "output": "dry"},
    ]
    fields = chat_fields(read_fields({"model": NAME, "input": items, "instructions": "Be short."}, RESPONSES))
    assert [one["role"] for one in fields["messages"]] == ["system", "user", "assistant", "tool", "tool"]
    answer = fields["messages"][2]
    assert (answer["content"], answer["reasoning_content"]) == ("I look.", "Hm.")
    assert [one["id"] for one in answer["tool_calls"]] == ["a1", "a2"]


def test_fields_are_those_of_chats() -> None:
    format = {"type": "json_schema", "name": "f", "schema": {"type": "object"}, "strict": True}
    asked = {"text": {"format": format}, "tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}}
    asked |= {"reasoning": {"effort": "low"}, "max_output_tokens": 7, "parallel_tool_calls": False}
    fields = chat_fields(read_fields({"model": NAME, "input": "Hi", **asked}, RESPONSES))
    assert fields["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert fields["tool_choice"]["function"]["name"] == fields["tools"][0]["function"]["name"] == "weather"
    assert (fields["reasoning_effort"], fields["max_completion_tokens"]) == ("low", 7)
    assert fields["parallel_tool_calls"] is False


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "an earlier answer": ({"previous_response_id": "resp_1"}, "previous_response_id"),
    "kept": ({"store": True}, "store"),
    "later": ({"background": True}, "background"),
    "no input": ({"input": None}, "input"),
    "a tool of another kind": ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    "an item": ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    "a part": ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input[0].content"),
    "a role": ({"input": [{"role": "critic", "content": "Hi"}]}, "input"),
    "too long": ({"max_output_tokens": 1 << 20}, "max_output_tokens"),
    "a format": ({"text": {"format": {"type": "xml"}}}, "text.format"),
    "a schema": (
        {"text": {"format": {"type": "json_schema", "name": "f", "schema": {"type": "text"}}}},
        "text.format.schema.type",
    ),
    "effort": ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
    "choice": ({"tool_choice": "required"}, "tool_choice"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_served_is_refused_by_its_field(running: Served, name: str) -> None:
    fields, field = BAD[name]
    status, said = running.ask("/v1/responses", {"model": NAME, "input": "Hi", **fields})
    assert (status, said["error"]["param"]) == (400, field), said
