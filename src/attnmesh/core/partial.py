"""Partials: attention over some of the keys. Merging them gives attention over all keys.

Every way across ranks (ring, tree, mesh) is an order of merges. The merge is defined here; `all_reduce` of
`comm/transport.py`, `mailbox.cpp` and the Triton programs repeat it, tested against float64. Merges along a tree are
exact since attention is the gradient of an energy, `F(s) = log sum_a exp(q.k_a*scale + s.v_a)`: its value at
`s = 0` is `lse`, its gradient there is the output, and logsumexp is associative.
"""

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor

DTYPE_NAMES = ("float64", "float32", "bfloat16", "float16")
"""Dtypes of q, k and v. Files of caches hold their places: a new one comes last."""


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


def with_sinks(partial: Partial, sinks: Tensor | None) -> Partial:
    """Return the partial merged with sinks, one logit per query head: each is the partial `(0, sink)`.

    There are no gradients in empty rows.
    """
    if sinks is None:
        return partial
    out, lse = partial
    weights, total = _weights(torch.stack(torch.broadcast_tensors(lse, sinks.to(lse.dtype)[:, None])))
    return Partial((out * weights[0]).to(out.dtype), total)


def merge_partials(partials: Sequence[Partial]) -> Partial:
    """Return the merge of partials of equal shapes, without gradients in empty rows."""
    weights, lse = _weights(torch.stack([lse for _, lse in partials]))
    # Summed in order, so that the bits of two terms do not depend on which comes first.
    out = reduce(
        add, [out.to(sum_dtype(out.dtype)) * weight for (out, _), weight in zip(partials, weights, strict=True)]
    )
    return Partial(out.to(reduce(torch.promote_types, [out.dtype for out, _ in partials])), lse)


def merge_into(total: Partial, part: Partial) -> None:
    """Merge `part` into `total` in place. Only the caller holds `total`, whose `out` is in float32 or wider."""
    weights, lse = _weights(torch.stack((total.lse, part.lse)))
    total.out.mul_(weights[0]).addcmul_(part.out.to(total.out.dtype), weights[1])
    total.lse.copy_(lse)


def merge_stack(stacked: Partial) -> Partial:
    """Return the merge of partials stacked along a first dim, in float32 or wider.

    For two partials the bits are those of `merge_partials`.
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
