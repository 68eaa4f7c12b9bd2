"""A rank dies or stops while all are at work: every survivor says which, in time, and nothing is left behind."""

import pytest

import attnmesh as am
from attnmesh.errors import ShapeError
from tests import chaos


@pytest.mark.parametrize("seed", range(12))
def test_survivors_name_the_rank_that_is_lost(seed: int) -> None:
    trouble = chaos.draw(seed)
    said = chaos.suffer(trouble)
    assert set(said) == set(range(trouble.shape.ranks)) - {trouble.victim}, trouble
    for what in said.values():
        assert what.kind == "RankFailure", (trouble, what)
        assert what.ranks == (trouble.victim,), (trouble, what)
        assert what.seconds < trouble.deadline + 5, (trouble, what)
        assert what.step in ("gathering", "giving back", "swapping", "agreeing", "merging"), (trouble, what)


@pytest.mark.parametrize("given", [0, -1.0, True, "soon"])
def test_deadlines_that_are_none_are_refused(given: object) -> None:
    with pytest.raises(ShapeError, match="set_deadline: expected more than 0 seconds"):
        am.set_deadline(given)  # type: ignore[arg-type]
