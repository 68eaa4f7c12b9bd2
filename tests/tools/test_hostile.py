"""Hostile clients beside honest ones: texts stay right, memory is bounded, and their pace holds."""

import pytest

from tools import hostile
from tools.hostile import Pauses

PACED = Pauses(honest=10.0, hostile=3.0)
"""Some 200 acts and 40 texts a minute, for which a server computes less than half of the time."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("seconds", "pauses"),
    [(15, PACED), *(pytest.param(60, pauses, marks=pytest.mark.long) for pauses in (PACED, Pauses()))],
    ids=["a turn", "four turns", "four turns without pauses"],
)
def test_honest_clients_are_served_beside_hostile_ones(seconds: int, pauses: Pauses) -> None:
    """15 seconds are one turn of hostile clients. It lasts until each of their acts is done.

    Gaps are compared in the long runs, which have the machine to themselves.
    """
    outcome = hostile.run(seconds, seed=1, pauses=pauses)
    assert outcome.faults + outcome.slow * (seconds > 15) == []
    assert outcome.texts > 0
