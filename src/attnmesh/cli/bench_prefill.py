"""`attnmesh bench prefill`: shapes and exchanges of the mesh beside each other and beside published packages.

All run in one set of ranks, in turns, forward and backward; a round takes as long as its slowest rank. Our own ring,
with the same kernel, is the yardstick: a package whose kernel for CPUs is naive is no baseline for an exchange.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import scaled_dot_product_attention

import attnmesh as am
from attnmesh.cli.launch import run_on_ranks
from attnmesh.cli.netns import Hosts, World, ranks_of, run_on
from attnmesh.cli.timing import Timing, peak_memory, race
from attnmesh.comm.counters import counted
from attnmesh.core.layout import Layout
from attnmesh.core.mask import Mask
from attnmesh.errors import ArgumentError
from attnmesh.mesh.schedule import EXCHANGES, Problem, Schedule, schedule
from attnmesh.mesh.shapes import AXES, Shape, elements
from attnmesh.planner.candidate import Candidate
from attnmesh.planner.cluster import Cluster
from attnmesh.planner.cost import cost
from attnmesh.planner.hardware import BOUNDLESS, Device, Link
from attnmesh.planner.memory import peak_activations
from attnmesh.planner.traffic import rank_grid, tiles
from attnmesh.planner.workload import Workload


@dataclass(frozen=True)
class Case:
    """One problem that all contenders solve."""

    name: str
    mask: Mask
    layout: Layout
    heads: tuple[int, int]
    length: int
    width: int = 64


@dataclass(frozen=True)
class Row:
    """One contender on one case; `note` says why it could not run it, or that its result is not attention's."""

    case: str
    contender: str
    timing: Timing | None = None
    beside_ring: float | None = None
    counted: int | None = None
    predicted: int | None = None
    limit_ms: float | None = None  # what its bytes alone take over the links between hosts
    note: str | None = None


@dataclass(frozen=True)
class Memory:
    """The most megabytes by which a rank grew in one call, and what the formula says of its backward pass."""

    case: str
    contender: str
    measured: float
    foretold: float


