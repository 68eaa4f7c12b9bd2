"""`python -m benchmarks diffusion`: one attention layer of video and image transformers over ranks, forward.

Shapes of the mesh take turns with diffusers' own Ulysses attention in the same ranks, of one thread each. A limit
stands beside each: the time of its bytes over the links between hosts.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from diffusers.models._modeling_parallel import ParallelConfig
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import attnmesh as am
from attnmesh.cli.launch import Send
from attnmesh.cost.candidate_mesh import CandidateMesh
from attnmesh.diffusers.tokens import run_sizes
from attnmesh.errors import ArgumentError
from attnmesh.mesh.axes import RankMesh
from attnmesh.mesh.shapes import Shape
from attnmesh.planner.plan import plan
from attnmesh.planner.workload import Workload
from attnmesh.planner.workload_presets import WORKLOADS, workload_preset
from attnmesh.runtime.counters import count_traffic
from benchmarks.netns import Hosts, World, run_on, send_rows
from benchmarks.prefill import Contender, links_alone, mesh_of, milliseconds_of_bytes
from benchmarks.timing import Timing, race

RING, PEER = "ring", "Ulysses of diffusers"


class Request(NamedTuple):
    """Names of workloads, the factor by which their tokens are divided, tokens instead, rounds, and the hosts."""

    workloads: tuple[str, ...]
    scale: int
    length: int | None
    rounds: int
    hosts: Hosts | None = None


@dataclass(frozen=True)
class Row:
    """One contender on one workload; `note` is why it does not run."""

    case: str
    contender: str
    timing: Timing | None = None
    beside_ring: float | None = None
    """Speedup over our ring."""
    of_bytes: float | None = None
    """Speedup over our ring, divided by the one that bytes allow."""
    received: int | None = None
    """Bytes that the busiest rank receives, of ours alone."""
    limit_ms: float | None = None
    """Time of the bytes over the busiest link between hosts."""
    error: float | None = None
    """Largest error of some outputs beside float64."""
    note: str | None = None


def rows(request: Request, world: World, add: Send) -> None:
    """Measure each workload."""
    for name in request.workloads:
        if name not in WORKLOADS:
            raise ArgumentError("--workload", f"one of {', '.join(WORKLOADS)}", repr(name), "leave it out for three")
    request = request._replace(hosts=None if isinstance(world, int) else world)
    run_on(world, send_rows, _cases, request, on_message=add)


def workload_of(name: str, request: Request) -> Workload:
    """Return a layer of a preset, in float32, with the tokens of the request."""
    preset = workload_preset(name)
    length = request.length or preset.length // request.scale
    return Workload(
        preset.q_heads, preset.kv_heads, preset.head_dim, length, dtype="float32", mask=am.Full(), phase="prefill"
    )


def contenders(work: Workload, ranks: int, hosts: Hosts | None) -> dict[str, Contender]:
    """Return the known schemes, and the fastest plan if it is none of them, by name."""
    a_host = ranks if hosts is None else hosts.ranks
    per_host = max(n for n in range(1, a_host + 1) if ranks % n == 0)
    heads = max(n for n in range(1, ranks + 1) if ranks % n == 0 and work.kv_heads >= n)
    usp_heads = heads if heads < ranks else max(n for n in range(1, ranks) if ranks % n == 0)
    columns = max(n for n in range(1, ranks + 1) if ranks % n == 0 and n * n <= ranks)
    shapes = {
        RING: (Shape(1, ranks, 1), "ring"),
        "Ulysses": (Shape(ranks, 1, 1), "pipelined"),
        "USP": (Shape(usp_heads, ranks // usp_heads, 1), "ring"),
        "2D": (Shape(1, ranks // columns, columns), "pipelined"),
    }
    if heads < ranks:
        del shapes["Ulysses"]
    schemes = {name: Contender(shape, _tile(shape, per_host), exchange) for name, (shape, exchange) in shapes.items()}
    if hosts is None:  # the planner has no link to price
        return schemes
    fastest = plan(work, links_alone(hosts))[0]
    exchange = "ring" if fastest.exchange == "ring" else "pipelined"  # all at once is as fast, but for kernels
    planned = Contender(fastest.shape, fastest.tile, exchange)
    return schemes if planned in schemes.values() else {**schemes, "planned": planned}


def _tile(shape: Shape, a_host: int) -> Shape:
    """Return the part of a mesh on one host: the axes that come first fill it."""
    sizes, ranks_left = [], a_host
    for size in shape:
        sizes.append(max(n for n in range(1, ranks_left + 1) if ranks_left % n == 0 and size % n == 0))
        ranks_left //= sizes[-1]
    return Shape(*sizes)


def _cases(request: Request) -> Iterator[Row]:
    for name in request.workloads:
        yield from _contest(name, request)


def _contest(name: str, request: Request) -> list[Row]:
    """Time all contenders in turns, each as long as its slowest rank."""
    work, ranks = workload_of(name, request), dist.get_world_size()
    case = f"{name}: {work.length:,} tokens, {work.q_heads} heads of {work.head_dim}"
    torch.manual_seed(0)
    qkv = list(torch.randn(3, 1, work.length, work.q_heads, work.head_dim).unbind())
    rows: dict[str, Row] = {}
    runs: dict[str, Run] = {}
    for scheme, contender in contenders(work, ranks, request.hosts).items():
        label = f"{scheme}, {contender.name}"
        runs[label] = our_run(work, qkv, contender)
        rows[label] = Row(case, label, received=_received(runs[label].call))
        if request.hosts is not None:
            candidate = CandidateMesh(contender.shape, contender.tile, am.Contiguous(), contender.exchange)
            rows[label] = replace(rows[label], limit_ms=milliseconds_of_bytes(work, candidate, request.hosts))
    peer = diffusers_run(qkv)
    rows[PEER] = Row(case, PEER, note=peer if isinstance(peer, str) else None)
    if not isinstance(peer, str):
        runs[PEER] = peer
    for label, run in runs.items():
        rows[label] = replace(rows[label], error=_error(run, qkv))
    calls = {label: _until_all(run.call) for label, run in runs.items()}
    timings = race(calls, torch.device("cpu"), seconds=0, rounds=request.rounds, before=dist.barrier)
    ring = next(row for label, row in rows.items() if label.startswith(RING))
    return [_timed(row, timings.get(label), ring, timings[ring.contender]) for label, row in rows.items()]


def _timed(row: Row, timing: Timing | None, ring: Row, beside: Timing) -> Row:
    """Return a row with its time, beside the ring's."""
    if timing is None:
        return row
    speedup = beside.median / timing.median
    row = replace(row, timing=timing, beside_ring=round(speedup, 3))
    if row.limit_ms and ring.limit_ms:
        row = replace(row, of_bytes=round(speedup / (ring.limit_ms / row.limit_ms), 3))
    return row


