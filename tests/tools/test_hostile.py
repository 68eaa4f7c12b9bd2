"""Hostile clients beside honest ones: texts stay right, their pace holds, and memory is bounded."""

import pytest

from tools import hostile


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seconds", [15, pytest.param(60, marks=pytest.mark.long)])
def test_honest_clients_are_served_beside_hostile_ones(seconds: int) -> None:
    """15 seconds are one turn of hostile clients, in which each of their acts is done."""
    outcome = hostile.run(seconds, seed=1)
    assert outcome.faults == []
    assert outcome.texts > 0
