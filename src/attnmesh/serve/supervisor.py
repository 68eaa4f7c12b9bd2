"""The front: it keeps a world of ranks alive, and what each open request was sent, so that a new world can go on.

All methods run on the event loop of the front's process. Ranks run in processes of their own.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial as partial_of
from typing import Any, Protocol

from attnmesh.errors import ArgumentError
from attnmesh.serve.chat import EncodedPrompt
from attnmesh.serve.front_socket import RankConnection, RankListener
from attnmesh.serve.metrics import Metrics, ServerState
from attnmesh.serve.rank_messages import (
    AnswerBegun,
    AnswerEnded,
    CancelRequest,
    CloseEngine,
    EngineFigures,
    EngineReady,
    ForgetPrompt,
    NewPrompt,
    OfRequest,
    RequestAccepted,
    RequestRefused,
    SubmitRequest,
    ToFront,
    TokenDrawn,
    ToRank,
)
from attnmesh.serve.refused import Refused
from attnmesh.serve.text import SentToken

LOSS_WINDOW_SECONDS = 600.0
"""Seconds in which losses count together."""

MAX_REPLAYS = 2
"""Times that a request goes on in another world. A request that was in more lost worlds may be the cause, and ends."""

LONGEST_PAUSE_SECONDS = 30.0
"""Seconds before ranks are started again, at most. Each loss doubles them."""

PROOF_TOKENS = 3
"""Tokens in one world that clear a request of earlier losses. A loss may keep its last tokens from the front."""

MAX_BUSY_DEADLINES = 5
"""Deadlines that one step may take while ranks still send figures: a step with many images takes long."""

ENDING_SECONDS = 10.0
"""Seconds that ranks get to end by themselves."""

IMAGE_BYTES = 2 << 30
"""Bytes of the images of all open requests, which are kept to be sent to another world."""


class RankWorld(Protocol):
    """Ranks that can be started again."""

    def run(self, address: str) -> None:
        """Start ranks, of which rank 0 connects to the address; return when they are done, or raise when one fails."""

    def kill(self, *, will_restart: bool = False) -> None:
        """End the ranks at once. With `will_restart` others will be started."""


Event = RequestAccepted | SentToken | AnswerEnded | Refused
"""An event of a request. The last one is its end, or its refusal."""


@dataclass(eq=False)
class OpenRequest:
    """An open request: what ranks have to know, and the tokens that they have sent."""

    number: int
    prompt: EncodedPrompt
    options: dict[str, Any]
    put: Callable[[Event], None]
    prompt_number: int
    """Number of the prompt, which other choices have, too."""
    sent: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    accepted: bool = False
    replays: int = 0
    tokens_in_world: int | None = None
    """Tokens in this world; None before the request is sent there."""
    last_time: float = 0.0
    """The time of the latest token; before the first one, that of the request."""

    @property
    def is_proven(self) -> bool:
        """True if the request has got `PROOF_TOKENS` tokens in this world."""
        return self.tokens_in_world is not None and self.tokens_in_world >= PROOF_TOKENS

    @property
    def submit_order(self) -> int:
        """The place among requests for a world: the fewest losses first, but requests without a loss last."""
        return self.replays or MAX_REPLAYS + 1


class Supervisor:
    """Open requests, and the world that serves them.

    Ranks that end no step within the deadline are replaced, as lost ones are.
    """

    def __init__(
        self, world: RankWorld, *, max_requests: int, max_restarts: int, metrics: Metrics, deadline: float | None = None
    ) -> None:
        self.world = world
        self.max_requests = max_requests
        self.max_restarts = max_restarts
        self.metrics = metrics
        self.deadline = deadline
        self.state = ServerState.STARTING
        self.failure: BaseException | None = None
        self.engine_sizes: dict[str, Any] = {}
        self.open: dict[int, OpenRequest] = {}
        self.draining = False
        """True once no more requests are taken, while open ones may end."""
        self.encoding_count = 0
        """Requests whose prompts are being encoded."""
        self.on_failure: Callable[[], None] = lambda: None
        self.on_ready: Callable[[dict[str, Any]], None] = lambda _: None
        self.log: Callable[[str], None] = lambda _: None
        self._numbers = 0
        self._losses: list[float] = []
        """Times of the losses of the last `LOSS_WINDOW_SECONDS`."""
        self._last_message_at = 0.0
        self._last_step_at: float | None = None
        """The time when the last step ended; None without a world."""
        self._is_late = False
        """True if the end of the next step is overdue."""
        self._sent_prompts: set[int] = set()
        """Numbers of the prompts that this world has."""
        self._world_thread: threading.Thread | None = None
        self._listener: RankListener | None = None
        """Listens for rank 0 of the latest world, until it has connected."""
        self._connection: RankConnection | None = None
        """The connection of rank 0; None without a world."""
        self._worlds_task: asyncio.Task[None] | None = None
        self._watch_task: asyncio.Task[None] | None = None
        """Looks for steps that are overdue."""
        metrics.watch(lambda: self.status, lambda: len(self.open) + self.encoding_count)

    # --- requests ---

    def submit(
        self, prompt: EncodedPrompt, choices: list[dict[str, Any]], put: Callable[[int, Event], None]
    ) -> list[OpenRequest]:
        """Send a request to the ranks for each choice; `put` gets the events, each with its choice's index."""
        self._check_admission(len(choices))
        if prompt.nbytes > IMAGE_BYTES:
            raise Refused(413, f"images: expected at most {IMAGE_BYTES} bytes as the model reads them. Send fewer.")
        if (
            sum({request.prompt_number: request.prompt.nbytes for request in self.open.values()}.values())
            + prompt.nbytes
            > IMAGE_BYTES
        ):
            raise Refused(429, "The images of open requests take all of their memory. Ask again.")
        requests = []
        prompt_number = self._numbers
        now = asyncio.get_running_loop().time()
        for index, options in enumerate(choices):
            self._numbers += 1
            put_of_choice = partial_of(put, index)
            request = OpenRequest(self._numbers, prompt, options, put_of_choice, prompt_number, last_time=now)
            self.open[request.number] = request
            requests.append(request)
        self._submit_next()
        return requests

    @property
    def status(self) -> ServerState:
        """The state that clients see."""
        return ServerState.STOPPING if self.draining else self.state

    def check_ready(self) -> None:
        """Raise unless requests are served."""
        if self.status != ServerState.READY:
            raise Refused(503, f"The server is {self.status}. Ask again.")

    def _check_admission(self, choices: int) -> None:
        """Raise unless `choices` more requests can be taken."""
        self.check_ready()
        if choices > self.max_requests:
            raise Refused(400, f"n: expected at most {self.max_requests}, the requests that may run or wait", "n")
        if len(self.open) + self.encoding_count + choices > self.max_requests:
            given = len(self.open) + self.encoding_count
            raise Refused(429, f"{given} requests run or wait, of {self.max_requests}. Ask again.")

    @contextmanager
    def admit(self, choices: int) -> Iterator[None]:
        """Count requests as waiting while their prompt is encoded."""
        self._check_admission(choices)
        self.encoding_count += choices
        try:
            yield
        finally:
            self.encoding_count -= choices

    def cancel(self, request: OpenRequest) -> None:
        """End a request that nobody waits for any more."""
        if self.open.pop(request.number, None) is not None:
            self._send(CancelRequest(request.number))
            self._forget(request)
            self._submit_next()

    def _submit_next(self) -> None:
        """Send to this world the requests that it does not have.

        Once a request was in two lost worlds, requests are sent one at a time. Request A is sent; when A has got
        `PROOF_TOKENS` tokens, B is sent. If this world is lost before B has as many, B is the cause.
        """
        if self._last_step_at is None:
            return
        left = [request for request in self.open.values() if request.tokens_in_world is None]
        for request in sorted(left, key=lambda request: request.submit_order):
            unproven = [request for request in self.open.values() if not request.is_proven]
            careful = any(request.replays >= MAX_REPLAYS for request in unproven)
            if careful and any(request.tokens_in_world is not None for request in unproven):
                return
            request.tokens_in_world = 0
            may_be_accepted = request.accepted or request.replays  # a loss may hide the acceptance
            sent_before = request.sent if may_be_accepted else None
            if request.prompt_number not in self._sent_prompts:
                self._sent_prompts.add(request.prompt_number)
                self._send(NewPrompt(request.prompt_number, request.prompt.ids, request.prompt.images or {}))
            self._send(SubmitRequest(request.number, request.prompt_number, request.options, sent_before))

    def _forget(self, request: OpenRequest) -> None:
        """Let the ranks forget a prompt that no open request has."""
        if request.prompt_number in self._sent_prompts and all(
            other.prompt_number != request.prompt_number for other in self.open.values()
        ):
            self._sent_prompts.discard(request.prompt_number)
            self._send(ForgetPrompt(request.prompt_number))

    def _send(self, message: ToRank) -> None:
        if self._connection is not None:
            self._connection.send(message)

    # --- the world ---

    async def start(self) -> None:
        """Start the first world."""
        self._worlds_task = asyncio.create_task(self._live())
        if self.deadline is not None:
            self._watch_task = asyncio.create_task(self._watch(self.deadline))

    async def close(self) -> None:
        """End the ranks."""
        self.state = ServerState.STOPPING
        self._send(CloseEngine())
        assert self._worlds_task is not None
        if self._connection is not None:
            await asyncio.wait({self._worlds_task}, timeout=ENDING_SECONDS)
        while not self._worlds_task.done():
            self.world.kill()
            await asyncio.wait({self._worlds_task}, timeout=1)

    def abandon(self) -> None:
        """End the ranks after the event loop was cut short, as by a second interrupt."""
        end = time.monotonic() + ENDING_SECONDS
        while self._world_thread is not None and self._world_thread.is_alive() and time.monotonic() < end:
            self.world.kill()
            self._world_thread.join(1)
        if self._listener is not None:
            self._listener.remove_folder()

    async def _live(self) -> None:
        """Run one world after the other, until one ends as it should or too many were lost."""
        loop = asyncio.get_running_loop()
        while not self._is_stopping():
            error = await self._run_world()
            if self._is_stopping():
                return
            now = loop.time()
            self._losses = [*(loss for loss in self._losses if now - loss < LOSS_WINDOW_SECONDS), now]
            number = len(self._losses)
            if not self.engine_sizes or number > self.max_restarts:  # a world that never was ready will not be
                self._fail(error)
                return
            self.state = ServerState.RESTARTING
            self.log(f"{cause_of(error)}; restart {number} of {self.max_restarts}, open requests: {len(self.open)}")
            pause = now + min(LONGEST_PAUSE_SECONDS, 2**number - 2)
            while loop.time() < pause and not self._is_stopping():
                await asyncio.sleep(0.1)

    def _is_stopping(self) -> bool:
        return self.state == ServerState.STOPPING

    async def _watch(self, deadline: float) -> None:
        """Mark the server as not serving while a step is overdue, and end ranks that stay overdue."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(deadline, ENDING_SECONDS) / 10)
            if self._last_step_at is None or (late := loop.time() - self._last_step_at) < deadline:
                continue
            if self.state == ServerState.READY:
                self.state = ServerState.RESTARTING
                self._is_late = True
                self.log(f"the ranks ended no step within {deadline:g} s")
            if self._is_late and (
                loop.time() - self._last_message_at > deadline + ENDING_SECONDS or late > MAX_BUSY_DEADLINES * deadline
            ):
                self._is_late = False
                self.world.kill(will_restart=True)

    async def _run_world(self) -> BaseException:
        """Run a world in a thread and return the error that ended it."""
        loop = asyncio.get_running_loop()
        try:
            self._listener = RankListener()
            await self._listener.begin(self._connected)
        except (OSError, ArgumentError) as error:
            return error
        listener = self._listener
        ended: asyncio.Future[BaseException] = loop.create_future()

        def end(error: BaseException) -> None:
            if not ended.cancelled():  # as where the loop was cut short
                ended.set_result(error)

        def run() -> None:
            error: BaseException = RuntimeError("the ranks ended before the server did")
            try:
                self.world.run(listener.address)
            except BaseException as raised:
                error = raised
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(end, error)

        self._world_thread = threading.Thread(target=run, daemon=True)
        self._world_thread.start()
        try:
            cause = await ended
        finally:
            listener.close()
        if self._connection is not None:
            await self._connection.end()  # the last messages are taken before the next world begins
        return cause

    def _fail(self, error: BaseException) -> None:
        self.state = ServerState.FAILED
        self.failure = error
        self.cut_off("Ranks were lost, and the server ends.")
        self.on_failure()

    def cut_off(self, why: str) -> int:
        """End all open requests with an error, and return how many."""
        cut = [*self.open.values()]
        for request in cut:
            self._send(CancelRequest(request.number))
            self._drop(request, Refused(503, why))
        return len(cut)

    def _drop(self, request: OpenRequest, event: Event) -> None:
        self.open.pop(request.number, None)
        self._forget(request)
        request.put(event)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Receive the messages of one world."""
        connection = self._connection = RankConnection(reader, writer)
        if self._listener is not None:
            self._listener.close()  # a front that is killed leaves no file
        try:
            await connection.receive(self._receive)
        except asyncio.CancelledError:
            pass  # the event loop was cut short, and Python 3.11 prints a traceback for a connection that is cancelled
        finally:
            if self._connection is connection:
                self._lost()

    def _lost(self) -> None:
        """Count the loss for each request that may be its cause, and drop a request with too many losses."""
        self._connection = None
        self._last_step_at = None
        self._is_late = False
        self._sent_prompts.clear()
        if self.state == ServerState.READY:
            self.state = ServerState.RESTARTING
        there = [request for request in self.open.values() if request.tokens_in_world is not None]
        careful = any(request.replays >= MAX_REPLAYS for request in there)
        for request in [request for request in there if careful and not request.is_proven] or there:
            request.replays += 1
            if request.replays > MAX_REPLAYS:
                self._drop(request, Refused(500, f"Ranks were lost {request.replays} times during this request."))
        for request in self.open.values():
            request.tokens_in_world = None

    def _receive(self, message: ToFront) -> None:
        self._last_message_at = asyncio.get_running_loop().time()
        match message:
            case EngineReady(engine_sizes):
                self._begin(engine_sizes)
            case EngineFigures(figures):
                if figures["exchanges"] != self.metrics.engine.get("exchanges"):
                    self._last_step_at = self._last_message_at
                    if self._is_late:
                        self.state = ServerState.READY
                        self._is_late = False
                self.metrics.engine = figures
            case _ if message.number in self.open:
                self._advance(self.open[message.number], message)

    def _begin(self, engine_sizes: dict[str, Any]) -> None:
        """Serve in a world that is ready: open requests go on there."""
        now = self._last_step_at = asyncio.get_running_loop().time()
        if self.engine_sizes:
            self.metrics.restarts.inc()
            self.log(f"the ranks are back after {now - self._losses[-1]:.1f} s, requests that go on: {len(self.open)}")
        else:
            self.on_ready(engine_sizes)
        self.engine_sizes = engine_sizes
        self.state = ServerState.STOPPING if self._is_stopping() else ServerState.READY
        for request in [*self.open.values()]:
            if len(request.sent) >= request.options["max_new_tokens"]:
                # The ranks were lost between its last token and its end.
                self._drop(request, AnswerEnded(request.number, "length"))
        self._submit_next()

    def _advance(self, request: OpenRequest, message: OfRequest) -> None:
        """Take one message about an open request."""
        match message:
            case RequestAccepted():
                if not request.accepted:
                    request.put(message)
                request.accepted = True
            case AnswerBegun(_, cached):
                request.cached_tokens = max(request.cached_tokens, min(cached, len(request.prompt.ids)))
            case TokenDrawn(_, id, logprob, top):
                self._observe(request)
                request.sent.append(id)
                request.tokens_in_world = (request.tokens_in_world or 0) + 1
                request.put(SentToken(id, logprob, tuple((other, value) for other, value in top)))
            case AnswerEnded():
                self._drop(request, message)
            case RequestRefused(_, status, text, code):
                self._drop(request, Refused(status, text, None, code))
        if request.tokens_in_world == PROOF_TOKENS or request.number not in self.open:
            self._submit_next()

    def _observe(self, request: OpenRequest) -> None:
        """Count a token, and the time that it took."""
        now = asyncio.get_running_loop().time()
        (self.metrics.gap if request.sent else self.metrics.first_token).observe(now - request.last_time)
        self.metrics.tokens.inc()
        request.last_time = now


def cause_of(error: BaseException) -> str:
    """Return an error in one line: of a traceback, where it was and its last line.

    >>> cause_of(RuntimeError("on rank 1:\\nTraceback:\\n  line 5\\nMemoryError: 5 GB"))
    'on rank 1: MemoryError: 5 GB'
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"
