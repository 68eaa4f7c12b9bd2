"""A partial is attention over some of the keys; merging partials is attention over all of them.

Every schedule in this library - a ring, a tree, a mesh - is an order of merging. No schedule owns softmax arithmetic.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.errors import DeviceError, DtypeError, ShapeError


class Partial(NamedTuple):
    """Attention over a set of keys: the normalised output and the log of its normaliser.

    `out` is (batch, heads, length, dim), `lse` is (batch, heads, length), natural log, float32 or wider. No keys at
    all is the identity `(0, -inf)`; a learned attention sink is `(0, sink logit)`. Either may broadcast.
    """

    out: Tensor
    lse: Tensor


def merge(*partials: Partial) -> Partial:
    """Attention over the union of disjoint sets of keys: associative, commutative, with identity `(0, -inf)`.

    `out = sum_i out_i * e^(lse_i - lse)`, where `lse = log sum_i e^lse_i`. Half precision is summed in float32 and
    rounded once at the end: merge many partials in one call, or keep `out` in float32 between calls.

    >>> import attnmesh as am
    >>> q, k, v = torch.randn(3, 1, 2, 8, 4).unbind()
    >>> left, right = am.attend(q, k[:, :, :5], v[:, :, :5]), am.attend(q, k[:, :, 5:], v[:, :, 5:])
    >>> torch.allclose(am.merge(left, right).out, am.attend(q, k, v).out, atol=1e-6)
    True
    """
    _check(partials)
    lses = torch.broadcast_tensors(*(lse for _, lse in partials))
    # Rows that saw nothing in any partial are answered by definition: a softmax over -inf has no gradient.
    blind = torch.stack(lses).detach().amax(0) == -torch.inf
    joined = join([Partial(out, lse.masked_fill(blind, 0.0)) for (out, _), lse in zip(partials, lses, strict=True)])
    return Partial(joined.out.masked_fill(blind.unsqueeze(-1), 0.0), joined.lse.masked_fill(blind, -torch.inf))


def with_sinks(partial: Partial, sinks: Tensor | None) -> Partial:
    """A sink, one logit a query head, is one more partial: `(0, sink)`."""
    if sinks is None:
        return partial
    return merge(partial, Partial(torch.zeros_like(partial.out[..., :1]), sinks.to(partial.lse.dtype)[:, None]))


def join(partials: Sequence[Partial]) -> Partial:
    """`merge` for schedules, who made the partials themselves and ask for no gradients."""
    weights, lse = _weights(torch.stack([lse for _, lse in partials]))
    out = _sum([out.to(wide(out.dtype)) * weight for (out, _), weight in zip(partials, weights, strict=True)])
    return Partial(out.to(_common([out for out, _ in partials])), lse)


def collapse(stacked: Partial) -> Partial:
    """The same for partials stacked along a first dim, in float32 or wider; of two, to the same bits."""
    weights, lse = _weights(stacked.lse)
    return Partial((stacked.out.to(wide(stacked.out.dtype)) * weights).sum(0), lse)


def _weights(lses: Tensor) -> tuple[Tensor, Tensor]:
    """`e^(lse_i - lse)`, ready to weigh `out_i`, and `lse`.

    Step by step, and not by softmax: exp and log of one tensor after another give the same bits whatever their shapes.
    """
    # Where nothing was seen the peak is -inf: measured from a finite one, every weight is e^-inf = 0 and never NaN.
    peak = lses.amax(0).clamp(min=torch.finfo(lses.dtype).min)
    weights = torch.exp(lses - peak)
    total = weights.sum(0)
    return (weights / total.clamp(min=1.0)).unsqueeze(-1), peak + total.log()  # 1 or more, unless nothing was seen


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that results of this dtype are summed in: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def _sum(terms: list[Tensor]) -> Tensor:
    """In order, one at a time: for two terms the bits do not depend on which comes first."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _common(tensors: list[Tensor]) -> torch.dtype:
    dtype = tensors[0].dtype
    for x in tensors[1:]:
        dtype = torch.promote_types(dtype, x.dtype)
    return dtype


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
    devices = dict.fromkeys(str(x.device) for partial in partials for x in partial)
    if len(devices) > 1:
        raise DeviceError("merge", "one device", " and ".join(devices), "move them with .to(device)")
    try:
        torch.broadcast_shapes(*(out.shape[:-1] for out, _ in partials), *(lse.shape for _, lse in partials))
        torch.broadcast_shapes(*(out.shape[-1:] for out, _ in partials))
    except RuntimeError:
        given = ", ".join(f"out {tuple(out.shape)} lse {tuple(lse.shape)}" for out, lse in partials)
        expected = "out (batch, heads, length, dim) and lse (batch, heads, length) of one shape"
        raise ShapeError("merge", expected, given, "merge partials of the same queries") from None
