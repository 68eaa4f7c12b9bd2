"""The choices behind `exchange="auto"` and `merge="auto"`, priced with the preset most like this machine.

Callers pass which ranks share a host. For exact figures, measure the cluster (`Cluster.measure`) and call `plan`.
"""

from collections.abc import Sequence

import torch

from attnmesh.core.layout import Layout
from attnmesh.mesh.schedule import EXCHANGES, Exchange
from attnmesh.mesh.shapes import Shape
from attnmesh.planner.candidate import Candidate
from attnmesh.planner.cluster import Cluster
from attnmesh.planner.cost import cost
from attnmesh.planner.decode_cost import MergeGroup, Payload, merge_seconds
from attnmesh.planner.workload import Workload

PRESET_OF_GPU = {
    "H100": "dgx-h100",
    "H200": "dgx-h100",
    "A100": "a100x4",
    "MI300": "mi300x",
    "4090": "rtx4090",
    "B200": "gb200-nvl72",
}
"""Presets by a part of the GPU's name."""

MEMORY_SHARE = 1 / 8
"""Share of a rank's memory up to which the fastest exchange is taken, and not the one that needs least memory."""

TYPICAL_PAYLOAD = Payload(128.0, 128)
"""32 rows of 128 columns. The actual size does not count: a rank that raises takes part in the merge without it."""


def best_exchange(cluster: Cluster, tile: Shape, shape: Shape, layout: Layout, workload: Workload) -> Exchange:
    """Return the fastest exchange of those within `MEMORY_SHARE`, or else the one that needs least memory."""
    costs = {name: cost(Candidate(shape, tile, layout, name), workload, cluster) for name in EXCHANGES}
    fitting = [name for name in costs if costs[name].memory <= MEMORY_SHARE * cluster.device.memory]
    fastest = min(fitting, key=lambda name: costs[name].seconds, default=None)
    return EXCHANGES[fastest or min(costs, key=lambda name: costs[name].memory)]


def preset_for(device: torch.device) -> str:
    """Return the name of the preset most like this rank's device."""
    if device.type == "cpu":
        return "local"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((preset for part, preset in PRESET_OF_GPU.items() if part in name), "dgx-h100")


def cluster_and_tile(hosts: Sequence[int], shape: Shape, preset: str) -> tuple[Cluster, Shape]:
    """Return the cluster of a mesh, and the tile of the mesh that one host holds.

    `hosts` has the host number of each shard. If hosts hold different tiles, each rank counts as a host.
    """
    where = torch.tensor([hosts.index(host) for host in hosts]).reshape(tuple(shape))
    lines = (where[:, 0, 0], where[0, :, 0], where[0, 0, :])
    tile = Shape(*(int((line == 0).sum()) for line in lines))
    count = len(set(hosts))
    if count * tile.ranks != shape.ranks:
        count, tile = shape.ranks, Shape(1, 1, 1)
    return Cluster.preset(preset).sized(count, tile.ranks), tile


def best_merge(ranks: int, near: int, preset: str) -> str:
    """Return the fastest merge of short messages among `ranks` ranks, `near` of them on each host."""
    cluster = Cluster.preset(preset).sized(ranks // near, near)
    times = {how: merge_seconds(how, MergeGroup(ranks, near), TYPICAL_PAYLOAD, cluster) for how in ("direct", "tree")}
    return min(times, key=lambda how: times[how])
