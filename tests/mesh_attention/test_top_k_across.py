"""`top_k_across` on any number of ranks is the stable top-k of all keys, with the same bits on every rank."""

import math
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import attnmesh as am
from attnmesh.core.candidates import NO_CANDIDATE, best_candidates, pack_candidates
from attnmesh.core.selection import NO_INDEX
from attnmesh.errors import DtypeError
from attnmesh.mesh.axes import Axis
from attnmesh.mesh.reduction_tree import reduction_rounds
from attnmesh.mesh_attention.top_k_across import best_across
from attnmesh.runtime.counters import count_traffic
from tests.support.ranks.groups import world_axis
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.tolerances import assert_near

ROWS, KEYS = (2, 3), 50


def scores_of_all(ties: bool) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(*ROWS, KEYS, generator=generator)
    scores = scores.mul(2).round() if ties else scores
    return scores.masked_fill(torch.rand(*ROWS, KEYS, generator=generator) < 0.2, -torch.inf)


def own(ranks: int) -> Tensor:
    """Return the keys of this rank. The last of several ranks has none."""
    owner = torch.randint(max(1, ranks - 1), (KEYS,), generator=torch.Generator().manual_seed(4))
    return (owner == dist.get_rank()).nonzero().flatten()


class Best(NamedTuple):
    """The best scores, their keys, and the bytes that a rank receives for them."""

    scores: Tensor
    keys: Tensor
    received: int


@on_each_rank
def find_best_across(ties: bool, k: int) -> Best:
    mine = own(dist.get_world_size())
    with count_traffic() as received:
        scores, indices = am.top_k_across(scores_of_all(ties)[..., mine], mine, k, dist.group.WORLD)
    return Best(scores, indices, received.bytes)


def test_the_lowest_numbers_of_float64_are_scores() -> None:
    scores = torch.tensor([-torch.inf, -1e300, 1e300], dtype=torch.float64)
    found, indices = am.top_k_across(scores, torch.arange(3), 3, None)
    assert (indices.tolist(), found.isfinite().tolist()) == ([2, 1, 2**31 - 1], [False, True, False])
    with pytest.raises(DtypeError, match="expected a tensor of floats, given"):
        am.top_k_across(torch.zeros(3).to(torch.float8_e4m3fn), torch.arange(3), 1, None)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize(("ties", "k"), [(False, 7), (True, 7), (True, 60)])
def test_top_k_across_is_the_stable_top_k_of_all_ranks(pool: Pool, ranks: int, ties: bool, k: int) -> None:
    scores, order = scores_of_all(ties).sort(dim=-1, descending=True, stable=True)
    keys = order.masked_fill(scores == -torch.inf, NO_INDEX)
    results = pool.run(ranks, find_best_across, ties, k)
    for best in results:
        assert torch.equal(best.scores[..., :KEYS], scores[..., :k])
        assert torch.equal(best.keys[..., :KEYS], keys[..., :k])
        assert (best.scores[..., KEYS:] == -torch.inf).all()
        assert (best.keys[..., KEYS:] == NO_INDEX).all()
    assert max(best.received for best in results) == math.ceil(math.log2(ranks)) * math.prod(ROWS) * k * 8


@on_each_rank
def find_blocks_in_parts(k: int) -> tuple[Tensor, Tensor]:
    mine = own(dist.get_world_size())
    return am.top_k_across(scores_of_all(True)[..., mine], (mine // 4).int(), k, dist.group.WORLD, unique=True)


def test_parts_of_blocks_on_several_ranks_give_the_top_blocks(pool: Pool) -> None:
    blocks = torch.arange(KEYS).expand(*ROWS, -1) // 4
    whole = torch.full((*ROWS, 13), -torch.inf).scatter_reduce(-1, blocks, scores_of_all(True), "amax")
    right = am.top_k_across(whole, torch.arange(13), 5, None)
    for ranks in (2, 4, 6):
        for got in pool.run(ranks, find_blocks_in_parts, 5):
            assert all(map(torch.equal, got, right))


@on_each_rank
def check_dtype(dtype: torch.dtype) -> None:
    scores, mine = scores_of_all(False).to(dtype), own(dist.get_world_size())
    with torch.no_grad():
        compiled = torch.compile(
            lambda x: am.top_k_across(x, mine, 4, dist.group.WORLD), fullgraph=True, backend="eager"
        )
        pairs = am.top_k_across(scores[..., mine], mine, 4, dist.group.WORLD), compiled(scores[..., mine])
    right = am.top_k_across(scores.float(), torch.arange(KEYS), 4, None) if dist.get_world_size() == 1 else pairs[0]
    for x, y, z in zip(*pairs, right, strict=True):
        assert_near(y, x)
        assert x.dtype == z.dtype, (x, z)


def test_scores_of_any_dtype_compile_to_one_graph(pool: Pool) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        for ranks in (1, 2):
            pool.run(ranks, check_dtype, dtype)


def test_nan_is_returned_first() -> None:
    scores, indices = am.top_k_across(torch.tensor([math.inf, math.nan]), torch.tensor([0, 1]), 2, None)
    assert scores.isnan().tolist() == [True, False]
    assert indices.tolist() == [1, 0]


@pytest.mark.parametrize("ranks", range(1, 18))
def test_the_tree_has_the_fewest_rounds(ranks: int) -> None:
    assert max(map(len, reduction_rounds([[*range(ranks)]]).values())) == math.ceil(math.log2(ranks))


def candidates(ranks: int, k: int = 4) -> Tensor:
    """Return each rank's best candidates, of two rows: rank r has keys r, r + ranks and so on. All have key 99."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(ranks, 2, 6, generator=generator)
    keys = torch.arange(6) * ranks + torch.arange(ranks)[:, None, None]
    keys = keys.expand(ranks, 2, 6).clone()
    keys[..., 0], scores[..., 0] = 99, 5.0 + torch.arange(ranks)[:, None]
    return best_candidates(pack_candidates(scores, keys), k)


@on_each_rank
def find_best_of_ranks(unique: bool) -> Tensor:
    axis = world_axis()
    return best_across(candidates(axis.size)[axis.index], axis, unique=unique)


@pytest.mark.parametrize("unique", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_best_of_all_ranks_are_those_of_their_union(ranks: int, unique: bool, pool: Pool) -> None:
    union = candidates(ranks).movedim(0, 1).flatten(1)
    expected = best_candidates(union, 4, unique=unique)
    assert (expected != best_candidates(union, 4, unique=not unique)).any(), "the ranks share a key"
    for found in pool.run(ranks, find_best_of_ranks, unique):
        assert torch.equal(found, expected)


def test_the_best_of_one_rank_are_its_own() -> None:
    mine = torch.full((2, 3), NO_CANDIDATE)
    assert best_across(mine, Axis()) is mine
