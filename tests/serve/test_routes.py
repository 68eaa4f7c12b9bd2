import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from random import Random
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from attnmesh.hf.serving.engine import Engine
from attnmesh.hf.serving.prefix_store import PrefixStore
from attnmesh.serve import body, reply, routes, server
from attnmesh.serve.access import Limits
from attnmesh.serve.chat import encode_text
from attnmesh.serve.metrics import ENGINE
from attnmesh.serve.schema import CHAT
from tests.support import families
from tests.support.fake_engine import LONGEST, POISON, ThreadWorld, answer, byte_tokenizer
from tests.support.served import NAME, OTHER_NAME, Served, chat, served, until

GREEDY = {"temperature": 0}
TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def world() -> ThreadWorld:
    return ThreadWorld()


@pytest.fixture(scope="module")
def running(world: ThreadWorld) -> Iterator[Served]:
    with served(world, limits=Limits(max_body=1 << 20)) as one:
        yield one


@pytest.fixture(scope="module")
def client(running: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0, timeout=60) as one:
        yield one


def expected(content: str, count: int, **options: Any) -> str:
    return answer(TOKENIZER(f"<user>{content}<assistant>")["input_ids"], {"temperature": 0, **options}, count)


def talk(client: openai.OpenAI, content: str, **fields: Any) -> Any:
    return client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": content}], **fields)


# --- answers ---


