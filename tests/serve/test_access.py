"""Access to the server: the names of this machine that a request may use."""

import asyncio

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Message

from attnmesh.serve.access import AccessMiddleware, Limits
from attnmesh.serve.metrics import Metrics

LOCAL = ("localhost", "localhost:8000", "LocalHost:80", "127.0.0.1", "127.0.0.1:8000", "[::1]", "[::1]:8000")
OTHERS = ("", "evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.2", "localhost:evil", "evil:[::1]")
BRACKETED = ("[::2]", "[::2]:8000", "[::]", "[::ffff:1.2.3.4]", "[::1", "[:", "::1", "[::1]:evil")


def status_of(host: str, limits: Limits) -> int:
    """Return the status of a response to a request that names a host."""
    sent = list[Message]()

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request"}

    scope = {"type": "http", "method": "GET", "path": "/health", "headers": [(b"host", host.encode())]}
    asyncio.run(AccessMiddleware(PlainTextResponse("served"), limits, Metrics())(scope, receive, send))
    return int(sent[0]["status"])


@pytest.mark.parametrize("host", LOCAL)
def test_names_of_this_machine_are_let_in(host: str) -> None:
    assert status_of(host, Limits()) == 200


@pytest.mark.parametrize("host", OTHERS + BRACKETED)
def test_no_other_name_is_taken_as_one_of_this_machine(host: str) -> None:
    assert status_of(host, Limits()) == 403
    assert status_of(host, Limits(local=False)) == 200
