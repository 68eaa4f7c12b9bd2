"""Worlds of ranks that repeat a workload until a fault stops them, on this machine or on emulated hosts.

An agent process keeps the store, as torchrun's does, or else the first rank keeps it. Ranks find the store by the
address and port in their environment. All ranks are processes of this machine, each in its host's network namespace,
so that the process that started them can inject faults.
"""

import ctypes
import datetime
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import attnmesh as am
from attnmesh.cli.launch import Processes, leave_with_parent
from attnmesh.errors import RankFailure
from attnmesh.mesh.shapes import AXES, Shape
from benchmarks.netns import FIRST, LINK, Hosts, address, links
from tests.support.ranks.workloads import WORKLOADS
from tests.support.truth.mesh_problems import named_mesh

CLONE_NEWNET = 0x40000000
"""Type of namespace that `setns` enters."""

STEPS = 3
"""Correct steps after the fault before a rank reports "right"."""

TIMEOUT = datetime.timedelta(minutes=5)
"""Timeout of the process groups, longer than any run."""

START_TIMEOUT = 60.0
"""Seconds in which ranks have to begin their workload."""


@dataclass(frozen=True)
class Report:
    """Message of a rank: a kind of outcome or error, lost ranks, and monotonic seconds that all ranks share."""

    kind: str
    ranks: tuple[int, ...] = ()
    step: str = ""
    axis: str = ""
    text: str = ""
    saved: int = 0
    refused: str = ""
    seconds: float = field(default_factory=time.monotonic)


