"""Rank 0's side of the front: requests from the socket go to the engine, and tokens to the socket."""

import threading
from itertools import chain
from typing import Any

from attnmesh.errors import (
    Busy,
    DeviceError,
    GrammarError,
    InputError,
    KernelError,
    MeshError,
    ModelError,
    TooLong,
    UnforeseenError,
)
from attnmesh.hf.serving.engine import Engine
from attnmesh.hf.serving.engine_request import EngineRequest
from attnmesh.hf.serving.grammar_masks import Grammar
from attnmesh.serve.rank_socket import RankSocket, packed

OF_RANKS = (DeviceError, KernelError, MeshError, ModelError, UnforeseenError)
"""Errors that no other request avoids, whose text is not for clients."""

FIGURES_SECONDS = 0.5
"""Seconds from one message of figures to the next."""

LOWEST_LOGPROB = -9999.0
"""Log-probability that stands for minus infinity, which JSON cannot spell."""


def serve_rank_0(engine: Engine, address: str, facts: dict[str, Any]) -> None:
    """Run the engine for the front at the address, until the front closes or ranks are lost."""
    worker = RankRequests(engine, RankSocket(address))
    worker.send("ready", facts)
    for work in (worker.listen, worker.send_figures):
        threading.Thread(target=work, daemon=True).start()
    try:
        engine.run()
    finally:
        worker.done.set()
        worker.rank_socket.close()  # the front sees at once that ranks are lost


class RankRequests:
    """The requests that the front has sent."""

    def __init__(self, engine: Engine, link: RankSocket) -> None:
        self.engine, self.rank_socket = engine, link
        self.streams: dict[int, EngineRequest] = {}
        self.prompts: dict[int, tuple[list[int], dict[str, Any]]] = {}
        """Tokens and images of prompts, which several requests may have."""
        self.lock = threading.Lock()
        self.done = threading.Event()

    def send(self, *message: Any) -> None:
        """Send one message; the front may have gone."""
        data = packed([*message])
        with self.lock:
            try:
                self.rank_socket.send(data)
            except OSError:
                self.done.set()

    def listen(self) -> None:
        """Do what the front asks for, and end the engine with it."""
        while (message := self.rank_socket.receive()) is not None:
            match message:
                case ["prompt", prompt_number, ids, images]:
                    self.prompts[prompt_number] = ids, images
                case ["forget", prompt_number]:
                    self.prompts.pop(prompt_number, None)
                case ["submit", number, prompt_number, options, sent]:
                    ids, images = self.prompts[prompt_number]
                    self.submit(number, ids, options | ({"images": images} if images else {}), sent)
                case ["cancel", number]:
                    if (stream := self.streams.pop(number, None)) is not None:
                        stream.cancel()
                case ["close"]:
                    break
        self.engine.close()

    def submit(self, number: int, ids: list[int], options: dict[str, Any], sent: list[int] | None) -> None:
        """Queue a request; one that another world had accepted goes on after the tokens sent."""
        try:
            if (grammar := options.get("grammar")) is not None:
                options = options | {"grammar": read_grammar(grammar)}
            stream = self.engine.submit(ids, replay=sent, **options)
        except Exception as error:
            self.refuse(number, error)
            return
        self.streams[number] = stream
        self.send("accepted", number)
        threading.Thread(target=self.forward, args=(number, stream), daemon=True).start()

    def forward(self, number: int, stream: EngineRequest) -> None:
        """Send the tokens of one request."""
        tokens = iter(stream)
        first = None
        try:
            first = next(tokens, None)
            self.send("begin", number, stream.cached_tokens)  # an empty answer has used a prefix, too
            for token in chain((first,) if first is not None else (), tokens):
                self.send("token", number, token.id, finite(token.logprob), [(i, finite(p)) for i, p in token.top])
            if stream.finish_reason in ("stop", "length"):
                self.send("end", number, stream.finish_reason)
            else:  # cancelled, for a front that has gone on, or with the engine
                self.send("refused", number, 503, "The server ends.", None)
        except Exception as error:
            self.refuse(number, error, has_begun=first is not None)
        finally:
            self.streams.pop(number, None)

    def refuse(self, number: int, error: Exception, *, has_begun: bool = False) -> None:
        """Send the error of one request, which ends it alone. At one that ends the engine the front replays.

        Once an answer has begun, only its length and its grammar can be the client's fault.
        """
        if error is self.engine.error:
            return
        match error:
            case Busy():
                self.send("refused", number, 429, str(error), None)
            case TooLong():
                self.send("refused", number, 400, str(error), "context_length_exceeded")
            case GrammarError():
                self.send("refused", number, 400, str(error), None)
            case InputError() if not (has_begun or isinstance(error, OF_RANKS)):
                self.send("refused", number, 400, str(error), None)
            case _:
                self.send("refused", number, 500, "The request failed on the ranks.", None)

    def send_figures(self) -> None:
        """Send the engine's figures from time to time."""
        while not self.done.wait(FIGURES_SECONDS):
            self.send("metrics", self.engine.metrics())


def read_grammar(fields: dict[str, Any]) -> Grammar:
    """Return a grammar that came as JSON."""
    marks = {name: tuple(fields[name]) for name in ("thought_begin", "thought_end")}
    return Grammar(**(fields | marks))


def finite(logprob: float | None) -> float | None:
    """Return a log-probability that JSON can spell.

    >>> finite(float("nan")), finite(-0.5)
    (-9999.0, -0.5)
    """
    return None if logprob is None else max(LOWEST_LOGPROB, logprob)  # of a NaN the first
