"""Several axes of a mesh as one, with a process group of its own."""

from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh

from attnmesh.mesh.axes import Axis, attention_dims, axis_along


def flat_axis(device_mesh: DeviceMesh | None, names: Sequence[str]) -> Axis:
    """Return several axes of a mesh as one: the ranks that share an index along all other axes.

    The group of two axes is made at the first call, in which every rank of the world takes part. PyTorch could make it
    among its own ranks, but would name it by the number of groups that each of them knows, which may differ.
    """
    if device_mesh is None:
        return Axis()
    dims = attention_dims(device_mesh)
    long = tuple(name for name, dim in dims.items() if name in names and device_mesh.size(dim) > 1)
    if len(long) < 2:
        return axis_along(device_mesh, long[0], dims[long[0]]) if long else Axis()
    flat = device_mesh[long]._flatten()
    return Axis(flat.size(), flat.get_local_rank(), flat.get_group(), " x ".join(long))
