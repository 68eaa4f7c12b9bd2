"""The front: it keeps a world of ranks alive, and what each open request was sent, so that a new world can go on.

All methods run on the event loop of the front's process. Ranks run in processes of their own.
"""

import asyncio
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from attnmesh.serve.chat import Encoded
from attnmesh.serve.link import packed, read_message
from attnmesh.serve.metrics import Metrics
from attnmesh.serve.refused import Refused
from attnmesh.serve.text import Token

STEADY = 600.0
"""Seconds that a world has to be ready for its losses to be forgotten."""

REPLAYS = 2
"""Times that a request goes on in another world; one that is there at more losses may be their cause."""

PATIENCE = 10.0
"""Seconds that ranks get to end by themselves."""


IMAGE_BYTES = 2 << 30
"""Bytes of the images of all open requests, which are kept to be sent to another world."""


class World(Protocol):
    """Ranks that can be started again."""

    def run(self, address: str) -> None:
        """Start ranks, of which rank 0 connects to the address; return when they are done, or raise when one fails."""

    def kill(self) -> None:
        """End the ranks at once."""


class Accepted(NamedTuple):
    """The engine has queued a request."""


class End(NamedTuple):
    """The last event of a request: "stop" or "length"."""

    reason: str


Event = Accepted | Token | End | Refused


@dataclass(eq=False)
class Request:
    """An open request: what ranks have to know, and the tokens that they have sent."""

    number: int
    prompt: Encoded
    options: dict[str, Any]
    put: Callable[[Event], None]
    sent: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    accepted: bool = False
    replays: int = 0
    last: float = 0.0
    """The time of the latest token, and of the request before the first."""


