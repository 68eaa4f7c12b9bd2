"""A server in a thread of the test's process, and what a raw client says to it."""

import json
import multiprocessing as mp
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import attnmesh.serve.server
from attnmesh.cli.launch import run_on_ranks
from attnmesh.serve.access import Limits
from attnmesh.serve.metrics import Metrics
from attnmesh.serve.routes import App
from attnmesh.serve.server import listen, run
from attnmesh.serve.supervisor import RankWorld, Supervisor
from tests.support.serving.fake_engine import answer, byte_tokenizer, serve_as_rank

NAME, OTHER_NAME = "fake", "org/fake"
PATIENCE = 300
"""Seconds that a client waits. A request of many beside it takes a minute on a busy machine."""

attnmesh.serve.server.gc = SimpleNamespace(collect=int, freeze=int, unfreeze=int)  # type: ignore[assignment]
"""A server would end what `gc_settings` has done for this process, and look through all of it for each test."""


class Children:
    """Processes that were started after this was made, and none of the test run's own."""

    def __init__(self) -> None:
        self.others = {*mp.active_children()}

    def alive(self) -> list[BaseProcess]:
        """Return them in the order of their start."""
        return sorted({*mp.active_children()} - self.others, key=lambda process: process.pid or 0)


class Served:
    """A running server."""

    def __init__(
        self,
        world: RankWorld,
        encoders: tuple[Any, Any],
        *,
        limits: Limits,
        defaults: Any,
        drain: float = 5,
        tool_format: str = "auto",
        **of_front: Any,
    ) -> None:
        self.drain = drain
        self.children = Children()
        listening = listen("127.0.0.1", 0)
        self.port = listening.getsockname()[1]
        self.front = Supervisor(world, **of_front, metrics=Metrics())
        tokenizer, processor = encoders
        self.app = App(
            self.front, tokenizer or byte_tokenizer(), (NAME, OTHER_NAME), limits, processor, defaults, tool_format
        )
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._serve, args=(listening,))
        self.thread.start()
        until(lambda: self.front.state in ("ready", "failed"))

    def _serve(self, listening: socket.socket) -> None:
        try:
            run(self.app, listening, self.drain)
        except BaseException as error:
            self.error = error

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Return status and JSON of a request."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        request = Request(self.url + path, data, {"content-type": "application/json", **names})
        try:
            with urlopen(request, timeout=PATIENCE) as response:
                status, text = response.status, response.read()
        except HTTPError as error:
            status, text = error.code, error.read()
            error.close()
        return status, json.loads(text) if text.startswith(b"{") else text.decode()

    def figure(self, name: str) -> float:
        """Return one figure of /metrics."""
        lines = self.ask("/metrics")[1].splitlines()
        return float(next(line.split()[-1] for line in lines if line.startswith(name + " ")))

    def kill(self, rank: int) -> None:
        """Kill a rank of the world."""
        self.children.alive()[rank].kill()

    def close(self) -> None:
        self.front.on_failure()  # ends the server, as a failure does
        self.thread.join(30)
        assert not self.thread.is_alive()


@contextmanager
def served(
    world: RankWorld,
    *,
    limits: Limits | None = None,
    tokenizer: Any = None,
    processor: Any = None,
    max_requests: int = 8,
    max_restarts: int = 3,
    deadline: float | None = None,
    defaults: Any = MappingProxyType({}),
    drain: float = 5,
    tool_format: str = "auto",
) -> Iterator[Served]:
    """Serve in a thread while the block runs."""
    given: dict[str, Any] = {"max_requests": max_requests, "max_restarts": max_restarts, "deadline": deadline}
    given |= {"defaults": defaults, "drain": drain, "tool_format": tool_format}
    server = Served(world, (tokenizer, processor), limits=limits or Limits(), **given)
    try:
        yield server
    finally:
        server.close()


def until(fits: Callable[[], Any], seconds: float = 200) -> None:
    """Wait until a condition holds, and look ever less often: each look may be a request to a busy server."""
    start = time.monotonic()
    while not fits():
        waited = time.monotonic() - start
        assert waited < seconds, "it did not come to hold"
        time.sleep(min(0.1, max(0.01, waited / 10)))


def chat(content: Any = "Hi", **fields: Any) -> dict[str, Any]:
    """Return the body of a chat."""
    return {"model": NAME, "messages": [{"role": "user", "content": content}], "max_tokens": 20, **fields}


def talk(client: Any, content: str, **fields: Any) -> Any:
    """Return the answer to a chat of OpenAI's client."""
    return client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": content}], **fields)


def expected(content: str, count: int, **options: Any) -> str:
    """Return the text of an answer of `count` tokens to a chat."""
    ids = byte_tokenizer()(f"<user>{content}<assistant>")["input_ids"]
    return answer(ids, {"temperature": 0, **options}, count)


def raw(running: Served) -> socket.socket:
    """Return a connection to the server."""
    return socket.create_connection(("127.0.0.1", running.port), timeout=30)


def posted(body: dict[str, Any], path: str = "chat/completions") -> bytes:
    """Return the bytes of a request."""
    data = json.dumps(body).encode()
    head = f"POST /v1/{path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


class FakeRanks:
    """A world of real ranks with a fake engine."""

    def __init__(self, count: int = 2, rest: float = 0) -> None:
        self.count, self.rest, self.started = count, rest, 0
        self.children = Children()
        self.modes: list[int] = []

    def run(self, address: str) -> None:
        time.sleep(self.rest if self.started else 0)
        self.started += 1
        self.modes.append(Path(address).parent.stat().st_mode)
        run_on_ranks(self.count, serve_as_rank, address, 0.01, seconds=None)

    def kill(self, *, again: bool = False) -> None:
        for process in self.children.alive():
            process.kill()
