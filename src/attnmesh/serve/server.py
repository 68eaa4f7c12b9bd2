"""Uvicorn with limits on connections, headers and clients that do not read, and the life of the server."""

import asyncio
import gc
import json
import socket
from errno import EACCES, EADDRINUSE
from math import isfinite
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from attnmesh.errors import ArgumentError
from attnmesh.serve.refused import Refused
from attnmesh.serve.routes import App
from attnmesh.serve.supervisor import Supervisor

CONNECTIONS = 512
"""Connections at a time; further ones are closed."""

HEADER_BYTES = 32 << 10
"""Bytes of a request's line and headers."""

HEADER_SECONDS = 20.0
"""Seconds that a client has to send the line and the headers of a request."""

STALL_SECONDS = 60.0
"""Seconds after which a client that does not read its response is cut off."""


OPEN_POLL_SECONDS = 0.05
"""Seconds between two looks at open requests while the server ends."""


class LimitedProtocol(H11Protocol):
    """HTTP/1.1 of clients that may be slow, or hostile."""

    _waiting: asyncio.TimerHandle | None = None
    """Ends a connection on which no request begins."""
    _stalled: asyncio.TimerHandle | None = None
    """Ends a connection whose client reads nothing."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, if there are not too many."""
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS:
            transport.abort()
        self._watch_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the timers with the connection."""
        super().connection_lost(exc)
        for timer in (self._waiting, self._stalled):
            if timer is not None:
                timer.cancel()

    def handle_events(self) -> None:
        """Begin the requests that have arrived."""
        super().handle_events()
        self._watch_headers()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._watch_headers()

    def _watch_headers(self) -> None:
        """Limit the time until a request begins; a running one has other limits."""
        running = self.cycle is not None and not self.cycle.response_complete
        if running and self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
        elif not running and self._waiting is None:
            self._waiting = self.loop.call_later(HEADER_SECONDS, self._abort)

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection; one whose client still reads gets time for it."""
        super().timeout_keep_alive_handler()
        self.pause_writing()

    def pause_writing(self) -> None:
        """Limit the time in which a client reads nothing."""
        super().pause_writing()
        if self._stalled is None:
            self._stalled = self.loop.call_later(STALL_SECONDS, self._abort)

    def resume_writing(self) -> None:
        """Go on with a client that reads."""
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _abort(self) -> None:
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, in OpenAI's shape."""
        body = json.dumps(Refused(400, msg).body).encode()
        headers = [("content-type", "application/json"), ("connection", "close"), ("content-length", str(len(body)))]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            parts: list[Any] = [h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()]
            self.transport.write(b"".join(self.conn.send(part) or b"" for part in parts))
        self.transport.close()


class DrainingServer(uvicorn.Server):
    """Lets open requests end before it closes its port: until then others are refused with 503."""

    def __init__(self, config: uvicorn.Config, supervisor: Supervisor, drain: float) -> None:
        super().__init__(config)
        self.supervisor = supervisor
        self.drain = drain

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for open requests, end with an error those that take too long, then close."""
        self.supervisor.draining = True
        left = self.drain
        if self.supervisor.open:
            self.supervisor.log(
                f"the server ends; open requests, which have {left:g} s to end: {len(self.supervisor.open)}"
            )
        while (self.supervisor.open or self.supervisor.encoding_count) and left > 0 and not self.force_exit:
            await asyncio.sleep(OPEN_POLL_SECONDS)
            left -= OPEN_POLL_SECONDS
        if cut := self.supervisor.cut_off("The server ended before this answer did."):
            self.supervisor.log(f"requests that the end of the server cut off: {cut}")
        self.config.timeout_graceful_shutdown = max(1, round(left)) if isfinite(left) else None
        await super().shutdown(sockets)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that will listen there, or raise if it cannot."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise _unusable(host, error) from None
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
    except OSError as error:
        listening.close()
        if error.errno not in (EADDRINUSE, EACCES):
            raise _unusable(host, error) from None
        given = f"{port} of {host} ({error.strerror})"
        fix = f"name another, as --port {port + 1 if port < 65535 else 8000}, or --port 0 for any free one"
        raise ArgumentError("--port", "a free port", given, fix) from None
    return listening


def _unusable(host: str, error: OSError) -> ArgumentError:
    fix = "leave --host out for this machine alone, or write 0.0.0.0 for all of its addresses"
    return ArgumentError("--host", "an address of this machine", f"{host!r} ({error.strerror})", fix)


def run(app: App, listening: socket.socket, drain: float) -> None:
    """Serve until a signal or a failure that no restart mends; then open requests get `drain` seconds to end."""
    settings: dict[str, Any] = {
        "http": LimitedProtocol,
        "ws": "none",
        "log_level": "critical",  # the log would show what clients send
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
        "h11_max_incomplete_event_size": HEADER_BYTES,
        "lifespan": "on",
    }
    server = DrainingServer(uvicorn.Config(app.asgi(), **settings), app.supervisor, drain)

    def fail() -> None:
        server.should_exit = True

    app.supervisor.on_failure = fail
    gc.collect()
    gc.freeze()  # else a full collection looks through all modules, and holds up the event loop for 0.3 s
    try:
        server.run(sockets=[listening])
    finally:
        gc.unfreeze()
        app.supervisor.abandon()
    if app.supervisor.failure is not None:
        raise app.supervisor.failure
