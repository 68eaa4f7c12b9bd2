"""Bodies of requests: JSON within limits of bytes, values and time."""

import asyncio
from codecs import getincrementaldecoder
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from attnmesh.serve.json_reader import MAX_JSON_VALUES, JsonReader
from attnmesh.serve.refused import Refused

T = TypeVar("T")

BODY_TIMEOUT = 60.0
"""Time that a client has to send a body."""

DISCARD_TIMEOUT = 10.0
"""Time in which the rest of a body that is too large is read and thrown away."""

MAX_LARGEST_BODIES = 8
"""Bodies of the largest size that are held at a time; further bytes are refused."""


@dataclass
class Body:
    """The part of a body that was received."""

    parts: list[str] = field(default_factory=list)
    nbytes: int = 0


class Bodies:
    """Reads bodies of at most `max_body` bytes, and of a multiple of that together."""

    def __init__(self, max_body: int) -> None:
        self.max_body = max_body
        self.held_bytes = 0

    @asynccontextmanager
    async def read(self, http: HttpRequest, tokens: int, convert: Callable[[Any], T]) -> AsyncIterator[tuple[T, int]]:
        """Yield what `convert` makes of a body's value, and the number of the body's bytes.

        The bytes count as held until the block ends. The body may have `tokens` values for the tokens of a prompt, and
        `MAX_JSON_VALUES` others. `convert` runs in a thread.
        """
        await self._check(http)
        body = Body()
        try:
            read = await self._value(
                http, body, lambda text: convert(JsonReader(text, MAX_JSON_VALUES + tokens).read())
            )
            yield read, body.nbytes
        finally:
            self.held_bytes -= body.nbytes

    async def _check(self, http: HttpRequest) -> None:
        """Raise on headers of what is no body, or one too large."""
        kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # a page of another site could send a form, and a browser would not ask
            raise Refused(415, "content-type: expected application/json")
        length = http.headers.get("content-length", "0")
        if not length.isascii() or not length.isdecimal() or int(length[:20]) > self.max_body:
            await self._refuse_size(http.stream())

    async def _value(self, http: HttpRequest, body: Body, convert: Callable[[str], T]) -> T:
        try:
            async with asyncio.timeout(BODY_TIMEOUT):
                await self._receive(http, body)
                return await asyncio.to_thread(lambda: convert("".join(body.parts)))
        except TimeoutError:
            raise Refused(408, f"body: expected in {BODY_TIMEOUT:.0f} s") from None
        except ClientDisconnect:
            raise Refused(400, "body: the client has closed the connection") from None
        except UnicodeDecodeError:
            raise Refused(400, "body: expected JSON in UTF-8") from None
        finally:
            body.parts.clear()  # what was read of them is enough

    async def _receive(self, http: HttpRequest, body: Body) -> None:
        decoder = getincrementaldecoder("utf-8")()
        received = http.stream()
        async for part in received:
            body.nbytes += len(part)
            self.held_bytes += len(part)
            if body.nbytes > self.max_body:
                await self._refuse_size(received)
            if self.held_bytes > MAX_LARGEST_BODIES * self.max_body:
                raise Refused(503, "The server receives as many bytes as it can hold. Ask again.")
            body.parts.append(decoder.decode(part))
        body.parts.append(decoder.decode(b"", final=True))

    async def _refuse_size(self, parts: AsyncIterator[bytes]) -> NoReturn:
        """Read the rest for a while: most clients send the whole body before they look for an answer."""
        with suppress(TimeoutError, ClientDisconnect):
            async with asyncio.timeout(DISCARD_TIMEOUT):
                async for _ in parts:
                    pass
        raise Refused(413, f"body: expected at most {self.max_body} bytes. Start the server with --max-body.")
