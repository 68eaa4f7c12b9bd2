"""Device meshes over the ranks of a world, made after all ranks have compared their arguments."""

import os
from collections.abc import Mapping, Sequence
from socket import gethostname
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from attnmesh.comm.gather import all_gather_ints
from attnmesh.errors import DeviceError, MeshError
from attnmesh.guard.agreement import Agreement
from attnmesh.guard.call_text import HOST_FIELD
from attnmesh.mesh.axes import Axis, RankMesh, device_of, device_type_of
from attnmesh.mesh.shapes import AXES, Shape, check_heads, elements, mesh_shape, rank_grid


def init_mesh(
    device_type: str | Sequence[int] | None = None,
    shape: Sequence[int] | None = None,
    q_heads: int = 1,
    kv_heads: int | None = None,
) -> DeviceMesh:
    """Return a `DeviceMesh` of a shape, with consecutive ranks along the axis that sends most.

    Consecutive ranks share a host, so the axis with the most traffic stays inside hosts. `init_mesh((1, 2, 2))` is
    enough: the shape may come first.

    Args:
        device_type: "cpu" or "cuda". Left out, it is that of the process group.
        shape: Ranks along heads, queries and keys, as `mesh_shape` returns them. All ranks of the world pass the same.
        q_heads: Query heads of the model, which decide the axis that sends most.
        kv_heads: Key heads of the model; as many as query heads unless they are given.

    Returns:
        A mesh with axes named heads, queries and keys.

    Raises:
        MeshError: The shape is not three counts, does not fit the world, or differs between ranks.
        DeviceError: PyTorch does not know the device type.

    >>> from attnmesh.errors import MeshError
    >>> try:
    ...     init_mesh((2, 2))
    ... except MeshError as error:
    ...     print(str(error).split(". Fix")[0])
    init_mesh shape: expected (heads, queries, keys), three whole numbers of ranks, each 1 or more, given (2, 2)
    """
    if shape is None and not isinstance(device_type, str):  # the shape comes first
        device_type, shape = None, device_type
    device_type = world_device_type() if device_type is None else device_type
    kv_heads = q_heads if kv_heads is None else kv_heads
    is_first = not dist.is_initialized()
    with Agreement(world_mesh(), "init_mesh") as agreement:
        check_device_type("init_mesh", device_type)
        if device_type == "cuda" and not torch.cuda.is_available():
            fix = 'pass "cpu", or leave the device type out'
            raise DeviceError("init_mesh", "a device of this machine", "cuda, without a GPU", fix)
        checked_shape = _checked_shape(shape)
        check_heads("init_mesh", checked_shape.ranks, q_heads, kv_heads)
        world = _world_size()
        if checked_shape.ranks > world:
            given, fix = "x".join(map(str, checked_shape)), "start more ranks, or ask mesh_shape for a smaller one"
            raise MeshError("init_mesh", f"at most the world's {world} ranks", given, fix)
        _set_gpu(device_type)
        options = {"device_type": device_type, "shape": checked_shape, "q_heads": q_heads, "kv_heads": kv_heads}
        agreement.compare(with_versions(options))
    sent_by_axis = elements(checked_shape, q_heads, kv_heads)._asdict()
    names = tuple(sorted(AXES, key=lambda name: sent_by_axis[name]))
    sizes = tuple(getattr(checked_shape, name) for name in names)
    mesh = init_device_mesh(cast(str, device_type), sizes, mesh_dim_names=names)
    if is_first:  # without a process group, the agreement above had only this rank
        Agreement(world_mesh(), "init_mesh", with_versions(options)).compare()
    return mesh


def split_mesh(
    mesh: DeviceMesh, shape: Sequence[int] | str = "auto", q_heads: int = 1, kv_heads: int | None = None
) -> DeviceMesh:
    """Return a mesh of heads x queries x keys over the ranks of a mesh of one axis, such as `world["cp"]`.

    Every rank of the world calls it, with its own mesh. Shards keep their order: tokens that are sharded over the given
    mesh are sharded alike over the new one. Consecutive ranks lie along the keys axis, where queries travel.

    Args:
        mesh: A mesh of one axis with any name.
        shape: Ranks along heads, queries and keys, or "auto" for the shape that sends least in training.
        q_heads: Query heads of a rank of the model, which decide the shape.
        kv_heads: Key heads of a rank of the model; as many as query heads unless they are given.

    Returns:
        A mesh with axes named heads, queries and keys.

    Raises:
        MeshError: The mesh has several axes, the shape does not fit it, or the ranks' meshes do not cover the world.

    >>> from attnmesh.errors import MeshError
    >>> try:
    ...     split_mesh(None)
    ... except MeshError as error:
    ...     print(str(error).split(". Fix")[0])
    split_mesh mesh: expected a DeviceMesh of one axis, given None
    """
    kv_heads = q_heads if kv_heads is None else kv_heads
    with Agreement(world_mesh(), "split_mesh") as agreement:
        if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
            given = f"{mesh.ndim} axes" if isinstance(mesh, DeviceMesh) else repr(mesh)
            raise MeshError("split_mesh mesh", "a DeviceMesh of one axis", given, 'slice one axis, as mesh["cp"]')
        split_shape = (
            mesh_shape(mesh.size(), q_heads, kv_heads) if shape == "auto" else _checked_shape(shape, "split_mesh")
        )
        if split_shape.ranks != mesh.size():
            given = "x".join(map(str, split_shape))
            raise MeshError("split_mesh shape", f"a shape of {mesh.size()} ranks", given, 'pass shape="auto"')
        agreement.compare(with_versions({"shape": split_shape, "q_heads": q_heads, "kv_heads": kv_heads}))
    # Every rank sends equally many numbers, since the shapes were compared.
    groups = checked_groups("split_mesh mesh", all_gather_ints(mesh.mesh.flatten().tolist(), world_mesh()))
    grid = torch.tensor(groups, device="cpu").view(len(groups), *split_shape)
    return DeviceMesh(mesh.device_type, grid, mesh_dim_names=("others", *AXES))[AXES]


