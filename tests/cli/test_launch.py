"""Ranks on this machine: errors come back, and nobody is left behind."""

import gc
import inspect
import multiprocessing
import os
import platform
import resource
import signal
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import attnmesh as am
from attnmesh.cli import launch
from attnmesh.cli.launch import LaunchError, run_on_ranks
from attnmesh.errors import ShapeError
from attnmesh.runtime.processes import RunningProcess
from attnmesh.runtime.world import WORLD
from tests.support.ranks.pool import on_each_rank


@on_each_rank
def return_own_rank() -> int:
    return dist.get_rank()


@on_each_rank
def refuse() -> None:
    raise ValueError(f"no, says {dist.get_rank()}")


@on_each_rank
def foresee() -> None:
    if dist.get_rank() == 1:
        raise ShapeError("it", "this", "that", "mend it")
    dist.barrier()


@on_each_rank
def die() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@on_each_rank
def die_while_sending() -> None:
    """End rank 1 in the middle of a message."""
    if dist.get_rank() == 1:
        pipe = next(info.frame.f_locals["pipe"] for info in inspect.stack() if info.function == "run_work")
        os.write(pipe.fileno(), struct.pack("!i", 1000) + b"begun")
        os.kill(os.getpid(), signal.SIGKILL)


@on_each_rank
def die_beside_another() -> None:
    """End rank 1 beside a rank that notices nothing."""
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


@on_each_rank
def die_behind_another() -> None:
    """End rank 1 only after rank 0 has raised."""
    if dist.get_rank() == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("connection reset by peer")


@on_each_rank
def send_word(send: Callable[[object], None], word: str) -> str:
    send((dist.get_rank(), word))
    return word


@on_each_rank
def hang() -> None:
    os.write(1, f"{os.getpid()}\n".encode())  # at once: two ranks write here
    time.sleep(600)


def test_ranks_are_started_and_their_results_come_back() -> None:
    assert run_on_ranks(2, return_own_rank) == [0, 1]


def test_messages_of_ranks_arrive() -> None:
    messages: list[object] = []
    assert run_on_ranks(2, send_word, "well", on_message=messages.append) == ["well", "well"]
    assert sorted(messages) == [(0, "well"), (1, "well")]  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("function", "error", "said"),
    [
        (refuse, LaunchError, "no, says"),
        (foresee, ShapeError, "it: expected this, given that. Fix: mend it"),
        (die, LaunchError, "rank 1 was ended by SIGKILL before it was done"),
        (die_while_sending, LaunchError, "rank 1 was ended by SIGKILL before it was done"),
        (die_behind_another, LaunchError, "rank 1 was ended by SIGKILL before it was done"),
    ],
)
def test_the_first_error_ends_all(function: Callable[[], None], error: type[Exception], said: str) -> None:
    start = time.monotonic()
    with pytest.raises(error, match=said):
        run_on_ranks(2, function)
    assert time.monotonic() - start < 120, "the others are waited for"


def test_a_death_waits_for_no_other_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GRACE_PERIOD", 200.0)
    start = time.monotonic()
    with pytest.raises(LaunchError, match="rank 1 was ended by SIGKILL before it was done"):
        run_on_ranks(2, die_beside_another)
    assert time.monotonic() - start < 150


def test_an_error_that_nobody_waits_for_is_not_raised_again() -> None:
    """As of the last rank, where another one's end was seen before: its process would print a traceback."""
    ours, theirs = multiprocessing.Pipe()
    ours.close()

    def enter() -> None:
        raise RuntimeError("a connection was lost")

    launch.run_work(theirs, enter, launch.RankWork(bool, (), sends=False))
    theirs.close()


def test_a_deadline_ends_all() -> None:
    with pytest.raises(LaunchError, match=r"ranks \[0, 1\] did not answer within 1 s"):
        run_on_ranks(2, time.sleep, 600, seconds=1)


