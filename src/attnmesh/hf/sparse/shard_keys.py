"""The keys of an indexer in training on shards: each query is scored against those of all ranks."""

from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from attnmesh.hf.shards import Shards
from attnmesh.hf.sparse.scores import IndexScores
from attnmesh.hf.sparse.select import Scores, select_in_shards


class ShardKeys:
    """Stand-in for the cache in an indexer's call: the keys of this rank's tokens."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self.new_index: Tensor | None = None

    def update_indexer(self, keys: Tensor, layer_idx: int) -> IndexScores:
        """Return the keys for the indexer to score."""
        self.new_index = keys
        return IndexScores.keys(keys, self)

    lengths = 0
    """Tokens of each sequence before these."""

    def with_earlier(self, rows: Tensor, count: int) -> Tensor:
        """Return rows of all tokens (batch, tokens, width) after those of so many tokens before them: zeros."""
        return pad(rows, (0, 0, count, 0))

    def queries(self, *_: Any) -> Tensor:
        """Return the tokens of this rank."""
        return self.shards.positions()

    def select(self, scores: Scores, k: int) -> Tensor:
        """Return the best k keys of this rank's queries, (batch, queries, k)."""
        assert self.new_index is not None
        return select_in_shards(scores, self.new_index, self.shards, k)
