"""The Triton kernel: one launch for any mask and layout. Decoding is split over the keys to fill the chip."""

import math
from collections.abc import Callable
from functools import cache
from functools import partial as partial_of
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from attnmesh.core.band import Band
from attnmesh.core.mask import FAR
from attnmesh.core.partial import Partial, with_sinks
from attnmesh.core.scaling import Scaling
from attnmesh.core.storage import is_prefix, storage_of
from attnmesh.kernels.cache_view import FORGOTTEN_BLOCKS, CacheView, DecodeQuery
from attnmesh.kernels.kernel import Kernel, KernelRequest
from attnmesh.kernels.rectangles import BackwardInputs, Gradients, Rectangle
from attnmesh.kernels.stacked_merge import (
    by_residue,
    copy_into,
    merge_in_pairs,
    merge_stack_by_triton,
    merge_stack_on_device,
    unsupported_reason,
    warn_unsupported,
)
from attnmesh.kernels.triton_runtime import interpreted, launch, powers_covering
from attnmesh.runtime.memo import TENSOR_MEMO, Memo

Result = TypeVar("Result")

MAX_WIDTH = 576
"""Columns of a head. Latent attention has 512 columns and 64 rotated ones."""

MAX_REACH = 1 << 40
"""Reach of an unbounded mask: beyond every position, and small enough that sums do not overflow."""

MIN_SPLIT_TILES = 4
"""Tiles of keys that are worth a program instance. Fewer fill the chip sooner, and leave more partials to merge."""

LARGE_ROWS = 128
"""Rows from which on a tile is as large as the registers allow."""

MIN_TILE = 16
"""Rows or keys of the smallest tile that can be multiplied."""

FEW_ROWS = 32
"""Rows of a tile up to which reading the keys is the cost: more keys are then on their way at once."""

LARGE_TILE = 1 << 16
"""Bytes of keys on their way from which on a multiprocessor holds one instance at a time."""


class ProgramTile(NamedTuple):
    """Rows and keys that a program instance holds at once, its warps and stages, and instances on a multiprocessor."""

    rows: int
    keys: int
    warps: int = 4
    stages: int = 2
    at_once: int = 2


