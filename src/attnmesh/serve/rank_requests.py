"""Rank 0's side of the front: requests from the socket go to the engine, and tokens to the socket."""

import threading
from concurrent.futures import ThreadPoolExecutor
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
from attnmesh.serve.rank_messages import (
    AnswerBegun,
    AnswerEnded,
    CancelRequest,
    CloseEngine,
    EngineFigures,
    EngineReady,
    ForgetPrompt,
    NewPrompt,
    RequestAccepted,
    RequestRefused,
    SubmitRequest,
    ToFront,
    TokenDrawn,
)
from attnmesh.serve.rank_socket import RankSocket

OF_RANKS = (DeviceError, KernelError, MeshError, ModelError, UnforeseenError)
"""Errors that a client cannot avoid by another request. Their text is not sent."""

MAX_GRAMMARS_AT_ONCE = 2
"""Grammars that are made at the same time. Messages, and requests without a grammar, do not wait for them."""

FIGURES_SECONDS = 0.5
"""Seconds from one message of figures to the next."""

LOWEST_LOGPROB = -9999.0
"""Log-probability that stands for minus infinity, which JSON cannot spell."""


def serve_rank_0(engine: Engine, address: str, engine_sizes: dict[str, Any]) -> None:
    """Run the engine for the front at the address, until the front closes or ranks are lost."""
    worker = RankRequests(engine, RankSocket(address))
    worker.send(EngineReady(engine_sizes))
    for work in (worker.listen, worker.send_figures):
        threading.Thread(target=work, daemon=True).start()
    try:
        engine.run()
    finally:
        worker.done.set()
        worker.rank_socket.close()  # the front sees at once that ranks are lost


class RankRequests:
    """The requests that the front has sent."""

    def __init__(self, engine: Engine, rank_socket: RankSocket) -> None:
        self.engine = engine
        self.rank_socket = rank_socket
        self.requests: dict[int, EngineRequest] = {}
        self.prompts: dict[int, NewPrompt] = {}
        """Prompts by number, which several requests may have."""
        self.coming = set[int]()
        """Numbers of requests that are not submitted yet, and not cancelled."""
        self.grammar_threads = ThreadPoolExecutor(MAX_GRAMMARS_AT_ONCE, thread_name_prefix="submit")
        self.send_lock = threading.Lock()
        self.requests_lock = threading.Lock()
        self.done = threading.Event()

    def send(self, message: ToFront) -> None:
        """Send one message; the front may have gone."""
        with self.send_lock:
            try:
                self.rank_socket.send(message)
            except OSError:
                self.done.set()

    def listen(self) -> None:
        """Do what the front asks for. When the front closes its end, close the engine."""
        while (message := self.rank_socket.receive()) is not None:
            match message:
                case NewPrompt():
                    self.prompts[message.prompt_number] = message
                case ForgetPrompt(prompt_number):
                    self.prompts.pop(prompt_number, None)
                case SubmitRequest(number, prompt_number, options, sent):
                    _, ids, images = self.prompts[prompt_number]
                    self.coming.add(number)
                    asked = number, ids, options | ({"images": images} if images else {}), sent
                    if options.get("grammar") is None:
                        self.submit(*asked)
                    else:
                        self.grammar_threads.submit(self.submit, *asked)
                case CancelRequest(number):
                    self.cancel(number)
                case CloseEngine():
                    break
        self.grammar_threads.shutdown(wait=False, cancel_futures=True)
        self.engine.close()

    def submit(self, number: int, ids: list[int], options: dict[str, Any], sent: list[int] | None) -> None:
        """Queue a request. A request that another world had accepted goes on after the tokens `sent`."""
        if number not in self.coming:
            return
        try:
            if (grammar := options.get("grammar")) is not None:
                options = options | {"grammar": read_grammar(grammar)}
            request = self.engine.submit(ids, replay=sent, **options)
        except Exception as error:
            self.coming.discard(number)
            self.refuse(number, error)
            return
        with self.requests_lock:  # else a cancel between the two lines would find the request in neither
            self.requests[number] = request
            is_cancelled = number not in self.coming
            self.coming.discard(number)
        self.send(RequestAccepted(number))
        threading.Thread(target=self.forward, args=(number, request), daemon=True).start()
        if is_cancelled:
            self.cancel(number)

    def cancel(self, number: int) -> None:
        """End a request, or see that it ends once its grammar is made."""
        with self.requests_lock:
            self.coming.discard(number)
            request = self.requests.pop(number, None)
        if request is not None:
            request.cancel()

    def forward(self, number: int, request: EngineRequest) -> None:
        """Send the tokens of one request."""
        drawn = iter(request)
        first = None
        try:
            first = next(drawn, None)
            self.send(AnswerBegun(number, request.cached_tokens))  # an empty answer has used a prefix, too
            for token in chain((first,) if first is not None else (), drawn):
                top = [(id, finite(logprob)) for id, logprob in token.top]
                self.send(TokenDrawn(number, token.id, None if token.logprob is None else finite(token.logprob), top))
            if request.finish_reason in ("stop", "length"):
                self.send(AnswerEnded(number, request.finish_reason))
            else:  # cancelled, for a front that has gone on, or with the engine
                self.send(RequestRefused(number, 503, "The server ends."))
        except Exception as error:
            self.refuse(number, error, has_begun=first is not None)
        finally:
            self.requests.pop(number, None)

    def refuse(self, number: int, error: Exception, *, has_begun: bool = False) -> None:
        """Send the error of one request. An error of the whole engine is not sent: the front replays its requests.

        Once an answer has begun, only its length and its grammar can be the client's fault.
        """
        if error is self.engine.error:
            return
        match error:
            case Busy():
                self.send(RequestRefused(number, 429, str(error)))
            case TooLong():
                self.send(RequestRefused(number, 400, str(error), "context_length_exceeded"))
            case GrammarError():
                self.send(RequestRefused(number, 400, str(error)))
            case InputError() if not (has_begun or isinstance(error, OF_RANKS)):
                self.send(RequestRefused(number, 400, str(error)))
            case _:
                self.send(RequestRefused(number, 500, "The request failed on the ranks."))

    def send_figures(self) -> None:
        """Send the engine's figures from time to time."""
        while not self.done.wait(FIGURES_SECONDS):
            self.send(EngineFigures(self.engine.metrics()))


def read_grammar(fields: dict[str, Any]) -> Grammar:
    """Return a grammar that came as JSON."""
    marks = {name: tuple(fields[name]) for name in ("thought_begin", "thought_end")}
    return Grammar(**(fields | marks))


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can spell.

    >>> finite(float("nan")), finite(-0.5)
    (-9999.0, -0.5)
    """
    return max(LOWEST_LOGPROB, logprob)  # `max` returns its first argument beside a NaN
