"""Meshes of the ranks of a world, who agree on them before they make them: who failed alone would be waited for."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from attnmesh.agree import agreed, told
from attnmesh.errors import DeviceError, MeshError
from attnmesh.mesh import AXES, Axis, Mesh, Shape, check_heads, device_of, elements


def init_mesh(device_type: str, shape: Shape, q_heads: int, kv_heads: int) -> DeviceMesh:
    """A `DeviceMesh` of that shape whose neighbours in rank, those of one host, share the axis that carries most.

    Every rank of the world asks for the same.
    """

    def check() -> None:
        check_device_type("init_mesh", device_type)
        if not isinstance(shape, Shape):
            fix = "pass what mesh_shape gives, or attnmesh.Shape(heads, queries, keys)"
            raise MeshError("init_mesh", "a Shape", repr(shape), fix)
        check_heads("init_mesh", shape.ranks, q_heads, kv_heads)
        if dist.is_initialized() and shape.ranks > dist.get_world_size():
            expected, given = f"at most the world's {dist.get_world_size()} ranks", "x".join(map(str, shape))
            raise MeshError("init_mesh", expected, given, "start more ranks, or ask mesh_shape for a smaller one")

    call = told("init_mesh", device_type=device_type, shape=shape, q_heads=q_heads, kv_heads=kv_heads)
    agreed(everyone(), check, call)
    sent = elements(shape, q_heads, kv_heads)._asdict()
    names = tuple(sorted(AXES, key=lambda name: sent[name]))
    return init_device_mesh(device_type, tuple(getattr(shape, name) for name in names), mesh_dim_names=names)


def everyone() -> Mesh:
    """All ranks in line; before there are process groups, nobody can be asked."""
    if not dist.is_initialized():
        return Mesh.of(None)
    return Mesh(Axis(), Axis(), Axis(dist.get_world_size(), dist.get_rank(), dist.group.WORLD, "world"))


def device_for(mesh: DeviceMesh | None, device: object) -> torch.device:
    """The device asked for, if there is such, else that of the mesh."""
    try:
        if isinstance(device, (str, torch.device)):
            found = torch.device(device)
            return torch.device("cpu") if found.type == "cpu" else found
    except RuntimeError:
        pass
    return device_of(mesh)


def device_fault(subject: str, found: torch.device, device: object) -> DeviceError | None:
    """What is wrong with the device asked for, of which that was found, if anything is."""
    fix = "leave it out for the mesh's device type"
    if device is not None and str(device).split(":")[0] != found.type:
        return DeviceError(f"{subject} device", "a device that PyTorch knows", repr(device), fix)
    try:
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # each of PyTorch's devices has its own
        why = str(error).splitlines()[0].rstrip(".")
        return DeviceError(f"{subject} device", "a device that is there", f"{str(found)!r} ({why})", fix)
    return None


def check_device_type(subject: str, device_type: object) -> None:
    """Raise unless PyTorch knows such devices."""
    try:
        if isinstance(device_type, str) and torch.device(device_type).type == device_type:
            return
    except RuntimeError:
        pass
    fix = "name one without a number: each rank has the device that it has set"
    raise DeviceError(f"{subject} device_type", 'a type of devices, as "cpu" or "cuda"', repr(device_type), fix)
