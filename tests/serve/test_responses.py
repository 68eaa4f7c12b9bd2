"""`/v1/responses` with the client of OpenAI: text, thoughts, calls and formats, whole and as events."""

import json
import threading
from typing import Any, get_args

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel

from attnmesh.errors import GrammarError
from attnmesh.serve import responses_request
from attnmesh.serve.refused import Refused
from attnmesh.serve.responses_request import ResponseRequest
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
    fields = ResponseRequest().read({"model": NAME, "input": items, "instructions": "Be short."})
    assert [one["role"] for one in fields["messages"]] == ["system", "user", "assistant", "tool", "tool"]
    answer = fields["messages"][2]
    assert (answer["content"], answer["reasoning_content"]) == ("I look.", "Hm.")
    assert [one["id"] for one in answer["tool_calls"]] == ["a1", "a2"]


def test_fields_are_those_of_chats() -> None:
    format = {"type": "json_schema", "name": "f", "schema": {"type": "object"}, "strict": True}
    asked = {"text": {"format": format}, "tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}}
    asked |= {"reasoning": {"effort": "low"}, "max_output_tokens": 7, "parallel_tool_calls": False}
    fields = ResponseRequest().read({"model": NAME, "input": "Hi", **asked})
    assert fields["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert fields["tool_choice"]["function"]["name"] == fields["tools"][0]["function"]["name"] == "weather"
    assert (fields["reasoning_effort"], fields["max_completion_tokens"]) == ("low", 7)
    assert fields["parallel_tool_calls"] is False


def item(kind: str, text: str = "") -> dict[str, Any]:
    """Return an item of an answer, which holds a text."""
    match kind:
        case "thought":
            return {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": text}]}
        case "call":
            return {
                "type": "function_call",
                "call_id": text,
                "name": "weather",
                "arguments": "{}",
                "status": "completed",
            }
        case "result":
            return {"type": "function_call_output", "call_id": text, "output": [{"type": "input_text", "text": text}]}
        case _:
            parts = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
            return {"type": "message", "id": "msg_1", "role": "assistant", "content": parts, "phase": None}


ORDERS = [
    (("thought", "text", "call", "call"), [("thought", "text", "call", "call")]),
    (("text", "thought", "call"), [("text",), ("thought", "call")]),
    (("call", "text", "result"), [("call",), ("text",), ("result",)]),
    (("call", "thought", "call", "result"), [("call",), ("thought", "call"), ("result",)]),
    (("thought", "thought", "call", "result", "text"), [("thought", "thought", "call"), ("result",), ("text",)]),
    (("text", "text"), [("text",), ("text",)]),
]


@pytest.mark.parametrize(("sent", "messages"), ORDERS)
def test_items_stay_in_the_order_in_which_they_were_sent(sent: tuple[str, ...], messages: list[Any]) -> None:
    items = [item(kind, str(i)) for i, kind in enumerate(sent)]
    found = []
    for one in ResponseRequest().read({"model": NAME, "input": items})["messages"]:
        calls = [("call", call["id"]) for call in one.get("tool_calls", ())]
        texts = [("result" if one["role"] == "tool" else "text", one["content"])] if one["content"] else []
        found.append([*(("thought", sign) for sign in one.get("reasoning_content", "")), *texts, *calls])
    assert [tuple(kind for kind, _ in one) for one in found] == messages
    assert [text for one in found for _, text in one] == [str(i) for i in range(len(sent))]


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


def test_a_request_is_read_once_and_in_a_thread(
    running: Served, world: ThreadWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    read = responses_request.chat_fields

    def noted(fields: Any) -> Any:
        threads.append(threading.current_thread())
        return read(fields)

    monkeypatch.setattr(responses_request, "chat_fields", noted)
    world.engine.scripts.append("Warm.")
    assert running.ask("/v1/responses", {"model": NAME, "input": "Hi"})[0] == 200
    assert len(threads) == 1
    assert threads[0] is not running.thread


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


def said(*parts: Any, **fields: Any) -> dict[str, Any]:
    """Return the field of a request whose second item is a message of a user."""
    return {"input": [item("text", "Hi"), {"role": "user", "content": [*parts], **fields}]}


TEXT, CALL = {"type": "input_text", "text": "Hi"}, item("call", "a1")
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "an earlier answer": ({"previous_response_id": "resp_1"}, "previous_response_id"),
    "kept": ({"store": True}, "store"),
    "later": ({"background": True}, "background"),
    "a field of chats": ({"messages": []}, "messages"),
    "no input": ({"input": None}, "input"),
    "usage, which always comes": ({"stream_options": {"include_usage": True}}, "stream_options"),
    "an item": ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    "an item of no type": ({"input": [{"type": "", "role": "user", "content": "Hi"}]}, "input[0].type"),
    "a thought that is none": ({"input": [{"type": "reasoning", "summary": [], "content": 0}]}, "input[0].content"),
    "a part": ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input[0].content[0].type"),
    "a part that is none": (said(TEXT, "Hi"), "input[1].content[1]"),
    "no content": ({"input": [{"role": "user"}]}, "input[0].content"),
    "no parts": (said(), "input[1].content"),
    "a text that is none": (said(TEXT, {"type": "input_text", "text": 5}), "input[1].content[1].text"),
    "half a character": (said({"type": "input_text", "text": "\ud800"}), "input[1].content[0].text"),
    "a key of an item": (said(TEXT, cache=1), "input[1].cache"),
    "a key of a part": (said(TEXT | {"cache": 1}), "input[1].content[0].cache"),
    "half a character as a key": (said(TEXT, **{"\ud800": 1}), "input[1]"),
    "an image": (said({"type": "input_image", "image_url": "http://x/y.png"}), "input[1].content[0]"),
    "an image by its file": (said({"type": "input_image", "file_id": "f"}), "input[1].content[0].file_id"),
    "a role": ({"input": [{"role": "critic", "content": "Hi"}]}, "input[0].role"),
    "a role of chats": ({"input": [{"role": "tool", "content": "Hi"}]}, "input[0].role"),
    "a call without an id": ({"input": [CALL | {"call_id": None}]}, "input[0].call_id"),
    "a call without a name": ({"input": [item("thought", "Hm"), CALL | {"name": 5}]}, "input[1].name"),
    "arguments": ({"input": [item("thought", "Hm"), CALL, CALL | {"arguments": "{"}]}, "input[2].arguments"),
    "arguments that are no object": (
        {"instructions": "Hm", "input": [CALL | {"arguments": "[]"}]},
        "input[0].arguments",
    ),
    "a result": ({"input": [item("result", "a") | {"output": {"a": 1}}]}, "input[0].output"),
    "an image as a result": (
        {"input": [CALL, item("result", "a1") | {"output": [{"type": "input_image", "image_url": "x"}]}]},
        "input[1].output[0]",
    ),
    "a secret thought": ({"input": [item("thought", "Hm") | {"encrypted_content": "x"}]}, "input[0].encrypted_content"),
    "a thought": ({"input": [{"type": "reasoning", "content": [{"type": "x"}]}]}, "input[0].content[0].type"),
    "too long": ({"max_output_tokens": 1 << 20}, "max_output_tokens"),
    "a format": ({"text": {"format": {"type": "xml"}}}, "text.format"),
    "a format of chats": ({"text": {"format": {"type": "json_schema", "json_schema": FORMAT}}}, "text.format"),
    "a schema": ({"text": {"format": FORMAT | {"schema": {"type": "text"}}}}, "text.format.schema.type"),
    "effort": ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
    "effort that is none": ({"reasoning": {"effort": "some"}}, "reasoning.effort"),
    "a tool of another kind": ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    "a key of a tool": ({"tools": [WEATHER, WEATHER | {"defer_loading": True}]}, "tools[1]"),
    "the name of a tool": ({"tools": [WEATHER | {"name": "a b"}]}, "tools[0].name"),
    "the schema of a tool": ({"tools": [WEATHER | {"parameters": {"type": "array"}}]}, "tools[0].parameters"),
    "no tools": ({"tool_choice": "required"}, "tool_choice"),
    "a choice": ({"tool_choice": "any", "tools": [WEATHER]}, "tool_choice"),
    "a choice of chats": (
        {"tool_choice": {"type": "function", "function": {"name": "weather"}}, "tools": [WEATHER]},
        "tool_choice",
    ),
}
WORDS_OF_CHATS = (
    "messages",
    "response_format",
    "max_completion_tokens",
    "max_tokens",
    "tool_calls",
    ".function",
)
"""Words of chats, which say nothing to a client of /v1/responses."""


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_served_is_refused_by_its_field(running: Served, name: str) -> None:
    fields, field = BAD[name]
    for more in ({}, {"stream": True}):
        status, answer = running.ask("/v1/responses", {"model": NAME, "input": "Hi", **fields, **more})
        assert (status, answer["error"]["param"]) == (400, field), answer
        text = answer["error"]["message"].partition(", given ")[0]
        assert "of chats" in name or not any(word in text for word in WORDS_OF_CHATS), answer


def test_what_a_template_refuses_is_named_by_its_item() -> None:
    """Fields of messages are those of the items that they came from."""
    request = ResponseRequest()
    request.read(
        {"model": NAME, "input": [item("thought", "Hm"), CALL, CALL, item("result", "a1")], "tools": [WEATHER]}
    )
    named = {
        "messages[0]": "input[0]",
        "messages[0].tool_calls[1].function.arguments": "input[2].arguments",
        "messages[1].content[3].text": "input[3].output[3].text",
        "messages": "input",
        "tools[0].function.parameters.properties.function": "tools[0].parameters.properties.function",
        "tools[10].function": "tools[10].function",
    }
    for chats, field in named.items():
        error = request.rename(Refused(400, f"{chats}: expected more", chats))
        assert (error.param, str(error)) == (field, f"{field}: expected more")
