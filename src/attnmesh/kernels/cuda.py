"""PyTorch's attention operators for CUDA for plain blocks, and Triton's programs for masked ones.

Which operator takes a block is asked of PyTorch for the very tensors at hand, never told from a version number, and one
that is seldom met is first held against the reference on the device. A package of FlashAttention 3 or 4 serves where
`torch.nn.attention.activate_flash_attention_impl` has put it in the place of PyTorch's flash.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
)
from torch.nn.functional import pad

from attnmesh.core.mask import Band
from attnmesh.core.partial import Partial
from attnmesh.kernels.blocks import Block, cut
from attnmesh.kernels.driver import Gradients, SavedForward
from attnmesh.kernels.reference import Reference
from attnmesh.kernels.triton import Triton

ALIGNED = 8
"""Widths and biases are padded to multiples of this, as the operators want them."""

FEW = 16
"""Plain blocks up to which a call for each is worth it; beyond, one launch does them all."""


class Operator(Protocol):
    """One of PyTorch's operators: q, k, v of one width and (batch, heads, length, dim)."""

    def takes(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> bool:
        """Whether it can do this block of these tensors on this device."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> Partial:
        """The block's partial."""
        ...

    def backward(self, q: Tensor, k: Tensor, v: Tensor, answer: SavedForward, block: Block, scale: float) -> Gradients:
        """The block's gradients."""
        ...


class Cudnn:
    """`aten::_scaled_dot_product_cudnn_attention`: on Hopper and later the fastest that PyTorch has, forward.

    Its backward operator cannot be called from Python; flash does with any operator's out and lse.
    """

    def takes(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> bool:
        """Ask PyTorch, and once the device itself."""
        if block.band is not None or q.device.type != "cuda" or not Flash().takes(q, k, v, block):
            return False
        if torch.cuda.get_device_capability(q.device) < (9, 0) or other_flash() is not None:
            return False
        grouped = q.shape[1] != k.shape[1]
        if not can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, block.causal, grouped)):
            return False
        return _proved(self, q.device, q.dtype, q.shape[-1], grouped, block.causal)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> Partial:
        """The block's partial."""
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        out, lse = cudnn(q, k, v, None, True, 0.0, block.causal, False, scale=scale)[:2]
        return Partial(out, lse.reshape(q.shape[:-1]))

    def backward(self, q: Tensor, k: Tensor, v: Tensor, answer: SavedForward, block: Block, scale: float) -> Gradients:
        """The block's gradients, by flash."""
        return Flash().backward(q, k, v, answer, block, scale)


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

    def backward(self, q: Tensor, k: Tensor, v: Tensor, answer: SavedForward, block: Block, scale: float) -> Gradients:
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

    def backward(self, q: Tensor, k: Tensor, v: Tensor, answer: SavedForward, block: Block, scale: float) -> Gradients:
        """The block's gradients; without dropout the random state is never read."""
        unread = torch.zeros((), dtype=torch.int64, device=q.device)
        lse = pad(answer.lse, (0, -q.shape[2] % self.rows), value=torch.inf)
        efficient_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward
        spread = (q, _spread(k, q), _spread(v, q), _bias(q, block))
        rest = (answer.out, lse, unread, unread, 0.0, [True, True, True, False], block.causal)
        dq, dk, dv, _ = efficient_backward(answer.dout, *spread, *rest, scale=scale)
        return Gradients(dq, *(x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv)))


