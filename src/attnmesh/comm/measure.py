"""The constants of a running world of ranks, measured while all its ranks are at work, in seconds altogether.

A rank that has its share of a core, of a memory or of a link is measured with that share: what is measured alone is
seldom had in a run.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm.consensus import describe_call, run_agreed
from attnmesh.comm.p2p import all_gather_ints
from attnmesh.comm.topology import hosts, mailboxes_of
from attnmesh.core.checks import DTYPES
from attnmesh.errors import ClusterError, DtypeError
from attnmesh.kernels.attend import attend
from attnmesh.mesh.axes import Axis, Mesh, device_of, flat_axis
from attnmesh.mesh.shapes import AXES
from attnmesh.planner.cluster import Cluster
from attnmesh.planner.hardware import NO_LINK, Device, Link

ROUNDS = 5
"""Times that each figure is taken; the median counts, and of the ranks' medians the largest."""

SHORT = 16384
"""Bytes of a short message, as merges send."""

IN_A_ROW = 6
"""Short ones that are timed together, as they follow each other in a run: ranks do not begin quite at once."""

TIMEOUT = 0.12
"""Seconds that one long message may take."""


class Figures(NamedTuple):
    """What the device does: flop/s, bytes/s, seconds of a call that has nothing to do; times faster if others rest."""

    forward: float
    backward: float
    read: float
    copy: float
    call: float
    alone: float


class Line(NamedTuple):
    """What a class of links does, in seconds and bytes/s.

    Of a message, a short one in a merge, each further one at the same time, and each step that a collective takes.
    """

    latency: float
    short: float
    message: float
    step: float
    rank_rate: float
    host_rate: float


@dataclass(frozen=True)
class World:
    """The ranks in line, by host."""

    axis: Axis
    device: torch.device
    hosts: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(axis: Axis, device: torch.device) -> "World":
        """All ranks ask at once."""
        found = hosts(axis) if axis.size > 1 else [[0]]
        return World(axis, device, tuple(map(tuple, found)))

    @property
    def place(self) -> tuple[int, int]:
        """This rank's host, and its place there."""
        return next((h, host.index(self.axis.index)) for h, host in enumerate(self.hosts) if self.axis.index in host)

    def lines(self, *, between: bool) -> list[list[int]]:
        """The ranks of each host, or those at the same place of all hosts."""
        if not between:
            return [list(host) for host in self.hosts]
        return [[host[place % len(host)] for host in self.hosts] for place in range(max(map(len, self.hosts)))]

    def agreed(self, seconds: float) -> float:
        """The longest that any rank took."""
        if self.axis.group is None:
            return seconds
        return max(row[0] for row in all_gather_ints([int(seconds * 1e9)], [self.axis])) / 1e9

    def median(self, call: Callable[[], Any], rounds: int = ROUNDS, *, until_all: bool = False) -> float:
        """Seconds of a call that all ranks begin together, until it or those of all are done; nobody's first."""
        times = []
        for _ in range(rounds + 1):
            self.synchronize()
            start = time.perf_counter()
            call()
            self.synchronize(together=until_all)
            times.append(time.perf_counter() - start)
        return self.agreed(statistics.median(times[1:]))

    def short(self, call: Callable[[], Any]) -> float:
        """The same of a call that is short, of which more are needed to tell."""
        return self.median(lambda: [call() for _ in range(IN_A_ROW)], 2 * ROUNDS) / IN_A_ROW

    def synchronize(self, *, together: bool = True) -> None:
        """Wait for the device, and for the others."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if together and self.axis.group is not None:
            dist.barrier(group=self.axis.group)


def device_figures(world: World, dtype: torch.dtype) -> Figures:
    """What a rank computes and reads when all do."""
    gpu = world.device.type == "cuda"
    tokens, width = (8192, 128) if gpu else (512, 64)
    q, k, v = torch.randn(3, 1, 8, tokens, width, device=world.device, dtype=dtype).unbind()
    flops = 4 * 8 * tokens * tokens * width
    learned = [x.clone().requires_grad_() for x in (q, k, v)]

    def both() -> None:
        torch.autograd.grad(attend(*learned).out.sum(), learned)

    with torch.no_grad():
        forward = world.median(lambda: attend(q, k, v), until_all=True)
        one = world.median(lambda: attend(q, k, v) if world.axis.index == 0 else None, until_all=True)
        few = [x[:, :, :8].contiguous() for x in (q, k, v)]
        call = world.short(lambda: attend(*few))
        keys = torch.randn(2, 1, 8, 2**20 if gpu else 2**13, width, device=world.device, dtype=dtype)
        read = world.median(lambda: attend(few[0][:, :, :1], *keys.unbind()))
        copy = world.median(keys.clone)
    backward = max(world.median(both, until_all=True) - forward, forward)
    bytes_read = keys.numel() * keys.element_size()
    rates = flops / forward, 2.5 * flops / backward, bytes_read / max(read - call, 1e-9), 2 * bytes_read / copy
    return Figures(*rates, call, max(1.0, forward / one))


def line_figures(world: World, *, between: bool) -> Line | None:
    """One class of links, if the world has any."""
    here, place = world.place
    lines, most = world.lines(between=between), max(map(len, world.hosts))
    if max(map(len, lines)) < 2:
        return None
    mine, at = (lines[place], here) if between else (lines[here], place)
    line = [*mine[at:], *mine[:at]]
    latency = world.short(lambda: _shift(world, line, SHORT))
    several = min(15, len(line) - 1)
    many = world.short(lambda: _spread(world, line, several))
    bytes_ = 1 << 18
    once = world.median(lambda: _shift(world, line, bytes_), 2)
    bytes_ = int(min(1 << 24, max(1 << 18, bytes_ * TIMEOUT / once)))
    together = world.median(lambda: _shift(world, line, bytes_), 3)
    alone = world.median(lambda: _shift(world, line if place == 0 or not between else [], bytes_), 3)
    host_rate = most * bytes_ / max(together - latency, 1e-9)
    short = latency if between else world.short(lambda: _merged(world, line))
    rank_rate = bytes_ / max((alone if between else together) - latency, 1e-9)
    message = max(0.0, (many - latency) / max(1, several - 1))
    return Line(latency, short, message, _step(world, lines, short), rank_rate, max(host_rate, rank_rate))


def _step(world: World, lines: list[list[int]], first: float) -> float:
    """Seconds of each step of a collective along a line, whose first is never shorter than a message's."""
    assert world.axis.group is not None  # a line has two ranks or more
    groups = [[dist.get_global_rank(world.axis.group, rank) for rank in line] for line in lines]
    mine = next(group for group in groups if dist.get_rank() in group)
    group = dist.new_group(mine, use_local_synchronization=True)
    try:
        number = torch.zeros(1, 4, dtype=torch.int64, device=world.device)
        numbers = [torch.empty_like(number) for _ in mine]
        took = world.short(lambda: dist.all_gather(numbers, number, group=group))
    finally:
        dist.destroy_process_group(group)
    further = (took - first) / max(1, len(mine) - 2)
    return further if len(mine) > 2 and 0 < further <= first else took / (len(mine) - 1)


