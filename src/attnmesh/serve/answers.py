"""Objects of responses: chat completions and completions, whole or in chunks."""

import json
import time
import uuid
from dataclasses import dataclass, field
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

    def choice(self, index: int, piece: Piece, offset: int, reason: str | None, *, whole: bool) -> dict[str, Any]:
        """Return a choice with new text, or with all; `offset` is the place of the text in the choice."""
        shared = {"index": index, "finish_reason": reason}
        if not self.is_chat:
            shown = None if self.top is None else self._completion_logprobs(piece, offset)
            return {**shared, "text": piece.text, "logprobs": shown}
        shown = None if self.top is None else {"content": [self._logprob(one) for one in piece.tokens], "refusal": None}
        if whole:
            message = {"role": "assistant", "content": piece.text, "refusal": None}
            return {**shared, "message": message, "logprobs": shown}
        return {**shared, "delta": {"content": piece.text} if piece.text else {}, "logprobs": shown}

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
        offsets = [offset + sum(map(len, texts[:i])) for i in range(len(texts))]
        logprobs = [token.logprob for token in piece.tokens]
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def usage_of(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """Return the counts of tokens of a request."""
    details = {"cached_tokens": cached}
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {**counts, "prompt_tokens_details": details}


def event(value: dict[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""
