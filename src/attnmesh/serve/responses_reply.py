"""Replies of /v1/responses: items of thoughts, messages and calls, whole or as events."""

import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from attnmesh.serve.completion_objects import encode_json
from attnmesh.serve.refused import Refused
from attnmesh.serve.reply import Reply
from attnmesh.serve.responses_request import ResponseRequest

ECHOED = (
    "instructions",
    "temperature",
    "top_p",
    "max_output_tokens",
    "parallel_tool_calls",
    "prompt_cache_key",
    "safety_identifier",
    "user",
)
"""Fields of a request that its response repeats as they are."""

FIXED_FIELDS: dict[str, Any] = {
    "background": False,
    "max_tool_calls": None,
    "metadata": {},
    "previous_response_id": None,
    "service_tier": "default",
    "store": False,
    "top_logprobs": 0,
    "truncation": "disabled",
}
"""Fields of all responses, which no request changes."""

TEXTS = {"content": ("message", "output_text"), "reasoning_content": ("reasoning", "reasoning_text")}
"""For each field of a delta, the types of the item and of the part that its text goes to."""


ERRORS = {429: "rate_limit_exceeded"}
"""Codes of failed responses by status. Others are server_error from 500 on, and invalid_prompt."""


class ResponseItems:
    """The items of one response, which grow by the deltas of a chat."""

    def __init__(self, id: str, model: str, fields: Mapping[str, Any]) -> None:
        self.id = id
        self.model = model
        self.created = int(time.time())
        self.echoed = echo_fields(fields)
        self.items: list[dict[str, Any]] = []
        self.is_open = False
        """The last item is not whole."""
        self._numbers = 0

    def response(
        self, status: str, usage: Mapping[str, Any] | None = None, error: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the response so far."""
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "model": self.model,
            "output": self.items,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": usage and usage_of_response(usage),
            **self.echoed,
        }

    def event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Return an event with its number."""
        self._numbers += 1
        return {"type": f"response.{kind}", "sequence_number": self._numbers - 1, **fields}

    def add(self, delta: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a delta."""
        for field, (kind, part) in TEXTS.items():
            if delta.get(field):
                yield from self._add_text(kind, part, delta[field])
        for call in delta.get("tool_calls", ()):
            yield from self._add_call(call)

    def end(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """Yield the events that end the last item."""
        if not self.is_open:
            return
        self.is_open = False
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            whole = {"arguments": item["arguments"], "name": item["name"]}
            yield self.event("function_call_arguments.done", **self._place(), **whole)
        else:
            (part,) = item["content"]
            place = self._place() | {"content_index": 0}
            name = part["type"]
            more: dict[str, Any] = {"logprobs": []} if name == "output_text" else {}
            yield self.event(f"{name}.done", **place, text=part["text"], **more)
            yield self.event("content_part.done", **place, part=part)
        yield self.event("output_item.done", output_index=len(self.items) - 1, item=item)

    def fail(self, error: Refused, usage: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield both events of an error: `error` and `failed`. Most clients know one of them."""
        shown = {name: error.body["error"][name] for name in ("code", "message", "param")}
        yield self.event("error", **shown) | {"type": "error"}
        if self.is_open:
            self.items[-1]["status"] = "incomplete"
        code = ERRORS.get(error.status, "server_error" if error.status >= 500 else "invalid_prompt")
        yield self.event("failed", response=self.response("failed", usage, {"code": code, "message": str(error)}))

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _begin(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self.end()
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[item["type"]]
        self.items.append({"id": f"{prefix}_{self.id}_{len(self.items)}", **item, "status": "in_progress"})
        self.is_open = True
        yield self.event("output_item.added", output_index=len(self.items) - 1, item=copy_item(self.items[-1]))

    def _add_text(self, kind: str, name: str, text: str) -> Iterator[dict[str, Any]]:
        if not self.is_open or self.items[-1]["type"] != kind:
            more: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            yield from self._begin({"type": kind, "content": [], **more})
            part: dict[str, Any] = {"type": name, "text": ""}
            part |= {"annotations": [], "logprobs": []} if name == "output_text" else {}
            self.items[-1]["content"].append(part)
            yield self.event("content_part.added", **self._place(), content_index=0, part=copy_item(part))
        self.items[-1]["content"][0]["text"] += text
        more = {"logprobs": []} if name == "output_text" else {}
        yield self.event(f"{name}.delta", **self._place(), content_index=0, delta=text, **more)

    def _add_call(self, call: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        function = call["function"]
        if "id" in call:
            opened = {"type": "function_call", "call_id": call["id"], "name": function["name"], "arguments": ""}
            yield from self._begin(opened)
        if function["arguments"]:
            self.items[-1]["arguments"] += function["arguments"]
            yield self.event("function_call_arguments.delta", **self._place(), delta=function["arguments"])


def echo_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a response repeats of its request, with what holds where the request left it out."""
    tool_defaults = {"description": None, "parameters": None, "strict": False}
    format = (fields["text"] or {}).get("format") or {"type": "text"}
    more = {"description": None, "strict": False} if format["type"] == "json_schema" else {}
    return FIXED_FIELDS | {
        **{name: fields[name] for name in ECHOED},
        "reasoning": {"effort": (fields["reasoning"] or {}).get("effort"), "summary": None},
        "text": {"format": more | drop_absent(format)},
        "tool_choice": fields["tool_choice"] or "auto",
        "tools": [tool_defaults | drop_absent(tool) for tool in fields["tools"] or []],
    }


def drop_absent(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}


def copy_item(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item as it is now."""
    return {name: [*value] if isinstance(value, list) else value for name, value in item.items()}


def usage_of_response(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return counts of tokens as responses have them."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cache_write_tokens": 0, **usage["prompt_tokens_details"]},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }


class ResponseReply(Reply):
    """The answer to a request of /v1/responses."""

    def __init__(self, request: ResponseRequest, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.request = request
        self.items = ResponseItems(self.objects.id, self.objects.model, request.fields)
        request.forget_input()

    async def whole(self) -> bytes:
        """Return the response, as JSON."""
        last: dict[str, Any] = {}
        async for event in self._item_events():
            last = event
        return await encode_json(last["response"])

    async def events(self, include_usage: bool) -> AsyncIterator[bytes]:
        """Yield the events of a stream; an error is in the last ones."""
        try:
            for kind in ("created", "in_progress"):
                yield await named_event(self.items.event(kind, response=self.items.response("in_progress")))
            async for event in self._item_events():
                yield await named_event(event)
        except Refused as error:
            for event in self.items.fail(self.request.rename(error), self.usage()):
                yield await named_event(event)

    async def _item_events(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of all items, and of the whole response."""
        status = "completed"
        async for choice in self.choices():
            for event in self.items.add(choice["delta"]):
                yield event
            status = "incomplete" if choice["finish_reason"] == "length" else status
        for event in self.items.end(status):
            yield event
        yield self.items.event(status, response=self.items.response(status, self.usage()))


async def named_event(value: Mapping[str, Any]) -> bytes:
    """Return a server-sent event with its name."""
    return f"event: {value['type']}\ndata: ".encode() + await encode_json(value, ascii=True) + b"\n\n"
