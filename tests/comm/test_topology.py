"""The surroundings of ranks: their hosts, and what is known of these."""

import pytest
import torch

from attnmesh.comm.topology import surroundings
from attnmesh.mesh.axes import Axis, Mesh
from attnmesh.mesh.shapes import Shape

pytestmark = pytest.mark.quick


def test_surroundings_of_one_rank_are_itself() -> None:
    one = Mesh(Axis(), Axis(), Axis())
    cluster, tile = surroundings(one, torch.device("cpu"))
    assert (cluster.world, tile) == (1, Shape(1, 1, 1))
