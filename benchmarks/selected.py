"""`python -m benchmarks selected`: a decode step that selects its tokens, on one rank and on several.

The layer has DeepSeek-V3.2's shape and random numbers: 128 heads on latents of 512 and 64, and an indexer of 64 heads
of 128 that selects 2,048 tokens. Projections are left out. In the layer of transformers they are narrow instead.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from time import perf_counter_ns

import torch
from torch import Tensor
from transformers import DeepseekV32Config, DynamicCache
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention

from attnmesh.cache.cache import KVCache
from attnmesh.cli.launch import Send, run_on_ranks
from attnmesh.comm.topology import dist_all_gather_ints
from attnmesh.core.selection import Selection
from attnmesh.decoding.decode_call import decode
from attnmesh.decoding.index_search import top_k_tokens
from attnmesh.mesh.axes import RankMesh
from attnmesh.runtime.counters import count_traffic
from attnmesh.setup.init_mesh import init_mesh
from benchmarks.netns import send_rows
from benchmarks.timing import Timing, exact_memory, peak_memory

HEADS, LATENT, ROTATED, INDEX_HEADS, INDEX_DIM = 128, 512, 64, 64, 128

PIECE = 8192
"""Tokens that are appended at once."""

NOPE, VALUE = 128, 128
"""Columns of a head's keys without rotation, and of its values, which transformers expands from latents."""

NARROW = 64
"""Columns of hidden states, and of the latents of queries, in the layer of transformers."""

STOCK_STEPS = 3
"""Steps of transformers that are timed: they take seconds."""

Step = Callable[[], tuple[int, int]]
"""One step: its nanoseconds, and those of it that select tokens."""


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
    """Milliseconds of a step in which tokens are scored and selected, the median."""
    kilobytes: float
    """Bytes that the busiest rank receives in a step."""
    extra_megabytes: float | None
    """Growth of the highest resident size of a rank during a step."""


