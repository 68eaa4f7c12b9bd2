"""Teams of gloo ranks, each started once a test run: a test sends a function and gets every rank's answer.

    assert pool.run(4, my_rank) == [0, 1, 2, 3]

The function is one that the ranks can import, by the name of its module, and has the mark `on_each_rank`. A rank that
raises has its error raised here, with the rank in a note; ranks that have not answered at the deadline end the team,
and the stack of each is shown. The next test that asks for a team of that size gets a new one.
"""

import ctypes
import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

from attnmesh.cli.launch import Processes

Sent = TypeVar("Sent", bound=Callable[..., Any])

PRELOADED = [
    "tests.support.process.gc_settings",
    "tests.support.process.compiler_settings",
    "tests.support.emulation.interpreted",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "transformers.generation",
    "transformers.trainer",
    "attnmesh.diffusers",
    "tests.support.emulation.emulated_nccl",
    "tests.support.models.families",
    "tests.support.truth.mesh_problems",
    "tests.support.models.tiny_decoder",
    "tests.support.ranks.worlds",
    "attnmesh.cli.generate_worker",
    "benchmarks.netns",
    *(f"transformers.models.{family}.modeling_{family}" for family in ("gemma3", "gpt_oss", "llama", "mistral")),
    *(f"transformers.models.{family}.modeling_{family}" for family in ("qwen2", "qwen3")),
    "tests.support.process.warm_up",
]
"""Modules that the process of which ranks are forked imports once: each rank would take seconds for each module."""

SIZES = (1, 2, 3, 4, 6, 8)
DEADLINE = 180.0
"""Seconds after which ranks hang: three times what the slowest function takes on a busy machine."""
GRACE = 5.0
"""Seconds that the other ranks get after one has raised: they may be waiting for it, and would until the deadline."""


def on_each_rank(function: Sent) -> Sent:
    """Mark a function that tests send to ranks, so that readers see where it runs. No other is sent."""
    function.runs_on_each_rank = True  # type: ignore[attr-defined]
    return function


def check_marked(function: Callable[..., Any]) -> None:
    """Raise TypeError unless a function has the mark."""
    if not getattr(function, "runs_on_each_rank", False):
        name = getattr(function, "__name__", function)
        raise TypeError(f"{name}: expected a function that runs on ranks. Fix: decorate it with @on_each_rank.")


class Lost(RuntimeError):
    """Some ranks did not answer in time, died, or made groups that others did not."""


@dataclass
class Rank:
    """One process of a team, as the test run sees it."""

    process: Any
    connection: Connection
    stack: Path


class Team:
    """A process group of `size` ranks, waiting for functions."""

    def __init__(self, size: int, backend: str) -> None:
        self.processes = Processes("spawn" if backend == "nccl" else "forkserver")
        if self.processes.forked:
            self.processes.preload(PRELOADED)
        self.stops = self.processes.forked and sys.platform == "linux"
        self.folder = tempfile.TemporaryDirectory(prefix="attnmesh-team-")
        self.ranks = [self._start(rank, size, backend) for rank in range(size)]

    def _start(self, rank: int, size: int, backend: str) -> Rank:
        folder = Path(self.folder.name)
        stack = folder / f"stack-{rank}"
        return Rank(*self.processes.start(_serve, rank, size, backend, stack, folder / "store"), stack)

    def ask(self, function: Callable[..., Any], arguments: tuple[Any, ...], deadline: float) -> list[Any]:
        """Return each rank's result or exception. The ranks are stopped (SIGSTOP) before and after.

        Each group of gloo has threads that wake a hundred times a second. Of six teams they take half of two cores.
        """
        self._signal(signal.SIGCONT)
        answers = self._answers(function, arguments, deadline)
        self._signal(signal.SIGSTOP)
        return answers

    def _signal(self, number: signal.Signals) -> None:
        for rank in self.ranks if self.stops else ():
            with suppress(ProcessLookupError):  # a rank that has died is reported below, by its missing answer
                os.kill(rank.process.pid, number)

    def _answers(self, function: Callable[..., Any], arguments: tuple[Any, ...], deadline: float) -> list[Any]:
        for rank in self.ranks:
            rank.connection.send((function, arguments))
        answers: dict[int, Any] = {}
        groups: set[int] = set()
        end = time.monotonic() + deadline
        while len(answers) < len(self.ranks) and (left := end - time.monotonic()) > 0:
            pending = {rank.connection: number for number, rank in enumerate(self.ranks) if number not in answers}
            for connection in wait(list(pending), timeout=left):
                number = pending[connection]
                try:
                    made, data = connection.recv()
                    answers[number] = pickle.loads(data)
                    groups.add(made)
                except (EOFError, OSError):  # the other: it died while it sent
                    raise Lost(self._report(function, answers)) from None
                if isinstance(answers[number], BaseException):
                    end = min(end, time.monotonic() + GRACE)
        if len(answers) < len(self.ranks):
            raise Lost(self._report(function, answers))
        if len(groups) > 1:
            raise Lost(f"{function.__name__}: ranks made {groups} process groups, so that the next one would hang")
        return [answers[number] for number in range(len(self.ranks))]

    def _report(self, function: Callable[..., Any], answers: dict[int, Any]) -> str:
        """Return the answer of each rank that has answered, and the stack of each other rank."""
        lines = [f"{function.__name__}: {len(self.ranks) - len(answers)} of {len(self.ranks)} ranks did not answer"]
        for number, rank in enumerate(self.ranks):
            said = f"answered {answers[number]!r}" if number in answers else f"stands at\n{_stack(rank)}"
            lines.append(f"rank {number} {said}")
        return "\n".join(lines)

    def close(self) -> None:
        """End every process of the team."""
        self.processes.end()
        self.folder.cleanup()


