"""The reference kernel: attention by its formula, in plain PyTorch, on any device and in any dtype."""

import torch
from torch import Tensor

from attnmesh.core.logits import Logits
from attnmesh.core.mask import Band
from attnmesh.core.partial import Partial, sum_dtype
from attnmesh.kernels.blocks import BackwardInputs, Block, Gradients, tiles


class Reference:
    """Dense within a tile of rows: memory grows with the keys, not with queries times keys."""

    name = "reference"

    def unsupported_reason(self, q: Tensor, k: Tensor, v: Tensor, capped: bool = False) -> str | None:
        """Return None: all tensors are supported."""
        return None

    def cut(self, band: Band, q: Tensor, k: Tensor, v: Tensor) -> list[Block]:
        """Return tiles, since a plain matrix product has no causal form."""
        return tiles(band)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, block: Block, logits: Logits) -> Partial:
        """Return `lse = log sum_a w_a` and `out = sum_a w_a v_a / sum_a w_a`, with weights `w_a = e^logit_a`."""
        values = _masked(logits.cap(_products(q, k, logits.scale)), block)
        peak = values.amax(-1, keepdim=True)
        # Empty rows have peak -inf. Relative to 0 instead, their weights are e^-inf = 0, and never NaN.
        peak.masked_fill_(peak == -torch.inf, 0.0)
        weights = values.sub_(peak).exp_()
        total = weights.sum(-1, keepdim=True)
        out = weights @ _widen(v) / total.masked_fill(total == 0, 1.0)
        lse = (peak + total.log()).squeeze(-1)
        return Partial(_unpack(out, q).to(q.dtype), lse.reshape(q.shape[:-1]))

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, saved: BackwardInputs, block: Block, logits: Logits
    ) -> Gradients:
        """Return the gradients: `dv = w'dout` and `dlogit = w (dout v' - delta)`, with `delta = sum(out * dout)`."""
        out, dout, rows = (_pack(x, k) for x in (saved.out, saved.dout, q))
        products = _products(q, k, logits.scale)
        slope = logits.slope(products)
        weights = torch.exp(_masked(logits.cap(products), block) - saved.lse.reshape(*rows.shape[:-1], 1))
        delta = (out * dout).sum(-1, keepdim=True)
        dproducts = weights * (dout @ _widen(v).transpose(-1, -2) - delta) * (slope * logits.scale)
        dq, dk, dv = dproducts @ _widen(k), dproducts.transpose(-1, -2) @ rows, weights.transpose(-1, -2) @ dout
        return Gradients(_unpack(dq, q), dk, dv)


def _products(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return (batch, kv_heads, group * length, keys), computed as keys times queries: fastest for few queries."""
    columns = _pack(q, k).transpose(-1, -2) * scale
    return (_widen(k) @ columns).transpose(-1, -2).contiguous()


def _masked(logits: Tensor, block: Block) -> Tensor:
    """Set the logits of invisible pairs to -inf, in place."""
    if block.causal or block.band is not None:
        visible = block.visible().to(logits.device)
        logits.unflatten(2, (-1, len(visible))).masked_fill_(~visible, -torch.inf)
    return logits


def _pack(x: Tensor, k: Tensor) -> Tensor:
    """Return (batch, kv_heads, group * length, dim): the query heads that share a key head as rows of one head."""
    return _widen(x).reshape(x.shape[0], k.shape[1], -1, x.shape[-1])


def _unpack(x: Tensor, q: Tensor) -> Tensor:
    return x.reshape(*q.shape[:-1], x.shape[-1])


def _widen(x: Tensor) -> Tensor:
    return x.to(sum_dtype(x.dtype))
