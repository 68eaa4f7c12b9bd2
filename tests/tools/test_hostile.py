"""Hostile clients beside honest ones: texts stay right, their pace holds, and memory is bounded."""

import pytest

from tools import hostile
from tools.hostile import Pauses

PACED = Pauses(honest=10.0, hostile=3.0)
"""Some 200 acts and 40 texts a minute, for which a server computes less than half of the time."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("pauses", [PACED, pytest.param(Pauses(), marks=pytest.mark.long)])
def test_honest_clients_are_served_beside_hostile_ones(pauses: Pauses) -> None:
    """60 seconds are four turns of hostile clients. In the first ones each of their acts is done."""
    outcome = hostile.run(60, seed=1, pauses=pauses)
    assert outcome.faults == []
    assert outcome.texts > 0
