"""Merges between ranks: what each costs, and that the calls that take one name it."""

from collections.abc import Callable

import pytest

import attnmesh as am
from attnmesh.comm.merges import MERGES
from attnmesh.cost.merge_cost import MergeGroup, MessageSize
from attnmesh.engines import combine

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("how", MERGES)
def test_merges_cost_more_on_more_ranks(how: str) -> None:
    cluster = am.Cluster.preset("dgx-h100")
    seconds = []
    for ranks in (2, 8, 16, 64, 128):
        seconds.append(MERGES[how].seconds(MergeGroup(ranks, min(8, ranks)), MessageSize(128.0, 128), cluster))
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("call", [am.decode, am.decode_rows, am.merge_across, combine])
def test_calls_name_all_merges(call: Callable[..., object]) -> None:
    names = ", ".join(f'"{name}"' for name in MERGES)
    assert f'{names} or "auto"' in str(call.__doc__)
