"""Random numbers: all ranks of a mesh draw the same in generation, and each its own where they are of its tokens."""

import pickle
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm.gather import all_gather_ints, all_gather_texts
from attnmesh.comm.topology import dist_all_gather_ints
from attnmesh.core.digest import digest
from attnmesh.guard.agreement import Agreement
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


def synchronize_all_generators(device_mesh: DeviceMesh | None, device: torch.device) -> None:
    """Set the generators of PyTorch, Python and NumPy on all ranks of each mesh to the state of the mesh's first rank.

    Collective on a mesh of several ranks.
    """
    synchronize_generators((device_mesh,), device)
    mesh = RankMesh.of(device_mesh)
    if mesh.ranks > 1:
        own = pickle.dumps((random.getstate(), np.random.get_state()))
        own_hash = int.from_bytes(blake2b(own, digest_size=7).digest())
        if any(other != own_hash for (other,) in all_gather_ints([own_hash], mesh)):
            python, numpy = pickle.loads(bytes.fromhex(all_gather_texts(own.hex(), mesh)[0]))
            random.setstate(python)
            np.random.set_state(numpy)


@contextmanager
def own_random_numbers(rank: int, device: torch.device) -> Iterator[None]:
    """Let a rank draw numbers of its own in this context, though all ranks have the same seed.

    The generators of the CPU and the device then are as they were. If some were drawn, that of the CPU is one number
    further, whatever a rank has drawn, so ranks stay alike and the next context has other numbers.
    """
    sources = [*dict.fromkeys((torch.device("cpu"), device))]
    before = [random_state(source) for source in sources]
    seed = int(torch.randint(2**62, (), device="cpu"))
    after = [torch.get_rng_state(), *before[1:]]
    for source in sources:
        generator_of(source).manual_seed(seed + rank)
    seeded = [random_state(source) for source in sources]
    try:
        yield
    finally:
        is_unused = all(torch.equal(random_state(x), state) for x, state in zip(sources, seeded, strict=True))
        for source, state in zip(sources, before if is_unused else after, strict=True):
            set_random_state(source, state)


def generator_of(device: torch.device) -> torch.Generator:
    """Return the default generator of a device."""
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def random_state(device: torch.device) -> Tensor:
    """Return the state of a device's random generator."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Set the state of a device's random generator."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
