"""Objects of responses: chat completions and completions, whole or in chunks."""

import asyncio
import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from attnmesh.serve.spelling import Spelling
from attnmesh.serve.text import Piece, SentToken

RAW = "bytes:"
"""Beginning of a token that is no whole characters, in completions."""


@dataclass(frozen=True)
class Answers:
    """The objects that answer one request."""

    spelling: Spelling
    model: str
    is_chat: bool
    top: int | None
    """Alternatives of each token that are shown; None without log-probabilities."""
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

    def choice(self, index: int, piece: Piece, reason: str | None) -> dict[str, Any]:
        """Return a choice with new text."""
        shared = {"index": index, "finish_reason": reason}
        if not self.is_chat:
            shown = None if self.top is None else self._completion_logprobs(piece)
            return {**shared, "text": piece.text, "logprobs": shown}
        shown = (
            None if self.top is None else {"content": [self._logprob(one) for _, one in piece.tokens], "refusal": None}
        )
        return {**shared, "delta": {"content": piece.text} if piece.text else {}, "logprobs": shown}

    def joined(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a choice with all text, from those of a stream."""
        shared = {"index": parts[0]["index"], "finish_reason": parts[-1]["finish_reason"]}
        shown = None if self.top is None else joined_lists([part["logprobs"] for part in parts])
        if not self.is_chat:
            return {**shared, "text": "".join(part["text"] for part in parts), "logprobs": shown}
        content = "".join(part["delta"].get("content", "") for part in parts)
        message = {"role": "assistant", "content": content, "refusal": None}
        return {**shared, "message": message, "logprobs": shown}

    def _logprob(self, token: SentToken) -> dict[str, Any]:
        others = [self._entry(id, logprob) for id, logprob in token.top[: self.top]]
        return {**self._entry(token.id, token.logprob), "top_logprobs": others}

    def _entry(self, id: int, logprob: float | None) -> dict[str, Any]:
        data = None if self.spelling.drops(id) else [*self.spelling.bytes_of(id)]
        return {"token": self.spelling.written(id), "logprob": logprob, "bytes": data}

    def _completion_logprobs(self, piece: Piece) -> dict[str, Any]:
        tokens = [token for _, token in piece.tokens]
        return {
            "tokens": [self.spelling.written(token.id, RAW) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": [index for index, _ in piece.tokens],
        }

    def _top(self, token: SentToken) -> dict[str, float | None]:
        """Return the log-probabilities of the likeliest tokens, and of the drawn one, by what is written of them.

        Of tokens that are written alike, the drawn one counts, then the likeliest.
        """
        found = {self.spelling.written(token.id, RAW): token.logprob}
        for id, logprob in token.top[: self.top]:
            found.setdefault(self.spelling.written(id, RAW), logprob)
        return found


def joined_lists(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one object, whose lists are those of all parts.

    >>> joined_lists([{"a": [1], "b": None}, {"a": [2, 3], "b": None}])
    {'a': [1, 2, 3], 'b': None}
    """
    return {
        name: [*chain.from_iterable(part[name] for part in parts)] if isinstance(value, list) else value
        for name, value in parts[0].items()
    }


def usage_of(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """Return the counts of tokens of a request."""
    details = {"cached_tokens": cached}
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {**counts, "prompt_tokens_details": details}


async def encoded(value: Any) -> bytes:
    """Return JSON, which may be long, and let other work of the event loop run meanwhile."""
    whole, size = [], 0
    for part in json_parts(value):
        whole.append(part)
        size += len(part)
        if size > PIECE:
            size = 0
            await asyncio.sleep(0)
    return "".join(whole).encode()


def json_parts(value: Any) -> Iterator[str]:
    """Yield JSON in parts that take little time each.

    >>> "".join(json_parts({"a": [], "b": [[1, 2], {}], "c": [0] * 2 * SLICE})) == '{"a":[],"b":[[1,2],{}],"c":[0' + (
    ...     ",0" * (2 * SLICE - 1)
    ... ) + "]}"
    True
    """
    if isinstance(value, dict):
        for number, (name, item) in enumerate(value.items()):
            yield f"{',' if number else '{'}{dumped(name)}:"
            yield from json_parts(item)
        yield "}" if value else "{}"
    elif isinstance(value, list) and len(value) <= SLICE:
        for index, item in enumerate(value):
            yield "," if index else "["
            yield from json_parts(item)
        yield "]" if value else "[]"
    elif isinstance(value, list):
        for first in range(0, len(value), SLICE):
            yield f"{',' if first else '['}{dumped(value[first : first + SLICE])[1:-1]}"
        yield "]"
    else:
        yield dumped(value)


def dumped(value: Any) -> str:
    """Return JSON as responses have it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def event(value: dict[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


SLICE, PIECE = 64, 1 << 16
"""Items of a list, and characters of JSON, that are written before other work may run."""

DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""
