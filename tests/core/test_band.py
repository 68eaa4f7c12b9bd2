"""Bands: of each query the run of keys that its mask lets it see, and parts of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import attnmesh as am
from attnmesh.core.band import Band
from attnmesh.core.mask import Mask

pytestmark = pytest.mark.quick

MASKS = (am.Full(), am.Causal(), am.Window(3), am.Window(2, 4), am.Causal() & am.Chunks(5), am.Documents([4, 1, 15]))
POSITIONS = st.sets(st.integers(0, 19), min_size=1).map(lambda places: torch.tensor(sorted(places)))


def test_a_window_of_two_sees_runs_of_three_keys() -> None:
    band = Band.of(am.Window(2), torch.arange(5), 5)
    assert (band.low.tolist(), band.high.tolist()) == ([0, 0, 0, 1, 2], [1, 2, 3, 4, 5])


def test_bounds_within_some_keys_count_from_the_first_of_them() -> None:
    part = Band.of(am.Window(1), torch.arange(6), 6).within(1, 3)
    assert (part.low.tolist(), part.high.tolist()) == ([0, 0, 0, 1, 2, 2], [0, 1, 2, 2, 2, 2])


@given(st.sampled_from(MASKS), POSITIONS, POSITIONS | st.integers(0, 20))
def test_a_band_is_the_mask_over_the_positions_of_its_keys(mask: Mask, queries: Tensor, keys: Tensor | int) -> None:
    places = torch.arange(keys) if isinstance(keys, int) else keys
    expected = mask.visible(queries, places)
    band = Band.of(mask, queries, keys)
    assert torch.equal(band.visible(len(places)), expected)
    for bound in (band.low, band.high):  # also of queries far beyond the keys
        assert 0 <= int(bound.min()) <= int(bound.max()) <= len(places)


@given(st.sampled_from(MASKS), POSITIONS, POSITIONS, st.data())
def test_parts_of_a_band_are_parts_of_the_mask(mask: Mask, queries: Tensor, keys: Tensor, data: st.DataObject) -> None:
    band, dense = Band.of(mask, queries, keys), mask.visible(queries, keys)
    start = data.draw(st.integers(0, len(keys)))
    stop = data.draw(st.integers(start, len(keys)))
    assert torch.equal(band.within(start, stop).visible(stop - start), dense[:, start:stop])
    assert torch.equal(band.first(stop).visible(len(keys)), dense & (torch.arange(len(keys)) < stop))
    first = data.draw(st.integers(0, len(queries)))
    assert torch.equal(band.select_queries(first, len(queries), start).visible(stop - start), dense[first:, start:stop])
