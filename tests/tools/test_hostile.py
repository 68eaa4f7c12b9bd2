"""A minute of hostile clients: honest texts stay right, their pace holds, and memory is bounded."""

import pytest

from tools import hostile


@pytest.mark.timeout(600)
def test_honest_clients_are_served_beside_hostile_ones() -> None:
    outcome = hostile.run(60, seed=1)
    assert outcome.faults == []
    assert outcome.texts > 0
