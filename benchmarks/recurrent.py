"""`python -m benchmarks recurrent`: one Gated DeltaNet layer over ranks, by a scan of states and by heads.

The layer is the mixer of Qwen3-Next with random weights, in float32. All ways take turns in the same ranks, of one
thread each. Beside them stands a limit: an even share of the time of one rank, and the time of the messages.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from time import process_time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

import attnmesh as am
from attnmesh.cli.launch import Send
from attnmesh.core.layout import Contiguous, Layout, Zigzag
from attnmesh.errors import ArgumentError
from attnmesh.hf.recurrent.prepare_recurrent import prepare_layers
from attnmesh.hf.shard_tensors import ShardMask
from attnmesh.hf.sharded_sequence import ShardedSequence
from attnmesh.runtime.counters import count_traffic
from attnmesh.setup.init_mesh import init_mesh
from benchmarks.netns import World, ranks_of, run_on, send_rows
from benchmarks.timing import Timing, race

WHOLE, SHARE, SHARES = "1 rank, all tokens", "1 rank, its share of the tokens", "all ranks, shares without exchange"
SCANNED = "all ranks, shares as the scan computes them"
LOCAL = (WHOLE, SHARE, SHARES, SCANNED)
"""Contenders without messages."""


@dataclass(frozen=True)
class Request:
    """Tokens, key heads (and twice as many value heads), their width, rounds of timing, and the link's bits/s."""

    tokens: int
    key_heads: int
    head_dim: int
    rounds: int
    rate: float | None = None


@dataclass(frozen=True)
class Row:
    """One way to run the layer."""

    case: str
    contender: str
    timing: Timing
    cpu_ms: float
    """Median of the processor time of the busiest rank, which other work on the machine changes less."""
    received: int = 0
    """Bytes that the busiest rank receives."""
    messages_ms: float | None = None
    """Time of these bytes at the link's rate."""
    limit_ms: float | None = None
    """An even share of the time of one rank with all tokens, and the messages."""
    beside_shares: float | None = None
    """The time over that of all ranks' shares without exchange, and the messages."""


def rows(request: Request, world: World, add: Send) -> None:
    """Measure forward alone, then forward and backward."""
    ranks = ranks_of(world)
    given, fix = f"{request.key_heads} key heads on {ranks} ranks", "pass --key-heads as a multiple of the ranks"
    if request.key_heads % ranks:
        raise ArgumentError("--key-heads", "key heads that the ranks divide evenly", given, fix)
    rate = None if isinstance(world, int) else world.rate
    run_on(world, send_rows, _cases, replace(request, rate=rate), on_message=add)


def layer_of(request: Request) -> Any:
    """Return the layer, with the same weights on all ranks."""
    config = Qwen3NextConfig(
        hidden_size=request.key_heads * request.head_dim,
        num_hidden_layers=1,
        linear_num_key_heads=request.key_heads,
        linear_num_value_heads=2 * request.key_heads,
        linear_key_head_dim=request.head_dim,
        linear_value_head_dim=request.head_dim,
        layer_types=["linear_attention"],
    )
    torch.manual_seed(0)
    layer = Qwen3NextGatedDeltaNet(config, 0)
    prepare_layers(layer)
    return layer


def layer_call(
    layer: Any, hidden: Tensor, sequence: ShardedSequence | None, backward: bool
) -> Callable[[], tuple[Tensor, ...] | Tensor]:
    """Return a call of the layer: its output, or the gradients of its input and its weights."""
    mask = None if sequence is None else ShardMask.of(torch.ones(hidden.shape[:2], dtype=torch.long), sequence=sequence)
    hidden = hidden.detach().requires_grad_(backward)
    inputs = (hidden, *layer.parameters())

    def call() -> tuple[Tensor, ...] | Tensor:
        with torch.set_grad_enabled(backward):
            out: Tensor = layer(hidden, attention_mask=mask)
        return torch.autograd.grad(out, inputs, torch.ones_like(out)) if backward else out

    return call


def calls_of(request: Request, mesh: DeviceMesh, *, backward: bool) -> dict[str, Callable[[], Any]]:
    """Return the call of each contender on this rank; ranks that have no part in one do nothing."""
    layer, ranks = layer_of(request), dist.get_world_size()
    states = torch.randn(1, request.tokens, layer.hidden_size, generator=torch.Generator().manual_seed(1))
    share = am.shard(states, mesh, layout=Contiguous(), dim=1)

    def sharded(layout: Layout, exchange: str) -> Callable[[], Any]:
        sequence = ShardedSequence(mesh, layout, request.tokens, exchange=exchange)
        return layer_call(layer, am.shard(states, mesh, layout=layout, dim=1), sequence, backward)

    def alone(hidden: Tensor) -> Callable[[], Any]:
        return layer_call(layer, hidden, None, backward) if dist.get_rank() == 0 else lambda: None

    return {
        WHOLE: alone(states),
        SHARE: alone(share),
        SHARES: layer_call(layer, share, None, backward),
        SCANNED: layer_call(layer, share, ShardedSequence(None, Contiguous(), share.shape[1]), backward),
        f"{ranks} ranks by scan": sharded(Contiguous(), "scan"),
        f"{ranks} ranks by scan, zigzag": sharded(Zigzag(), "scan"),
        f"{ranks} ranks by heads": sharded(Contiguous(), "heads"),
    }


def _cases(request: Request) -> Iterator[Row]:
    mesh = init_mesh("cpu", (1, 1, dist.get_world_size()))
    for case in ("forward", "forward + backward"):
        yield from _contest(request, mesh, case)


def _contest(request: Request, mesh: DeviceMesh, case: str) -> Iterator[Row]:
    """Time all contenders in turns, each as long as its slowest rank."""
    calls = calls_of(request, mesh, backward=case != "forward")
    received = {name: _received(call) for name, call in calls.items() if name not in LOCAL}
    cpu: dict[str, list[float]] = {name: [] for name in calls}
    timings = race(
        {name: _until_all(call, cpu[name]) for name, call in calls.items()},
        torch.device("cpu"),
        seconds=0,
        rounds=request.rounds,
        before=dist.barrier,
    )
    even = timings[WHOLE].median / dist.get_world_size()
    for name, timing in timings.items():
        row = Row(case, name, timing, _busiest(cpu[name][1:]), received.get(name, 0))
        if row.received and request.rate is not None:
            messages = round(8e3 * row.received / request.rate, 1)
            beside = round(timing.median / (timings[SHARES].median + messages), 3)
            row = replace(row, messages_ms=messages, limit_ms=round(even + messages, 1), beside_shares=beside)
        yield row


def _received(call: Callable[[], Any]) -> int:
    """Return the bytes that the busiest rank receives in a call after the first, which compares weights."""
    call()
    with count_traffic() as traffic:
        call()
    figure = torch.tensor([traffic.bytes])
    dist.all_reduce(figure, dist.ReduceOp.MAX)
    return int(figure)


def _busiest(seconds: list[float]) -> float:
    """Return the milliseconds of the rank with the largest median."""
    figure = torch.tensor([1e3 * median(seconds)])
    dist.all_reduce(figure, dist.ReduceOp.MAX)
    return round(float(figure), 1)


def _until_all(call: Callable[[], Any], cpu: list[float]) -> Callable[[], None]:
    """Return the call and a barrier after it. Each call adds the seconds of the processor to `cpu`."""

    def run() -> None:
        start = process_time()
        call()
        cpu.append(process_time() - start)
        dist.barrier()

    return run
