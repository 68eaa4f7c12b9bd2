"""Hostile clients beside honest ones: a server on two ranks keeps its answers, its pace and its memory.

`python -m tools.hostile --seconds 3600` starts `attnmesh serve` with a small model. Four honest clients stream
all the while, and compare each text with the one that they got before. Hostile clients come and go in turns, so that
a quiet server and a harassed one are measured side by side.
"""

import argparse
import http.client
import json
import multiprocessing as mp
import os
import re
import shlex
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Any

from attnmesh.runtime.machine import machine
from tests.support.fake_engine import save_tiny

MODEL = "small"
HONEST, HOSTILE = 4, 6
"""Clients at a time."""
QUIET, HARASSED = 4.0, 11.0
"""Seconds of a turn without hostile clients, and of one with them."""
MAX_BODY = 1 << 20
MOST_MEGABYTES = 400
"""More memory than in the first quiet turn: 8 bodies of 1 MB while they are parsed, and kept prefixes."""
SLOWER = 3.0
"""An honest client's gap, at most, as a multiple of the one in quiet."""
PATIENCE = 120.0
"""Seconds after which a client gives up waiting."""

Status = int | str
"""The status of a response; "closed" without one."""
REFUSED: tuple[Status, ...] = (400, 429, 503)
ANY: tuple[Status, ...] = (200, *REFUSED)


# --- raw requests ---


def connect(port: int) -> socket.socket:
    """Return a connection to the server."""
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)


def head(path: str, length: int | None, *, method: str = "POST", more: str = "") -> bytes:
    """Return the head of a request; without a length its body comes in chunks."""
    size = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    lines = f"{method} {path} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json", size
    return "\r\n".join((*lines, *([more] if more else []), "", "")).encode()


def status_of(connection: socket.socket) -> Status:
    """Return the status of the response that comes, and see that it is of OpenAI's shape if it is a refusal."""
    response = http.client.HTTPResponse(connection)
    try:
        response.begin()
        body = response.read()
    except (http.client.HTTPException, OSError):
        return "closed"
    finally:
        response.close()
    if response.status >= 400 and "message" not in json.loads(body or b"{}").get("error", {}):
        return f"{response.status} in another shape"
    return response.status


def ask(port: int, body: bytes, path: str = "/v1/completions", **options: str) -> Status:
    """Send a whole request. Return the status of its response."""
    with connect(port) as connection:
        with suppress(OSError):  # a refusal may come, and the connection end, before all is sent
            connection.sendall(head(path, len(body), **options) + body)
        return status_of(connection)


def completion(random: Random, **fields: Any) -> dict[str, Any]:
    """Return a small request that fits."""
    prompt = "".join(random.choices("abc xyz", k=random.randrange(1, 60)))
    return {"model": MODEL, "prompt": prompt, "max_tokens": random.randrange(1, 20), "temperature": 0, **fields}


def chat(random: Random, **fields: Any) -> dict[str, Any]:
    """Return a small chat that fits."""
    messages = [{"role": "user", "content": "".join(random.choices("abc xyz", k=20))}]
    return {"model": MODEL, "messages": messages, "max_tokens": random.randrange(1, 20), **fields}


# --- what hostile clients do ---


def many_names(port: int, random: Random) -> Status:
    """Send a body of so many names that comparing all pairs would take minutes."""
    names = (f'"{n}":0' for n in range(random.choice((10_000, 40_000))))
    return ask(port, f"{{{','.join(names)}}}".encode())


def same_names(port: int, random: Random) -> Status:
    """Send one name again and again, also inside of a message."""
    twice = ",".join(['"role":"user"'] * random.randrange(2, 20_000))
    return ask(port, f'{{"model":"{MODEL}","messages":[{{{twice}}}]}}'.encode(), "/v1/chat/completions")


def deep_body(port: int, random: Random) -> Status:
    """Send lists in lists, or objects in objects."""
    depth = random.choice((100, 1_000, 100_000))
    opening, closing = random.choice((("[", "]"), ('{"a":', "}")))
    inner = opening * depth + "1" + closing * depth
    return ask(port, f'{{"model":"{MODEL}","prompt":{inner}}}'.encode()[:MAX_BODY])


def broken_json(port: int, random: Random) -> Status:
    """Send a body with some bytes changed."""
    body = bytearray(json.dumps(completion(random)).encode())
    for _ in range(random.randrange(1, 6)):
        body[random.randrange(len(body))] = random.randrange(256)
    return ask(port, bytes(body))