@pytest.mark.parametrize(
    "end",
    [
        signal.SIGKILL,
        *(pytest.param(end, marks=pytest.mark.long) for end in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)),
    ],
)
def test_ranks_leave_with_the_one_that_started_them(end: signal.Signals, tmp_path: Path) -> None:
    work = "from attnmesh.cli.launch import run_on_ranks; from tests.cli.test_launch import hang; run_on_ranks(2, hang)"
    # Under nohup the hangup is ignored.
    reset = f"import signal; signal.signal({end:d}, signal.SIG_DFL)\n" if end == signal.SIGHUP else ""
    code = f"{reset}if __name__ == '__main__': {work}"
    silent: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], **silent, env=environment) as starter:
        assert starter.stdout is not None
        ranks = [int(starter.stdout.readline()) for _ in range(2)]
        starter.send_signal(end)
        try:
            starter.wait(timeout=30)
        finally:
            starter.kill()
        deadline = time.monotonic() + 30
        while any(RunningProcess.of(rank).is_alive() for rank in ranks):
            assert time.monotonic() < deadline, "ranks are left behind"
            time.sleep(0.05)
    if end in (signal.SIGTERM, signal.SIGHUP):
        assert starter.returncode == 128 + end
    if end != signal.SIGKILL:
        assert not [*tmp_path.iterdir()]


INTERRUPTED = """
import os, signal
from multiprocessing import forkserver
from attnmesh.cli.launch import run_on_ranks

start = forkserver.ensure_running

def interrupted():
    os.kill(os.getpid(), signal.SIGINT)
    start()

forkserver.ensure_running = interrupted
try:
    run_on_ranks(1, os.getpid)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux")
def test_an_interrupt_while_the_forkserver_starts_is_not_lost() -> None:
    words = [sys.executable, "-W", "ignore", "-c", INTERRUPTED]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")


STARTED = """
import os, signal
from multiprocessing import forkserver
from attnmesh.cli.launch import run_on_ranks

read, ranks = forkserver.read_signed, []

def interrupted(sentinel):  # the rank runs, and the process that starts it does not yet have its id
    ranks.append(read(sentinel))
    if len(ranks) == 1:
        os.kill(os.getpid(), signal.SIGINT)
    return ranks[-1]

forkserver.read_signed = interrupted
try:
    run_on_ranks(2, os.getpid)
except KeyboardInterrupt:
    print(os.path.exists(f"/proc/{ranks[0]}"))
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux")
def test_a_rank_that_starts_during_an_interrupt_is_ended() -> None:
    words = [sys.executable, "-W", "ignore", "-c", STARTED]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


def test_ranks_have_the_threads_they_are_given() -> None:
    assert run_on_ranks(1, torch.get_num_threads, threads=2) == [2]


@on_each_rank
def end_groups() -> dict[str, bool]:
    """Whether the groups of a mesh that attention has seen are gone once they are destroyed, and forgotten."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("queries", "keys"))
    q = torch.randn(1, 2, 8, 8)
    am.attention(q, q, q, mesh=mesh, layout=am.Zigzag())
    group = mesh.get_group("keys")
    seen = weakref.ref(group)
    dist.destroy_process_group(group)
    del group, mesh
    gc.collect()
    held = seen() is not None
    WORLD.clear_caches()
    return {"held by caches": held, "gone without them": seen() is None}


def test_no_group_outlives_python() -> None:
    for right in run_on_ranks(4, end_groups):
        assert right == dict.fromkeys(right, True)


@on_each_rank
def count_pages_of_layers() -> int:
    """Return the new pages of memory that a rank waits for in the last 10 layers of a model, each of 96 MB."""
    before = 0
    for layer in range(20):
        tensors = [torch.empty(24_000_000 // 4).fill_(layer) for _ in range(4)]
        if layer == 9:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are those of glibc")
def test_ranks_keep_the_memory_that_a_layer_frees() -> None:
    (pages,) = run_on_ranks(1, count_pages_of_layers, spawned=True)
    assert pages * resource.getpagesize() < 96_000_000
