"""Groups of ranks of a world, made once since each has connections of its own, and the axis along all ranks."""

import torch.distributed as dist

from attnmesh.mesh.axes import Axis

_groups: dict[int, dist.ProcessGroup] = {}


def group_of(ranks: int) -> dist.ProcessGroup | None:
    """Return the group of the first ranks of the world; None on the others. All ranks of the world call it."""
    if ranks not in _groups:
        _groups[ranks] = dist.new_group(list(range(ranks)))
    return _groups[ranks] if dist.get_rank() < ranks else None


def world_axis() -> Axis:
    """Return the axis along all ranks of the world."""
    return Axis(dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
