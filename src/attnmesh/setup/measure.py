"""Measure the constants of a running world for the planner, in a few seconds.

All ranks work during each measurement, so that a rank has the share of cores, memory and links that it has in a run.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm.rank_merge import merge_ranks
from attnmesh.comm.topology import dist_all_gather_ints, host_mailboxes, hosts, subgroup_of
from attnmesh.comm.transport import flat_axis
from attnmesh.core.mask import FULL, Documents, Mask
from attnmesh.core.partial import Partial
from attnmesh.core.scaling import Scaling
from attnmesh.core.selection import Visible
from attnmesh.errors import ClusterError, require
from attnmesh.guard.agreement import Agreement, prepare_merges
from attnmesh.guard.argument_checks import check_dtype
from attnmesh.kernels.local_op import run_attend
from attnmesh.kernels.prepared_local import PreparedLocal
from attnmesh.mesh.axes import Axis, Mesh, device_of
from attnmesh.mesh.cluster import Cluster
from attnmesh.mesh.rates import NO_LINK, Device, Link
from attnmesh.mesh.shapes import AXES
from attnmesh.setup.measure_shares import with_rates

ROUNDS = 5
"""Repetitions of each measurement. The result is the largest of the ranks' medians."""

MERGE_BYTES = 16384
"""Bytes of a short message, such as a merge sends."""

RUNS = 8
"""Runs of tokens that are timed beside one call of as many pairs."""

IN_A_ROW = 6
"""Short calls that are timed together: ranks do not begin at quite the same time."""

WORK = 512
"""Rows and columns of a product that is about as much work as a layer of a small model."""

LEAST_ALONE = 1.5
"""Least `Device.alone` of ranks that share cores. Ranks with cores of their own may be slower too, by memory."""

LONG_MESSAGE = 0.12
"""Seconds that one long message should take at most."""


@dataclass(frozen=True)
class MeasuredRanks:
    """The ranks of an axis that are measured, by host."""

    axis: Axis
    device: torch.device
    hosts: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(axis: Axis, device: torch.device) -> "MeasuredRanks":
        """Return the ranks of an axis. All of them call it at once."""
        host_ranks = hosts(axis) if axis.size > 1 else [[0]]
        return MeasuredRanks(axis, device, tuple(map(tuple, host_ranks)))

    @property
    def host_and_index(self) -> tuple[int, int]:
        """Number of this rank's host, and its index on it."""
        return next((h, host.index(self.axis.index)) for h, host in enumerate(self.hosts) if self.axis.index in host)

    def lines(self, *, between: bool) -> list[list[int]]:
        """Return the ranks of each host, or with `between` the ranks with the same index on all hosts."""
        if not between:
            return [list(host) for host in self.hosts]
        return [[host[index % len(host)] for host in self.hosts] for index in range(max(map(len, self.hosts)))]

    def line(self, *, between: bool) -> list[int]:
        """Return the ranks of this one's line, from this one on."""
        host, index = self.host_and_index
        lines = self.lines(between=between)
        own_line, place = (lines[index], host) if between else (lines[host], index)
        return [*own_line[place:], *own_line[:place]]

    def median(self, call: Callable[[], Any], rounds: int = ROUNDS, *, until_all: bool = False) -> float:
        """Return the median seconds of a call that all ranks begin together, without the first, of the slowest rank.

        With `until_all` the time runs until all ranks are done.
        """
        times = [self.seconds(call, until_all=until_all) for _ in range(rounds + 1)]
        seconds = statistics.median(times[1:])
        if self.axis.group is None:
            return seconds
        return max(row[0] for row in dist_all_gather_ints([int(seconds * 1e9)], [self.axis])) / 1e9

    def seconds(self, call: Callable[[], Any], times: int = 1, *, until_all: bool = False) -> float:
        """Return the seconds of a call, or of several in a row, that all ranks begin together."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(times):
            call()
        self.synchronize(together=until_all)
        return time.perf_counter() - start

    def short(self, call: Callable[[], Any]) -> float:
        """Return the median seconds of a short call, measured over several in a row."""
        return self.median(lambda: [call() for _ in range(IN_A_ROW)], 2 * ROUNDS) / IN_A_ROW

    def synchronize(self, *, together: bool = True) -> None:
        """Wait for the device, and with `together` for the other ranks."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if together and self.axis.group is not None:
            dist.barrier(group=self.axis.group)


