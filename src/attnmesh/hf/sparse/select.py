"""The best keys of each query, of a sequence in shards."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from attnmesh.attention.sharding import unshard
from attnmesh.core.candidates import unpack
from attnmesh.hf.shards import Shards
from attnmesh.kernels.indexer import IndexKeys, indexer_top_k


class Scores(Protocol):
    """Scores of an indexer's keys, before they are computed."""

    operands: tuple[Tensor, ...]
    spec: Any
    block: int
    whole: bool
    """True if each rank passes the keys of all ranks' tokens."""

    def run(self, keys: Tensor, operands: Sequence[Tensor]) -> Tensor:
        """Return the scores of some keys for some queries, as `indexer_top_k` takes them."""


def all_tokens(x: Tensor, shards: Shards, dim: int) -> Tensor:
    """Return a tensor of this rank's tokens along `dim` as one of all ranks' tokens."""
    return unshard(x, shards.mesh, layout=shards.layout, length=shards.length, dim=dim)


@torch.no_grad()
def select_in_shards(scores: Scores, new: Tensor, shards: Shards, k: int) -> Tensor:
    """Return the best k keys of this rank's queries. The keys of all ranks, (batch, tokens, dim), come to them."""
    keys, device = new if scores.whole else all_tokens(new, shards, dim=1), new.device
    tokens = torch.arange(shards.length, device=device)
    first, last = (x.to(device)[None] for x in shards.mask_of(scores.spec.mask).bounds(shards.positions()))
    index = IndexKeys(keys, tokens, tokens[None])
    return unpack(indexer_top_k(scores.run, scores.operands, index, first, last, k, scores.block))[1]