def test_a_chat_is_answered_whole_and_in_a_stream(client: openai.OpenAI) -> None:
    whole = talk(client, "Hi", max_tokens=60, temperature=0)
    chunks = [*talk(client, "Hi", max_tokens=60, temperature=0, stream=True, stream_options={"include_usage": True})]
    assert whole.choices[0].message.content == expected("Hi", 60)
    assert whole.choices[0].finish_reason == "length"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == expected("Hi", 60)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage == whole.usage
    prompt = len("<user>Hi<assistant>")
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (prompt, 60)
    assert whole.usage.prompt_tokens_details.cached_tokens == prompt // 2
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_completion_takes_text_and_tokens(client: openai.OpenAI) -> None:
    ids = TOKENIZER("Go on")["input_ids"]
    for prompt in ("Go on", ids, ["Go on"], [ids]):
        given: Any = prompt
        whole = client.completions.create(model=NAME, prompt=given, max_tokens=9, temperature=0)
        assert whole.choices[0].text == answer(ids, GREEDY, 9)
    stream = client.completions.create(model=NAME, prompt="Go on", temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == answer(ids, GREEDY, 16)


def test_a_stop_string_ends_a_choice_and_its_request(client: openai.OpenAI, world: ThreadWorld) -> None:
    text = expected("Hi", 200)
    stop = text[30:33]
    for stream in (False, True):
        found = talk(client, "Hi", max_tokens=200, temperature=0, stop=[stop, "never"], stream=stream)
        chunks = [*found] if stream else []
        said = "".join(c.choices[0].delta.content or "" for c in chunks) if stream else found.choices[0].message.content
        reason = chunks[-1].choices[0].finish_reason if stream else found.choices[0].finish_reason
        assert said == text[: text.index(stop)]
        assert reason == "stop"
    until(lambda: not world.engine.streams)


def test_choices_have_seeds_of_their_own(client: openai.OpenAI) -> None:
    both = talk(client, "Hi", max_tokens=20, seed=5, n=3)
    assert [one.message.content for one in both.choices] == [
        expected("Hi", 20, temperature=1, seed=seed) for seed in (5, 6, 7)
    ]
    texts = ["", "", ""]
    for chunk in talk(client, "Hi", max_tokens=20, seed=5, n=3, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [one.message.content for one in both.choices]


def test_log_probabilities_are_those_of_the_text(client: openai.OpenAI) -> None:
    whole = talk(client, "Hi", max_tokens=12, temperature=0, logprobs=True, top_logprobs=2, stop=expected("Hi", 12)[-3])
    choice = whole.choices[0]
    text = choice.message.content
    assert b"".join(bytes(one.bytes) for one in choice.logprobs.content).decode() == text
    assert {one.logprob for one in choice.logprobs.content} == {-0.5}
    assert all([top.logprob for top in one.top_logprobs] == [-0.5, -1.5] for one in choice.logprobs.content)
    done = client.completions.create(model=NAME, prompt="Go on", max_tokens=9, temperature=0, logprobs=0)
    texts = done.choices[0].logprobs.tokens
    assert len(texts) == 9
    assert done.choices[0].logprobs.token_logprobs == [-0.5] * 9
    places = zip(texts, done.choices[0].logprobs.text_offset, strict=True)
    assert all(done.choices[0].text[at] == one for one, at in places if not one.startswith("bytes:"))
    assert done.choices[0].logprobs.top_logprobs == [{one: -0.5} for one in texts]


def test_an_empty_answer_says_what_was_cached(client: openai.OpenAI, world: ThreadWorld) -> None:
    submit = world.engine.submit

    def ended(ids: list[int], **options: Any) -> Any:
        return submit(ids, **options | {"max_new_tokens": 0})  # as if its first token were an end

    world.engine.submit = ended  # type: ignore[method-assign]
    try:
        said = client.completions.create(model=NAME, prompt="Go on, and on", max_tokens=5)
    finally:
        world.engine.submit = submit  # type: ignore[method-assign]
    assert said.usage is not None
    assert said.usage.prompt_tokens_details is not None
    assert said.usage.prompt_tokens_details.cached_tokens == len("Go on, and on") // 2


def test_the_model_is_described(client: openai.OpenAI, running: Served) -> None:
    assert [one.id for one in client.models.list()] == [NAME, OTHER_NAME]
    assert client.models.retrieve(OTHER_NAME).id == OTHER_NAME
    assert running.ask("/v1/chat/completions", chat() | {"model": OTHER_NAME})[1]["model"] == NAME
    assert client.models.retrieve(NAME).model_dump()["max_model_len"] == LONGEST
    assert running.ask("/v1/models/other")[0] == 404
    assert running.ask("/health") == (200, {"status": "ready"})


def test_texts_become_tokens_and_tokens_texts(running: Served) -> None:
    ids = TOKENIZER("é <end>!")["input_ids"]
    whole = {"count": len(ids), "max_model_len": LONGEST, "tokens": ids, "token_strs": None}
    assert running.ask("/tokenize", {"prompt": "é <end>!"}) == (200, whole)
    shown = running.ask("/tokenize", {"model": NAME, "prompt": "a b", "return_token_strs": True})[1]
    assert shown["token_strs"] == ["a", "Ġ", "b"]
    messages = running.ask("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]})[1]
    assert messages["tokens"] == TOKENIZER("<user>Hi<assistant>")["input_ids"]
    assert running.ask("/tokenize", {"prompt": ""})[1]["tokens"] == []
    assert running.ask("/detokenize", {"tokens": ids}) == (200, {"prompt": "é <end>!"})
    for path, sent, field in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "Hi"}]}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt"),
        ("/detokenize", {"tokens": [len(TOKENIZER)]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "other"}, "model"),
    ):
        code, said = running.ask(path, sent)
        assert (code, said["error"]["param"]) == (404 if field == "model" else 400, field), said


# --- what is refused ---

