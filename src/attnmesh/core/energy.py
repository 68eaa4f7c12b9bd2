"""Why a tree works: attention is the gradient of an energy, and the energy is a logsumexp over keys.

`F(s) = log sum_a exp(q.k_a*scale + s.v_a)`. Its value at `s = 0` is `lse`, its gradient there is attention, and
logsumexp is associative. Here that is written down as it reads, dense; tests hold the kernels against it.
"""

import torch
from torch import Tensor

from attnmesh.core.checks import check_qkv, check_same_kind, check_scale
from attnmesh.core.partial import wide
from attnmesh.errors import ShapeError


def energy(q: Tensor, k: Tensor, v: Tensor, source: Tensor, *, scale: float | None = None) -> Tensor:
    """The energy `F(source)` of each query, (batch, heads, q_len), like an lse; `dF/dsource` at 0 is attention.

    >>> import attnmesh as am
    >>> q, k, v = torch.randn(3, 1, 2, 6, 4).unbind()
    >>> source = torch.zeros(1, 2, 6, 4, requires_grad=True)
    >>> (gradient,) = torch.autograd.grad(energy(q, k, v, source).sum(), source)
    >>> torch.allclose(gradient, am.attend(q, k, v).out, atol=1e-6)
    True
    """
    _check(q, k, v, source)
    group = q.shape[1] // k.shape[1]
    keys, values = (x.to(wide(x.dtype)).repeat_interleave(group, dim=1).transpose(-1, -2) for x in (k, v))
    with torch.autocast(q.device.type, enabled=False):
        logits = q.to(keys.dtype) @ keys * check_scale("energy", scale, q) + source.to(keys.dtype) @ values
    return torch.logsumexp(logits, dim=-1)


def _check(q: Tensor, k: Tensor, v: Tensor, source: Tensor) -> None:
    check_qkv("energy", q, k, v)
    check_same_kind("energy", {"q": q, "source": source})
    wanted = (*q.shape[:-1], v.shape[-1])
    if tuple(source.shape) != wanted:
        fix = f"use torch.zeros{wanted}"
        raise ShapeError("energy", f"source of the output's shape {wanted}", str(tuple(source.shape)), fix)
