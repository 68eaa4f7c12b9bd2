"""The best keys of each query by the scores of an indexer, which are computed a tile of queries and keys at a time.

The best so far are candidates, which merge with those of the next tile. So memory grows with queries times k, and never
with queries times keys. The formula of the scores is the model's own, such as the sum over heads of `w * relu(q.k)`.
"""

from collections.abc import Callable, Sequence
from math import isqrt
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.core.candidates import best_candidates, pack_candidates
from attnmesh.core.storage import columns_of, storage_of
from attnmesh.kernels.rectangles import tile_elements

AT_ONCE = {"cpu": 1 << 17, "cuda": 1 << 27}
"""Scores of a tile that are computed at once: on a CPU those that its second cache holds."""

Score = Callable[[Tensor, Sequence[Tensor]], Tensor]
"""Scores of some keys (batch, keys, dim) for some queries, (batch, queries, keys), or with key heads before queries.

The queries are operands (batch, queries, ...).
"""


class IndexKeys(NamedTuple):
    """Keys of an indexer, and where they stand."""

    keys: Tensor
    """(batch, keys, dim)."""
    token_index: Tensor
    """(keys,), number of each in the whole sequence."""
    positions: Tensor
    """(1 or batch, keys), position of each in its sequence, -1 for padding."""
    dtype: torch.dtype | None = None
    """Dtype in which a score takes keys in 8 bits."""

    def read(self, chosen: slice) -> Tensor:
        """Return some keys as numbers."""
        keys = self.keys[:, chosen]
        storage = storage_of(keys)
        return keys if storage is None else storage.dequantize(keys).to(self.dtype)


def indexer_top_k(
    score: Score, operands: Sequence[Tensor], keys: IndexKeys, first: Tensor, last: Tensor, k: int, block: int = 1
) -> Tensor:
    """Return the best k candidates of each query, (batch, queries, k), or with key heads before queries as the scores.

    Args:
        score: Scores of a tile.
        operands: Tensors of all queries, which are cut into tiles for `score`.
        keys: The keys, their numbers and their positions.
        first: First position that each query sees, (1 or batch, queries).
        last: Last position that each query sees.
        k: Candidates of a query.
        block: Keys per index. The score of a block is the highest of its keys that are seen.

    >>> from attnmesh.core.candidates import unpack_candidates
    >>> def score(keys, operands):
    ...     q, weights = operands
    ...     return torch.einsum("bqh,bhqn->bqn", weights, (q.transpose(1, 2) @ keys[:, None].mT).relu())
    >>> q, weights, keys, index = torch.randn(1, 3, 2, 4), torch.rand(1, 3, 2), torch.randn(1, 9, 4), torch.arange(9)
    >>> positions = torch.arange(6, 9)[None]
    >>> found = indexer_top_k(score, (q, weights), IndexKeys(keys, index, index[None]), 0 * positions, positions, 2)
    >>> hidden = index > positions[..., None]
    >>> right = score(keys, (q, weights)).masked_fill(hidden, -torch.inf).topk(2)
    >>> torch.allclose(unpack_candidates(found)[0], right.values)
    True
    """
    queries, count = first.shape[1], keys.keys.shape[1]
    tile_queries, tile_keys, at_once = _tile(operands, keys.keys, queries, k)
    best_by_tile = list[Tensor]()
    for query in range(0, max(queries, 1), tile_queries):
        some_queries = slice(query, query + tile_queries)
        tiles = list[Tensor]()  # one at most: the best so far
        tile_operands = [x[:, some_queries] for x in operands]
        for key in range(0, max(count, 1), tile_keys):
            some_keys = slice(key, key + tile_keys)
            positions = keys.positions[:, None, some_keys]
            hidden = (positions < first[:, some_queries, None]) | (positions > last[:, some_queries, None])
            if tiles and hidden.is_cpu and bool(hidden.all()):
                continue
            scores = torch.cat([score(part, tile_operands) for part in keys.read(some_keys).split(at_once, 1)], -1)
            scores = scores.masked_fill(hidden if scores.ndim == 3 else hidden[:, None], -torch.inf)
            indices = keys.token_index[some_keys] if block == 1 else keys.token_index[some_keys] // block
            new = pack_candidates(scores, indices)
            tiles = [best_candidates(torch.cat((*tiles, new), -1), k, unique=block > 1)]
        best_by_tile += tiles
    return torch.cat(best_by_tile, -2)


def _tile(operands: Sequence[Tensor], keys: Tensor, queries: int, k: int) -> tuple[int, int, int]:
    """Return the queries and the keys of a tile, and the keys to score at once.

    A tile has more keys than k, if there are: each tile costs a merge of k candidates a query.
    """
    heads = max(1, *(x.shape[2:].numel() // columns_of(keys) for x in operands))
    limits = tile_elements(keys.device), tile_elements(keys.device, AT_ONCE)
    area, at_once = (max(1, scores // (heads * max(1, len(keys)))) for scores in limits)
    tile_queries = max(1, min(queries, isqrt(area)))
    tile_keys = max(1, min(keys.shape[1], max(area // tile_queries, 2 * k)))
    tile_queries = max(1, area // tile_keys)
    return tile_queries, tile_keys, max(1, at_once // tile_queries)
