"""Messages between the front and rank 0, each with the code that goes through the socket as JSON."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class NewPrompt(NamedTuple):
    """A prompt that requests come with."""

    prompt_number: int
    ids: list[int]
    images: dict[str, Any]
    """Inputs for images. JSON has a description, and their bytes follow the message."""


class ForgetPrompt(NamedTuple):
    """The front sends no more requests with a prompt: the rank forgets the prompt."""

    prompt_number: int


class SubmitRequest(NamedTuple):
    """A request with a prompt. A request that another world had accepted goes on after the tokens `sent`."""

    number: int
    prompt_number: int
    options: dict[str, Any]
    sent: list[int] | None


class CancelRequest(NamedTuple):
    """The front waits for a request no longer: the engine ends it."""

    number: int


class CloseEngine(NamedTuple):
    """The front sends no more requests: the engine ends."""


class EngineReady(NamedTuple):
    """The engine takes requests, within these sizes of contexts and caches."""

    engine_sizes: dict[str, Any]


class EngineFigures(NamedTuple):
    """The figures of the engine."""

    figures: dict[str, float | list[float]]


class RequestAccepted(NamedTuple):
    """The engine has queued a request."""

    number: int


class AnswerBegun(NamedTuple):
    """The prompt of a request is computed, of which a cache had some tokens."""

    number: int
    cached_tokens: int


class TokenDrawn(NamedTuple):
    """A token of an answer, and the log-probabilities that were asked for."""

    number: int
    id: int
    logprob: float | None
    top: Sequence[tuple[int, float]]


class AnswerEnded(NamedTuple):
    """An answer has ended: "stop" or "length"."""

    number: int
    reason: str


class RequestRefused(NamedTuple):
    """A request fails: an HTTP status, a text, and a code of OpenAI's."""

    number: int
    status: int
    text: str
    code: str | None = None


ToRank = NewPrompt | ForgetPrompt | SubmitRequest | CancelRequest | CloseEngine

OfRequest = RequestAccepted | AnswerBegun | TokenDrawn | AnswerEnded | RequestRefused
"""Messages of rank 0 about one request."""

ToFront = EngineReady | EngineFigures | OfRequest

MESSAGES: dict[str, Any] = {
    "prompt": NewPrompt,
    "forget": ForgetPrompt,
    "submit": SubmitRequest,
    "cancel": CancelRequest,
    "close": CloseEngine,
    "ready": EngineReady,
    "metrics": EngineFigures,
    "accepted": RequestAccepted,
    "begin": AnswerBegun,
    "token": TokenDrawn,
    "end": AnswerEnded,
    "refused": RequestRefused,
}
"""Messages by the names of their codes."""

MESSAGE_NAMES: dict[type, str] = {message: name for name, message in MESSAGES.items()}


def message_code(message: ToRank | ToFront) -> list[Any]:
    """Return a message as JSON has it.

    >>> message_code(CancelRequest(7))
    ['cancel', 7]
    """
    return [MESSAGE_NAMES[type(message)], *message]


def message_of(code: Sequence[Any]) -> Any:
    """Return the message that `message_code` wrote, after JSON.

    >>> message_of(["refused", 7, 503, "The server ends.", None])
    RequestRefused(number=7, status=503, text='The server ends.', code=None)
    """
    name, *fields = code
    return MESSAGES[name](*fields)
