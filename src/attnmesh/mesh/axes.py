"""Three named axes over PyTorch's `DeviceMesh`: heads, queries and keys, of which any may be missing.

Rank (h, r, c) holds shard `(h * R + r) * C + c` of the tokens. The C ranks with the same r gather the queries of all of
them. The R ranks with the same c gather their keys and values. An axis is named for the tensor that it divides, not
for the one that travels along it: queries travel along the keys axis, keys along the queries axis.

                  keys axis: c = 0   1   2
    queries axis: r = 0      shard 0   1   2     ranks with r = 0 gather the queries of shards 0, 1 and 2
                  r = 1      shard 3   4   5     ranks with c = 0 gather the keys of shards 0 and 3
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d, get_backend_config
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.errors import MeshError, warn_once
from attnmesh.mesh.shapes import AXES, Shape, even_slice
from attnmesh.runtime.memo import Memo
from attnmesh.runtime.world import cached_per_world


@cached_per_world()
def backends(group: ProcessGroup) -> dict[str, str]:
    """Return the backend of a group for each type of device."""
    return dict(pair.split(":") for pair in get_backend_config(group).split(","))


def device_type_of(group: ProcessGroup | None) -> str:
    """Return the type of device that a group was made for. Gloo can send tensors of a GPU, but through the host."""
    by_type = {} if group is None else backends(group)
    return "cuda" if by_type.get("cuda", "gloo") != "gloo" else "cpu"


def device_of(device_mesh: DeviceMesh | None) -> torch.device:
    """Return the device of a mesh's ranks."""
    return torch.device("cpu" if device_mesh is None else device_mesh.device_type)


class NotGiven(Enum):
    """Default of `mesh=` in functions where an explicit `mesh=None` means one rank alone, without a warning."""

    MESH = "mesh=None"

    def __repr__(self) -> str:
        return "None"


def given_mesh(subject: str, mesh: DeviceMesh | NotGiven | None, alone: str) -> DeviceMesh | None:
    """Return the mesh given, or None. Warn once where it was left out among several ranks.

    `alone` names what each rank then computes, and what to pass instead. The warning points at the caller of the public
    function, so this is called by the public function itself. Calls inside attnmesh always pass a mesh.
    """
    if not isinstance(mesh, NotGiven):
        return mesh
    if not torch.compiler.is_compiling() and dist.is_initialized() and dist.get_world_size() > 1:
        ranks = f"no mesh= in a process group of {dist.get_world_size()} ranks"
        warn_once(f"{subject}: {ranks}, so {alone}, or mesh=None if this is meant.")
    return None


@dataclass(frozen=True)
class Axis:
    """One axis of a mesh as this rank sees it: the number of ranks, this rank's index, their group, and a name."""

    size: int = 1
    index: int = 0
    group: ProcessGroup | None = None
    name: str = field(default="only", compare=False)

    @property
    def group_name(self) -> str:
        """Name of the axis' group, for `group_named`."""
        return "" if self.group is None else self.group.group_name

    def slice_of(self, count: int) -> slice:
        """Return which of `count` heads this rank has. Slices differ by one at most, the larger ones first."""
        return even_slice(count, self.size, self.index)


def intersect(one: slice, other: slice) -> tuple[slice, slice]:
    """Return where the intersection of two slices lies within the one, and within the other.

    >>> intersect(slice(0, 4), slice(3, 9))
    (slice(3, 4, None), slice(0, 1, None))
    """
    start = max(one.start, other.start)
    stop = max(start, min(one.stop, other.stop))
    return slice(start - one.start, stop - one.start), slice(start - other.start, stop - other.start)


@dataclass(frozen=True)
class RankMesh:
    """The axes of a mesh as this rank sees them."""

    heads: Axis
    queries: Axis
    keys: Axis
    device_mesh: DeviceMesh | None = field(default=None, compare=False)
    """The mesh of PyTorch, where it is known."""

    @property
    def device_type(self) -> str:
        """Type of device that the groups were made for."""
        return next((device_type_of(axis.group) for axis in self.axes if axis.group is not None), "cpu")

    @staticmethod
    def of(device_mesh: DeviceMesh | None) -> "RankMesh":
        """Return the axes named heads, queries and keys as this rank sees them. Other axes are ignored.

        A mesh of one axis with another name, such as "cp", is a queries axis: keys and values travel along it.
        """
        if device_mesh is None:
            return MESH_OF_ONE_RANK
        if torch.compiler.is_compiling():
            return _mesh_in(device_mesh)
        if (entry := _known_meshes().get(id(device_mesh))) is None:
            entry = _known_meshes().keep(id(device_mesh), (device_mesh, _mesh_in(device_mesh)))
        return entry[1]

    @staticmethod
    def named(sizes: Sequence[int], indices: Sequence[int], group_names: Sequence[str]) -> "RankMesh":
        """Return the mesh of these axes, from what the schema of an operator can carry."""
        axes = zip(sizes, indices, group_names, AXES, strict=True)
        heads, queries, keys = (Axis(size, index, group_named(group), name) for size, index, group, name in axes)
        return RankMesh(heads, queries, keys)

    @property
    def group_names(self) -> list[str]:
        """Names of the axes' groups, for `named`."""
        return [axis.group_name for axis in self.axes]

    @property
    def shape(self) -> Shape:
        """Sizes of the axes."""
        return Shape(self.heads.size, self.queries.size, self.keys.size)

    @property
    def ranks(self) -> int:
        """Number of ranks of the mesh."""
        return self.heads.size * self.queries.size * self.keys.size

    @property
    def shard_index(self) -> int:
        """Number of this rank's shard."""
        return self.shape.shard(self.heads.index, self.queries.index, self.keys.index)

    @property
    def axes(self) -> tuple[Axis, Axis, Axis]:
        """All axes, the outermost first, as shards are numbered."""
        return self.heads, self.queries, self.keys


