"""`python -m benchmarks calls`: small calls of attention on two ranks, beside one all-gather of their keys."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attnmesh as am
from attnmesh.cli.launch import Send, run_on_ranks
from benchmarks.netns import send_rows
from benchmarks.timing import Call, Timing, race

TOKENS, HEADS, KV_HEADS, DIM = 64, 8, 2, 64

SHAPES = ((1, 1, 2), (1, 2, 1), (2, 1, 1))
"""Meshes of two ranks: keys, queries and heads."""

GOALS = {"forward": 6.0, "forward and backward": 14.0}
"""Times of a checked call at most, in all-gathers of its keys."""

CPU = torch.device("cpu")

GATHER = "all-gather of the keys"


@dataclass(frozen=True)
class Row:
    """The time of a call, and how many all-gathers of its keys take as long."""

    case: str
    timing: Timing
    gathers: float
    goal: float | None = None


def rows(rounds: int, add: Send) -> None:
    """Measure on two ranks, and add each row."""
    run_on_ranks(2, send_rows, _rows, rounds, on_message=add)


def _rows(rounds: int) -> Iterator[Row]:
    calls, goals = _contenders()
    timings = race(calls, CPU, seconds=math.inf, rounds=rounds, before=dist.barrier, repeat=20)
    gather = timings[GATHER].median
    for name, timing in timings.items():
        yield Row(name, timing, round(timing.median / gather, 2), goals.get(name))


def _contenders() -> tuple[dict[str, Call], dict[str, float]]:
    """Return the calls by name, and the goals of those that have one."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, TOKENS, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    keys = torch.randn(2, 1, KV_HEADS, TOKENS // 2, DIM)
    gathered = [torch.empty_like(keys) for _ in range(2)]
    calls: dict[str, Call] = {GATHER: lambda: dist.all_gather(gathered, keys)}
    calls["SDPA on one rank, forward"] = _forward(partial(sdpa, is_causal=True, enable_gqa=True), [q, k, v])
    goals = {}
    for shape in SHAPES:
        mesh, layout = am.init_mesh(shape), am.Zigzag()
        shards = [am.shard(x, mesh, layout=layout) for x in (q, k, v)]
        for checked in (None, False):
            run = partial(am.attention, mesh=mesh, layout=layout, length=TOKENS, checked=checked)
            for kind, make in (("forward", _forward), ("forward and backward", _both)):
                name = f"{'x'.join(map(str, shape))}, {kind}{', unchecked' * (checked is False)}"
                calls[name] = make(run, shards)
                if checked is None:
                    goals[name] = GOALS[kind]
    return calls, goals


def _forward(run: Callable[..., Tensor], shards: list[Tensor]) -> Call:
    def call() -> Tensor:
        with torch.no_grad():
            return run(*shards)

    return call


def _both(run: Callable[..., Tensor], shards: list[Tensor]) -> Call:
    learned = [x.clone().requires_grad_() for x in shards]
    dout = torch.randn_like(shards[0])
    return lambda: torch.autograd.grad(run(*learned), learned, dout)
