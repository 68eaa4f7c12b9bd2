"""Ranks that do the same work again and again, on this machine or on hosts made on it, until something is wrong.

As torchrun has it, the store is kept by an agent, a process of its own, on hosts by one on the first; or the first rank
keeps it. Ranks find it by the address and the port that their environment names. All are processes of this machine,
each in the network of its host, so that whoever started them can do them harm.
"""

import ctypes
import datetime
import multiprocessing as mp
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
from attnmesh.cli.launch import _leave_with_parent
from attnmesh.cli.netns import FIRST, LINK, Hosts, address, links
from attnmesh.errors import RankFailure
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.mesh_problems import named_mesh
from tests.support.works import WORKS

NEW_NETWORK = 0x40000000
"""What `setns` is told to enter: CLONE_NEWNET."""

STEPS = 3
"""Of the work that a rank has to do rightly after the harm before it says that it does."""

PATIENCE = datetime.timedelta(minutes=5)
"""Of the process groups: longer than anything here may take."""

START = 60.0
"""Seconds that ranks have to get to work."""


@dataclass(frozen=True)
class Said:
    """By a rank: what came, or what it raised, about whom; and when, in seconds of a clock that all ranks share."""

    kind: str
    ranks: tuple[int, ...] = ()
    step: str = ""
    axis: str = ""
    text: str = ""
    saved: int = 0
    refused: str = ""
    seconds: float = field(default_factory=time.monotonic)


class Ground:
    """Where ranks live; what was started here ends when the block does."""

    def __init__(self, world: int | Hosts, agent: bool = True) -> None:
        self.world, self.agent, self.first, self.port = world, agent, None, 0
        self._processes: list[Any] = []
        if isinstance(world, Hosts):
            lines = "\n".join([*links(world), "echo made", "exec sleep infinity"])
            self.first = subprocess.Popen(
                [*FIRST, "sh", "-c", lines], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
            )

    def __enter__(self) -> "Ground":
        try:
            if self.first is not None and self.first.stdout is not None:
                assert self.first.stdout.readline() == "made\n", "hosts could not be made"
            keeper, pipe = self.start(0, _keep_store, self.address, 0 if self.first is None else 29500)
            self.port = pipe.recv()
            if not self.agent:  # it has found a free port
                keeper.kill()
                keeper.join()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        if self.first is not None:
            self.first.kill()  # and with it the hosts
            self.first.communicate()

    @property
    def address(self) -> str:
        """Where the store is."""
        return "127.0.0.1" if self.first is None else address(0)

    def host(self, rank: int) -> int:
        """Where a rank lives."""
        return rank // self.world.ranks if isinstance(self.world, Hosts) else 0

    def start(self, host: int, function: Callable[..., None], *arguments: Any) -> tuple[Any, Connection]:
        """A process on a host, and a pipe to it, which the function gets last."""
        context: Any = mp.get_context("forkserver")
        context.set_forkserver_preload(["tests.support.interpreted", "torch._dynamo", "tests.support.worlds"])
        network = "" if self.first is None else f"/proc/{self.first.pid}/root/run/netns/h{host}"
        ours, theirs = context.Pipe()
        process = context.Process(target=_enter, args=(network, function, (*arguments, theirs)))
        process.start()
        theirs.close()
        self._processes.append(process)
        return process, ours

    def shell(self, *lines: str) -> None:
        """Run by a shell that sees the switch, and the hosts by their names."""
        asked = ["nsenter", "-t", str(self.first and self.first.pid), "-n", "-m", "sh", "-ec", "\n".join(lines)]
        subprocess.run(asked, check=True, stdin=subprocess.DEVNULL)


@dataclass(frozen=True)
class Job:
    """What ranks are asked to do: which work, on which mesh. One may be late, or have its clock jump when told to.

    Without an agent that keeps the store, the first rank does.
    """

    shape: Shape
    work: str
    folder: Path
    deadline: float
    late: tuple[int, float] = (0, 0.0)
    jump: float = 0.0
    agent: bool = True


