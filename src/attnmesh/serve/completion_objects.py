"""Objects of responses: chat completions and completions, whole or in chunks."""

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from attnmesh.serve.answer_parts import AnswerPart, AnswerParts
from attnmesh.serve.spelling import Spelling
from attnmesh.serve.text import Piece, SentToken
from attnmesh.serve.tool_formats import ContentText, ReasoningText, ToolCall

RAW = "bytes:"
"""Prefix by which completions show a token that is not made of whole characters."""


@dataclass(frozen=True)
class CompletionObjects:
    """Makes the objects that answer one request."""

    spelling: Spelling
    model: str
    is_chat: bool
    top: int | None
    """Alternatives of each token that are shown; None without log-probabilities."""
    make_parts: Callable[[], AnswerParts] | None = None
    """Makes what takes the text of a choice apart; None for content alone."""
    parallel: bool = True
    """An answer may have several calls; else the first one ends it."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """Return the response of a request that does not stream."""
        return {**self._head(""), "choices": choices, "usage": usage}

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return one event of a stream."""
        return {**self._head(".chunk" if self.is_chat else ""), "choices": choices, "usage": usage}

    def _head(self, kind: str) -> dict[str, Any]:
        prefix, name = ("chatcmpl", "chat.completion") if self.is_chat else ("cmpl", "text_completion")
        return {"id": f"{prefix}-{self.id}", "object": name + kind, "created": self.created, "model": self.model}

    def begin(self, index: int) -> dict[str, Any]:
        """Return the first event of a chat's choice, which names the role."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return self.chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def choices(
        self, index: int, piece: Piece, parts: Sequence[AnswerPart], reason: str | None
    ) -> list[dict[str, Any]]:
        """Return a choice for each new part: the first has the log-probabilities, the last the reason."""
        deltas = [delta for part in parts for delta in deltas_of(part)] or [{}]
        pieces, reasons = [piece] + [Piece("")] * (len(deltas) - 1), [None] * (len(deltas) - 1) + [reason]
        return [self.choice(index, *arguments) for arguments in zip(pieces, reasons, deltas, strict=True)]

    def choice(
        self, index: int, piece: Piece, reason: str | None, delta: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return a choice with new text, or with a delta of a chat."""
        shared = {"index": index, "finish_reason": reason}
        if not self.is_chat:
            shown = None if self.top is None else self._completion_logprobs(piece)
            return {**shared, "text": piece.text, "logprobs": shown}
        shown = (
            None
            if self.top is None
            else {"content": [self._logprob(token) for _, token in piece.sent_tokens], "refusal": None}
        )
        delta = ({"content": piece.text} if piece.text else {}) if delta is None else delta
        return {**shared, "delta": delta, "logprobs": shown}

    def join(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a choice with all text, from those of a stream."""
        shared = {"index": parts[0]["index"], "finish_reason": parts[-1]["finish_reason"]}
        shown = None if self.top is None else join_lists([part["logprobs"] for part in parts])
        if not self.is_chat:
            return {**shared, "text": "".join(part["text"] for part in parts), "logprobs": shown}
        message = {"role": "assistant", **join_deltas([part["delta"] for part in parts]), "refusal": None}
        return {**shared, "message": message, "logprobs": shown}

    def _logprob(self, token: SentToken) -> dict[str, Any]:
        others = [self._entry(id, logprob) for id, logprob in token.top[: self.top]]
        return {**self._entry(token.id, token.logprob), "top_logprobs": others}

    def _entry(self, id: int, logprob: float | None) -> dict[str, Any]:
        data = None if self.spelling.drops(id) else [*self.spelling.bytes_of(id)]
        return {"token": self.spelling.spell(id), "logprob": logprob, "bytes": data}

    def _completion_logprobs(self, piece: Piece) -> dict[str, Any]:
        sent = [token for _, token in piece.sent_tokens]
        return {
            "tokens": [self.spelling.spell(token.id, RAW) for token in sent],
            "token_logprobs": [token.logprob for token in sent],
            "top_logprobs": [self._top(token) for token in sent],
            "text_offset": [index for index, _ in piece.sent_tokens],
        }

    def _top(self, token: SentToken) -> dict[str, float | None]:
        """Return the log-probabilities of the likeliest tokens, and of the drawn one, by what is written of them.

        Of tokens that are written alike, the drawn one counts, then the likeliest.
        """
        by_text = {self.spelling.spell(token.id, RAW): token.logprob}
        for id, logprob in token.top[: self.top]:
            by_text.setdefault(self.spelling.spell(id, RAW), logprob)
        return by_text


def deltas_of(part: AnswerPart) -> Iterator[dict[str, Any]]:
    """Yield the deltas of a part: of a call first its name, then its arguments in pieces."""
    match part:
        case ContentText(text):
            yield {"content": text}
        case ReasoningText(text):
            yield {"reasoning_content": text}
        case ToolCall(name, arguments, id, index):
            opened = {"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": ""}}
            yield {"tool_calls": [opened]}
            for first in range(0, len(arguments), ARGUMENT_CHARACTERS):
                piece = {"arguments": arguments[first : first + ARGUMENT_CHARACTERS]}
                yield {"tool_calls": [{"index": index, "function": piece}]}


def join_deltas(deltas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what a message has of the deltas of a stream.

    >>> join_deltas([{"content": "a"}, {"content": "b"}])
    {'content': 'ab'}
    >>> join_deltas([*deltas_of(ToolCall("f", "{}", "7"))])
    {'content': None, 'tool_calls': [{'id': '7', 'type': 'function', 'function': {'name': 'f', 'arguments': '{}'}}]}
    """
    content = "".join(delta.get("content", "") for delta in deltas)
    thought = "".join(delta.get("reasoning_content", "") for delta in deltas)
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                shown = {key: value for key, value in call.items() if key != "index"}
                calls.append({**shown, "function": {**call["function"]}})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    message: dict[str, Any] = {"content": content or (None if calls else "")}
    return message | ({"reasoning_content": thought} if thought else {}) | ({"tool_calls": calls} if calls else {})


def join_lists(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one object, whose lists are those of all parts.

    >>> join_lists([{"a": [1], "b": None}, {"a": [2, 3], "b": None}])
    {'a': [1, 2, 3], 'b': None}
    """
    return {
        name: [*chain.from_iterable(part[name] for part in parts)] if isinstance(value, list) else value
        for name, value in parts[0].items()
    }


def usage_of(prompt: int, cached: int, completion: int, thought: int) -> dict[str, Any]:
    """Return the counts of a request's tokens, of those that were cached, and of those that a model thinks."""
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    details = {"prompt_tokens_details": {"cached_tokens": cached}}
    return counts | details | {"completion_tokens_details": {"reasoning_tokens": thought}}


async def encode_json(value: Any, *, ascii: bool = False) -> bytes:
    """Return JSON, which may be long, and let other work of the event loop run meanwhile.

    Lines of events have no other signs than `ascii`: some clients end a line at signs of Unicode.
    """
    whole = []
    size = 0
    for part in json_parts(value, ascii):
        whole.append(part)
        size += len(part)
        if size > PIECE:
            size = 0
            await asyncio.sleep(0)
    return "".join(whole).encode()


def json_parts(value: Any, ascii: bool = False) -> Iterator[str]:
    """Yield JSON in parts that take little time each.

    >>> many = 2 * ITEMS_AT_ONCE
    >>> "".join(json_parts({"a": [], "b": [[1, 2], {}], "c": [0] * many})) == '{"a":[],"b":[[1,2],{}],"c":[0' + (
    ...     ",0" * (many - 1)
    ... ) + "]}"
    True
    >>> "".join(json_parts({"a": "é" * PIECE + "x"}, ascii=True)) == '{"a":"' + "\\\\u00e9" * PIECE + 'x"}'
    True
    """
    if isinstance(value, dict):
        for number, (name, item) in enumerate(value.items()):
            yield f"{',' if number else '{'}{dump_json(name, ascii)}:"
            yield from json_parts(item, ascii)
        yield "}" if value else "{}"
    elif isinstance(value, list) and len(value) <= ITEMS_AT_ONCE:
        for index, item in enumerate(value):
            yield "," if index else "["
            yield from json_parts(item, ascii)
        yield "]" if value else "[]"
    elif isinstance(value, list):
        for first in range(0, len(value), ITEMS_AT_ONCE):
            yield f"{',' if first else '['}{dump_json(value[first : first + ITEMS_AT_ONCE], ascii)[1:-1]}"
        yield "]"
    elif isinstance(value, str) and len(value) > PIECE:
        for first in range(0, len(value), PIECE):
            yield ("" if first else '"') + dump_json(value[first : first + PIECE], ascii)[1:-1]
        yield '"'
    else:
        yield dump_json(value, ascii)


def dump_json(value: Any, ascii: bool = False) -> str:
    """Return JSON as responses have it."""
    return json.dumps(value, ensure_ascii=ascii, separators=(",", ":"))


def encode_event(value: dict[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


ITEMS_AT_ONCE = 64
"""Items of a list that are written before other work may run."""

PIECE = 1 << 16
"""Characters of JSON that are written before other work may run."""

ARGUMENT_CHARACTERS = 256
"""Characters of a call's arguments in one event."""

DONE_EVENT = b"data: [DONE]\n\n"
"""The last event of a stream."""
