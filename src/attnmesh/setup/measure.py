"""Measure the constants of a running world for the planner, in a few seconds.

All ranks work during each measurement, so that a rank has the share of cores, memory and links that it has in a run.
"""

from dataclasses import replace

import torch
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.checks.argument_checks import check_dtype
from attnmesh.cost.cluster import Cluster
from attnmesh.errors import ClusterError
from attnmesh.guard.agreement import Agreement
from attnmesh.mesh.axes import RankMesh, agreed_flat_axis, device_of
from attnmesh.mesh.shapes import AXES
from attnmesh.setup.measure_device import measure_device
from attnmesh.setup.measure_link import measure_link, measure_wait
from attnmesh.setup.measure_shares import with_rates
from attnmesh.setup.measured_ranks import MeasuredRanks


def measure(device_mesh: DeviceMesh | None, dtype: torch.dtype | None = None) -> Cluster:
    """Return the measured cluster of a mesh's ranks. Collective."""
    mesh = RankMesh.of(device_mesh)
    device = device_of(device_mesh)
    with Agreement(mesh, "Cluster.measure", {"dtype": dtype}):
        check_dtype("Cluster.measure dtype", dtype, "pass the dtype of q, k and v, or leave it out")
    axis = agreed_flat_axis(device_mesh, AXES)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    world = MeasuredRanks.of(axis, device)
    sizes = {len(host) for host in world.hosts}
    if len(sizes) != 1:
        expected, fix = "as many ranks on each host", "start as many ranks on each host"
        raise ClusterError("Cluster.measure", expected, f"hosts of {sorted(sizes)}", fix)
    dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    device_rates = measure_device(world, dtype)
    inside, between = measure_link(world, between=False), measure_link(world, between=True)
    device_rates = replace(device_rates, wait=measure_wait(world, device_rates.alone))
    ranks = sizes.pop()
    collectives = "ring" if device.type == "cpu" else "tree"
    source = (("all", f"measured on {world.axis.size} ranks in {dtype}, all at work, torch {torch.__version__}"),)
    name = f"measured {len(world.hosts)}x{ranks}"
    cluster = Cluster(
        name, len(world.hosts), ranks, device_rates, inside, between, short_collectives=collectives, sources=source
    )
    return cluster if axis.size == 1 else with_rates(cluster, mesh, device)
