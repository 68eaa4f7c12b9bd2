"""Answers of `/v1/responses` with the client of OpenAI: text, thoughts, calls and formats, whole and as events."""

import json
from typing import Any, get_args

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel

from attnmesh.errors import GrammarError
from tests.support.serving.fake_engine import ThreadWorld
from tests.support.serving.served import NAME, Served
from tests.support.serving.tool_calls import TWO
from tests.support.serving.tool_calls import WEATHER as OF_CHATS

WEATHER: dict[str, Any] = {"type": "function", **OF_CHATS["function"]}
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


EVENTS: dict[str, Any] = {
    get_args(one.model_fields["type"].annotation)[0]: one for one in get_args(get_args(ResponseStreamEvent)[0])
}
"""Types of events by their names."""


def no_extras(value: Any) -> bool:
    """Return whether a type of the client knows each field."""
    if isinstance(value, list):
        return all(map(no_extras, value))
    if not isinstance(value, BaseModel):
        return True
    extra = (value.model_extra or {}).keys() - {"store", "name"}  # which OpenAI sends, and types of a year before had
    assert not extra, type(value)
    return all(no_extras(getattr(value, name)) for name in type(value).model_fields)


FORMAT = {"type": "json_schema", "name": "f", "schema": {"type": "object"}}
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("Warm.", {}),
    (THOUGHT + TWO, {"tools": [WEATHER, WEATHER | {"name": "f", "strict": None}], "instructions": "Be short."}),
    ("Warm and dry.", {"max_output_tokens": 4, "text": {}, "user": "Ann", "prompt_cache_key": "a"}),
    ("{}", {"text": {"format": FORMAT}, "temperature": 0, "tool_choice": "none", "metadata": {}}),
]


@pytest.mark.parametrize(("script", "fields"), ASKED)
def test_responses_are_those_of_the_clients_types(
    running: Served, world: ThreadWorld, script: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def none(*_: Any) -> None:
        return None

    monkeypatch.setattr(running.app.grammars, "of", none)  # scripts follow none
    body = {"model": NAME, "input": "Hi", **fields}
    world.engine.scripts += [script, script]
    status, whole = running.ask("/v1/responses", body)
    assert status == 200, whole
    assert no_extras(Response.model_validate(whole, strict=True))
    required = {name for name, field in Response.model_fields.items() if name != "usage" and not field.is_required()}
    assert whole.keys() >= Response.model_fields.keys() - required
    assert whole["tools"] == [
        {"description": None, "strict": False} | tool | {"strict": False} for tool in body.get("tools", ())
    ]
    _, text = running.ask("/v1/responses", body | {"stream": True})
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    assert [one["sequence_number"] for one in events] == [*range(len(events))]
    for one in events:
        assert no_extras(EVENTS[one["type"]].model_validate(one, strict=True))
    last = events[-1]["response"]
    assert {one["type"] for one in last["output"]} == {one["type"] for one in whole["output"]}
    assert last.keys() == whole.keys()


FAILURE = GrammarError("response_format", "an answer that can go on", "one that no token follows", "change it")


def test_a_stream_that_fails_says_so_in_its_last_events(client: openai.OpenAI, world: ThreadWorld) -> None:
    world.engine.scripts += [("Warm", FAILURE)] * 3  # type: ignore[list-item]
    events = [*client.responses.create(model=NAME, input="Hi", stream=True)]
    assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == "Warm"
    error, failed = events[-2:]
    assert (error.type, error.param) == ("error", "text.format")
    assert error.message.startswith("text.format: expected an answer that can go on")
    assert (failed.type, failed.response.status) == ("response.failed", "failed")
    assert (failed.response.error.code, failed.response.error.message) == ("invalid_prompt", error.message)
    assert [one.status for one in failed.response.output] == ["incomplete"]
    for one in events:
        assert no_extras(EVENTS[one.type].model_validate(one.to_dict(), strict=True))
    with client.responses.stream(model=NAME, input="Hi") as stream:
        assert [one.type for one in stream][-2:] == ["error", "response.failed"]
        with pytest.raises(RuntimeError, match="completed"):
            stream.get_final_response()
    with pytest.raises(openai.BadRequestError, match=r"text\.format: expected an answer") as raised:
        client.responses.create(model=NAME, input="Hi")
    assert raised.value.param == "text.format"