LONG = [7] * LONGEST
REFUSED: dict[str, tuple[str, Any, int, str | None]] = {
    "no JSON": ("chat", b"{", 400, None),
    "no object": ("chat", [1], 400, None),
    "not UTF-8": ("chat", b'{"model": "\xff"}', 400, None),
    "NaN": ("chat", b'{"temperature": NaN}', 400, None),
    "two fields": ("chat", b'{"n": 1, "n": 2}', 400, None),
    "deep": ("chat", b'{"messages": ' + b"[" * 100_000, 400, None),
    "digits": ("chat", b'{"n": ' + b"9" * 5000 + b"}", 400, None),
    "another model": ("chat", {**chat(), "model": "gpt-4"}, 404, "model"),
    "unknown field": ("chat", {**chat(), "top_h": 0.1}, 400, "top_h"),
    "penalty": ("chat", {**chat(), "presence_penalty": 2.5}, 400, "presence_penalty"),
    "biased words": ("chat", {**chat(), "logit_bias": {"the": 1}}, 400, "logit_bias"),
    "biases of foreign ids": ("", {"model": NAME, "prompt": "Hi", "logit_bias": {"9999": 1}}, 400, "logit_bias"),
    "required tools": ("chat", {**chat(), "tool_choice": "required"}, 400, "tool_choice"),
    "stream_options": ("chat", {**chat(), "stream_options": {}}, 400, "stream_options"),
    "top_logprobs": ("chat", {**chat(), "top_logprobs": 3}, 400, "top_logprobs"),
    "two limits": ("chat", {**chat(), "max_completion_tokens": 3}, 400, "max_tokens"),
    "too many new tokens": ("chat", chat(max_tokens=LONGEST), 400, "max_tokens"),
    "a prompt that cannot fit": ("", {"model": NAME, "prompt": LONG, "max_tokens": 1}, 400, None),
    "foreign ids": ("", {"model": NAME, "prompt": [len(TOKENIZER)]}, 400, "prompt"),
    "negative ids": ("", {"model": NAME, "prompt": [-1]}, 400, "prompt"),
    "a request that fails alone": ("", {"model": NAME, "prompt": [POISON]}, 400, None),
    "a large body": ("chat", b" " * ((1 << 20) + 1), 413, None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_has_the_shape_of_openai(name: str, running: Served) -> None:
    path, sent, status, param = REFUSED[name]
    code, said = running.ask("/v1/chat/completions" if path else "/v1/completions", sent)
    assert code == status, said
    assert said["error"].keys() == {"message", "type", "param", "code"}
    assert said["error"]["param"] == param
    assert running.ask("/v1/chat/completions", chat())[0] == 200


def test_the_limit_of_new_tokens_is_named(running: Served) -> None:
    prompt = len("<user>Hi<assistant>")
    left = f"expected 1 to {LONGEST - prompt}, what the context of {LONGEST} tokens leaves beside a prompt of {prompt}"
    for name in ("max_tokens", "max_completion_tokens"):
        sent = {key: value for key, value in chat().items() if key != "max_tokens"} | {name: 8192}
        code, said = running.ask("/v1/chat/completions", sent)
        assert (code, said["error"]["message"]) == (400, f"{name}: {left}, given 8192")
        assert said["error"]["param"] == name


def test_unknown_paths_name_the_known_ones(running: Served) -> None:
    known = "POST /v1/chat/completions, POST /v1/completions, POST /v1/responses, POST /tokenize, POST /detokenize"
    known += ", GET /v1/models, GET /v1/models/NAME, GET /health"
    for sent, status, what, given in (
        (("/v1/embeddings", {}), 404, "path", "POST /v1/embeddings"),
        (("/v1/completions",), 405, "method", "GET /v1/completions"),
    ):
        code, said = running.ask(*sent)
        assert code == status
        assert said["error"]["message"] == f'{what}: expected one of {known}, GET /metrics, GET /, given "{given}"'
        assert said["error"]["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


def test_other_paths_methods_and_types_are_refused(running: Served) -> None:
    for status, (code, said) in {
        404: running.ask("/v1/embeddings", {}),
        405: running.ask("/v1/chat/completions"),
        415: running.ask("/v1/chat/completions", chat(), content_type="text/plain"),
        403: running.ask("/v1/chat/completions", chat(), host="evil.example:80"),
    }.items():
        assert code == status
        assert said["error"]["message"]


def test_a_full_server_says_429_and_when_to_ask_again() -> None:
    tiny = ThreadWorld(rows=1, waiting=1)
    with served(tiny) as small:  # its engine is full before its front is
        code, said = small.ask("/v1/chat/completions", {**chat(), "n": 3})
        assert (code, said["error"]["type"]) == (429, "rate_limit_error")
        until(lambda: not small.front.open and not tiny.engine.streams)
        assert small.ask("/v1/chat/completions", chat())[0] == 200


def test_a_key_is_asked_for() -> None:
    with served(ThreadWorld(), limits=Limits(api_keys=("secret", "other"))) as one:
        for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}):
            assert one.ask("/v1/chat/completions", chat(), **given)[0] == 401
            assert one.ask("/metrics", **given)[0] == 401
        for key in ("secret", "other"):
            assert one.ask("/v1/chat/completions", chat(), authorization=f"Bearer {key}")[0] == 200
        assert one.ask("/health")[0] == one.ask("/")[0] == 200


def test_clients_of_another_key_or_salt_share_no_prefix() -> None:
    world = ThreadWorld()
    salts: list[str] = []
    with served(world, limits=Limits(api_keys=("one", "two"))) as running:
        submit = world.engine.submit

        def noted(ids: Any, **options: Any) -> Any:
            salts.append(options["salt"])
            return submit(ids, **options)

        world.engine.submit = noted  # type: ignore[method-assign]
        for key, salt in (("one", None), ("one", None), ("two", None), ("one", "a"), ("two", "a"), ("one", "b")):
            sent = {**chat(n=2), "cache_salt": salt}
            assert running.ask("/v1/chat/completions", sent, authorization=f"Bearer {key}")[0] == 200
    of_choices = [*zip(salts[::2], salts[1::2], strict=True)]
    assert all(first == second for first, second in of_choices)
    assert of_choices[0] == of_choices[1]
    assert len({*of_choices}) == 5
    assert not any("one" in salt for salt in salts)


# --- a server that ends, and streams that are silent ---


def test_a_server_that_ends_says_so_until_its_open_requests_have_ended(world: ThreadWorld) -> None:
    slow = ThreadWorld(pause=0.05)
    with served(slow) as one:
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
        thread.join()
        assert found[0][0] == 200
        one.thread.join(30)
        with pytest.raises(ConnectionError):
            raw(one)


def test_an_answer_that_the_end_of_the_server_cuts_short_is_an_error() -> None:
    slow, lines = ThreadWorld(pause=0.05), []
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


def test_an_error_of_the_server_s_own_is_logged_without_its_text(
    running: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("what a client sent")

    lines: list[str] = []
    monkeypatch.setattr(running.front, "log", lines.append)
    monkeypatch.setattr("attnmesh.serve.routes.Answers", fail)
    code, said = running.ask("/v1/chat/completions", chat())
    assert (code, said["error"]["message"]) == (500, "The server failed on this request.")
    assert [line.split(":")[:2] for line in lines] == [["a request failed", " KeyError at test_routes.py"]]


def test_more_choices_than_may_ever_wait_are_refused_for_good() -> None:
    with served(ThreadWorld(), max_requests=3) as one:
        code, said = one.ask("/v1/chat/completions", chat(n=4))
        assert (code, said["error"]["param"]) == (400, "n")
        assert one.ask("/v1/chat/completions", chat(n=3))[0] == 200


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
    monkeypatch.setattr(reply, "HEARTBEAT", 0.01)
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


# --- clients that go, stall or send nonsense ---


def raw(running: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", running.port), timeout=30)


def posted(body: dict[str, Any], path: str = "chat/completions") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/{path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


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


def test_figures_count_what_was_served(running: Served) -> None:
    before, tokens = running.figure('attnmesh_responses_total{status="200"}'), running.figure("attnmesh_tokens_total")
    assert running.ask("/v1/chat/completions", chat())[0] == 200
    assert running.figure('attnmesh_responses_total{status="200"}') == before + 1
    assert running.figure("attnmesh_tokens_total") == tokens + 20
    assert running.figure("attnmesh_gap_seconds_count") > 0
    until(lambda: running.figure('attnmesh_engine_cache_bytes{rank="1"}') == 12)
    assert running.figure('attnmesh_state{state="ready"}') == 1


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_what_is_polled_is_not_counted(path: str, running: Served) -> None:
    before = running.ask("/metrics")[1].splitlines()
    for _ in range(3):
        assert running.ask(path)[0] == 200
    counts = [
        [line for line in lines if line.startswith("attnmesh_responses_total")]
        for lines in (before, running.ask("/metrics")[1].splitlines())
    ]
    assert counts[0] == counts[1]


def test_figures_have_types_names_and_texts_as_prometheus_has_them(running: Served) -> None:
    until(lambda: "attnmesh_engine_" in running.ask("/metrics")[1])
    families = [*text_string_to_metric_families(running.ask("/metrics")[1])]
    kinds = {family.name: family.type for family in families if not family.name.endswith("_created")}
    assert kinds["attnmesh_responses"] == kinds["attnmesh_engine_tokens"] == "counter"
    assert kinds["attnmesh_first_token_seconds"] == "histogram"
    assert kinds["attnmesh_engine_running"] == kinds["attnmesh_engine_cache_bytes"] == "gauge"
    for family in families:
        assert re.fullmatch("attnmesh(_[a-z0-9]+)+", family.name), family.name
        assert not family.name.endswith(("_total", "_count", "_sum", "_bucket")), family.name
        assert len(family.documentation.split()) > 2, family.name
        assert family.documentation.endswith("."), family.name
        endings = {"counter": "_total", "gauge": ""}.get(family.type)
        assert endings is None or {sample.name for sample in family.samples} == {family.name + endings}


def test_each_figure_of_an_engine_has_a_text(tmp_path: Path) -> None:
    model, folder = families.model("llama", "attnmesh"), tmp_path / "prefixes"
    folder.mkdir(mode=0o700)
    engine = Engine(model, None, store=PrefixStore(folder), draft=families.model("llama", "attnmesh"))
    assert engine.metrics().keys() == ENGINE.keys()


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
    until(lambda: running.app._bodies.held == 0)  # the last clients may have only just gone
    if files:
        until(lambda: len([*Path("/proc/self/fd").iterdir()]) <= files + 2)
    said = running.ask("/v1/chat/completions", chat("Hi", temperature=0))[1]
    assert said["choices"][0]["message"]["content"] == expected("Hi", 20)


# --- prompts that take long to encode ---


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
        until(lambda: one.front.coming == 2)
        assert one.ask("/v1/completions", {"model": NAME, "prompt": "Go on"})[0] == 200
        assert one.app._bodies.held > 2 << 17
        code, said = one.ask("/v1/completions", {"model": NAME, "prompt": "Go on", "n": 2})
        assert (code, said["error"]["message"]) == (429, "2 requests run or wait, of 3. Ask again.")
        gate.open.set()
        for thread in threads:
            thread.join()
        assert codes == [400, 400]
        assert one.app._bodies.held == one.front.coming == 0


def test_a_prompt_is_not_encoded_for_a_client_that_has_gone(gate: Gate) -> None:
    codes: list[int] = []
    with served(ThreadWorld()) as one:
        thread = ask_long(one, "a", codes)
        assert gate.begun.acquire(timeout=100)
        with closing(raw(one)) as gone:
            gone.sendall(posted({"model": NAME, "prompt": "b" * (1 << 17)}, "completions"))
            until(lambda: one.front.coming == 2)
        until(lambda: one.front.coming == 1)
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