class Triton(Kernel):
    """The programs of `kernels/programs`, on GPUs, and with `TRITON_INTERPRET=1` on the CPU."""

    name, device_type, made_for, priority = "triton", "cuda", "caches on GPUs", 0
    reads_scattered = reads_cache = True

    def is_elsewhere(self, device: torch.device) -> bool:
        """Return whether the device is no GPU, unless programs are interpreted."""
        return super().is_elsewhere(device) and not interpreted()

    def unsupported_reason(self, request: KernelRequest) -> str | None:
        """Return None for float32, bfloat16 and float16 on GPUs with bfloat16 tensor cores."""
        if (reason := unsupported_reason(request.device)) is not None:
            return reason
        if request.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"it does not support {request.dtype}"
        if request.width > MAX_WIDTH:
            return f"heads are {request.width} wide, of at most {MAX_WIDTH}"
        return _fault(request.device) if request.device.type == "cuda" else None

    def is_made_for(self, request: KernelRequest) -> bool:
        """Return True for caches on GPUs, which it reads in place."""
        return request.cached and request.device.type != "cpu"

    def cut(self, band: Band, q: Tensor, k: Tensor, v: Tensor) -> list[Rectangle]:
        """Return one rectangle of the keys that any row sees, or none if there are none."""
        rows = (band.low < band.high).nonzero().flatten()
        if not len(rows):
            return []
        first, last = int(rows[0]), int(rows[-1])
        start, stop = int(band.low[first]), int(band.high[last])
        return [Rectangle(slice(first, last + 1), slice(start, stop), band=band.select_queries(first, last + 1, start))]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rectangle: Rectangle, scaling: Scaling) -> Partial:
        """Return the rectangle's partial, in float32."""
        rows = q.shape[2] * q.shape[1] // k.shape[1]
        return _with_fitting_tile("attend", q, v, rows, partial_of(_attend, q, k, v, rectangle, scaling))

    def attend_cache(self, query: DecodeQuery, view: CacheView) -> Partial:
        """Return the partial of the last queries, merged from one partial per block or per program instance."""
        return self.bind_cache().attend_cache(query, view)

    def bind_cache(self) -> "BoundTritonCache":
        """Return the launch of steps whose queries differ in their tensors alone."""
        return BoundTritonCache()

    def attend_scattered(
        self, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, hidden: Tensor, scaling: Scaling
    ) -> Partial:
        """Return the partial of the keys of each sequence at these indices, (batch, keys), but for hidden ones."""
        positions = indices.masked_fill(hidden, -1).to(torch.int32)
        run = partial_of(_attend_scattered, q, k, v, positions, scaling)
        return merge_stack_on_device(_with_fitting_tile("attend_cache", q, v, q.shape[1] // k.shape[1], run))

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, inputs: BackwardInputs, rectangle: Rectangle, scaling: Scaling
    ) -> Gradients:
        """Return the rectangle's share of the gradients, in float32: one launch over queries, one over keys."""
        run = partial_of(_backward, q, k, v, inputs, rectangle, scaling)
        return _with_fitting_tile("backward", q, v, LARGE_ROWS, run)


KERNEL = TRITON = Triton()


def _attend(q: Tensor, k: Tensor, v: Tensor, rectangle: Rectangle, scaling: Scaling, tile: ProgramTile) -> Partial:
    arguments = _rectangle_arguments(q, k, v, rectangle, scaling, tile)
    heads = k.shape[0] * k.shape[1]
    tiles = -(-arguments["rows"] // tile.rows)
    split_keys = _split_keys(arguments["keys"], heads * tiles, tile, q.device)
    splits = -(-arguments["keys"] // split_keys)
    partials = _empty_partials(q, splits, v.shape[-1])
    out, lse = partials
    launch("attend", "attend", (tiles, splits, heads), q.device, **arguments, out=out, lse=lse, split_keys=split_keys)
    return Partial(out[0], lse[0]) if splits == 1 else merge_stack_on_device(partials)


class BoundTritonCache:
    """Attention of steps of one signature to a cache, in two launches. Arguments that are no tensors are made once.

    The steps have one mask, capacity, block and scaling.
    """

    def __init__(self) -> None:
        self.prepared = Memo[tuple[tuple[int, ...], dict[str, Any]]](maxsize=64)
        """Launches, by the layout of the tensors."""

    def attend_cache(self, query: DecodeQuery, view: CacheView) -> Partial:
        """Return the partial of the last queries, merged from one partial per block or per program instance."""
        q = query.q if query.q.stride(-1) == 1 else query.q.contiguous()
        keys, values = view.keys, view.values
        if storage_of(keys) is not None:  # bytes, which all GPUs read
            keys, values = keys.view(torch.int8), values.view(torch.int8)
        positions = view.token_index if view.padding is None else view.padding.positions
        bounds = self._bounds(query, view) or (positions, positions)  # not read if they are the places
        tensors = {"q": q, "k": keys, "v": values, "positions": positions, "token_index": view.token_index}
        tensors |= {"device_counts": view.device_counts, "firsts": bounds[0], "lasts": bounds[1]}
        signature = q.shape, q.stride(), keys.shape, keys.stride(), values.stride(), positions.ndim, bounds[0].shape
        prepared = self.prepared.get(signature)
        if prepared is None:
            rows = q.shape[2] * q.shape[1] // keys.shape[1]
            run = partial_of(self._prepare, query, view, tensors)
            prepared, partials = _with_fitting_tile("attend_cache", q, view.values, rows, run)
            self.prepared.keep(signature, prepared)
        else:
            partials = _launch_cache(*prepared, tensors, view.value_dim)
        if query.partial_block is None:
            return merge_stack_by_triton(partials, query.into, query.sinks)
        if len(view.device_counts) > FORGOTTEN_BLOCKS:
            partials = by_residue(partials, view.device_counts[FORGOTTEN_BLOCKS])
        return copy_into(with_sinks(merge_in_pairs(partials), query.sinks), query.into)

    @staticmethod
    def _bounds(query: DecodeQuery, view: CacheView) -> tuple[Tensor, Tensor] | None:
        """Return the first and last position that each row sees, or None if the mask's two reaches say it."""
        mask, lengths = query.mask, query.key_lengths
        if view.padding is None and mask.is_by_distance and lengths is None:
            return None
        first, last = view.bounds(query.q.shape[2], mask)
        if lengths is not None:
            last = torch.minimum(last, lengths.to(last.device)[:, None] - 1)
            first = first.expand_as(last).contiguous()
        return first, last

    @staticmethod
    def _prepare(
        query: DecodeQuery, view: CacheView, tensors: dict[str, Tensor], tile: ProgramTile
    ) -> tuple[tuple[tuple[int, ...], dict[str, Any]], Partial]:
        """Return the grid and the arguments of a launch but for tensors, and the partials of the first one."""
        q = tensors["q"]
        mask = query.mask
        block = query.partial_block
        first = tensors["firsts"]
        heads, rows = q.shape[0] * view.keys.shape[1], q.shape[2] * q.shape[1] // view.keys.shape[1]
        tiles = -(-rows // tile.rows)
        slots = view.keys.shape[2] - 1
        split_keys = block or _split_keys(slots, heads * tiles, tile, q.device)
        bounded = first is not tensors["positions"]
        left, right = mask.distances(MAX_REACH)
        arguments = _cache_arguments(q, *view.unscaled, query.scaling, tile) | {
            "positions_batch": 0 if view.padding is None else _batch_stride(view.padding.positions),
            "bounds_batch": _batch_stride(first) if bounded else 0,
            "block": block or 0,
            "capacity": query.capacity,
            "left": left,
            "right": right,
            "BOUNDED": bounded,
            "NEAR": mask.max_causal_keys < FAR,
        }
        prepared = (max(1, -(-slots // split_keys)), tiles, heads), arguments
        return prepared, _launch_cache(*prepared, tensors, view.value_dim)


def _launch_cache(grid: tuple[int, ...], arguments: dict[str, Any], tensors: dict[str, Tensor], width: int) -> Partial:
    """Return stacked partials, one per part of the slots or places."""
    q = tensors["q"]
    out, lse = partials = _empty_partials(q, grid[0], width)
    launch("decode", "attend_cache", grid, q.device, **arguments, **tensors, out=out, lse=lse)
    return partials


def _attend_scattered(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scaling: Scaling, tile: ProgramTile
) -> Partial:
    """Return stacked partials, one per part of the places, which are those of the keys to read."""
    heads = q.shape[0] * k.shape[1]
    tiles = -(-q.shape[1] // k.shape[1] // tile.rows)
    keys = positions.shape[1]
    count = -(-keys // _split_keys(keys, heads * tiles, tile, q.device))
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    numbers = (x if storage_of(x) is None else x.view(torch.int8) for x in (k, v))
    device_counts = torch.full((2,), keys, device=q.device)
    tensors = {"q": q, **dict(zip("kv", numbers, strict=True)), "device_counts": device_counts}
    tensors |= dict.fromkeys(("positions", "token_index", "firsts", "lasts"), positions)
    arguments = _cache_arguments(q, k, v, scaling, tile)
    arguments |= {"positions_batch": _batch_stride(positions), "capacity": keys, "SELECTED": True}
    return _launch_cache((count, tiles, heads), arguments, tensors, v.shape[-1])


def _cache_arguments(q: Tensor, keys: Tensor, values: Tensor, scaling: Scaling, tile: ProgramTile) -> dict[str, Any]:
    """Return the arguments but for tensors of a launch over a cache whose rows all see all places."""
    rows = {"K_ROW": keys.shape[-1], "V_ROW": (keys if is_prefix(values, keys) else values).shape[-1]}
    if storage_of(keys) is None:
        rows = dict.fromkeys(rows, 0)
    unbounded = {"left": MAX_REACH, "right": MAX_REACH, "bounds_batch": 0, "block": 0}
    all_seen = {"BOUNDED": False, "NEAR": False, "SELECTED": False, "FLOAT8": keys.dtype == torch.float8_e4m3fn}
    return {**_sizes(q, keys, values, tile), **_logit_arguments(scaling), **rows, **unbounded, **all_seen}


def _backward(
    q: Tensor, k: Tensor, v: Tensor, inputs: BackwardInputs, rectangle: Rectangle, scaling: Scaling, tile: ProgramTile
) -> Gradients:
    dout = inputs.dout.to(q.dtype).contiguous()
    delta = (inputs.out.float() * inputs.dout.float()).sum(-1)
    arguments = _rectangle_arguments(q, k, v, rectangle, scaling, tile)
    arguments |= {"dout": dout, "lse": inputs.lse.contiguous(), "delta": delta}
    heads = k.shape[0] * k.shape[1]
    tiles = -(-arguments["keys"] // tile.keys)
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


def _rectangle_arguments(
    q: Tensor, k: Tensor, v: Tensor, rectangle: Rectangle, scaling: Scaling, tile: ProgramTile
) -> dict[str, Any]:
    """Return the arguments that all programs over a rectangle share."""
    keys = k.shape[2]
    if rectangle.band is None and not rectangle.causal:  # created on the device, without a copy from the CPU
        low, high = (torch.full((q.shape[2],), edge, dtype=torch.int32, device=q.device) for edge in (0, keys))
    else:
        bounds = rectangle.bounds()
        low, high = (_bounds_on_device(x, keys, q.device) for x in (bounds.low, bounds.high))
    return {**_arguments(q, k, v, tile), "low": low, "high": high, "keys": keys, **_logit_arguments(scaling)}


def _bounds_on_device(bounds: Tensor, keys: int, device: torch.device) -> Tensor:
    """Return the bounds of rows as a program takes them, copied once as long as they live."""

    def copy() -> Tensor:
        return bounds.clamp(0, keys).to(device, torch.int32)

    return copy() if device.type == "cpu" else TENSOR_MEMO.get_or_make(bounds, (device, keys), copy, lambda x: x.nbytes)


def _logit_arguments(scaling: Scaling) -> dict[str, Any]:
    return {"scale": scaling.scale, "softcap": scaling.softcap, "CAPPED": scaling.capped}


def _arguments(q: Tensor, k: Tensor, v: Tensor, tile: ProgramTile) -> dict[str, Any]:
    """Return q, k and v, their strides and shapes, and the constants of compilation."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return {"q": q, "k": k, "v": v, **_sizes(q, k, v, tile)}


def _sizes(q: Tensor, k: Tensor, v: Tensor, tile: ProgramTile) -> dict[str, Any]:
    """Return the strides and shapes of q, k and v, and the constants of compilation."""
    dims = ("batch", "head", "row")
    strides = {
        f"{name}_{dim}": x.stride(place) for name, x in (("q", q), ("k", k), ("v", v)) for place, dim in enumerate(dims)
    }
    group = q.shape[1] // k.shape[1]
    q_parts = powers_covering(q.shape[-1])
    v_parts = powers_covering(v.shape[-1])
    return {
        **strides,
        "rows": q.shape[2] * group,
        "group": group,
        "kv_heads": k.shape[1],
        "width": q.shape[-1],
        "value_width": v.shape[-1],
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
"""Tiles that have fitted, by all that their size depends on: `_with_fitting_tile` tries none twice."""


def _with_fitting_tile(name: str, q: Tensor, v: Tensor, rows: int, run: Callable[[ProgramTile], Result]) -> Result:
    """Return the result of `run`, with the largest tile that fits in the shared memory of the device."""
    preferred = _tile(q, v, rows)
    key = name, q.device, q.dtype, q.shape[-1], v.shape[-1], preferred
    tile = _FITTING_TILES.get(key, preferred)
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
    width = max(q.shape[-1], v.shape[-1])
    shrink = q.element_size() // 2
    if interpreted():
        return ProgramTile(MIN_TILE, MIN_TILE)
    most = (128 if 64 < width <= 128 else 64) // shrink
    tile_rows = max(MIN_TILE, min(most, 1 << (rows - 1).bit_length()))
    if tile_rows > FEW_ROWS or width > 256:
        keys, warps = 64 if width <= 256 else 32, 8 if tile_rows * width >= 128 * 128 else 4
        return ProgramTile(tile_rows, keys // shrink, warps, at_once=2 if width <= 256 else 1)
    keys = (128 if width <= 128 else 64) // shrink
    warps = 4 if width <= 128 else 8
    stages = 3 if shrink == 1 else 2
    on_their_way = (stages - 1) * keys * width * min(q.element_size(), v.element_size())
    return ProgramTile(tile_rows, keys, warps, stages, at_once=1 if on_their_way >= LARGE_TILE else 2)


def _split_keys(keys: int, programs: int, tile: ProgramTile, device: torch.device) -> int:
    """Return the keys per program instance, at least some tiles, with which all instances of a launch run at once."""
    splits = max(1, tile.at_once * _processors(device) // programs)
    return max(MIN_SPLIT_TILES * tile.keys, -(-keys // splits))


def _batch_stride(x: Tensor) -> int:
    """Return the stride from one sequence to the next; 0 if all sequences share one row."""
    return x.stride(0) if len(x) > 1 else 0


@cache
def _fault(device: torch.device) -> str | None:
    """Return why a device does not run attention correctly, or None; tested once, on a few tokens."""
    values = torch.arange(16, dtype=torch.bfloat16, device=device).expand(1, 1, 16, 16).mT.contiguous()
    few = torch.zeros_like(values)
    try:
        out, lse = TRITON.attend(few, few, values, Rectangle(slice(0, 16), slice(0, 16)), Scaling(1.0))
    except Exception as error:  # a compiler may raise any exception
        return warn_unsupported(f"{type(error).__name__}: {error}".splitlines()[0])
    right = (out - 7.5).abs().amax() < 1e-5 and (lse - math.log(16)).abs().amax() < 1e-5
    return None if bool(right) else warn_unsupported("attention gives a wrong result")


@cache
def _processors(device: torch.device) -> int:
    """Return the number of multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
