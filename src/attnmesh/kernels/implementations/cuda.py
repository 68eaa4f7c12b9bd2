"""The CUDA kernel: PyTorch's attention operators for plain rectangles, and Triton programs for masked ones.

PyTorch reports which operator supports the tensors; version numbers are not compared. A less tested operator (cuDNN) is
compared with the reference on the device before its first use. FlashAttention 3 or 4 replaces PyTorch's flash attention
if `torch.nn.attention.activate_flash_attention_impl` was called.
"""

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
)
from torch.nn.functional import pad

from attnmesh.core.band import Band
from attnmesh.core.partial import Partial
from attnmesh.core.scaling import Scaling
from attnmesh.kernels.implementations.reference import Reference
from attnmesh.kernels.implementations.triton import TRITON, Triton
from attnmesh.kernels.kernel import Kernel, KernelRequest
from attnmesh.kernels.rectangles import BackwardInputs, Gradients, Rectangle, cut

WIDTH_MULTIPLE = 8
"""Columns that widths and biases are padded to multiples of, as the operators need."""

MIN_CUDNN_TOKENS = 64
"""Queries or keys that are too few for cuDNN's backward pass."""

MAX_CALLS = 16
"""Plain rectangles that are worth one operator call each. More are one launch of a Triton program."""


class Flash:
    """`aten::_scaled_dot_product_flash_attention`: half precision, full and causal rectangles, grouped heads."""

    @property
    def name(self) -> str:
        """The operator's name, or that of its replacement."""
        return f"PyTorch's {flash_override() or 'flash'}"

    def takes(self, q: Tensor, k: Tensor, v: Tensor, rectangle: Rectangle) -> bool:
        """Return True for a plain rectangle that PyTorch reports as supported."""
        grouped = q.shape[1] != k.shape[1]
        return bool(can_use_flash_attention(SDPAParams(q, k, v, None, 0.0, rectangle.causal, grouped)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rectangle: Rectangle, scaling: Scaling) -> Partial:
        """Return the rectangle's partial. For rows of -inf logits the operator returns out 0 and lse +inf."""
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse = flash(q, k, v, 0.0, rectangle.causal, False, scale=scaling.scale)[:2]
        return Partial(out, lse.masked_fill(lse.isposinf() & (out == 0).all(-1), -torch.inf))

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, inputs: BackwardInputs, rectangle: Rectangle, scaling: Scaling
    ) -> Gradients:
        """Return the rectangle's gradients. The random state is unused without dropout."""
        unused = torch.zeros(2, dtype=torch.uint64, device=q.device)
        options = (None, None, q.shape[2], k.shape[2], 0.0, rectangle.causal, unused, unused)
        flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
        lse = inputs.lse.contiguous()
        return Gradients(*flash_backward(inputs.dout, q, k, v, inputs.out, lse, *options, scale=scaling.scale))


class Cudnn(Flash):
    """`aten::_scaled_dot_product_cudnn_attention`: PyTorch's fastest on Hopper and later.

    Its backward operator accepts the out and lse of all ranks. So does the one of flash attention, which serves the
    rectangles that cuDNN's does not.
    """

    name = "PyTorch's cudnn"

    def takes(self, q: Tensor, k: Tensor, v: Tensor, rectangle: Rectangle) -> bool:
        """Return True if PyTorch supports it and, once per device, its result is correct."""
        if not q.is_cuda or not super().takes(q, k, v, rectangle):
            return False
        if torch.cuda.get_device_capability(q.device) < (9, 0) or flash_override() is not None:
            return False
        grouped = q.shape[1] != k.shape[1]
        if not can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, rectangle.causal, grouped)):
            return False
        return _is_correct(self, q.device, q.dtype, q.shape[-1], grouped, rectangle.causal)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rectangle: Rectangle, scaling: Scaling) -> Partial:
        """Return the rectangle's partial."""
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        out, lse = cudnn(q, k, v, None, True, 0.0, rectangle.causal, False, scale=scaling.scale)[:2]
        return Partial(out, lse.reshape(q.shape[:-1]))

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, inputs: BackwardInputs, rectangle: Rectangle, scaling: Scaling
    ) -> Gradients:
        """Return the rectangle's gradients, if it is not small, sums may be in any order, and they are correct here."""
        grouped, large = q.shape[1] != k.shape[1], min(q.shape[2], k.shape[2]) >= MIN_CUDNN_TOKENS
        where = q.device, q.dtype, q.shape[-1], grouped, rectangle.causal
        serves = large and not torch.are_deterministic_algorithms_enabled()
        backward = self.gradients if serves and _is_correct(self, *where, gradients=True) else super().backward
        return backward(q, k, v, inputs, rectangle, scaling)

    def gradients(
        self, q: Tensor, k: Tensor, v: Tensor, inputs: BackwardInputs, rectangle: Rectangle, scaling: Scaling
    ) -> Gradients:
        """Return the rectangle's gradients by cuDNN. The random state is unused without dropout."""
        unused = torch.zeros((), dtype=torch.int64, device=q.device)
        options = (unused, unused, None, None, None, q.shape[2], k.shape[2], 0.0, rectangle.causal)
        cudnn_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
        lse = inputs.lse.contiguous().unsqueeze(-1)
        return Gradients(*cudnn_backward(inputs.dout, q, k, v, inputs.out, lse, *options, scale=scaling.scale))


