"""PyTorch's flash attention for CPUs, which returns lse and whose backward takes a global one.

Its traps are closed here: it needs k and v equally wide, it gives lse 0 to a row that saw nothing and, in half
precision, out 0 to an infinite logit, and with grouped heads it reads the keys again for every query head. That it
dies on empty inputs, and gives NaN for a negative scale, `walk` sees to for every kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnmesh.core.mask import Band
from attnmesh.core.partial import Partial
from attnmesh.kernels.blocks import TILE, Block, cut
from attnmesh.kernels.driver import Gradients, SavedForward
from attnmesh.kernels.reference import Reference

FEW_ROWS = 32
"""Up to so many queries, reading the keys is the cost, and the heads that share a key are packed to read it once."""


CACHE_BYTES = 1 << 21
"""Of keys in float32: what a core's own cache holds."""


@dataclass(frozen=True)
class FlashCPU:
    """`aten::_scaled_dot_product_flash_attention_for_cpu`."""

    name: str = "cpu"

    def unsupported_reason(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        """It serves every dtype of ours on the CPU."""
        if q.device.type != "cpu":
            return f"it runs on the CPU, the tensors are on {q.device.type}"
        if not hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"):
            return "this PyTorch has no flash attention for CPUs"
        return None

    def cut(self, band: Band, q: Tensor, k: Tensor, v: Tensor) -> list[Block]:
        """The fewest blocks: it has a causal form of its own."""
        return cut(band)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> Partial:
        """The block's partial."""
        if _goes_by_tiles(q, k, v, block):
            return _settled(_by_tiles(q, k, v, scale), q, k, v, block, scale)
        packed = _packs(q, k)
        rows, keys, values = _fitted((_pack(q, k) if packed else q, k, v), _width(q, v))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            rows, keys, values, **_arguments(rows, block, packed), scale=scale
        )
        shape = q.shape[:-1]
        partial = Partial(out[..., : v.shape[-1]].reshape(*shape, -1), lse.reshape(shape))
        return _settled(partial, q, k, v, block, scale)

    def backward(self, q: Tensor, k: Tensor, v: Tensor, answer: SavedForward, block: Block, scale: float) -> Gradients:
        """The block's share of the gradients."""
        dout, *qkv, out = _fitted((answer.dout, q, k, v, answer.out), _width(q, v))
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, *qkv, out, answer.lse, **_arguments(qkv[0], block, packed=False), scale=scale
        )
        return Gradients(dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]])


def _goes_by_tiles(q: Tensor, k: Tensor, v: Tensor, block: Block) -> bool:
    """For few rows: where the operator would have to be given a copy of all keys, or is slow, as at one row a head."""
    if block.causal or block.band is not None or q.shape[2] > FEW_ROWS or q.dtype == torch.float64:
        return False
    copied = q.dtype == torch.float16 or q.shape[3] != v.shape[3]
    return copied or (q.dtype == torch.bfloat16 and q.shape[1] * q.shape[2] == k.shape[1])


def _by_tiles(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Partial:
    """For few rows, tiles of keys as large as the cache: widened there, and multiplied in float32."""
    rows = q.float().reshape(q.shape[0], k.shape[1], -1, q.shape[3]) * scale
    size = max(TILE, CACHE_BYTES // (4 * k.shape[1] * _width(q, v)))
    tile = torch.empty(*k.shape[:2], min(size, k.shape[2]), _width(q, v))  # one for all: fresh memory costs more

    def widened(x: Tensor) -> Tensor:
        return tile[:, :, : x.shape[2], : x.shape[3]].copy_(x)

    logits = torch.empty(*rows.shape[:3], k.shape[2])
    for part, keys in zip(logits.split(size, -1), k.split(size, 2), strict=True):
        part.copy_(rows @ widened(keys).mT)
    out = torch.zeros(*rows.shape[:3], v.shape[3])
    for part, values in zip(torch.softmax(logits, -1).split(size, -1), v.split(size, 2), strict=True):
        out += part @ widened(values)
    return Partial(out.to(q.dtype).reshape(*q.shape[:3], -1), torch.logsumexp(logits, -1).reshape(q.shape[:3]))


def _packs(q: Tensor, k: Tensor) -> bool:
    return q.shape[1] > k.shape[1] and q.shape[2] <= FEW_ROWS


def _pack(q: Tensor, k: Tensor) -> Tensor:
    """(batch, kv_heads, group * length, dim): the query heads of a group as further rows of one head."""
    packed: Tensor = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)
    return packed


def _arguments(rows: Tensor, block: Block, packed: bool) -> dict[str, object]:
    """The block's shape in the operator's words: causal, an additive mask, or neither."""
    causal = block.causal and not packed
    mask = None
    if (block.causal and packed) or block.band is not None:
        visible = block.visible()
        mask = torch.zeros(visible.shape, dtype=rows.dtype).masked_fill_(~visible, -torch.inf)
        mask = mask.repeat(rows.shape[2] // mask.shape[0], 1)
    return {"dropout_p": 0.0, "is_causal": causal, "attn_mask": mask}


def _width(q: Tensor, v: Tensor) -> int:
    return max(q.shape[-1], v.shape[-1])


def _fitted(tensors: Sequence[Tensor], width: int) -> list[Tensor]:
    """As the operator wants them: of one width, by zero columns, which add nothing to a product, and of unit stride.

    In float16 its logits' gradients overflow and its small ones are lost, so those go through float32.
    """
    wider = [pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in tensors]
    wider = [x.float() if x.dtype == torch.float16 else x for x in wider]
    return [x if x.stride(-1) == 1 else x.contiguous() for x in wider]


def _settled(partial: Partial, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> Partial:
    """Ask the reference where lse is 0, which may mean that nothing was seen, or infinite, where out may be wrong."""
    doubt = (partial.lse == 0) | partial.lse.isinf()
    if not bool(doubt.any()):
        return partial
    out, lse = partial.out.clone(), partial.lse.clone()
    for rows in doubt.any(0).any(0).nonzero().flatten().split(TILE):
        settled = Reference().attend(q[:, :, rows], k, v, block.only(rows), scale)
        out.index_copy_(2, rows, settled.out.to(out.dtype))
        lse.index_copy_(2, rows, settled.lse)
    return Partial(out, lse)
