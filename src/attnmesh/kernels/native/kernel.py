"""The native kernel for CPUs: attention of few rows, in C++ behind a plain C interface that ctypes calls.

The library comes with the wheel, or is compiled at its first use and kept in the user's cache. Without a compiler, and
with `ATTNMESH_NATIVE=0`, PyTorch's operator serves instead.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from attnmesh.core.logits import Logits
from attnmesh.core.mask import Band
from attnmesh.core.partial import Partial
from attnmesh.kernels.blocks import BackwardInputs, Block, Gradients, cut
from attnmesh.kernels.cpu import FlashCPU
from attnmesh.kernels.native.build import library
from attnmesh.kernels.reference import Reference

MOST_ROWS = 64
"""Query rows of a key head up to which a block is one call, and the kernel is the choice of "auto"."""

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

PROBLEM = struct.Struct("7P24q2d")
"""Fields of `Problem` in `attend.cpp`."""


@dataclass(frozen=True)
class Native:
    """`attend.cpp`; the reference for rows with numbers that are not finite, PyTorch's operator backward."""

    name: str = "native"

    def unsupported_reason(self, q: Tensor, k: Tensor, v: Tensor, capped: bool = False) -> str | None:
        """Return None on the CPU in float32 and narrower, if there is a library."""
        if q.device.type != "cpu":
            return f"it runs on the CPU, the tensors are on {q.device.type}"
        if q.dtype not in DTYPES:
            return f"it computes in float32, the tensors are {str(q.dtype).removeprefix('torch.')}"
        return library().reason

    def is_best(self, q: Tensor, k: Tensor) -> bool:
        """Return True for few rows, where reading the keys is the cost."""
        few = q.device.type == "cpu" and q.shape[1] // max(1, k.shape[1]) * q.shape[2] <= MOST_ROWS
        return few and q.dtype in DTYPES and library().attend is not None

    def cut(self, band: Band, q: Tensor, k: Tensor, v: Tensor) -> list[Block]:
        """Return the fewest blocks: rows may see different runs of keys."""
        if len(band.low) * q.shape[1] // max(1, k.shape[1]) > MOST_ROWS:
            return cut(band)
        count = len(band.low)
        low, high = (int(band.low[0]), int(band.high[-1])) if count else (0, 0)
        return [Block(slice(0, count), slice(low, high), band=band.rows(0, count, low))] if low < high else []

    def attend(self, q: Tensor, k: Tensor, v: Tensor, block: Block, logits: Logits) -> Partial:
        """Return the block's partial, in float32."""
        band = block.bounds() if block.causal or block.band is not None else None
        rows = max(1, MOST_ROWS * k.shape[1] // q.shape[1])
        shape, order = (*q.shape[:-1], v.shape[-1]), (0, 2, 1, 3)  # as an output projection reads it
        out = torch.empty_permuted(shape, order, dtype=torch.float32)
        lse = torch.empty(q.shape[:-1], dtype=torch.float32)
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        for start in range(0, q.shape[2], rows):
            some = slice(start, start + rows)
            bounds = None if band is None else Band(band.low[some].contiguous(), band.high[some].contiguous())
            into = Partial(out[:, :, some], lse[:, :, some])
            if not _attend(q[:, :, some], k, v, bounds, logits, into):
                rows_of_block = torch.arange(start, min(start + rows, q.shape[2]))
                exact = Reference().attend(q[:, :, some], k, v, block.select(rows_of_block), logits)
                into.out.copy_(exact.out)
                into.lse.copy_(exact.lse)
        return Partial(out, lse)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, saved: BackwardInputs, block: Block, logits: Logits
    ) -> Gradients:
        """Return the block's share of the gradients."""
        out = saved.out.to(q.dtype)
        return FlashCPU().backward(q, k, v, BackwardInputs(out, saved.lse, saved.dout), block, logits)


def _attend(q: Tensor, k: Tensor, v: Tensor, band: Band | None, logits: Logits, into: Partial) -> bool:
    """Write the partial of some rows. Return False if a number is not finite."""
    low, high = (0, 0) if band is None else (band.low.data_ptr(), band.high.data_ptr())
    tensors = (q, k, v, into.out, into.lse)
    problem = PROBLEM.pack(
        *(x.data_ptr() for x in tensors),
        low,
        high,
        q.shape[0],
        k.shape[1],
        q.shape[1] // k.shape[1],
        q.shape[2],
        k.shape[2],
        q.shape[3],
        v.shape[3],
        torch.get_num_threads(),
        DTYPES[q.dtype],
        *(stride for x in tensors for stride in x.stride()[:3]),
        logits.scale,
        logits.softcap if logits.capped else 0.0,
    )
    return cast(Callable[[bytes], int], library().attend)(problem) == 0
