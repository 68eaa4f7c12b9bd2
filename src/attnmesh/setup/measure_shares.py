"""Read rate and free memory of each rank, and the shares that follow from them."""

import time
from dataclasses import replace
from zlib import crc32

import torch

from attnmesh.comm.topology import agreed_mesh_hosts, dist_all_gather_ints
from attnmesh.core.mask import FULL
from attnmesh.core.scaling import Scaling
from attnmesh.cost.cluster import Cluster
from attnmesh.kernels.prepared_local import PreparedLocal
from attnmesh.mesh.axes import RankMesh
from attnmesh.mesh.shares import recommended_shares
from attnmesh.runtime.memory import free_memory

READ_SECONDS = 0.5
"""Seconds for which each rank reads: several periods of a limit on its cores."""

MEASURED_TOKENS = {"cpu": 2**15, "cuda": 2**18}
"""Tokens that are read by 8 heads of 64 columns in float32: more than a CPU of many cores, or a GPU, caches for one."""


def agreed_shares(mesh: RankMesh, device: torch.device, needed: float = 0.0) -> tuple[int, ...]:
    """Return the shares of the ranks along queries and keys, the same on all ranks. Collective.

    Args:
        mesh: The mesh of all ranks.
        device: This rank's device.
        needed: Bytes of the whole cache; 0 if they are not known.
    """
    token_ranks = mesh.queries.size * mesh.keys.size
    if token_ranks == 1:
        return (1,)
    rates = read_rates(mesh, device)
    free = free_of_ranks(mesh, device)
    # Ranks along the heads axis share tokens.
    sharing = [range(first, mesh.ranks, token_ranks) for first in range(token_ranks)]
    rates, free = ([min(by_rank[shard] for shard in shards) for shards in sharing] for by_rank in (rates, free))
    return recommended_shares(rates, free, needed / mesh.heads.size)


def with_rates(cluster: Cluster, mesh: RankMesh, device: torch.device) -> Cluster:
    """Return a cluster with the read rates and free memory of its ranks, if they read at unequal rates."""
    rates = read_rates(mesh, device)
    if len({*recommended_shares(rates)}) == 1:
        return cluster
    return replace(cluster, rates=tuple(rates), memories=tuple(free_of_ranks(mesh, device)))


def read_rates(mesh: RankMesh, device: torch.device) -> list[int]:
    """Return the bytes/s that each rank reads as a decode step does, by shard, while all read."""
    shape = 2, 1, 8, MEASURED_TOKENS[device.type], 64
    k, v = torch.zeros(shape, device=device, dtype=torch.float32).unbind()
    q = torch.zeros(1, 8, 1, 64, device=device, dtype=torch.float32)
    prepared = PreparedLocal.of(q, k, v, FULL, Scaling(0.125), "auto")
    reads = 0
    with torch.no_grad():
        prepared.attend(q, k, v, None)  # the first one also prepares
        _synchronize(device)
        dist_all_gather_ints([0], mesh.axes)
        start = time.perf_counter()
        while (seconds := time.perf_counter() - start) < READ_SECONDS:
            prepared.attend(q, k, v, None)
            _synchronize(device)
            reads += 1
    rate = int(reads * 2 * k.nbytes / seconds)
    return [found for (found,) in dist_all_gather_ints([max(1, rate)], mesh.axes)]


def free_of_ranks(mesh: RankMesh, device: torch.device, free: int | None = None) -> list[int]:
    """Return the free bytes of each rank, by shard. Ranks of one device, or of a host's memory, have equal parts.

    `free` are the free bytes of this rank's device; by default the device is asked.
    """
    payloads = dist_all_gather_ints([_device_number(device), free_memory(device) if free is None else free], mesh.axes)
    near = [*zip(agreed_mesh_hosts(mesh), (payload[0] for payload in payloads), strict=True)]
    return [payload[1] // near.count(at) for payload, at in zip(payloads, near, strict=True)]


def _device_number(device: torch.device) -> int:
    """Return -1 for a CPU, and for a GPU a hash of its UUID: indices count the GPUs that a process sees."""
    return -1 if device.type == "cpu" else crc32(str(torch.cuda.get_device_properties(device).uuid).encode())


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