def odd_numbers(port: int, random: Random) -> Status:
    """Send numbers that no field can have."""
    number = random.choice(("NaN", "1e999", "-1", "1" * 5_000, "0.1", "true", "null", "[]", '"1"', "-0"))
    name = random.choice(("max_tokens", "temperature", "top_p", "top_k", "seed", "n", "logprobs", "prompt", "stop"))
    return ask(port, f'{{"model":"{MODEL}","prompt":"a","max_tokens":3,"{name}":{number}}}'.encode())


def random_field(port: int, random: Random) -> Status:
    """Send a field with a value of some other kind."""
    value: Any = random.choice(("", "\ud800", [[]], {"type": "x"}, [1, -5, 2**40], ["a"] * 500, 7e20, False, "\0"))
    name = random.choice(("messages", "tools", "stop", "stream_options", "response_format", "logit_bias", "model", "x"))
    body = json.dumps(chat(random) | {name: value}).encode()
    return ask(port, body, "/v1/chat/completions")


def long_text(port: int, random: Random) -> Status:
    """Send a text beyond every context, which a tokenizer would take long for."""
    text = random.choice(("a", "é", " a", "\u4e2d")) * (MAX_BODY // 8)
    return ask(port, json.dumps(completion(random, prompt=text)).encode())


def large_body(port: int, random: Random) -> Status:
    """Send more than a body may have, and sometimes less than announced."""
    announced, sent = random.choice(((MAX_BODY * 3, MAX_BODY * 3), (10**15, 1000), (None, MAX_BODY * 2)))
    with connect(port) as connection, suppress(OSError):
        connection.sendall(head("/v1/completions", announced))
        data = b"x" * sent
        connection.sendall(data if announced is not None else b"%x\r\n" % sent + data + b"\r\n0\r\n\r\n")
        if announced == sent or announced is None:
            return status_of(connection)
    return "closed"


def images(port: int, random: Random) -> Status:
    """Send images, or what calls itself one, to a model that sees none."""
    url = random.choice(("data:image/png;base64,AAAA", "http://127.0.0.1:1/x.png", "file:///etc/passwd", "data:,"))
    content = [{"type": "image_url", "image_url": {"url": url}}] * random.randrange(1, 200)
    body = chat(random, messages=[{"role": "user", "content": content}], n=16)
    return ask(port, json.dumps(body).encode(), "/v1/chat/completions")


def odd_http(port: int, random: Random) -> Status:
    """Send what is no HTTP, or hardly."""
    data = random.choice(
        (
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + random.randbytes(100),
            random.randbytes(500) + b"\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: -1\r\n\r\n",
            b"POST / HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
            b"GET /health HTTP/1.1\r\nhost: evil.example\r\n\r\n",
            b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 9_000 + b"\r\n",
            head("/v1/models", 0, method="GET") * 300,
        )
    )
    with connect(port) as connection, suppress(OSError):
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return status_of(connection)
    return "closed"


def odd_path(port: int, random: Random) -> Status:
    """Ask for what is not there."""
    path = random.choice(("/v1/../etc", "/v1/models/%00", "/v1/embeddings", "//", "/v1/models/" + "a" * 5_000))
    return ask(port, b"", path, method=random.choice(("GET", "PUT", "DELETE", "POST", "TRACE")))


def slow_head(port: int, random: Random) -> Status:
    """Send a head byte by byte, and never its end."""
    with connect(port) as connection, suppress(OSError):
        for byte in head("/v1/completions", 10)[: random.randrange(5, 20)]:
            connection.sendall(bytes([byte]))
            time.sleep(0.05)
    return "closed"


def slow_body(port: int, random: Random) -> Status:
    """Send a body in small pieces, and go before its end."""
    with connect(port) as connection, suppress(OSError):
        connection.sendall(head("/v1/completions", 100_000))
        for _ in range(random.randrange(5, 20)):
            connection.sendall(b" " * 500)
            time.sleep(0.05)
    return "closed"


def cancel(port: int, random: Random) -> Status:
    """Begin a stream, and go in its middle, politely or not."""
    body = json.dumps(completion(random, stream=True, max_tokens=200, n=random.choice((1, 4)))).encode()
    with connect(port) as connection, suppress(OSError):
        connection.sendall(head("/v1/completions", len(body)) + body)
        connection.recv(random.choice((1, 200, 4_000)))
        if random.random() < 0.5:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return "closed"


def slow_reader(port: int, random: Random) -> Status:
    """Begin streams with all their log-probabilities, and read nothing for a while."""
    body = json.dumps(completion(random, stream=True, max_tokens=300, logprobs=5, n=2)).encode()
    with connect(port) as connection, suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2_048)
        connection.sendall(head("/v1/completions", len(body)) + body)
        time.sleep(random.uniform(0.2, 1.5))
    return "closed"


