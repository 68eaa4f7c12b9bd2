"""Prompts that take long to encode, or are too long to be: short ones wait for none of them."""

import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from attnmesh.serve import routes
from attnmesh.serve.chat import encode_text
from tests.support.serving.fake_engine import LONGEST, ThreadWorld
from tests.support.serving.served import NAME, Served, chat, posted, raw, served, until


@pytest.fixture(scope="module")
def running() -> Iterator[Served]:
    with served(ThreadWorld()) as one:
        yield one


class Gate:
    """Holds prompts of many characters back where they are encoded."""

    def __init__(self) -> None:
        self.begun, self.open = threading.Semaphore(0), threading.Event()
        self.prompts: list[str] = []

    def encode(self, encoder: Any, fields: dict[str, Any], check: Any) -> Any:
        self.prompts.append(fields["prompt"][:1])
        if len(fields["prompt"]) > 1000:
            self.begun.release()
            assert self.open.wait(100)
        return encode_text(encoder, fields, lambda text: None)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate()
    monkeypatch.setattr(routes, "encode_text", made.encode)
    yield made
    made.open.set()


def ask_long(running: Served, sign: str, into: list[int]) -> threading.Thread:
    body = {"model": NAME, "prompt": sign * (1 << 17)}
    thread = threading.Thread(target=lambda: into.append(running.ask("/v1/completions", body)[0]))
    thread.start()
    return thread


def test_a_short_prompt_waits_for_no_long_one(gate: Gate) -> None:
    codes: list[int] = []
    with served(ThreadWorld(), max_requests=3) as one:
        threads = [ask_long(one, sign, codes) for sign in "ab"]
        assert gate.begun.acquire(timeout=100)
        until(lambda: one.front.encoding_count == 2)
        assert one.ask("/v1/completions", {"model": NAME, "prompt": "Go on"})[0] == 200
        assert one.app._bodies.held_bytes > 2 << 17
        code, said = one.ask("/v1/completions", {"model": NAME, "prompt": "Go on", "n": 2})
        assert (code, said["error"]["message"]) == (429, "2 requests run or wait, of 3. Ask again.")
        gate.open.set()
        for thread in threads:
            thread.join()
        assert codes == [400, 400]
        assert one.app._bodies.held_bytes == one.front.encoding_count == 0


def test_a_prompt_is_not_encoded_for_a_client_that_has_gone(gate: Gate) -> None:
    codes: list[int] = []
    with served(ThreadWorld()) as one:
        thread = ask_long(one, "a", codes)
        assert gate.begun.acquire(timeout=100)
        with closing(raw(one)) as gone:
            gone.sendall(posted({"model": NAME, "prompt": "b" * (1 << 17)}, "completions"))
            until(lambda: one.front.encoding_count == 2)
        until(lambda: one.front.encoding_count == 1)
        gate.open.set()
        thread.join()
        assert one.ask("/v1/completions", {"model": NAME, "prompt": "c"})[0] == 200
        assert gate.prompts == ["a", "c"]


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(
    running: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnmesh.serve.chat._token_ids", None)
    longest = 5 * (LONGEST - 1)  # the longest token, "<end>", has five characters
    for path, sent in (("chat/completions", chat("x" * longest)), ("completions", {"prompt": "x" * (longest + 1)})):
        code, said = running.ask(f"/v1/{path}", {"model": NAME, **sent})
        assert (code, said["error"]["code"]) == (400, "context_length_exceeded")
        assert "characters, of which a token has at most 5, and" in said["error"]["message"]
    assert running.ask("/v1/completions", {"model": NAME, "prompt": "x" * longest})[0] == 500  # it went on
