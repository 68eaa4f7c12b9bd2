"""`python -m benchmarks selected`: a decode step that selects its tokens, on one rank and on several.

The layer has DeepSeek-V3.2's shape and random numbers: 128 heads on latents of 512 and 64, and an indexer of 64 heads
of 128 that selects 2,048 tokens. Projections are left out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from time import perf_counter_ns

import torch
from torch import Tensor

from attnmesh.cli.launch import Send, run_on_ranks
from attnmesh.comm.topology import all_gather_ints
from attnmesh.core.selection import Selection
from attnmesh.decode.cache import KVCache
from attnmesh.decode.decode import decode
from attnmesh.decode.indexer import top_k_tokens
from attnmesh.mesh.axes import Mesh
from attnmesh.runtime.counters import counted
from attnmesh.setup.init_mesh import init_mesh
from benchmarks.netns import send_rows
from benchmarks.timing import Timing, exact_memory, peak_memory

HEADS, LATENT, ROTATED, INDEX_HEADS, INDEX_DIM = 128, 512, 64, 64, 128

PIECE = 8192
"""Tokens that are appended at once."""


@dataclass(frozen=True)
class Request:
    """Tokens that are selected, and steps to time."""

    selected: int
    steps: int


@dataclass(frozen=True)
class Row:
    """Steps at one length, as long as their slowest rank."""

    tokens: int
    contender: str
    timing: Timing
    """Milliseconds of a step."""
    selecting: float
    """Milliseconds of it in which tokens are scored and selected, the median."""
    kilobytes: float
    """Bytes that the busiest rank receives in a step."""
    extra_megabytes: float | None
    """Growth of the highest resident size of a rank during a step."""


def rows(request: Request, tokens: Sequence[int], ranks: Sequence[int], threads: int, add: Send) -> None:
    """Measure each length on each number of ranks, which share the threads."""
    for length in tokens:
        for count in ranks:
            share = max(1, threads // count)
            with exact_memory():
                memory = run_on_ranks(count, _memory, request, length, threads=share, spawned=True)
            extra = [max(column) for column in zip(*memory, strict=True)]
            run_on_ranks(count, send_rows, _steps, request, length, extra, threads=share, on_message=add)


class _Layer:
    """The caches of a layer, and the queries of a step."""

    def __init__(self, tokens: int) -> None:
        self.ranks = torch.distributed.get_world_size()
        mesh = init_mesh("cpu", (1, 1, self.ranks)) if self.ranks > 1 else None
        sizes = {"batch": 1, "kv_heads": 1, "capacity": tokens + 1, "dtype": torch.float32}
        width = LATENT + ROTATED
        self.latents = KVCache(mesh, head_dim=width, value_dim=LATENT, values="prefix", **sizes)  # type: ignore[arg-type]
        self.index = KVCache(mesh, head_dim=INDEX_DIM, values="none", **sizes)  # type: ignore[arg-type]
        torch.manual_seed(0)
        for start in range(0, tokens, PIECE):
            count = min(PIECE, tokens - start)
            self.latents.append(torch.randn(1, 1, count, width))
            self.index.append(torch.randn(1, 1, count, INDEX_DIM))
        self.tokens, self.mesh = tokens, Mesh.of(mesh)
        self.q, self.latent = torch.randn(1, HEADS, 1, width), torch.randn(1, 1, 1, width)
        self.operands = torch.randn(1, 1, INDEX_HEADS, INDEX_DIM), torch.randn(1, 1, INDEX_HEADS)
        self.key = torch.randn(1, 1, 1, INDEX_DIM)

    def step(self, selected: int) -> tuple[int, int]:
        """Return the nanoseconds of a step, and those of it that select tokens; all tokens are attended with 0."""
        start = perf_counter_ns()
        self.index.append(self.key)
        chosen = None
        if selected:
            indices = top_k_tokens(self.index, _score, self.operands, selected)
            chosen = Selection(indices[:, None])
        middle = perf_counter_ns()
        decode(self.q, self.latents, k=self.latent, selected=chosen)
        stop = perf_counter_ns()
        self.index.truncate(self.tokens)
        self.latents.truncate(self.tokens)
        return stop - start, middle - start

    def measure(self, contender: str, selected: int, steps: int, extra: float | None) -> Row:
        """Return the row of one way to decode, whose extra memory is known."""
        times: list[tuple[int, ...]] = []
        for _ in range(steps + 1):
            table = all_gather_ints(self.step(selected), self.mesh.axes)
            times.append(tuple(map(max, zip(*table, strict=True))))
        with counted() as traffic:
            self.step(selected)
        most = max(count for (count,) in all_gather_ints([traffic.bytes], self.mesh.axes))
        whole, selecting = (Timing.of([1e-9 * x for x in column]) for column in zip(*times[1:], strict=True))
        return Row(self.tokens, contender, whole, selecting.median, most / 1e3, extra)


def _score(keys: Tensor, operands: Sequence[Tensor]) -> Tensor:
    """Return the sum over the indexer's heads of `w * relu(q.k)`."""
    q, weights = operands
    return (weights.unsqueeze(-2) @ (q @ keys[:, None].mT).relu()).squeeze(-2)


def _contenders(request: Request, ranks: int) -> list[int]:
    """Return the tokens that each contender selects, 0 for all."""
    return [request.selected, 0] if ranks == 1 else [request.selected]


@torch.no_grad()
def _memory(request: Request, tokens: int) -> list[float]:
    """Return the extra megabytes of a step of each contender, none where the system does not count them."""
    layer, found = _Layer(tokens), list[float]()
    for selected in _contenders(request, layer.ranks):
        extra = peak_memory(partial(layer.step, selected), torch.device("cpu"))
        found += [] if extra is None else [extra / 1e6]
    return found


@torch.no_grad()
def _steps(request: Request, tokens: int, extra: Sequence[float]) -> Iterator[Row]:
    layer = _Layer(tokens)
    for selected, megabytes in zip_longest(_contenders(request, layer.ranks), extra):
        name = f"{selected:,} selected" if selected else "all tokens"
        yield layer.measure(f"{layer.ranks} rank{'s' * (layer.ranks > 1)}, {name}", selected, request.steps, megabytes)
