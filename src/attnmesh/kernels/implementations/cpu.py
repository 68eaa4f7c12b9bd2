"""The CPU kernel: PyTorch's flash attention, which returns lse and whose backward accepts a global lse.

It works around the operator's limits. The operator needs k and v of one width. It returns lse 0 for an empty row and,
in half precision, out 0 for an infinite logit. With grouped heads it reads the keys again for every query head. It
fails on empty inputs and on a negative scale, which `driver` avoids for every kernel.
"""

import math
from collections.abc import Sequence
from functools import partial as partial_of

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnmesh.core.partial import Partial
from attnmesh.core.scaling import Scaling
from attnmesh.kernels.implementations.reference import Reference
from attnmesh.kernels.kernel import Kernel, KernelRequest
from attnmesh.kernels.rectangles import (
    MASKED_TILE_ROWS,
    BackwardInputs,
    Gradients,
    Rectangle,
    attend_rectangles,
    memo_of_band,
    tile_elements,
)

MAX_PACKED_ROWS = 32
"""Queries up to which reading the keys is the cost. The heads that share a key head are then packed into one."""

MAX_KEPT_ELEMENTS = 1 << 18
"""Elements of a mask that is kept for the layers of a forward pass and for later ones."""

CACHE_BYTES = 1 << 21
"""Bytes of float32 keys that fit in the cache of a core."""


class FlashCPU(Kernel):
    """`aten::_scaled_dot_product_flash_attention_for_cpu`, and the reference for soft-capped logits."""

    name = device_type = "cpu"
    made_for, priority = "all calls", 1

    def unsupported_reason(self, request: KernelRequest) -> str | None:
        """Return why there is no operator, or None: it supports every dtype."""
        if not hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"):
            return "this PyTorch has no flash attention for CPUs"
        return None

    def is_made_for(self, request: KernelRequest) -> bool:
        """Return True: it comes before the reference."""
        return True

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rectangle: Rectangle, scaling: Scaling) -> Partial:
        """Return the rectangle's partial."""
        if scaling.capped:
            return Reference().attend(q, k, v, rectangle, scaling)
        if _use_tiles(q, k, v, rectangle):
            attend = partial_of(_attend_tiles, scaling=scaling)
            return attend_rectangles(attend, q, k, v, _runs_of_keys(q, k, v))
        packed = q.shape[1] > k.shape[1] and q.shape[2] <= MAX_PACKED_ROWS
        queries = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3) if packed else q  # (batch, kv_heads, group * length)
        rows, keys, values = _convert((queries, k, v), _width(q, v))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            rows, keys, values, **_arguments(rows, rectangle, packed), scale=scaling.scale
        )
        shape = q.shape[:-1]
        partial = Partial(out[..., : v.shape[-1]].reshape(*shape, -1), lse.reshape(shape))
        return _recompute_doubtful(partial, q, k, v, rectangle, scaling)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, inputs: BackwardInputs, rectangle: Rectangle, scaling: Scaling
    ) -> Gradients:
        """Return the rectangle's share of the gradients."""
        if scaling.capped:
            return Reference().backward(q, k, v, inputs, rectangle, scaling)
        dout, *qkv, out = _convert((inputs.dout, q, k, v, inputs.out), _width(q, v))
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, *qkv, out, inputs.lse, **_arguments(qkv[0], rectangle, packed=False), scale=scaling.scale
        )
        return Gradients(dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]])


KERNEL = FlashCPU()


def _use_tiles(q: Tensor, k: Tensor, v: Tensor, rectangle: Rectangle) -> bool:
    """Return True for few rows if the operator needs a copy of all keys, or is slow, as with one row per head."""
    if rectangle.causal or rectangle.band is not None or q.shape[2] > MAX_PACKED_ROWS or q.dtype == torch.float64:
        return False
    copied = q.dtype == torch.float16 or q.shape[3] != v.shape[3]
    return copied or (q.dtype == torch.bfloat16 and q.shape[1] * q.shape[2] == k.shape[1])