class ByTriton:
    """Our own programs: masked blocks of any size, without a mask in memory."""

    def takes(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> bool:
        """Where Triton serves."""
        return block.band is not None and Triton().unsupported_reason(q, k, v) is None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> Partial:
        """The block's partial."""
        return Triton().attend(q, k, v, block, scale)

    def backward(self, q: Tensor, k: Tensor, v: Tensor, answer: SavedForward, block: Block, scale: float) -> Gradients:
        """The block's gradients."""
        return Triton().backward(q, k, v, answer, block, scale)


OPERATORS: tuple[Operator, ...] = (Cudnn(), Flash(), ByTriton(), Efficient())


@dataclass(frozen=True)
class CUDA:
    """The first of PyTorch's operators that takes a plain block; Triton in one launch for masked or many blocks."""

    name: str = "cuda"

    def unsupported_reason(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        """It serves CUDA tensors that the efficient operator takes, since that one does every kind of block."""
        if q.device.type != "cuda":
            return f"it runs on CUDA, the tensors are on {q.device.type}"
        if not Efficient().serves(q, _width(q, v)):
            return f"PyTorch's operators do not take {q.dtype} of width {max(q.shape[-1], v.shape[-1])} on this device"
        return None

    def cut(self, band: Band, q: Tensor, k: Tensor, v: Tensor) -> list[Block]:
        """The fewest blocks: all operators have a causal form."""
        blocks = cut(band)
        plain = len(blocks) <= FEW and all(block.band is None for block in blocks)
        return blocks if plain or Triton().unsupported_reason(q, k, v) is not None else Triton().cut(band, q, k, v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> Partial:
        """The block's partial."""
        rows, keys, values = _widened((q, k, v), _width(q, v))
        out, lse = operator_of(rows, keys, values, block).forward(rows, keys, values, block, scale)
        return Partial(out[..., : v.shape[-1]], lse)

    def backward(self, q: Tensor, k: Tensor, v: Tensor, answer: SavedForward, block: Block, scale: float) -> Gradients:
        """The block's share of the gradients."""
        rows, keys, values, out, dout = _widened((q, k, v, answer.out, answer.dout), _width(q, v))
        operator = operator_of(rows, keys, values, block)
        gradients = operator.backward(rows, keys, values, SavedForward(out, answer.lse, dout), block, scale)
        return Gradients(*(dx[..., : x.shape[-1]] for dx, x in zip(gradients, (q, k, v), strict=True)))


def name_of(q: Tensor, k: Tensor, v: Tensor, block: Block) -> str:
    """What takes a block of such tensors, in a word."""
    rows, keys, values = _widened((q, k, v), _width(q, v))
    operator = operator_of(rows, keys, values, block)
    if isinstance(operator, ByTriton):
        return "triton"
    return f"PyTorch's {(isinstance(operator, Flash) and other_flash()) or type(operator).__name__.lower()}"


def operator_of(q: Tensor, k: Tensor, v: Tensor, block: Block) -> Operator:
    """The operator that takes a block of such tensors."""
    return next(operator for operator in OPERATORS if operator.takes(q, k, v, block))


def other_flash() -> str | None:
    """What was put in the place of PyTorch's own flash attention, "FA3" or "FA4"; PyTorch before 2.11 knows none."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return None if current is None else current()


@cache
def _proved(
    operator: Operator, device: torch.device, dtype: torch.dtype, width: int, grouped: bool, causal: bool
) -> bool:
    """Whether an operator agrees with the reference on this device; that it does not is said once."""
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, 96, width, device=device, generator=generator).to(dtype)
        for heads in (4, 2 if grouped else 4, 2 if grouped else 4)
    )
    block, name = Block(slice(0, 96), slice(0, 96), causal=causal), type(operator).__name__.lower()
    out, lse = Reference().attend(q.float(), k.float(), v.float(), block, 0.125)
    try:
        given = operator.forward(q, k, v, block, 0.125)
        off = (given.out.float() - out).abs().amax() / out.abs().amax(), (given.lse - lse).abs().amax()
        reason = None if float(off[0]) < 4 * torch.finfo(dtype).eps and float(off[1]) < 1e-3 else f"off by {off}"
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
    if reason is not None:
        warnings.warn(f"attnmesh does without PyTorch's {name} operator for {dtype}: {reason}", stacklevel=2)
    return reason is None


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
