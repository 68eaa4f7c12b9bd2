"""DTensors in and out: their placements say what a layout says, when the layout is contiguous."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from attnmesh.core.checks import swap_hint
from attnmesh.core.layout import Contiguous, Layout
from attnmesh.errors import LayoutError, MeshError
from attnmesh.mesh.shapes import AXES


class Unwrapped(NamedTuple):
    """The local shards of q, k and v, and what their placements say."""

    q: Tensor
    k: Tensor
    v: Tensor
    mesh: DeviceMesh
    length: int
    key_length: int


def first_of(*tensors: object) -> DTensor:
    """The first DTensor among them: by its mesh ranks ask each other."""
    return next(x for x in tensors if isinstance(x, DTensor))


Layouts = tuple[Layout | None, Layout | None]
"""Of queries and of keys, as the caller gives them."""


def unwrap(q: DTensor, k: DTensor, v: DTensor, mesh: DeviceMesh | None, layouts: Layouts) -> Unwrapped:
    """Local shards of DTensors whose tokens are sharded along the mesh's axes, or the error that names what differs."""
    first = first_of(q, k, v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, DTensor) or x.device_mesh != first.device_mesh or x.placements != first.placements:
            given = f"{name} {x.placements if isinstance(x, DTensor) else type(x).__name__} beside {first.placements}"
            fix = "redistribute them alike"
            raise MeshError("attention", "q, k and v as DTensors of one mesh and one placement", given, fix)
    if mesh is not None and mesh != q.device_mesh:
        fix = "leave mesh out: DTensors bring their own"
        raise MeshError("attention mesh", "the DTensors' own mesh", f"{mesh} beside {q.device_mesh}", fix)
    _check_layouts(layouts)
    _check_placements(q)
    _check_nesting(q, k)
    return Unwrapped(q.to_local(), k.to_local(), v.to_local(), q.device_mesh, q.shape[2], k.shape[2])


def wrap(out: Tensor, q: DTensor, width: int) -> DTensor:
    """The local result as a DTensor placed like q."""
    shape = (*q.shape[:-1], width)
    stride = (shape[1] * shape[2] * width, shape[2] * width, width, 1)
    return DTensor.from_local(out, q.device_mesh, q.placements, run_check=False, shape=torch.Size(shape), stride=stride)


def _check_layouts(layouts: Layouts) -> None:
    """A placement says the layout, so nobody has to; another one contradicts it."""
    for name, layout in zip(("layout", "key_layout"), layouts, strict=True):
        if layout is not None and layout != Contiguous():
            expected = f"{name}=Contiguous(), which is how a Shard lies"
            fix = "leave it out, or shard with am.shard and pass plain tensors"
            raise LayoutError("attention of DTensors", expected, repr(layout), fix)


def _check_placements(q: DTensor) -> None:
    """Tokens sharded along our axes, in runs; along others' axes batch or heads may be, and nothing may be partial."""
    names = q.device_mesh.mesh_dim_names or ()
    for name, size, placement in zip(names, q.device_mesh.shape, q.placements, strict=True):
        allowed: tuple[Placement, ...] = (Shard(2),) if name in AXES else (Shard(0), Shard(1), Replicate())
        if size > 1 and placement not in allowed:
            expected = f"{' or '.join(map(str, allowed))} along axis {name}"
            fix = "redistribute q, k and v" + swap_hint(placement == Shard(1) and q.shape[1] > q.shape[2])
            raise LayoutError("attention of DTensors", expected, str(placement), fix)


def _check_nesting(q: DTensor, k: DTensor) -> None:
    """Sharded along two axes, a DTensor is cut and cut again: that is one deal in runs if it goes out even."""
    names = q.device_mesh.mesh_dim_names or ()
    sizes = {name: size for name, size in zip(names, q.device_mesh.shape, strict=True) if name in AXES and size > 1}
    if len(sizes) < 2:
        return
    ranks = 1
    for size in sizes.values():
        ranks *= size
    if [*sizes] != [name for name in AXES if name in sizes] or q.shape[2] % ranks or k.shape[2] % ranks:
        given = f"axes {', '.join(sizes)} and lengths {q.shape[2]} and {k.shape[2]}"
        expected = f"axes in the order {', '.join(AXES)} and lengths that {ranks} divides"
        fix = "pass plain tensors sharded with am.shard, which takes any length"
        raise LayoutError("attention of DTensors sharded along several axes", expected, given, fix)
