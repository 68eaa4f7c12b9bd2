"""Where this program runs, as far as it can be told without measuring: what `"auto"` goes by.

Who shares a host is found once, when a mesh is first used. Links and devices are taken for those of the preset that is
most like them; who wants better figures measures (`Cluster.measure`) and plans.
"""

import torch

from attnmesh.cluster import Cluster
from attnmesh.cost import cost
from attnmesh.cost_decode import Line, Payload, merge_seconds
from attnmesh.exchange import share
from attnmesh.hosts import hosts, mesh_hosts
from attnmesh.layout import Layout
from attnmesh.mesh import Axis, Mesh, Shape, remembered
from attnmesh.presets import PRESETS
from attnmesh.schedule import EXCHANGES, Exchange
from attnmesh.way import Way
from attnmesh.workload import Workload

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


@remembered()  # all ranks ask at once, the first time: none may forget before the others
def surroundings(mesh: Mesh, device: torch.device) -> tuple[Cluster, Shape]:
    """The cluster that a mesh is on, and what of the mesh a host holds; hosts that hold no like tiles count alone."""
    said = mesh_hosts(mesh)
    where = torch.tensor([said.index(host) for host in said]).reshape(tuple(mesh.shape))
    lines = (where[:, 0, 0], where[0, :, 0], where[0, 0, :])
    tile = Shape(*(int((line == 0).sum()) for line in lines))
    count = len(set(said))
    if count * tile.ranks != mesh.shape.ranks:
        count, tile = mesh.shape.ranks, Shape(1, 1, 1)
    return _like(mesh.axes, device).sized(count, tile.ranks), tile


def _like(axes: tuple[Axis, ...], device: torch.device) -> Cluster:
    """The preset that all ranks take theirs for."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    mine = "local" if device.type == "cpu" else next((CHIPS[part] for part in CHIPS if part in name), "dgx-h100")
    names = list(PRESETS)
    return Cluster.preset(names[min(row[0] for row in share([names.index(mine)], axes))])


def best_exchange(cluster: Cluster, tile: Shape, shape: Shape, layout: Layout, workload: Workload) -> Exchange:
    """The fastest exchange of those that hold little; the leanest if all hold much."""
    costs = {name: cost(Way(shape, tile, layout, name), workload, cluster) for name in EXCHANGES}
    fitting = [name for name in costs if costs[name].memory <= ROOM * cluster.device.memory]
    by_memory = min(costs, key=lambda name: costs[name].memory)
    return EXCHANGES[min(fitting, key=lambda name: costs[name].seconds) if fitting else by_memory]


@remembered()
def best_merge(axis: Axis, device: torch.device) -> str:
    """The fastest way to merge short messages along an axis; all ranks ask at once, the first time."""
    found = hosts(axis)
    near = len(found[0]) if len({len(host) for host in found}) == 1 else 1
    cluster = _like((axis,), device).sized(axis.size // near, near)
    times = {how: merge_seconds(how, Line(axis.size, near), SHORT, cluster) for how in ("direct", "tree")}
    return min(times, key=lambda how: times[how])