def measure_device(world: MeasuredRanks, dtype: torch.dtype) -> Device:
    """Return the rates of a rank while all ranks work, and its memory."""
    gpu = world.device.type == "cuda"
    tokens, width = (8192, 128) if gpu else (512, 64)
    q, k, v = torch.randn(3, 1, 8, tokens, width, device=world.device, dtype=dtype).unbind()
    flops = 4 * 8 * tokens * tokens * width
    learned = [x.clone().requires_grad_() for x in (q, k, v)]
    scaling = Scaling(width**-0.5)

    def attending(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask = FULL) -> Callable[[], object]:
        return partial(PreparedLocal.of(q, k, v, mask, scaling, "auto").attend, q, k, v, None)

    def both() -> None:
        out, _ = run_attend(learned[0], learned[1], learned[2], Visible(FULL), scaling, "auto")
        torch.autograd.grad(out.sum(), learned)

    with torch.no_grad():
        attend_all = attending(q, k, v)
        forward = world.median(attend_all, until_all=True)
        alone_seconds = world.median(lambda: attend_all() if world.axis.index == 0 else None, until_all=True)
        few = [x[:, :, :8].contiguous() for x in (q, k, v)]
        call = world.short(attending(*few))
        head = [x[:, :1] for x in (q, k, v)]
        block = tokens // RUNS
        at_once = attending(head[0], *(x[:, :, :block] for x in head[1:]))
        in_runs = attending(*head, mask=FULL & Documents([block] * RUNS))
        run_seconds = max(0.0, world.short(in_runs) - world.short(at_once)) / (RUNS - 1)
        keys = torch.randn(2, 1, 8, 2**20 if gpu else 2**15, width, device=world.device, dtype=dtype)
        read_seconds = world.median(attending(few[0][:, :, :1], *keys.unbind()))
        copy = world.median(keys.clone)
    backward = max(world.median(both, until_all=True) - forward, forward)
    bytes_read = keys.numel() * keys.element_size()
    rates = flops / forward, 2.5 * flops / backward, bytes_read / max(read_seconds - call, 1e-9)
    speed_up = max(1.0, forward / alone_seconds)  # of a rank that works alone
    # A run is two calls: of its own keys, and of those before.
    return Device(
        *rates, _memory(world), copy_rate=2 * bytes_read / copy, call=call, run=2 * run_seconds, alone=speed_up
    )


def measure_link(world: MeasuredRanks, *, between: bool) -> Link:
    """Return the rates of the links inside hosts or between them, if there are any."""
    _, index = world.host_and_index
    lines = world.lines(between=between)
    most_ranks = max(map(len, world.hosts))
    line = world.line(between=between)
    if max(map(len, lines)) < 2:
        return NO_LINK
    latency = world.short(lambda: _exchange(world, line, MERGE_BYTES))
    several = min(15, len(line) - 1)
    many = world.short(lambda: _exchange(world, line, MERGE_BYTES, several))
    bytes_ = 1 << 18
    once = world.median(lambda: _exchange(world, line, bytes_), 2)
    bytes_ = int(min(1 << 24, max(1 << 18, bytes_ * LONG_MESSAGE / once)))
    together = world.median(lambda: _exchange(world, line, bytes_), 3)
    alone = world.median(lambda: _exchange(world, line if index == 0 or not between else [], bytes_), 3)
    host_rate = most_ranks * bytes_ / max(together - latency, 1e-9)
    short_latency = latency if between else world.short(lambda: _swap_near(world, line))
    rank_rate = bytes_ / max((alone if between else together) - latency, 1e-9)
    message = max(0.0, (many - latency) / max(1, several - 1))
    step = _step(world, lines, short_latency)
    return Link(latency, rank_rate, max(host_rate, rank_rate), short=short_latency, step=step, message=message)