class Efficient:
    """`aten::_scaled_dot_product_efficient_attention`: every kind of rectangle, also in float32; no grouped heads."""

    name, rows = "PyTorch's efficient", 32  # lse is padded to whole warps of rows

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rectangle: Rectangle, scaling: Scaling) -> Partial:
        """Return the rectangle's partial."""
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        k, v = (_repeat_heads(x, q) for x in (k, v))
        out, lse, *_ = efficient(q, k, v, _bias(q, rectangle), True, 0.0, rectangle.causal, scale=scaling.scale)
        return Partial(out, lse[..., : q.shape[2]])

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, inputs: BackwardInputs, rectangle: Rectangle, scaling: Scaling
    ) -> Gradients:
        """Return the rectangle's gradients. The random state is unused without dropout."""
        unused = torch.zeros((), dtype=torch.int64, device=q.device)
        lse = pad(inputs.lse, (0, -q.shape[2] % self.rows), value=torch.inf)
        efficient_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward
        operands = (q, _repeat_heads(k, q), _repeat_heads(v, q), _bias(q, rectangle))
        options = (unused, unused, 0.0, [True, True, True, False], rectangle.causal)
        dq, dk, dv, _ = efficient_backward(inputs.dout, *operands, inputs.out, lse, *options, scale=scaling.scale)
        return Gradients(dq, *(x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv)))


CUDNN = Cudnn()
FLASH = Flash()
EFFICIENT = Efficient()

Operator = Flash | Triton | Efficient
"""An attention operator, for q, k, v of one width, (batch, heads, length, dim)."""


class CUDA(Kernel):
    """The best operator for a rectangle; one launch of a Triton program for masked or many rectangles."""

    name = device_type = "cuda"
    made_for, priority, caps_logits = "all but caches", 1, False

    def unsupported_reason(self, request: KernelRequest) -> str | None:
        """Return None for tensors of a dtype and width that the efficient operator supports."""
        few = torch.zeros(
            1,
            1,
            WIDTH_MULTIPLE,
            request.width + -request.width % WIDTH_MULTIPLE,
            dtype=request.dtype,
            device=request.device,
        )
        if not can_use_efficient_attention(SDPAParams(few, few, few, None, 0.0, False, False)):
            return f"PyTorch's operators do not take {request.dtype} of width {request.width} on this device"
        return None

    def is_made_for(self, request: KernelRequest) -> bool:
        """Return False for caches, which it does not read in place."""
        return not request.cached

    def cut(self, band: Band, q: Tensor, k: Tensor, v: Tensor) -> list[Rectangle]:
        """Return few plain rectangles, or for the Triton kernel one."""
        rectangles = cut(band)
        plain = len(rectangles) <= MAX_CALLS and all(rectangle.band is None for rectangle in rectangles)
        return rectangles if plain or not _takes_masks(q, k, v) else TRITON.cut(band, q, k, v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rectangle: Rectangle, scaling: Scaling) -> Partial:
        """Return the rectangle's partial."""
        rows, keys, values = _pad((q, k, v), _width(q, v))
        out, lse = operator_of(rows, keys, values, rectangle).attend(rows, keys, values, rectangle, scaling)
        return Partial(out[..., : v.shape[-1]], lse)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, inputs: BackwardInputs, rectangle: Rectangle, scaling: Scaling
    ) -> Gradients:
        """Return the rectangle's share of the gradients."""
        rows, keys, values, out, dout = _pad((q, k, v, inputs.out, inputs.dout), _width(q, v))
        operator = operator_of(rows, keys, values, rectangle)
        gradients = operator.backward(rows, keys, values, BackwardInputs(out, inputs.lse, dout), rectangle, scaling)
        return Gradients(*(dx[..., : x.shape[-1]] for dx, x in zip(gradients, (q, k, v), strict=True)))

    def operator_name(self, q: Tensor, k: Tensor, v: Tensor, rectangle: Rectangle) -> str:
        """Return the name of the operator that computes the rectangle, such as "PyTorch's flash"."""
        rows, keys, values = _pad((q, k, v), _width(q, v))
        return operator_of(rows, keys, values, rectangle).name