class Testbed:
    """Machine or emulated hosts for ranks. Every process started on it ends with the `with` block."""

    def __init__(self, world: int | Hosts, agent: bool = True) -> None:
        self.world, self.agent, self.first, self.port = world, agent, None, 0
        self._processes = Processes()
        if isinstance(world, Hosts):
            lines = "\n".join([*links(world), "echo made", "exec sleep infinity"])
            self.first = subprocess.Popen(
                [*FIRST, "sh", "-c", lines], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
            )

    def __enter__(self) -> "Testbed":
        try:
            if self.first is not None and self.first.stdout is not None:
                assert self.first.stdout.readline() == "made\n", "hosts could not be made"
            keeper, pipe = self.start(0, _keep_store, self.address, 0 if self.first is None else 29500)
            self.port = pipe.recv()
            if not self.agent:  # the process only found a free port
                keeper.kill()
                keeper.join()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.end()
        if self.first is not None:
            self.first.kill()  # ends the hosts too
            self.first.communicate()

    @property
    def address(self) -> str:
        """Address of the store."""
        return "127.0.0.1" if self.first is None else address(0)

    def host(self, rank: int) -> int:
        """Return the host of a rank."""
        return rank // self.world.ranks if isinstance(self.world, Hosts) else 0

    def start(self, host: int, function: Callable[..., None], *arguments: Any) -> tuple[Any, Connection]:
        """Start a process on a host. Return it and a pipe, whose other end is the function's last argument."""
        self._processes.preload(["tests.support.emulation.interpreted", "torch._dynamo", "tests.support.ranks.worlds"])
        network = "" if self.first is None else f"/proc/{self.first.pid}/root/run/netns/h{host}"
        return self._processes.start(_run_in_network, network, function, *arguments)

    def shell(self, *lines: str) -> None:
        """Run lines in a shell that has the switch's network and the hosts' names."""
        command = ["nsenter", "-t", str(self.first and self.first.pid), "-n", "-m", "sh", "-ec", "\n".join(lines)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


@dataclass(frozen=True)
class Job:
    """Workload of the ranks of a mesh. Without an agent the first rank keeps the store."""

    shape: Shape
    workload: str
    folder: Path
    deadline: float
    late: tuple[int, float] = (0, 0.0)  # a rank, and the seconds by which it begins late
    jump: float = 0.0  # seconds by which a clock jumps on SIGUSR1
    agent: bool = True


class Ranks:
    """Processes of one job on a testbed."""

    def __init__(self, testbed: Testbed, job: Job) -> None:
        self.testbed, self.job = testbed, job
        store = testbed.address, testbed.port, LINK if testbed.first is not None else "lo"
        started = [testbed.start(testbed.host(rank), _run_rank, job, rank, store) for rank in range(job.shape.ranks)]
        self.processes, self.pipes = [process for process, _ in started], [pipe for _, pipe in started]

    def kill(self, rank: int, how: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a rank's process."""
        os.kill(self.processes[rank].pid, how)

    def announce_fault(self, ranks: Sequence[int]) -> None:
        """Send ranks the message that the fault has been injected."""
        for rank in ranks:
            with suppress(OSError):
                self.pipes[rank].send("fault injected")

    def receive(self, ranks: Sequence[int], seconds: float) -> dict[int, Report]:
        """Return the next reports of these ranks, by rank, as far as they arrive in time."""
        reports: dict[int, Report] = {}
        end = time.monotonic() + seconds
        while len(reports) < len(ranks):
            waiting: dict[Any, int] = {self.pipes[rank]: rank for rank in ranks if rank not in reports}
            ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                try:
                    reports[waiting[pipe]] = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):  # the other: it died while it sent
                    reports[waiting[pipe]] = Report("died")
        return reports


def _run_in_network(network: str, function: Callable[..., None], *arguments: Any) -> None:
    """Call the function in a network namespace and exit, at the latest when the parent process ends."""
    if network:
        with Path(network).open() as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # errors come as reports; gloo and the store would print them as well
    torch.set_num_threads(1)
    threading.Thread(target=leave_with_parent, daemon=True).start()
    with suppress(OSError):  # the other end of the pipe may be closed
        function(*arguments)
    os._exit(0)


def _keep_store(host: str, port: int, pipe: Connection) -> None:
    """Keep a store and send its port, as torchrun's agent on the first host does."""
    store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    signal.pause()


def _run_rank(job: Job, rank: int, store: tuple[str, int, str], pipe: Connection) -> None:
    """Repeat the workload until it fails, and send a report of the failure."""
    progress: dict[str, Any] = {"saved": 0, "refused": ""}
    signal.signal(signal.SIGUSR1, lambda *_: _jump(job.jump))
    if rank == job.late[0]:
        time.sleep(job.late[1])
    try:
        _init_process_group(job, rank, store)
        _repeat_workload(job, progress, pipe)
    except RankFailure as error:
        last = Report("RankFailure", error.ranks, error.step, error.axis, str(error), **progress)
    except BaseException as error:
        last = Report(type(error).__name__, text=str(error), **progress)
    else:
        last = Report("wrong", text="outputs differ from the first step", **progress)
    pipe.send(last)


def _init_process_group(job: Job, rank: int, store: tuple[str, int, str]) -> None:
    """Enter the world by the environment, as under torchrun; with an agent the store exists already."""
    names = "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"
    os.environ |= dict(zip(names, map(str, store), strict=True))
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(job.shape.ranks)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(job.agent)
    dist.init_process_group("gloo", timeout=TIMEOUT)


def _repeat_workload(job: Job, progress: dict[str, Any], pipe: Connection) -> None:
    """Return when a step differs from the first. Report the beginning, and `STEPS` right steps after a fault."""
    am.set_deadline(job.deadline)
    step = WORKLOADS[job.workload](named_mesh(job.shape, AXES), job.folder, progress)
    first = step()
    dist.barrier()
    pipe.send(Report("at work"))
    left: int | None = None
    while all(torch.equal(x, y) for x, y in zip(step(), first, strict=True)):
        if left is None:
            left = STEPS if pipe.poll() else None
        else:
            left -= 1
            if left == 0:
                pipe.send(Report("right", **progress))
            if left <= 0:  # other ranks may still need this one for their steps
                time.sleep(0.02)


def _jump(seconds: float) -> None:
    """Turn the wall clock of this process as Python reads it.

    The change covers `time.time`, `time.time_ns`, `time.clock_gettime` of the wall clock, and `datetime.datetime.now`.
    It does not cover `time.monotonic`, nor the clocks that C++ code such as gloo and the store reads.
    """
    now, now_ns, clock = time.time, time.time_ns, time.clock_gettime
    time.time = lambda: now() + seconds
    time.time_ns = lambda: now_ns() + int(seconds * 1e9)
    time.clock_gettime = lambda which: clock(which) + (seconds if which == time.CLOCK_REALTIME else 0.0)

    class Turned(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> "Turned":
            return super().now(tz) + datetime.timedelta(seconds=seconds)

    datetime.datetime = Turned  # type: ignore[misc]
