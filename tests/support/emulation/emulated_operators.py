"""PyTorch's CUDA attention operators by their formulas, in float64, with the signatures and quirks of the real ones."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

ROUNDED = 32
"""Rows to which the memory-efficient operator rounds its lse up."""


def flash(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, *_: Any, scale: float | None = None
) -> tuple[Any, ...]:
    """Return out and lse of `_scaled_dot_product_flash_attention`, and its bookkeeping."""
    out, lse = _attend(q, k, v, None, causal, scale)
    seed = torch.zeros(2, dtype=torch.int64)
    return out, lse, None, None, q.shape[2], k.shape[2], seed, seed, torch.empty(0)


def flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, **named: Any
) -> Any:
    """Return the gradients of `_scaled_dot_product_flash_attention`."""
    causal = rest[5]
    return _gradients(dout, (q, k, v), out, lse, None, causal, named.get("scale"))


def efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *rest: Any, scale: float | None = None
) -> tuple[Tensor, ...]:
    """Return out and the padded lse of `_scaled_dot_product_efficient_attention`, and its bookkeeping."""
    causal = rest[2] if len(rest) > 2 else False
    out, lse = _attend(q, k, v, bias, causal, scale)
    seed = torch.zeros((), dtype=torch.int64)
    return out, pad(lse, (0, -q.shape[2] % ROUNDED), value=torch.inf), seed, seed


def efficient_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *rest: Any,
    **named: Any,
) -> Any:
    """Return the gradients of `_scaled_dot_product_efficient_attention`."""
    causal = rest[4] if len(rest) > 4 else False
    gradients = _gradients(dout, (q, k, v), out, lse[..., : q.shape[2]], bias, causal, named.get("scale"))
    return *gradients, torch.empty(0)


FORMULAS = {
    "aten::_scaled_dot_product_flash_attention": flash,
    "aten::_scaled_dot_product_flash_attention_backward": flash_backward,
    "aten::_scaled_dot_product_efficient_attention": efficient,
    "aten::_scaled_dot_product_efficient_attention_backward": efficient_backward,
}


def _attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return out in the dtype of q, and lse in float32: infinite, not minus infinite, for a row that sees nothing."""
    logits = _logits(q, k, bias, causal, scale)
    lse = logits.logsumexp(-1)
    empty = lse == -torch.inf
    weights = torch.exp(logits - lse.masked_fill(empty, 0)[..., None])
    return (weights @ _per_query_head(v, q).double()).to(q.dtype), lse.masked_fill(empty, torch.inf).float()


def _gradients(
    dout: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = inputs
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    weights = torch.exp(_logits(q, k, bias, causal, scale) - lse.double()[..., None])
    d = dout.double()
    dweights = d @ _per_query_head(v, q).double().mT
    dlogits = weights * (dweights - (out.double() * d).sum(-1, keepdim=True)) * scale
    per_head = dlogits @ _per_query_head(k, q).double(), dlogits.mT @ q.double(), weights.mT @ d
    dq, dk, dv = (x.unflatten(1, (heads.shape[1], -1)).sum(2) for x, heads in zip(per_head, inputs, strict=True))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _logits(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    logits = q.double() @ _per_query_head(k, q).double().mT * scale
    if bias is not None:
        logits = logits + bias.double()
    if causal:
        if q.shape[2] != k.shape[2]:
            raise AssertionError(
                "a causal rectangle: CUDA's operators align it at the last row, the CPU's at the first"
            )
        logits = logits.masked_fill(torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1), -torch.inf)
    return logits


def _per_query_head(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)