class Pool:
    """The teams of one test run: of gloo, or of NCCL where each rank has a GPU."""

    def __init__(self, backend: str = "gloo") -> None:
        self.backend = backend
        self._teams: dict[int, Team] = {}

    def run(self, size: int, function: Callable[..., Any], *arguments: Any, deadline: float = DEADLINE) -> list[Any]:
        """Every rank's result; the first error of a rank is raised."""
        answers = self.ask(size, function, *arguments, deadline=deadline)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def ask(self, size: int, function: Callable[..., Any], *arguments: Any, deadline: float = DEADLINE) -> list[Any]:
        """Every rank's result or error, as a list."""
        check_marked(function)
        if size not in self._teams:
            self._teams[size] = Team(size, self.backend)
        try:
            return self._teams[size].ask(function, arguments, deadline)
        except BaseException:  # also the test's own time-out: nobody knows any more what the ranks are at
            self._teams.pop(size).close()
            raise

    def close(self) -> None:
        """End all teams."""
        while self._teams:
            self._teams.popitem()[1].close()


def _stack(rank: Rank) -> str:
    """Return the stack of each thread of a rank, also if the rank is stuck in C."""
    rank.process.join(timeout=0.5)
    if not rank.process.is_alive():
        return f"(dead, exit code {rank.process.exitcode})"
    os.kill(rank.process.pid, signal.SIGUSR1)
    for _ in range(50):
        time.sleep(0.02)
        if text := rank.stack.read_text():
            return text
    return "(no answer to the signal)"


def _serve(rank: int, size: int, backend: str, stack: Path, store: Path, connection: Connection) -> None:
    """A rank's life: join the group, then answer until the team is closed."""
    import torch

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a stopped rank sees no end of its pipe
    with stack.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        torch.set_num_threads(1)
        if backend == "nccl":
            torch.cuda.set_device(rank)
        patience = timedelta(minutes=10)  # the deadline is the pool's affair
        torch.distributed.init_process_group(backend, f"file://{store}", rank=rank, world_size=size, timeout=patience)
        while True:
            call = connection.recv()
            torch.manual_seed(0)  # each draws the same numbers on all ranks, whichever ran before it
            answer = _answer(rank, *call)
            connection.send((torch.distributed.distributed_c10d._world.group_count, answer))


def _answer(rank: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps(function(*arguments))
    except Exception as error:
        error.add_note(f"on rank {rank}:\n{traceback.format_exc()}")
        try:
            pickle.loads(data := pickle.dumps(error))
        except Exception:
            data = pickle.dumps(RuntimeError(f"on rank {rank}:\n{traceback.format_exc()}"))
        return data
