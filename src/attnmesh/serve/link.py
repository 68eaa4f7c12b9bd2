"""Messages between the front and rank 0: JSON with its length before it, through a socket in a private folder.

JSON holds plain values alone. Pickle would run code of anyone who could write to the socket.
"""

import asyncio
import json
import socket
from contextlib import suppress
from typing import Any

WIDTH = 4
"""Bytes of a message's length."""


def packed(message: list[Any]) -> bytes:
    """Return a message as bytes."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return len(body).to_bytes(WIDTH, "big") + body


async def read_message(reader: asyncio.StreamReader) -> list[Any]:
    """Return the next message; raise `IncompleteReadError`, an `EOFError`, or `OSError` at the end."""
    length = int.from_bytes(await reader.readexactly(WIDTH), "big")
    message: list[Any] = json.loads(await reader.readexactly(length))
    return message


class Link:
    """The end that rank 0 has. One thread receives, any may send."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(address)
        self.file = self.socket.makefile("rb")

    def receive(self) -> list[Any] | None:
        """Return the next message, or None when the front has closed its end."""
        try:
            length = self.file.read(WIDTH)
            body = self.file.read(int.from_bytes(length, "big"))
        except (OSError, ValueError):  # closed by this end
            return None
        if len(length) < WIDTH or len(body) < int.from_bytes(length, "big"):
            return None
        message: list[Any] = json.loads(body)
        return message

    def send(self, data: bytes) -> None:
        """Send bytes of whole messages."""
        self.socket.sendall(data)

    def close(self) -> None:
        """Wake the thread that receives, and close."""
        with suppress(OSError):  # the front has gone
            self.socket.shutdown(socket.SHUT_RDWR)
        self.file.close()
        self.socket.close()
