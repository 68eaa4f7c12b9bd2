"""A rank dies or stops while all are at work: every survivor says which, in time, and nothing is left behind."""

import pytest

import attnmesh as am
from attnmesh.errors import MeshError
from tests import chaos


@pytest.mark.timeout(240)
def test_survivors_name_the_rank_that_is_lost() -> None:
    for trouble, said in chaos.suffered(range(12)):
        assert chaos.verdict(trouble, said) == "named in time", (trouble, said)
        for what in said.values():
            assert what.step in ("gathering", "giving back", "swapping", "agreeing", "merging"), (trouble, what)
            assert what.axis in ("heads", "queries", "keys", "queries x keys"), (trouble, what)


@pytest.mark.parametrize("given", [0, -1.0, True, "soon", float("nan"), float("inf")])
def test_deadlines_that_are_none_are_refused(given: object) -> None:
    with pytest.raises(MeshError, match="set_deadline: expected more than 0 seconds"):
        am.set_deadline(given)  # type: ignore[arg-type]
