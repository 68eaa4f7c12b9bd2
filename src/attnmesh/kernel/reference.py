"""Attention as its formula reads, in plain PyTorch, on any device and in any dtype: what the others are held to."""

from dataclasses import dataclass

import torch
from torch import Tensor

from attnmesh.kernel.blocks import Band, Block, tiles
from attnmesh.kernel.walk import Answer, Gradients, wide
from attnmesh.partial import Partial


@dataclass(frozen=True)
class Reference:
    """Dense within a tile of rows: memory grows with the keys, not with queries times keys."""

    name: str = "reference"

    def refuses(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        """It serves everything."""
        return None

    def cut(self, band: Band) -> list[Block]:
        """Tiles: a plain matrix product has no causal form to profit from."""
        return tiles(band)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> Partial:
        """`lse = log sum_a e^logit_a` and `out = sum_a e^(logit_a - lse) v_a`."""
        logits = _logits(q, k, block, scale)
        lse = torch.logsumexp(logits, dim=-1)
        # As in the backward pass: where nothing was seen every weight is to be 0, not e^(-inf + inf).
        weights = torch.exp(logits - lse.masked_fill(lse == -torch.inf, torch.inf).unsqueeze(-1))
        out = weights @ _paired(v)
        return Partial(out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2))

    def differentiate(self, q: Tensor, k: Tensor, v: Tensor, answer: Answer, block: Block, scale: float) -> Gradients:
        """With weights w and `delta = sum(out * dout)`: `dv = w'dout`, `dlogit = w (dout v' - delta)`."""
        out, dout = (_grouped(x, k) for x in (answer.out, answer.dout))
        weights = torch.exp(_logits(q, k, block, scale) - answer.lse.unflatten(1, (k.shape[1], -1)).unsqueeze(-1))
        delta = (out * dout).sum(-1, keepdim=True)
        dlogits = weights * (dout @ _paired(v).transpose(-1, -2) - delta) * scale
        dq = dlogits @ _paired(k)
        dk = (dlogits.transpose(-1, -2) @ _grouped(q, k)).sum(2)
        dv = (weights.transpose(-1, -2) @ dout).sum(2)
        return Gradients(dq.flatten(1, 2), dk, dv)


def _logits(q: Tensor, k: Tensor, block: Block, scale: float) -> Tensor:
    logits = _grouped(q, k) @ _paired(k).transpose(-1, -2) * scale
    return logits.masked_fill(~block.visible().to(q.device), -torch.inf)


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """(batch, kv_heads, group, length, dim): the query heads beside the key head that they share."""
    grouped: Tensor = x.to(wide(x.dtype)).unflatten(1, (k.shape[1], -1))
    return grouped


def _paired(x: Tensor) -> Tensor:
    """(batch, kv_heads, 1, length, dim)."""
    return x.to(wide(x.dtype)).unsqueeze(2)
