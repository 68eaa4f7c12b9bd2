"""The front's end of the socket to rank 0: where it listens, and a connection with the messages that wait for it."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from attnmesh.errors import ArgumentError
from attnmesh.serve.rank_messages import ToFront, ToRank
from attnmesh.serve.rank_socket import message_parts, read_message

LONGEST_ADDRESS = 103
"""Bytes of the name of a socket at most, on all systems."""

LAST_MESSAGES_SECONDS = 1.0
"""Seconds in which the last messages of ranks that have ended are read, at most."""


class RankListener:
    """A socket for rank 0, in a folder that other users cannot enter."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="attnmesh-serve-")
        self.address = str(Path(self._folder) / "front")
        self._server: asyncio.Server | None = None

    async def begin(self, connected: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> None:
        """Listen, or raise and leave no folder."""
        try:
            length = len(os.fsencode(self.address))
            if length > LONGEST_ADDRESS:
                expected = f"room for an address of {LONGEST_ADDRESS} bytes"
                fix = "set TMPDIR to a folder with a shorter name"
                raise ArgumentError("TMPDIR", expected, f"one of {length} beneath it", fix)
            self._server = await asyncio.start_unix_server(connected, self.address)
        except BaseException:
            self.remove_folder()
            raise

    def close(self) -> None:
        """Remove the socket's file; a connection stays."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.remove_folder()

    def remove_folder(self) -> None:
        """Remove the socket's file, also after the event loop."""
        shutil.rmtree(self._folder, ignore_errors=True)


class RankConnection:
    """A connection of rank 0, in the task that receives its messages."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._outgoing: asyncio.Queue[ToRank] = asyncio.Queue()
        self._task: asyncio.Task[Any] | None = asyncio.current_task()

    def send(self, message: ToRank) -> None:
        """Send a message after those before it."""
        self._outgoing.put_nowait(message)

    async def receive(self, handle: Callable[[ToFront], None]) -> None:
        """Call `handle` with each message until the connection ends, and write those that are sent."""
        writing = asyncio.create_task(self._write())
        try:
            while True:
                handle(await read_message(self._reader))
        except (EOFError, OSError):
            pass
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            self._writer.close()

    async def _write(self) -> None:
        """Write messages in parts, each when rank 0 has read most of those before."""
        while True:
            message = await self._outgoing.get()
            for part in message_parts(message):
                self._writer.write(part)
                await self._writer.drain()

    async def end(self) -> None:
        """Wait until what ranks sent before they ended was received.

        A process that a rank has forked may keep the connection open.
        """
        assert self._task is not None
        _, late = await asyncio.wait({self._task}, timeout=LAST_MESSAGES_SECONDS)
        if late:
            self._writer.transport.abort()
        await asyncio.wait({self._task})
