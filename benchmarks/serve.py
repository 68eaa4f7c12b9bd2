"""`python -m benchmarks serve`: streams of several clients from `attnmesh serve`, beside `transformers serve`.

Each server is a process that is started as a user starts it, and answers the same prompts over HTTP. One runs at a
time. No prompt begins as another does, so a kept prefix helps neither.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from socket import socket
from time import monotonic, perf_counter, sleep

from attnmesh.errors import ClusterError
from benchmarks.timing import Timing

PATIENCE = 1200.0
"""Seconds that a server gets to start, and to send a token."""

INTERVAL = 5.0
"""Seconds between two looks at a server's memory."""


@dataclass(frozen=True)
class Request:
    """The model's folder, a text to cut prompts from, and what is asked of each server."""

    model: str
    text: str
    contexts: tuple[int, ...]
    """Tokens of a prompt, about."""
    clients: tuple[int, ...]
    new: int
    ranks: int
    rounds: int


@dataclass(frozen=True)
class Row:
    """Figures of a server, as so many clients saw them."""

    server: str
    context: int
    clients: int
    tokens_a_second: float
    """Tokens in a second of all clients, from when all have a token to the first end; the median of the rounds."""
    first: Timing
    """Milliseconds to a client's first token."""
    gap: Timing
    """Milliseconds from a token to the next."""
    longest_gap: float
    megabytes: float
    """Highest memory of the server's processes together; shared pages are counted once."""
    same_texts: float
    """Share of the texts that are those of the first server."""


@dataclass(frozen=True)
class Answer:
    """A client's text, and the seconds at which it asked and its pieces came."""

    asked: float
    times: tuple[float, ...]
    text: str


Turn = tuple[list[Answer], float]
"""The answers of all clients, and the highest memory meanwhile."""