class Run(NamedTuple):
    """A call that returns this rank's outputs, (1, tokens, heads, dim), and the positions of these tokens."""

    call: Callable[[], Tensor]
    positions: Tensor


def our_run(work: Workload, qkv: list[Tensor], contender: Contender) -> Run:
    """Return our attention of this rank's tokens, with the dims in diffusers' order."""
    mesh, ranks = mesh_of(contender.shape, contender.tile), contender.shape.ranks
    layout = am.Split(run_sizes(work.length, ranks))
    q, k, v = (am.shard(x, mesh, layout=layout, dim=1).transpose(1, 2) for x in qkv)

    def call() -> Tensor:
        with torch.no_grad():
            options: Any = {"mesh": mesh, "layout": layout, "length": work.length, "exchange": contender.exchange}
            return am.attention(q, k, v, mask=am.Full(), checked=False, **options).transpose(1, 2)

    return Run(call, layout.positions(work.length, ranks, RankMesh.of(mesh).shard_index))


def diffusers_run(qkv: list[Tensor]) -> Run | str:
    """Return diffusers' Ulysses attention of this rank's tokens, or why it does not run."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tokens, heads = qkv[0].shape[1:3]
    uneven = heads % ranks != 0 or tokens % ranks != 0
    config = ContextParallelConfig(ulysses_degree=ranks, ulysses_anything=uneven)
    parallel = ParallelConfig(context_parallel_config=config)
    mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("ring", "ulysses"))
    parallel.setup(rank, ranks, torch.device("cpu"), mesh=mesh)
    q, k, v = (x.tensor_split(ranks, 1)[rank] for x in qkv)

    def call() -> Tensor:
        with torch.no_grad():
            out: Tensor = dispatch_attention_fn(q, k, v, backend=AttentionBackendName.NATIVE, parallel_config=parallel)
        return out

    try:
        call()
    except (AssertionError, RuntimeError) as error:  # alike on all ranks: heads that it cannot split
        return f"does not run: {' '.join(str(error).split())}"
    return Run(call, torch.arange(tokens).tensor_split(ranks)[rank])


def _error(run: Run, qkv: list[Tensor]) -> float:
    """Return the largest error of some outputs of one head, beside float64, on all ranks."""
    out, (q, k, v) = run.call(), (x[0, :, -1].double() for x in qkv)
    some = torch.arange(0, len(run.positions), max(1, len(run.positions) // 8))
    weights = (q[run.positions[some]] @ k.T / q.shape[1] ** 0.5).softmax(-1)
    figure = (out[0, some, -1] - weights @ v).abs().max()
    dist.all_reduce(figure, dist.ReduceOp.MAX)
    return float(figure)


def _received(call: Callable[[], Tensor]) -> int:
    """Return the bytes that the busiest rank receives."""
    with count_traffic() as traffic:
        call()
    figure = torch.tensor([traffic.bytes])
    dist.all_reduce(figure, dist.ReduceOp.MAX)
    return int(figure)


def _until_all(call: Callable[[], Tensor]) -> Callable[[], None]:
    """Return the call and a barrier after it."""

    def run() -> None:
        call()
        dist.barrier()

    return run
