"""Routes of the server: answers have the shape of OpenAI's, and so has what is refused."""

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from attnmesh.serve.access import Limits
from attnmesh.serve.json_reader import JsonReader
from tests.support.serving.fake_engine import LONGEST, POISON, ThreadWorld, answer, byte_tokenizer
from tests.support.serving.served import NAME, OTHER_NAME, Served, chat, expected, served, talk, until

TOKENIZER = byte_tokenizer()
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def world() -> ThreadWorld:
    return ThreadWorld()


@pytest.fixture(scope="module")
def running(world: ThreadWorld) -> Iterator[Served]:
    with served(world, limits=Limits(max_body=1 << 20)) as one:
        yield one


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


SAID = "What nobody needs once it is tokens."


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("chat/completions", chat(SAID, user=SAID, cache_salt=SAID)),
        ("completions", {"model": NAME, "prompt": SAID, "user": SAID}),
        ("responses", {"model": NAME, "input": [{"role": "user", "content": SAID}], "cache_salt": SAID}),
    ],
)
def test_what_a_request_said_is_let_go_once_it_is_encoded(
    path: str, fields: dict[str, Any], stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[weakref.ref[str]] = []

    class Said(str):
        """A text that can be referred to weakly."""

    def marked(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: marked(one) for name, one in value.items()}
        if isinstance(value, list):
            return [*map(marked, value)]
        if value != SAID:
            return value
        said = Said(value)
        held.append(weakref.ref(said))
        return said

    read = JsonReader.read
    monkeypatch.setattr(JsonReader, "read", lambda reader: marked(read(reader)))
    slow = ThreadWorld(pause=0.05)
    limit = "max_output_tokens" if path == "responses" else "max_tokens"
    with served(slow, drain=0.1) as one:
        ask = threading.Thread(target=one.ask, args=(f"/v1/{path}", fields | {"stream": stream, limit: 300}))
        ask.start()
        until(lambda: slow.engine.tokens > 1)
        until(lambda: all(text() is None for text in held), 10)
        assert held
        assert one.front.open
    ask.join()


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


def test_other_types_and_hosts_are_refused(running: Served) -> None:
    for status, changed in ((415, {"content_type": "text/plain"}), (403, {"host": "evil.example:80"})):
        code, said = running.ask("/v1/chat/completions", chat(), **changed)
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


def test_an_error_of_the_server_s_own_is_logged_without_its_text(
    running: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("what a client sent")

    lines: list[str] = []
    monkeypatch.setattr(running.front, "log", lines.append)
    monkeypatch.setattr("attnmesh.serve.routes.CompletionObjects", fail)
    code, said = running.ask("/v1/chat/completions", chat())
    assert (code, said["error"]["message"]) == (500, "The server failed on this request.")
    assert [line.split(":")[:2] for line in lines] == [["a request failed", " KeyError at test_routes.py"]]


def test_more_choices_than_may_ever_wait_are_refused_for_good() -> None:
    with served(ThreadWorld(), max_requests=3) as one:
        code, said = one.ask("/v1/chat/completions", chat(n=4))
        assert (code, said["error"]["param"]) == (400, "n")
        assert one.ask("/v1/chat/completions", chat(n=3))[0] == 200
