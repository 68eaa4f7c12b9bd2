"""The surroundings of ranks: their hosts, and what is known of these."""

import pytest
import torch

from attnmesh.comm.topology import agreed_cluster_and_tile
from attnmesh.mesh.axes import Axis, RankMesh
from attnmesh.mesh.shapes import Shape

pytestmark = pytest.mark.quick


def test_one_rank_is_a_cluster_of_its_own() -> None:
    one = RankMesh(Axis(), Axis(), Axis())
    cluster, tile = agreed_cluster_and_tile(one, torch.device("cpu"))
    assert (cluster.world, tile) == (1, Shape(1, 1, 1))