def rows(request: Request, tokens: Sequence[int], ranks: Sequence[int], threads: int, add: Send) -> None:
    """Measure each length with transformers, where it fits, and on each number of ranks, which share the threads."""
    stock = [(_Stock, length, 1) for length in dict.fromkeys(map(_largest_of_stock, tokens))]
    for kind, length, count in [*stock, *((_Layer, length, count) for length in tokens for count in ranks)]:
        share = max(1, threads // count)
        with exact_memory():
            memory = run_on_ranks(count, _memory, kind, request, length, threads=share, spawned=True)
        extra = [max(column) for column in zip(*memory, strict=True)]
        run_on_ranks(count, send_rows, _steps, kind, request, length, extra, threads=share, on_message=add)


def _largest_of_stock(tokens: int) -> int:
    """Return the tokens, halved until the keys and values of all heads and two copies fit the free memory."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    while 3 * tokens * HEADS * (NOPE + VALUE) * 4 > free:
        tokens //= 2
    return tokens


class _Layer:
    """The caches of a layer, and the queries of a step."""

    def __init__(self, request: Request, tokens: int) -> None:
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
        self.request, self.tokens, self.mesh, self.steps = request, tokens, RankMesh.of(mesh), request.steps
        self.q, self.latent = torch.randn(1, HEADS, 1, width), torch.randn(1, 1, 1, width)
        self.operands = torch.randn(1, 1, INDEX_HEADS, INDEX_DIM), torch.randn(1, 1, INDEX_HEADS)
        self.key = torch.randn(1, 1, 1, INDEX_DIM)

    @property
    def contenders(self) -> dict[str, Step]:
        """Steps by name. One rank attends all tokens, too."""
        place, selected = f"{self.ranks} rank{'s' * (self.ranks > 1)}", self.request.selected
        steps: dict[str, Step] = {f"{place}, {selected:,} selected": partial(self.step, selected)}
        return steps if self.ranks > 1 else steps | {f"{place}, all tokens": partial(self.step, 0)}

    def step(self, selected: int) -> tuple[int, int]:
        """Return the nanoseconds of a step, and those of it that select tokens; all tokens are attended with 0."""
        start = perf_counter_ns()
        self.index.append(self.key)
        selection = None
        if selected:
            indices = top_k_tokens(self.index, _score, self.operands, selected)
            selection = Selection(indices[:, None])
        middle = perf_counter_ns()
        decode(self.q, self.latents, k=self.latent, selected=selection)
        stop = perf_counter_ns()
        self.index.truncate(self.tokens)
        self.latents.truncate(self.tokens)
        return stop - start, middle - start


class _Stock:
    """The layer of transformers, which expands all latents to keys and values of all heads at each step."""

    mesh = RankMesh.of(None)

    def __init__(self, request: Request, tokens: int) -> None:
        self.tokens, self.steps = tokens, min(STOCK_STEPS, request.steps)
        self.contenders: dict[str, Step] = {f"transformers, {request.selected:,} selected": self.step}
        widths = {"kv_lora_rank": LATENT, "qk_rope_head_dim": ROTATED, "qk_nope_head_dim": NOPE, "v_head_dim": VALUE}
        indexer = {"index_n_heads": INDEX_HEADS, "index_head_dim": INDEX_DIM, "index_topk": request.selected}
        narrow = {"hidden_size": NARROW, "q_lora_rank": NARROW, "num_hidden_layers": 1}
        config = DeepseekV32Config(num_attention_heads=HEADS, **widths, **indexer, **narrow)
        config._attn_implementation = "sdpa"
        self.times = list[int]()
        torch.manual_seed(0)
        self.layer, self.cache = DeepseekV32Attention(config, 0).eval(), DynamicCache(config=config)
        self.cache.update(torch.randn(1, 1, tokens, LATENT), torch.randn(1, 1, tokens, ROTATED), 0)
        self.cache.update_indexer(torch.randn(1, tokens, INDEX_DIM), 0)
        self.layer.indexer.register_forward_pre_hook(lambda *_: self.times.append(perf_counter_ns()))
        self.layer.indexer.register_forward_hook(lambda *_: self.times.append(perf_counter_ns()))
        self.hidden, self.mask = torch.randn(1, 1, NARROW), torch.zeros(1, 1, 1, tokens + 1)
        self.rotation = torch.ones(1, 1, ROTATED), torch.zeros(1, 1, ROTATED)

    def step(self) -> tuple[int, int]:
        """Return the nanoseconds of a step, and those of it in the indexer."""
        self.times.clear()
        start = perf_counter_ns()
        self.layer(self.hidden, self.rotation, self.mask, past_key_values=self.cache)
        stop, (first, last) = perf_counter_ns(), self.times
        self.cache.crop(-1)
        return stop - start, last - first


def _row(layer: _Layer | _Stock, contender: str, extra: float | None) -> Row:
    """Return the row of one way to decode, whose extra memory is known."""
    times, step, axes = list[tuple[int, ...]](), layer.contenders[contender], layer.mesh.axes
    for _ in range(layer.steps + 1):
        table = dist_all_gather_ints(step(), axes)
        times.append(tuple(map(max, zip(*table, strict=True))))
    with count_traffic() as traffic:
        step()
    most_bytes = max(count for (count,) in dist_all_gather_ints([traffic.bytes], axes))
    step_timing, selecting = (Timing.of([1e-9 * x for x in column]) for column in zip(*times[1:], strict=True))
    return Row(layer.tokens, contender, step_timing, selecting.median, most_bytes / 1e3, extra)


def _score(keys: Tensor, operands: Sequence[Tensor]) -> Tensor:
    """Return the sum over the indexer's heads of `w * relu(q.k)`."""
    q, weights = operands
    return (weights.unsqueeze(-2) @ (q @ keys[:, None].mT).relu()).squeeze(-2)


@torch.no_grad()
def _memory(kind: type[_Layer | _Stock], request: Request, tokens: int) -> list[float]:
    """Return the extra megabytes of a step of each contender, none where the system does not count them."""
    grown = [peak_memory(step, torch.device("cpu")) for step in kind(request, tokens).contenders.values()]
    return [extra / 1e6 for extra in grown if extra is not None]


@torch.no_grad()
def _steps(kind: type[_Layer | _Stock], request: Request, tokens: int, extra: Sequence[float]) -> Iterator[Row]:
    layer = kind(request, tokens)
    for contender, megabytes in zip_longest(layer.contenders, extra):
        yield _row(layer, contender, megabytes)
