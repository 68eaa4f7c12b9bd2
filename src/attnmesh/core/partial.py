"""Partials: attention over some of the keys. Merging them gives attention over all keys.

Every schedule in this library (ring, tree, mesh) is an order of merges. The softmax arithmetic is here. Merges along a
tree are exact since attention is the gradient of an energy, `F(s) = log sum_a exp(q.k_a*scale + s.v_a)`: its value at
`s = 0` is `lse`, its gradient there is the output, and logsumexp is associative.
"""

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.core.checks import check_one_device, check_qkv, check_same_kind
from attnmesh.core.logits import Logits
from attnmesh.errors import DtypeError, ShapeError


class Partial(NamedTuple):
    """Attention over a set of keys: the normalised output and the log of its normaliser.

    No keys at all give the identity `(0, -inf)`. A learned attention sink is `(0, sink logit)`. Both may broadcast.

    Args:
        out: Output, (batch, heads, length, dim).
        lse: Natural logarithm of the sum of exponentials, (batch, heads, length), in float32 or wider.

    >>> import attnmesh as am
    >>> identity = am.Partial(torch.zeros(1, 1, 2, 4), torch.full((1, 1, 2), -torch.inf))
    >>> torch.equal(am.merge(identity, identity).lse, identity.lse)
    True
    """

    out: Tensor
    lse: Tensor


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
    _check(partials)
    lses = torch.broadcast_tensors(*(lse for _, lse in partials))
    # Rows that are empty in every partial are filled in afterwards: a softmax over -inf has no gradient.
    empty = torch.stack(lses).detach().amax(0) == -torch.inf
    joined = merge_unchecked(
        [Partial(out, lse.masked_fill(empty, 0.0)) for (out, _), lse in zip(partials, lses, strict=True)]
    )
    return Partial(joined.out.masked_fill(empty.unsqueeze(-1), 0.0), joined.lse.masked_fill(empty, -torch.inf))


def with_sinks(partial: Partial, sinks: Tensor | None) -> Partial:
    """Return the partial merged with sinks, one logit per query head: each is the partial `(0, sink)`.

    There are no gradients in empty rows.
    """
    if sinks is None:
        return partial
    out, lse = partial
    weights, total = _weights(torch.stack(torch.broadcast_tensors(lse, sinks.to(lse.dtype)[:, None])))
    return Partial((out * weights[0]).to(out.dtype), total)


def merge_unchecked(partials: Sequence[Partial]) -> Partial:
    """Return the merge of partials, without checks and without gradients in empty rows."""
    weights, lse = _weights(torch.stack([lse for _, lse in partials]))
    # Summed in order, so that the bits of two terms do not depend on which comes first.
    out = reduce(
        add, [out.to(sum_dtype(out.dtype)) * weight for (out, _), weight in zip(partials, weights, strict=True)]
    )
    return Partial(out.to(reduce(torch.promote_types, [out.dtype for out, _ in partials])), lse)


def merge_stack(stacked: Partial) -> Partial:
    """Return the merge of partials stacked along a first dim, in float32 or wider.

    For two partials the bits are those of `merge_unchecked`.
    """
    weights, lse = _weights(stacked.lse)
    return Partial((stacked.out.to(sum_dtype(stacked.out.dtype)) * weights).sum(0), lse)


def _weights(lses: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors `e^(lse_i - lse)` of each `out_i`, and `lse`.

    exp and log are applied to whole tensors rather than in a softmax: the bits are then the same for any shape.
    """
    # Empty rows have peak -inf. Relative to a finite peak their weights are e^-inf = 0, and never NaN.
    peak = lses.amax(0).clamp(min=torch.finfo(lses.dtype).min)
    weights = torch.exp(lses - peak)
    total = weights.sum(0)
    return (weights / total.clamp(min=1.0)).unsqueeze(-1), peak + total.log()  # total is 1 or more, 0 in empty rows


def identity(q: Tensor, value_dim: int, dtype: torch.dtype) -> Partial:
    """Return the identity `(0, -inf)` for the queries, with `out` in the given dtype."""
    out = q.new_zeros((*q.shape[:-1], value_dim), dtype=dtype)
    return Partial(out, q.new_full(q.shape[:-1], -torch.inf, dtype=sum_dtype(q.dtype)))


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which results of this dtype are summed: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def _check(partials: tuple[Partial, ...]) -> None:
    if not partials:
        raise ShapeError("merge", "at least one partial", "none", "pass the identity Partial(zeros, -inf) for no keys")
    if not all(isinstance(p, tuple) and len(p) == 2 and all(isinstance(x, Tensor) for x in p) for p in partials):
        given = ", ".join(type(p).__name__ for p in partials)
        raise DtypeError("merge", "partials, each (out, lse)", given, "pass each as an argument: merge(*partials)")
    for out, lse in partials:
        if not out.is_floating_point():
            raise DtypeError("merge", "out in floats", str(out.dtype), "keep out as the kernel returned it")
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
    check_qkv("energy", q, k, v)
    check_same_kind("energy", {"q": q, "source": source})
    shape = (*q.shape[:-1], v.shape[-1])
    if tuple(source.shape) != shape:
        fix = f"use torch.zeros{shape}"
        raise ShapeError("energy", f"source of the output's shape {shape}", str(tuple(source.shape)), fix)
    group = q.shape[1] // k.shape[1]
    kind = Logits.of("energy", scale, softcap, q.shape[-1])
    keys, values = (x.to(sum_dtype(x.dtype)).repeat_interleave(group, dim=1).transpose(-1, -2) for x in (k, v))
    with torch.autocast(q.device.type, enabled=False):
        logits = q.to(keys.dtype) @ keys * kind.scale
        logits = kind.cap(logits) + source.to(keys.dtype) @ values
    return torch.logsumexp(logits, dim=-1)
