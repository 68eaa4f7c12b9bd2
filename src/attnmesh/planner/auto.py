"""The choices behind `"auto"`, priced with the preset most like this machine.

Callers pass which ranks share a host. For better figures measure the cluster (`Cluster.measure`) and plan.
"""

from collections.abc import Sequence

import torch

from attnmesh.core.layout import Layout
from attnmesh.mesh.schedule import EXCHANGES, Exchange
from attnmesh.mesh.shapes import Shape
from attnmesh.planner.candidate import Candidate
from attnmesh.planner.cluster import Cluster
from attnmesh.planner.cost import cost
from attnmesh.planner.decode_cost import Line, Payload, merge_seconds
from attnmesh.planner.workload import Workload

CHIPS = {
    "H100": "dgx-h100",
    "H200": "dgx-h100",
    "A100": "a100x4",
    "MI300": "mi300x",
    "4090": "rtx4090",
    "B200": "gb200-nvl72",
}
"""Presets by what a GPU's name has in it."""


ROOM = 1 / 8
"""The share of a rank's memory that an exchange may hold if a faster one is to be preferred to a leaner one."""


SHORT = Payload(128.0, 128)
"""What a merge is chosen for, 32 rows: ranks that cannot go on take part without knowing how long the message is."""


def best_exchange(cluster: Cluster, tile: Shape, shape: Shape, layout: Layout, workload: Workload) -> Exchange:
    """The fastest exchange of those that hold little; the leanest if all hold much."""
    costs = {name: cost(Candidate(shape, tile, layout, name), workload, cluster) for name in EXCHANGES}
    fitting = [name for name in costs if costs[name].memory <= ROOM * cluster.device.memory]
    by_memory = min(costs, key=lambda name: costs[name].memory)
    return EXCHANGES[min(fitting, key=lambda name: costs[name].seconds) if fitting else by_memory]


def preset_for(device: torch.device) -> str:
    """Return the name of the preset most like this rank's device."""
    if device.type == "cpu":
        return "local"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((CHIPS[part] for part in CHIPS if part in name), "dgx-h100")


def surroundings(hosts: Sequence[int], shape: Shape, preset: str) -> tuple[Cluster, Shape]:
    """Return the cluster that a mesh is on, and the tile of the mesh that one host holds.

    `hosts` has the number of each shard's host. Hosts whose tiles differ count as one host per rank.
    """
    where = torch.tensor([hosts.index(host) for host in hosts]).reshape(tuple(shape))
    lines = (where[:, 0, 0], where[0, :, 0], where[0, 0, :])
    tile = Shape(*(int((line == 0).sum()) for line in lines))
    count = len(set(hosts))
    if count * tile.ranks != shape.ranks:
        count, tile = shape.ranks, Shape(1, 1, 1)
    return Cluster.preset(preset).sized(count, tile.ranks), tile


def best_merge(ranks: int, near: int, preset: str) -> str:
    """Return the fastest merge of short messages among so many ranks, `near` of them on each host."""
    cluster = Cluster.preset(preset).sized(ranks // near, near)
    times = {how: merge_seconds(how, Line(ranks, near), SHORT, cluster) for how in ("direct", "tree")}
    return min(times, key=lambda how: times[how])
