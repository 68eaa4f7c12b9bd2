"""Three named axes over PyTorch's `DeviceMesh`: heads, queries and keys, of which any may be missing.

Rank (h, r, c) holds the shard numbered `(h * R + r) * C + c` of the tokens. Its row are the C ranks that share r: among
them queries are gathered. Its column are the R ranks that share c: among them keys and values are gathered.

                  keys axis: c = 0   1   2
    queries axis: r = 0      shard 0   1   2     row 0 gathers the queries of shards 0, 1 and 2
                  r = 1      shard 3   4   5     column 0 gathers the keys of shards 0 and 3
"""

import atexit
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d, get_backend_config
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.core.checks import warn_once
from attnmesh.errors import MeshError
from attnmesh.mesh.shapes import AXES, Shape
from attnmesh.mesh.shutdown import wait_until_idle

Given = ParamSpec("Given")


Found = TypeVar("Found")


def cached_per_world(
    most: int | None = None,
) -> Callable[[Callable[Given, Found]], Callable[Given, Found]]:
    """A cache of what was found out about meshes and axes, until it is to `clear_caches`."""

    def decorate(find: Callable[Given, Found]) -> Callable[Given, Found]:
        cached = lru_cache(most)(find)
        _REMEMBERED.append(cached.cache_clear)
        return cast(Callable[Given, Found], cached)

    return decorate


_REMEMBERED: list[Callable[[], None]] = []


def clear_caches() -> None:
    """Let go of all meshes and their groups."""
    for clear in _REMEMBERED:
        clear()
    gc.collect()  # a sharded model refers to itself, and holds its groups


@atexit.register
def end() -> None:
    """What has to be done before Python ends: to destroy a group ends its threads, which needs them to be at rest."""
    wait_until_idle()
    clear_caches()


@cached_per_world()
def backends(group: ProcessGroup) -> dict[str, str]:
    """What carries a group's tensors, by the type of their device: a group may have a backend for each."""
    return dict(pair.split(":") for pair in get_backend_config(group).split(","))


def device_type_of(group: ProcessGroup | None) -> str:
    """The type of devices that a group was made for: gloo carries a GPU's tensors too, but not on purpose."""
    found = {} if group is None else backends(group)
    return "cuda" if found.get("cuda", "gloo") != "gloo" else "cpu"


def device_of(mesh: DeviceMesh | None) -> torch.device:
    """Where the ranks of a mesh compute."""
    return torch.device("cpu" if mesh is None else mesh.device_type)


class NotGiven(Enum):
    """The default of `mesh=` where `mesh=None` says more than leaving it out: that a rank is meant to be alone."""

    MESH = "mesh=None"

    def __repr__(self) -> str:
        return "None"


def given_mesh(subject: str, mesh: DeviceMesh | NotGiven | None, alone: str) -> DeviceMesh | None:
    """The mesh given, or None; with a warning where it was left out among several ranks.

    `alone` tells what each rank then computes, and what to pass instead. Calls inside attnmesh always say their mesh,
    so a call that is local by intent does not warn. Call this from the public function itself: its caller is blamed.
    """
    if not isinstance(mesh, NotGiven):
        return mesh
    if not torch.compiler.is_compiling() and dist.is_initialized() and dist.get_world_size() > 1:
        ranks = f"no mesh= in a process group of {dist.get_world_size()} ranks"
        warn_once(f"{subject}: {ranks}, so {alone}, or mesh=None if this is meant.")
    return None


@dataclass(frozen=True)
class Axis:
    """The ranks in line with this one along an axis: how many, which of them this one is, their group, and its name."""

    size: int = 1
    index: int = 0
    group: ProcessGroup | None = None
    name: str = field(default="only", compare=False)

    def share_of(self, count: int) -> slice:
        """Of so many heads this rank's: shares differ by one where they do not divide, the larger ones first."""
        size, more = divmod(count, self.size)
        start = self.index * size + min(self.index, more)
        return slice(start, start + size + (self.index < more))


