"""Measured clusters: the same on all ranks, within seconds."""

from itertools import cycle
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import attnmesh as am
from attnmesh.cost.cluster import Cluster
from attnmesh.mesh.axes import RankMesh, agreed_flat_axis
from attnmesh.mesh.shapes import AXES
from attnmesh.planner.workload import Workload
from attnmesh.setup import measure_link, measure_shares
from attnmesh.setup.measured_ranks import IN_A_ROW, MeasuredRanks
from tests.support.ranks.brief_measures import measuring_briefly
from tests.support.ranks.pool import Pool, on_each_rank

pytestmark = pytest.mark.quick


def test_measuring_takes_seconds_and_finds_the_same_on_all_ranks(pool: Pool) -> None:
    found = pool.run(4, measure_links_twice)
    assert all(one == found[0] for one in found)
    assert (found[0].hosts, found[0].ranks) == (1, 4)
    assert found[0].inside.rate > 1e6
    assert Cluster.of_record(found[0].record()) == found[0]


@on_each_rank
def measure_links_twice() -> Cluster:
    """Measure links twice, where rank 0 is in one group more than the others: both have hung."""
    dist.new_group([0])
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=AXES)
    with measuring_briefly():
        measure_link.measure_link(MeasuredRanks.of(agreed_flat_axis(mesh, AXES), torch.device("cpu")), between=False)
        return Cluster.measure(mesh)


def test_the_wait_is_what_a_merge_takes_longer_between_pieces_of_work(pool: Pool) -> None:
    assert pool.run(2, measure_waits) == [[3.5, 0.0, 0.0]] * 2


@on_each_rank
def measure_waits() -> list[float]:
    """Return the waits of ranks that share cores, whose merges take longer or shorter, and that have cores alone."""
    axis = agreed_flat_axis(init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=AXES), AXES)
    ranks = MeasuredRanks.of(axis, torch.device("cpu"))
    longer, shorter = (9.0 + axis.index, 4.0, 2.0), (5.0, 4.0, 2.0)
    found = []
    for seconds, alone in ((longer, 2.0), (shorter, 2.0), (longer, 1.0)):
        with patch.object(MeasuredRanks, "seconds", side_effect=cycle(x * IN_A_ROW for x in seconds)):
            found.append(measure_link.measure_wait(ranks, alone))
    return found


def test_one_rank_is_measured_too() -> None:
    found = Cluster.measure(None)
    assert found.world == 1
    assert am.plan(Workload(4, 2, 16, 64, dtype="float32"), found)[0].bytes == (0, 0)


@on_each_rank
def read_free_bytes(gpus: str) -> list[int]:
    """Return the free bytes of ranks, each of which sees the GPU of its letter alone, as GPU 0."""
    mesh = RankMesh.of(init_device_mesh("cpu", (1, 1, len(gpus)), mesh_dim_names=AXES))
    properties = SimpleNamespace(uuid=f"GPU-{gpus[dist.get_rank()]}")
    with (
        patch("torch.cuda.get_device_properties", lambda _: properties),
        patch("torch.cuda.current_device", lambda: 0),
    ):
        return measure_shares.free_of_ranks(mesh, torch.device("cuda"), 1200)


@pytest.mark.parametrize(("gpus", "expected"), [("abc", [1200] * 3), ("aab", [600, 600, 1200])])
def test_ranks_of_one_gpu_share_its_memory(pool: Pool, gpus: str, expected: list[int]) -> None:
    assert pool.run(3, read_free_bytes, gpus) == [expected] * 3
