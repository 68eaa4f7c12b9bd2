"""Attention on one device, as a PyTorch operator.

It is differentiable, it can be traced by `torch.compile`, and it is the same on every kernel. The operator turns mask
and positions into a band inside, where their values may be read without a graph break.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnmesh.core.band import Band
from attnmesh.core.mask import FAR, Mask
from attnmesh.core.partial import Partial, sum_dtype, with_sinks
from attnmesh.core.scaling import Scaling
from attnmesh.core.selection import Visible
from attnmesh.errors import LayoutError, MaskError
from attnmesh.kernels.choice import choose
from attnmesh.kernels.driver import VisibleKeys, attend_visible, backward_visible, visible_counts
from attnmesh.kernels.kernel import KernelRequest
from attnmesh.kernels.prepared_local import PreparedLocal, whole_band
from attnmesh.kernels.rectangles import BackwardInputs
from attnmesh.kernels.selected_keys import SelectedKeys
from attnmesh.kernels.traced import OnceDifferentiable, needs_grad, needs_operator, run_once_differentiable
from attnmesh.runtime.operators import autograd_function, custom_operator
from attnmesh.runtime.tensors import empty_length_major, length_major

VisibleTensors = tuple[Tensor | None, ...]
"""The tensors of `Visible`."""

MaskAndBlock = tuple[Mask, int]
"""The mask of `Visible` and the keys per index of its selection; an operator carries them as numbers."""


def attend_locally(
    q: Tensor, k: Tensor, v: Tensor, visible: Visible, scaling: Scaling, kernel: str, sinks: Tensor | None = None
) -> Partial:
    """Return attention on one device. Arguments have been checked.

    It runs as an operator where PyTorch traces or transforms calls, by autograd where a tensor needs gradients, and
    otherwise plainly.
    """
    tensors = q, k, v, sinks, visible.tensors
    mask, block = visible.mask_and_block
    if needs_operator(q, k, v, sinks):
        return Partial(*attend_op(*tensors, [block, *mask.to_code()], scaling, kernel))
    attend = _attend_with_grad if needs_grad(q, k, v, sinks) else _attend_visible
    return Partial(*attend(*tensors, (mask, block), scaling, kernel))


def _attend_visible(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    visible_tensors: VisibleTensors,
    mask_and_block: MaskAndBlock,
    scaling: Scaling,
    kernel: str,
) -> Partial:
    """Return the partial. Tokens whose positions do not ascend are sorted before, and put back in order after."""
    if all(x is None for x in visible_tensors):
        return PreparedLocal.of(q, k, v, mask_and_block[0], scaling, kernel).attend(q, k, v, sinks)
    visible = Visible.of(visible_tensors, mask_and_block)
    visible_keys, counts, q_order, k_order = _visible_keys(q, k, visible)
    positions = visible.q_positions, visible.k_positions
    chosen = choose(KernelRequest.of(q, k, v, scaling, positions), kernel)
    qkv = _sort(q, q_order), _sort(k, k_order), _sort(v, k_order)
    out, lse = with_sinks(attend_visible(chosen, *qkv, visible_keys, scaling, counts), sinks)
    return Partial(length_major(_unsort(out, q_order), q.dtype), _unsort(lse, q_order).contiguous())


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    outputs: Sequence[Tensor],
    visible_tensors: VisibleTensors,
    mask_and_block: MaskAndBlock,
    scaling: Scaling,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv), given out and lse over all keys, and the gradient of out."""
    visible = Visible.of(visible_tensors, mask_and_block)
    visible_keys, counts, q_order, k_order = _visible_keys(q, k, visible)
    inputs = BackwardInputs(*(_sort(x, q_order) for x in outputs))
    qkv = _sort(q, q_order), _sort(k, k_order), _sort(v, k_order)
    positions = visible.q_positions, visible.k_positions
    chosen = choose(KernelRequest.of(q, k, v, scaling, positions), kernel)
    gradients = backward_visible(chosen, *qkv, inputs, visible_keys, scaling, counts)
    orders = (q_order, k_order, k_order)
    dq, dk, dv = (length_major(_unsort(dx, order), q.dtype) for dx, order in zip(gradients, orders, strict=True))
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, visible_tensors, ctx.mask_or_code, ctx.scaling, ctx.kernel = inputs
    ctx.save_for_backward(*tensors, *visible_tensors, *output)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, *visible_tensors, out, lse = ctx.saved_tensors
    options = tuple(visible_tensors), ctx.mask_or_code, ctx.scaling, ctx.kernel
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv = _run_backward(q, k, v, [out, lse, dout], *options)
    if dlse is not None:
        more_dq, more_dk = _lse_gradients(q, k, lse, dlse, *options)
        dq, dk = dq + more_dq, dk + more_dk
    dsinks = None
    if sinks is not None:
        inputs = sinks, out, lse, dout, dlse
        dsinks = (
            run_once_differentiable(sink_gradient, *inputs)
            if _is_untraced(ctx.mask_or_code)
            else sink_gradient(*inputs)
        )
    return dq, dk, dv, dsinks


_attend_with_grad = autograd_function(_attend_visible, _save, _gradients)


