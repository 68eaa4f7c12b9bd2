"""Requests of `/v1/responses`: their fields and items are those of chats, and are refused by their own names."""

import threading
from typing import Any

import pytest

from attnmesh.serve import responses_input, responses_request
from attnmesh.serve.refused import Refused
from attnmesh.serve.responses_request import ResponseRequest
from tests.support.serving.fake_engine import ThreadWorld
from tests.support.serving.served import NAME, Served
from tests.support.serving.tool_calls import WEATHER as OF_CHATS

WEATHER: dict[str, Any] = {"type": "function", **OF_CHATS["function"]}
FORMAT = {"type": "json_schema", "name": "f", "schema": {"type": "object"}}


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


def test_no_thought_is_copied_for_each_one_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = []

    class Thought(str):
        def __add__(self, other: str) -> "Thought":
            copied.append(len(self) + len(other))
            return Thought(str(self) + other)

    read = responses_input.thought_of
    monkeypatch.setattr(responses_input, "thought_of", lambda field, parts: Thought(read(field, parts)))
    fields = ResponseRequest().read({"model": NAME, "input": [item("thought", "Hm. ")] * 500})
    (message,) = fields["messages"]
    assert message["reasoning_content"] == "Hm. " * 500
    assert sum(copied) <= len(message["reasoning_content"])


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


def test_the_name_of_a_field_is_found_without_a_look_at_all_others() -> None:
    """The event loop waits for it, and a request may have tens of thousands of items."""
    looked_up = []

    class Names(dict[str, str]):
        def __contains__(self, name: object) -> bool:
            looked_up.append(name)
            return super().__contains__(name)

        def __iter__(self) -> Any:
            raise AssertionError

    request = ResponseRequest()
    request.read({"model": NAME, "input": [{"role": ("user", "assistant")[i % 2], "content": "a"} for i in range(99)]})
    request.names = Names(request.names)
    field = "messages[57].content[3].text"
    assert request.rename(Refused(400, f"{field}: expected text", field)).param == "input[57].content[3].text"
    overflow = "The prompt has 100,000 tokens, and the server's longest context is 8,192 tokens with the answer."
    assert str(request.rename(Refused(400, overflow))) == overflow
    assert len(looked_up) < 10
