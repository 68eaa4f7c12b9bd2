"""Partials as users merge them, and the energy whose gradient attention is."""

import torch
from torch import Tensor

from attnmesh.checks.argument_checks import check_dense, check_one_device, check_qkv, check_same_kind
from attnmesh.core.partial import DTYPE_NAMES, Partial, merge_partials, sum_dtype
from attnmesh.core.scaling import Scaling
from attnmesh.errors import DtypeError, ShapeError
from attnmesh.kernels.traced import without_autocast


def merge(*partials: Partial) -> Partial:
    """Return attention over the union of disjoint sets of keys.

    `out = sum_i out_i * e^(lse_i - lse)`, where `lse = log sum_i e^lse_i`. The operation is associative and
    commutative, with identity `(0, -inf)`. Half precision is summed in float32 and rounded once at the end: merge many
    partials in one call, or keep `out` in float32 between calls.

    Args:
        *partials: Partials of the same queries over different keys.

    Returns:
        The merged partial, in the common dtype; differentiable.

    Raises:
        InputError: If there are no partials, or if their dtypes, shapes or devices do not fit together.

    >>> import attnmesh as am
    >>> q, k, v = torch.randn(3, 1, 2, 8, 4).unbind()
    >>> left, right = am.attend(q, k[:, :, :5], v[:, :, :5]), am.attend(q, k[:, :, 5:], v[:, :, 5:])
    >>> torch.allclose(am.merge(left, right).out, am.attend(q, k, v).out, atol=1e-6)
    True
    """
    _check_partials(partials)
    lses = torch.broadcast_tensors(*(lse for _, lse in partials))
    # Rows that are empty in every partial are filled in afterwards: a softmax over -inf has no gradient.
    empty = torch.stack(lses).detach().amax(0) == -torch.inf
    joined = merge_partials(
        [Partial(out, lse.masked_fill(empty, 0.0)) for (out, _), lse in zip(partials, lses, strict=True)]
    )
    return Partial(joined.out.masked_fill(empty.unsqueeze(-1), 0.0), joined.lse.masked_fill(empty, -torch.inf))


def _check_partials(partials: tuple[Partial, ...]) -> None:
    if not partials:
        raise ShapeError("merge", "at least one partial", "none", "pass the identity Partial(zeros, -inf) for no keys")
    if not all(isinstance(p, tuple) and len(p) == 2 and all(isinstance(x, Tensor) for x in p) for p in partials):
        given = ", ".join(type(p).__name__ for p in partials)
        raise DtypeError("merge", "partials, each (out, lse)", given, "pass each as an argument: merge(*partials)")
    for out, lse in partials:
        if str(out.dtype).removeprefix("torch.") not in DTYPE_NAMES:
            raise DtypeError("merge", "out in floats", str(out.dtype), f"cast it to one of {', '.join(DTYPE_NAMES)}")
        if lse.dtype not in (torch.float32, torch.float64):
            raise DtypeError("merge", "lse in float32 or float64", str(lse.dtype), "keep lse as the kernel returned it")
    names = [f"{name} of partial {index}" for index in range(len(partials)) for name in Partial._fields]
    check_one_device("merge", dict(zip(names, (x for partial in partials for x in partial), strict=True)))
    try:
        torch.broadcast_shapes(*(out.shape[:-1] for out, _ in partials), *(lse.shape for _, lse in partials))
        torch.broadcast_shapes(*(out.shape[-1:] for out, _ in partials))
    except RuntimeError:
        given = ", ".join(f"out {tuple(out.shape)} lse {tuple(lse.shape)}" for out, lse in partials)
        expected = "out (batch, heads, length, dim) and lse (batch, heads, length) of one shape"
        raise ShapeError("merge", expected, given, "merge partials of the same queries") from None


def energy(
    q: Tensor, k: Tensor, v: Tensor, source: Tensor, *, scale: float | None = None, softcap: float | None = None
) -> Tensor:
    """Return the energy `F(source)` of each query. `dF/dsource` at 0 is attention.

    The computation is dense; tests compare the kernels with it.

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
    check_qkv("energy", q, k, v, check_dense)
    check_same_kind("energy", {"q": q, "source": source}, check_dense)
    shape = (*q.shape[:-1], v.shape[-1])
    if tuple(source.shape) != shape:
        fix = f"use torch.zeros{shape}"
        raise ShapeError("energy", f"source of the output's shape {shape}", str(tuple(source.shape)), fix)
    group = q.shape[1] // k.shape[1]
    scaling = Scaling.of("energy", scale, softcap, q.shape[-1])
    keys, values = (x.to(sum_dtype(x.dtype)).repeat_interleave(group, dim=1).transpose(-1, -2) for x in (k, v))
    with without_autocast(q):
        logits = q.to(keys.dtype) @ keys * scaling.scale
        logits = scaling.cap(logits) + source.to(keys.dtype) @ values
    return torch.logsumexp(logits, dim=-1)
