"""PyTorch's attention operators for CUDA: flash for plain blocks, memory-efficient for masked ones and for float32.

Which of them takes a block is asked of PyTorch for the very tensors at hand, never told from a version number.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
from torch.nn.functional import pad

from attnmesh.kernel.blocks import Band, Block, cut
from attnmesh.kernel.walk import Answer, Gradients
from attnmesh.partial import Partial

ALIGNED = 8
"""Widths and biases are padded to multiples of this, as the operators want them."""


class Operator(Protocol):
    """One of PyTorch's operators: q, k, v of one width and (batch, heads, length, dim)."""

    def takes(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> bool:
        """Whether it can do this block of these tensors on this device."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> Partial:
        """The block's partial."""
        ...

    def backward(self, q: Tensor, k: Tensor, v: Tensor, answer: Answer, block: Block, scale: float) -> Gradients:
        """The block's gradients."""
        ...


class Flash:
    """`aten::_scaled_dot_product_flash_attention`: half precision, full and causal blocks, grouped heads."""

    def takes(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> bool:
        """Ask PyTorch."""
        grouped = q.shape[1] != k.shape[1]
        return block.band is None and can_use_flash_attention(SDPAParams(q, k, v, None, 0.0, block.causal, grouped))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> Partial:
        """The block's partial; where all logits are -inf the operator gives out 0 and lse +inf."""
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse = flash(q, k, v, 0.0, block.causal, False, scale=scale)[:2]
        return Partial(out, lse.masked_fill(lse.isposinf() & (out == 0).all(-1), -torch.inf))

    def backward(self, q: Tensor, k: Tensor, v: Tensor, answer: Answer, block: Block, scale: float) -> Gradients:
        """The block's gradients; without dropout the random state is never read."""
        unread = torch.zeros(2, dtype=torch.uint64, device=q.device)
        where = (None, None, q.shape[2], k.shape[2], 0.0, block.causal, unread, unread)
        flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
        lse = answer.lse.contiguous()
        return Gradients(*flash_backward(answer.dout, q, k, v, answer.out, lse, *where, scale=scale))


class Efficient:
    """`aten::_scaled_dot_product_efficient_attention`: also float32 and an additive mask; heads must be spread."""

    rows = 32  # lse comes and goes in whole warps of rows

    def takes(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> bool:
        """Every block of tensors that `serves` lets through."""
        return True

    def serves(self, q: Tensor, width: int) -> bool:
        """Ask PyTorch, of a few tokens like these."""
        few = q.new_zeros(1, 1, ALIGNED, width)
        return bool(can_use_efficient_attention(SDPAParams(few, few, few, None, 0.0, False, False)))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> Partial:
        """The block's partial."""
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        k, v = (_spread(x, q) for x in (k, v))
        out, lse, *_ = efficient(q, k, v, _bias(q, block), True, 0.0, block.causal, scale=scale)
        return Partial(out, lse[..., : q.shape[2]])

    def backward(self, q: Tensor, k: Tensor, v: Tensor, answer: Answer, block: Block, scale: float) -> Gradients:
        """The block's gradients; without dropout the random state is never read."""
        unread = torch.zeros((), dtype=torch.int64, device=q.device)
        lse = pad(answer.lse, (0, -q.shape[2] % self.rows), value=torch.inf)
        efficient_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward
        spread = (q, _spread(k, q), _spread(v, q), _bias(q, block))
        rest = (answer.out, lse, unread, unread, 0.0, [True, True, True, False], block.causal)
        dq, dk, dv, _ = efficient_backward(answer.dout, *spread, *rest, scale=scale)
        return Gradients(dq, *(x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv)))


OPERATORS: tuple[Operator, ...] = (Flash(), Efficient())


@dataclass(frozen=True)
class CUDA:
    """The first of PyTorch's operators that takes the block."""

    name: str = "cuda"

    def refuses(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        """It serves CUDA tensors that the efficient operator takes, since that one does every kind of block."""
        if q.device.type != "cuda":
            return f"it runs on CUDA, the tensors are on {q.device.type}"
        if not Efficient().serves(q, _width(q, v)):
            return f"PyTorch's operators do not take {q.dtype} of width {max(q.shape[-1], v.shape[-1])} on this device"
        return None

    def cut(self, band: Band) -> list[Block]:
        """The fewest blocks: both operators have a causal form."""
        return cut(band)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> Partial:
        """The block's partial."""
        rows, keys, values = _widened((q, k, v), _width(q, v))
        out, lse = _operator(rows, keys, values, block).forward(rows, keys, values, block, scale)
        return Partial(out[..., : v.shape[-1]], lse)

    def differentiate(self, q: Tensor, k: Tensor, v: Tensor, answer: Answer, block: Block, scale: float) -> Gradients:
        """The block's share of the gradients."""
        rows, keys, values, out, dout = _widened((q, k, v, answer.out, answer.dout), _width(q, v))
        operator = _operator(rows, keys, values, block)
        gradients = operator.backward(rows, keys, values, Answer(out, answer.lse, dout), block, scale)
        return Gradients(*(dx[..., : x.shape[-1]] for dx, x in zip(gradients, (q, k, v), strict=True)))


def _operator(q: Tensor, k: Tensor, v: Tensor, block: Block) -> Operator:
    return next(operator for operator in OPERATORS if operator.takes(q, k, v, block))


def _width(q: Tensor, v: Tensor) -> int:
    width = max(q.shape[-1], v.shape[-1])
    return width + -width % ALIGNED


def _widened(tensors: Sequence[Tensor], width: int) -> tuple[Tensor, ...]:
    """Zero columns up to one aligned width: they add nothing to a product."""
    wider = [pad(x, (0, width - x.shape[-1])).contiguous() for x in tensors]
    return tuple(x.clone() if x.data_ptr() % 16 else x for x in wider)  # they load 16 bytes at a time


def _spread(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _bias(q: Tensor, block: Block) -> Any:
    """The block's mask to be added, on rows of aligned length, or None where there is nothing to mask."""
    if block.band is None:
        return None
    visible = block.visible()
    keys = visible.shape[1]
    bias = torch.zeros(visible.shape[0], keys + -keys % ALIGNED, dtype=q.dtype, device=q.device)
    bias[:, :keys].masked_fill_(~visible.to(q.device), -torch.inf)
    return bias[:, :keys].expand(*q.shape[:2], -1, -1)
