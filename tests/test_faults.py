"""Ranks and hosts come to harm while all are at work: what comes is right, or an error in time that names them."""

from typing import Any

import pytest

import attnmesh as am
from attnmesh import shaped
from attnmesh.errors import ClusterError, MeshError
from tests import chaos
from tests.chaos import HARMS, Outcome, Trouble
from tests.test_shaped import needs_hosts


def drawn(ground: str, count: int) -> list[Trouble]:
    """The first troubles on local ranks or on hosts."""
    return [chaos.draw(seed, [ground]) for seed in range(count)]


TROUBLES = [*drawn("hosts", len(HARMS)), *drawn("ranks", len(chaos.can(hosts=False)))]


@pytest.fixture(scope="module")
def outcomes() -> dict[Trouble, Outcome]:
    """What came of those that can be here: a few at a time."""
    try:
        shaped.check_here()
        possible = TROUBLES
    except ClusterError:
        possible = [trouble for trouble in TROUBLES if isinstance(trouble.world, int)]
    return dict(chaos.suffered(possible))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda trouble: f"{trouble.work}, {trouble.harm}, {trouble.world}")
def test_harm_is_survived_or_named(trouble: Trouble, outcomes: dict[Trouble, Outcome]) -> None:
    if not isinstance(trouble.world, int):
        needs_hosts()
    outcome = outcomes[trouble]
    assert not outcome.failed, (trouble, outcome)
    for what in (what for what in outcome.said.values() if what.kind == "RankFailure"):
        assert what.step in ("gathering", "giving back", "swapping", "agreeing", "merging"), (trouble, what)
        assert what.axis in ("heads", "queries", "keys", "queries x keys"), (trouble, what)


def test_every_harm_is_tried() -> None:
    assert {trouble.harm for trouble in TROUBLES} == set(HARMS)


@pytest.mark.parametrize("given", [0, -1.0, True, "soon", float("nan"), float("inf")])
def test_deadlines_that_are_none_are_refused(given: Any) -> None:
    with pytest.raises(MeshError, match="set_deadline: expected more than 0 seconds"):
        am.set_deadline(given)
