"""A layer of a `ShardedCache` whose queries select their keys: it also has the keys of the layer's indexer."""

from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from attnmesh.decoding.index_search import top_k_tokens
from attnmesh.errors import KernelError
from attnmesh.hf.cache.layer import ShardedLayer, TailLayer, append_sequence
from attnmesh.hf.cache.layer_protocols import LayersCache
from attnmesh.hf.models import SUBJECT
from attnmesh.hf.sharded_sequence import ShardedSequence
from attnmesh.hf.sparse.scores import IndexScores
from attnmesh.hf.sparse.select import KeyScores, select_in_shards
from attnmesh.mesh_attention.sharding import shard


class IndexedLayer(ShardedLayer):
    """Keys and values of one layer, or its latents, and the keys of its indexer, in a cache of the same tokens."""

    other_formats: Mapping[str, str] = {"index": "none"}
    index_is_quantized = True
    """True if index keys are stored as `storage=` of the cache says."""

    def __init__(self, cache: LayersCache) -> None:
        super().__init__(cache)
        self.new_index_keys: Tensor | None = None

    def update_indexer(self, keys: Tensor) -> IndexScores:
        """Return the keys of the indexer, (batch, tokens, dim), for the model to score."""
        self.new_index_keys = keys
        return IndexScores.keys(keys, self)

    def update_index(self, keys: Tensor) -> NoReturn:
        """Raise: an indexer that calls this scores all keys before it knows their mask."""
        expected, given = "an indexer that is prepared for a mesh", "one that is not"
        raise KernelError(f"{SUBJECT} indexer", expected, given, "call hf.generate or hf.prefill with the cache")

    @torch.no_grad()
    def select(self, scores: KeyScores, k: int) -> Tensor:
        """Store the new keys of the indexer. Return the best k tokens of each query, (batch, queries, k).

        Each rank scores its own keys for the queries of all ranks. In a prompt without earlier tokens the keys travel.
        """
        assert self.new_index_keys is not None
        new = self.new_index_keys[:, None]
        layer_mask = scores.recognised
        sequence: ShardedSequence | None = layer_mask.sequence
        tokens = new.shape[2] if sequence is None else sequence.length
        storage = self.sharded_cache.settings.storage if self.index_is_quantized else None
        index = self.reserve_other("index", new, tokens, storage=storage)
        if sequence is None:
            index.append(new, token_mask=None if layer_mask.token_mask is None else layer_mask.token_mask[:, -tokens:])
            return self._best(scores, scores.operands, k)
        if scores.whole:
            index.append(new, token_mask=sequence.token_mask)
        else:
            append_sequence(index, new, None, sequence)
        if not sequence.has_prefix:
            return select_in_shards(scores, new[:, 0], sequence, k)
        operands = [sequence.gather_tokens(x) for x in scores.operands]
        return shard(self._best(scores, operands, k), sequence.mesh, layout=sequence.layout, dim=-2)

    def _best(self, scores: KeyScores, operands: Sequence[Tensor], k: int) -> Tensor:
        """Return the best k stored tokens of each query. `operands` are of the last tokens, the queries."""
        return top_k_tokens(
            self.other_kv_caches["index"], scores.run, operands, k, mask=scores.recognised.mask, block=scores.block
        )


class PooledLayer(TailLayer, IndexedLayer):
    """An indexed layer whose index keys are means of blocks.

    The last tokens, of which the next means are made, are on all ranks.
    """

    index_is_quantized = False
    """Rows of means have a column that is -inf where a block is incomplete."""

    indexer_position_ids = property(lambda _: None, lambda *_: None)
    """Positions of all tokens, which a model keeps here and reads. None: keys are rotated before they are stored."""

    @property
    def lengths(self) -> Tensor | int:
        """Tokens of each sequence."""
        return self.other_kv_caches["index"].lengths if self.other_kv_caches else 0

    def join_earlier(self, rows: Tensor, count: int) -> Tensor:
        """Return the rows of the `count` tokens before, then `rows` of all new tokens, (batch, tokens, width).

        Keep the last `count` of them.
        """
        earlier = self.tensors.get("rows", rows.new_zeros(len(rows), count, rows.shape[2]))
        joined = torch.cat((earlier, rows), 1)
        self.tensors = {"rows": joined[:, joined.shape[1] - count :]}
        return joined
