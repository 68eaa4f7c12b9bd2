"""The Triton kernel: one launch for any mask and layout. Decoding is split over the keys to fill the chip."""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from attnmesh.core.band import Band
from attnmesh.core.logits import Logits
from attnmesh.core.mask import FAR
from attnmesh.core.partial import Partial, with_sinks
from attnmesh.core.storage import storage_of
from attnmesh.kernels.blocks import BackwardInputs, Block, Gradients, Kernel, Need
from attnmesh.kernels.cache_view import CacheView, DecodeQuery
from attnmesh.kernels.stacked_merge import (
    by_residue,
    copy_into,
    merge_along_tree,
    merge_stacked,
    unsupported_reason,
    warn_unsupported,
)
from attnmesh.kernels.triton_runtime import interpreted, launch, parts
from attnmesh.runtime.caches import KEPT

Result = TypeVar("Result")

MAX_WIDTH = 576
"""Columns of a head. Latent attention has 512 columns and 64 rotated ones."""

MAX_REACH = 1 << 40
"""Reach of an unbounded mask: beyond every position, and small enough that sums do not overflow."""

MIN_SPAN_TILES = 4
"""Tiles of keys that are worth a program instance."""

LARGE_ROWS = 128
"""Rows from which on a tile is as large as the registers allow."""

MIN_TILE = 16
"""Rows or keys of the smallest tile that can be multiplied."""


FEW_ROWS = 32
"""Rows of a tile up to which reading the keys is the cost: more keys are then on their way at once."""

LARGE_TILE = 1 << 15
"""Bytes of the keys of a tile of which a multiprocessor holds one at a time, with the values and those on their way."""


class ProgramTile(NamedTuple):
    """Rows and keys that a program instance holds at once, its warps and stages, and instances on a multiprocessor."""

    rows: int
    keys: int
    warps: int = 4
    stages: int = 2
    at_once: int = 2


