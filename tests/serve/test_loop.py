"""The event loop is never held up for long: another client's requests go on beside each of these."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.serving import fake_engine
from tests.support.serving.fake_engine import ThreadWorld
from tests.support.serving.served import NAME, Served, chat, served

MB = 1 << 20
TRIES = 8
"""Times that a pause is measured: other programs make some of them longer, and none shorter."""


@pytest.fixture(scope="module")
def running() -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_engine, "LONGEST", 4000)
        with served(ThreadWorld(pause=0), tool_format="hermes") as one:
            yield one


def unit() -> float:
    """Return the seconds of a piece of work that takes about 10 ms on the machine of a developer."""
    start = time.perf_counter()
    sum(range(1_000_000))
    return time.perf_counter() - start


def longest_pause(running: Served, work: Callable[[], Any]) -> float:
    """Return the longest time in which the server's event loop ran nothing else, while the work was done."""
    pauses, done = [0.0], threading.Event()

    async def beat() -> None:
        last = time.perf_counter()
        while not done.is_set():
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            pauses.append(now - last)
            last = now

    assert running.front._worlds_task is not None
    beating = asyncio.run_coroutine_threadsafe(beat(), running.front._worlds_task.get_loop())
    work()
    done.set()
    beating.result(60)
    return max(pauses)


def post(body: bytes, status: int) -> Callable[[Served], Any]:
    def work(running: Served) -> None:
        code, said = running.ask("/v1/chat/completions", body)
        assert code == status, said

    return work


def scripted(text: str) -> Callable[[Served], Any]:
    """Ask with a tool, where the model says a text."""

    def work(running: Served) -> None:
        world: Any = running.front.world
        world.engine.scripts.append(text)
        post(json.dumps(chat(tools=[function()], max_tokens=3900)).encode(), 200)(running)

    return work


def function(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}} | fields}


def with_tools(*tools: Any) -> bytes:
    return json.dumps(chat(tools=tools)).encode()


def posted_to(path: str, body: dict[str, Any], status: int) -> Callable[[Served], Any]:
    def work(running: Served) -> None:
        code, said = running.ask(path, body)
        assert code == status, said

    return work


def message(content: str) -> bytes:
    return json.dumps(chat(content), ensure_ascii=False).encode()


WORK: dict[str, Callable[[Served], Any]] = {
    "a long text": post(message("x" * 8 * MB), 400),
    "a long text of other letters": post(message("é" * 4 * MB), 400),
    "a text of escapes": post(message("\n" * 4 * MB), 400),
    "many names": post(b"{" + b",".join(b'"%d":1' % i for i in range(60_000)) + b"}", 400),
    "many lists": post(b"[" + b"[]," * 60_000 + b"1]", 400),
    "a long value that is refused": post(json.dumps(chat(n={"x": "y" * 8 * MB})).encode(), 400),
    "thousands of tools": post(with_tools(*(function(f"f{i}", description="x" * 1000) for i in range(5000))), 400),
    "many tools": post(with_tools(*(function(f"f{i}", description="x" * 1000) for i in range(1000))), 200),
    "many tools that a response repeats": posted_to(
        "/v1/responses",
        {
            "model": NAME,
            "input": "Hi",
            "stream": True,
            "max_output_tokens": 20,
            "tools": [{"type": "function", "name": f"f{i}", "description": "é" * 1000} for i in range(1000)],
        },
        200,
    ),
    "a tool with a huge description": post(with_tools(function(description="x" * 8 * MB)), 400),
    "a tool with a huge schema": post(
        with_tools(function(parameters={"properties": {f"x{i}": {"enum": [0] * 10} for i in range(4000)}})), 200
    ),
    "a call with long arguments": scripted(
        f'<tool_call>{{"name": "f", "arguments": {{"x": "{"y" * 3500}"}}}}</tool_call>'
    ),
    "text in which calls begin": scripted('<tool_call>{"name": "' * 180),
    "a text to be made tokens": posted_to("/tokenize", {"prompt": "x" * 8 * MB}, 400),
    "tokens to be made text": posted_to("/detokenize", {"tokens": [65] * 60_000}, 200),
    "an answer with many log-probabilities": post(
        json.dumps(chat(max_tokens=1500, logprobs=True, top_logprobs=20, seed=1)).encode(), 200
    ),
}


@pytest.mark.parametrize("name", WORK)
def test_other_clients_wait_for_a_moment_at_most(name: str, running: Served) -> None:
    found = []
    for _ in range(TRIES):
        found.append((longest_pause(running, lambda: WORK[name](running)), unit()))
        if found[-1][0] < 5 * found[-1][1]:
            return
    pytest.fail(f"pauses, and a unit of work, in seconds: {found}")
