"""Shares of unequal ranks: by their rates, within the memory of each."""

import pytest

from attnmesh.mesh.shares import recommended_shares

pytestmark = pytest.mark.quick


def test_shares_follow_rates_within_the_memory_of_each_rank() -> None:
    assert recommended_shares((8e9, 2e9)) == (4, 1)
    assert recommended_shares((8e9, 7.5e9)) == (1, 1)  # as equal as measurements are
    assert recommended_shares((8e9, 8e9), (1e9, 9e9), 6e9) == (1, 7)  # the first has memory for an eighth
    assert recommended_shares((6e9, 2e9, 2e9), (1e9, 9e9, 9e9), 3e9) == (2, 3, 3)
    assert recommended_shares((8e9, 2e9), (1e9, 1e9), 60e9) == (4, 1)  # too large for both: that is said elsewhere
