"""DTensors in and out: the placement `Shard(2)` is the contiguous layout."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from attnmesh.checks.argument_checks import transpose_hint_first
from attnmesh.core.layout import Contiguous
from attnmesh.core.mask import check_mask
from attnmesh.errors import InputError, LayoutError, MeshError, ShapeError
from attnmesh.guard.agreement import Agreement, may_compare
from attnmesh.mesh.axes import RankMesh, attention_dims
from attnmesh.mesh.shapes import AXES
from attnmesh.mesh_attention.attention_arguments import AttentionArguments
from attnmesh.mesh_attention.attention_spec import check_cross


def attend_dtensors(
    arguments: AttentionArguments,
    device_mesh: DeviceMesh | None,
    checked: bool | None,
    attend_shards: Callable[[AttentionArguments, RankMesh, bool | None], Tensor],
) -> Tensor:
    """Return attention of DTensors as a DTensor placed like q: `attend_shards` of their local shards."""
    first = next(x for x in (arguments.q, arguments.k, arguments.v) if isinstance(x, DTensor))
    mesh = RankMesh.of(first.device_mesh)
    try:
        q, k, v = _checked_dtensors(arguments, first, device_mesh)
        check_mask("attention mask", arguments.options.applied_mask)
        check_cross(arguments.options, q.shape[2], k.shape[2], mesh.ranks)
    except InputError as error:
        is_compared = checked is not False and may_compare(torch.device(mesh.device_type))
        Agreement(mesh, "attention", is_compared=is_compared).raise_on_all(error)
    options = arguments.options._replace(
        layout=Contiguous(), key_layout=Contiguous(), length=q.shape[2], key_length=k.shape[2]
    )
    out = attend_shards(
        arguments._replace(q=q.to_local(), k=k.to_local(), v=v.to_local(), options=options), mesh, checked
    )
    shape = torch.Size((*q.shape[:-1], v.shape[-1]))
    stride = (shape[1:].numel(), shape[2:].numel(), shape[3], 1)
    return DTensor.from_local(out, q.device_mesh, q.placements, run_check=False, shape=shape, stride=stride)


def _checked_dtensors(arguments: AttentionArguments, first: DTensor, device_mesh: DeviceMesh | None) -> list[DTensor]:
    """Return q, k and v. Raise unless they are DTensors whose tokens are sharded along the mesh's axes."""
    dtensors = []
    for name, x in {"q": arguments.q, "k": arguments.k, "v": arguments.v}.items():
        if not isinstance(x, DTensor) or x.device_mesh != first.device_mesh or x.placements != first.placements:
            given = f"{name} {x.placements if isinstance(x, DTensor) else type(x).__name__} beside {first.placements}"
            fix = "redistribute them alike"
            raise MeshError("attention", "q, k and v as DTensors of one mesh and one placement", given, fix)
        dtensors.append(x)
    if device_mesh is not None and device_mesh != first.device_mesh:
        fix = "leave mesh out: DTensors bring their own"
        raise MeshError("attention mesh", "the DTensors' own mesh", f"{device_mesh} beside {first.device_mesh}", fix)
    for name, layout in (("layout", arguments.options.layout), ("key_layout", arguments.options.key_layout)):
        if layout is not None and layout != Contiguous():
            expected = f"{name}=Contiguous(), the layout of Shard(2)"
            fix = "leave it out, or shard with am.shard and pass plain tensors"
            raise LayoutError("attention of DTensors", expected, repr(layout), fix)
    lengths = {"length": arguments.options.length, "key_length": arguments.options.key_length}
    for (name, length), x in zip(lengths.items(), dtensors[:2], strict=True):
        if length not in (None, x.shape[2]):
            expected, given = f"{name}={x.shape[2]}, the tokens of all shards", f"{name}={length!r}"
            raise ShapeError("attention of DTensors", expected, given, f"leave {name} out")
    _check_placements(dtensors[0])
    _check_nesting(*dtensors[:2])
    return dtensors


def _check_placements(q: DTensor) -> None:
    """Raise unless tokens are sharded along attnmesh's axes, and nothing but batch and heads along other axes."""
    dims = attention_dims(q.device_mesh).values()
    names = q.device_mesh.mesh_dim_names or range(q.device_mesh.ndim)
    for dim, (name, size, placement) in enumerate(zip(names, q.device_mesh.shape, q.placements, strict=True)):
        allowed: tuple[Placement, ...] = (Shard(2),) if dim in dims else (Shard(0), Shard(1), Replicate())
        if size > 1 and placement not in allowed:
            expected = f"{' or '.join(map(str, allowed))} along axis {name}"
            fix = transpose_hint_first("redistribute q, k and v", placement == Shard(1) and q.shape[1] > q.shape[2])
            raise LayoutError("attention of DTensors", expected, str(placement), fix)


def _check_nesting(q: DTensor, k: DTensor) -> None:
    """Raise unless shards along several axes are consecutive runs: each axis cuts the runs of the one before it."""
    dims = attention_dims(q.device_mesh)
    sizes = {name: q.device_mesh.size(dim) for name, dim in dims.items() if q.device_mesh.size(dim) > 1}
    if len(sizes) < 2:
        return
    ranks = math.prod(sizes.values())
    if [*sizes] != [name for name in AXES if name in sizes] or q.shape[2] % ranks or k.shape[2] % ranks:
        given = f"axes {', '.join(sizes)} and lengths {q.shape[2]} and {k.shape[2]}"
        expected = f"axes in the order {', '.join(AXES)} and lengths that {ranks} divides"
        fix = "pass plain tensors sharded with am.shard, which takes any length"
        raise LayoutError("attention of DTensors sharded along several axes", expected, given, fix)
