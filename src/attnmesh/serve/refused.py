"""Refusals of the server, in the shape of OpenAI's errors."""

from typing import Any

RETRY_AFTER_SECONDS = 2
"""Seconds after which a client may ask again, when the queue is full or ranks restart."""

ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
"""OpenAI's types of errors; from 500 on it is server_error, for others invalid_request_error."""


class Refused(Exception):
    """Raised when a request is not served: a status, a message and the field at fault.

    Names of fields come from clients, and may hold half of a surrogate pair, which no response can have.

    >>> Refused(400, "n: expected 1 to 16, given 0", "n").body["error"]["type"]
    'invalid_request_error'
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(_in_utf_8(message))
        self.status = status
        self.param = param and _in_utf_8(param)
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """The body of the response."""
        kind = "server_error" if self.status >= 500 else ERROR_TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response."""
        if self.status == 401:
            return {"www-authenticate": "Bearer"}
        return {"retry-after": str(RETRY_AFTER_SECONDS)} if self.status in (429, 503) else {}


def _in_utf_8(text: str) -> str:
    return text.encode(errors="replace").decode()
