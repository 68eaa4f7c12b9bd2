"""Access to the server: each request is checked first, for the host that it names and its key."""

import hashlib
import hmac
import re
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attnmesh.serve.metrics import Metrics
from attnmesh.serve.refused import Refused

OPEN = ("/", "/health")
"""Paths that need no key. The page holds nothing secret, and asks for the key."""

POLLED = ("/health", "/metrics")
"""Paths that are asked for all the time, while the server starts too. Their responses are not counted."""

LOCAL = ("localhost", "127.0.0.1", "[::1]")
"""Names of this machine to itself."""

LOCAL_HOST = re.compile(f"({'|'.join(map(re.escape, LOCAL))})(:[0-9]*)?")
"""A Host header with one of these names, and with a port or without."""


@dataclass(frozen=True)
class Limits:
    """Rules of access: hosts, keys and sizes."""

    api_keys: tuple[str, ...] = ()
    """Keys that requests have to show one of; none if all may ask."""
    local: bool = True
    """Serve only requests to a name of this machine: a page of another site can have its own name point here."""
    max_body: int = 32 << 20


class AccessMiddleware:
    """Lets requests in, and counts the responses."""

    def __init__(self, app: ASGIApp, limits: Limits, metrics: Metrics) -> None:
        self.app = app
        self.limits = limits
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                if scope["path"] not in POLLED:
                    self.metrics.responses.labels(str(message["status"])).inc()
                message["headers"] = [*message["headers"], (b"x-content-type-options", b"nosniff")]
            await send(message)

        try:
            scope["api_key"] = self._allowed_key(scope["path"], Headers(scope=scope))
        except Refused as error:
            await JSONResponse(error.body, error.status, error.headers)(scope, receive, counted)
        else:
            await self.app(scope, receive, counted)

    def _allowed_key(self, path: str, headers: Headers) -> str:
        """Return the key of a request; empty if it needs none. Raise if it may not be served."""
        if self.limits.local and not LOCAL_HOST.fullmatch(headers.get("host", "").lower()):
            raise Refused(403, "host: expected a name of this machine. Start the server with --host for others.")
        if not self.limits.api_keys or path in OPEN:
            return ""
        kind, _, key = headers.get("authorization", "").partition(" ")
        matches = [own_key for own_key in self.limits.api_keys if is_same(key.strip(), own_key)]
        if kind.lower() != "bearer" or not matches:
            raise Refused(401, "authorization: expected Bearer and a key of the server", None, "invalid_api_key")
        return matches[0]


def is_same(given: str, secret: str) -> bool:
    """Return whether two keys are the same, in a time that tells nothing of the secret one."""
    digests = [hashlib.sha256(key.encode()).digest() for key in (given, secret)]
    return hmac.compare_digest(*digests)
