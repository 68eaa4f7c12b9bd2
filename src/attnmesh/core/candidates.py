"""Candidates: a score and the index of its key in one int64, so that a top-k is a merge of integers.

The upper half is the score as float32, its bits as an integer in the order of the numbers; -0.0 counts as 0.0, and NaN
comes above all numbers, as in `torch.topk`. The lower half is the complement of the index. Two candidates of different
keys are never equal, and of equal scores the lowest index comes first. So the best k of a union are the best k of the
best k of its parts, in any order of merges. No candidate at all is `NO_CANDIDATE`, the identity.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnmesh.core.selection import NO_INDEX

NO_CANDIDATE = torch.iinfo(torch.int64).min
"""The identity of the merge: no candidate."""

LOW_BITS = torch.iinfo(torch.int32).max
"""All bits of an int32 but the sign."""


def pack_candidates(scores: Tensor, indices: Tensor) -> Tensor:
    """Return the candidates of keys. A score of -inf and an index of `NO_INDEX` stand for no key."""
    numbers = (scores.to(torch.float32) + 0.0).nan_to_num(torch.nan, torch.inf, -torch.inf)  # NaN of one sign
    if scores.dtype == torch.float64:  # the lowest of float64 are finite, and stay so
        numbers = numbers.masked_fill((numbers == -torch.inf) & (scores > -torch.inf), torch.finfo(torch.float32).min)
    ordered = _ordered(numbers.view(torch.int32))
    candidates = (ordered.to(torch.int64) << 32) | (LOW_BITS - indices.to(torch.int64))
    return candidates.masked_fill((numbers == -torch.inf) | (indices == NO_INDEX), NO_CANDIDATE)


def unpack_candidates(candidates: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scores in float32 and the indices in int32, (-inf, `NO_INDEX`) for no candidate."""
    empty = candidates == NO_CANDIDATE
    scores = _ordered((candidates >> 32).to(torch.int32)).view(torch.float32)
    indices = (LOW_BITS - (candidates & LOW_BITS)).to(torch.int32)
    return scores.masked_fill(empty, -torch.inf), indices.masked_fill(empty, NO_INDEX)


def best_candidates(candidates: Tensor, k: int, *, unique: bool = False) -> Tensor:
    """Return the best k candidates of the last dim, best first, with `NO_CANDIDATE` where there are fewer.

    With `unique`, of several candidates of one index the one of the highest score stays.

    >>> top = best_candidates(pack_candidates(torch.tensor([0.5, 2.0, 2.0]), torch.tensor([7, 8, 3])), 4)
    >>> [numbers.tolist() for numbers in unpack_candidates(top)]
    [[2.0, 2.0, 0.5, -inf], [3, 8, 7, 2147483647]]
    """
    if unique:
        ranked = candidates.sort(-1, descending=True).values
        index, order = (ranked & LOW_BITS).sort(dim=-1, stable=True)
        repeats = pad(index[..., 1:] == index[..., :-1], (min(1, index.shape[-1]), 0))
        candidates = ranked.gather(-1, order).masked_fill(repeats, NO_CANDIDATE)
    top = candidates.topk(min(k, candidates.shape[-1]), -1).values
    return pad(top, (0, k - top.shape[-1]), value=NO_CANDIDATE)


def _ordered(bits: Tensor) -> Tensor:
    """Return the bits of floats as integers in the order of the floats, or those integers as bits: its own inverse."""
    return bits ^ ((bits >> 31) & LOW_BITS)