def commands(request: Request, port: int) -> dict[str, list[str]]:
    """Return the command of each server. All have the cores of this machine, and weights in float32."""
    bin, model = Path(sys.executable).parent, request.model
    most_clients = max(request.clients)
    serve = ["serve", "--model", model, "--mesh", f"keys={request.ranks}", "--dtype", "float32", "--port", str(port)]
    blocks = most_clients * (max(request.contexts) * 3 // 2 + request.new) // 256 + most_clients + 1
    paged = ["--cb-block-size", "256", "--cb-num-blocks", str(blocks), "--cb-max-batch-tokens", "512"]
    stock = [
        "serve",
        model,
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--attn-implementation",
        "sdpa",
        "--port",
        str(port),
    ]
    ranks = [str(bin / "attnmesh"), *serve, "--max-rows", str(most_clients)]
    return {
        f"attnmesh, {request.ranks} ranks": ranks,
        f"attnmesh, {request.ranks} ranks, whole weights": [*ranks, "--weights", "whole"],
        "transformers": [str(bin / "transformers"), *stock, "--continuous-batching", *paged],
    }


def rows(request: Request, add: Callable[[Row], None], step: Callable[[str], None]) -> None:
    """Measure each server with each number of clients, the servers in turns."""
    turns_by_case: dict[tuple[str, int, int], list[Turn]] = {}
    for turn in range(request.rounds):
        for name in commands(request, 0):
            step(f"turn {turn + 1} of {request.rounds}: {name}")
            with running(request, name) as (port, memory):
                ask(port, request.model, [request.text[:400]], 8)  # the first request of a server is not counted
                for context in request.contexts:
                    for clients in request.clients:
                        prompts = prompts_of(request.text, context, clients, turn)
                        memory.highest = 0
                        turns_by_case.setdefault((name, context, clients), []).append(
                            (ask(port, request.model, prompts, request.new), memory.highest / 1e6)
                        )
    first_server = next(iter(turns_by_case))[0]
    for (name, context, clients), turns in turns_by_case.items():
        add(summary(name, context, clients, turns, texts_of(turns_by_case[first_server, context, clients])))


def prompts_of(text: str, context: int, clients: int, turn: int) -> list[str]:
    """Return prompts of a half to one and a half times so many tokens, 3.3 letters each. Numbers make them differ."""
    sizes = [int(3.3 * context * (0.5 + (row + 1) / (clients + 1))) for row in range(clients)]
    starts = [7919 * (97 * turn + 16 * clients + row) % (len(text) - size) for row, size in enumerate(sizes)]
    parts = enumerate(zip(starts, sizes, strict=True))
    return [f"{turn} {row} {clients} {context} {text[start : start + size]}" for row, (start, size) in parts]


def texts_of(turns: list[Turn]) -> list[str]:
    """Return the texts of all answers."""
    return [answer.text for found, _ in turns for answer in found]


def summary(server: str, context: int, clients: int, turns: list[Turn], expected: list[str]) -> Row:
    """Return the row of all turns with so many clients."""
    answers = [answer for found, _ in turns for answer in found]
    gaps = [late - early for one in answers for early, late in zip(one.times, one.times[1:], strict=False)]
    rates = sorted(rate(found) for found, _ in turns)
    return Row(
        server,
        context,
        clients,
        round(rates[len(rates) // 2], 1),
        Timing.of(at_least_two([one.times[0] - one.asked for one in answers])),
        Timing.of(at_least_two(gaps)),
        round(1e3 * max(gaps), 1),
        round(max(megabytes for _, megabytes in turns)),
        sum(map(str.__eq__, texts_of(turns), expected)) / len(expected),
    )


def at_least_two(seconds: list[float]) -> list[float]:
    """Return the seconds, one alone twice, as quartiles need."""
    return seconds if len(seconds) > 1 else 2 * seconds


def rate(answers: list[Answer]) -> float:
    """Return the tokens in a second while all clients are answered; of all the time where they never are."""
    begin, end = max(one.times[0] for one in answers), min(one.times[-1] for one in answers)
    if begin >= end:
        begin, end = min(one.asked for one in answers), max(one.times[-1] for one in answers)
    return sum(begin < time <= end for one in answers for time in one.times) / (end - begin)


# --- a server ---


class Memory(threading.Thread):
    """Thread that watches the memory of a process and its children (Linux)."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.highest, self.done = pid, 0, threading.Event()

    def run(self) -> None:
        """Look every few seconds, until done: a look goes through all pages, and the processes wait for it."""
        while not self.done.wait(INTERVAL):
            self.highest = max(self.highest, sum(map(proportional, family(self.pid))))


def family(pid: int) -> list[int]:
    """Return a process and all that it has started."""
    children: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            children += map(int, file.read_text().split())
    return [pid, *(one for child in children for one in family(child))]


def proportional(pid: int) -> int:
    """Return a process's share of memory: a page of three processes is a third of a page."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0  # it has ended
    return 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])


@contextmanager
def running(request: Request, name: str) -> Iterator[tuple[int, Memory]]:
    """Start a server, and end it."""
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = commands(request, port)[name]
    environment = {**os.environ, "OMP_NUM_THREADS": str(os.cpu_count()), "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    memory = Memory(process.pid)
    try:
        wait_until_ready(process, port)
        memory.start()
        yield port, memory
    finally:
        memory.done.set()
        process.terminate()
        process.wait(60)


def wait_until_ready(process: subprocess.Popen[bytes], port: int) -> None:
    """Return when a server answers that it is healthy."""
    end = monotonic() + PATIENCE
    while monotonic() < end and process.poll() is None:
        try:
            connection = HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except (OSError, HTTPException):
            pass
        sleep(0.2)
    given = " ".join(map(str, process.args))  # type: ignore[arg-type]
    raise ClusterError("serve", "a server that starts", f"{given}, which did not", "look at what it prints")


# --- clients ---


def ask(port: int, model: str, prompts: list[str], new_tokens: int) -> list[Answer]:
    """Return the answers to prompts that are sent at the same time."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return [*pool.map(lambda prompt: stream(port, model, prompt, new_tokens), prompts)]


def stream(port: int, model: str, prompt: str, new_tokens: int) -> Answer:
    """Read one answer as it comes."""
    connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    body = {"model": model, "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "stream": True}
    asked = perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(response.read().decode())
    times: list[float] = []
    text = ""
    for line in response:
        if line.startswith(b"data: {"):
            piece = "".join(choice["text"] or "" for choice in json.loads(line[6:])["choices"])
            times += [perf_counter()] * bool(piece)
            text += piece
    connection.close()
    return Answer(asked, tuple(times), text)
