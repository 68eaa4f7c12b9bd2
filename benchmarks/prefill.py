"""`python -m benchmarks prefill`: shapes and exchanges of the mesh beside each other and beside published packages.

All run in one set of ranks, in turns, forward and backward. A round takes as long as its slowest rank. The baseline is
our own ring with the same kernel, since packages with a naive CPU kernel say nothing about their exchange.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import scaled_dot_product_attention

import attnmesh as am
from attnmesh.cli.launch import Send, run_on_ranks
from attnmesh.cost.candidate_mesh import CandidateMesh
from attnmesh.cost.cluster import Cluster
from attnmesh.cost.exchange_cost import peak_activations
from attnmesh.cost.rates import BOUNDLESS, Device, Link
from attnmesh.cost.traffic import tiles
from attnmesh.errors import ArgumentError
from attnmesh.mesh.schedule import EXCHANGE_MODES, Problem, Schedule, make_schedule
from attnmesh.mesh.shapes import AXES, Shape, elements, mesh_shapes, rank_grid
from attnmesh.planner.workload import Workload
from attnmesh.planner.workload_cost import cost
from attnmesh.runtime.counters import count_traffic
from benchmarks.netns import Hosts, World, ranks_of, run_on, send_rows
from benchmarks.peers import PEERS, Case, inputs, wrong_gradients
from benchmarks.timing import Timing, exact_memory, peak_memory, race


@dataclass(frozen=True)
class Row:
    """One contender on one case; `note` is why it was not run, or which gradients are wrong."""

    case: str
    contender: str
    timing: Timing | None = None
    beside_ring: float | None = None
    counted: int | None = None
    predicted: int | None = None
    limit_ms: float | None = None  # time of its bytes over the links between hosts
    note: str | None = None


@dataclass(frozen=True)
class Memory:
    """Largest growth of a rank in one call, and the formula for the backward pass, in megabytes."""

    case: str
    contender: str
    measured: float
    foretold: float


def cases(length: int) -> list[Case]:
    """Return balanced causal and full cases, and a window and documents, which exchange little."""
    documents = am.Causal() & am.Documents([length // 8] * 7 + [length - 7 * (length // 8)])
    return [
        Case("causal, 8/8 heads", am.Causal(), am.Zigzag(), (8, 8), length),
        Case("causal, 8/2 heads", am.Causal(), am.Zigzag(), (8, 2), length),
        Case("full, 8/8 heads", am.Full(), am.Zigzag(), (8, 8), length),
        Case("window of 256, 8/8 heads", am.Window(256), am.Contiguous(), (8, 8), length),
        Case("8 documents, 8/8 heads", documents, am.Contiguous(), (8, 8), length),
    ]


class Contender(NamedTuple):
    """A shape of the mesh, its tile on a host, and an exchange."""

    shape: Shape
    tile: Shape
    exchange: str

    @property
    def name(self) -> str:
        """Name in the table."""
        shape, tile = ("x".join(map(str, x)) for x in (self.shape, self.tile))
        return f"{shape} {self.exchange}" + (f", {tile} a host" if 1 < self.tile.ranks < self.shape.ranks else "")


def contenders(ranks: int, heads: int, a_host: int) -> list[Contender]:
    """Return every shape in every placement, with each exchange that differs there."""
    return [
        Contender(shape, tile, exchange)
        for shape, exchange in shapes(ranks, heads)
        for tile in tiles(shape, min(a_host, ranks))
    ]


def shapes(ranks: int, heads: int) -> list[tuple[Shape, str]]:
    """Return every shape of a number of ranks, with each exchange that differs there."""
    return [
        (shape, exchange)
        for shape in sorted(mesh_shapes(ranks, heads, heads))
        for exchange in ("bulk", "pipelined", "ring")
        if exchange != "ring" or shape.queries > 1
    ]


class Selection(NamedTuple):
    """Cases with this text in their names, shapes of this list or all, rounds of timing, and the hosts, if any."""

    case: str
    shapes: tuple[str, ...]
    rounds: int
    hosts: Hosts | None = None

    @property
    def a_host(self) -> int:
        """Ranks of a host; without hosts more than any world has."""
        return 1 << 30 if self.hosts is None else self.hosts.ranks


def rows(world: World, length: int, selection: Selection, add: Send) -> None:
    """Measure one rank beside the kernel alone, then the selected cases with contenders in turns."""
    selection = selection._replace(hosts=None if isinstance(world, int) else world)
    _check_selection(ranks_of(world), length, selection)
    if not selection.case:
        run_on_ranks(1, send_rows, _one_rank, length, on_message=add)
    run_on(world, send_rows, _contests, length, selection, on_message=add)


def _check_selection(ranks: int, length: int, selection: Selection) -> None:
    """Raise unless the selected cases and shapes exist."""
    selected = [case for case in cases(length) if selection.case in case.name]
    if not selected:
        names = ", ".join(repr(case.name) for case in cases(length))
        raise ArgumentError("--case", f"a part of {names}", repr(selection.case), "leave it out for all of them")
    can = {"x".join(map(str, shape)) for case in selected for shape, _ in shapes(ranks, case.heads[1])}
    for name in selection.shapes:
        if name not in can:
            expected = f"one of {', '.join(sorted(can))}, of {ranks} ranks"
            raise ArgumentError("--shape", expected, repr(name), "leave it out for all of them")


def memory(ranks: int, length: int, add: Send) -> None:
    """Measure memory under a full mask, in ranks that return freed memory at once, which is slow."""
    with exact_memory():
        run_on_ranks(ranks, send_rows, _memories, length, spawned=True, on_message=add)


def _one_rank(length: int) -> list[Row]:
    """Return the time of a mesh of one rank beside SDPA, the same kernel without the mesh."""
    case = cases(length)[0]
    q, k, v = (x.requires_grad_() for x in inputs(case))
    shape = Shape(1, 1, 1)
    ours = attention_call(case, inputs(case), Contender(shape, shape, "auto"))

    def kernel() -> Any:
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    name = f"{case.name}, one rank"
    timings = race({"the kernel alone": kernel, "1x1x1": ours}, torch.device("cpu"), seconds=8)
    return [Row(name, contender, timing) for contender, timing in timings.items()]


def _contests(length: int, selection: Selection) -> Iterator[Row]:
    for case in cases(length):
        if selection.case in case.name:
            yield from _contest(case, selection)


def _memories(length: int) -> Iterator[Memory]:
    ranks = dist.get_world_size()
    for heads in ((8, 8), (8, 2)):
        case = Case(f"full, {heads[0]}/{heads[1]} heads", am.Full(), am.Contiguous(), heads, length)
        for shape, exchange in shapes(ranks, heads[1]):
            contender = Contender(shape, shape, exchange)
            peak = peak_memory(attention_call(case, inputs(case), contender), torch.device("cpu"))
            figure = torch.tensor([peak or 0], dtype=torch.float64)
            dist.all_reduce(figure, dist.ReduceOp.MAX)
            formula = 4 * case.width * length / ranks * peak_activations(shape, *heads, EXCHANGE_MODES[exchange])
            if float(figure) > 0:
                yield Memory(case.name, contender.name, round(float(figure) / 1e6, 1), round(formula / 1e6, 1))


def _contest(case: Case, selection: Selection) -> list[Row]:
    """Time all contenders in turns; every rank returns the same rows."""
    ranks, qkv = dist.get_world_size(), inputs(case)
    calls: dict[str, Callable[[], Any]] = {}
    rows: dict[str, Row] = {}
    for contender in contenders(ranks, case.heads[1], selection.a_host):
        if selection.shapes and contender.name.split()[0] not in (*selection.shapes, f"1x{ranks}x1"):
            continue
        calls[contender.name] = attention_call(case, qkv, contender)
        rows[contender.name] = replace(
            count_elements(case, contender, calls[contender.name]), limit_ms=_limit(case, contender, selection.hosts)
        )
    for name, make in PEERS.items():
        peer = make(case, qkv)
        if isinstance(peer, str):
            rows[name] = Row(case.name, name, note=peer)
        else:
            calls[name] = peer.call
            rows[name] = Row(case.name, name, note=wrong_gradients(peer, case, qkv))
    timings = race(
        {name: between_barriers(call) for name, call in calls.items()},
        torch.device("cpu"),
        seconds=0,
        rounds=selection.rounds,
    )
    ring = min(timing.median for name, timing in timings.items() if name.startswith(f"1x{ranks}x1 ring"))
    return [_timed(row, timings.get(name), ring) for name, row in rows.items()]


def _timed(row: Row, timing: Timing | None, ring: float) -> Row:
    if timing is None:
        return row
    return replace(row, timing=timing, beside_ring=round(ring / timing.median, 3))


def between_barriers(call: Callable[[], Any]) -> Callable[[], None]:
    """Return the call between two barriers, which lasts as long as its slowest rank."""

    def run() -> None:
        dist.barrier()
        call()
        dist.barrier()

    return run


@lru_cache
def mesh_of(shape: Shape, tile: Shape) -> DeviceMesh:
    """Return the mesh of a placement. Meshes share process groups, since each group has its threads."""
    ranks = rank_grid(shape, tile)
    long = [axis for axis in range(3) if shape[axis] > 1] or [2]
    groups = [_group_of(tuple(map(tuple, ranks.movedim(axis, -1).reshape(-1, shape[axis]).tolist()))) for axis in long]
    mesh = ranks.reshape([shape[axis] for axis in long])
    names = tuple(AXES[axis] for axis in long)
    return DeviceMesh.from_group(groups if len(groups) > 1 else groups[0], "cpu", mesh, mesh_dim_names=names)


@lru_cache
def _group_of(lines: tuple[tuple[int, ...], ...]) -> dist.ProcessGroup:
    """Return this rank's group of a partition of the ranks; all ranks call it together."""
    group: dist.ProcessGroup = dist.new_subgroups_by_enumeration([list(line) for line in lines])[0]
    return group


