"""The truth that every path is held to: dense attention in float64 with PyTorch's own autograd.

How far from it a result may be is not one number. Every result is a sum of products, and rounding is relative to the
sizes of the terms, not to what is left when they cancel. So each element has an allowance of its own:

    ROUNDINGS * (u + w * reach) * (the same sum with every term made positive)

where u is the epsilon of the dtype, w that of the dtype that logits are summed in (float32 for half precision), and
reach the largest sum of |q_i k_i| * scale: an error of a logit is a relative error of its weight.

Where a processor's products of matrices count denormal numbers as 0, such inputs may be missing from the sum.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

ROUNDINGS = 8.0
"""The worst of 4,000 random problems took 3.5."""

COARSE_EXPONENTIAL = 1.1e-4
"""In bfloat16 PyTorch's flash attention for CPUs takes an exponential with relative errors of up to 1.01e-4.

Found by scanning 64 keys, one at logit 0 and 63 at -d, for d from 0 to 40 in steps of 0.01: the worst is at 0.69.
"""


@dataclass(frozen=True)
class Truth:
    """By name, what `out`, `lse` and the gradients ought to be and how far each element may be from it."""

    values: dict[str, Tensor]
    allowances: dict[str, Tensor]

    def check(self, name: str, given: Tensor, what: object = "") -> float:
        """Fail unless `given` is right; say what share of the allowance its worst element used."""
        expected, allowance = self.values[name], self.allowances[name]
        given = given.detach().cpu().double()
        assert given.shape == expected.shape, f"{what} {name}: {tuple(given.shape)} is not {tuple(expected.shape)}"
        infinite = torch.isinf(expected)
        assert torch.equal(given[infinite], expected[infinite]), f"{what} {name}: not infinite where it should be"
        assert torch.isfinite(given[~infinite]).all(), f"{what} {name}: not finite where it should be"
        error = (given - expected)[~infinite].abs()
        share = float((error / allowance[~infinite]).max()) if error.numel() else 0.0
        assert share <= 1, f"{what} {name}: {share:.2f} times its allowance, error {float(error.max()):.2e}"
        return share


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    scale: float,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax as it is written: (out, lse, weights). A sink takes a weight and gives nothing."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    logits = q @ k.transpose(-1, -2) * scale
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    sink = (
        torch.full_like(logits[..., :1], -torch.inf) if sinks is None else sinks[:, None, None].expand(*q.shape[:-1], 1)
    )
    logits = torch.cat((logits.masked_fill(~visible, -torch.inf), sink), dim=-1)
    # Rows that see nothing are answered by definition: a row of -inf would be NaN, and to autograd too.
    blind = torch.isneginf(logits.detach()).all(-1, keepdim=True)
    logits = torch.where(blind, 0.0, logits)
    weights = torch.where(blind, 0.0, torch.softmax(logits, dim=-1))[..., :-1]
    lse = torch.where(blind.squeeze(-1), -torch.inf, torch.logsumexp(logits, dim=-1))
    return weights @ v, lse, weights


@cache
def counts_denormals_as_zero(dtype: torch.dtype) -> bool:
    """Return whether products of matrices do, as by definition those of bfloat16 in AMX and AVX-512 do."""
    small = torch.full((64, 64), torch.finfo(dtype).tiny / 2, dtype=dtype)
    return not bool((small @ torch.ones_like(small)).any())


def truth(
    tensors: list[Tensor],
    visible: Tensor,
    scale: float,
    dout: Tensor,
    dlse: Tensor | None = None,
    softcap: float | None = None,
) -> Truth:
    """What q, k, v and perhaps sinks ought to give, for the loss `sum(out * dout) + sum(lse * dlse)`."""
    exact = [x.detach().cpu().double().requires_grad_() for x in tensors]
    dout = dout.to(tensors[0].dtype).cpu().double()
    out, lse, weights = dense(*exact[:3], visible, scale, exact[3] if len(exact) > 3 else None, softcap)
    dlse = torch.zeros_like(lse) if dlse is None else dlse.cpu().double()
    loss = (out * dout).sum() + torch.where(torch.isinf(lse), 0.0, lse * dlse).sum()
    gradients = torch.autograd.grad(loss, exact, allow_unused=True, materialize_grads=True)
    values = dict(zip(("out", "lse", "dq", "dk", "dv", "dsinks"), (out, lse, *gradients), strict=False))
    with torch.no_grad():
        terms = _positive(*(x.abs() for x in exact[:3]), weights, dout.abs(), dlse.abs(), abs(scale))
        reach = (
            float((_spread(exact[1].abs(), exact[0]) @ exact[0].abs().transpose(-1, -2) * abs(scale)).amax())
            if weights.numel()
            else 0.0
        )
        if len(exact) > 3:
            terms["dsinks"] = torch.exp(exact[3][:, None] - lse).mul((terms["out"] * dout.abs()).sum(-1)).sum((0, 2))
        u, w = (
            torch.finfo(dtype).eps for dtype in (tensors[0].dtype, torch.promote_types(tensors[0].dtype, torch.float32))
        )
        tiny = torch.finfo(tensors[0].dtype).tiny
        allowances = {name: ROUNDINGS * (u + w * reach) * size + tiny for name, size in terms.items()}
        for place in range(3) if counts_denormals_as_zero(tensors[0].dtype) else ():
            parts = [x.abs().where(x.abs() < tiny, 0.0) if n == place else x.abs() for n, x in enumerate(exact[:3])]
            for name, size in _positive(*parts, weights, dout.abs(), dlse.abs(), abs(scale)).items():
                allowances[name] = allowances[name] + size
        allowances["lse"] = ROUNDINGS * w * (1 + reach + lse.abs()) + (COARSE_EXPONENTIAL if u > w else 0.0)
    return Truth({name: x.detach() for name, x in values.items()}, allowances)


def _spread(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _positive(
    q: Tensor, k: Tensor, v: Tensor, weights: Tensor, dout: Tensor, dlse: Tensor, scale: float
) -> dict[str, Tensor]:
    """The sums that make out and the gradients, with no term negative."""
    heads = k.shape[1]
    wide_k, wide_v = _spread(k, q), _spread(v, q)
    out = weights @ wide_v
    pull = dout @ wide_v.transpose(-1, -2) + (out * dout).sum(-1, keepdim=True) + dlse.unsqueeze(-1)
    dlogits = weights * pull * scale
    dk, dv = (x.transpose(-1, -2) @ y for x, y in ((dlogits, q), (weights, dout)))
    return {
        "out": out,
        "dq": dlogits @ wide_k,
        "dk": dk.unflatten(1, (heads, -1)).sum(2),
        "dv": dv.unflatten(1, (heads, -1)).sum(2),
    }
