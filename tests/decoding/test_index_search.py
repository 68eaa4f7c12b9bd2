"""The best tokens of index keys: the same on any number of ranks, and those of all scores in one place."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import attnmesh as am
from attnmesh.core.selection import NO_INDEX
from attnmesh.decoding.index_search import top_k_tokens
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.problems import indexer_scores, numbers

WIDTH, TOKENS = 8, 45


@on_each_rank
def find_best_tokens(ranks: int, padded: bool) -> list[Tensor]:
    """Return the best tokens before and after a fork, of a cache with a sharded prefill, on this rank."""
    mesh = named_mesh(Shape(1, 1, ranks), AXES) if ranks > 1 else None
    sizes = {"batch": 2, "kv_heads": 1, "head_dim": WIDTH, "capacity": 200, "block": 4}
    index = am.KVCache(mesh, **sizes, dtype=torch.float32, values="none")
    keys = numbers(2, 1, TOKENS, WIDTH)
    real = numbers(2, TOKENS, seed=5) > -0.5
    mine = am.Zigzag().positions(30, ranks, dist.get_rank())
    index.append_shard(keys[:, :, mine], None, mine, token_mask=real[:, :30] if padded else None)
    index.append(keys[:, :, 30:], token_mask=real[:, 30:] if padded else None)
    operands = numbers(2, 3, 64, WIDTH, seed=6), numbers(2, 3, 64, seed=7)
    options = {"k": 60, "mask": am.Causal()}
    found = [
        top_k_tokens(index, indexer_scores, operands, **options),
        top_k_tokens(index, indexer_scores, operands, 4, block=5),
    ]
    return [*found, top_k_tokens(index.fork(), indexer_scores, operands, **options)]


@pytest.mark.parametrize("padded", [False, True])
def test_the_best_tokens_do_not_depend_on_the_ranks(pool: Pool, padded: bool) -> None:
    (alone,) = pool.run(1, find_best_tokens, 1, padded)
    for ranks in (2, 3, 4, 6):
        for found in pool.run(ranks, find_best_tokens, ranks, padded):
            assert all(map(torch.equal, found, alone))
    keys, operands = numbers(2, 1, TOKENS, WIDTH)[:, 0], (numbers(2, 3, 64, WIDTH, seed=6), numbers(2, 3, 64, seed=7))
    real = numbers(2, TOKENS, seed=5) > -0.5 if padded else torch.ones(2, TOKENS, dtype=torch.bool)
    seen = am.Causal().visible(torch.arange(TOKENS - 3, TOKENS), torch.arange(TOKENS)) & real[:, None]
    seen = seen & real[:, -3:, None]
    order = indexer_scores(keys, operands).masked_fill(~seen, -torch.inf).sort(-1, descending=True)
    right = order.indices.masked_fill(order.values == -torch.inf, NO_INDEX)
    assert torch.equal(alone[0][..., :TOKENS].long(), right)
    assert (alone[0][..., TOKENS:] == NO_INDEX).all()
    assert torch.equal(alone[0], alone[2])
