"""Clients that go, stall, or send nonsense, one or many at a time: they are cut off, and harm nobody."""

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from attnmesh.serve import body, server
from attnmesh.serve.access import Limits
from attnmesh.serve.request_fields import CHAT
from tests.support.serving.fake_engine import ThreadWorld
from tests.support.serving.served import Served, chat, expected, posted, raw, served, until


@pytest.fixture(scope="module")
def world() -> ThreadWorld:
    return ThreadWorld()


@pytest.fixture(scope="module")
def running(world: ThreadWorld) -> Iterator[Served]:
    with served(world, limits=Limits(max_body=1 << 20)) as one:
        yield one


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("half", [True, False])
def test_a_client_that_goes_cancels_its_request(stream: bool, half: bool, world: ThreadWorld, running: Served) -> None:
    with closing(raw(running)) as one:
        one.sendall(posted(chat(max_tokens=350, stream=stream)))
        until(lambda: world.engine.streams)
        if half:
            one.shutdown(socket.SHUT_WR)
            until(lambda: not world.engine.streams)
    until(lambda: not world.engine.streams)
    until(lambda: not running.front.open)


def test_slow_clients_are_cut_off(running: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEADER_SECONDS", 0.3)
    monkeypatch.setattr(body, "BODY_TIMEOUT", 0.3)
    for sent in (b"", b"POST /v1", b"GET / HTTP/1.1\r\nhost: loc"):
        with closing(raw(running)) as one:
            one.sendall(sent)
            assert one.recv(1) == b""
    with closing(raw(running)) as one:
        one.sendall(posted(chat())[:-5])
        assert one.recv(100).startswith(b"HTTP/1.1 408")


def test_a_client_that_does_not_read_is_cut_off(running: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STALL_SECONDS", 0.3)
    monkeypatch.setattr(running.app, "_page", "x" * (64 << 20))
    stalled, abort = threading.Event(), server.LimitedProtocol._abort

    def cut_off(connection: server.LimitedProtocol) -> None:
        abort(connection)
        stalled.set()

    monkeypatch.setattr(server.LimitedProtocol, "_abort", cut_off)
    with closing(raw(running)) as one:
        one.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert stalled.wait(60)
        got = 0
        with suppress(ConnectionError):
            while part := one.recv(1 << 20):
                got += len(part)
    assert got < 64 << 20


def test_connections_beyond_the_limit_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "CONNECTIONS", 3)
    with served(ThreadWorld()) as one, ExitStack() as stack:
        many = [stack.enter_context(closing(raw(one))) for _ in range(8)]
        ended = []
        for client in many:
            with suppress(ConnectionError):
                client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            try:
                ended.append(not client.recv(100))
            except ConnectionError:
                ended.append(True)
        assert ended == [False] * 3 + [True] * 5


NONSENSE = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"x: " + b"y" * 100_000 + b"\r\n\r\n",
    b"GET /../../etc/passwd HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"GET /v1/models/..%2f..%2fetc%2fpasswd HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n"
    b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    b"GET / HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
]


@pytest.mark.parametrize("sent", NONSENSE, ids=range(len(NONSENSE)))
def test_nonsense_is_refused_and_harms_nobody(sent: bytes, running: Served) -> None:
    with closing(raw(running)) as one:
        one.sendall(sent)
        one.shutdown(socket.SHUT_WR)
        got = one.recv(200)
    assert not got or got.startswith((b"HTTP/1.1 4", b"HTTP/1.1 200")), got
    assert b"root:" not in got
    assert running.ask("/health")[0] == 200


def test_requests_at_a_time_do_not_mix(running: Served) -> None:
    found: dict[int, list[str]] = {}

    def ask(number: int) -> None:
        said = [running.ask("/v1/chat/completions", chat(f"I am {number}", temperature=0)) for _ in range(5)]
        found[number] = [one["choices"][0]["message"]["content"] for code, one in said if code == 200]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [expected(f"I am {number}", 20)] * 5 for number in range(8)}


def hostile(random: Random) -> bytes:
    """Return a request that is wrong somewhere, or cut short, or merely strange."""
    values: list[Any] = [
        None,
        True,
        -1,
        0,
        1e300,
        10**30,
        "",
        "x" * 999,
        "\ud800",
        [],
        {},
        [[]],
        {"a": {}},
        "\x00",
        "é😀",
    ]
    fields = chat("x" * random.choice([0, 1, 300, 900]), max_tokens=random.choice([1, 5]), stream=random.random() < 0.5)
    for _ in range(random.choice([0, 0, 1, 3])):
        fields[random.choice([*CHAT, "extra"])] = random.choice(values)
    sent = json.dumps(fields).encode(random.choice(["utf-8", "utf-8", "utf-16"]))
    if random.random() < 0.3:
        at = random.randrange(len(sent))
        sent = sent[:at] + random.randbytes(random.choice([0, 1, 50])) + sent[at + random.choice([0, 1, 20]) :]
    length = len(sent) + random.choice([0, 0, 0, 0, 1, -1, 10**7, -(10**7)])
    path = random.choice(["/v1/chat/completions"] * 4 + ["/v1/completions", "/", "/v1/%00", "/metrics?x=1"])
    head = f"{random.choice(['POST'] * 5 + ['GET', 'DELETE', 'X' * 50])} {path} HTTP/1.1\r\nhost: localhost\r\n"
    whole = f"{head}content-type: application/json\r\ncontent-length: {length}\r\n\r\n".encode() + sent
    return whole[: random.randrange(len(whole))] if random.random() < 0.2 else whole


@pytest.mark.parametrize("count", [80, pytest.param(1000, marks=pytest.mark.long)])
def test_hostile_requests_crash_nothing_and_leak_nothing(count: int, world: ThreadWorld, running: Served) -> None:
    random = Random(7)
    files = len([*Path("/proc/self/fd").iterdir()]) if Path("/proc/self/fd").exists() else 0
    for _ in range(count):
        with closing(raw(running)) as one, suppress(ConnectionError, TimeoutError):
            one.settimeout(random.choice([0.02, 0.5]))
            one.sendall(hostile(random))
            if random.random() < 0.3:
                one.shutdown(socket.SHUT_WR)
            got = one.recv(1 << 16)
            assert not got or re.match(rb"HTTP/1.1 [245]\d\d ", got), got
            assert not got.startswith(b"HTTP/1.1 500"), got
    until(lambda: not running.front.open and not world.engine.streams)
    until(lambda: running.app._bodies.held_bytes == 0)  # the last clients may have only just gone
    if files:
        until(lambda: len([*Path("/proc/self/fd").iterdir()]) <= files + 2)
    said = running.ask("/v1/chat/completions", chat("Hi", temperature=0))[1]
    assert said["choices"][0]["message"]["content"] == expected("Hi", 20)
