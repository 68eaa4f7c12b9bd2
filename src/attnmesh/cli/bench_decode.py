"""`attnmesh bench decode`: merges across ranks, and whole steps, beside published code, other patterns and the limit.

A figure is the time of one call among many in a row, as a server makes them, on ranks that all work at once. The limit
of a step is what cannot be had for less here: the local attention, and `log2(p)` bare exchanges of the same payload.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import attnmesh as am
from attnmesh.cli.launch import run_on_ranks
from attnmesh.cli.netns import World, run_on
from attnmesh.cli.timing import Timing, peak_memory, race
from attnmesh.comm.merge_ranks import HOW
from attnmesh.core.partial import Partial, join

Call = Callable[[], Any]

WIDTH = 128

PIECE = 8192
"""Tokens that are made at once when a cache is filled."""


@dataclass(frozen=True)
class Row:
    """One contender in one case: milliseconds a call, and how many times ours that is."""

    case: str
    contender: str
    timing: Timing | None = None
    times_ours: float | None = None


@dataclass(frozen=True)
class Memory:
    """What a rank holds at the most in one step, keys and values included, in megabytes."""

    case: str
    contender: str
    megabytes: float


@dataclass(frozen=True)
class Case:
    """One layer's decoding: heads, tokens of all ranks and dtype."""

    name: str
    heads: tuple[int, int]
    tokens: int
    dtype: torch.dtype = torch.float32
    repeat: int = 10
    rounds: int = 9
    width: int = WIDTH


def parts(world: World) -> dict[str, Callable[[], list[Row]]]:
    """The bench part by part, each in ranks of its own; across hosts, what changes with the context's length."""
    local = {
        "merges": _merges,
        "steps": _steps,
        "the papers' cases": _papers,
        "the same bits": _reproducible,
        "a million tokens": _million,
    }
    functions = local if isinstance(world, int) else {"merges": _merges, "lengths": _lengths}
    return {name: partial(_on_ranks, world, function) for name, function in functions.items()}


def _on_ranks(world: World, function: Callable[[], list[Row]]) -> list[Row]:
    rows: list[Row] = run_on(world, function)[0]
    return rows


def memory(ranks: int) -> list[Memory]:
    """The tree beside the ring."""
    return run_on_ranks(ranks, _memories, exact_memory=True)[0]  # type: ignore[no-any-return]


# --- merges alone ---


def _merges() -> list[Row]:
    return [row for batch in (1, 8) for row in _merge(batch)]


def _merge(batch: int) -> list[Row]:
    own, group = Partial(torch.randn(batch, 32, 1, WIDTH), torch.randn(batch, 32, 1)), dist.group.WORLD
    options: dict[str, dict[str, Any]] = {how: {"how": how} for how in HOW}
    options["tree, out in bfloat16"] = {"how": "tree", "wire": torch.bfloat16}
    options["to each its heads (Helix: one all-to-all)"] = {"output": "heads"}
    contenders: dict[str, Call] = {
        name: partial(am.merge_across, own, group, checked=False, **each) for name, each in options.items()
    }
    contenders["gather lse, reduce-scatter out (vLLM)"] = partial(_reduce_scattered, own)
    contenders["limit: log2(p) bare exchanges"] = partial(_bare_exchanges, own.out)
    return _raced(Case(f"merge, batch {batch}: 32 heads of 128, float32", (32, 32), 0), contenders, "auto")


