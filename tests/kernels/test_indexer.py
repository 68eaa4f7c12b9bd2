"""Scores of an indexer in tiles give the top-k of dense scores, for any tile, mask and padding."""

from collections.abc import Sequence
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import attnmesh as am
from attnmesh.core.candidates import best_candidates, pack_candidates, unpack_candidates
from attnmesh.core.mask import Mask
from attnmesh.kernels import indexer
from attnmesh.kernels.indexer import IndexKeys, indexer_top_k
from attnmesh.kernels.rectangles import TILE_ELEMENTS
from tests.support.process.live_tensors import LiveTensors
from tests.support.truth.problems import indexer_scores
from tests.support.truth.tolerances import FLOAT32_SUMS

HEADS, WIDTH = 4, 8
MASKS = (am.Causal(), am.Window(7), am.Full(), am.Causal() & am.Chunks(9), am.Full() & am.Documents([10, 30]))


def score_heads(keys: Tensor, operands: Sequence[Tensor]) -> Tensor:
    """Return scores of each head, as of MiniMax-M3."""
    return operands[0].transpose(1, 2) @ keys[:, None].mT


def dense(scores: Tensor, visible: Tensor, k: int, block: int) -> list[Tensor]:
    """Return the stable top-k of the blocks' highest scores."""
    scores = scores.masked_fill(~(visible if scores.ndim == 3 else visible[:, None]), -torch.inf)
    blocks = torch.arange(scores.shape[-1]) // block
    shape = *scores.shape[:-1], -(-scores.shape[-1] // block)
    whole = torch.full(shape, -torch.inf).scatter_reduce(-1, blocks.expand_as(scores), scores, "amax")
    return [*unpack_candidates(best_candidates(pack_candidates(whole, torch.arange(shape[-1])), k))]


@given(
    st.integers(0, 9),
    st.sampled_from([(1, 1), (1, 40), (3, 7)]),
    st.sampled_from([1, 5, 60]),
    st.sampled_from([1, 4]),
    st.sampled_from([(40, 40), (600, 90), (1 << 22, 600), (1 << 22, 1 << 22)]),
    st.sampled_from(MASKS),
    st.booleans(),
)
def test_tiles_give_the_top_k_of_dense_scores(
    seed: int, shape: tuple[int, int], k: int, block: int, elements: tuple[int, int], mask: Mask, by_head: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch, rows = shape
    q = torch.randn(batch, rows, HEADS, WIDTH, generator=generator).round()  # with ties
    weights, keys = (
        torch.rand(batch, rows, HEADS, generator=generator),
        torch.randn(batch, 40, WIDTH, generator=generator),
    )
    operands, function = ([q], score_heads) if by_head else ([q, weights], indexer_scores)
    tokens, queries = torch.arange(40), torch.arange(40 - rows, 40)
    padding = torch.rand(batch, 40, generator=generator) < 0.2
    positions = tokens.expand(batch, -1).masked_fill(padding, -1)
    first, last = mask.bounds(queries[None])
    tile, at_once = elements
    with mock.patch.dict(TILE_ELEMENTS, {"cpu": tile}), mock.patch.dict(indexer.AT_ONCE, {"cpu": at_once}):
        found = unpack_candidates(
            indexer_top_k(function, operands, IndexKeys(keys, tokens, positions), first, last, k, block)
        )
    right = dense(function(keys, operands), mask.visible(queries, tokens) & ~padding[:, None], k, block)
    torch.testing.assert_close(found[0], right[0])
    agree = found[1] == right[1]  # the products of a tile may round otherwise
    assert agree.all() or (found[0] - right[0])[~agree & found[0].isfinite()].abs().max() < FLOAT32_SUMS


@pytest.mark.parametrize(("rows", "count"), [(0, 5), (2, 0)])
def test_without_queries_or_keys_nothing_is_selected(rows: int, count: int) -> None:
    operands = torch.randn(1, rows, HEADS, WIDTH), torch.rand(1, rows, HEADS)
    keys = IndexKeys(torch.randn(1, count, WIDTH), torch.arange(count), torch.arange(count)[None])
    bounds = torch.zeros(1, rows, dtype=torch.int64), torch.full((1, rows), 9)
    scores, _ = unpack_candidates(indexer_top_k(indexer_scores, operands, keys, *bounds, 3))
    assert torch.equal(scores, torch.full((1, rows, 3), -torch.inf))


def test_tiles_are_small_and_hidden_ones_are_left_out() -> None:
    sizes = []

    def measured(keys: Tensor, operands: Sequence[Tensor]) -> Tensor:
        sizes.append(keys.shape[1] * operands[0].shape[1] * HEADS)
        return indexer_scores(keys, operands)

    operands = torch.randn(1, 4096, HEADS, 4), torch.rand(1, 4096, HEADS)
    tokens = torch.arange(4096)
    keys, bounds = IndexKeys(torch.randn(1, 4096, 4), tokens, tokens[None]), (0 * tokens[None], tokens[None])
    with LiveTensors() as live:
        indexer_top_k(measured, operands, keys, *bounds, 8)
    candidates = 2 * 4096 * 8 * 8  # those of tiles, and joined
    assert live.most < candidates + 12 * 4 * TILE_ELEMENTS["cpu"] < 4096**2 * 4
    assert max(sizes) <= TILE_ELEMENTS["cpu"]
    assert sum(sizes) < 0.7 * HEADS * 4096**2, "tiles that no query sees are left out"
