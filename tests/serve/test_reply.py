"""A server that ends, and streams in which nothing comes for long."""

import threading
from contextlib import closing
from typing import Any

import openai
import pytest

from attnmesh.serve import reply
from tests.support.serving.fake_engine import ThreadWorld
from tests.support.serving.served import chat, expected, posted, raw, served, talk, until


@pytest.mark.parametrize("drain", [5, float("inf")])
def test_a_server_that_ends_says_so_until_its_open_requests_have_ended(drain: float) -> None:
    free = threading.Event()
    slow = ThreadWorld(step=lambda going: free.wait(60) and going)
    with served(slow, drain=drain) as one:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(one.ask("/v1/chat/completions", chat(max_tokens=60))))
        thread.start()
        until(lambda: slow.engine.streams)
        one.front.on_failure()  # ends the server, as a signal does
        until(lambda: one.front.draining)
        assert one.ask("/health") == (503, {"status": "stopping"})
        code, said = one.ask("/v1/chat/completions", chat())
        assert (code, said["error"]["message"]) == (503, "The server is stopping. Ask again.")
        assert one.figure('attnmesh_state{state="stopping"}') == 1
        assert not found
        free.set()
        thread.join()
        assert found[0][0] == 200
        one.thread.join(30)
        with pytest.raises(ConnectionError):
            raw(one)


def test_an_answer_that_the_end_of_the_server_cuts_short_is_an_error() -> None:
    slow = ThreadWorld(pause=0.05)
    lines = []
    with served(slow, drain=0.1) as one:
        one.front.log = lines.append
        with closing(raw(one)) as client:
            client.sendall(posted(chat(max_tokens=300, stream=True)))
            got = b""
            while b"content" not in got:
                got += client.recv(1 << 16)
            one.front.on_failure()  # ends the server, as a signal does
            while more := client.recv(1 << 16):
                got += more
    last = got.split(b"data: ")[-1]
    assert b"The server ended before this answer did." in last
    assert lines == [
        "the server ends; open requests, which have 0.1 s to end: 1",
        "requests that the end of the server cut off: 1",
    ]


def test_an_answer_that_the_end_of_the_engine_cuts_short_is_an_error() -> None:
    slow = ThreadWorld(pause=0.05)
    with served(slow) as one:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(one.ask("/v1/chat/completions", chat(max_tokens=300))))
        thread.start()
        until(lambda: slow.engine.tokens > 2)
        for stream in slow.engine.streams:
            stream.cancel()
        thread.join()
        code, said = found[0]
        assert (code, said["error"]["message"]) == (503, "The server ends.")


def test_a_silent_stream_has_a_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply, "HEARTBEAT_SECONDS", 0.01)
    slow = ThreadWorld(pause=0.15)
    with served(slow) as one:
        with closing(raw(one)) as client:
            client.sendall(posted(chat(max_tokens=3, stream=True)))
            got = b""
            while b"[DONE]" not in got:
                got += client.recv(1 << 16)
        assert got.count(b": waiting\n\n") > 3
        with openai.OpenAI(base_url=one.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
            said = "".join(
                chunk.choices[0].delta.content or ""
                for chunk in talk(client, "Hi", max_tokens=3, temperature=0, stream=True)
            )
        assert said == expected("Hi", 3)