class Front:
    """Open requests, and the world that serves them. `state` is starting, ready, restarting, stopping or failed."""

    def __init__(self, world: World, *, max_requests: int, max_restarts: int, metrics: Metrics) -> None:
        self.world, self.max_requests, self.max_restarts, self.metrics = world, max_requests, max_restarts, metrics
        self.state = "starting"
        self.failure: BaseException | None = None
        self.facts: dict[str, Any] = {}
        self.open: dict[int, Request] = {}
        self.coming = 0
        """Requests whose prompts are being encoded."""
        self.on_failure: Callable[[], None] = lambda: None
        self.on_ready: Callable[[dict[str, Any]], None] = lambda _: None
        self._numbers, self._losses, self._ready_at = 0, 0, 0.0
        self._writer: asyncio.StreamWriter | None = None
        self._running: threading.Thread | None = None
        self._folder = ""
        self._server: asyncio.Server | None = None
        """Both until rank 0 has connected."""
        metrics.watch(lambda: self.state, lambda: len(self.open) + self.coming)

    # --- requests ---

    def submit(
        self, prompt: Encoded, choices: list[dict[str, Any]], put: Callable[[int, Event], None]
    ) -> list[Request]:
        """Send a request to the ranks for each choice; `put` gets the events, each with its choice's index."""
        self._check_room(len(choices))
        if sum(one.prompt.nbytes for one in self.open.values()) + prompt.nbytes > IMAGE_BYTES:
            raise Refused(429, "The images of open requests take all of their memory. Ask again.")
        requests = []
        for index, options in enumerate(choices):
            self._numbers += 1
            request = Request(self._numbers, prompt, options, lambda event, index=index: put(index, event))  # type: ignore[misc]
            request.last = asyncio.get_running_loop().time()
            self.open[request.number] = request
            self._submit(request)
            requests.append(request)
        return requests

    def check_ready(self) -> None:
        """Raise unless requests are served."""
        if self.state != "ready":
            raise Refused(503, f"The server is {self.state}. Ask again.")

    def _check_room(self, choices: int) -> None:
        """Raise unless so many more requests can be taken."""
        self.check_ready()
        if len(self.open) + self.coming + choices > self.max_requests:
            given = len(self.open) + self.coming
            raise Refused(429, f"{given} requests run or wait, of {self.max_requests}. Ask again.")

    @contextmanager
    def room(self, choices: int) -> Iterator[None]:
        """Count requests as waiting while their prompt is encoded."""
        self._check_room(choices)
        self.coming += choices
        try:
            yield
        finally:
            self.coming -= choices

    def cancel(self, request: Request) -> None:
        """End a request that nobody waits for any more."""
        if self.open.pop(request.number, None) is not None:
            self._send(["cancel", request.number])

    def _submit(self, request: Request) -> None:
        self._send(["submit", request.number, *request.prompt, request.options, request.sent])

    def _send(self, message: list[Any]) -> None:
        if self._writer is not None:
            self._writer.write(packed(message))

    # --- the world ---

    async def start(self) -> None:
        """Start the first world."""
        self._living = asyncio.create_task(self._live())

    async def close(self) -> None:
        """End the ranks."""
        self.state = "stopping"
        self._send(["close"])
        if self._writer is not None:
            await asyncio.wait({self._living}, timeout=PATIENCE)
        while not self._living.done():
            self.world.kill()
            await asyncio.wait({self._living}, timeout=1)

    def abandon(self) -> None:
        """End the ranks after the event loop was cut short, as by a second interrupt."""
        end = time.monotonic() + PATIENCE
        while self._running is not None and self._running.is_alive() and time.monotonic() < end:
            self.world.kill()
            self._running.join(1)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _live(self) -> None:
        """Run one world after the other, until one ends as it should or too many were lost."""
        loop = asyncio.get_running_loop()
        while not self._is_stopping():
            error = await self._run_world()
            if self._is_stopping():
                return
            ready, self._ready_at = self._ready_at, 0.0
            self._losses = 1 if ready and loop.time() - ready > STEADY else self._losses + 1
            if not self.facts or self._losses > self.max_restarts:  # a world that never was ready will not be
                self._fail(error)
                return
            self.state = "restarting"
            pause = loop.time() + min(30, 2**self._losses - 2)
            while loop.time() < pause and not self._is_stopping():
                await asyncio.sleep(0.1)

    def _is_stopping(self) -> bool:
        return self.state == "stopping"

    async def _run_world(self) -> BaseException:
        """Run a world in a thread and return the error that ended it."""
        loop = asyncio.get_running_loop()
        try:
            address = await self._listen()
        except OSError as error:
            return error
        ended: asyncio.Future[BaseException] = loop.create_future()

        def run() -> None:
            error: BaseException = RuntimeError("the ranks ended before the server did")
            try:
                self.world.run(address)
            except BaseException as raised:
                error = raised
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(ended.set_result, error)

        self._running = threading.Thread(target=run, daemon=True)
        self._running.start()
        try:
            return await ended
        finally:
            self._stop_listening()

    async def _listen(self) -> str:
        """Listen for rank 0 in a folder that other users cannot enter, and return the address."""
        self._folder = tempfile.mkdtemp(prefix="attnmesh-serve-")
        address = str(Path(self._folder) / "front")
        self._server = await asyncio.start_unix_server(self._connected, address)
        return address

    def _stop_listening(self) -> None:
        """Remove the socket's file; a connection stays."""
        if self._server is not None:
            self._server.close()
            self._server = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _fail(self, error: BaseException) -> None:
        self.state, self.failure = "failed", error
        for request in [*self.open.values()]:
            self._drop(request, Refused(503, "Ranks were lost, and the server ends."))
        self.on_failure()

    def _drop(self, request: Request, event: Event) -> None:
        self.open.pop(request.number, None)
        request.put(event)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Receive the messages of one world."""
        self._writer = writer
        self._stop_listening()  # a front that is killed leaves no file
        try:
            while True:
                self._receive(await read_message(reader))
        except (EOFError, OSError):
            pass
        finally:
            writer.close()
            if self._writer is writer:
                self._lost()

    def _lost(self) -> None:
        self._writer = None
        if self.state == "ready":
            self.state = "restarting"
        for request in [*self.open.values()]:
            request.replays += 1
            if request.replays > REPLAYS:
                self._drop(request, Refused(500, f"Ranks were lost {request.replays} times during this request."))

    def _receive(self, message: list[Any]) -> None:
        match message:
            case ["ready", facts]:
                self.metrics.restarts.inc(bool(self.facts))
                self.facts = facts
                self.on_ready(facts)
                self._ready_at = asyncio.get_running_loop().time()
                self.state = "stopping" if self._is_stopping() else "ready"
                for request in [*self.open.values()]:
                    if len(request.sent) < request.options["max_new_tokens"]:
                        self._submit(request)
                    else:  # the ranks were lost between its last token and its end
                        self._drop(request, End("length"))
            case ["metrics", figures]:
                self.metrics.engine = figures
            case [kind, number, *values] if number in self.open:
                self._advance(self.open[number], kind, values)

    def _advance(self, request: Request, kind: str, values: list[Any]) -> None:
        """Take one message about an open request."""
        match kind, values:
            case "accepted", []:
                if not request.accepted:
                    request.put(Accepted())
                request.accepted = True
            case "begin", [cached]:
                request.cached_tokens = max(request.cached_tokens, min(cached, len(request.prompt.ids)))
            case "token", [id, logprob, top]:
                self._observe(request)
                request.sent.append(id)
                request.put(Token(id, logprob, tuple((other, value) for other, value in top)))
            case "end", [reason]:
                self._drop(request, End(reason))
            case "refused", [status, text, code]:
                self._drop(request, Refused(status, text, None, code))

    def _observe(self, request: Request) -> None:
        """Count a token, and the time that it took."""
        now = asyncio.get_running_loop().time()
        (self.metrics.gap if request.sent else self.metrics.first_token).observe(now - request.last)
        self.metrics.tokens.inc()
        request.last = now