def with_versions(fields: Mapping[str, object]) -> Mapping[str, object]:
    """Return the arguments of a call that makes a mesh, with the versions of packages and the name of this host."""
    import attnmesh  # the front of the package, which imports this file

    versions = f"attnmesh {attnmesh.__version__}, PyTorch {torch.__version__.partition('+')[0]}"
    return {**fields, "versions": versions, HOST_FIELD: gethostname()}


def checked_groups(subject: str, table: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return the groups of ranks that the ranks of the world name. Raise unless they cover the world evenly."""
    groups = sorted({tuple(ranks) for ranks in table})
    covers = sorted(rank for ranks in groups for rank in ranks) == list(range(len(table)))
    even = len({len(ranks) for ranks in groups}) == 1
    if not (covers and even):
        expected = f"meshes of one size that cover the {len(table)} ranks"
        fix = "make the mesh of all ranks, or slice it from one by axis names"
        raise MeshError(subject, expected, " and ".join(map(str, groups)), fix)
    return groups


def _set_gpu(device_type: object) -> None:
    """Make the rank's GPU the current one, unless the caller has used one: without it every rank would use GPU 0."""
    local_rank = os.environ.get("LOCAL_RANK", "")
    unused = device_type == "cuda" and torch.cuda.is_available() and not torch.cuda.is_initialized()
    if unused and local_rank.isdecimal() and int(local_rank) < torch.cuda.device_count():
        torch.cuda.set_device(int(local_rank))


def _world_size() -> int:
    """Return the number of ranks of the world, which torchrun has started if there is no process group yet."""
    if dist.is_initialized():
        return dist.get_world_size()
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        fix = "start the script with torchrun --nproc-per-node, or pass mesh=None for one process"
        raise MeshError("init_mesh", "a process group, or ranks that torchrun has started", "neither", fix)
    return int(os.environ["WORLD_SIZE"])


def _checked_shape(shape: object, subject: str = "init_mesh") -> Shape:
    counts = shape if isinstance(shape, (tuple, list)) else ()
    if len(counts) != len(AXES) or not all(type(n) is int and n >= 1 for n in counts):
        expected = "(heads, queries, keys), three whole numbers of ranks, each 1 or more"
        fix = "pass a tuple as (1, 2, 2), 1 for an axis that is not wanted, or what mesh_shape gives"
        raise MeshError(f"{subject} shape", expected, repr(shape), fix)
    return Shape(*counts)


def world_device_type() -> str:
    """Return the device type of the process group, or of this machine if there is no group."""
    if not torch.cuda.is_available():
        return "cpu"
    return device_type_of(dist.group.WORLD) if dist.is_initialized() else "cuda"


def init_plan_mesh(device_type: str, shape: Shape, tile: Shape) -> DeviceMesh:
    """Return the `DeviceMesh` of a plan: the ranks of one host share a tile of it. Collective."""
    ranks = shape.ranks
    fields = with_versions({"device_type": device_type, "shape": shape, "tile": tile})
    with Agreement(world_mesh(), "Plan.init_mesh", fields):
        check_device_type("Plan.init_mesh", device_type)
        world = world_mesh().keys.size
        if world != ranks:
            fix = f"start {ranks} ranks, or plan for as many as there are"
            raise MeshError("Plan.init_mesh", f"a world of {ranks} ranks", str(world), fix)
        _set_gpu(device_type)
    return DeviceMesh(device_type, rank_grid(shape, tile), mesh_dim_names=AXES)


def world_mesh() -> RankMesh:
    """Return a mesh of one axis with all ranks; of this rank alone before there is a process group."""
    if not dist.is_initialized():
        return RankMesh.of(None)
    return RankMesh(Axis(), Axis(), Axis(dist.get_world_size(), dist.get_rank(), dist.group.WORLD, "world"))


def device_for(device_mesh: DeviceMesh | None, device: object) -> torch.device:
    """Return the device given, or the mesh's unless one is given that PyTorch knows."""
    parsed = _parsed(device) or device_of(device_mesh)
    return torch.device("cpu") if parsed.type == "cpu" else parsed


def device_fault(subject: str, parsed: torch.device, device: object) -> DeviceError | None:
    """Return the error of a device that was given as `device` and read as `parsed`, or None."""
    fix = "leave it out for the mesh's device type"
    if device is not None and str(device).split(":")[0] != parsed.type:
        return DeviceError(f"{subject} device", "a device that PyTorch knows", repr(device), fix)
    if parsed.type == "meta":
        return DeviceError(f"{subject} device", "a device with memory", "'meta'", fix)
    try:
        torch.empty(0, device=parsed)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # each device type of PyTorch raises another
        why = str(error).splitlines()[0].rstrip(".")
        return DeviceError(f"{subject} device", "a device that is there", f"{str(parsed)!r} ({why})", fix)
    return None


def check_device_type(subject: str, device_type: object) -> None:
    """Raise unless `device_type` is a type of devices that PyTorch knows."""
    parsed = _parsed(device_type)
    if parsed is None or parsed.type != device_type:
        expected, fix = 'a type of devices, as "cpu" or "cuda"', 'pass "cpu" or "cuda", without a number'
        raise DeviceError(f"{subject} device_type", expected, repr(device_type), fix)


def _parsed(device: object) -> torch.device | None:
    """Return the device of a name, or None unless PyTorch knows it."""
    try:
        return torch.device(device) if isinstance(device, (str, torch.device)) else None
    except RuntimeError:
        return None
