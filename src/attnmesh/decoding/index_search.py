"""The best tokens of a cache of index keys: each rank scores its own, and candidates merge along a tree."""

from collections.abc import Sequence

import torch
from torch import Tensor

from attnmesh.cache.cache import KVCache
from attnmesh.core.candidates import best_candidates, unpack_candidates
from attnmesh.core.mask import Causal, Mask
from attnmesh.kernels.indexer import IndexKeys, Score, indexer_top_k
from attnmesh.mesh_attention.top_k_across import best_across


@torch.no_grad()
def top_k_tokens(
    cache: KVCache,
    score: Score,
    operands: Sequence[Tensor],
    k: int,
    *,
    mask: Mask = Causal(),
    block: int = 1,
    last: Tensor | None = None,
) -> Tensor:
    """Return the k best tokens of a cache of one key head for its last queries, alike on all ranks.

    Ranks do not compare this call. What it returns is compared by `decode(selected=)`.

    Args:
        cache: Index keys, whose heads axis has one rank.
        score: Scores of some keys for some queries, as in `indexer_top_k`.
        operands: Tensors of the queries of the last tokens, (batch, queries, ...), equal on all ranks.
        k: Tokens or blocks of a query.
        mask: Which tokens a query sees. Padding is never seen.
        block: Tokens per index.
        last: The last key that each query sees, (queries,), -1 for none, in a cache of keys that each stand for many
            tokens. It takes the place of the mask, and all earlier keys are seen.

    Returns:
        Indices in int32, (batch, queries, k), or with key heads before queries as the scores, the best first. Where a
        query sees fewer they end with 2^31 - 1.

    >>> cache = KVCache(None, batch=1, kv_heads=1, head_dim=4, capacity=100, dtype=torch.float32, values="none")
    >>> cache.append(torch.eye(4)[None, None])
    >>> top_k_tokens(cache, lambda keys, operands: operands[0] @ keys.mT, [torch.tensor([[[1.0, 5.0, 3.0, 2.0]]])], 2)
    tensor([[[1, 2]]], dtype=torch.int32)
    """
    view, parts = cache.own_shard.view, []
    bounds = view.bounds(operands[0].shape[1], mask) if last is None else (torch.zeros_like(last)[None], last[None])
    for piece in (*view.earlier_pieces, view):
        filled = piece.without_free_slots()
        keys = IndexKeys(filled.keys[:, 0], filled.token_index, filled.positions(), cache.config.dtype)
        parts.append(indexer_top_k(score, operands, keys, *bounds, k, block))
    candidates = parts[0] if len(parts) == 1 else best_candidates(torch.cat(parts, -1), k, unique=block > 1)
    return unpack_candidates(best_across(candidates, cache.token_axis, unique=block > 1))[1]
