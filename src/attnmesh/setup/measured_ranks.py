"""The ranks of a world that is measured, which time calls together."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from attnmesh.comm.topology import agreed_hosts, dist_all_gather_ints
from attnmesh.mesh.axes import Axis

REPETITIONS = 5
"""Repetitions of each measurement. The result is the largest of the ranks' medians."""

IN_A_ROW = 6
"""Short calls that are timed together, since ranks do not begin at quite the same time. More of them take longer."""


@dataclass(frozen=True)
class MeasuredRanks:
    """The ranks of an axis that are measured, by host."""

    axis: Axis
    device: torch.device
    hosts: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(axis: Axis, device: torch.device) -> "MeasuredRanks":
        """Return the ranks of an axis. Collective."""
        host_ranks = agreed_hosts(axis) if axis.size > 1 else [[0]]
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
        """Return the ranks of this rank's line, from this rank on, and then those before it."""
        host, index = self.host_and_index
        lines = self.lines(between=between)
        own_line, place = (lines[index], host) if between else (lines[host], index)
        return [*own_line[place:], *own_line[:place]]

    def median(
        self, call: Callable[[], Any], rounds: int = REPETITIONS, times: int = 1, *, until_all: bool = False
    ) -> float:
        """Return the median seconds of `times` calls in a row, on the slowest rank. The first round is not counted.

        With `until_all` the time runs until all ranks are done.
        """
        measured = [self.seconds(call, times, until_all=until_all) for _ in range(rounds + 1)]
        seconds = statistics.median(measured[1:])
        if self.axis.group is None:
            return seconds
        return max(numbers[0] for numbers in dist_all_gather_ints([int(seconds * 1e9)], [self.axis])) / 1e9

    def seconds(self, call: Callable[[], Any], times: int = 1, *, until_all: bool = False) -> float:
        """Return the seconds of `times` calls in a row, which all ranks begin together."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(times):
            call()
        self.synchronize(together=until_all)
        return time.perf_counter() - start

    def short(self, call: Callable[[], Any]) -> float:
        """Return the median seconds of a short call, measured over `IN_A_ROW` calls in a row."""
        return self.median(call, 2 * REPETITIONS, IN_A_ROW) / IN_A_ROW

    def synchronize(self, *, together: bool = True) -> None:
        """Wait for the device, and with `together` for the other ranks."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if together and self.axis.group is not None:
            dist.barrier(group=self.axis.group)
