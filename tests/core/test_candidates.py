"""Candidates are a commutative monoid: any partition and any order of merges gives the best k of the whole."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnmesh.core.candidates import NO_CANDIDATE, best_candidates, pack_candidates, unpack_candidates
from attnmesh.core.selection import NO_INDEX

NUMBERS = st.sampled_from([-math.inf, -2.5, -0.0, 0.0, 1e-45, 1.0, 1.0 + 2**-23, 3.0, math.inf])


@st.composite
def parts(draw: st.DrawFn) -> tuple[Tensor, Tensor, int, list[list[int]]]:
    """Draw scores, indices in any order, k, and a partition of the keys in any order."""
    scores = draw(st.lists(NUMBERS, max_size=40))
    indices = draw(st.permutations([3 * i for i in range(len(scores))]))
    owners = draw(st.lists(st.integers(0, 4), min_size=len(scores), max_size=len(scores)))
    order = draw(st.permutations(range(5)))
    groups = [[i for i, owner in enumerate(owners) if owner == rank] for rank in order]
    k = draw(st.integers(1, 12))
    return torch.tensor(scores).float(), torch.tensor(indices, dtype=torch.int64), k, groups


def stable_top_k(scores: Tensor, indices: Tensor, k: int) -> list[tuple[float, int]]:
    pairs = [(s + 0.0, i) for s, i in zip(scores.tolist(), indices.tolist(), strict=True) if s > -math.inf]
    pairs = sorted(pairs, key=lambda pair: (-pair[0], pair[1]))[:k]
    return pairs + [(-math.inf, NO_INDEX)] * (k - len(pairs))


def pairs(candidates: Tensor) -> list[tuple[float, int]]:
    scores, indices = unpack_candidates(candidates)
    return list(zip(scores.tolist(), indices.tolist(), strict=True))


@given(parts())
def test_any_partition_and_order_gives_the_best_of_all(problem: tuple[Tensor, Tensor, int, list[list[int]]]) -> None:
    scores, indices, k, groups = problem
    lists = [best_candidates(pack_candidates(scores[group], indices[group]), k) for group in groups]
    left, right = lists[0], lists[-1]
    for each in lists[1:]:
        left = best_candidates(torch.cat((left, each)), k)
    for each in lists[-2::-1]:
        right = best_candidates(torch.cat((each, right)), k)
    assert pairs(left) == stable_top_k(scores, indices, k)
    assert torch.equal(left, right)


@given(parts())
def test_empty_is_the_identity_and_unique_is_idempotent(problem: tuple[Tensor, Tensor, int, list[list[int]]]) -> None:
    scores, indices, k, _ = problem
    found = best_candidates(pack_candidates(scores, indices), k)
    assert torch.equal(best_candidates(torch.cat((found, torch.full((k,), NO_CANDIDATE))), k), found)
    assert torch.equal(best_candidates(torch.cat((found, found)), k, unique=True), found)


@given(parts(), st.integers(1, 5))
def test_unique_keeps_the_highest_score_of_parts(
    problem: tuple[Tensor, Tensor, int, list[list[int]]], block: int
) -> None:
    scores, indices, k, groups = problem
    blocks = indices // (3 * block)
    whole = torch.full((len(scores) + 1,), -torch.inf).scatter_reduce(0, blocks, scores, "amax")
    lists = [best_candidates(pack_candidates(scores[group], blocks[group]), k, unique=True) for group in groups]
    found = lists[0]
    for each in lists[1:]:
        found = best_candidates(torch.cat((found, each)), k, unique=True)
    assert pairs(found) == stable_top_k(whole, torch.arange(len(whole)), k)


@given(parts())
def test_unpacking_returns_what_was_packed(problem: tuple[Tensor, Tensor, int, list[list[int]]]) -> None:
    scores, indices, *_ = problem
    found, places = unpack_candidates(pack_candidates(scores, indices))
    real = scores > -torch.inf
    assert torch.equal(found, scores)
    assert torch.equal(places[real].long(), indices[real])
    assert (places[~real] == NO_INDEX).all()


def test_nan_of_any_sign_comes_first_and_is_returned() -> None:
    scores, indices = unpack_candidates(
        best_candidates(pack_candidates(torch.tensor([math.inf, -math.nan, 1.0, math.nan]), torch.arange(4)), 3)
    )
    assert scores.isnan().tolist() == [True, True, False]
    assert indices.tolist() == [1, 3, 0]


def test_the_lowest_numbers_of_float64_are_scores() -> None:
    lowest, *others = pairs(pack_candidates(torch.tensor([-1e300, -math.inf], dtype=torch.float64), torch.arange(2)))
    assert lowest == (torch.finfo(torch.float32).min, 0)
    assert others == [(-math.inf, NO_INDEX)]


def test_the_largest_index_and_rows_of_no_entry_have_a_place() -> None:
    assert pairs(pack_candidates(torch.tensor([1.0, 1.0]), torch.tensor([NO_INDEX - 1, NO_INDEX]))) == [
        (1.0, NO_INDEX - 1),
        (-math.inf, NO_INDEX),
    ]
    for unique in (False, True):
        assert (
            best_candidates(torch.zeros(2, 3, 0, dtype=torch.int64), 4, unique=unique).tolist()
            == [[[NO_CANDIDATE] * 4] * 3] * 2
        )
