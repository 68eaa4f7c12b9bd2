"""Rectangles: every visible pair is in one of them, and no other pair; plain problems are few."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attnmesh as am
from attnmesh.core.band import Band
from attnmesh.core.layout import Layout
from attnmesh.core.mask import Mask
from attnmesh.kernels.rectangles import MASKED_TILE_ROWS, Rectangle, cut, cut_into_tiles
from tests.support.truth.problems import draw

pytestmark = pytest.mark.quick


def cover_counts(rectangles: list[Rectangle], rows: int, keys: int) -> torch.Tensor:
    """How often each pair is in a rectangle."""
    count = torch.zeros(rows, keys, dtype=torch.long)
    for rectangle in rectangles:
        count[rectangle.queries, rectangle.keys] += rectangle.visible()
    return count


def band(mask: Mask, length: int, shards: int = 1, q: int = 0, k: int = 0, layout: Layout = am.Contiguous()) -> Band:
    return Band.of(mask, *(layout.positions(length, shards, index) for index in (q, k)))


@given(st.integers(0, 2**48))
def test_every_visible_pair_is_in_one_rectangle_and_no_other_pair(seed: int) -> None:
    problem = draw(seed)
    total = [
        torch.arange(n) if p is None else p.sort().values
        for p, n in zip((problem.q_positions, problem.k_positions), problem.lengths, strict=True)
    ]
    one = Band.of(problem.mask, *total)
    for rectangles in (cut(one), cut_into_tiles(one, 128, 64), cut_into_tiles(one, 3, 5)):
        assert torch.equal(cover_counts(rectangles, *map(len, total)), problem.mask.visible(*total).long())
        assert [b.queries.start for b in rectangles] == sorted(b.queries.start for b in rectangles)


def test_keys_in_order_need_no_positions() -> None:
    mask = am.Window(5, 3) & am.Documents((40, 60))
    one, other = Band.of(mask, torch.arange(100), 100), Band.of(mask, torch.arange(100), torch.arange(100))
    assert torch.equal(one.visible(100), other.visible(100))


@pytest.mark.parametrize(
    ("mask", "kinds"),
    [
        (am.Full(), ["full"]),
        (am.Causal(), ["causal"]),
        (am.Documents((300, 100, 624)), ["full"] * 3),
        (am.Causal() & am.Documents((300, 100, 624)), ["causal"] * 3),
        (am.Window(2000), ["causal"]),
        (am.Window(100), ["causal", *["masked"] * 8]),
    ],
)
def test_a_plain_problem_is_few_plain_rectangles(mask: Mask, kinds: list[str]) -> None:
    assert [kind(rectangle) for rectangle in cut(band(mask, 1024))] == kinds


def kind(rectangle: Rectangle) -> str:
    return "causal" if rectangle.causal else "full" if rectangle.band is None else "masked"


@pytest.mark.parametrize("layout", [am.Contiguous(), am.Zigzag(), am.Striped()])
def test_shards_of_a_causal_problem_are_few_plain_rectangles(layout: Layout) -> None:
    for q in range(4):
        for k in range(4):
            rectangles = cut(band(am.Causal(), 4096, 4, q, k, layout))
            assert len(rectangles) <= 4
            assert all(rectangle.band is None for rectangle in rectangles)


def test_most_pairs_of_many_runs_are_in_rectangles_of_many_rows() -> None:
    rectangles = cut(Band.of(am.Causal(), am.Striped(128).positions(8192, 2, 1), 8192))
    assert len(rectangles) == 2 * 8192 // (2 * 128)  # as many as if each run attended all earlier keys
    rows = {2048: 1, 1024: 2, 512: 4, 256: 8}
    for size, count in rows.items():
        assert [rectangle.queries.stop - rectangle.queries.start for rectangle in rectangles].count(size) == count


@pytest.mark.parametrize("mask", [am.Window(256), am.Causal() & am.Documents([4096] * 16)])
def test_work_and_masks_grow_with_the_length_alone(mask: Mask) -> None:
    rectangles = cut(band(mask, 65536))
    assert sum((b.queries.stop - b.queries.start) * (b.keys.stop - b.keys.start) for b in rectangles) <= 65536 * 4096
    masked = [
        (b.queries.stop - b.queries.start) * (b.keys.stop - b.keys.start) for b in rectangles if b.band is not None
    ]
    assert max(masked, default=0) <= MASKED_TILE_ROWS * (MASKED_TILE_ROWS + 256)


def test_short_documents_share_tiles() -> None:
    assert len(cut(band(am.Causal() & am.Documents([3] * 1000), 3000))) == -(-3000 // MASKED_TILE_ROWS)


def test_few_rows_that_see_the_same_keys_have_no_mask() -> None:
    assert [kind(rectangle) for rectangle in cut(Band.of(am.Full(), torch.arange(5), 3000))] == ["full"]
