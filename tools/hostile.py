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
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Any

from attnmesh.runtime.machine import machine
from tests.support.serving.fake_engine import save_tiny
from tools.hostile_clients import ACTS, MODEL, PATIENCE, connect, harass, head, status_of

HONEST = 4
"""Clients at a time."""
QUIET, HARASSED = 4.0, 11.0
"""Seconds of a turn without hostile clients, and of one with them."""
MOST_MEGABYTES = 400
"""More memory than in the first quiet turn: 8 bodies of 1 MB while they are parsed, and kept prefixes."""
SLOWER = 3.0
"""An honest client's gap, at most, as a multiple of the one in quiet."""


@dataclass(frozen=True)
class Pauses:
    """The longest pauses of a client between two requests, in seconds."""

    honest: float = 0.0
    hostile: float = 0.3


# --- honest clients ---


@dataclass
class Honest:
    """Clients that stream the same requests again and again."""

    port: int
    requests: list[dict[str, Any]]
    pause: float
    """Seconds from one text of a client to its next, at most."""
    expected: list[str] = field(default_factory=list)
    gaps: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    """Seconds between two pieces of a stream, in quiet and under harassment."""
    wrong: list[str] = field(default_factory=list)
    texts: int = 0
    refused: int = 0
    harassed: bool = False
    ended: threading.Event = field(default_factory=threading.Event)

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
        while not self.ended.wait(random.uniform(0.0, self.pause)):
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
        {"model": MODEL, "prompt": prompt, "max_tokens": 24, "temperature": number % 2, "seed": number}
        for number, prompt in enumerate(prompts)
    ]


# --- the server ---


class ServerProcess:
    """`attnmesh serve` on two ranks, as a user starts it."""

    def __init__(self, folder: Path) -> None:
        model = save_tiny(folder / "model", num_hidden_layers=1)
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
    """How the server did: counts of what was done, honest texts, gaps in milliseconds, memory, and faults.

    A gap that is too long is in `slow`, as other programs of the machine can cause it.
    """

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
    slow: list[str]


@contextmanager
def hostile_process(port: int, seed: int, pause: float) -> Iterator[tuple[Any, Any]]:
    """Run hostile clients in a process. Yield what lets them go, and what they have seen."""
    context = mp.get_context("spawn")
    going, ended, seen = context.Event(), context.Event(), context.Queue()
    process = context.Process(target=harass, args=(port, seed, pause, going, ended, seen), daemon=True)
    process.start()
    try:
        yield going, seen
    finally:
        ended.set()
        going.set()
        process.join(PATIENCE)
        process.kill()


def run(seconds: float, seed: int, pauses: Pauses) -> Outcome:
    """Serve honest and hostile clients for `seconds`. Return the outcome."""
    with tempfile.TemporaryDirectory(prefix="hostile-") as name:
        server = ServerProcess(Path(name))
        try:
            honest = Honest(server.port, honest_requests(), pauses.honest)
            honest.learn()
            acts, memory, faults = _take_turns(server, honest, seconds, seed, pauses.hostile)
        finally:
            code = server.end()
        faults += [f"ended with {code}"] * (code != 128 + signal.SIGTERM)
        faults += [line.strip() for line in server.lines if re.search("Traceback|lost|restart", line)]
        faults += [f"left behind: {place}" for place in server.processes()]
    return _outcome(seconds, honest, acts, memory, faults)


def _take_turns(
    server: ServerProcess, honest: Honest, seconds: float, seed: int, pause: float
) -> tuple[dict[str, Counter[str]], list[float], list[str]]:
    """Let hostile clients come and go. Return counts of statuses by act, megabytes at each look, and faults.

    The first turn with them lasts until each act is done.
    """
    threads = [threading.Thread(target=honest.go_on, args=(client,)) for client in range(HONEST)]
    acts: dict[str, Counter[str]] = {act.__name__: Counter() for act in ACTS}
    memory, faults = list[float](), list[str]()
    with hostile_process(server.port, seed, pause) as (going, seen):
        for thread in threads:
            thread.start()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for harassed, length in ((False, QUIET), (True, HARASSED)):
                (going.set if harassed else going.clear)()
                time.sleep(0 if harassed else 0.5)  # what was begun ends
                honest.harassed = harassed
                until = time.monotonic() + length
                patient = until + PATIENCE * harassed
                while (now := time.monotonic()) < until or (now < patient and not all(acts.values())):
                    time.sleep(1.0)
                    memory.append(server.megabytes())
                    faults += [] if server.healthy() else ["/health did not say 200"]
                    faults += _count(seen, acts)  # a process whose queue is full does not end
            print(f"\r{max(0, end - time.monotonic()):.0f} s left, {honest.texts} texts", end="", file=sys.stderr)
        print(file=sys.stderr)
        honest.ended.set()
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
        slow=[f"gap {harassed:.1f} ms, {quiet:.1f} in quiet"] * (harassed > SLOWER * quiet),
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
    """Run, print a table, and fail on any fault and on long gaps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--pauses", type=float, nargs=2, default=(0.0, 0.3), help="of honest and hostile clients, at most"
    )
    parser.add_argument("--out", type=Path, help="also write a JSON")
    options = parser.parse_args()
    outcome = run(options.seconds, options.seed, Pauses(*options.pauses))
    print(table(outcome))
    faults = outcome.faults + outcome.slow
    print("\n".join(f"fault: {fault}" for fault in faults[:50]))
    if options.out:
        command = shlex.join(["python", "-m", "tools.hostile", *sys.argv[1:]])
        report = {"command": command, "machine": machine(), **asdict(outcome)}
        options.out.write_text(json.dumps(report, indent=2) + "\n")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
