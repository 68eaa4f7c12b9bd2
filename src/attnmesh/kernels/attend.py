"""`attend` as an operator of PyTorch: differentiable, traceable by `torch.compile`, the same on every kernel.

The mask and the positions are turned into a band inside the attend_op, where they may be read without breaking a graph.
"""

from collections.abc import Sequence
from typing import Any, Never

import torch
from torch import Tensor

from attnmesh.core.checks import (
    autocast,
    autocasts,
    check_no_more,
    check_qkv,
    check_scale,
    dims,
    hinted,
    warn_if_swapped,
)
from attnmesh.core.mask import FAR, Band, Full, Mask, check_mask
from attnmesh.core.partial import Partial, wide, with_sinks
from attnmesh.errors import DtypeError, KernelError, LayoutError, MaskError, ShapeError
from attnmesh.kernels.driver import SavedForward, backward, forward
from attnmesh.kernels.select import check_kernel, choose


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask = Full(),
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    scale: float | None = None,
    kernel: str = "auto",
    **more: Never,
) -> Partial:
    """Attention of q over k and v on one device: the normalised `out` and its `lse`, both differentiable.

    The mask, `Full()` unless given, is a function of positions. They are 0, 1, 2, ... unless given, for q and for k
    alike: the first query stands at the first key, also when there are fewer queries than keys. Tokens may come in any
    order.

    >>> import attnmesh as am
    >>> q, k, v = torch.randn(3, 1, 2, 8, 4).unbind()
    >>> last = am.attend(q[:, :, -1:], k, v, mask=am.Causal(), q_positions=torch.tensor([7]))
    >>> torch.allclose(last.out, am.attend(q, k, v, mask=am.Causal()).out[:, :, -1:], atol=1e-6)
    True
    """
    check_no_more("attend", more)
    if autocasts(q, k, v):
        options: dict[str, Any] = {"q_positions": q_positions, "k_positions": k_positions, "scale": scale}
        q, k, v = autocast(q, k, v)
        with torch.autocast(q.device.type, enabled=False):
            return attend(q, k, v, mask=mask, kernel=kernel, **options)
    try:
        _check(q, k, v, mask, q_positions, k_positions)
    except (MaskError, ShapeError) as error:
        raise hinted(error, dims(q), dims(k)) from None
    scale = check_scale("attend", scale, q)
    check_kernel(kernel)
    warn_if_swapped("attend", q, k.shape[2])
    return Partial(*attend_op(q, k, v, None, q_positions, k_positions, mask.encode(), scale, kernel))


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Mask, q_positions: Tensor | None, k_positions: Tensor | None) -> None:
    check_qkv("attend", q, k, v)
    in_order = [x.shape[2] for x, positions in ((q, q_positions), (k, k_positions)) if positions is None]
    check_mask("attend mask", mask, *in_order)
    _check_positions("attend q_positions", q_positions, q.shape[2])
    _check_positions("attend k_positions", k_positions, k.shape[2])


@torch.library.custom_op("attnmesh::attend", mutates_args=())
def attend_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    q_positions: Tensor | None,
    k_positions: Tensor | None,
    mask: Sequence[int],
    scale: float,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """Forward: (out, lse)."""
    band, q_order, k_order = _band(q, k, q_positions, k_positions, mask)
    partial = forward(choose(kernel, q, k, v), _take(q, q_order), _take(k, k_order), _take(v, k_order), band, scale)
    out, lse = with_sinks(partial, sinks)
    return placed(_give(out, q_order), q.dtype), _give(lse, q_order).contiguous()


@attend_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_placed(q, v.shape[-1]), q.new_empty(q.shape[:-1], dtype=wide(q.dtype))


@torch.library.custom_op("attnmesh::attend_backward", mutates_args=())
def attend_backward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    q_positions: Tensor | None,
    k_positions: Tensor | None,
    mask: Sequence[int],
    scale: float,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward, from the out and lse over all keys: (dq, dk, dv)."""
    band, q_order, k_order = _band(q, k, q_positions, k_positions, mask)
    answer = SavedForward(*(_take(x, q_order) for x in (out, lse, dout)))
    rows = _take(q, q_order), _take(k, k_order), _take(v, k_order)
    gradients = backward(choose(kernel, q, k, v), *rows, answer, band, scale)
    orders = (q_order, k_order, k_order)
    dq, dk, dv = (placed(_give(dx, order), q.dtype) for dx, order in zip(gradients, orders, strict=True))
    return dq, dk, dv


@attend_backward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (empty_placed(x, x.shape[-1]) for x in (q, k, v))
    return dq, dk, dv


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, q_positions, k_positions, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, sinks, q_positions, k_positions, *output)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, q_positions, k_positions, out, lse = ctx.saved_tensors
    where = (q_positions, k_positions, *ctx.options)
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv = attend_backward_op(q, k, v, out, lse, dout, *where)
    if dlse is not None:
        more_dq, more_dk = _lse_gradients(q, k, lse, dlse, where)
        dq, dk = dq + more_dq, dk + more_dk
    dsinks = None if sinks is None else sink_gradient(sinks, out, lse, dout, dlse)
    return dq, dk, dv, dsinks, None, None, None, None, None


def _lse_gradients(q: Tensor, k: Tensor, lse: Tensor, dlse: Tensor, where: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """The energy's gradient is attention again: `dlse/dq` is attention over k as values, and dk its transpose."""
    *_, scale, _ = where
    values, own_lse = attend_op(q, k, k, None, *where)
    dlse = dlse.masked_fill(lse == -torch.inf, 0.0)
    share = torch.exp(own_lse - lse.masked_fill(lse == -torch.inf, torch.inf))  # 1, or less beside a sink
    dq = (dlse * scale * share).unsqueeze(-1) * values
    size = dlse.abs().amax().clamp(min=torch.finfo(dlse.dtype).tiny) if dlse.numel() else 1.0
    pull = ((dlse / size).unsqueeze(-1) * q).to(q.dtype)  # of size 1: a loss scale would overflow half precision
    dk = attend_backward_op(q, k, k, torch.zeros_like(q), lse, pull, *where)[2]
    return dq.to(q.dtype), (dk.to(dlse.dtype) * (size * scale)).to(k.dtype)


