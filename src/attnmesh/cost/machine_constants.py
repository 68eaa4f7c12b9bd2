"""The constants of this machine, with which exchanges and merges are priced: rates of its device and its links.

`attnmesh probe` measures them and keeps them in a file. Without it, those of the preset most like this machine are
taken. Callers pass which ranks share a host.
"""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from attnmesh.cost.cluster import Cluster
from attnmesh.errors import ClusterError, warn_once
from attnmesh.mesh.shapes import Shape
from attnmesh.runtime.machine import cache_folder, cores_here, cpu_name
from attnmesh.runtime.memory import host_memory

PRESET_OF_GPU = {
    "H100": "dgx-h100",
    "H200": "dgx-h200",
    "A100": "a100x4",
    "MI300X": "mi300x",
    "MI300A": "mi300x",
    "4090": "rtx4090",
    "GB200": "gb200-nvl72",
    "B200": "dgx-b200",
}
"""Presets by a word of the GPU's name."""


def preset_for(device: torch.device) -> str:
    """Return the name of the preset most like this rank's device."""
    if device.type == "cpu":
        return "local"
    words = re.split(r"\W+", torch.cuda.get_device_name(device)) if device.type == "cuda" else []
    return next((preset for word, preset in PRESET_OF_GPU.items() if word in words), "dgx-h100")


def machine_file(device_type: str) -> Path | None:
    """Return the file of this machine's constants, or None where the user's folder is not known.

    `ATTNMESH_MACHINE` names another file. If it is empty, there is none.
    """
    path = os.environ.get("ATTNMESH_MACHINE")
    if path is not None:
        return Path(path) if path else None
    name = torch.cuda.get_device_name() if device_type == "cuda" else f"{cpu_name()} {os.cpu_count()}"
    folder = cache_folder()
    return None if folder is None else folder / f"machine-{sha256(name.encode()).hexdigest()[:12]}.json"


def keep_machine(cluster: Cluster, device_type: str) -> Path | None:
    """Write the constants that `auto` reads, and return their file; None where it cannot be written."""
    file = machine_file(device_type)
    if file is None:
        return None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps({"device": device_type, "cluster": cluster.record()}, indent=1), encoding="utf-8")
        scratch.replace(file)  # at once: another process may read it
    except OSError:
        return None
    return file


@cache
def measured_machine(device_type: str) -> tuple[Cluster, int] | None:
    """Return the constants that `attnmesh probe` has kept, with a hash of their file; None if there are none."""
    file = machine_file(device_type)
    if file is None or not file.is_file():
        return None
    try:
        text = file.read_bytes()
        record = json.loads(text)
        if record["device"] != device_type:
            return None
        return Cluster.of_record(record["cluster"]), int.from_bytes(sha256(text).digest()[:7])
    except (OSError, ValueError, KeyError, TypeError, ClusterError) as error:
        why = " ".join(str(error).split())
        warn_once(f"{file} is not read: {why}. Presets are used. Fix: run attnmesh probe, or remove the file.")
        return None


def share_of_cores(device: torch.device) -> float:
    """Return the share of this host's cores that a rank's threads take; 0 for a rank with a GPU."""
    return min(1.0, torch.get_num_threads() / cores_here()) if device.type == "cpu" else 0.0


def cluster_of(hosts: int, ranks: int, base: Cluster, preset: str, share: float = 0.0) -> Cluster:
    """Return the base with these counts; the preset if the base has no links for them.

    `share` is the part of its host's cores that a rank's threads take. A preset has the rates of a rank that has these
    cores alone. Measured rates are of ranks that shared the cores of a host, `base.ranks` of them.
    """
    measured = True
    try:
        cluster = base.sized(hosts, ranks)
    except ClusterError:
        cluster = Cluster.preset(preset).sized(hosts, ranks)
        measured = False
    before = max(1.0, share * base.ranks) if measured and base.name != preset else 1.0
    now = max(1.0, share * ranks)
    return cluster if now == before else replace(cluster, device=cluster.device.of_cores(before / now))


def this_machine(ranks: int, device_type: str = "cpu", hosts: int = 1) -> Cluster:
    """Return the cluster of `hosts` hosts like this machine, with `ranks` ranks each.

    Its constants are those that `attnmesh probe` has kept, or those of the preset most like this machine. Ranks on CPUs
    share the cores and the memory.
    """
    preset = preset_for(torch.device(device_type))
    measured = measured_machine(device_type)
    base = Cluster.preset(preset) if measured is None else measured[0]
    if device_type != "cpu":
        return cluster_of(hosts, ranks, base, preset)
    cores = cores_here()
    cluster = cluster_of(hosts, ranks, base, preset, max(1, cores // ranks) / cores)
    return replace(cluster, device=replace(cluster.device, memory=host_memory() / ranks))


def cluster_and_tile(
    hosts: Sequence[int], shape: Shape, base: Cluster, preset: str, share: float = 0.0
) -> tuple[Cluster, Shape]:
    """Return the cluster of a mesh, and the tile of the mesh that one host holds.

    `hosts` has the host number of each shard. If hosts hold different tiles, each rank counts as a host.
    """
    where = torch.tensor([hosts.index(host) for host in hosts], device="cpu").reshape(tuple(shape))
    lines = (where[:, 0, 0], where[0, :, 0], where[0, 0, :])
    tile = Shape(*(int((line == 0).sum()) for line in lines))
    count = len(set(hosts))
    if count * tile.ranks != shape.ranks or not _is_tiled(where, tile):
        count = shape.ranks
        tile = Shape(1, 1, 1)
    return cluster_of(count, tile.ranks, base, preset, share), tile


def _is_tiled(where: Tensor, tile: Shape) -> bool:
    """Return whether each tile of the mesh is on one host, which `where` has for each rank."""
    if any(ranks % part for ranks, part in zip(where.shape, tile, strict=True)):
        return False
    tiles = where.unflatten(2, (-1, tile.keys)).unflatten(1, (-1, tile.queries)).unflatten(0, (-1, tile.heads))
    return bool((tiles == tiles[:, :1, :, :1, :, :1]).all())
