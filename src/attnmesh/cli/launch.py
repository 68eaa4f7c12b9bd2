"""Ranks on this machine: start them, run one function on all, receive their messages, and end them all."""

import inspect
import multiprocessing as mp
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.util import get_temp_dir
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from attnmesh.errors import InputError, RankFailure

Send = Callable[[Any], None]
"""Function that sends a message of a rank, before its result, to the process that started it."""

GRACE_PERIOD = 2.0
"""Seconds that the other ranks get after a rank has failed, since their errors may be clearer than its own.

After a death they get none: their errors only say that a connection was lost.
"""

LAUNCH_TIMEOUT = timedelta(hours=1)
"""Timeout of the process group. The process that started a rank notices its death at once."""

MALLOC = {"MALLOC_TRIM_THRESHOLD_": str(1 << 28), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}
"""Bytes of freed memory that a rank keeps, and of a tensor that has memory of its own, for glibc.

By default each layer of a model gives its memory back to the system, and the next layer waits for new pages.
"""

ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a process: from another one, or because the terminal was closed."""


@dataclass(frozen=True)
class RankWork:
    """The work of each rank. With `sends` the first argument of the function is a `Send`."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    sends: bool


@dataclass(frozen=True)
class RankPlace:
    """The place of a process among ranks: its number, its device, and where it meets the others."""

    rank: int
    ranks: int
    threads: int
    gpus: bool
    store: Path
    leftovers: tuple[str, ...]
    """Folders that a killed rank leaves."""


class LaunchError(RuntimeError):
    """A rank died or raised an unexpected error."""


class ProcessDeath(LaunchError):
    """A rank's process ended before the rank was done."""


def run_on_ranks(
    ranks: int,
    function: Callable[..., Any],
    *arguments: Any,
    seconds: float | None = 1800.0,
    threads: int = 1,
    gpus: bool = False,
    spawned: bool = False,
    on_message: Send | None = None,
) -> list[Any]:
    """Return each rank's result, from gloo ranks of `threads` threads; raise the first error, which ends all ranks.

    With `gpus` each rank has a GPU and they use NCCL. With `on_message` the first argument of the function is a `Send`,
    and each message is passed to `on_message` as it arrives. Ranks that are `spawned` have this process's environment,
    and share no memory with other processes. No rank and no file outlives this call, an interrupt, SIGTERM or SIGHUP.
    """
    for name, size in MALLOC.items():  # for the ranks: this process has read them
        os.environ.setdefault(name, size)
    processes = Processes("spawn" if spawned or gpus or sys.platform != "linux" else "forkserver")
    if processes.forked:
        functions = [function, *(x for x in arguments if inspect.isfunction(x))]
        processes.preload([x.__module__ for x in functions])  # imported once, not by each rank
    with leaving_tidily(), tempfile.TemporaryDirectory(prefix="attnmesh-") as folder:
        leftovers = (folder, get_temp_dir()) if processes.forked else (folder,)
        work = RankWork(function, arguments, sends=on_message is not None)
        try:
            with ThreadPoolExecutor(1) as starter:  # interrupts, which reach the main thread, cut no start short
                for rank in range(ranks):
                    place = RankPlace(rank, ranks, threads, gpus, Path(folder) / "store", leftovers)
                    starter.submit(processes.start, _rank, place, work).result()
            results = collect_results(
                processes.pipes, lambda rank: _death(rank, processes.started[rank]), on_message, seconds
            )
        except BaseException:
            processes.end()
            raise
        processes.end(1)
        return results


def run_on_machine(
    ranks: int, function: Callable[..., Any], *arguments: Any, on_message: Send | None = None
) -> list[Any]:
    """Return each rank's result. Ranks share this machine's threads, and have a GPU each if there are as many."""
    threads = max(1, torch.get_num_threads() // ranks)
    gpus = torch.cuda.device_count() >= ranks
    return run_on_ranks(ranks, function, *arguments, seconds=None, threads=threads, gpus=gpus, on_message=on_message)


class Processes:
    """Processes that are started one by one, each with a pipe, and that end together."""

    def __init__(self, method: str = "forkserver") -> None:
        self.context: Any = mp.get_context(method)
        self.forked = method == "forkserver"
        self.started: list[Any] = []
        self.pipes: list[Connection] = []

    def preload(self, modules: list[str]) -> None:
        """Name what is imported once, by the process that others are forked from, and start that process."""
        self.context.set_forkserver_preload(modules)
        _start_forkserver()

    def start(self, function: Callable[..., None], *arguments: Any) -> tuple[Any, Connection]:
        """Start a process. Return it and a pipe to it, whose other end is the function's last argument."""
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=function, args=(*arguments, theirs), daemon=True)
        process.start()
        theirs.close()
        self.started.append(process)
        self.pipes.append(ours)
        return process, ours

    def end(self, seconds: float = 0) -> None:
        """Wait some seconds for processes that are done, then kill the others."""
        end = time.monotonic() + seconds
        for process in self.started:
            process.join(timeout=max(0, end - time.monotonic()))
        for process in self.started:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()