def attention_call(case: Case, qkv: list[Tensor], contender: Contender) -> Callable[[], Any]:
    """Return a call of our attention, forward and backward, on this rank's shard."""
    mesh = mesh_of(contender.shape, contender.tile)
    q, k, v = (am.shard(x, mesh, layout=case.layout).requires_grad_() for x in qkv)
    dout = torch.ones_like(q)

    def call() -> Any:
        options = {"mask": case.mask, "layout": case.layout, "exchange": contender.exchange, "length": case.length}
        out = am.attention(q, k, v, mesh=mesh, **options)  # type: ignore[arg-type]
        return torch.autograd.grad(out, (q, k, v), dout)

    return call


def count_elements(case: Case, contender: Contender, call: Callable[[], Any]) -> Row:
    """Return the elements that the busiest rank received, and the prediction."""
    with count_traffic() as traffic:
        call()
    figures = torch.tensor([traffic.vectors, predicted(case, contender.shape, contender.exchange)])
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    received, expected = figures.tolist()
    return Row(case.name, contender.name, counted=received, predicted=expected)


def _limit(case: Case, contender: Contender, hosts: Hosts | None) -> float | None:
    """Return milliseconds of the exchanges alone, over the links between hosts."""
    if hosts is None:
        return None
    work = Workload(*case.heads, case.width, case.length, dtype="float32", mask=case.mask)
    return milliseconds_of_bytes(
        work, CandidateMesh(contender.shape, contender.tile, case.layout, contender.exchange), hosts
    )


