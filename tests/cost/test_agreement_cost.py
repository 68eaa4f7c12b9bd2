"""The price of a comparison: the numbers of each rank reach all others, along one mesh axis after the other."""

import pytest

import attnmesh as am
from attnmesh.cost.agreement_cost import SENT_VALUES, add_agreement
from attnmesh.cost.candidate_mesh import CandidateMesh, Cost
from attnmesh.mesh.shapes import Shape

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    "shape", [Shape(1, 1, 1), Shape(1, 1, 4), Shape(2, 1, 2), Shape(2, 3, 1), Shape(2, 2, 2)], ids=str
)
def test_each_rank_gets_the_numbers_of_each_other_rank_once(shape: Shape) -> None:
    total = Cost()
    cluster = am.Cluster.preset("dgx-h100").sized(1, shape.ranks)
    add_agreement(CandidateMesh(shape, shape, am.Contiguous(), "bulk"), cluster, total)
    assert (total.inside, total.between) == (shape.ranks * (shape.ranks - 1) * SENT_VALUES * 8, 0)
    assert (total.seconds > 0) == (shape.ranks > 1)
