"""`python -m benchmarks prefixes`: first tokens of prompts that a server has stored, and gaps of others meanwhile.

A server stores a long prompt, all of its processes are killed, and another one on fewer ranks is asked for the same. A
client beside it reads an answer meanwhile, as it does while no prefix is stored or loaded.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path
from socket import socket
from time import monotonic, perf_counter, sleep
from typing import Any

from benchmarks.serve import PATIENCE, Answer, family, stream, wait_until_ready

BESIDE = "Say all numbers from one on, in words."
"""Prompt of the client that reads an answer all the time."""


@dataclass(frozen=True)
class Request:
    """The model's folder, a text to cut prompts from, their letters, and the ranks before and after."""

    model: str
    text: str
    letters: int
    ranks: tuple[int, int]
    max_gap: float


@dataclass(frozen=True)
class PrefixRow:
    """Times of a client for one prompt, and the longest gap of another client meanwhile."""

    case: str
    ranks: int
    prompt: int
    cached: int
    """Tokens of the prompt that were not computed."""
    first: float
    """Seconds to the first token."""
    longest_gap: float
    """Milliseconds between two tokens of the client beside it; 0 without one."""
    same_text: bool


def rows(request: Request, add: Callable[[PrefixRow], None], step: Callable[[str], None]) -> None:
    """Measure a prompt that is new, one that is stored, and the same beside a client."""
    before, after = request.ranks
    prompts = [f"{number} {request.text[9000 * number :][: request.letters]}" for number in range(2)]
    texts: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        step(f"a server on {before} ranks")
        with running(request, before, folder) as (port, process):
            stream(port, request.model, BESIDE, 8)  # the first request of a server is not counted
            for prompt, beside in zip(prompts, (False, True), strict=True):
                add(_asked(port, request, prompt, "computed", before, beside, texts))
            until_stored(port)
            for pid in family(process.pid):
                os.kill(pid, signal.SIGKILL)
        step(f"a server on {after} ranks, after the first was killed")
        with running(request, after, folder) as (port, _):
            stream(port, request.model, BESIDE, 8)
            for prompt, beside in zip(prompts, (False, True), strict=True):
                add(_asked(port, request, prompt, "stored", after, beside, texts))


def _asked(
    port: int, request: Request, prompt: str, case: str, ranks: int, beside: bool, texts: list[str]
) -> PrefixRow:
    """Ask for a prompt, with another client beside it or alone."""
    before = figure(port, "store_disk_tokens_total")
    with ThreadPoolExecutor(1) as pool:
        other_client: Future[Answer] | None = pool.submit(stream, port, request.model, BESIDE, 400) if beside else None
        sleep(3.0 if beside else 0.0)  # until it has some tokens
        start = perf_counter()
        answer = stream(port, request.model, prompt, 16)
        ended = perf_counter()
        gap = 0.0 if other_client is None else longest_gap(other_client.result().times, start, ended)
    cached = int(figure(port, "store_disk_tokens_total") - before)
    texts.append(answer.text)
    is_same = texts.index(answer.text) == (len(texts) - 1) % 2
    name = f"{case}, beside a client" if beside else case
    first_token = round(answer.times[0] - answer.asked, 2)
    return PrefixRow(name, ranks, tokens_of(port, request.model, prompt), cached, first_token, round(gap), is_same)


def longest_gap(times: tuple[float, ...], start: float, stop: float) -> float:
    """Return the longest milliseconds between two tokens of which one came between two moments.

    >>> longest_gap((0.0, 1.0, 3.0, 9.0), 2.0, 4.0)
    6000.0
    """
    gaps = [late - early for early, late in pairwise(times) if early < stop and late > start]
    return 1e3 * max(gaps, default=0.0)


def tokens_of(port: int, model: str, prompt: str) -> int:
    """Return the tokens of a prompt."""
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    tokens: int = json.loads(connection.getresponse().read())["usage"]["prompt_tokens"]
    connection.close()
    return tokens


def figure(port: int, name: str) -> float:
    """Return a figure of the engine."""
    connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return float(next(line for line in lines if line.startswith(f"attnmesh_engine_{name} ")).split()[1])


def until_stored(port: int) -> None:
    """Wait until the figures of the folder stay the same."""
    before, end = 0.0, monotonic() + PATIENCE
    while monotonic() < end:
        sleep(5.0)
        stored_bytes = figure(port, "store_disk_bytes")
        if stored_bytes and stored_bytes == before:
            return
        before = stored_bytes


@contextmanager
def running(request: Request, ranks: int, folder: str) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Start a server with a store, and end it."""
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    bin = Path(sys.executable).parent
    words = ["serve", "--model", request.model, "--mesh", f"keys={ranks}", "--dtype", "float32", "--port", str(port)]
    words += ["--store", f"{folder}/prefixes", "--max-gap", str(request.max_gap)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    output: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([str(bin / "attnmesh"), *words], env=environment, **output)
    try:
        wait_until_ready(process, port)
        yield port, process
    finally:
        process.terminate()
        process.wait(60)