def links_alone(hosts: Hosts) -> Cluster:
    """Return the hosts as a cluster in which all but the links between them is free."""
    free, link = Link(0.0, BOUNDLESS, BOUNDLESS), Link(0.0, hosts.rate / 8, hosts.rate / 8)
    return Cluster(str(hosts), hosts.hosts, hosts.ranks, Device(*[BOUNDLESS] * 4), free, link)


def milliseconds_of_bytes(work: Workload, candidate: CandidateMesh, hosts: Hosts) -> float:
    """Return the time of the exchanges alone, over the links between hosts."""
    return round(1e3 * cost(candidate, work, links_alone(hosts)).seconds, 1)


def predicted(case: Case, shape: Shape, exchange: str) -> int:
    """Return the elements that the busiest rank receives, forward and backward, by the schedule or the formula."""
    if case.mask == am.Full() and case.length % shape.ranks == 0:
        return int(case.length // shape.ranks * case.width * sum(elements(shape, *case.heads)))
    problem = Problem(case.mask, shape, case.layout, case.layout, case.length, case.length)
    places = [(r, c) for r in range(shape.queries) for c in range(shape.keys)]
    plans = (make_schedule(problem, r, c, exchange == "ring") for r, c in places)
    heads_axis = case.length // shape.ranks * case.width * elements(shape, *case.heads).heads
    return int(heads_axis) + max(_received(plan, r, c, case, shape) for plan, (r, c) in zip(plans, places, strict=True))


def _received(plan: Schedule, r: int, c: int, case: Case, shape: Shape) -> int:
    """Return the elements that a rank receives: q, dout, k and v, and the returned out, dq, dk and dv."""
    q_heads, kv_heads = (heads // shape.heads for heads in case.heads)
    rows_in = sum(count for _, count in plan.query_step.receive)
    rows_back = sum(len(indices) for peer, indices in plan.query_step.return_from if peer != c)
    keys_in = sum(count for step in plan.key_steps for _, count in step.receive)
    keys_back = sum(len(indices) for step in plan.key_steps for peer, indices in step.return_from if peer != r)
    keys_back += sum(count for step in plan.gradient_steps if step for _, count in step.receive)
    return case.width * (q_heads * (3 * rows_in + 2 * rows_back) + kv_heads * (4 * keys_in + 2 * keys_back))
