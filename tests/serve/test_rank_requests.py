"""Rank 0's side of the front: what takes long holds up no other message."""

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from attnmesh.serve.rank_messages import (
    CancelRequest,
    CloseEngine,
    NewPrompt,
    RequestAccepted,
    SubmitRequest,
    ToFront,
    ToRank,
)
from attnmesh.serve.rank_requests import MAX_GRAMMARS_AT_ONCE, RankRequests

pytestmark = pytest.mark.quick

SECONDS = 60
GRAMMAR = {"grammar": {"text": "slow", "thought_begin": [], "thought_end": []}}


class Link:
    """A socket whose messages the test writes and reads."""

    def __init__(self) -> None:
        self.coming = queue.Queue[ToRank]()
        self.sent = queue.Queue[ToFront]()

    def receive(self) -> ToRank:
        return self.coming.get(timeout=SECONDS)

    def send(self, message: ToFront) -> None:
        self.sent.put(message)


class Request:
    """A request that has no tokens, and ends once it is cancelled."""

    cached_tokens = 0
    finish_reason = "cancelled"

    def __init__(self) -> None:
        self.ended = threading.Event()

    def __iter__(self) -> Iterator[Any]:
        assert self.ended.wait(SECONDS)
        return iter(())

    def cancel(self) -> None:
        self.ended.set()


class SlowGrammars:
    """An engine that takes requests with a grammar only once it is `free` to."""

    error = None

    def __init__(self) -> None:
        self.free = threading.Event()
        self.began = threading.Semaphore(0)
        self.closed = threading.Event()
        self.requests: list[Request] = []

    def submit(self, ids: list[int], replay: Any, grammar: Any = None) -> Request:
        if grammar is not None:
            self.began.release()
            assert self.free.wait(SECONDS)
        self.requests.append(Request())
        return self.requests[-1]

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
def engine() -> SlowGrammars:
    return SlowGrammars()


@pytest.fixture
def link(engine: SlowGrammars) -> Iterator[Link]:
    made: Any = Link()
    thread = threading.Thread(target=RankRequests(engine, made).listen, daemon=True)  # type: ignore[arg-type]
    thread.start()
    made.coming.put(NewPrompt(1, [5, 6], {}))
    yield made
    engine.free.set()
    made.coming.put(CloseEngine())
    thread.join(SECONDS)
    assert engine.closed.is_set()


def test_requests_do_not_wait_for_the_grammars_of_others(engine: SlowGrammars, link: Link) -> None:
    for number in range(MAX_GRAMMARS_AT_ONCE):
        link.coming.put(SubmitRequest(number, 1, GRAMMAR, None))
        assert engine.began.acquire(timeout=SECONDS)
    link.coming.put(SubmitRequest(7, 1, {}, None))
    assert link.sent.get(timeout=SECONDS) == RequestAccepted(7)
    link.coming.put(CancelRequest(7))
    assert engine.requests[0].ended.wait(SECONDS)
    engine.free.set()
    accepted = [link.sent.get(timeout=SECONDS) for _ in range(MAX_GRAMMARS_AT_ONCE + 2)]
    assert {RequestAccepted(number) for number in range(MAX_GRAMMARS_AT_ONCE)} <= {*accepted}
    for number in range(MAX_GRAMMARS_AT_ONCE):
        link.coming.put(CancelRequest(number))


def test_a_request_that_is_cancelled_while_its_grammar_is_made_ends(engine: SlowGrammars, link: Link) -> None:
    for number in range(MAX_GRAMMARS_AT_ONCE + 1):  # the last one's is not begun
        link.coming.put(SubmitRequest(number, 1, GRAMMAR, None))
    for _ in range(MAX_GRAMMARS_AT_ONCE):
        assert engine.began.acquire(timeout=SECONDS)
    for number in range(MAX_GRAMMARS_AT_ONCE + 1):
        link.coming.put(CancelRequest(number))
    link.coming.put(SubmitRequest(7, 1, {}, None))
    assert link.sent.get(timeout=SECONDS) == RequestAccepted(7)  # so the cancels are read
    engine.free.set()
    accepted = {link.sent.get(timeout=SECONDS) for _ in range(3 * MAX_GRAMMARS_AT_ONCE)}
    assert {message.number for message in accepted} == {*range(MAX_GRAMMARS_AT_ONCE)}
    link.coming.put(CancelRequest(7))
    assert all(request.ended.wait(SECONDS) for request in engine.requests)
    assert len(engine.requests) == MAX_GRAMMARS_AT_ONCE + 1
