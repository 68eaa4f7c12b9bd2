"""PyTorch's flash attention for CPUs, which returns lse and whose backward takes a global one.

Its traps are closed here: it needs k and v equally wide, it gives lse 0 to a row that saw nothing and, in half
precision, out 0 to an infinite logit, and with grouped heads it reads the keys again for every query head. That it
dies on empty inputs, and gives NaN for a negative scale, `walk` sees to for every kernel.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnmesh.kernel.blocks import Band, Block, cut
from attnmesh.kernel.reference import Reference
from attnmesh.kernel.walk import Answer, Gradients
from attnmesh.partial import Partial

FEW_ROWS = 32
"""Up to so many queries, reading the keys is the cost, and the heads that share a key are packed to read it once."""


@dataclass(frozen=True)
class FlashCPU:
    """`aten::_scaled_dot_product_flash_attention_for_cpu`."""

    name: str = "cpu"

    def refuses(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        """It serves every dtype of ours on the CPU."""
        if q.device.type != "cpu":
            return f"it runs on the CPU, the tensors are on {q.device.type}"
        if not hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"):
            return "this PyTorch has no flash attention for CPUs"
        return None

    def cut(self, band: Band) -> list[Block]:
        """The fewest blocks: it has a causal form of its own."""
        return cut(band)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> Partial:
        """The block's partial."""
        packed = _packs(q, k)
        rows = _pack(q, k) if packed else q
        arguments = _arguments(rows, k, block, packed)
        width = max(q.shape[-1], v.shape[-1])
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(_widened(x, width) for x in (rows, k, v)), **arguments, scale=scale
        )
        shape = q.shape[:-1]
        partial = Partial(out[..., : v.shape[-1]].reshape(*shape, -1), lse.reshape(shape))
        return _settle_doubts(partial, q, k, v, block, scale)

    def differentiate(self, q: Tensor, k: Tensor, v: Tensor, answer: Answer, block: Block, scale: float) -> Gradients:
        """The block's share of the gradients."""
        arguments = _arguments(q, k, block, packed=False)
        width = max(q.shape[-1], v.shape[-1])
        dout, *qkv, out = (_widened(x, width) for x in (answer.dout, q, k, v, answer.out))
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, *qkv, out, answer.lse, **arguments, scale=scale
        )
        return Gradients(dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]])


def _packs(q: Tensor, k: Tensor) -> bool:
    return q.shape[1] > k.shape[1] and q.shape[2] <= FEW_ROWS


def _pack(q: Tensor, k: Tensor) -> Tensor:
    """(batch, kv_heads, group * length, dim): the query heads of a group as further rows of one head."""
    packed: Tensor = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)
    return packed


def _arguments(rows: Tensor, k: Tensor, block: Block, packed: bool) -> dict[str, object]:
    """The block's shape in the operator's words: causal, an additive mask, or neither."""
    causal = block.causal and not packed
    mask = None
    if (block.causal and packed) or block.band is not None:
        visible = block.visible()
        mask = torch.zeros(visible.shape, dtype=rows.dtype).masked_fill_(~visible, -torch.inf)
        mask = mask.repeat(rows.shape[2] // mask.shape[0], 1)
    return {"dropout_p": 0.0, "is_causal": causal, "attn_mask": mask}


def _widened(x: Tensor, width: int) -> Tensor:
    """Zero columns up to the width: they add nothing to a product. The operator also wants unit stride."""
    x = pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x
    return x if x.stride(-1) == 1 else x.contiguous()


def _settle_doubts(partial: Partial, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> Partial:
    """Ask the reference where lse is 0, which may mean that nothing was seen, or infinite, where out may be wrong."""
    doubt = (partial.lse == 0) | partial.lse.isinf()
    if not bool(doubt.any()):
        return partial
    rows = doubt.any(0).any(0).nonzero().flatten()
    settled = Reference().attend(q[:, :, rows], k, v, block.only(rows), scale)
    partial.out.index_copy_(2, rows, settled.out)
    partial.lse.index_copy_(2, rows, settled.lse)
    return partial
