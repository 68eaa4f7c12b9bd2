"""Published schemes: the best plan of each is the fastest of its name."""

import pytest

import attnmesh as am
from attnmesh.cli.scheme_curves import SCHEME_STYLES
from attnmesh.planner.schemes import best_by_scheme
from tests.support.planning.planned import CLUSTER


@pytest.mark.parametrize("phase", ["training", "prefill", "decode"])
def test_the_best_of_each_scheme_is_the_fastest(phase: str) -> None:
    work = am.Workload(16, 4, 64, 16384, phase=phase)
    plans, best = am.plan(work, CLUSTER), best_by_scheme(work, CLUSTER)
    assert {one.known_as for one in plans} == {*best} <= {*SCHEME_STYLES}
    for name, one in best.items():
        assert one.seconds == min(other.seconds for other in plans if other.known_as == name)
    assert next(iter(best.values())) == plans[0]
