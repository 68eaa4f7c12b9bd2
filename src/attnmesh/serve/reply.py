"""The answer to one request: pieces of text of its choices, whole or as events, until the client has gone."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from attnmesh.serve.answer_parts import AnswerPart
from attnmesh.serve.chat import EncodedPrompt
from attnmesh.serve.completion_objects import DONE_EVENT, CompletionObjects, encode_event, encode_json, usage_of
from attnmesh.serve.rank_messages import AnswerEnded, RequestAccepted
from attnmesh.serve.refused import Refused
from attnmesh.serve.supervisor import Event, Supervisor
from attnmesh.serve.text import Piece, SentToken, Text
from attnmesh.serve.tool_formats import ContentText, ToolCall

T = TypeVar("T")


HEARTBEAT_SECONDS = 10.0
"""Seconds of silence in a stream after which a comment is sent: proxies end connections silent for a minute."""


class ClientGone(Exception):
    """Raised when the client has closed its connection."""


class Reply:
    """The choices of one request, which run until they end or are cancelled."""

    def __init__(
        self,
        supervisor: Supervisor,
        objects: CompletionObjects,
        prompt: EncodedPrompt,
        choices: list[dict[str, Any]],
        stops: tuple[str, ...],
    ) -> None:
        self.supervisor = supervisor
        self.objects = objects
        self.prompt_tokens = len(prompt.ids)
        before = () if objects.is_chat else prompt.ids  # the answer of a chat is a message of its own
        self.texts = [Text(objects.spelling, stops, before) for _ in choices]
        self.splitters = [None if objects.make_parts is None else objects.make_parts() for _ in choices]
        self.counts = [0] * len(choices)
        """Tokens of each choice."""
        self.reasoning_counts = [0] * len(choices)
        """Tokens of what the model thinks, in each choice."""
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._early: list[tuple[int, Event]] = []
        self.requests = supervisor.submit(prompt, choices, lambda index, event: self._events.put_nowait((index, event)))
        supervisor.metrics.prompt_tokens.inc(len(prompt.ids))

    async def while_connected(self, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of the work; cancel the request if it fails or the client goes."""
        try:
            return await while_connected(receive, work)
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """End what still runs."""
        for request in self.requests:
            self.supervisor.cancel(request)

    async def wait_until_accepted(self) -> None:
        """Return when the engine has queued each choice; raise if it refuses one."""
        waiting = len(self.requests)
        while waiting:
            index, event = await self._events.get()
            if isinstance(event, Refused):
                raise event
            if isinstance(event, RequestAccepted):
                waiting -= 1
            else:
                self._early.append((index, event))

    async def choices(self) -> AsyncIterator[dict[str, Any]]:
        """Yield a choice for each of its new parts; the last has the reason of its end."""
        running = set(range(len(self.requests)))
        while running:
            index, event = self._early.pop(0) if self._early else await self._events.get()
            if isinstance(event, Refused):
                raise event
            if index not in running:
                continue  # tokens that came before ranks knew of the end
            text = self.texts[index]
            was_thinking = self._is_thinking(index)
            piece = Piece("")
            reason = None
            match event:
                case AnswerEnded():
                    piece = text.end()
                    reason = "stop" if text.stopped else event.reason
                case SentToken():
                    self.counts[index] += 1
                    piece = text.add(event)
                    reason = "stop" if text.stopped else None
            parts, reason = self._parts(index, piece, reason)
            if isinstance(event, SentToken):
                self.reasoning_counts[index] += was_thinking or self._is_thinking(index)
            if reason is not None:
                self.supervisor.cancel(self.requests[index])  # of a stop string, which ranks do not know
                running.discard(index)
            if parts or (piece.sent_tokens and self.objects.top is not None) or reason is not None:
                for choice in self.objects.choices(index, piece, parts, reason):
                    yield choice
            await asyncio.sleep(0)  # many tokens may be there at once, and other requests want to go on

    def _is_thinking(self, index: int) -> bool:
        splitter = self.splitters[index]
        return splitter is not None and splitter.is_thinking

    def _parts(self, index: int, piece: Piece, reason: str | None) -> tuple[list[AnswerPart], str | None]:
        """Return the parts that a piece of text makes certain, and the reason if they are the last."""
        splitter = self.splitters[index]
        if splitter is None:
            return [ContentText(piece.text)] if piece.text else [], reason
        parts = splitter.add(piece.text, piece.sent_tokens)
        parts += splitter.end() if reason is not None else []
        calls = [place for place, part in enumerate(parts) if isinstance(part, ToolCall)]
        if calls and not self.objects.parallel:
            return parts[: calls[0] + 1], "tool_calls"
        return parts, "tool_calls" if reason == "stop" and splitter.call_count else reason

    async def whole(self) -> bytes:
        """Return the response with all choices, as JSON."""
        parts: list[list[dict[str, Any]]] = [[] for _ in self.requests]
        async for choice in self.choices():
            parts[choice["index"]].append(choice)
        return await encode_json(self.objects.whole([*map(self.objects.join, parts)], self.usage()))

    async def events(self, include_usage: bool) -> AsyncIterator[bytes]:
        """Yield the events of a stream; an error is the last one."""
        try:
            for index in range(len(self.requests)) if self.objects.is_chat else ():
                yield encode_event(self.objects.begin(index))
            async for choice in self.choices():
                yield encode_event(self.objects.chunk([choice]))
            if include_usage:
                yield encode_event(self.objects.chunk([], self.usage()))
            yield DONE_EVENT
        except Refused as error:
            yield encode_event(error.body)

    def usage(self) -> dict[str, Any]:
        """Return the counts of tokens so far."""
        cached = max(request.cached_tokens for request in self.requests)
        return usage_of(self.prompt_tokens, cached, sum(self.counts), sum(self.reasoning_counts))


class EventStream(Response):
    """A response of events; the request ends with it."""

    media_type = "text/event-stream"

    def __init__(self, reply: Reply, include_usage: bool) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.reply = reply
        self.include_usage = include_usage
        self.is_silent = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the last, or until the client has gone."""
        try:
            await self.reply.while_connected(receive, self._send(send))
        except ClientGone:
            pass
        finally:
            self.reply.cancel()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        beating = asyncio.create_task(self._beat(send))
        try:
            async for data in self.reply.events(self.include_usage):
                self.is_silent = False
                await send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
        await send({"type": "http.response.body", "body": b""})

    async def _beat(self, send: Send) -> None:
        """Send a comment whenever nothing else was sent for some time, as while a prompt is computed."""
        while True:
            self.is_silent = True
            await asyncio.sleep(HEARTBEAT_SECONDS)
            if self.is_silent:
                await send({"type": "http.response.body", "body": b": waiting\n\n", "more_body": True})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of the work; raise `ClientGone`, and cancel it, if the client goes."""
    working, going = asyncio.create_task(work), asyncio.create_task(_wait_until_gone(receive))
    try:
        await asyncio.wait({working, going}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, going):
            task.cancel()
        await asyncio.gather(working, going, return_exceptions=True)


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
