"""Triton: one launch for any mask and layout, decoding split over the keys until the chip is full."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from attnmesh.core.mask import FAR, Band
from attnmesh.core.partial import Partial, with_sinks
from attnmesh.kernels.blocks import Block
from attnmesh.kernels.cache_view import CacheView, DecodeQuery
from attnmesh.kernels.driver import CacheKernel, Gradients, SavedForward
from attnmesh.kernels.merge import merged, placed, said_once, unable, up_the_tree
from attnmesh.kernels.triton_runtime import interpreted, launch, parts

Found = TypeVar("Found")

WIDEST = 576
"""Of a head: latent attention keeps 512 columns and 64 that are rotated."""

REACH = 1 << 40
"""As far as a mask can reach, and far from where adding to it overflows."""

SPAN = 4
"""Tiles of keys that are at least worth a program of their own."""


class Tile(NamedTuple):
    """Rows and keys that a program holds at once, and the warps and stages it is given."""

    rows: int
    keys: int
    warps: int = 4
    stages: int = 2


@dataclass(frozen=True)
class Triton(CacheKernel):
    """The programs of `programs`, on GPUs, and with `TRITON_INTERPRET=1` on the CPU."""

    name: str = "triton"

    def unsupported_reason(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        """It serves single and half precision on GPUs with tensor cores for both halves."""
        if (reason := unable(q.device)) is not None:
            return reason
        if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"it knows no {q.dtype}"
        if max(q.shape[-1], v.shape[-1]) > WIDEST:
            return f"heads are {max(q.shape[-1], v.shape[-1])} wide, of at most {WIDEST}"
        return _compiles(q.device) if q.device.type == "cuda" else None

    def cut(self, band: Band, q: Tensor, k: Tensor, v: Tensor) -> list[Block]:
        """One block, of the keys that any row sees."""
        seen = (band.low < band.high).nonzero().flatten()
        if not len(seen):
            return []
        first, last = int(seen[0]), int(seen[-1])
        start, stop = int(band.low[first]), int(band.high[last])
        return [Block(slice(first, last + 1), slice(start, stop), band=band.rows(first, last + 1, start))]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> Partial:
        """The block's partial, in float32."""
        return _fitted("attend", q, v, q.shape[2] * q.shape[1] // k.shape[1], partial(_attended, q, k, v, block, scale))

    def attend_cache(self, question: DecodeQuery, slots: CacheView) -> Partial:
        """The partial of the last queries, over so many parts of the slots as fill the chip, or a part a block."""
        q, sinks, into = question.q, question.sinks, question.into
        rows = q.shape[2] * q.shape[1] // slots.keys.shape[1]
        made = _fitted("held", q, slots.values, rows, partial(_held, question, slots))
        if question.block is not None:
            return placed(with_sinks(up_the_tree(made), sinks), into)
        return merged(made, into, sinks=sinks)

    def backward(self, q: Tensor, k: Tensor, v: Tensor, answer: SavedForward, block: Block, scale: float) -> Gradients:
        """The block's share of the gradients, in float32: a program for each tile of queries, then of keys."""
        return _fitted("differentiate", q, v, BACKWARD, partial(_differentiated, q, k, v, answer, block, scale))


def _attended(q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float, tile: Tile) -> Partial:
    call = _call(q, k, v, block, scale, tile)
    lines, tiles = k.shape[0] * k.shape[1], -(-call["rows"] // tile.rows)
    span = _span(call["keys"], lines * tiles, SPAN * tile.keys, q.device)
    spans = -(-call["keys"] // span)
    shape = spans, *q.shape[:-1]
    partials = Partial(_blank(q, *shape, v.shape[-1]), _blank(q, *shape))
    launch("attend", "attend", (tiles, spans, lines), q.device, **call, out=partials.out, lse=partials.lse, span=span)
    return Partial(*(x[0] for x in partials)) if spans == 1 else merged(partials)


def _held(question: DecodeQuery, slots: CacheView, tile: Tile) -> Partial:
    """A partial of each part of the slots."""
    q, mask, block = question.q, question.mask, question.block
    lines, rows = q.shape[0] * slots.keys.shape[1], q.shape[2] * q.shape[1] // slots.keys.shape[1]
    room = slots.keys.shape[2] - 1
    tiles = -(-rows // tile.rows)
    count = -(-room // (block or _span(room, lines * tiles, SPAN * tile.keys, q.device)))
    partials = Partial(_blank(q, count, *q.shape[:-1], slots.values.shape[-1]), _blank(q, count, *q.shape[:-1]))
    places, bounded = slots.places(), slots.padding is not None or bool(mask.ends)
    first, last = slots.bounds(q.shape[2], mask) if bounded else (places, places)  # these are not read
    launch(
        "decode",
        "held",
        (count, tiles, lines),
        q.device,
        **_tensors(q, slots.keys, slots.values, tile),
        places=places,
        columns=slots.token_index,
        state=slots.state,
        firsts=first,
        lasts=last,
        out=partials.out,
        lse=partials.lse,
        places_batch=_step(places),
        bounds_batch=_step(first),
        block=block or 0,
        capacity=question.capacity,
        left=min(mask.left, REACH),
        right=min(mask.right, REACH),
        scale=question.scale,
        BOUNDED=bounded,
        NEAR=mask.left < FAR or bool(mask.ends),
    )
    return partials


def _differentiated(
    q: Tensor, k: Tensor, v: Tensor, answer: SavedForward, block: Block, scale: float, tile: Tile
) -> Gradients:
    dout = answer.dout.to(q.dtype).contiguous()
    delta = (answer.out.float() * answer.dout.float()).sum(-1)
    call = _call(q, k, v, block, scale, tile) | {"dout": dout, "lse": answer.lse.contiguous(), "delta": delta}
    lines, tiles = k.shape[0] * k.shape[1], -(-call["keys"] // tile.keys)
    dq, dk, dv = (_blank(q, *x.shape) for x in (q, k, v))
    launch("attend", "queries_backward", (-(-call["rows"] // tile.rows), lines), q.device, **call, dq=dq)
    edges = torch.arange(tiles + 1, dtype=torch.int32, device=q.device) * tile.keys
    seen = {
        "begin": torch.searchsorted(call["high"], edges[:-1], right=True, out_int32=True),
        "finish": torch.searchsorted(call["low"], edges[1:], out_int32=True),
    }
    launch("attend", "keys_backward", (tiles, lines), q.device, **call, **seen, dk=dk, dv=dv)
    return Gradients(dq, dk, dv)


def _call(q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float, tile: Tile) -> dict[str, Any]:
    """What all programs are given."""
    keys = k.shape[2]
    if block.band is None and not block.causal:  # made where it is needed: nothing is sent there
        low, high = (torch.full((q.shape[2],), n, dtype=torch.int32, device=q.device) for n in (0, keys))
    else:
        bounds = block.bounds()
        low, high = (x.clamp(0, keys).to(q.device, torch.int32) for x in (bounds.low, bounds.high))
    return {**_tensors(q, k, v, tile), "low": low, "high": high, "keys": keys, "scale": scale}


def _tensors(q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> dict[str, Any]:
    """The three of them, their shapes, and what of these is compiled in."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    strides = {f"{name}_{dim}": x.stride(i) for name, x in (("q", q), ("k", k), ("v", v)) for i, dim in enumerate(DIMS)}
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
        "PRECISION": "widened" if interpreted() else "ieee",  # float32 is not rounded to half its digits
    }


DIMS = "batch", "head", "row"


BACKWARD = 128
"""Rows from which on a tile is as large as the registers allow."""


def _fitted(name: str, q: Tensor, v: Tensor, rows: int, act: Callable[[Tile], Found]) -> Found:
    """Act with tiles as large as is good, or as the memory that a program's tiles share on this device allows."""
    wanted = _tile(q, v, rows)
    key = name, q.device, q.dtype, q.shape[-1], v.shape[-1], wanted
    tile = _FITTING.get(key, wanted)
    while True:
        try:
            found = act(tile)
        except Exception as error:
            if type(error).__name__ != "OutOfResources" or max(tile.rows, tile.keys) == LEAST:
                raise
            less = {"keys": tile.keys // 2} if tile.keys > LEAST else {"rows": tile.rows // 2}
            tile = tile._replace(**less)
            continue
        _FITTING[key] = tile
        return found


_FITTING: dict[tuple[Any, ...], Tile] = {}

LEAST = 16
"""Rows or keys of a tile: fewer cannot be multiplied."""


def _tile(q: Tensor, v: Tensor, rows: int) -> Tile:
    """So many rows and keys that a program's sums stay in registers: fewer of wider heads and of float32."""
    width = max(q.shape[-1], v.shape[-1])
    size = 16 if interpreted() else (128 if width <= 128 else 64 if width <= 256 else 16) // (q.element_size() // 2)
    few = max(16, min(size, 1 << (rows - 1).bit_length()))
    return Tile(few, max(16, min(size, 64)), warps=8 if few * width >= 128 * 128 else 4)


def _span(keys: int, programs: int, least: int, device: torch.device) -> int:
    """Keys of a program: so many that all programs of a launch fill the chip twice, and no fewer than are worth one."""
    wanted = max(1, 2 * _processors(device) // programs)
    return max(least, -(-keys // wanted))


def _step(x: Tensor) -> int:
    """From one sequence to the next; none if all have the same."""
    return x.stride(0) if len(x) > 1 else 0


def _blank(q: Tensor, *shape: int) -> Tensor:
    return q.new_empty(shape, dtype=torch.float32)


@cache
def _compiles(device: torch.device) -> str | None:
    """Why a device cannot run attention, or None: tried once, on a few tokens whose answer is known."""
    values = torch.arange(16, dtype=torch.bfloat16, device=device).expand(1, 1, 16, 16).mT.contiguous()
    few = torch.zeros_like(values)
    try:
        out, lse = Triton().attend(few, few, values, Block(slice(0, 16), slice(0, 16)), 1.0)
    except Exception as error:  # whatever a compiler comes upon
        return said_once(f"{type(error).__name__}: {error}".splitlines()[0])
    right = (out - 7.5).abs().amax() < 1e-5 and (lse - math.log(16)).abs().amax() < 1e-5
    return None if bool(right) else said_once("attention comes out wrong")


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