KERNEL = CUDA()


def operator_of(q: Tensor, k: Tensor, v: Tensor, rectangle: Rectangle) -> Operator:
    """Return the best operator for the rectangle of these tensors: without a dense mask, if one supports it."""
    if rectangle.band is not None:
        return TRITON if _takes_masks(q, k, v) else EFFICIENT
    return next((operator for operator in (CUDNN, FLASH) if operator.takes(q, k, v, rectangle)), EFFICIENT)


def _takes_masks(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether the Triton kernel serves masked rectangles of q, k and v."""
    return TRITON.refusal(KernelRequest.of(q, k, v, Scaling(1.0))) is None


def flash_override() -> str | None:
    """Return the name of an activated replacement of flash attention, "FA3" or "FA4"; None before PyTorch 2.11."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return None if current is None else current()


@cache
def _is_correct(
    operator: Any,
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    grouped: bool,
    causal: bool,
    gradients: bool = False,
) -> bool:
    """Return True if an operator, or its gradients, agree with the reference on this device; warn once if not."""
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, dout = (
        torch.randn(2, heads, 96, width, device=device, generator=generator, dtype=torch.float32).to(dtype)
        for heads in (4, 2 if grouped else 4, 2 if grouped else 4, 4)
    )
    rectangle = Rectangle(slice(0, 96), slice(0, 96), causal=causal)
    scaling = Scaling(0.125)
    exact = Reference().attend(q.float(), k.float(), v.float(), rectangle, scaling)
    try:
        if gradients:  # the row has seen other keys before: its out and lse are of all keys
            inputs = BackwardInputs(exact.out / 2, exact.lse + 0.7, dout.float())
            expected: Sequence[Tensor] = Reference().backward(
                q.float(), k.float(), v.float(), inputs, rectangle, scaling
            )
            inputs = BackwardInputs(inputs.out.to(dtype), inputs.lse, dout)
            computed: Sequence[Tensor] = operator.gradients(q, k, v, inputs, rectangle, scaling)
        else:
            expected = exact
            computed = operator.attend(q, k, v, rectangle, scaling)
        errors = [
            float((x.float() - truth).abs().amax() / truth.abs().amax())
            for x, truth in zip(computed, expected, strict=True)
        ]
        right = all(error < 4 * torch.finfo(dtype).eps for error in errors)  # a NaN is not
        reason = None if right else f"off by {errors}"
    except torch.OutOfMemoryError:
        raise  # the result is not cached: a later call asks again
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
    if reason is not None:
        name = f"{type(operator).__name__.lower()} operator{' for gradients' * gradients}"
        warnings.warn(f"attnmesh does not use PyTorch's {name} for {dtype}: {reason}", stacklevel=2)
    return reason is None


def _width(q: Tensor, v: Tensor) -> int:
    width = max(q.shape[-1], v.shape[-1])
    return width + -width % WIDTH_MULTIPLE


def _pad(tensors: Sequence[Tensor], width: int) -> tuple[Tensor, ...]:
    """Return the tensors with zero columns up to one width, contiguous and aligned to 16 bytes."""
    wider = [pad(x, (0, width - x.shape[-1])).contiguous() for x in tensors]
    return tuple(x.clone() if x.data_ptr() % 16 else x for x in wider)


def _repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _bias(q: Tensor, rectangle: Rectangle) -> Any:
    """Return the rectangle's additive mask, with rows of aligned length, or None for a plain rectangle."""
    if rectangle.band is None:
        return None
    visible = rectangle.visible()
    keys = visible.shape[1]
    bias = torch.zeros(visible.shape[0], keys + -keys % WIDTH_MULTIPLE, dtype=q.dtype, device=q.device)
    bias[:, :keys].masked_fill_(~visible.to(q.device), -torch.inf)
    return bias[:, :keys].expand(*q.shape[:2], -1, -1)
