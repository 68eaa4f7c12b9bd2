"""`python -m benchmarks decode`: merges across ranks, and whole steps, beside published code, others and the limit.

A time is that of one call of many in a row, as in a server, with all ranks at work. The limit of a step is the local
attention and `log2(p)` bare exchanges of the same payload.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import attnmesh as am
from attnmesh.cli.launch import Send, run_on_ranks
from attnmesh.comm.merges import MERGES
from attnmesh.core.partial import Partial, merge_partials
from attnmesh.core.storage import STORAGES
from benchmarks.netns import World, run_on, send_rows
from benchmarks.timing import Call, Timing, exact_memory, peak_memory, race

WIDTH = 128

PIECE = 8192
"""Tokens of one append when a cache is filled."""


@dataclass(frozen=True)
class Row:
    """One contender in one case: milliseconds per call, and its ratio to ours."""

    case: str
    contender: str
    timing: Timing | None = None
    times_ours: float | None = None


@dataclass(frozen=True)
class Memory:
    """Peak megabytes of a rank in one step, keys and values included."""

    case: str
    contender: str
    megabytes: float


@dataclass(frozen=True)
class Case:
    """Decoding of one layer: heads, tokens of all ranks and dtype. Values may be the first `prefix` columns of keys."""

    name: str
    heads: tuple[int, int]
    tokens: int
    dtype: torch.dtype = torch.float32
    repeat: int = 10
    rounds: int = 9
    width: int = WIDTH
    prefix: int | None = None
    storage: str | None = None


def parts(world: World) -> dict[str, Callable[[Send], Any]]:
    """Return the parts of the bench, each in new ranks; on hosts only those that depend on the context."""
    local = {
        "merges": _merges,
        "steps": _steps,
        "the papers' cases": _papers,
        "the same bits": _reproducible,
        "a million tokens": _million,
        "windows": _windows,
        "8 bits": _stored,
    }
    functions = local if isinstance(world, int) else {"merges": _merges, "lengths": _lengths}
    return {name: partial(_run_part, world, function) for name, function in functions.items()}


def _run_part(world: World, function: Callable[[], Iterator[Row]], add: Send) -> None:
    run_on(world, send_rows, function, on_message=add)


def memory(ranks: int, add: Send) -> None:
    """Measure the memory of a step, by tree and by ring."""
    with exact_memory():
        run_on_ranks(ranks, send_rows, _memories, spawned=True, on_message=add)


# --- merges alone ---


def _merges() -> Iterator[Row]:
    for batch in (1, 8):
        yield from _merge(batch)


def _merge(batch: int) -> list[Row]:
    local, group = Partial(torch.randn(batch, 32, 1, WIDTH), torch.randn(batch, 32, 1)), dist.group.WORLD
    options: dict[str, dict[str, Any]] = {how: {"how": how} for how in ("auto", *MERGES)}
    options["tree, out in bfloat16"] = {"how": "tree", "wire": torch.bfloat16}
    options["to each its heads (Helix: one all-to-all)"] = {"output": "heads"}
    contenders: dict[str, Call] = {
        name: partial(am.merge_across, local, group, checked=False, **each) for name, each in options.items()
    }
    contenders["gather lse, reduce-scatter out (vLLM)"] = partial(_reduce_scattered, local)
    contenders["limit: log2(p) bare exchanges"] = partial(_bare_exchanges, local.out)
    quick = {name: contenders.pop(name) for name in ("auto", "tree", "direct")}
    case = Case(f"merge, batch {batch}: 32 heads of 128, float32", (32, 32), 0)
    # What takes a tenth of the others is repeated more often, or a turn ends before ranks have settled to share cores.
    rows = _raced(replace(case, repeat=100, rounds=15), quick, "auto")
    beside = _raced(case, {"auto": quick["auto"], **contenders}, "auto")
    return [*rows, *(row for row in beside if row.contender != "auto")]


def _reduce_scattered(local: Partial) -> Tensor:
    """Merge as vLLM's decode context parallelism: all-gather the lse, then reduce-scatter the weighted out by heads."""
    ranks = dist.get_world_size()
    lses = [torch.empty_like(local.lse) for _ in range(ranks)]
    dist.all_gather(lses, local.lse)
    lse = torch.logsumexp(torch.stack(lses), 0)
    weighed = (local.out * torch.exp(local.lse - lse).unsqueeze(-1)).transpose(0, 1).contiguous()
    mine = weighed.new_empty(weighed.shape[0] // ranks, *weighed.shape[1:])
    dist.reduce_scatter_tensor(mine, weighed)
    return mine.transpose(0, 1)


def _bare_exchanges(payload: Tensor) -> None:
    """Make the exchanges of a tree, of the same bytes, and nothing else; the world is a power of two."""
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


def _steps() -> Iterator[Row]:
    cases = (
        Case("step, 128 keys a rank, 32/32 heads", (32, 32), 128),
        Case("step, 8,192 keys a rank, 32/8 heads", (32, 8), 8192, repeat=3, rounds=5),
        Case("step, 8,192 latents of 512 and 64 a rank, 128 heads", (128, 1), 8192, torch.float32, 1, 3, 576, 512),
    )
    for case in cases:
        yield from _step(replace(case, tokens=case.tokens * dist.get_world_size()))


def _papers() -> Iterator[Row]:
    llama = [
        Case(f"Llama-3.1-8B layer, 32/8 heads, {k}k tokens, bfloat16", (32, 8), k * 1024, torch.bfloat16, 1, 3)
        for k in (32, 128)
    ]
    for case in (*llama, Case("16 heads, 80k tokens, bfloat16", (16, 16), 80_000, torch.bfloat16, 1, 3)):
        yield from _step(case)


def _lengths() -> Iterator[Row]:
    """Yield steps of 4,096 to a million tokens, with one key head of 64 to keep the ring short."""
    cases = [
        Case(f"step, {n // 1024:,}k tokens, 8/1 heads of 64, bfloat16", (8, 1), n, torch.bfloat16, 1, 5, 64)
        for n in (2**12, 2**14, 2**16, 2**18, 2**20)
    ]
    for case in cases:
        yield from _step(case)


def _step(case: Case) -> list[Row]:
    """Time decoding by tree, three all-reduces, a ring, and the published package."""
    cache, q = _cache(case), _query(case)
    keys, values = (x[:, :, : cache.used] for x in (cache.keys, cache.values))
    out, counts = torch.empty(1, case.heads[0], 1, values.shape[3] + 1), [cache.used] * dist.get_world_size()
    shard = keys.contiguous(), values.contiguous()
    new_key = torch.randn(1, case.heads[1], 1, case.width).to(case.dtype)

    def whole() -> None:
        cache.append(new_key, None if case.prefix else new_key)
        am.decode(q, cache)
        cache.truncate(case.tokens)

    contenders: dict[str, Call] = {
        "decode": lambda: am.decode(q, cache),
        "append, decode, truncate": whole,
        "three all-reduces": lambda: am.merge_across(
            am.attend(q, keys, values), dist.group.WORLD, how="allreduce", checked=False
        ),
        "ring, overlapped": lambda: ring(q, shard, counts),
        "local attention": lambda: am.attend(q, keys, values),
        "bare exchanges": lambda: _bare_exchanges(out),
    }
    if find_spec("ring_attention_pytorch") is not None and not case.prefix:
        from ring_attention_pytorch import tree_attn_decode

        groups = case.heads[0] // case.heads[1]
        theirs = [x.repeat_interleave(groups, 1).contiguous() for x in (keys, values)]  # without grouped heads
        contenders["ring-attention-pytorch"] = lambda: tree_attn_decode(q, *theirs, shard_kv_seq=False)
    rows = _raced(case, contenders, "decode")
    return [*rows, _limit(case, rows)]


def _limit(case: Case, rows: list[Row]) -> Row:
    """Return the lower bound of a step: the sum of both of its parts."""
    local, exchange, ours = (
        next(row.timing for row in rows if row.contender == name and row.timing is not None)
        for name in ("local attention", "bare exchanges", "decode")
    )
    limit = Timing(*(round(getattr(local, x) + getattr(exchange, x), 4) for x in ("median", "low", "high")))
    return Row(case.name, "limit: local attention + log2(p) exchanges", limit, round(limit.median / ours.median, 3))


def ring(q: Tensor, shard: Sequence[Tensor], counts: Sequence[int]) -> Partial:
    """Decode by ring: pass keys and values on while the last chunk is attended; `counts` are the tokens per rank."""
    rank, ranks, partials = dist.get_rank(), dist.get_world_size(), []
    for step in range(ranks):
        coming, works = shard, []
        if step + 1 < ranks:
            tokens = counts[(rank - step - 1) % ranks]
            coming = [x.new_empty(*x.shape[:2], tokens, x.shape[3]) for x in shard]
            posts = [dist.P2POp(dist.irecv, x, (rank - 1) % ranks) for x in coming]
            works = dist.batch_isend_irecv(posts + [dist.P2POp(dist.isend, x, (rank + 1) % ranks) for x in shard])
        out, lse = am.attend(q, *shard)
        partials.append(Partial(out.float(), lse))
        for work in works:
            work.wait()
        shard = coming
    return merge_partials(partials)


# --- what the same bits cost, and a long context ---


def _reproducible() -> Iterator[Row]:
    case = Case("65,536 tokens, 32/8 heads, blocks of 256", (32, 8), 65_536, repeat=3)
    cache, q = _cache(case, block=256), _query(case)
    contenders: dict[str, Call] = {
        "decode": lambda: am.decode(q, cache),
        "decode, reproducible": lambda: am.decode(q, cache, reproducible=True),
    }
    yield from _raced(case, contenders, "decode")


def _million() -> Iterator[Row]:
    case = Case("1,048,576 tokens, 1 KV head", (8, 1), 1 << 20, torch.bfloat16, 3, width=64)
    cache, q = _cache(case), _query(case)
    yield from _raced(case, {"decode, 8/1 heads of 64, bfloat16": lambda: am.decode(q, cache)}, None)


STORED = Case("65,536 tokens, 32/8 heads, bfloat16", (32, 8), 65_536, torch.bfloat16, 3)


def _stored() -> Iterator[Row]:
    """Yield steps on caches that store keys and values in 8 bits, beside one in bfloat16."""
    q, calls = _query(STORED), dict[str, Call]()
    for storage in (None, *STORAGES):
        calls[storage or "bfloat16"] = partial(am.decode, q, _cache(replace(STORED, storage=storage)))
    yield from _raced(STORED, calls, "bfloat16")


def _stored_memories() -> Iterator[Memory]:
    """Yield a rank's keys and values, scales included."""
    for name, case in (("float32", replace(STORED, dtype=torch.float32)), ("bfloat16", STORED)):
        yield Memory(STORED.name, name, round(_cache(case).nbytes / 1e6, 1))
    for storage in STORAGES:
        yield Memory(STORED.name, storage, round(_cache(replace(STORED, storage=storage)).nbytes / 1e6, 1))


def _windows() -> Iterator[Row]:
    """Yield steps of layers with a window, whose cache forgets or keeps every token."""
    for name, heads, width, window in (("gpt-oss", (64, 8), 64, 128), ("Gemma 3 12B", (16, 8), 256, 1024)):
        mask, calls = am.Window(window - 1), dict[str, Call]()
        case = Case(f"{name} layer, window of {window:,}, bfloat16", heads, 100_000, torch.bfloat16, 4, width=width)
        q, new_key = _query(case), torch.randn(1, heads[1], 1, width).to(case.dtype)

        def step(cache: am.KVCache, q: Tensor = q, new_key: Tensor = new_key, mask: am.Mask = mask) -> None:
            cache.append(new_key, new_key)
            am.decode(q, cache, mask=mask)

        calls["forgets, 2 windows"] = partial(step, _cache(replace(case, tokens=2 * window), mask=mask))
        calls["forgets, 100,000 tokens"] = partial(step, _cache(case, mask=mask))
        calls["keeps every token, 100,000 tokens"] = partial(step, _cache(case))
        yield from _raced(case, calls, "forgets, 2 windows")


def _window_memories() -> Iterator[Memory]:
    """Yield a rank's memory for the keys and values of 100,000 tokens: of one layer of each kind, times the layers."""
    for name, kv_heads, width, window, layers in (
        ("gpt-oss-20b, 24 layers", 8, 64, 128, (12, 12)),
        ("Gemma 3 12B, 48 layers", 8, 256, 1024, (40, 8)),
    ):
        case = Case("", (kv_heads, kv_heads), 100_000, torch.bfloat16, width=width)
        window_bytes, full_bytes = (
            cache.keys.nbytes + cache.values.nbytes
            for cache in (_cache(case, mask=am.Window(window - 1)), _cache(case))
        )
        for contender, total in (
            ("every token", sum(layers) * full_bytes),
            ("windows", layers[0] * window_bytes + layers[1] * full_bytes),
        ):
            yield Memory(f"{name}, window of {window:,}, 100,000 tokens", contender, round(total / 1e6, 1))


def _memories() -> Iterator[Memory]:
    """Yield memory as the Tree Attention paper counts it: keys, values, and what a step allocates."""
    yield from _window_memories()
    yield from _stored_memories()
    for k in (32, 64):
        case = Case(f"Llama-3.1-8B layer, 32/8 heads, {k}k tokens, bfloat16", (32, 8), k * 1024, torch.bfloat16)
        cache, q = _cache(case), _query(case)
        keys, values = (x[:, :, : cache.used] for x in (cache.keys, cache.values))
        held_bytes = 2 * keys.numel() * keys.element_size()
        calls: dict[str, Call] = {
            "tree": partial(am.decode, q, cache),
            "ring": partial(ring, q, (keys.contiguous(), values.contiguous()), [cache.used] * dist.get_world_size()),
        }
        for name, call in calls.items():
            peak = torch.tensor([held_bytes + (peak_memory(call, torch.device("cpu")) or 0)], dtype=torch.float64)
            dist.all_reduce(peak, dist.ReduceOp.MAX)
            yield Memory(case.name, name, round(float(peak) / 1e6, 1))


def _query(case: Case) -> Tensor:
    return torch.randn(1, case.heads[0], 1, case.width, generator=torch.Generator().manual_seed(0)).to(case.dtype)


def _cache(case: Case, block: int = 16, mask: am.Mask | None = None) -> am.KVCache:
    """Return a full cache over all ranks. With a mask, it forgets."""
    sizes = {
        "batch": 1,
        "kv_heads": case.heads[1],
        "head_dim": case.width,
        "capacity": case.tokens + 4096,
        "block": block,
        "storage": case.storage,
        **({"value_dim": case.prefix, "values": "prefix"} if case.prefix else {}),
    }
    cache = am.KVCache(_mesh(), dtype=case.dtype, mask=mask, **sizes)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    for start in range(0, case.tokens, PIECE):
        tokens = min(PIECE, case.tokens - start)
        k, v = torch.randn(2, 1, case.heads[1], tokens, case.width, generator=generator).to(case.dtype)
        cache.append(k, None if case.prefix else v)
    return cache


@lru_cache
def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("keys",))


def _raced(case: Case, contenders: dict[str, Call], yardstick: str | None) -> list[Row]:
    """Time contenders in turns, each several calls in a row; return this rank's time of one call."""
    host, turns = torch.device("cpu"), {"rounds": case.rounds, "repeat": case.repeat}
    with torch.no_grad():
        each = race(contenders, host, seconds=0, before=dist.barrier, **turns)
    unit = None if yardstick is None else each[yardstick].median
    return [Row(case.name, name, x, None if unit is None else round(x.median / unit, 3)) for name, x in each.items()]