def flood(port: int, random: Random) -> Status:
    """Ask for far more than the queue takes, and wait for none of it."""
    connections = []
    for _ in range(random.randrange(10, 60)):
        body = json.dumps(completion(random, max_tokens=100, n=random.choice((1, 16)))).encode()
        with suppress(OSError):
            connections.append(connect(port))
            connections[-1].sendall(head("/v1/completions", len(body)) + body)
    time.sleep(random.uniform(0.0, 0.3))
    for connection in connections:
        connection.close()
    return "closed"


def ordinary(port: int, random: Random) -> Status:
    """Ask for what is served: neighbours that honest clients share the server with."""
    fields = {"temperature": random.choice((0, 1)), "n": random.choice((1, 2)), "seed": random.randrange(2**40)}
    return ask(port, json.dumps(completion(random, **fields)).encode())


Act = Callable[[int, Random], Status]
ACTS: dict[Act, tuple[Status, ...]] = {
    many_names: (400, 413, 503),
    same_names: (400, 413, 503),
    deep_body: (400, 413, 503),
    broken_json: (404, *ANY),
    odd_numbers: ANY,
    random_field: (404, *ANY),
    long_text: REFUSED,
    large_body: (413, 503, "closed"),
    images: REFUSED,
    odd_http: (200, 400, 403, 404, 405, "closed"),
    odd_path: (200, 400, 404, 405, "closed"),
    slow_head: ("closed",),
    slow_body: ("closed",),
    cancel: ("closed",),
    slow_reader: ("closed",),
    flood: ("closed",),
    ordinary: (200, 429, 503),
}
"""What hostile clients do, and the statuses that it may get. 500 is never among them."""


