"""The native kernel for CPUs: attention of few rows, in C++ behind a plain C interface that ctypes calls.

The library comes with the wheel, or is compiled at its first use and kept in the user's cache. Without a compiler, and
with `ATTNMESH_NATIVE=0`, PyTorch's operator serves instead.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple, cast

import torch
from torch import Tensor

from attnmesh.core.band import Band
from attnmesh.core.partial import Partial
from attnmesh.core.scaling import Scaling
from attnmesh.core.storage import is_prefix
from attnmesh.kernels.implementations.cpu import FlashCPU
from attnmesh.kernels.implementations.reference import Reference
from attnmesh.kernels.kernel import Kernel, KernelRequest
from attnmesh.kernels.native.abi import DTYPE_CODES, STORED, error_of
from attnmesh.kernels.native.build import Function, library
from attnmesh.kernels.rectangles import BackwardInputs, Gradients, Rectangle, cut

MAX_ROWS = 64
"""Query rows of a key head up to which a rectangle is one call, and the kernel is the choice of "auto"."""

ATTEND_CALL, ATTEND_FIXED, ATTEND_STRIDES = struct.Struct("9P14q"), struct.Struct("16q2d2q"), struct.Struct("3q")
"""Fields of `Problem` in `attend.cpp`: of each call, of all calls of one launch, and strides of `out` in the latter."""

STRIDES_START = struct.calcsize("10q")
"""Bytes of `ATTEND_FIXED` before the strides of `out`: ten sizes and codes."""

STRIDES_STOP = STRIDES_START + ATTEND_STRIDES.size
"""Bytes of `ATTEND_FIXED` up to the end of the strides of `out`."""

PART_FIELDS = struct.Struct("2q")
"""Last fields of `ATTEND_FIXED`: the first run of a part of the keys, and the runs of all parts."""

RUN = 2048
"""Keys of a task in `attend.cpp`. Parts of a multiple of `RUN` keys have the bits of one call."""


class Native(Kernel):
    """`attend.cpp`; the reference for rows with numbers that are not finite, PyTorch's operator backward."""

    name, device_type = "native", "cpu"
    made_for = f"up to {MAX_ROWS} rows of queries a key head"
    priority = 0
    reads_scattered = reads_8_bits = True

    def unsupported_reason(self, request: KernelRequest) -> str | None:
        """Return None in float32 and narrower, if there is a library."""
        if request.dtype not in DTYPE_CODES:
            return f"it computes in float32, the tensors are {str(request.dtype).removeprefix('torch.')}"
        return library().reason

    def is_made_for(self, request: KernelRequest) -> bool:
        """Return True for few rows, where reading the keys is the cost."""
        return request.rows <= MAX_ROWS

    def bind(self, q: Tensor, k: Tensor, v: Tensor, scaling: Scaling) -> "BoundNative | None":
        """Return the launch of few rows."""
        few = q.dtype in DTYPE_CODES and q.shape[1] // max(1, k.shape[1]) * q.shape[2] <= MAX_ROWS
        served = few and min(q.numel(), k.numel(), v.numel()) > 0 and scaling.scale > 0
        return BoundNative.of(q, k, v, scaling) if served else None

    def attend_scattered(
        self, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, hidden: Tensor, scaling: Scaling
    ) -> Partial | None:
        """Return the partial of the keys of each sequence at these indices. None if a number is not finite."""
        bound = BoundNative.of(q, k, v, scaling)
        indices = indices.int()
        counts = (~hidden).sum(-1)
        into = bound.blank()
        scattered = indices.data_ptr(), counts.data_ptr()
        return into if bound.attend(q, k, v, into, None, 0, indices.shape[1], scattered) else None

    def cut(self, band: Band, q: Tensor, k: Tensor, v: Tensor) -> list[Rectangle]:
        """Return the fewest rectangles: rows may see different runs of keys."""
        if len(band.low) * q.shape[1] // max(1, k.shape[1]) > MAX_ROWS:
            return cut(band)
        count = len(band.low)
        low, high = (int(band.low[0]), int(band.high[-1])) if count else (0, 0)
        if low >= high:
            return []
        return [Rectangle(slice(0, count), slice(low, high), band=band.select_queries(0, count, low))]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rectangle: Rectangle, scaling: Scaling) -> Partial:
        """Return the rectangle's partial, in float32."""
        band = rectangle.bounds() if rectangle.causal or rectangle.band is not None else None
        rows = max(1, MAX_ROWS * k.shape[1] // q.shape[1])
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        out, lse = BoundNative.of(q, k, v, scaling).blank()
        for start in range(0, q.shape[2], rows):
            tile = slice(start, start + rows)
            bounds = None if band is None else Band(band.low[tile].contiguous(), band.high[tile].contiguous())
            tile_q = q[:, :, tile]
            into = Partial(out[:, :, tile], lse[:, :, tile])
            if not BoundNative.of(tile_q, k, v, scaling, q.shape[2]).attend(tile_q, k, v, into, bounds):
                refused = rectangle.select(torch.arange(start, min(start + rows, q.shape[2]), device="cpu"))
                exact = Reference().attend(tile_q, k, v, refused, scaling)
                into.out.copy_(exact.out)
                into.lse.copy_(exact.lse)
        return Partial(out, lse)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, inputs: BackwardInputs, rectangle: Rectangle, scaling: Scaling
    ) -> Gradients:
        """Return the rectangle's share of the gradients."""
        out = inputs.out.to(q.dtype)
        return FlashCPU().backward(q, k, v, BackwardInputs(out, inputs.lse, inputs.dout), rectangle, scaling)


