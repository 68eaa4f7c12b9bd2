"""Merges between ranks: what each costs."""

import pytest

import attnmesh as am
from attnmesh.mesh.merge_cost import MergeGroup, MessageSize
from attnmesh.mesh.merges import MERGES

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("how", MERGES)
def test_merges_cost_more_on_more_ranks(how: str) -> None:
    cluster, seconds = am.Cluster.preset("dgx-h100"), []
    for ranks in (2, 8, 16, 64, 128):
        seconds.append(MERGES[how].seconds(MergeGroup(ranks, min(8, ranks)), MessageSize(128.0, 128), cluster))
    assert seconds == sorted(seconds)
