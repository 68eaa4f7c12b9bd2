"""Hostile clients beside honest ones: texts stay right, memory is bounded, and their pace holds."""

import pytest

from tools import hostile
from tools.hostile import Pauses

PACED = Pauses(honest=10.0, hostile=3.0)
"""Some 200 acts and 40 texts a minute, for which a server computes less than half of the time."""


@pytest.mark.timeout(600)
def test_honest_clients_are_served_in_a_turn_of_hostile_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The turn is a short one. It lasts until each act of the hostile clients is done."""
    monkeypatch.setattr(hostile, "QUIET", 2.0)
    monkeypatch.setattr(hostile, "HARASSED", 4.0)
    outcome = hostile.run(6, seed=1, pauses=PACED)
    assert outcome.faults == []
    assert outcome.texts > 0


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("pauses", [PACED, Pauses()], ids=["paced", "without pauses"])
def test_honest_clients_keep_their_pace_in_four_turns(pauses: Pauses) -> None:
    """Gaps are compared here alone: long runs have the machine to themselves."""
    outcome = hostile.run(60, seed=1, pauses=pauses)
    assert outcome.faults + outcome.slow == []
    assert outcome.texts > 0
