"""Shapes of a mesh: all of them, what a rank receives by each, heads that are shared, and ranks in order of hosts."""

from itertools import product

import pytest
import torch

from attnmesh.errors import MeshError, ShapeError
from attnmesh.mesh.shapes import Shape, check_heads_axis, elements, even_slice, mesh_shapes, rank_grid, share_evenly

pytestmark = pytest.mark.quick


def test_a_rank_receives_keys_along_queries_and_queries_along_keys() -> None:
    """Counted by hand for 8 query heads and 2 key heads: k and v of 2 heads, or q and out of 8, of each other rank."""
    forward = {"training": False, "q_heads": 8, "kv_heads": 2}
    assert elements(Shape(1, 3, 1), **forward) == (0, 2 * (2 + 2), 0)
    assert elements(Shape(1, 1, 3), **forward) == (0, 0, 2 * (8 + 8))
    # Of two ranks along the heads axis each gets half of the other's q, k, v and out: its heads of the other's tokens.
    assert elements(Shape(2, 1, 1), **forward) == ((8 + 2 + 2 + 8) / 2, 0, 0)
    # Backward k and v travel again, and their gradients return; q, out and its gradient travel, and that of q returns.
    assert elements(Shape(1, 2, 2), 8, 2) == (0, (2 + 2 + 2) * 2, (2 + 3) * 8)


@pytest.mark.parametrize(("ranks", "q_heads", "kv_heads"), [(1, 4, 4), (12, 6, 6), (16, 9, 3), (8, 7, 1), (6, 8, 2)])
def test_shapes_are_all_those_that_fit_and_the_first_sends_least(ranks: int, q_heads: int, kv_heads: int) -> None:
    every = [Shape(*sizes) for sizes in product(range(1, ranks + 1), repeat=3)]
    fitting = [shape for shape in every if shape.ranks == ranks and kv_heads % shape.heads == 0]
    for training in (True, False):
        found = mesh_shapes(ranks, q_heads, kv_heads, training=training)
        assert sorted(found) == sorted(fitting)
        sent = [sum(elements(shape, q_heads, kv_heads, training=training)) for shape in found]
        assert sent == sorted(sent)


def test_shards_are_numbered_as_the_places_of_a_mesh_are() -> None:
    shape = Shape(2, 3, 4)
    assert [shape.shard(*place) for place in product(*map(range, shape))] == [*range(24)]


@pytest.mark.parametrize(("count", "parts"), [(0, 3), (5, 3), (6, 3), (2, 4), (17, 5)])
def test_even_slices_are_all_of_it_in_order(count: int, parts: int) -> None:
    slices = [even_slice(count, parts, index) for index in range(parts)]
    assert [place for one in slices for place in range(count)[one]] == [*range(count)]
    sizes = [len(range(count)[one]) for one in slices]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def test_parts_are_shared_evenly_where_slices_have_one_size() -> None:
    for parts, ranks in product(range(1, 13), repeat=2):
        wide, narrow = max(parts, ranks), min(parts, ranks)
        sizes = {len(range(wide)[even_slice(wide, narrow, index)]) for index in range(narrow)}
        assert share_evenly(parts, ranks) == (len(sizes) == 1)


@pytest.mark.parametrize(
    "tile", [Shape(1, 1, 1), Shape(2, 1, 1), Shape(1, 3, 2), Shape(2, 3, 4), Shape(1, 1, 4)], ids=str
)
def test_ranks_of_a_host_hold_a_tile_and_are_consecutive(tile: Shape) -> None:
    shape = Shape(2, 3, 4)
    grid = rank_grid(shape, tile)
    assert sorted(grid.flatten().tolist()) == [*range(24)]
    for first in product(*(range(0, n, t) for n, t in zip(shape, tile, strict=True))):
        h, r, c = (slice(start, start + size) for start, size in zip(first, tile, strict=True))
        ranks = grid[h, r, c].flatten()
        assert torch.equal(ranks - ranks[0], torch.arange(tile.ranks))
        assert int(ranks[0]) % tile.ranks == 0


def test_counts_and_heads_that_do_not_fit_are_refused() -> None:
    for ranks, q_heads, kv_heads in ((0, 4, 4), (2.0, 4, 4), (2, 4, 3), (True, 4, 4)):
        with pytest.raises(MeshError, match="at least one of each, whole groups of heads"):
            mesh_shapes(ranks, q_heads, kv_heads)  # type: ignore[arg-type]
    check_heads_axis("call", Shape(4, 1, 1), 4)
    with pytest.raises(ShapeError, match="given 2 key heads and a heads axis of 4"):
        check_heads_axis("call", Shape(4, 1, 1), 2)
