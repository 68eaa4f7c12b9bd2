"""`python -m benchmarks recurrent`: a Gated DeltaNet layer like Qwen3-Next's, on one rank and over hosts by a scan."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from attnmesh.cli.launch import Send, run_on_ranks
from attnmesh.cli.netns import Hosts, run_on, send_rows
from attnmesh.cli.timing import Timing, race
from attnmesh.comm.counters import counted
from attnmesh.core.layout import Contiguous, Layout, Zigzag
from attnmesh.hf.recurrent import prepare
from attnmesh.hf.shards import ShardMask, Shards

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Request:
    """Tokens of the sequence, key heads, and rounds to time."""

    tokens: int
    heads: int
    rounds: int


@dataclass(frozen=True)
class Row:
    """One way to compute the layer, forward alone or forward and backward."""

    contender: str
    work: str
    timing: Timing
    received: int = 0
    """Most bytes that a rank receives."""
    limit_ms: float | None = None
    """Time of a rank's own tokens, while all ranks compute, and of its messages at the link's rate."""


def rows(request: Request, hosts: Hosts, add: Send) -> None:
    """Measure one rank with all tokens, then hosts with a share each."""
    run_on_ranks(1, send_rows, _one_rank, request, threads=1, on_message=add)
    run_on(hosts, send_rows, _on_hosts, request, hosts, threads=1, on_message=add)


class _Layer:
    """The layer, and the calls that are timed."""

    def __init__(self, request: Request, tokens: int) -> None:
        torch.manual_seed(0)
        columns = 128 * request.heads  # as Qwen3-Next: 2,048 columns and 16 key heads
        heads = {"linear_num_key_heads": request.heads, "linear_num_value_heads": 2 * request.heads}
        config = Qwen3NextConfig(hidden_size=columns, num_hidden_layers=1, layer_types=["linear_attention"], **heads)
        self.layer = Qwen3NextGatedDeltaNet(config, 0).float()
        self.hidden = torch.randn(1, tokens, columns)

    def calls(self, mask: Tensor | None, barrier: Any = lambda: None) -> dict[str, Any]:
        """Return a call of the forward pass and one of both passes, each between barriers."""

        def forward() -> None:
            with torch.no_grad():
                self.layer(self.hidden, attention_mask=mask)
            barrier()

        def both() -> None:
            hidden = self.hidden.clone().requires_grad_()
            self.layer(hidden, attention_mask=mask).sum().backward()
            barrier()

        return {"forward": forward, "forward and backward": both}


def _one_rank(request: Request) -> Iterator[Row]:
    calls = _Layer(request, request.tokens).calls(None)
    for work, timing in race(calls, CPU, seconds=0, rounds=request.rounds).items():
        yield Row("1 rank, stock transformers", work, timing)


def _on_hosts(request: Request, hosts: Hosts) -> Iterator[Row]:
    """Time the layer on each rank's tokens: without exchange, and by a scan in both layouts."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("keys",))
    made = _Layer(request, request.tokens // ranks)
    layouts: dict[str, Layout | None] = {f"{ranks} ranks, no exchange": None}
    layouts |= {f"{ranks} ranks, scan, contiguous": Contiguous(), f"{ranks} ranks, scan, zigzag": Zigzag()}
    calls, received = {}, {}
    prepare(nn.Sequential(made.layer))
    for name, layout in layouts.items():
        mask = None
        if layout is not None:
            shards = Shards(mesh, layout, request.tokens // ranks * ranks)
            mask = ShardMask.of(torch.ones(1, request.tokens // ranks, dtype=torch.long), shards)
        for work, call in made.calls(mask, dist.barrier).items():
            calls[name, work] = call
            with counted() as traffic:
                call()
            most = torch.tensor([traffic.bytes])
            dist.all_reduce(most, dist.ReduceOp.MAX)
            received[name, work] = int(most)
    timings = race({" / ".join(key): call for key, call in calls.items()}, CPU, seconds=0, rounds=request.rounds)
    for name, work in calls:
        alone = timings[f"{ranks} ranks, no exchange / {work}"].median
        limit = None if "no exchange" in name else round(alone + 8e3 * received[name, work] / hosts.rate, 1)
        yield Row(name, work, timings[f"{name} / {work}"], received[name, work], limit)
