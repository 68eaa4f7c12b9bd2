"""A rank waits for gloo's threads before Python exits, and does not abort."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attnmesh.runtime import shutdown
from attnmesh.runtime.shutdown import wait_until_idle

LATE = """
import hashlib, sys, threading, time, weakref
import torch
import torch.distributed as dist

if sys.argv[1] == "ours":
    import attnmesh
dist.init_process_group("gloo")
begun, much = threading.Event(), bytes(1 << 28)


def late():
    begun.set()
    hashlib.sha256(much)  # without Python's lock, which it needs again afterwards


tensor = torch.ones(4)
weakref.finalize(tensor, late).atexit = False
dist.barrier()
time.sleep(0.5 * dist.get_rank())  # the first rank's thread of gloo is the last to have the tensor
dist.all_reduce(tensor, async_op=True)
del tensor
begun.wait(60)
print("done", flush=True)
"""
"""A script in which a gloo thread is still releasing a tensor when Python exits."""

linux = pytest.mark.skipif(not shutdown.TASKS.is_dir(), reason="threads are looked at on Linux alone")


def ends(*arguments: str) -> list[tuple[int | None, str, str]]:
    """Return the exit code, stdout and stderr of two ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", LATE, *arguments],
            env=os.environ | place | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        texts = [process.communicate(timeout=90) for process in started]
        return [(process.returncode, *text) for process, text in zip(started, texts, strict=True)]
    finally:
        for process in started:
            process.kill()


@linux
def test_a_rank_with_late_threads_exits_with_0() -> None:
    for code, out, error in ends("ours"):
        assert (code, out) == (0, "done\n"), error


@linux
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python has such threads wait")
@pytest.mark.long
def test_pytorch_aborts_without_the_wait() -> None:
    """If this fails, the wait is no longer needed."""
    assert -signal.SIGABRT in [code for code, _, _ in ends("theirs")]


def task(folder: Path, number: int, name: str, state: str, turns: int) -> None:
    """Write the status file of a thread."""
    text = f"Name:\t{name}\nState:\t{state}\nvoluntary_ctxt_switches:\t{turns}\nnonvoluntary_ctxt_switches:\t0\n"
    (folder / str(number)).mkdir(exist_ok=True)
    (folder / str(number) / "status").write_text(text)


@pytest.mark.parametrize(
    ("first", "second", "rest"),
    [
        (("S (sleeping)", 1), ("S (sleeping)", 1), True),
        (("R (running)", 1), ("R (running)", 1), False),
        (("S (sleeping)", 1), ("S (sleeping)", 2), False),  # it has run between
        (("S (sleeping)", 1), ("D (disk sleep)", 1), False),
    ],
)
def test_threads_are_idle_if_they_sleep_at_two_polls(
    first: tuple[str, int], second: tuple[str, int], rest: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    polls = iter([first, second])

    def sleep(_: float) -> None:
        task(tmp_path, 8, "pt_gloo_runloop", *next(polls))

    monkeypatch.setattr(shutdown, "TASKS", tmp_path)
    task(tmp_path, 7, "python", "R (running)", 1)
    task(tmp_path, 9, "pt_gloo_runloop", "S (sleeping)", 5)
    sleep(0.0)
    monkeypatch.setattr(time, "sleep", sleep)
    assert wait_until_idle(0.0) == rest


def test_without_gloo_threads_there_is_no_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(_: float) -> None:
        raise AssertionError("it waited")

    monkeypatch.setattr(time, "sleep", sleep)
    for folder in (tmp_path, tmp_path / "missing"):
        monkeypatch.setattr(shutdown, "TASKS", folder)
        assert wait_until_idle()