KERNEL = NATIVE = Native()


class BoundNative(NamedTuple):
    """A launch of the native kernel, for calls that differ only in their memory, their keys and what a row sees."""

    fields: bytes
    """Those of `ATTEND_FIXED`."""
    out_shape: tuple[int, ...]
    """Shape of the partial's `out`, as `blank` returns it."""
    out_strides: tuple[int, ...]
    lse_shape: tuple[int, ...]

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, scaling: Scaling, tokens: int | None = None) -> "BoundNative":
        """Return the launch of a call, whose rows are part of a partial of `tokens` tokens; by default all of it."""
        tokens = q.shape[2] if tokens is None else tokens
        return _bound_to(tuple(q.shape), k.shape[1], v.shape[3], (q.dtype, k.dtype), is_prefix(v, k), scaling, tokens)

    def blank(self) -> Partial:
        """Return memory for a partial, `out` in the order that an output projection reads."""
        out = torch.empty_strided(self.out_shape, self.out_strides, dtype=torch.float32, device="cpu")
        return Partial(out, torch.empty(self.lse_shape, dtype=torch.float32, device="cpu"))

    def parts(self, keys: Sequence[int]) -> "list[BoundNative]":
        """Return a launch for each part, of `keys[i]` keys. They run in order; the last writes the partial of all."""
        runs = [-(-count // RUN) for count in keys]
        firsts = accumulate(runs, initial=0)
        begin = self.fields[: -PART_FIELDS.size]
        return [
            self._replace(fields=begin + PART_FIELDS.pack(first, sum(runs)))
            for first, _ in zip(firsts, runs, strict=False)
        ]

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        into: Partial,
        bounds: Band | None = None,
        first: int = 0,
        keys: int | None = None,
        scattered: tuple[int, int] = (0, 0),
    ) -> bool:
        """Write the partial of `keys` keys from index `first` on. By default these are all.

        Rows see all of them, or those between their bounds, which count from `first`. `scattered` are the addresses
        of indices of keys and of their counts, if not all are read. Return False if a number is not finite, or the
        last stride of a tensor is not 1.
        """
        q_strides, k_strides, v_strides, strides = q.stride(), k.stride(), v.stride(), into.out.stride()
        if not q_strides[3] == k_strides[3] == v_strides[3] == 1:
            return False
        low, high = (0, 0) if bounds is None else (bounds.low.data_ptr(), bounds.high.data_ptr())
        call = ATTEND_CALL.pack(
            q.data_ptr(),
            k.data_ptr() + first * k_strides[2] * k.itemsize,
            v.data_ptr() + first * v_strides[2] * k.itemsize,
            into.out.data_ptr(),
            into.lse.data_ptr(),
            low,
            high,
            *scattered,
            *q_strides,
            *k_strides,
            *v_strides,
            k.shape[2] if keys is None else keys,
            torch.get_num_threads(),
        )
        fields = self.fields
        if strides != self.out_strides:
            fields = fields[:STRIDES_START] + ATTEND_STRIDES.pack(*strides[:3]) + fields[STRIDES_STOP:]
        code = cast(Function, library().attend)(call + fields)
        if code < 0:
            raise error_of(code)
        return code == 0


@lru_cache(maxsize=1024)
def _bound_to(
    shape: tuple[int, ...],
    kv_heads: int,
    width: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    is_prefix: bool,
    scaling: Scaling,
    tokens: int,
) -> BoundNative:
    """Return the launch for queries of this shape, and values of this width. `is_prefix` says that keys hold them."""
    batch, heads, rows, dim = shape
    strides, lse_shape = (tokens * heads * width, width, heads * width, 1), (batch, heads, tokens)
    codes = [(DTYPE_CODES | STORED)[dtype] for dtype in dtypes]
    scales = (dim, dim if is_prefix else width)
    sizes = batch, kv_heads, heads // kv_heads, rows, dim, width, *codes, *scales
    cap = scaling.softcap if scaling.capped else 0.0
    fields = ATTEND_FIXED.pack(*sizes, *strides[:3], heads * tokens, tokens, 1, scaling.scale, cap, 0, 0)
    return BoundNative(fields, (batch, heads, tokens, width), strides, lse_shape)