def _tile_keys(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Return the keys of a tile that is in a core's cache in float32."""
    return max(MASKED_TILE_ROWS, CACHE_BYTES // (4 * k.shape[1] * _width(q, v)))


def _runs_of_keys(q: Tensor, k: Tensor, v: Tensor) -> list[Rectangle]:
    """Return few rows over all keys as runs of whole tiles, so that memory for logits does not grow with the keys."""
    size = _tile_keys(q, k, v)
    run = max(1, tile_elements(q.device) // (q.shape[:-1].numel() * size)) * size
    rows, keys = slice(0, q.shape[2]), k.shape[2]
    return [Rectangle(rows, slice(start, min(start + run, keys))) for start in range(0, keys, run)]


def _attend_tiles(q: Tensor, k: Tensor, v: Tensor, run: Rectangle, scaling: Scaling) -> Partial:
    """Return the partial of few rows, from tiles of keys that are converted to float32 in the core's cache."""
    rows = q.float().reshape(q.shape[0], k.shape[1], -1, q.shape[3]) * scaling.scale
    size = _tile_keys(q, k, v)
    tile = rows.new_empty(*k.shape[:2], min(size, k.shape[2]), _width(q, v))  # reused: new memory costs more

    def copy_to_tile(x: Tensor) -> Tensor:
        return tile[:, :, : x.shape[2], : x.shape[3]].copy_(x)

    logits = rows.new_empty(*rows.shape[:3], k.shape[2])
    for part, keys in zip(logits.split(size, -1), k.split(size, 2), strict=True):
        part.copy_(rows @ copy_to_tile(keys).mT)
    out = rows.new_zeros(*rows.shape[:3], v.shape[3])
    for part, values in zip(torch.softmax(logits, -1).split(size, -1), v.split(size, 2), strict=True):
        out += part @ copy_to_tile(values)
    found = Partial(out.reshape(*q.shape[:3], -1), torch.logsumexp(logits, -1).reshape(q.shape[:3]))
    return _recompute_doubtful(found, q, k, v, run, scaling)


def _arguments(rows: Tensor, rectangle: Rectangle, packed: bool) -> dict[str, object]:
    """Return the operator's arguments for the rectangle. It is causal, has an additive mask, or neither."""
    causal = rectangle.causal and not packed
    mask = None
    if (rectangle.causal and packed) or rectangle.band is not None:
        mask = _mask(rectangle, rows.dtype)
        mask = mask.repeat(rows.shape[2] // mask.shape[0], 1)
    return {"dropout_p": 0.0, "is_causal": causal, "attn_mask": mask}


def _mask(rectangle: Rectangle, dtype: torch.dtype) -> Tensor:
    """Return what to add to the logits of a rectangle, made once as long as its bounds live if it is small."""

    def make() -> Tensor:
        visible = rectangle.visible()
        return torch.zeros(visible.shape, dtype=dtype, device="cpu").masked_fill_(~visible, -torch.inf)

    keys = rectangle.keys.stop - rectangle.keys.start
    if rectangle.band is None or len(rectangle.band.low) * keys > MAX_KEPT_ELEMENTS:
        return make()
    return memo_of_band(rectangle.band, ("mask", keys, dtype), make, lambda mask: mask.nbytes)


def _width(q: Tensor, v: Tensor) -> int:
    return max(q.shape[-1], v.shape[-1])


def _convert(tensors: Sequence[Tensor], width: int) -> list[Tensor]:
    """Return the tensors with zero columns up to one width, with unit stride, and with rows that do not overlap.

    float16 is converted to float32: the operator's gradients of logits overflow in float16, and small ones are lost.
    The operator takes a few queries that each begin one number after the last for the columns of a matrix.
    """
    wider = [pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in tensors]
    wider = [x.float() if x.dtype == torch.float16 else x for x in wider]
    return [x if x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1] else x.contiguous() for x in wider]


def _recompute_doubtful(
    partial: Partial, q: Tensor, k: Tensor, v: Tensor, rectangle: Rectangle, scaling: Scaling
) -> Partial:
    """Return the partial with doubtful rows from the reference.

    An lse of 0 may be that of an empty row, and one that is not finite may come from a key that the row does not see.
    """
    if bool(partial.lse.all()) and math.isfinite(partial.lse.sum()):
        return partial
    doubtful = (partial.lse == 0) | ~partial.lse.isfinite()
    if not bool(doubtful.any()):  # the sum alone is not finite
        return partial
    out, lse = partial.out.clone(), partial.lse.clone()
    rows = doubtful.any(0).any(0).nonzero().flatten()
    exact = Reference().attend(q[:, :, rows], k, v, rectangle.select(rows), scaling)
    out.index_copy_(2, rows, exact.out.to(out.dtype))
    lse.index_copy_(2, rows, exact.lse)
    return Partial(out, lse)
