"""The keys of an indexer in training on shards: each query is scored against those of all ranks."""

from torch import Tensor

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

    def select(self, scores: Scores, k: int) -> Tensor:
        """Return the best k keys of this rank's queries, (batch, queries, k)."""
        assert self.new_index is not None
        return select_in_shards(scores, self.new_index, self.shards, k)
