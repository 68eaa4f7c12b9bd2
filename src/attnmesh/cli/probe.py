"""The command `attnmesh probe`: the constants of a running world, for `attnmesh plan` to go by."""

import os
import socket
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch.distributed.device_mesh import init_device_mesh

from attnmesh.cli.netns import as_asked, run_on, world_of
from attnmesh.cli.output import AsJson, HostsOption, OutFile, Verbose, console, machine, pairs, progress, published
from attnmesh.errors import ClusterError
from attnmesh.mesh.axes import device_type_of
from attnmesh.mesh.shapes import AXES
from attnmesh.planner.cluster import Cluster
from attnmesh.planner.hardware import NO_LINK
from attnmesh.planner.plan import in_seconds


def probe(
    ranks: Annotated[int, typer.Option(min=1, help="Ranks to start on this machine, of one thread each.")] = 4,
    hosts: HostsOption = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
    out: OutFile = None,
) -> None:
    """Measure links and devices while all ranks are at work (20 s): of the ranks of torchrun, or of some started here.

    The file that `--out` writes is a cluster for `attnmesh plan --cluster FILE`.
    """
    by_torchrun = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if by_torchrun:
        check_master()
        dist.init_process_group()
        found = measured()
        first, command = dist.get_rank() == 0, "torchrun ... attnmesh probe"
        dist.destroy_process_group()
        if not first:
            return
    else:
        world = world_of(ranks, hosts)
        with progress.status(f"measuring {as_asked(world)[2:]}"):
            found = run_on(world, measured)[0]
        command = f"attnmesh probe {as_asked(world)}"
    report = {"command": command, "machine": machine(), "cluster": found.record()}
    if published(report, as_json, out):
        return
    console.print(pairs(f"{found.hosts} hosts of {found.ranks} ranks", told(found)))
    if verbose:
        console.print(PROBE_EXPLAINED)


PROBE_EXPLAINED = """\
Medians of a few rounds, and of the ranks the slowest. Every rank works at once, so each has its share of cores, memory
and links, as in a run. Attention is that of 8 heads over 512 tokens (8,192 on a GPU); reading is one query over keys
that do not fit a cache. A message is one of 16 kB; in merges ranks of a host may go by memory that they share."""


def measured() -> Cluster:
    """On each rank: what all find."""
    world = dist.get_world_size()
    kind = device_type_of(dist.group.WORLD)
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return Cluster.measure(init_device_mesh(kind, (1, 1, world), mesh_dim_names=AXES) if world > 1 else None)


def check_master() -> None:
    """Raise if the host that ranks are to meet at has no address, rather than wait for it."""
    name = os.environ.get("MASTER_ADDR", "")
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        fix = "pass torchrun a --master-addr or --rdzv-endpoint that every host can look up"
        raise ClusterError("attnmesh probe", "a host that can be found", f"{name!r} ({error})", fix) from None


def told(cluster: Cluster) -> dict[str, Any]:
    """What was found, in the units of people."""
    device = cluster.device
    found = {
        "attention": f"{device.forward_rate / 1e9:,.1f} GFLOP/s forward, {device.backward_rate / 1e9:,.1f} backward",
        "keys read": f"{device.memory_rate / 1e9:,.2f} GB/s, copied {(device.copy_rate or 0) / 1e9:,.2f} GB/s",
        "memory": f"{device.memory / 1e9:,.1f} GB a rank",
        "a call": in_seconds(device.call),
    }
    for name, link in (("inside a host", cluster.inside), ("between hosts", cluster.between)):
        if link != NO_LINK:
            latency = f"{in_seconds(link.latency)}, in a merge {in_seconds(link.merge_latency)}"
            further = f"each further {in_seconds(link.message)}"
            rates = f"{link.rate / 1e6:,.1f} MB/s a rank, {link.host_rate / 1e6:,.1f} a host"
            found[name] = f"a message {latency}, {further}; {rates}"
    return found