def _start_forkserver() -> None:
    """Start the process that ranks are forked from, with interrupts blocked there from its first import on.

    This process receives an interrupt of that moment later: one that it ignored would be lost.
    """
    resource_tracker.ensure_running()  # started here, because its start unblocks interrupts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def leaving_tidily() -> Iterator[None]:
    """Leave the block as an interrupt does when SIGTERM or SIGHUP arrives, which would end this process at once.

    Handlers of the caller stay, and so does a hangup that `nohup` ignores.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ending = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]

    def leave(number: int, _: FrameType | None) -> None:
        for ignored in ending:
            signal.signal(ignored, signal.SIG_IGN)  # a second one would cut the clearing short
        raise SystemExit(128 + number)

    for number in ending:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in ending:
            signal.signal(number, signal.SIG_DFL)


def collect_results(
    pipes: list[Connection], death: Callable[[int], LaunchError], on_message: Send | None, seconds: float | None
) -> list[Any]:
    """Return the results of all ranks, or raise the first error; `death` makes the error of a rank that died."""
    results: dict[int, Any] = {}
    failures: dict[int, BaseException] = {}
    end = None if seconds is None else time.monotonic() + seconds
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        remaining = None if end is None else end - time.monotonic()
        if remaining is not None and remaining <= 0:
            break
        ready: list[Any] = wait(list(waiting), timeout=remaining)
        for pipe in ready:
            rank = waiting[pipe]
            try:
                kind, content = pipe.recv()
            except (EOFError, OSError):  # the other: it died while it sent
                kind = "failed"
                content = death(rank)
            if kind == "message" and on_message is not None:
                on_message(content)
                continue
            waiting.pop(pipe)
            if kind == "done":
                results[rank] = content
            else:
                failures[rank] = content
                grace = time.monotonic() + (0 if isinstance(content, ProcessDeath) else GRACE_PERIOD)
                end = grace if end is None else min(end, grace)
    if failures:
        raise min(failures.values(), key=_order_of_causes)
    if waiting:
        raise LaunchError(f"ranks {sorted(waiting.values())} did not answer within {seconds} s")
    return [results[rank] for rank in range(len(pipes))]


def _order_of_causes(error: BaseException) -> int:
    """Return 0 for input errors, 1 for deaths and 2 for others, such as connections that a dead rank closed."""
    return 0 if isinstance(error, InputError) else 1 if isinstance(error, ProcessDeath) else 2


def _death(rank: int, process: Any) -> ProcessDeath:
    process.join(timeout=1)
    code = process.exitcode
    killed = code is not None and code < 0
    ending = f"was ended by {signal.Signals(-code).name}" if killed else f"left with exit code {code}"
    return ProcessDeath(f"rank {rank} {ending} before it was done")


def _rank(place: RankPlace, work: RankWork, pipe: Connection) -> None:
    """Run the work as one rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one handles it, and ends this one
    leaving = threading.Thread(target=leave_with_parent, args=(place.leftovers,), daemon=True)
    parent = mp.parent_process()
    leaving.start()
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # listen on this machine only
    torch.set_num_threads(place.threads)

    def enter() -> None:
        if place.gpus:
            torch.cuda.set_device(place.rank)
        backend, store = "nccl" if place.gpus else "gloo", f"file://{place.store}"
        dist.init_process_group(backend, store, rank=place.rank, world_size=place.ranks, timeout=LAUNCH_TIMEOUT)
        if not place.gpus:
            dist.barrier()  # gloo fails on a rank that still connects when another leaves

    try:
        run_work(pipe, enter, work)
    finally:
        if parent is not None and not parent.is_alive():
            leaving.join()


def run_work(pipe: Connection, enter: Callable[[], None], work: RankWork) -> None:
    """Join the process group, do the work, and send its result or its error."""
    lock = threading.Lock()

    def send(message: Any) -> None:
        with lock:
            pipe.send(("message", message))

    warnings.filterwarnings("ignore", module=r"torch\b")  # each rank would print PyTorch's warnings about itself
    try:
        enter()
        result = work.function(*([send] if work.sends else []), *work.arguments)
        with lock:
            pipe.send(("done", result))
        dist.destroy_process_group()
    except Exception as error:
        # Our errors can be pickled; of an unknown class only the text is sent.
        can_pickle = isinstance(error, (InputError, RankFailure))
        speaker = f"rank {dist.get_rank()}" if dist.is_initialized() else "a rank"
        failure = error if can_pickle else LaunchError(f"on {speaker}:\n{traceback.format_exc()}")
        with suppress(OSError):  # nobody waits for this rank any more: another one's end was seen before
            pipe.send(("failed", failure))


def leave_with_parent(leftovers: Sequence[str] = ()) -> None:
    """End this process when the one that started it has ended, and remove the folders that a killed one leaves."""
    parent = mp.parent_process()
    if parent is not None:
        parent.join()
        for folder in leftovers:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)
