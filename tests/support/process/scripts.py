"""Scripts, run as `python` or `torchrun` runs them, by processes forked from one that has imported what they need."""

import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from attnmesh.cli.launch import Processes

DEADLINE = 200.0
"""Seconds after which a script hangs."""


def run_script(script: Path, *arguments: object, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """The output of all ranks, and the first exit code that is not 0; one rank has no environment of torchrun."""
    processes, words = Processes(), [str(script), *map(str, arguments)]
    with tempfile.TemporaryDirectory(prefix="attnmesh-script-") as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        paths = [Path(folder) / name for name in ("out", "error")]
        try:
            for rank in range(ranks):
                processes.start(_run, words, _environment(rank, ranks, port), *paths)
            end, started = time.monotonic() + DEADLINE, processes.started
            while any(process.is_alive() for process in started) and time.monotonic() < end:
                if any(process.exitcode for process in started):
                    break  # as torchrun does, end the others
                next((process for process in started if process.is_alive()), started[0]).join(timeout=0.2)
        finally:
            processes.end()
        code = next((process.exitcode for process in started if process.exitcode), 0)
        return subprocess.CompletedProcess(words, code, *(path.read_text() for path in paths))


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in place.items()} if ranks > 1 else {}


def _run(words: list[str], environment: dict[str, str], out: Path, error: Path, _: Connection) -> None:
    os.environ.update(environment)
    for number, path in ((1, out), (2, error)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
