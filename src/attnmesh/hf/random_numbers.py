"""Random numbers of generation: all ranks of a mesh draw the same."""

from collections.abc import Iterable

import torch
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm.topology import dist_all_gather_ints
from attnmesh.core.digest import digest
from attnmesh.guard.agreement import Agreement
from attnmesh.hf.generation_checkpoint import random_state, set_random_state
from attnmesh.mesh.axes import RankMesh


def synchronize_generators(device_meshes: Iterable[DeviceMesh | None], device: torch.device) -> None:
    """Set the random generators of all ranks of each mesh to the state of the mesh's first rank.

    Collective on each mesh of several ranks.
    """
    sources = [*dict.fromkeys((torch.device("cpu"), device))]
    for mesh in (mesh for mesh in map(RankMesh.of, device_meshes) if mesh.ranks > 1):
        states = [random_state(source) for source in sources]
        digests = [int(digest(state)) for state in states]
        payloads = Agreement(mesh, "random numbers").compare(payload=digests)
        differ = any(payload != digests for payload in payloads)
        for source, state in zip(sources, states, strict=True) if differ else ():
            first = dist_all_gather_ints(state.tolist(), mesh.axes)[0]
            set_random_state(source, torch.tensor(first, dtype=torch.uint8, device="cpu"))
