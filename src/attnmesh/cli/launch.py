"""Ranks on this machine: start them, run one function on all, hear what they say meanwhile, and leave none behind."""

import multiprocessing as mp
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from attnmesh.errors import InputError, RankFailure

Say = Callable[[Any], None]
"""How a rank tells something before it is done."""

Work = tuple[Callable[..., Any], tuple[Any, ...], bool]
"""A function, its arguments, and whether it says things meanwhile."""

GRACE_PERIOD = 2.0
"""Seconds that the others get after one has failed: most fail with it, and what they say may tell more."""

TIMEOUT = timedelta(hours=1)
"""How long ranks wait for each other; one that dies is noticed at once, by whoever started it."""


class RankError(RuntimeError):
    """A rank failed in a way that it could not foresee, or died."""


def run_on_ranks(
    ranks: int,
    function: Callable[..., Any],
    *arguments: Any,
    seconds: float | None = 1800.0,
    threads: int = 1,
    gpus: bool = False,
    exact_memory: bool = False,
    heard: Say | None = None,
) -> list[Any]:
    """Each rank's result, from gloo ranks of so many threads each; the first error ends all and is raised here.

    With `gpus` each rank has a GPU of its own, and they speak NCCL. With `heard`, the function's first argument is a
    way to `say` things, which are heard here as they come. With `exact_memory`, memory goes back to the system when it
    is freed, so that the resident size tells what is held; that is slow, and not for timing. Whatever happens here, an
    interrupt included, all ranks are ended.
    """
    context: Any = mp.get_context("spawn" if exact_memory or gpus or sys.platform != "linux" else "forkserver")
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload([function.__module__])  # imported once, or each rank would
        _start_forkserver()
    if exact_memory:
        os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    with tempfile.TemporaryDirectory(prefix="attnmesh-") as folder:
        store, processes, pipes = Path(folder) / "store", [], []
        try:
            for rank in range(ranks):
                ours, theirs = context.Pipe(duplex=False)
                place = (rank, ranks, threads, gpus, store)
                work = (function, arguments, heard is not None)
                process = context.Process(target=_rank, args=(theirs, place, work), daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            return results(pipes, lambda rank: _death(rank, processes[rank]), heard, seconds)
        finally:
            os.environ.pop("MALLOC_MMAP_THRESHOLD_", None)
            _end(processes)


def _start_forkserver() -> None:
    """Start the process that ranks are forked from, which ignores interrupts from its first import on."""
    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread can change how signals are handled
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


def results(
    pipes: list[Connection], death: Callable[[int], RankError], heard: Say | None, seconds: float | None
) -> list[Any]:
    """What each rank returned, once all have; or the first error, once there is one: `death` of a silent rank."""
    done: dict[int, Any] = {}
    failures: dict[int, BaseException] = {}
    end = None if seconds is None else time.monotonic() + seconds
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        left = None if end is None else end - time.monotonic()
        if left is not None and left <= 0:
            break
        ready: list[Any] = wait(list(waiting), timeout=left)
        for pipe in ready:
            rank = waiting[pipe]
            try:
                kind, value = pipe.recv()
            except EOFError:
                kind, value = "failed", death(rank)
            if kind == "said" and heard is not None:
                heard(value)
                continue
            waiting.pop(pipe)
            if kind == "done":
                done[rank] = value
            else:
                failures[rank] = value
                end = min(end or time.monotonic() + GRACE_PERIOD, time.monotonic() + GRACE_PERIOD)
    if failures:
        # What a rank foresaw says more than that others lost it.
        raise min(failures.values(), key=lambda error: not isinstance(error, InputError))
    if waiting:
        raise RankError(f"ranks {sorted(waiting.values())} did not answer within {seconds} s")
    return [done[rank] for rank in range(len(pipes))]


def _death(rank: int, process: Any) -> RankError:
    process.join(timeout=1)
    code = process.exitcode
    how = (
        f"was ended by {signal.Signals(-code).name}" if code is not None and code < 0 else f"left with exit code {code}"
    )
    return RankError(f"rank {rank} {how} before it was done")


def _end(processes: list[Any]) -> None:
    """Nobody is left: those that are done leave by themselves, the others are not asked."""
    end = time.monotonic() + 1
    for process in processes:
        process.join(timeout=max(0, end - time.monotonic()))
    for process in processes:
        process.kill()
        process.join()


def _rank(pipe: Connection, place: tuple[int, int, int, bool, Path], work: Work) -> None:
    """A rank's life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the one that started us, and ends us
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    rank, ranks, threads, gpus, store = place
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nothing listens but on this machine
    torch.set_num_threads(threads)

    def enter() -> None:
        if gpus:
            torch.cuda.set_device(rank)
        backend = "nccl" if gpus else "gloo"
        dist.init_process_group(backend, f"file://{store}", rank=rank, world_size=ranks, timeout=TIMEOUT)

    perform(pipe, enter, work)


def perform(pipe: Connection, enter: Callable[[], None], work: Work) -> None:
    """Enter the world of ranks, do the work, and tell what came of it."""
    function, arguments, talks = work
    lock = threading.Lock()

    def say(what: Any) -> None:
        with lock:
            pipe.send(("said", what))

    try:
        enter()
        result = function(*([say] if talks else []), *arguments)
        with lock:
            pipe.send(("done", result))
        dist.destroy_process_group()
    except Exception as error:
        # A foreseen error travels as it is; another may be one that only this process can make.
        told = (
            error
            if isinstance(error, (InputError, RankFailure))
            else RankError(f"on a rank:\n{traceback.format_exc()}")
        )
        pipe.send(("failed", told))


def _leave_with_parent() -> None:
    """If the process that started this one is gone, however it went, so is its work."""
    parent = mp.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