def _reduce_scattered(own: Partial) -> Tensor:
    """As vLLM's decode context parallelism does it: weights from everyone's lse, a sum of which each has its heads."""
    ranks = dist.get_world_size()
    lses = [torch.empty_like(own.lse) for _ in range(ranks)]
    dist.all_gather(lses, own.lse)
    lse = torch.logsumexp(torch.stack(lses), 0)
    weighed = (own.out * torch.exp(own.lse - lse).unsqueeze(-1)).transpose(0, 1).contiguous()
    mine = weighed.new_empty(weighed.shape[0] // ranks, *weighed.shape[1:])
    dist.reduce_scatter_tensor(mine, weighed)
    return mine.transpose(0, 1)


def _bare_exchanges(payload: Tensor) -> None:
    """As many exchanges as a tree has, of the same bytes, and nothing else; ranks are a power of two."""
    peers = [dist.get_rank() ^ (1 << step) for step in range((dist.get_world_size() - 1).bit_length())]
    boxes = [torch.empty_like(payload) for _ in peers]
    coming: list[Any] = [dist.irecv(box, peer) for box, peer in zip(boxes, peers, strict=True)]
    going: list[Any] = []
    for peer, work in zip(peers, coming, strict=True):
        going.append(dist.isend(payload, peer))
        work.wait()
    for work in going:
        work.wait()


# --- whole steps ---


def _steps() -> list[Row]:
    cases = (
        Case("step, 128 keys a rank, 32/32 heads", (32, 32), 128),
        Case("step, 8,192 keys a rank, 32/8 heads", (32, 8), 8192, repeat=3),
    )
    return [row for case in cases for row in _step(replace(case, tokens=case.tokens * dist.get_world_size()))]


def _papers() -> list[Row]:
    llama = [
        Case(f"Llama-3.1-8B layer, 32/8 heads, {k}k tokens, bfloat16", (32, 8), k * 1024, torch.bfloat16, 1, 5)
        for k in (32, 64, 128, 256)
    ]
    others = [Case(f"16 heads, {k}k tokens, bfloat16", (16, 16), k * 1000, torch.bfloat16, 1, 5) for k in (80, 160)]
    return [row for case in (*llama, *others) for row in _step(case)]


def _lengths() -> list[Row]:
    """From few tokens to a million, one key head of 64 so that a ring can be waited for."""
    cases = [
        Case(f"step, {n // 1024:,}k tokens, 8/1 heads of 64, bfloat16", (8, 1), n, torch.bfloat16, 1, 5, 64)
        for n in (2**12, 2**14, 2**16, 2**18, 2**20)
    ]
    return [row for case in cases for row in _step(case)]


def _step(case: Case) -> list[Row]:
    """Decode by tree and by three all-reduces, a ring, and the published package."""
    cache, q = _cache(case), _query(case)
    keys, values = (x[:, :, : cache.used] for x in (cache.keys, cache.values))
    out, counts = torch.empty(1, case.heads[0], 1, case.width + 1), [cache.used] * dist.get_world_size()
    held = keys.contiguous(), values.contiguous()
    new = torch.randn(1, case.heads[1], 1, case.width).to(case.dtype)

    def whole() -> None:
        cache.append(new, new)
        am.decode(q, cache)
        cache.truncate(case.tokens)

    contenders: dict[str, Call] = {
        "decode": lambda: am.decode(q, cache),
        "append, decode, truncate": whole,
        "three all-reduces": lambda: am.merge_across(
            am.attend(q, keys, values), dist.group.WORLD, how="allreduce", checked=False
        ),
        "ring, overlapped": lambda: ring(q, held, counts),
        "local attention": lambda: am.attend(q, keys, values),
        "bare exchanges": lambda: _bare_exchanges(out),
    }
    if find_spec("ring_attention_pytorch") is not None:
        from ring_attention_pytorch import tree_attn_decode

        groups = case.heads[0] // case.heads[1]
        theirs = [x.repeat_interleave(groups, 1).contiguous() for x in (keys, values)]  # it has no grouped heads
        contenders["ring-attention-pytorch"] = lambda: tree_attn_decode(q, *theirs, shard_kv_seq=False)
    rows = _raced(case, contenders, "decode")
    return [*rows, _limit(case, rows)]


def _limit(case: Case, rows: list[Row]) -> Row:
    """What a step cannot be faster than here: both of its parts, as measured."""
    local, exchange, ours = (
        next(row.timing for row in rows if row.contender == name and row.timing is not None)
        for name in ("local attention", "bare exchanges", "decode")
    )
    limit = Timing(*(round(getattr(local, x) + getattr(exchange, x), 4) for x in ("median", "low", "high")))
    return Row(case.name, "limit: local attention + log2(p) exchanges", limit, round(limit.median / ours.median, 3))


def ring(q: Tensor, held: Sequence[Tensor], counts: Sequence[int]) -> Partial:
    """Keys and values go round, a chunk under way while the last is attended; `counts` are the tokens of each rank."""
    rank, ranks, partials = dist.get_rank(), dist.get_world_size(), []
    for step in range(ranks):
        coming, works = held, []
        if step + 1 < ranks:
            tokens = counts[(rank - step - 1) % ranks]
            coming = [x.new_empty(*x.shape[:2], tokens, x.shape[3]) for x in held]
            posts = [dist.P2POp(dist.irecv, x, (rank - 1) % ranks) for x in coming]
            works = dist.batch_isend_irecv(posts + [dist.P2POp(dist.isend, x, (rank + 1) % ranks) for x in held])
        out, lse = am.attend(q, *held)
        partials.append(Partial(out.float(), lse))
        for work in works:
            work.wait()
        held = coming
    return join(partials)


# --- what the same bits cost, and a long context ---


def _reproducible() -> list[Row]:
    case = Case("65,536 tokens, 32/8 heads, blocks of 256", (32, 8), 65_536, repeat=3)
    cache, q = _cache(case, block=256), _query(case)
    contenders: dict[str, Call] = {
        "decode": lambda: am.decode(q, cache),
        "decode, reproducible": lambda: am.decode(q, cache, reproducible=True),
    }
    return _raced(case, contenders, "decode")


def _million() -> list[Row]:
    case = Case("1,048,576 tokens, 1 KV head", (8, 1), 1 << 20, torch.bfloat16, 3, width=64)
    cache, q = _cache(case), _query(case)
    return _raced(case, {"decode, 8/1 heads of 64, bfloat16": lambda: am.decode(q, cache)}, None)


def _memories() -> list[Memory]:
    """In the paper's sense: keys and values, and all that a step holds beside them."""
    found = []
    for k in (32, 64):
        case = Case(f"Llama-3.1-8B layer, 32/8 heads, {k}k tokens, bfloat16", (32, 8), k * 1024, torch.bfloat16)
        cache, q = _cache(case), _query(case)
        keys, values = (x[:, :, : cache.used] for x in (cache.keys, cache.values))
        held = 2 * keys.numel() * keys.element_size()
        calls: dict[str, Call] = {
            "tree": partial(am.decode, q, cache),
            "ring": partial(ring, q, (keys.contiguous(), values.contiguous()), [cache.used] * dist.get_world_size()),
        }
        for name, call in calls.items():
            most = torch.tensor([held + (peak_memory(call, torch.device("cpu")) or 0)], dtype=torch.float64)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            found.append(Memory(case.name, name, round(float(most) / 1e6, 1)))
    return found


def _query(case: Case) -> Tensor:
    return torch.randn(1, case.heads[0], 1, case.width, generator=torch.Generator().manual_seed(0)).to(case.dtype)


def _cache(case: Case, block: int = 16) -> am.KVCache:
    """A full cache over all ranks, filled a piece at a time."""
    sizes = {
        "batch": 1,
        "kv_heads": case.heads[1],
        "head_dim": case.width,
        "capacity": case.tokens + 16,
        "block": block,
    }
    cache = am.KVCache(_mesh(), dtype=case.dtype, **sizes)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    for start in range(0, case.tokens, PIECE):
        more = min(PIECE, case.tokens - start)
        cache.append(*torch.randn(2, 1, case.heads[1], more, case.width, generator=generator).to(case.dtype).unbind())
    return cache


@lru_cache
def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("keys",))


def _raced(case: Case, contenders: dict[str, Call], yardstick: str | None) -> list[Row]:
    """Each contender several times in a row, in turns with the others; rank 0's time of one."""

    def repeated(call: Call) -> Call:
        return lambda: [call() for _ in range(case.repeat)]

    calls = {name: repeated(call) for name, call in contenders.items()}
    with torch.no_grad():
        timings = race(calls, torch.device("cpu"), seconds=0, rounds=case.rounds, before=dist.barrier)
    each = {name: timing.divided(case.repeat) for name, timing in timings.items()}
    unit = None if yardstick is None else each[yardstick].median
    return [Row(case.name, name, x, None if unit is None else round(x.median / unit, 3)) for name, x in each.items()]