def cases(length: int) -> list[Case]:
    """Causal with and without grouped heads, balanced; a window and documents, where little needs to travel."""
    documents = am.Causal() & am.Documents([length // 8] * 7 + [length - 7 * (length // 8)])
    return [
        Case("causal, 8/8 heads", am.Causal(), am.Zigzag(), (8, 8), length),
        Case("causal, 8/2 heads", am.Causal(), am.Zigzag(), (8, 2), length),
        Case("full, 8/8 heads", am.Full(), am.Zigzag(), (8, 8), length),
        Case("window of 256, 8/8 heads", am.Window(256), am.Contiguous(), (8, 8), length),
        Case("8 documents, 8/8 heads", documents, am.Contiguous(), (8, 8), length),
    ]


class Contender(NamedTuple):
    """A shape of ours, what of it a host holds, and an exchange."""

    shape: Shape
    tile: Shape
    exchange: str

    @property
    def name(self) -> str:
        """As the table has it."""
        shape, tile = ("x".join(map(str, x)) for x in (self.shape, self.tile))
        return f"{shape} {self.exchange}" + (f", {tile} a host" if 1 < self.tile.ranks < self.shape.ranks else "")


def contenders(ranks: int, heads: int, a_host: int) -> list[Contender]:
    """Every shape in every placement, each with the exchanges that differ there."""
    return [
        Contender(shape, tile, exchange)
        for shape, exchange in shapes(ranks, heads)
        for tile in tiles(shape, min(a_host, ranks))
    ]


def shapes(ranks: int, heads: int) -> list[tuple[Shape, str]]:
    """What a number of ranks can be: rows, columns, heads and rectangles, each with the exchanges that differ there."""
    found = []
    for h in range(1, ranks + 1):
        for r in range(1, ranks + 1):
            if ranks % (h * r) == 0 and heads % h == 0:
                shape = Shape(h, r, ranks // h // r)
                found += [
                    (shape, exchange) for exchange in ("bulk", "pipelined", "ring") if exchange != "ring" or r > 1
                ]
    return found


class Wanted(NamedTuple):
    """Cases that have this in their names, and shapes in these, or all; how often each is timed; the hosts, if any."""

    case: str = ""
    shapes: tuple[str, ...] = ()
    rounds: int = 7
    hosts: Hosts | None = None

    @property
    def a_host(self) -> int:
        """Ranks that share a host: all, where there are no others."""
        return 1 << 30 if self.hosts is None else self.hosts.ranks


def rows(world: World, length: int, wanted: Wanted) -> list[Row]:
    """The cases wanted, contenders in turns; before them one rank beside the kernel alone."""
    wanted = wanted._replace(hosts=None if isinstance(world, int) else world)
    _check_wanted(ranks_of(world), length, wanted)
    alone = [] if wanted.case else run_on_ranks(1, _alone, length)[0]
    return [*alone, *run_on(world, _contests, length, wanted)[0]]


def _check_wanted(ranks: int, length: int, wanted: Wanted) -> None:
    """Raise unless there are such cases and shapes."""
    known = [case for case in cases(length) if wanted.case in case.name]
    if not known:
        names = ", ".join(repr(case.name) for case in cases(length))
        raise ArgumentError("--case", f"a part of {names}", repr(wanted.case), "leave it out for all of them")
    can = {"x".join(map(str, shape)) for case in known for shape, _ in shapes(ranks, case.heads[1])}
    for name in wanted.shapes:
        if name not in can:
            expected = f"one of {', '.join(sorted(can))}, of {ranks} ranks"
            raise ArgumentError("--shape", expected, repr(name), "leave it out for all of them")


def memory(ranks: int, length: int) -> list[Memory]:
    """Under a full mask, where all travels. In ranks of their own, as telling memory exactly is slow."""
    return [row for row in run_on_ranks(ranks, _memories, length, exact_memory=True)[0] if row.measured]


def _alone(length: int) -> list[Row]:
    """A mesh of one rank beside SDPA, which is the same kernel without us."""
    case = cases(length)[0]
    q, k, v = (x.requires_grad_() for x in _whole(case))
    one = Shape(1, 1, 1)
    ours = _ours(case, _whole(case), Contender(one, one, "auto"))

    def kernel() -> Any:
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    name = f"{case.name}, one rank"
    timings = race({"the kernel alone": kernel, "1x1x1": ours}, torch.device("cpu"), seconds=8)
    return [Row(name, contender, timing) for contender, timing in timings.items()]


def _contests(length: int, wanted: Wanted) -> list[Row]:
    return [row for case in cases(length) if wanted.case in case.name for row in _contest(case, wanted)]


def _memories(length: int) -> list[Memory]:
    ranks, found = dist.get_world_size(), []
    for heads in ((8, 8), (8, 2)):
        case = Case(f"full, {heads[0]}/{heads[1]} heads", am.Full(), am.Contiguous(), heads, length)
        for shape, exchange in shapes(ranks, heads[1]):
            one = Contender(shape, shape, exchange)
            peak = peak_memory(_ours(case, _whole(case), one), torch.device("cpu"))
            figure = torch.tensor([peak or 0], dtype=torch.float64)
            dist.all_reduce(figure, dist.ReduceOp.MAX)
            foretold = 4 * case.width * length / ranks * peak_activations(shape, *heads, EXCHANGES[exchange])
            megabytes = (round(x / 1e6, 1) for x in (float(figure), foretold))
            found.append(Memory(case.name, one.name, *megabytes))
    return found


def _whole(case: Case) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, heads, case.length, case.width) for heads in (case.heads[0], *[case.heads[1]] * 2)]


def _contest(case: Case, wanted: Wanted) -> list[Row]:
    """On each rank: time all contenders in turns; every rank returns the same rows."""
    ranks, whole = dist.get_world_size(), _whole(case)
    calls: dict[str, Callable[[], Any]] = {}
    done: dict[str, Row] = {}
    for one in contenders(ranks, case.heads[1], wanted.a_host):
        if wanted.shapes and one.name.split()[0] not in (*wanted.shapes, f"1x{ranks}x1"):
            continue
        calls[one.name] = _ours(case, whole, one)
        done[one.name] = replace(_measured(case, one, calls[one.name]), limit_ms=_limit(case, one, wanted.hosts))
    for name, make in PEERS.items():
        peer = make(case, whole)
        if isinstance(peer, str):
            done[name] = Row(case.name, name, note=peer)
        else:
            calls[name] = peer.call
            done[name] = Row(case.name, name, note=_faults(peer, case, whole))
    timings = race(
        {name: _together(call) for name, call in calls.items()}, torch.device("cpu"), seconds=0, rounds=wanted.rounds
    )
    ring = min(timing.median for name, timing in timings.items() if name.startswith(f"1x{ranks}x1 ring"))
    return [_timed(row, timings.get(name), ring) for name, row in done.items()]


def _timed(row: Row, timing: Timing | None, ring: float) -> Row:
    if timing is None:
        return row
    return replace(row, timing=timing, beside_ring=round(ring / timing.median, 3))


def _together(call: Callable[[], Any]) -> Callable[[], None]:
    """A call between two barriers: all ranks start together, and it is over when the slowest is done."""

    def called() -> None:
        dist.barrier()
        call()
        dist.barrier()

    return called


@lru_cache
def mesh_of(shape: Shape, tile: Shape) -> DeviceMesh:
    """The mesh of a placement. Meshes share their groups: each group has threads, which keep a machine busy."""
    ranks = rank_grid(shape, tile)
    long = [axis for axis in range(3) if shape[axis] > 1] or [2]
    groups = [_lines(tuple(map(tuple, ranks.movedim(axis, -1).reshape(-1, shape[axis]).tolist()))) for axis in long]
    mesh = ranks.reshape([shape[axis] for axis in long])
    names = tuple(AXES[axis] for axis in long)
    return DeviceMesh.from_group(groups if len(groups) > 1 else groups[0], "cpu", mesh, mesh_dim_names=names)


@lru_cache
def _lines(lines: tuple[tuple[int, ...], ...]) -> dist.ProcessGroup:
    """This rank's group, of groups that together hold each rank once: all ranks ask at once."""
    group: dist.ProcessGroup = dist.new_subgroups_by_enumeration([list(line) for line in lines])[0]
    return group


def _ours(case: Case, whole: list[Tensor], one: Contender) -> Callable[[], Any]:
    mesh = mesh_of(one.shape, one.tile)
    q, k, v = (am.shard(x, mesh, layout=case.layout).requires_grad_() for x in whole)
    dout = torch.ones_like(q)

    def call() -> Any:
        options = {"mask": case.mask, "layout": case.layout, "exchange": one.exchange, "length": case.length}
        out = am.attention(q, k, v, mesh=mesh, **options)  # type: ignore[arg-type]
        return torch.autograd.grad(out, (q, k, v), dout)

    return call


def _measured(case: Case, one: Contender, call: Callable[[], Any]) -> Row:
    """What the busiest rank received, and what was foretold."""
    with counted() as traffic:
        call()
    figures = torch.tensor([traffic.vectors, predicted(case, one.shape, one.exchange)])
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    received, foretold = figures.tolist()
    return Row(case.name, one.name, counted=received, predicted=foretold)


def _limit(case: Case, one: Contender, hosts: Hosts | None) -> float | None:
    """Milliseconds of a world that only the links between hosts hold up."""
    if hosts is None:
        return None
    free, link = Link(0.0, BOUNDLESS, BOUNDLESS), Link(0.0, hosts.rate / 8, hosts.rate / 8)
    cluster = Cluster(str(hosts), hosts.hosts, hosts.ranks, Device(*[BOUNDLESS] * 4), free, link)
    work = Workload(*case.heads, case.width, case.length, dtype="float32", mask=case.mask)
    return round(1e3 * cost(Candidate(one.shape, one.tile, case.layout, one.exchange), work, cluster).seconds, 1)


def predicted(case: Case, shape: Shape, exchange: str) -> int:
    """Elements that the busiest rank receives, forward and backward: by the schedule, or the formula if all travels."""
    if case.mask == am.Full() and case.length % shape.ranks == 0:
        return int(case.length // shape.ranks * case.width * sum(elements(shape, *case.heads)))
    problem = Problem(case.mask, shape, case.layout, case.layout, case.length, case.length)
    places = [(r, c) for r in range(shape.queries) for c in range(shape.keys)]
    plans = (schedule(problem, r, c, exchange == "ring") for r, c in places)
    heads_axis = case.length // shape.ranks * case.width * elements(shape, *case.heads).heads
    return int(heads_axis) + max(_received(plan, r, c, case, shape) for plan, (r, c) in zip(plans, places, strict=True))


def _received(plan: Schedule, r: int, c: int, case: Case, shape: Shape) -> int:
    """q and dout come, and out and dq come back; k and v come, and dk and dv come back."""
    q_heads, kv_heads = (heads // shape.heads for heads in case.heads)
    rows_in = sum(count for _, count in plan.row.receive)
    rows_back = sum(len(tokens) for peer, tokens in plan.row.return_from if peer != c)
    keys_in = sum(count for step in plan.steps for _, count in step.receive)
    keys_back = sum(len(tokens) for step in plan.steps for peer, tokens in step.return_from if peer != r)
    keys_back += sum(count for step in plan.travelling if step for _, count in step.receive)
    return case.width * (q_heads * (3 * rows_in + 2 * rows_back) + kv_heads * (4 * keys_in + 2 * keys_back))


@dataclass(frozen=True)
class Peer:
    """A published package on one case: a call that gives the gradients of q, k and v, and how its tokens lie."""

    call: Callable[[], Any]
    layout: Layout


def _faults(peer: Peer, case: Case, whole: list[Tensor]) -> str | None:
    """Which of a package's gradients are not those of attention on one device, on any rank."""
    tensors = [x.clone().requires_grad_() for x in whole]
    out = am.attention(*tensors, mesh=None, mask=case.mask)
    expected = [_share(x, peer.layout) for x in torch.autograd.grad(out.sum(), tensors)]
    given = [x if x.shape == other.shape else x.transpose(1, 2) for x, other in zip(peer.call(), expected, strict=True)]
    off = torch.tensor([float((x - other).abs().max()) for x, other in zip(given, expected, strict=True)])
    dist.all_reduce(off, dist.ReduceOp.MAX)
    names = [name for name, error in zip(("dq", "dk", "dv"), off.tolist(), strict=True) if not error < 1e-2]
    return f"its {', '.join(names)} are wrong" if names else None


def _ring_attention_pytorch(case: Case, whole: list[Tensor]) -> Peer | str:
    if find_spec("ring_attention_pytorch") is None:
        return "not installed: pip install 'attnmesh[bench]'"
    if case.mask not in (am.Causal(), am.Full()):
        return "it has no such mask"
    from ring_attention_pytorch import ring_flash_attn_

    causal, ranks = case.mask == am.Causal(), dist.get_world_size()
    layout = am.Striped() if causal else am.Contiguous()
    q, k, v = (_share(x, layout).transpose(1, 2) for x in whole)
    q = q.unflatten(2, (case.heads[1], -1)).transpose(2, 3).flatten(2, 3)  # it counts grouped heads the other way
    q, k, v = (x.contiguous().requires_grad_() for x in (q, k, v))
    dout = torch.ones_like(q)

    def call() -> Any:
        out = ring_flash_attn_(q, k, v, None, causal, 1024, True, causal, None, ranks, False, 50.0)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
        return dq.unflatten(2, (-1, case.heads[1])).transpose(2, 3).flatten(2, 3), dk, dv

    return Peer(call, layout)


def _ringmaster(case: Case, whole: list[Tensor]) -> Peer | str:
    if find_spec("ringmaster") is None:
        return "not installed: pip install 'attnmesh[bench]'"
    if case.mask != am.Causal():
        return "its ring is causal, and without windows off the GPU"
    if case.heads[0] != case.heads[1]:
        return "its ring without flash-attn takes no grouped heads"
    from ringmaster import RotateMethod
    from ringmaster.ring import ring_attention

    q, k, v = (_share(x, am.Contiguous()).requires_grad_() for x in whole)
    group, scale = dist.group.WORLD, case.width**-0.5
    kernel = {"provider": "math", "attn_implementation": "math", "rotate_method": RotateMethod.ALLTOALL}

    def call() -> Any:
        out = ring_attention(q, k, v, group=group, causal=True, scaling=scale, dropout=0.0, **kernel)
        return torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    return Peer(call, am.Contiguous())


def _share(x: Tensor, layout: Layout) -> Tensor:
    return x[:, :, layout.positions(x.shape[2], dist.get_world_size(), dist.get_rank())]


PEERS = {
    "ring-attention-pytorch": _ring_attention_pytorch,
    "axolotl-ringmaster ring": _ringmaster,
}