class Ranks:
    """One job's processes on a ground."""

    def __init__(self, ground: Ground, job: Job) -> None:
        self.ground, self.job = ground, job
        place = ground.address, ground.port, LINK if ground.first is not None else "lo"
        everyone = range(job.shape.ranks)
        started = [ground.start(ground.host(rank), _live, job, rank, place) for rank in everyone]
        self.processes, self.pipes = [process for process, _ in started], [pipe for _, pipe in started]

    def kill(self, rank: int, how: signal.Signals = signal.SIGKILL) -> None:
        """Send a rank's process a signal."""
        os.kill(self.processes[rank].pid, how)

    def tell(self, ranks: Sequence[int]) -> None:
        """That the harm has been done."""
        for rank in ranks:
            with suppress(OSError):
                self.pipes[rank].send("harmed")

    def heard(self, ranks: Sequence[int], seconds: float) -> dict[int, Said]:
        """The next that these ranks say, of those that do in time."""
        said: dict[int, Said] = {}
        end = time.monotonic() + seconds
        while len(said) < len(ranks):
            waiting: dict[Any, int] = {self.pipes[rank]: rank for rank in ranks if rank not in said}
            ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                try:
                    said[waiting[pipe]] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    said[waiting[pipe]] = Said("died")
        return said


def _enter(network: str, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """A process's life: in the network of its host, and no longer than that of the one who started it."""
    if network:
        with Path(network).open() as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), NEW_NETWORK):
                raise OSError(ctypes.get_errno(), "setns")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what goes wrong is said; gloo and the store write of it as well
    torch.set_num_threads(1)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    with suppress(OSError):  # nobody may hear any more
        function(*arguments)
    os._exit(0)


def _keep_store(host: str, port: int, pipe: Connection) -> None:
    """As torchrun's process on the first host does."""
    store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    signal.pause()


def _live(job: Job, rank: int, place: tuple[str, int, str], pipe: Connection) -> None:
    """A rank works until something is wrong, and says what; told that the harm is done, also that all is right."""
    told: dict[str, Any] = {"saved": 0, "refused": ""}
    signal.signal(signal.SIGUSR1, lambda *_: _jump(job.jump))
    if rank == job.late[0]:
        time.sleep(job.late[1])
    try:
        _join(job, rank, place)
        _work(job, told, pipe)
    except RankFailure as error:
        last = Said("RankFailure", error.ranks, error.step, error.axis, str(error), **told)
    except BaseException as error:
        last = Said(type(error).__name__, text=str(error), **told)
    else:
        last = Said("wrong", text="another answer than before", **told)
    pipe.send(last)


def _join(job: Job, rank: int, place: tuple[str, int, str]) -> None:
    """The world that the environment names: with an agent, as under torchrun, its store is there already."""
    names = "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"
    os.environ |= dict(zip(names, map(str, place), strict=True))
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(job.shape.ranks)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(job.agent)
    dist.init_process_group("gloo", timeout=PATIENCE)


def _work(job: Job, told: dict[str, Any], pipe: Connection) -> None:
    am.set_deadline(job.deadline)
    step = WORKS[job.work](named_mesh(job.shape, AXES), job.folder, told)
    first = step()
    dist.barrier()
    pipe.send(Said("at work"))
    left: int | None = None
    while all(torch.equal(x, y) for x, y in zip(step(), first, strict=True)):
        if left is None:
            left = STEPS if pipe.poll() else None
        else:
            left -= 1
            if left == 0:
                pipe.send(Said("right", **told))
            if left <= 0:  # others may need this rank to get so far
                time.sleep(0.02)


def _jump(seconds: float) -> None:
    """Turn the wall clock as Python tells it to this process.

    Faked are `time.time`, `time.time_ns`, `time.clock_gettime` of the wall clock, and `now` of `datetime.datetime`. The
    clocks that C++ asks, gloo and the store among it, and `time.monotonic` are the system's.
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
