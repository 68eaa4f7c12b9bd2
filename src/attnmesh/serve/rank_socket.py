"""Messages between the front and rank 0: JSON with its length before it, through a socket in a private folder.

JSON holds plain values alone. Pickle would run code of anyone who could write to the socket. The bytes of images follow
the message that describes them.
"""

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from attnmesh.serve.images import buffers_of, describe_images, images_of
from attnmesh.serve.rank_messages import NewPrompt, ToFront, ToRank, message_code, message_of

WIDTH = 4
"""Bytes of a message's length."""

MESSAGE_PART_BYTES = 1 << 18
"""Bytes of a part of a long message."""


def pack_message(code: list[Any]) -> bytes:
    """Return the code of a message as bytes."""
    body = json.dumps(code, separators=(",", ":")).encode()
    return len(body).to_bytes(WIDTH, "big") + body


def message_parts(message: ToRank) -> Iterator[memoryview]:
    """Yield the bytes of a message in parts, of which those of images are no copies."""
    images = message.images if isinstance(message, NewPrompt) else {}
    code = message_code(message)
    if isinstance(message, NewPrompt):
        code[-1] = describe_images(images)
    for buffer in (memoryview(pack_message(code)), *buffers_of(images)):
        for first in range(0, len(buffer), MESSAGE_PART_BYTES):
            yield buffer[first : first + MESSAGE_PART_BYTES]


async def read_message(reader: asyncio.StreamReader) -> ToFront:
    """Return the next message; raise `IncompleteReadError`, an `EOFError`, or `OSError` at the end."""
    length = int.from_bytes(await reader.readexactly(WIDTH), "big")
    message: ToFront = message_of(json.loads(await reader.readexactly(length)))
    return message


class RankSocket:
    """Rank 0's end of the socket. One thread calls `receive`; any thread may call `send`."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(address)
        self.file = self.socket.makefile("rb")

    def receive(self) -> ToRank | None:
        """Return the next message, or None when the front has closed its end."""
        try:
            message: ToRank = message_of(json.loads(self._read(int.from_bytes(self._read(WIDTH), "big"))))
            if isinstance(message, NewPrompt):
                described: Any = message.images
                images = images_of(described, self._read(sum(size for *_, size in described)))
                message = message._replace(images=images)
        except (OSError, ValueError, EOFError):  # closed by this end, or the other
            return None
        return message

    def _read(self, size: int) -> bytes:
        received = self.file.read(size)
        if len(received) < size:
            raise EOFError
        return received

    def send(self, message: ToFront) -> None:
        """Send a message."""
        self.socket.sendall(pack_message(message_code(message)))

    def close(self) -> None:
        """Wake the thread that receives, and close."""
        with suppress(OSError):  # the front has gone
            self.socket.shutdown(socket.SHUT_RDWR)
        self.file.close()
        self.socket.close()
