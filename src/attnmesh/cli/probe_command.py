"""The command `attnmesh probe`: measure the constants of a world of ranks, for `attnmesh plan`."""

import json
import os
import socket
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from attnmesh.cli.launch import run_on_ranks
from attnmesh.cli.output import Status, command_line, console, pairs, print_json
from attnmesh.cost.cluster import Cluster
from attnmesh.cost.machine_constants import keep_machine
from attnmesh.cost.rates import NO_LINK
from attnmesh.errors import ClusterError
from attnmesh.mesh.axes import device_type_of
from attnmesh.mesh.shapes import AXES
from attnmesh.planner.units import seconds_text
from attnmesh.runtime.machine import machine
from attnmesh_command.plan_options import ProbeOptions


def probe(options: ProbeOptions) -> None:
    """Measure links and devices of all ranks at work, and keep the constants."""
    ranks = options.ranks
    torchrun = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if torchrun:
        check_master()
        dist.init_process_group()
    is_first = not torchrun or dist.get_rank() == 0
    with Status("measuring the ranks of torchrun" if torchrun else f"measuring {ranks} ranks"):
        cluster = measured() if torchrun else run_on_ranks(ranks, measured)[0]
    kind = device_type_of(dist.group.WORLD) if torchrun else "cpu"
    first_of_host = os.environ.get("LOCAL_RANK", "0") == "0"  # also without torchrun
    file = keep_machine(cluster, kind) if first_of_host else None
    if torchrun:
        dist.destroy_process_group()
    if not is_first:
        return
    command = "torchrun ... attnmesh probe" if torchrun else command_line("attnmesh probe", {"ranks": ranks})
    report = {"command": command, "machine": machine(), "cluster": cluster.record(), "kept": file and str(file)}
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if options.as_json:
        print_json(report)
        return
    console.print(pairs(cluster.title, described(cluster)))
    if file is not None:
        console.print(f'exchange="auto" reads them from {file}')
    if options.verbose:
        console.print(PROBE_EXPLAINED)


PROBE_EXPLAINED = """\
Figures are medians of a few rounds on the slowest rank, but for those of unequal ranks. All ranks work at once, so each
has its share of cores, memory and links, as in a run. Attention has 8 heads over 512 tokens (8,192 on a GPU). Reading
is one query over keys larger than a CPU's cache. A message has 16 kB. In a merge, ranks of one host may use shared
memory."""


def measured() -> Cluster:
    """Return the measured cluster, the same on all ranks."""
    world = dist.get_world_size()
    kind = device_type_of(dist.group.WORLD)
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return Cluster.measure(init_device_mesh(kind, (1, 1, world), mesh_dim_names=AXES) if world > 1 else None)


def check_master() -> None:
    """Raise at once if the host of the rendezvous has no address."""
    name = os.environ.get("MASTER_ADDR", "")
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        fix = "pass torchrun a --master-addr or --rdzv-endpoint that every host can look up"
        raise ClusterError("attnmesh probe", "a host that can be found", f"{name!r} ({error})", fix) from None


def described(cluster: Cluster) -> dict[str, Any]:
    """Return the constants of a cluster as text with units."""
    device = cluster.device
    copied = "" if device.copy_rate is None else f", copied {device.copy_rate / 1e9:,.2f} GB/s"
    lines = {
        "attention": f"{device.forward_rate / 1e9:,.1f} GFLOP/s forward, {device.backward_rate / 1e9:,.1f} backward",
        "keys read": f"{device.memory_rate / 1e9:,.2f} GB/s" + copied,
        "memory": f"{device.memory / 1e9:,.1f} GB a rank",
        "a call": seconds_text(device.call, 3),
        "a run": seconds_text(device.call if device.run is None else device.run, 3),
    }
    if device.wait:
        lines["a wait for a core"] = seconds_text(device.wait, 3)
    if cluster.rates:
        lines["each rank reads"] = ", ".join(f"{rate / 1e9:,.2f}" for rate in cluster.rates) + " GB/s"
        lines["each has free"] = ", ".join(f"{free / 1e9:,.1f}" for free in cluster.memories) + " GB"
        lines["unequal ranks"] = f"generate and serve --shares {','.join(map(str, cluster.shares()))}"
    for name, link in (("inside a host", cluster.inside), ("between hosts", cluster.between)):
        if link != NO_LINK:
            first, further, merge = (seconds_text(x, 3) for x in (link.latency, link.message, link.merge_latency))
            lines[f"message {name}"] = f"{first}, each further {further}, in a merge {merge}"
            lines[f"rate {name}"] = f"{link.rate / 1e6:,.1f} MB/s a rank, {link.host_rate / 1e6:,.1f} a host"
    return lines
