"""`python -m benchmarks unequal`: steps on two ranks of unequal cores or memory, with even shares and with others."""

import os
import resource
import statistics
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist

import attnmesh as am
from attnmesh.cli.launch import Send, run_on_ranks
from attnmesh.errors import ArgumentError, InputError
from attnmesh.mesh.axes import RankMesh
from attnmesh.mesh.shapes import Shape
from attnmesh.setup.init_mesh import init_mesh
from attnmesh.setup.measure_shares import read_rates
from benchmarks.netns import send_rows
from benchmarks.timing import Timing

PERIOD = 4000
"""Microseconds of a period of a control group: short beside a step."""

HEADS, WIDTH = 8, 64

LEAST_QUOTA = 1000
"""Microseconds that Linux gives a group in each period at least."""

SPARE = 32 << 20
"""Bytes beside those of keys and values, which a process needs for a piece of new tokens."""

GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Row:
    """Steps with some shares, beside the time in which all ranks together read the cache."""

    case: str
    shares: str
    tokens: list[int]
    step: Timing | None
    """Milliseconds of a step of the slowest rank; None if the cache does not fit."""
    rates: list[float]
    """GB/s that each rank reads, measured between the steps."""
    bound: float | None
    """Milliseconds of all bytes at the sum of the rates."""
    said: str = ""

    @property
    def beside(self) -> float | None:
        """Time of a step over the bound."""
        return None if self.step is None or self.bound is None else self.step.median / self.bound


def rows(tokens: int, part: float, rounds: int, add: Send) -> None:
    """Measure steps where one rank has a part of a core, and then where one has a third of the other's memory."""
    run_on_ranks(2, send_rows, _of_cores, tokens, part, rounds, threads=1, on_message=add)
    run_on_ranks(2, send_rows, _of_memory, tokens, threads=1, on_message=add)


@contextmanager
def held_to(part: float) -> Iterator[None]:
    """Hold this process to a part of a core, by a control group of Linux. It needs root."""
    is_version_1 = (GROUPS / "cpu").is_dir()
    group = (GROUPS / "cpu" if is_version_1 else GROUPS) / f"attnmesh-unequal-{os.getpid()}"
    period = str(int(max(PERIOD, LEAST_QUOTA / part)))
    quota = str(int(part * int(period)) + 1)
    limits = {"cpu.weight": "10000", "cpu.max": f"{quota} {period}"}
    if is_version_1:
        limits = {"cpu.shares": "262144", "cpu.cfs_period_us": period, "cpu.cfs_quota_us": quota}
    try:
        group.mkdir()
        for name, limit in limits.items():
            (group / name).write_text(limit)
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        given, fix = f"{group} ({error.strerror})", "run it as root on Linux, where cgroups limit the cpu"
        raise ArgumentError("benchmarks unequal", "a control group that can be made", given, fix) from error
    try:
        yield
    finally:
        (group.parent / "cgroup.procs").write_text(str(os.getpid()))
        sleep(0.1)
        group.rmdir()


def _of_cores(tokens: int, part: float, rounds: int) -> Iterator[Row]:
    """Measure even shares and those of "auto" in turns, with rank 1 held to a part of a core."""
    rank, mesh = dist.get_rank(), init_mesh("cpu", Shape(1, 1, 2), HEADS, HEADS)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % len(os.sched_getaffinity(0))]})
    with held_to(part) if rank else nullcontext():
        caches = {name: _filled(mesh, tokens, shares) for name, shares in (("even", None), ("auto", "auto"))}
        q, times, rates = torch.randn(1, HEADS, 1, WIDTH), {name: list[float]() for name in caches}, []
        for turn in range(rounds + 1):
            rates.append(read_rates(RankMesh.of(mesh), torch.device("cpu")))
            for name, cache in caches.items():
                am.decode(q, cache)
                for _ in range(4):
                    dist.barrier()
                    start = perf_counter()
                    am.decode(q, cache)
                    times[name] += [perf_counter() - start] * (turn > 0)
    median_rates = [statistics.median(rate) for rate in zip(*rates[1:], strict=True)]
    bound = 1e3 * caches["even"].config.nbytes / sum(median_rates)
    for name, cache in caches.items():
        counts = [turn.count(tokens) for turn in cache.own_shard.block_cyclic.turns]
        shares = "even" if cache.shares is None else f"{name}: {_text(cache.shares)}"
        gigabytes = [round(rate / 1e9, 2) for rate in median_rates]
        yield Row(f"rank 1 has {part:g} of a core", shares, counts, Timing.of(times[name]), gigabytes, bound)


def _of_memory(tokens: int) -> Iterator[Row]:
    """Try a cache on ranks of which one may take three times as much memory as the other."""
    rank, mesh = dist.get_rank(), init_mesh("cpu", Shape(1, 1, 2), HEADS, HEADS)
    context_bytes = 2 * tokens * HEADS * WIDTH * 4
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most_bytes = int((0.3, 0.9)[rank] * context_bytes) + SPARE
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + most_bytes, resource.RLIM_INFINITY))
    limits = "memory for 0.3 and 0.9 of the context"
    for shares in (None, (1, 3)):
        text = "even" if shares is None else _text(shares)
        try:
            cache = _filled(mesh, tokens, shares)
        except InputError as error:
            yield Row(limits, text, [], None, [], None, str(error))
            continue
        counts, q, times = (
            [turn.count(tokens) for turn in cache.own_shard.block_cyclic.turns],
            torch.randn(1, HEADS, 1, WIDTH),
            [],
        )
        for _ in range(9):
            start = perf_counter()
            am.decode(q, cache)
            times.append(perf_counter() - start)
        yield Row(limits, text, counts, Timing.of(times[1:]), [], None)


def _filled(mesh: Any, tokens: int, shares: Any) -> am.KVCache:
    """Return a cache of so many tokens, written a piece at a time."""
    sizes: dict[str, Any] = {"batch": 1, "kv_heads": HEADS, "head_dim": WIDTH, "dtype": torch.float32}
    cache = am.KVCache(mesh, **sizes, capacity=tokens, shares=shares)
    piece = torch.randn(1, HEADS, min(tokens, 1024), WIDTH)
    for start in range(0, tokens, piece.shape[2]):
        some = piece[:, :, : tokens - start]
        cache.append(some, some)
    return cache


def _text(shares: tuple[float, ...]) -> str:
    return " : ".join(f"{share:g}" for share in shares)