def _shift(world: World, line: Sequence[int], size: int) -> None:
    """Everyone sends to the next in line and hears from the one before."""
    _trade(world, line[1:2], line[-1:] if len(line) > 1 else [], size)


def _spread(world: World, line: Sequence[int], several: int) -> None:
    """Everyone sends short messages to several at once, and hears from as many."""
    _trade(world, line[1 : several + 1], list(line[1:])[-several:], SHORT)


def _trade(world: World, to: Sequence[int], of: Sequence[int], size: int) -> None:
    message = torch.empty(size, dtype=torch.uint8, device=world.device)
    group = world.axis.group
    posts = [dist.P2POp(dist.irecv, torch.empty_like(message), group=group, group_peer=peer) for peer in of]
    posts += [dist.P2POp(dist.isend, message, group=group, group_peer=peer) for peer in to]
    for work in dist.batch_isend_irecv(posts) if posts else []:
        work.wait()


def _merged(world: World, line: Sequence[int]) -> None:
    """A short message each way within a host, as merges send them."""
    mailboxes = mailboxes_of(world.axis, world.device)
    message = torch.empty(SHORT, dtype=torch.uint8, device=world.device)
    if mailboxes is None or len(line) < 2:
        _shift(world, line, SHORT)
        return
    mailboxes.send(line[1], message)
    mailboxes.recv(line[-1], message.clone())


def measure(mesh: DeviceMesh | None, dtype: torch.dtype | None = None) -> Cluster:
    """Measure the cluster that the ranks of a mesh are on. Every rank of the mesh calls it."""
    here, device = Mesh.of(mesh), device_of(mesh)
    run_agreed(here, lambda: _check_dtype(dtype), describe_call("Cluster.measure", dtype=dtype))
    axis = flat_axis(mesh, AXES)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    world = World.of(axis, device)
    sizes = {len(host) for host in world.hosts}
    if len(sizes) > 1:
        given, fix = f"hosts of {sorted(sizes)}", "start as many ranks on each host"
        raise ClusterError("Cluster.measure", "as many ranks on each host", given, fix)
    dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    figures = device_figures(world, dtype)
    inside, between = (_link(line_figures(world, between=far)) for far in (False, True))
    chip = Device(
        figures.forward,
        figures.backward,
        figures.read,
        _memory(world),
        copy_rate=figures.copy,
        call=figures.call,
        alone=figures.alone,
    )
    ranks = sizes.pop()
    how = "ring" if device.type == "cpu" else "tree"
    source = (("all", f"measured on {world.axis.size} ranks in {dtype}, all at work, torch {torch.__version__}"),)
    name = f"measured {len(world.hosts)}x{ranks}"
    return Cluster(name, len(world.hosts), ranks, chip, inside, between, short_collectives=how, sources=source)


def _check_dtype(dtype: object) -> None:
    if dtype is not None and (not isinstance(dtype, torch.dtype) or str(dtype).removeprefix("torch.") not in DTYPES):
        fix = "pass the dtype of q, k and v, or leave it out"
        raise DtypeError("Cluster.measure dtype", f"one of {', '.join(DTYPES)}", repr(dtype), fix)


def _link(line: Line | None) -> Link:
    if line is None:
        return NO_LINK
    return Link(line.latency, line.rank_rate, line.host_rate, short=line.short, step=line.step, message=line.message)


def _memory(world: World) -> float:
    """Bytes of memory a rank has: of the GPU, or its share of the machine's."""
    if world.device.type == "cuda":
        return float(torch.cuda.get_device_properties(world.device).total_memory)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return float(pages) / max(map(len, world.hosts))