def _fake_outputs(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_length_major(q, v.shape[-1]), q.new_empty(q.shape[:-1], dtype=sum_dtype(q.dtype))


def _fake_gradients(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(empty_length_major(x, x.shape[-1]) for x in (q, k, v))


@custom_operator("attend", _fake_outputs, _save, _gradients)
def attend_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    visible_tensors: Sequence[Tensor | None],
    mask_code: Sequence[int],
    scaling: Sequence[float],
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse)."""
    return _attend_visible(q, k, v, sinks, tuple(visible_tensors), _decoded(mask_code), Scaling(*scaling), kernel)


@custom_operator("attend_backward", _fake_gradients, backward=OnceDifferentiable.backward)
def attend_backward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    outputs: Sequence[Tensor],
    visible_tensors: Sequence[Tensor | None],
    mask_code: Sequence[int],
    scaling: Sequence[float],
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv), given out and lse over all keys, and the gradient of out."""
    return _backward(q, k, v, outputs, tuple(visible_tensors), _decoded(mask_code), Scaling(*scaling), kernel)


def _decoded(mask_code: Sequence[int]) -> MaskAndBlock:
    return Mask.from_code(mask_code[1:]), mask_code[0]


def _is_untraced(mask_or_code: MaskAndBlock | Sequence[int]) -> bool:
    """Return whether PyTorch does not trace a call: one in a graph has the numbers of its mask."""
    return isinstance(mask_or_code[0], Mask)


def _run_backward(q: Tensor, k: Tensor, v: Tensor, outputs: list[Tensor], *options: Any) -> tuple[Tensor, ...]:
    """Return (dq, dk, dv), by an operator where the forward pass was one.

    A function of autograd does not look into lists, and would take what depends on one of the outputs for a constant.
    """

    def run(q: Tensor, k: Tensor, v: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        return _backward(q, k, v, outputs, *options)

    is_operator = not _is_untraced(options[1])
    gradients: tuple[Tensor, ...] = (
        attend_backward_op(q, k, v, outputs, *options)
        if is_operator
        else run_once_differentiable(run, q, k, v, *outputs)
    )
    return gradients


def _lse_gradients(q: Tensor, k: Tensor, lse: Tensor, dlse: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """Return the gradients of lse: those of attention to values of 1, if its output is taken to be 0."""
    dlse = dlse.masked_fill(lse == -torch.inf, 0.0)
    size = dlse.abs().amax().clamp(min=torch.finfo(dlse.dtype).tiny) if dlse.numel() else 1.0
    dout = (dlse / size).to(q.dtype).unsqueeze(-1)  # divided by size: a loss scale overflows half precision
    outputs = [torch.zeros_like(dout), lse, dout]
    dq, dk, _ = _run_backward(q, k, torch.ones_like(k[..., :1]), outputs, *options)
    return (dq.to(dlse.dtype) * size).to(q.dtype), (dk.to(dlse.dtype) * size).to(k.dtype)


def sink_gradient(sinks: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None = None) -> Tensor:
    """Return the gradient of sinks. A sink has weight `e^(sink - lse)` and value 0."""
    dlogit = -(out.to(lse.dtype) * dout.to(lse.dtype)).sum(-1)
    dlogit = dlogit if dlse is None else dlogit + dlse
    # An empty row with a sink of -inf has lse -inf. Its weight must be 0, not e^(-inf + inf).
    weights = torch.exp(sinks.to(lse.dtype)[:, None] - lse.masked_fill(lse == -torch.inf, torch.inf))
    return (weights * dlogit).sum((0, 2)).to(sinks.dtype)


def _visible_keys(
    q: Tensor, k: Tensor, visible: Visible
) -> tuple[VisibleKeys, list[int] | None, Tensor | None, Tensor | None]:
    """Return the band over sorted tokens, the first keys per sequence, and the orders that sort queries and keys.

    Selected keys come instead of the band. They need no order of the queries.
    """
    mask, key_lengths, selected = visible.mask, visible.key_lengths, visible.selected
    queries, q_order = _sort_positions("attend q_positions", visible.q_positions, mask)
    keys, k_order = _sort_positions("attend k_positions", visible.k_positions, mask)
    if selected is not None:
        if keys is not None and bool((keys.diff() == 0).any()):
            fix = "pass each key once, or selections without k_positions"
            raise LayoutError("attend k_positions", "each position once, for selected keys", "one twice", fix)
        q_positions = torch.arange(q.shape[2], device=q.device) if visible.q_positions is None else visible.q_positions
        return SelectedKeys.of(selected, mask, q_positions, keys, key_lengths), None, None, k_order
    positions = torch.arange(k.shape[2], device="cpu") if keys is None and key_lengths is not None else keys
    counts = None if positions is None else visible_counts(positions, key_lengths)
    if queries is None and keys is None:
        return whole_band(mask, q.shape[2], k.shape[2]), counts, q_order, k_order
    queries = torch.arange(q.shape[2], device="cpu") if queries is None else queries
    return Band.of(mask, queries, k.shape[2] if keys is None else keys), counts, q_order, k_order


def _sort_positions(name: str, positions: Tensor | None, mask: Mask) -> tuple[Tensor | None, Tensor | None]:
    """Return the positions in ascending order, and that order; None if they are ascending already."""
    if positions is None or not len(positions):
        return None, None
    positions = positions.cpu()
    low, high = int(positions.min()), int(positions.max())
    if low < 0 or high >= FAR:
        raise LayoutError(name, f"positions from 0 to {FAR}", str(low if low < 0 else high), "count tokens from 0")
    order = None if bool((positions.diff() >= 0).all()) else positions.argsort(stable=True)
    positions = positions if order is None else positions[order]
    if mask.depends_on_length and positions[-1] >= sum(mask.documents):
        given = f"position {int(positions[-1])} and {sum(mask.documents)} tokens in the documents"
        raise MaskError(name, "positions inside the documents", given, "let Documents(lengths) cover every token")
    return positions, order


def _sort(x: Tensor, order: Tensor | None) -> Tensor:
    """Return the tokens of x in the given order."""
    return x if order is None else x.index_select(2, order.to(x.device))


def _unsort(x: Tensor, order: Tensor | None) -> Tensor:
    """Return the tokens of x in their order before `_sort`."""
    return x if order is None else torch.empty_like(x).index_copy_(2, order.to(x.device), x)