def measure_wait(world: MeasuredRanks, alone: float) -> float:
    """Return the seconds that a merge takes longer between pieces of work than alone, where ranks share cores.

    Each round times all three, since what else runs on a machine changes its speed. The result is the mean of the
    ranks, which begin a merge one after the other and end it together.
    """
    if world.axis.size == 1 or world.device.type != "cpu" or alone < LEAST_ALONE:
        return 0.0
    factor = torch.randn(WORK, WORK, dtype=torch.float32, device="cpu")
    out = factor.new_zeros(1, 1, 1, MERGE_BYTES // factor.itemsize)
    prepare_merges(world.axis)

    def merge() -> None:
        merge_ranks(Partial(out, out[..., 0]), factor.new_zeros(2), world.axis, "tree", "replicated")

    def work_and_merge() -> None:
        work()
        merge()

    work = partial(torch.mm, factor, factor)
    waits = []
    for _ in range(2 * ROUNDS + 1):
        together, *apart = [world.seconds(call, IN_A_ROW) for call in (work_and_merge, work, merge)]
        waits.append((together - sum(apart)) / IN_A_ROW)
    wait = statistics.median(waits[1:])
    return max(0.0, statistics.mean(row[0] for row in dist_all_gather_ints([int(wait * 1e9)], [world.axis])) / 1e9)


def _step(world: MeasuredRanks, lines: list[list[int]], first_step: float) -> float:
    """Return the seconds of each step of a collective, whose first step takes at least as long as a message."""
    mine = next(line for line in lines if world.axis.index in line)
    number = torch.zeros(1, 4, dtype=torch.int64, device=world.device)
    group = subgroup_of(world.axis, tuple(mine))
    numbers = [torch.empty_like(number) for _ in mine]
    took = world.short(lambda: dist.all_gather(numbers, number, group=group))
    further = (took - first_step) / max(1, len(mine) - 2)
    return further if len(mine) > 2 and 0 < further <= first_step else took / (len(mine) - 1)


def _exchange(world: MeasuredRanks, line: Sequence[int], size: int, peers: int = 1) -> None:
    """Send to the next ranks of a line that begins with this rank, and receive from the last."""
    message = torch.empty(size, dtype=torch.uint8, device=world.device)
    group = world.axis.group
    other_ranks = line[1:]
    posts = [
        dist.P2POp(dist.irecv, torch.empty_like(message), group=group, group_peer=peer) for peer in other_ranks[-peers:]
    ]
    posts += [dist.P2POp(dist.isend, message, group=group, group_peer=peer) for peer in other_ranks[:peers]]
    for work in dist.batch_isend_irecv(posts) if posts else []:
        work.wait()


def _swap_near(world: MeasuredRanks, line: Sequence[int]) -> None:
    """Send and receive a short message inside a host, as a merge does."""
    mailboxes = host_mailboxes(world.axis) if world.device.type == "cpu" else None
    message = torch.empty(MERGE_BYTES, dtype=torch.uint8, device=world.device)
    if mailboxes is None or len(line) < 2:
        _exchange(world, line, MERGE_BYTES)
        return
    mailboxes.send(line[1], message)
    mailboxes.recv(line[-1], message.clone())


def measure(mesh: DeviceMesh | None, dtype: torch.dtype | None = None) -> Cluster:
    """Return the measured cluster of a mesh's ranks. Every rank of the mesh calls it."""
    axes = Mesh.of(mesh)
    device = device_of(mesh)
    with Agreement(axes, "Cluster.measure", {"dtype": dtype}):
        check_dtype("Cluster.measure dtype", dtype, "pass the dtype of q, k and v, or leave it out")
    axis = flat_axis(mesh, AXES)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    world = MeasuredRanks.of(axis, device)
    sizes = {len(host) for host in world.hosts}
    expected, fix = "as many ranks on each host", "start as many ranks on each host"
    require(len(sizes) == 1, ClusterError, "Cluster.measure", expected, f"hosts of {sorted(sizes)}", fix)
    dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    device_rates = measure_device(world, dtype)
    inside, between = measure_link(world, between=False), measure_link(world, between=True)
    device_rates = replace(device_rates, wait=measure_wait(world, device_rates.alone))
    ranks = sizes.pop()
    collectives = "ring" if device.type == "cpu" else "tree"
    source = (("all", f"measured on {world.axis.size} ranks in {dtype}, all at work, torch {torch.__version__}"),)
    name = f"measured {len(world.hosts)}x{ranks}"
    cluster = Cluster(
        name, len(world.hosts), ranks, device_rates, inside, between, short_collectives=collectives, sources=source
    )
    return cluster if axis.size == 1 else with_rates(cluster, axes, device)


def _memory(world: MeasuredRanks) -> float:
    """Return the bytes of memory per rank: the GPU's, or a share of the host's."""
    if world.device.type == "cuda":
        return float(torch.cuda.get_device_properties(world.device).total_memory)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return float(pages) / max(map(len, world.hosts))
