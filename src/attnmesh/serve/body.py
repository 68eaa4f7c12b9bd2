"""Bodies of requests: JSON within limits of bytes and time."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from attnmesh.serve.refused import Refused

SECONDS = 60.0
"""Time that a client has to send a body."""

DISCARDING = 10.0
"""Time in which the rest of a body that is too large is read and thrown away."""

TOGETHER = 8
"""Bodies of the largest size that are received at a time; further bytes are refused."""


class Bodies:
    """Reads bodies of at most `max_body` bytes, and of a multiple of that together."""

    def __init__(self, max_body: int) -> None:
        self.max_body, self.held = max_body, 0

    async def read(self, http: HttpRequest) -> Any:
        """Return the value of a request's body, or raise."""
        kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # a page of another site could send a form, and a browser would not ask
            raise Refused(415, "content-type: expected application/json")
        length = http.headers.get("content-length", "0")
        if not length.isascii() or not length.isdecimal() or int(length[:20]) > self.max_body:
            await self._refuse_size(http.stream())
        data = bytearray()
        try:
            async with asyncio.timeout(SECONDS):
                await self._receive(http, data)
            return await asyncio.to_thread(parse, bytes(data))
        except TimeoutError:
            raise Refused(408, f"body: expected in {SECONDS:.0f} s") from None
        except ClientDisconnect:
            raise Refused(400, "body: the client has closed the connection") from None
        finally:
            self.held -= len(data)

    async def _receive(self, http: HttpRequest, data: bytearray) -> None:
        parts = http.stream()
        async for part in parts:
            data += part
            self.held += len(part)
            if len(data) > self.max_body:
                await self._refuse_size(parts)
            if self.held > TOGETHER * self.max_body:
                raise Refused(503, "The server receives as many bytes as it can hold. Ask again.")

    async def _refuse_size(self, parts: AsyncIterator[bytes]) -> NoReturn:
        """Read the rest for a while: most clients send the whole body before they look for an answer."""
        with suppress(TimeoutError, ClientDisconnect):
            async with asyncio.timeout(DISCARDING):
                async for _ in parts:
                    pass
        raise Refused(413, f"body: expected at most {self.max_body} bytes. Start the server with --max-body.")


def parse(data: bytes) -> Any:
    """Return the value of JSON, which has to be strict.

    >>> parse(b'{"n": 1, "n": 2}')
    Traceback (most recent call last):
    attnmesh.serve.refused.Refused: body: expected JSON, given two fields "n"
    """

    def to_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise Refused(400, f"body: expected JSON, given two fields {json.dumps(twice[:60])}")
        return found

    def refuse(name: str) -> NoReturn:
        raise Refused(400, f"body: expected JSON, given {name}")

    try:
        return json.loads(data.decode(), object_pairs_hook=to_object, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"body: expected JSON in UTF-8: {str(error)[:100]}") from None