MESH_OF_ONE_RANK = RankMesh(Axis(), Axis(), Axis())
"""The mesh of one rank."""


def mesh_of_axis(axis: Axis) -> RankMesh:
    """Return a mesh of one axis."""
    return RankMesh(Axis(), Axis(), axis)


@cached_per_world()
def _known_meshes() -> Memo[tuple[DeviceMesh, RankMesh]]:
    """Return what this rank sees of meshes, by their identity: equal meshes may have different groups."""
    return Memo(64)


def _mesh_in(device_mesh: DeviceMesh) -> RankMesh:
    """Return the axes of a mesh as this rank sees them, or raise."""
    if not isinstance(device_mesh, DeviceMesh):
        fix = "make one, as am.init_mesh((1, 2, 2))"
        raise MeshError("mesh", "a DeviceMesh or None", type(device_mesh).__name__, fix)
    names = device_mesh.mesh_dim_names or ()
    dims = attention_dims(device_mesh)
    if not dims or len(set(names)) < len(names):
        fix = 'name the axes, as in init_device_mesh("cpu", (2, 2), mesh_dim_names=("queries", "keys"))'
        if names and not dims:
            fix = f'slice the axis that shares a sequence, as mesh["{names[-1]}"]; or {fix}'
        raise MeshError("mesh", f"one axis or more of {', '.join(AXES)}, each once", f"axes {names}", fix)
    if device_mesh.get_coordinate() is None:
        fix = "call it on the ranks of the mesh alone"
        raise MeshError("mesh", "a mesh that holds this rank", str(device_mesh), fix)
    heads, queries, keys = (axis_along(device_mesh, name, dims[name]) if name in dims else Axis() for name in AXES)
    return RankMesh(heads, queries, keys, device_mesh)


def attention_dims(device_mesh: DeviceMesh) -> dict[str, int]:
    """Return the dim of each axis of attention, in order of dims."""
    names = device_mesh.mesh_dim_names or ()
    dims = {name: dim for dim, name in enumerate(names) if name in AXES}
    return {"queries": 0} if not dims and device_mesh.ndim == 1 else dims


def axis_along(device_mesh: DeviceMesh, name: str, dim: int) -> Axis:
    """Return the axis of that name, along a dim of a mesh."""
    size = device_mesh.size(dim)
    return Axis(size, device_mesh.get_local_rank(dim), device_mesh.get_group(dim), name) if size > 1 else Axis()


def agreed_flat_axis(device_mesh: DeviceMesh | None, names: Sequence[str]) -> Axis:
    """Return several axes of a mesh as one: the ranks that share an index along all other axes.

    Collective at its first call, which makes the group of two axes: all ranks of the world make it at once. PyTorch can
    make a group among its own ranks alone, but then each rank names it by the number of groups that it knows. Rank A,
    which is in 3 groups, would name it `g3`; rank B, in 2, `g2`: they would wait for each other.
    """
    if device_mesh is None:
        return Axis()
    dims = attention_dims(device_mesh)
    long = tuple(name for name, dim in dims.items() if name in names and device_mesh.size(dim) > 1)
    if len(long) < 2:
        return axis_along(device_mesh, long[0], dims[long[0]]) if long else Axis()
    flat = device_mesh[long]._flatten()
    return Axis(flat.size(), flat.get_local_rank(), flat.get_group(), " x ".join(long))


def group_named(name: str) -> ProcessGroup | None:
    """Return the process group of that name, or None for an empty name."""
    group: ProcessGroup | None = distributed_c10d._resolve_process_group(name) if name else None  # type: ignore
    return group


def axis_of(group: Any, subject: str) -> Axis:
    """Return the axis of a process group, or of a mesh of one axis."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if group is None and ranks == 1:
        return Axis()
    if isinstance(group, DeviceMesh) and group.ndim == 1:
        group = group.get_group()
    if not isinstance(group, ProcessGroup):
        given = f"None in a world of {ranks} ranks" if group is None else repr(group)
        fix = 'pass dist.group.WORLD, mesh.get_group(axis), or one axis of a mesh, as mesh["keys"]'
        raise MeshError(f"{subject} group", "a process group that holds this rank, or a mesh of one axis", given, fix)
    return Axis(group.size(), group.rank(), group)