def overlap(one: slice, other: slice) -> tuple[slice, slice]:
    """What two runs have in common, if anything: where it is in the one, and in the other.

    >>> overlap(slice(0, 4), slice(3, 9))
    (slice(3, 4, None), slice(0, 1, None))
    """
    start = max(one.start, other.start)
    stop = max(start, min(one.stop, other.stop))
    return slice(start - one.start, stop - one.start), slice(start - other.start, stop - other.start)


@dataclass(frozen=True)
class Mesh:
    """This rank's place in a mesh."""

    heads: Axis
    queries: Axis
    keys: Axis

    @property
    def kind(self) -> str:
        """The type of devices that its groups were made for."""
        return next((device_type_of(axis.group) for axis in self.axes if axis.group is not None), "cpu")

    @staticmethod
    def of(device_mesh: DeviceMesh | None) -> "Mesh":
        """The axes that a `DeviceMesh` names, in any order; axes with other names are somebody else's."""
        if device_mesh is None:
            return Mesh(Axis(), Axis(), Axis())
        if not isinstance(device_mesh, DeviceMesh):
            fix = "make one with torch.distributed.device_mesh.init_device_mesh"
            raise MeshError("mesh", "a DeviceMesh or None", type(device_mesh).__name__, fix)
        names = device_mesh.mesh_dim_names or ()
        mine = [name for name in names if name in AXES]
        if not mine or len(set(names)) < len(names):
            fix = 'name the axes, as in init_device_mesh("cpu", (2, 2), mesh_dim_names=("queries", "keys"))'
            raise MeshError("mesh", f"one axis or more of {', '.join(AXES)}, each once", f"axes {names}", fix)
        if device_mesh.get_coordinate() is None:
            raise MeshError(
                "mesh", "a mesh that holds this rank", str(device_mesh), "call it on the ranks of the mesh alone"
            )
        return Mesh(*(_axis(device_mesh, name) if name in mine else Axis() for name in AXES))

    @staticmethod
    def named(shape: Shape, indices: Sequence[int], group_names: str) -> "Mesh":
        """The mesh again, from what an operator's schema can carry."""
        names = group_names.split(",")
        axes = (
            Axis(n, i, group_named(name), axis) for n, i, name, axis in zip(shape, indices, names, AXES, strict=True)
        )
        return Mesh(*axes)

    @property
    def group_names(self) -> str:
        """The names of the axes' groups, for `named`."""
        return ",".join(axis.group.group_name if axis.group is not None else "" for axis in self.axes)

    @property
    def shape(self) -> Shape:
        """The sizes of the axes."""
        return Shape(self.heads.size, self.queries.size, self.keys.size)

    @property
    def shard(self) -> int:
        """The number of this rank's shard."""
        return self.shape.shard(self.heads.index, self.queries.index, self.keys.index)

    @property
    def axes(self) -> tuple[Axis, Axis, Axis]:
        """From the outermost to the innermost, as shards are numbered."""
        return self.heads, self.queries, self.keys


def _axis(device_mesh: DeviceMesh, name: str) -> Axis:
    size = device_mesh.size((device_mesh.mesh_dim_names or ()).index(name))
    return Axis(size, device_mesh.get_local_rank(name), device_mesh.get_group(name), name) if size > 1 else Axis()


def flat_axis(device_mesh: DeviceMesh | None, names: Sequence[str]) -> Axis:
    """Several axes of a mesh as one: the ranks that share a place along all others."""
    if device_mesh is None:
        return Axis()
    given = device_mesh.mesh_dim_names or ()
    long = tuple(name for name in given if name in names and device_mesh.size(given.index(name)) > 1)
    if len(long) < 2:
        return _axis(device_mesh, long[0]) if long else Axis()
    flat = device_mesh[long]._flatten()
    return Axis(flat.size(), flat.get_local_rank(), flat.get_group(), " x ".join(long))


def group_named(name: str) -> ProcessGroup | None:
    """The process group of that name; none for the empty one."""
    group: ProcessGroup | None = distributed_c10d._resolve_process_group(name) if name else None  # type: ignore
    return group
