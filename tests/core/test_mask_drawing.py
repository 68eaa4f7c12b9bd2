"""Drawings of masks: a sign for each pair that is seen, or the rank that computes it."""

from itertools import product

import pytest

import attnmesh as am
from attnmesh.core import mask_drawing

pytestmark = pytest.mark.quick


def test_a_pair_that_is_seen_is_a_sign() -> None:
    assert am.Window(1).draw(3) == ["# . .", "# # .", ". # #"]
    assert am.Full().draw(1) == ["#"]


@pytest.mark.parametrize("layout", [am.Contiguous(), am.Zigzag(), am.Striped(2)], ids=str)
@pytest.mark.parametrize("shape", [am.Shape(1, 2, 3), am.Shape(2, 1, 2), am.Shape(1, 4, 1)], ids=str)
def test_a_pair_is_drawn_as_the_rank_at_its_row_and_column(layout: am.Zigzag, shape: am.Shape) -> None:
    """The rank at (r, c) attends the queries of all shards of row r to the keys of all shards of column c."""
    places = {}
    for shard, (_, r, c) in enumerate(product(*map(range, shape))):
        places |= dict.fromkeys(layout.positions(12, shape.ranks, shard).tolist(), (r, c))
    expected = [
        " ".join(str(places[query][0] * shape.keys + places[key][1]) if key <= query else "." for key in range(12))
        for query in range(12)
    ]
    assert am.Causal().draw(12, layout, shape) == expected


def test_signs_of_ranks_begin_anew_after_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_drawing, "RANK_CHARACTERS", "01")
    assert am.Full().draw(3, am.Contiguous(), (1, 3, 1)) == ["0 0 0", "1 1 1", "0 0 0"]