class Triton(Kernel):
    """The programs of `kernels/programs`, on GPUs, and with `TRITON_INTERPRET=1` on the CPU."""

    name, made_for, order = "triton", "caches on GPUs", 0
    reads_rows = reads_cache = True

    def unsupported_reason(self, need: Need) -> str | None:
        """Return None for float32, bfloat16 and float16 on GPUs with bfloat16 tensor cores."""
        if (reason := unsupported_reason(need.device)) is not None:
            return reason
        if need.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"it does not support {need.dtype}"
        if need.width > MAX_WIDTH:
            return f"heads are {need.width} wide, of at most {MAX_WIDTH}"
        return _fault(need.device) if need.device.type == "cuda" else None

    def suits(self, need: Need) -> bool:
        """Return True for caches on GPUs, which it reads in place."""
        return need.cached and need.device.type != "cpu"

    def cut(self, band: Band, q: Tensor, k: Tensor, v: Tensor) -> list[Block]:
        """Return one block of the keys that any row sees, or no block if there are none."""
        rows = (band.low < band.high).nonzero().flatten()
        if not len(rows):
            return []
        first, last = int(rows[0]), int(rows[-1])
        start, stop = int(band.low[first]), int(band.high[last])
        return [Block(slice(first, last + 1), slice(start, stop), band=band.rows(first, last + 1, start))]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, block: Block, logits: Logits) -> Partial:
        """Return the block's partial, in float32."""
        rows = q.shape[2] * q.shape[1] // k.shape[1]
        return _with_fitting_tile("attend", q, v, rows, partial(_attend, q, k, v, block, logits))

    def attend_cache(self, query: DecodeQuery, view: CacheView) -> Partial:
        """Return the partial of the last queries, merged from one partial per block or per program instance."""
        q, sinks, into = query.q, query.sinks, query.into
        rows = q.shape[2] * q.shape[1] // view.keys.shape[1]
        partials = _with_fitting_tile("attend_cache", q, view.values, rows, partial(_attend_cache, query, view))
        if query.block is not None:
            if len(view.state) > 2:  # the cache forgets blocks
                partials = by_residue(partials, view.state[2])
            return copy_into(with_sinks(merge_along_tree(partials), sinks), into)
        return merge_stacked(partials, into, sinks=sinks)

    def attend_rows(self, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, hidden: Tensor, logits: Logits) -> Partial:
        """Return the partial of the rows of keys of each sequence, (batch, keys), without those that are hidden."""
        places = rows.masked_fill(hidden, -1).to(torch.int32)
        run = partial(_attend_rows, q, k, v, places, logits)
        return merge_stacked(_with_fitting_tile("attend_cache", q, v, q.shape[1] // k.shape[1], run))

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, saved: BackwardInputs, block: Block, logits: Logits
    ) -> Gradients:
        """Return the block's share of the gradients, in float32: one launch over queries, one over keys."""
        return _with_fitting_tile("backward", q, v, LARGE_ROWS, partial(_backward, q, k, v, saved, block, logits))


KERNEL = TRITON = Triton()


def _attend(q: Tensor, k: Tensor, v: Tensor, block: Block, logits: Logits, tile: ProgramTile) -> Partial:
    arguments = _block_arguments(q, k, v, block, logits, tile)
    heads, tiles = k.shape[0] * k.shape[1], -(-arguments["rows"] // tile.rows)
    span = _span(arguments["keys"], heads * tiles, tile, q.device)
    spans = -(-arguments["keys"] // span)
    partials = _empty_partials(q, spans, v.shape[-1])
    out, lse = partials
    launch("attend", "attend", (tiles, spans, heads), q.device, **arguments, out=out, lse=lse, span=span)
    return Partial(out[0], lse[0]) if spans == 1 else merge_stacked(partials)


def _attend_cache(query: DecodeQuery, view: CacheView, tile: ProgramTile) -> Partial:
    """Return stacked partials, one per part of the slots."""
    q, mask, block = query.q, query.mask, query.block
    heads, rows = q.shape[0] * view.keys.shape[1], q.shape[2] * q.shape[1] // view.keys.shape[1]
    slots = view.keys.shape[2] - 1
    tiles = -(-rows // tile.rows)
    count = -(-slots // (block or _span(slots, heads * tiles, tile, q.device)))
    partials = _empty_partials(q, count, view.value_dim)
    bounded = view.padding is not None or not mask.is_window or query.key_lengths is not None
    places = view.places()
    first, last = view.bounds(q.shape[2], mask) if bounded else (places, places)  # unused if not bounded
    if query.key_lengths is not None:
        last = torch.minimum(last, query.key_lengths.to(q.device)[:, None] - 1)
        first = first.expand_as(last).contiguous()
    arguments = _cache_arguments(q, *view.numbers, query.logits, tile, places, partials) | {
        "token_index": view.token_index,
        "state": view.state,
        "firsts": first,
        "lasts": last,
        "bounds_batch": _batch_stride(first),
        "block": block or 0,
        "capacity": query.capacity,
        "left": min(mask.left, MAX_REACH),
        "right": min(mask.right, MAX_REACH),
        "BOUNDED": bounded,
        "NEAR": min(mask.left, mask.longest) < FAR,
    }
    launch("decode", "attend_cache", (count, tiles, heads), q.device, **arguments)
    return partials


def _attend_rows(q: Tensor, k: Tensor, v: Tensor, places: Tensor, logits: Logits, tile: ProgramTile) -> Partial:
    """Return stacked partials, one per part of the places, which are those of the rows to read."""
    heads, tiles, keys = q.shape[0] * k.shape[1], -(-q.shape[1] // k.shape[1] // tile.rows), places.shape[1]
    count = -(-keys // _span(keys, heads * tiles, tile, q.device))
    partials = _empty_partials(q, count, v.shape[-1])
    arguments = _cache_arguments(q, k, v, logits, tile, places, partials)
    arguments |= {"state": torch.full((2,), keys, device=q.device), "capacity": keys, "SELECTED": True}
    launch("decode", "attend_cache", (count, tiles, heads), q.device, **arguments)
    return partials


def _cache_arguments(
    q: Tensor, keys: Tensor, values: Tensor, logits: Logits, tile: ProgramTile, places: Tensor, partials: Partial
) -> dict[str, Any]:
    """Return the arguments that all launches over a cache share, and those of one whose rows all see all places."""
    stored, float8 = storage_of(keys) is not None, keys.dtype == torch.float8_e4m3fn
    is_prefix = values.data_ptr() == keys.data_ptr()  # then values have the scales of the keys
    rows = {"K_ROW": keys.shape[-1], "V_ROW": (keys if is_prefix else values).shape[-1]}
    if stored:  # bytes, which all GPUs read
        keys, values = keys.view(torch.int8), values.view(torch.int8)
    else:
        rows = dict.fromkeys(rows, 0)
    into = {"places": places, "places_batch": _batch_stride(places), "out": partials.out, "lse": partials.lse}
    unread = {"token_index": places, "firsts": places, "lasts": places, "bounds_batch": 0, "block": 0}
    all_seen = {"left": MAX_REACH, "right": MAX_REACH, "BOUNDED": False, "NEAR": False, "SELECTED": False}
    kind = {**into, **rows, "FLOAT8": float8, **unread, **all_seen}
    return {**_arguments(q, keys, values, tile), **_logit_arguments(logits), **kind}


def _backward(
    q: Tensor, k: Tensor, v: Tensor, saved: BackwardInputs, block: Block, logits: Logits, tile: ProgramTile
) -> Gradients:
    dout = saved.dout.to(q.dtype).contiguous()
    delta = (saved.out.float() * saved.dout.float()).sum(-1)
    arguments = _block_arguments(q, k, v, block, logits, tile)
    arguments |= {"dout": dout, "lse": saved.lse.contiguous(), "delta": delta}
    heads, tiles = k.shape[0] * k.shape[1], -(-arguments["keys"] // tile.keys)
    dq, dk, dv = (x.new_empty(x.shape, dtype=torch.float32) for x in (q, k, v))
    launch("attend", "queries_backward", (-(-arguments["rows"] // tile.rows), heads), q.device, **arguments, dq=dq)
    edges = torch.arange(tiles + 1, dtype=torch.int32, device=q.device) * tile.keys
    queries = {  # the run of queries that see each tile of keys
        "begin": torch.searchsorted(arguments["high"], edges[:-1], right=True, out_int32=True),
        "finish": torch.searchsorted(arguments["low"], edges[1:], out_int32=True),
    }
    launch("attend", "keys_backward", (tiles, heads), q.device, **arguments, **queries, dk=dk, dv=dv)
    return Gradients(dq, dk, dv)


def _empty_partials(q: Tensor, count: int, width: int) -> Partial:
    """Return uninitialised partials of q's rows, stacked."""
    shape = (count, *q.shape[:-1])
    return Partial(*(q.new_empty(size, dtype=torch.float32) for size in ((*shape, width), shape)))


def _block_arguments(
    q: Tensor, k: Tensor, v: Tensor, block: Block, logits: Logits, tile: ProgramTile
) -> dict[str, Any]:
    """Return the arguments that all programs over a block share."""
    keys = k.shape[2]
    if block.band is None and not block.causal:  # created on the device, without a copy from the host
        low, high = (torch.full((q.shape[2],), n, dtype=torch.int32, device=q.device) for n in (0, keys))
    else:
        bounds = block.bounds()
        low, high = (_bounds_on_device(x, keys, q.device) for x in (bounds.low, bounds.high))
    return {**_arguments(q, k, v, tile), "low": low, "high": high, "keys": keys, **_logit_arguments(logits)}


def _bounds_on_device(bounds: Tensor, keys: int, device: torch.device) -> Tensor:
    """Return the bounds of rows as a program takes them, copied once as long as they live."""

    def copy() -> Tensor:
        return bounds.clamp(0, keys).to(device, torch.int32)

    return copy() if device.type == "cpu" else KEPT.find(bounds, (device, keys), copy, lambda x: x.nbytes)


def _logit_arguments(logits: Logits) -> dict[str, Any]:
    return {"scale": logits.scale, "softcap": logits.softcap, "CAPPED": logits.capped}


def _arguments(q: Tensor, k: Tensor, v: Tensor, tile: ProgramTile) -> dict[str, Any]:
    """Return q, k and v, their strides and shapes, and the constants of compilation."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    dims = ("batch", "head", "row")
    strides = {f"{name}_{dim}": x.stride(i) for name, x in (("q", q), ("k", k), ("v", v)) for i, dim in enumerate(dims)}
    group, q_parts, v_parts = q.shape[1] // k.shape[1], parts(q.shape[-1]), parts(v.shape[-1])
    return {
        "q": q,
        "k": k,
        "v": v,
        **strides,
        "rows": q.shape[2] * group,
        "group": group,
        "kv_heads": k.shape[1],
        "width": q.shape[-1],
        "values": v.shape[-1],
        "ROWS": tile.rows,
        "KEYS": tile.keys,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "Q_0": q_parts[0],
        "Q_1": q_parts[1],
        "V_0": v_parts[0],
        "V_1": v_parts[1],
        "PRECISION": "widened" if interpreted() else "tf32x3" if torch.version.hip is None else "ieee",  # full float32
    }


_FITTING_TILES: dict[tuple[Any, ...], ProgramTile] = {}


def _with_fitting_tile(name: str, q: Tensor, v: Tensor, rows: int, run: Callable[[ProgramTile], Result]) -> Result:
    """Return the result of `run`, with the largest tile that fits in the shared memory of the device."""
    wanted = _tile(q, v, rows)
    key = name, q.device, q.dtype, q.shape[-1], v.shape[-1], wanted
    tile = _FITTING_TILES.get(key, wanted)
    while True:
        try:
            result = run(tile)
        except Exception as error:
            if type(error).__name__ != "OutOfResources" or max(tile.rows, tile.keys) == MIN_TILE:
                raise
            less = {"keys": tile.keys // 2} if tile.keys > MIN_TILE else {"rows": tile.rows // 2}
            tile = tile._replace(**less)
            continue
        _FITTING_TILES[key] = tile
        return result


def _tile(q: Tensor, v: Tensor, rows: int) -> ProgramTile:
    """Return a tile whose sums stay in registers: smaller for wide heads and for float32. Measured on an H200."""
    width, shrink = max(q.shape[-1], v.shape[-1]), q.element_size() // 2
    if interpreted():
        return ProgramTile(MIN_TILE, MIN_TILE)
    most = (128 if 64 < width <= 128 else 64) // shrink
    tile_rows = max(MIN_TILE, min(most, 1 << (rows - 1).bit_length()))
    if tile_rows <= FEW_ROWS and width <= 256:
        keys, warps, stages = (128, 4, 3) if width <= 128 else (64, 8, 3)
    else:
        keys, warps, stages = 64 if width <= 256 else 32, 8 if tile_rows * width >= 128 * 128 else 4, 2
    keys //= shrink
    return ProgramTile(tile_rows, keys, warps, stages, 1 if keys * width * q.element_size() >= LARGE_TILE else 2)


def _span(keys: int, programs: int, tile: ProgramTile, device: torch.device) -> int:
    """Return the keys per program instance, at least some tiles, with which all instances of a launch run at once."""
    wanted = max(1, tile.at_once * _processors(device) // programs)
    return max(MIN_SPAN_TILES * tile.keys, -(-keys // wanted))


def _batch_stride(x: Tensor) -> int:
    """Return the stride from one sequence to the next; 0 if all sequences share one row."""
    return x.stride(0) if len(x) > 1 else 0


@cache
def _fault(device: torch.device) -> str | None:
    """Return why a device does not run attention correctly, or None; tested once, on a few tokens."""
    values = torch.arange(16, dtype=torch.bfloat16, device=device).expand(1, 1, 16, 16).mT.contiguous()
    few = torch.zeros_like(values)
    try:
        out, lse = TRITON.attend(few, few, values, Block(slice(0, 16), slice(0, 16)), Logits(1.0))
    except Exception as error:  # a compiler may raise any exception
        return warn_unsupported(f"{type(error).__name__}: {error}".splitlines()[0])
    right = (out - 7.5).abs().amax() < 1e-5 and (lse - math.log(16)).abs().amax() < 1e-5
    return None if bool(right) else warn_unsupported("attention gives a wrong result")


@cache
def _processors(device: torch.device) -> int:
    """Return the number of multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
