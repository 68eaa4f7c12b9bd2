"""The constants of a running world of ranks, measured while all its ranks are at work, in seconds altogether.

A rank that has its share of a core, of a memory or of a link is measured with that share: what is measured alone is
seldom had in a run.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from attnmesh.exchange import share
from attnmesh.hosts import board_of, hosts
from attnmesh.kernel.attend import attend
from attnmesh.mesh import Axis

ROUNDS = 7
"""Times that each figure is taken; the median counts, and of the ranks' medians the largest."""

SHORT = 16384
"""Bytes of a short message, as merges send."""

PATIENCE = 0.25
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
    """What a class of links does: seconds of a message, of a short one in a merge, of each further one; bytes/s."""

    latency: float
    short: float
    message: float
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
        found = hosts(axis, device) if axis.size > 1 else [[0]]
        return World(axis, device, tuple(map(tuple, found)))

    @property
    def place(self) -> tuple[int, int]:
        """This rank's host, and its place there."""
        return next((h, host.index(self.axis.index)) for h, host in enumerate(self.hosts) if self.axis.index in host)

    def agreed(self, seconds: float) -> float:
        """The longest that any rank took."""
        if self.axis.group is None:
            return seconds
        return max(row[0] for row in share([int(seconds * 1e9)], [self.axis], self.device)) / 1e9

    def median(self, call: Callable[[], Any], rounds: int = ROUNDS) -> float:
        """Seconds of a call that all ranks begin together; nobody's first."""
        times = []
        for _ in range(rounds + 1):
            self.synchronize()
            start = time.perf_counter()
            call()
            self.synchronize(together=False)
            times.append(time.perf_counter() - start)
        return self.agreed(statistics.median(times[1:]))

    def synchronize(self, *, together: bool = True) -> None:
        """Wait for the device, and for the others."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if together and self.axis.group is not None:
            dist.barrier(group=self.axis.group)


def device_figures(world: World, dtype: torch.dtype) -> Figures:
    """What a rank computes and reads when all do."""
    gpu = world.device.type == "cuda"
    tokens, width, rounds = (8192, 128, ROUNDS) if gpu else (512, 64, 3)
    q, k, v = torch.randn(3, 1, 8, tokens, width, device=world.device, dtype=dtype).unbind()
    flops = 4 * 8 * tokens * tokens * width
    learned = [x.clone().requires_grad_() for x in (q, k, v)]

    def both() -> None:
        torch.autograd.grad(attend(*learned).out.sum(), learned)

    with torch.no_grad():
        forward = world.median(lambda: attend(q, k, v), rounds)
        one = world.median(lambda: attend(q, k, v) if world.axis.index == 0 else None, rounds)
        few = [x[:, :, :8].contiguous() for x in (q, k, v)]
        call = world.median(lambda: [attend(*few) for _ in range(8)]) / 8
        keys = torch.randn(2, 1, 8, 2**20 if gpu else 2**13, width, device=world.device, dtype=dtype)
        read = world.median(lambda: attend(few[0][:, :, :1], *keys.unbind()), rounds)
        copy = world.median(keys.clone, rounds)
    backward = max(world.median(both, rounds) - forward, forward)
    bytes_read = keys.numel() * keys.element_size()
    rates = flops / forward, 2.5 * flops / backward, bytes_read / max(read - call, 1e-9), 2 * bytes_read / copy
    return Figures(*rates, call, max(1.0, forward / one))


def line_figures(world: World, *, between: bool) -> Line | None:
    """One class of links, if the world has any."""
    here, place = world.place
    sizes = {len(host) for host in world.hosts}
    if between:
        size, mine = len(world.hosts), [host[place % len(host)] for host in world.hosts]
        at = here
    else:
        size, mine = len(world.hosts[here]), list(world.hosts[here])
        at = place
    if (len(world.hosts) if between else max(sizes)) < 2:
        return None
    line = [mine[(at + i) % size] for i in range(size)] if size > 1 else []
    latency = world.median(lambda: _shift(world, line, SHORT))
    several = min(7, max(1, (size if between else max(sizes)) - 1))
    many = world.median(lambda: _spread(world, line, several))
    bytes_ = 1 << 18
    once = world.median(lambda: _shift(world, line, bytes_), 2)
    bytes_ = int(min(1 << 24, max(1 << 18, bytes_ * PATIENCE / once)))
    together = world.median(lambda: _shift(world, line, bytes_), 3)
    alone = world.median(lambda: _shift(world, line if place == 0 or not between else [], bytes_), 3)
    host_rate = max(sizes) * bytes_ / max(together - latency, 1e-9)
    short = latency if between else world.median(lambda: _merged(world, line))
    rank_rate = bytes_ / max((alone if between else together) - latency, 1e-9)
    return Line(latency, short, max(0.0, (many - latency) / max(1, several - 1)), rank_rate, max(host_rate, rank_rate))


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
    board = board_of(world.axis, world.device)
    message = torch.empty(SHORT, dtype=torch.uint8, device=world.device)
    if board is None or len(line) < 2:
        _shift(world, line, SHORT)
        return
    board.post(line[1], message)
    board.take(line[-1], message.clone())
