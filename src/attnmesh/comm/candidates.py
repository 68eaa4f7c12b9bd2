"""Merge candidates along the tree that merges partials: rows x k x 8 bytes in each of ceil(log2 p) rounds."""

import torch
from torch import Tensor

from attnmesh.comm.p2p import tree_exchange
from attnmesh.comm.topology import rounds
from attnmesh.core.candidates import best
from attnmesh.mesh.axes import Axis


def best_across(candidates: Tensor, axis: Axis, *, unique: bool = False) -> Tensor:
    """Return the best k of the candidates of all ranks, best first, of which each rank passes its own best k.

    Ranks have compared their calls.
    """
    if axis.size == 1 or not candidates.numel():
        return candidates
    k = candidates.shape[-1]

    def merge(messages: Tensor) -> Tensor:
        both = messages.view(torch.int64).unflatten(-1, candidates.shape).movedim(0, -2).flatten(-2)
        return best(both, k, unique=unique).view(torch.uint8).reshape(-1)

    message = candidates.contiguous().view(torch.uint8).reshape(-1)
    merged = tree_exchange(message, rounds(axis, False)[axis.index], axis, merge)
    return merged.view(torch.int64).view(candidates.shape)
