"""The energy whose gradient is attention. It explains why partials can be merged along a tree.

`F(s) = log sum_a exp(q.k_a*scale + s.v_a)`. Its value at `s = 0` is `lse`, its gradient there is attention, and
logsumexp is associative. This implementation is dense; tests compare the kernels with it.
"""

import torch
from torch import Tensor

from attnmesh.core.checks import check_qkv, check_same_kind
from attnmesh.core.logits import Logits
from attnmesh.core.partial import wide
from attnmesh.errors import ShapeError


def energy(
    q: Tensor, k: Tensor, v: Tensor, source: Tensor, *, scale: float | None = None, softcap: float | None = None
) -> Tensor:
    """Return the energy `F(source)` of each query. `dF/dsource` at 0 is attention.

    Args:
        q: Queries, (batch, heads, q_len, dim).
        k: Keys, (batch, kv_heads, k_len, dim).
        v: Values, (batch, kv_heads, k_len, value_dim).
        source: The point at which the energy is taken, (batch, heads, q_len, value_dim).
        scale: Factor of the logits, 1/sqrt(dim) by default.
        softcap: Bound of the logits: each becomes `softcap * tanh(logit / softcap)`. None for no bound.

    Returns:
        The energies, (batch, heads, q_len), in float32 or wider; differentiable to any order.

    Raises:
        InputError: If the tensors do not fit together.

    >>> import attnmesh as am
    >>> q, k, v = torch.randn(3, 1, 2, 6, 4).unbind()
    >>> source = torch.zeros(1, 2, 6, 4, requires_grad=True)
    >>> (gradient,) = torch.autograd.grad(am.energy(q, k, v, source).sum(), source)
    >>> torch.allclose(gradient, am.attend(q, k, v).out, atol=1e-6)
    True
    """
    check_qkv("energy", q, k, v)
    check_same_kind("energy", {"q": q, "source": source})
    shape = (*q.shape[:-1], v.shape[-1])
    if tuple(source.shape) != shape:
        fix = f"use torch.zeros{shape}"
        raise ShapeError("energy", f"source of the output's shape {shape}", str(tuple(source.shape)), fix)
    kind = Logits.of("energy", scale, softcap, q)
    group = q.shape[1] // k.shape[1]
    keys, values = (x.to(wide(x.dtype)).repeat_interleave(group, dim=1).transpose(-1, -2) for x in (k, v))
    with torch.autocast(q.device.type, enabled=False):
        logits = kind.cap(q.to(keys.dtype) @ keys * kind.scale) + source.to(keys.dtype) @ values
    return torch.logsumexp(logits, dim=-1)
