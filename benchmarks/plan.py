"""`python -m benchmarks plan`: predictions of the planner beside measurements, on a world of ranks.

The constants of the world are measured first, and every workload is planned with them. Then plans run in turns: the
picked one, the best of each other shape, and the best of each published scheme. *Regret* is the time of the picked plan
over that of the best one. On shaped hosts, the counters of network interfaces measure bytes.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import attnmesh as am
from attnmesh.cost.cluster import Cluster
from attnmesh.mesh.axes import RankMesh
from attnmesh.mesh.shapes import Shape
from attnmesh.planner.plan import Plan, plan
from attnmesh.planner.workload import Workload
from benchmarks.netns import HEADERS, Hosts, Wire, World, run_on, send_rows, wires
from benchmarks.prefill import mesh_of
from benchmarks.timing import Timing

GLOO = 147
"""Bytes that gloo adds to each message: an announcement, its acknowledgement and a header."""


class Crossed(NamedTuple):
    """Bytes of one call between hosts: predicted, added by gloo, and counted by network interfaces."""

    predicted: int
    gloo: int
    payload: int
    headers: int

    @property
    def off(self) -> float:
        """Relative error of the predicted bytes."""
        return (self.predicted + self.gloo) / max(1, self.payload) - 1


@dataclass(frozen=True)
class Ran:
    """One plan: its predictions and its measurements. Bytes are the sum over all hosts."""

    workload: str
    plan: str
    known_as: str
    layout: str
    picked: bool
    predicted_ms: float
    timing: Timing
    beside_best: float
    between: Crossed | None = None


@dataclass(frozen=True)
class Report:
    """Results of one world."""

    world: str
    cluster: Cluster
    rows: list[Ran]


def workloads(length: int) -> list[Workload]:
    """Return workloads of each phase with 1, 4 and 8 query heads per key head; decoding over 16 times the tokens."""
    grid = []
    for phase in ("decode", "prefill", "training"):  # short steps first: each new mesh starts threads
        for kv_heads in (8, 2, 1):
            tokens = 16 * length if phase == "decode" else length
            grid.append(Workload(8, kv_heads, 64, tokens, phase=phase, dtype="float32", mask=am.Causal()))
    return grid


def described(workload: Workload) -> str:
    """Return a workload in a few words."""
    heads = f"{workload.q_heads}/{workload.kv_heads} heads of {workload.head_dim}"
    return f"{workload.phase}, {workload.length:,} tokens, {heads}, {workload.dtype}"


def report(world: World, length: int, max_plans: int, rounds: int, show: Callable[[Report], None]) -> Report:
    """Return the measurements of a world: its constants, and its plans. `show` is called after each."""
    measured: list[Report] = []

    def add(message: Cluster | Ran) -> None:
        if isinstance(message, Cluster):
            measured.append(Report(str(world), message, []))
        else:
            measured[0].rows.append(message)
        show(measured[0])

    run_on(world, send_rows, _on_rank, workloads(length), max_plans, rounds, isinstance(world, Hosts), on_message=add)
    return measured[0]


def _on_rank(todo: list[Workload], max_plans: int, rounds: int, wired: bool) -> Iterator[Cluster | Ran]:
    line = Shape(1, 1, dist.get_world_size())
    cluster = Cluster.measure(mesh_of(line, line))
    yield cluster
    for workload in todo:
        yield from _contest(workload, cluster, max_plans, rounds, wired)


def contenders(plans: list[Plan], max_plans: int) -> list[Plan]:
    """Return the picked plan, its other placements, and the best of each other shape, exchange and scheme."""
    by_shape: dict[tuple[Any, ...], Plan] = {}
    for proposal in plans:
        by_shape.setdefault((proposal.shape, proposal.exchange), proposal)
    shortlist = list(by_shape.values())[:max_plans]
    names: dict[str, Plan] = {}
    for proposal in plans:
        names.setdefault(proposal.known_as, proposal)
    placements = [
        proposal for proposal in plans if proposal.shape == plans[0].shape and proposal.exchange == plans[0].exchange
    ]
    shortlist += [proposal for proposal in (*names.values(), *placements) if proposal not in shortlist]
    return shortlist


def _contest(workload: Workload, cluster: Cluster, max_plans: int, rounds: int, wired: bool) -> list[Ran]:
    plans = contenders(plan(workload, cluster), max_plans)
    calls = [_repeated(candidate) for candidate in plans]
    times: list[list[float]] = [[] for _ in calls]
    for number in range(rounds + 1):
        for (call, repeat), seconds in zip(calls, times, strict=True):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(repeat):
                call()
            dist.barrier()
            if number:
                seconds.append((time.perf_counter() - start) / repeat)
    best_median = min(statistics.median(seconds) for seconds in times)
    return [
        Ran(
            workload=described(workload),
            plan=candidate.name,
            known_as=candidate.known_as,
            layout=str(candidate.layout),
            picked=candidate is plans[0],
            predicted_ms=round(1e3 * candidate.seconds, 3),
            timing=Timing.of(seconds),
            beside_best=round(statistics.median(seconds) / best_median, 3),
            between=crossing(candidate, call) if wired else None,
        )
        for candidate, (call, _), seconds in zip(plans, calls, times, strict=True)
    ]


def _repeated(plan: Plan) -> tuple[Callable[[], Any], int]:
    """Return the call of a plan, and how often to repeat it between barriers. The count is equal on all ranks."""
    return call_of(plan), max(1, min(20, int(0.1 / plan.seconds)))


def crossing(plan: Plan, call: Callable[[], Any]) -> Crossed:
    """Return the bytes that one call sends between hosts, from enough calls to outweigh the counting itself.

    The first call is not counted: in it ranks find each other, and measure what "auto" takes.
    """
    call()
    per_host = max(1.0, (plan.bytes.between + GLOO * plan.messages) / plan.cluster.hosts)
    repeat = max(1, min(200, int(1e6 / per_host)))
    quiet, busy = _quiet(), counted(lambda: [call() for _ in range(repeat)])
    payload, headers = ((x - y) / repeat for x, y in ((busy.payload, quiet.payload), (_headers(busy), _headers(quiet))))
    return Crossed(*(round(x) for x in (plan.bytes.between, GLOO * plan.messages, payload, headers)))


@lru_cache
def _quiet() -> Wire:
    """Return the traffic of counting itself."""
    return counted(lambda: None)


def _headers(sent: Wire) -> int:
    return HEADERS * sent.sent_packets


def counted(call: Callable[[], Any]) -> Wire:
    """Return the traffic that leaves all hosts while all ranks make a call, with two barriers."""
    _wait_until_quiet()
    before = wires()[1]
    dist.barrier()
    call()
    dist.barrier()
    _wait_until_quiet()
    once = os.environ["LOCAL_RANK"] == "0"
    total = torch.tensor([once * x for x in wires()[1] - before])
    dist.all_reduce(total)
    return Wire(*total.tolist())


def _wait_until_quiet() -> None:
    """Wait until the network interfaces count nothing more."""
    dist.barrier()
    before = wires()[1]
    while True:
        time.sleep(0.04)
        now = wires()[1]
        if now.sent - before.sent < 500 and now.received - before.received < 500:
            return
        before = now


def call_of(plan: Plan) -> Callable[[], Any]:
    """Return the call that a plan describes. Every rank of its mesh calls it."""
    work, mesh = plan.workload, mesh_of(plan.shape, plan.tile)
    torch.manual_seed(0)
    if work.phase == "decode":
        return _decode_call(plan, mesh)
    tokens = len(plan.layout.positions(work.length, plan.shape.ranks, RankMesh.of(mesh).shard_index))
    heads, dtype = (work.q_heads, work.kv_heads, work.kv_heads), getattr(torch, str(work.dtype))
    q, k, v = (torch.randn(1, n, tokens, work.head_dim).to(dtype) for n in heads)
    options: dict[str, Any] = {
        "mesh": mesh,
        "mask": work.mask,
        "layout": plan.layout,
        "exchange": plan.exchange,
        "length": work.length,
    }
    if work.phase == "prefill":
        return lambda: am.attention(q, k, v, **options)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    dout = torch.ones_like(q)
    return lambda: torch.autograd.grad(am.attention(*inputs, **options), inputs, dout)


def _decode_call(plan: Plan, mesh: DeviceMesh) -> Callable[[], Any]:
    work = plan.workload
    sizes = {"batch": 1, "kv_heads": work.kv_heads, "head_dim": work.head_dim, "capacity": work.length}
    dtype = getattr(torch, str(work.dtype))
    cache = am.KVCache(mesh, dtype=dtype, **sizes)  # type: ignore[arg-type]
    for start in range(0, work.length, 8192):
        tokens = min(8192, work.length - start)
        cache.append(*torch.randn(2, 1, work.kv_heads, tokens, work.head_dim).to(dtype).unbind())
    q = torch.randn(1, work.q_heads, 1, work.head_dim).to(dtype)
    return lambda: am.decode(q, cache, merge=plan.exchange)


def summary(reports: list[Report]) -> dict[str, Any]:
    """Return how often the planner was right, and every miss."""
    rows = [row for report in reports for row in report.rows]
    close = [abs(row.predicted_ms / row.timing.median - 1) <= CLOSE for row in rows]
    wired = [abs(row.between.off) for row in rows if row.between is not None]
    missed = [miss for report in reports for miss in _misses(report)]
    picked = sum(row.picked for row in rows)
    return {
        "workloads": picked,
        f"picked within {REGRET:.2f} of the best measured": picked - len(missed),
        "misses": missed,
        "plans measured": len(rows),
        f"seconds within {CLOSE:.0%}": f"{sum(close) / len(rows):.0%}",
        "bytes off at the most": f"{max(wired, default=0.0):.1%}",
    }


def _misses(report: Report) -> Iterator[str]:
    best = {row.workload: row for row in report.rows if row.beside_best == 1.0}
    for row in report.rows:
        if row.picked and row.beside_best > REGRET:
            yield f"{report.world}: {row.workload}: {row.plan} takes {row.beside_best} of {best[row.workload].plan}"


REGRET, CLOSE = 1.10, 0.25
"""Largest regret that counts as a good pick, and largest relative error that counts as a close prediction."""