def sink_gradient(sinks: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None = None) -> Tensor:
    """A sink takes the weight `e^(sink - lse)` and gives nothing for it."""
    pull = -(out.to(lse.dtype) * dout.to(lse.dtype)).sum(-1)
    pull = pull if dlse is None else pull + dlse
    # A row that sees nothing and has a sink of -inf has lse -inf: the weight is to be 0, not e^(-inf + inf).
    weights = torch.exp(sinks.to(lse.dtype)[:, None] - lse.masked_fill(lse == -torch.inf, torch.inf))
    return (weights * pull).sum((0, 2)).to(sinks.dtype)


def _no_second_gradients(ctx: Any, *_: Any) -> None:
    expected = "gradients of the first order"
    raise KernelError("attend", expected, "a gradient of a gradient", "differentiate energy, which is dense, instead")


attend_op.register_autograd(_gradients, setup_context=_remember)
attend_backward_op.register_autograd(_no_second_gradients)


def _band(
    q: Tensor, k: Tensor, q_positions: Tensor | None, k_positions: Tensor | None, mask: Sequence[int]
) -> tuple[Band, Tensor | None, Tensor | None]:
    """The band of a local problem, and the orders that put its queries and its keys in order of position."""
    decoded = Mask.decode(mask)
    rows, q_order = _ordered("attend q_positions", q_positions, decoded)
    keys, k_order = _ordered("attend k_positions", k_positions, decoded)
    rows = torch.arange(q.shape[2]) if rows is None else rows
    return Band.of(decoded, rows, k.shape[2] if keys is None else keys), q_order, k_order


def _ordered(name: str, positions: Tensor | None, mask: Mask) -> tuple[Tensor | None, Tensor | None]:
    if positions is None or not len(positions):
        return None, None
    positions = positions.cpu()
    low, high = int(positions.min()), int(positions.max())
    if low < 0 or high >= FAR:
        raise LayoutError(name, f"positions from 0 to {FAR}", str(low if low < 0 else high), "count tokens from 0")
    order = None if bool((positions.diff() >= 0).all()) else positions.argsort(stable=True)
    positions = positions if order is None else positions[order]
    if mask.ends and positions[-1] >= mask.ends[-1]:
        given = f"position {int(positions[-1])} and {mask.ends[-1]} tokens in the documents"
        raise MaskError(name, "positions inside the documents", given, "let Documents(lengths) cover every token")
    return positions, order


def _take(x: Tensor, order: Tensor | None) -> Tensor:
    return x if order is None else x.index_select(2, order.to(x.device))


def _give(x: Tensor, order: Tensor | None) -> Tensor:
    """The inverse of `_take`."""
    return x if order is None else torch.empty_like(x).index_copy_(2, order.to(x.device), x)


def empty_placed(x: Tensor, width: int) -> Tensor:
    """An empty tensor like x but of another width, as `placed` in memory."""
    return torch.empty_permuted((*x.shape[:-1], width), (0, 2, 1, 3), dtype=x.dtype, device=x.device)


def placed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In memory (batch, length, heads, dim), as the flash operators write it and an output projection reads it."""
    if x.dtype == dtype and x.transpose(1, 2).is_contiguous() and not x._is_view():
        return x
    return empty_placed(x.to(dtype), x.shape[-1]).copy_(x)  # no view of another, so that users may write to it


def _check_positions(name: str, positions: Tensor | None, length: int) -> None:
    if positions is None:
        return
    fix = "pass layout.positions(length, shards, index), or torch.tensor([...])"
    if not isinstance(positions, Tensor) or positions.dtype != torch.int64:
        given = str(positions.dtype) if isinstance(positions, Tensor) else type(positions).__name__
        raise DtypeError(name, "a tensor of torch.int64", given, fix)
    if tuple(positions.shape) != (length,):
        raise ShapeError(name, f"shape ({length},), one position a token", f"shape {tuple(positions.shape)}", fix)
