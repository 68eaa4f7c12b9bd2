"""Objects of responses: chat completions and completions, whole or in chunks."""

import asyncio
import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any

from attnmesh.serve.text import Piece, Token


@dataclass(frozen=True)
class Answers:
    """The objects that answer one request."""

    tokenizer: Any
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

    def choice(self, index: int, piece: Piece, offset: int, reason: str | None) -> dict[str, Any]:
        """Return a choice with new text; `offset` is the place of the text in the choice."""
        shared = {"index": index, "finish_reason": reason}
        if not self.is_chat:
            shown = None if self.top is None else self._completion_logprobs(piece, offset)
            return {**shared, "text": piece.text, "logprobs": shown}
        shown = None if self.top is None else {"content": [self._logprob(one) for one in piece.tokens], "refusal": None}
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

    def _logprob(self, token: Token) -> dict[str, Any]:
        others = [self._entry(id, logprob) for id, logprob in token.top[: self.top]]
        return {**self._entry(token.id, token.logprob), "top_logprobs": others}

    def _entry(self, id: int, logprob: float | None) -> dict[str, Any]:
        text = self._text(id)
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}

    def _text(self, id: int) -> str:
        text: str = self.tokenizer.decode([id], clean_up_tokenization_spaces=False)
        return text

    def _completion_logprobs(self, piece: Piece, offset: int) -> dict[str, Any]:
        texts = [self._text(token.id) for token in piece.tokens]
        tops = [{self._text(id): logprob for id, logprob in token.top[: self.top]} for token in piece.tokens]
        *offsets, _ = accumulate(map(len, texts), initial=offset)
        logprobs = [token.logprob for token in piece.tokens]
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


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
        for place, (name, item) in enumerate(value.items()):
            yield f"{',' if place else '{'}{dumped(name)}:"
            yield from json_parts(item)
        yield "}" if value else "{}"
    elif isinstance(value, list) and len(value) <= SLICE:
        for place, item in enumerate(value):
            yield "," if place else "["
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