def harass(port: int, seed: int, going: Any, ended: Any, seen: Any) -> None:
    """Act while it is going, first each act once, then at random; runs in a process of its own."""
    os.nice(5)  # clients stand for other machines: they should not take the processor from the server
    order = Random(seed).sample([*ACTS], len(ACTS))
    clients = [(Random(f"{seed}-{client}"), order[client::HOSTILE]) for client in range(HOSTILE)]
    threads = [threading.Thread(target=_harass_alone, args=(port, *one, going, ended, seen)) for one in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _harass_alone(port: int, random: Random, first: list[Act], going: Any, ended: Any, seen: Any) -> None:
    acts = chain(first, iter(lambda: random.choice([*ACTS]), None))
    while not ended.is_set():
        if not going.wait(0.2):
            continue
        act = next(acts)
        try:
            status: Status = act(port, random)
        except OSError:
            status = "closed" if port_listens(port) else "no server"
        seen.put((act.__name__, status, status in ACTS[act] or status == "closed"))
        time.sleep(random.uniform(0.0, 0.3))


def port_listens(port: int) -> bool:
    """Return whether somebody listens."""
    with suppress(OSError), connect(port):
        return True
    return False


# --- honest clients ---


@dataclass
class Honest:
    """Clients that stream the same requests again and again."""

    port: int
    requests: list[dict[str, Any]]
    expected: list[str] = field(default_factory=list)
    gaps: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    """Seconds between two pieces of a stream, in quiet and under harassment."""
    wrong: list[str] = field(default_factory=list)
    texts: int = 0
    refused: int = 0
    harassed: bool = False
    ended: bool = False

    def stream(self, request: dict[str, Any]) -> str | None:
        """Return the text of a stream; None if the server is full."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        body = json.dumps(request | {"stream": True})
        try:
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            response = connection.getresponse()
            if response.status in (429, 503):
                return None
            pieces, last = list[str](), 0.0
            for line in response:
                if line.startswith(b"data: {"):
                    value = json.loads(line[6:])
                    pieces.append(value["choices"][0]["text"] if "choices" in value else f"<{value}>")
                    if last:
                        self.gaps[self.harassed].append(time.perf_counter() - last)
                    last = time.perf_counter()
            return "".join(pieces)
        finally:
            connection.close()

    def learn(self) -> None:
        """Get the texts of a quiet server."""
        self.expected = [self.stream(request) or "" for request in self.requests]
        self.gaps[False].clear()

    def go_on(self, client: int) -> None:
        """Stream until the end."""
        random = Random(client)
        while not self.ended:
            number = random.randrange(len(self.requests))
            try:
                text = self.stream(self.requests[number])
            except (OSError, http.client.HTTPException) as error:
                text = f"<{error!r}>"
            if text is None:
                self.refused += 1
                time.sleep(0.1)
                continue
            self.texts += 1
            if text != self.expected[number]:
                self.wrong.append(f"{self.requests[number]}: {text!r} in place of {self.expected[number]!r}")


def honest_requests() -> list[dict[str, Any]]:
    """Return requests of several lengths, greedy and sampled."""
    random = Random(7)
    lengths = (5, 40, 150, 400, 40, 150)
    prompts = ["".join(random.choices("the cat sat on a mat. ", k=length)) for length in lengths]
    return [
        {"model": MODEL, "prompt": prompt, "max_tokens": 48, "temperature": number % 2, "seed": number}
        for number, prompt in enumerate(prompts)
    ]


# --- the server ---


class ServerProcess:
    """`attnmesh serve` on two ranks, as a user starts it."""

    def __init__(self, folder: Path) -> None:
        model = save_tiny(folder / "model")
        options = ["--mesh", "keys=2", "--port", "0", "--served-name", MODEL, "--max-body", "1", "--drain", "5"]
        command = [sys.executable, "-m", "attnmesh", "serve", "--model", model, *options]
        environment = {**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.mark = f"TMPDIR={folder}".encode()
        self.process = subprocess.Popen(command, env=environment, **pipes)
        self.lines: list[str] = []
        self.ready = threading.Event()
        self.port = 0
        self.reading = threading.Thread(target=self._read)
        self.reading.start()
        if not self.ready.wait(PATIENCE * 2) or not self.port:
            self.process.kill()
            raise RuntimeError("the server did not start: " + "".join(self.lines))

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(r"serving \S+ on http://127.0.0.1:(\d+)", line):
                self.port = int(found[1])
                self.ready.set()
        self.ready.set()

    def processes(self) -> list[Path]:
        """Return the folders in /proc of all processes that the server has started, and its own."""
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if self.mark in (place / "environ").read_bytes().split(b"\0"):
                    found.append(place)
        return found

    def megabytes(self) -> float:
        """Return the memory of all processes; shared pages count once."""
        total = 0
        for place in self.processes():
            with suppress(OSError):
                total += int(re.findall(r"Pss:\s+(\d+)", (place / "smaps_rollup").read_text())[0])
        return total / 1e3

    def healthy(self) -> bool:
        """Return whether /health says that requests are served."""
        with connect(self.port) as connection:
            connection.sendall(head("/health", 0, method="GET", more="connection: close"))
            return status_of(connection) == 200

    def end(self) -> int:
        """End it as a service manager does. Return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(PATIENCE)
        self.reading.join(PATIENCE)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


# --- the run ---


@dataclass(frozen=True)
class Outcome:
    """How the server did: counts of what was done, honest texts, gaps in milliseconds, memory, and faults."""

    seconds: int
    acts: dict[str, dict[str, int]]
    texts: int
    refused: int
    gap_quiet: float
    gap_harassed: float
    late_quiet: float
    late_harassed: float
    megabytes_quiet: float
    megabytes_most: float
    faults: list[str]


@contextmanager
def hostile_process(port: int, seed: int) -> Iterator[tuple[Any, Any]]:
    """Run hostile clients in a process. Yield what lets them go, and what they have seen."""
    context = mp.get_context("spawn")
    going, ended, seen = context.Event(), context.Event(), context.Queue()
    process = context.Process(target=harass, args=(port, seed, going, ended, seen), daemon=True)
    process.start()
    try:
        yield going, seen
    finally:
        ended.set()
        going.set()
        process.join(PATIENCE)
        process.kill()


def run(seconds: float, seed: int) -> Outcome:
    """Serve honest and hostile clients for so long. Return how it went."""
    with tempfile.TemporaryDirectory(prefix="hostile-") as name:
        server = ServerProcess(Path(name))
        try:
            honest = Honest(server.port, honest_requests())
            honest.learn()
            acts, memory, faults = _take_turns(server, honest, seconds, seed)
        finally:
            code = server.end()
        faults += [f"ended with {code}"] * (code != 128 + signal.SIGTERM)
        faults += [line.strip() for line in server.lines if re.search("Traceback|lost|restart", line)]
        faults += [f"left behind: {place}" for place in server.processes()]
    return _outcome(seconds, honest, acts, memory, faults)


def _take_turns(
    server: ServerProcess, honest: Honest, seconds: float, seed: int
) -> tuple[dict[str, Counter[str]], list[float], list[str]]:
    """Let hostile clients come and go. Return counts of statuses by act, megabytes at each look, and faults."""
    threads = [threading.Thread(target=honest.go_on, args=(client,)) for client in range(HONEST)]
    acts: dict[str, Counter[str]] = {act.__name__: Counter() for act in ACTS}
    memory, faults = list[float](), list[str]()
    with hostile_process(server.port, seed) as (going, seen):
        for thread in threads:
            thread.start()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for harassed, length in ((False, QUIET), (True, HARASSED)):
                (going.set if harassed else going.clear)()
                time.sleep(0 if harassed else 0.5)  # what was begun ends
                honest.harassed = harassed
                until = time.monotonic() + length
                while time.monotonic() < until:
                    time.sleep(1.0)
                    memory.append(server.megabytes())
                    faults += [] if server.healthy() else ["/health did not say 200"]
                faults += _count(seen, acts)  # a process whose queue is full does not end
            print(f"\r{max(0, end - time.monotonic()):.0f} s left, {honest.texts} texts", end="", file=sys.stderr)
        print(file=sys.stderr)
        honest.ended = True
        for thread in threads:
            thread.join(PATIENCE)
    return acts, memory, [*faults, *_count(seen, acts)]


def _count(seen: Any, acts: dict[str, Counter[str]]) -> list[str]:
    """Count what hostile clients have seen. Return the statuses that an act may not get."""
    faults = []
    while not seen.empty():
        act, status, fits = seen.get()
        acts[act][str(status)] += 1
        faults += [] if fits else [f"{act} got {status}"]
    return faults


def _outcome(
    seconds: float, honest: Honest, acts: dict[str, Counter[str]], memory: list[float], faults: list[str]
) -> Outcome:
    """Return the outcome, and count a bound that is not held as a fault."""
    (quiet, late_quiet), (harassed, late_harassed) = (_gaps(honest.gaps[turn]) for turn in (False, True))
    first, most = max(memory[: int(QUIET)]), max(memory)
    faults += honest.wrong
    faults += [f"gap {harassed:.1f} ms, {quiet:.1f} in quiet"] * (harassed > SLOWER * quiet)
    faults += [f"{most:.0f} MB, {first:.0f} in quiet"] * (most > first + MOST_MEGABYTES)
    faults += [f"{name} was never done" for name, statuses in acts.items() if not statuses]
    return Outcome(
        seconds=round(seconds),
        acts={name: dict(statuses.most_common()) for name, statuses in acts.items()},
        texts=honest.texts,
        refused=honest.refused,
        gap_quiet=round(quiet, 1),
        gap_harassed=round(harassed, 1),
        late_quiet=round(late_quiet, 1),
        late_harassed=round(late_harassed, 1),
        megabytes_quiet=round(first),
        megabytes_most=round(most),
        faults=faults,
    )


def _gaps(seconds: list[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile in milliseconds."""
    return 1e3 * median(seconds), 1e3 * quantiles(seconds, n=100)[98]


def table(outcome: Outcome) -> str:
    """Return the counts of statuses by act, and the figures of honest clients."""
    lines = [f"{'act':14} {'times':>6}  statuses"]
    for name, statuses in outcome.acts.items():
        shown = ", ".join(f"{status} {count}" for status, count in statuses.items())
        lines.append(f"{name:14} {sum(statuses.values()):6}  {shown}")
    lines += [
        f"{outcome.texts} honest texts, {outcome.refused} asked again later",
        f"gap: {outcome.gap_quiet} ms in quiet, {outcome.gap_harassed} harassed "
        f"(99 of 100: {outcome.late_quiet}, {outcome.late_harassed})",
        f"memory: {outcome.megabytes_quiet:.0f} MB in quiet, at most {outcome.megabytes_most:.0f}",
    ]
    return "\n".join(lines)


def main() -> None:
    """Run, print a table, and fail on any fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="also write a JSON")
    options = parser.parse_args()
    outcome = run(options.seconds, options.seed)
    print(table(outcome))
    print("\n".join(f"fault: {fault}" for fault in outcome.faults[:50]))
    if options.out:
        command = shlex.join(["python", "-m", "tools.hostile", *sys.argv[1:]])
        report = {"command": command, "machine": machine(), **asdict(outcome)}
        options.out.write_text(json.dumps(report, indent=2) + "\n")
    sys.exit(bool(outcome.faults))


if __name__ == "__main__":
    main()
