"""The best keys of each query, of a sequence in shards."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnmesh.core.candidates import unpack_candidates
from attnmesh.hf.sharded_sequence import ShardedSequence
from attnmesh.hf.sparse.scores import IndexScores
from attnmesh.kernels.indexer import IndexKeys, indexer_top_k


class KeyScores(Protocol):
    """Scores of an indexer's keys, before they are computed."""

    operands: tuple[Tensor, ...]
    recognised: Any
    block: int
    whole: bool
    """True if each rank passes the keys of all ranks' tokens."""

    def run(self, keys: Tensor, operands: Sequence[Tensor]) -> Tensor:
        """Return the scores of some keys for some queries, as `indexer_top_k` takes them."""


@torch.no_grad()
def select_in_shards(scores: KeyScores, new: Tensor, sequence: ShardedSequence, k: int) -> Tensor:
    """Return the best k keys of this rank's queries, of the keys of all ranks.

    Collective: `new` has this rank's keys, (batch, tokens, dim), which are gathered. Not if `scores.whole`: then `new`
    has the keys of all ranks.
    """
    keys = new if scores.whole else sequence.gather_tokens(new)
    device = new.device
    token_index = torch.arange(sequence.length, device=device)
    first, last = (x.to(device)[None] for x in sequence.mask_of(scores.recognised.mask).bounds(sequence.positions()))
    index = IndexKeys(keys, token_index, token_index[None])
    return unpack_candidates(indexer_top_k(scores.run, scores.operands, index, first, last, k, scores.block))[1]


class ShardKeys:
    """Stand-in for the cache in an indexer's call: the keys of this rank's tokens."""

    def __init__(self, sequence: ShardedSequence) -> None:
        self.sequence = sequence
        self.new_index_keys: Tensor | None = None

    def update_indexer(self, keys: Tensor, layer_idx: int) -> IndexScores:
        """Return the keys for the indexer to score."""
        self.new_index_keys = keys
        return IndexScores.keys(keys, self)

    lengths = 0
    """Tokens of each sequence before these."""

    def join_earlier(self, rows: Tensor, count: int) -> Tensor:
        """Return `count` rows of zeros for the tokens before, then `rows` of all tokens, (batch, tokens, width)."""
        return pad(rows, (0, 0, count, 0))

    def select(self, scores: KeyScores, k: int) -> Tensor:
        """Return the best k keys of this rank's queries, (batch, queries, k)."""
        assert self.new_index_keys is not None
        return select_in_shards(scores, self.new_index_keys, self.sequence, k)
