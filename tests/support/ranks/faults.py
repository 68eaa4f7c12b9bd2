"""Faults that are injected into a rank or its host, and the outcomes that each fault allows."""

import os
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from attnmesh.store.manifest import SAVE_FOLDER
from benchmarks.netns import LINK, Hosts
from tests.support.ranks.worlds import Ranks, Report

OUTAGE = 0.5
"""Seconds of a short link outage: TCP retries after 0.2, 0.6, 1.4 and 3, the last of which is too late."""

SECOND_JOB_TIMEOUT = 6.0
"""Seconds in which a second job on a port has to fail, while some of its ranks still try to join."""

MARGIN = 5.0
"""Seconds after the deadline in which all ranks have to raise."""


@dataclass(frozen=True)
class Fault:
    """Fault injected into a victim. `inject` may return a second job, which has to fail."""

    inject: Callable[[Ranks, int], Ranks | None]
    right: bool = False  # ranks may return the right answer
    lost: bool = False  # ranks may raise that the victim is lost
    mute: bool = False  # the victim sends no report
    on_hosts: bool = False  # needs the link of a host
    whole: bool = False  # affects all ranks of the victim's host
    workloads: tuple[str, ...] = ("prefill", "training", "decoding", "sharing", "saving")
    refused: bool = False  # saves raise, alike on all ranks
    late: bool = False  # the victim begins late
    delay: float = 0.0  # further seconds for messages, each within the deadline


def _nothing(ranks: Ranks, victim: int) -> None:
    """Inject nothing: the victim has begun late."""


def _kill(ranks: Ranks, victim: int) -> None:
    ranks.kill(victim)


def _stop(ranks: Ranks, victim: int) -> None:
    ranks.kill(victim, signal.SIGSTOP)


def _kill_while_writing(ranks: Ranks, victim: int) -> None:
    """Kill the victim after the folder of the next save appears and before the save is published."""
    folder = ranks.job.folder
    before, end = set(os.listdir(folder)), time.monotonic() + 5
    while time.monotonic() < end and not any(map(SAVE_FOLDER.fullmatch, {*os.listdir(folder)} - before)):
        pass
    time.sleep(Random(victim).uniform(0, 0.004))
    ranks.kill(victim)


def _cut_off(ranks: Ranks, victim: int) -> None:
    """Take down the link between the victim's host and the switch. Ranks on the host still reach each other."""
    ranks.testbed.shell(f"ip link set up{ranks.testbed.host(victim)} down")


def _cut_off_briefly(ranks: Ranks, victim: int) -> None:
    link = f"ip link set up{ranks.testbed.host(victim)}"
    ranks.testbed.shell(f"{link} down", f"sleep {OUTAGE}", f"{link} up")


def _slow_down(ranks: Ranks, victim: int) -> None:
    """Slow the link of the victim's host to one hundredth, in both directions."""
    hosts, host = ranks.testbed.world, ranks.testbed.host(victim)
    assert isinstance(hosts, Hosts)
    shape = f"root tbf rate {hosts.rate / 100:.0f}bit burst 4kb limit 16mb"
    ranks.testbed.shell(f"tc -n h{host} qdisc change dev {LINK} {shape}", f"tc qdisc change dev up{host} {shape}")


def _turn_the_clock(ranks: Ranks, victim: int) -> None:
    """Send the signal on which the victim turns its wall clock, as `worlds._jump` documents."""
    ranks.kill(victim, signal.SIGUSR1)


def _fill_the_disk(ranks: Ranks, victim: int) -> None:
    """Limit the files that the victim's process writes to 16 kB each."""
    process = ranks.processes[victim].pid
    _, hard = resource.prlimit(process, resource.RLIMIT_FSIZE)
    resource.prlimit(process, resource.RLIMIT_FSIZE, (1 << 14, hard))


def _start_second_job(ranks: Ranks, victim: int) -> Ranks:
    """Start another job on the same address and port: its rank 0 finds the port taken, its others the first's store.

    A launcher ends all ranks when one fails, and the caller does the same. PyTorch may let the others wait for long.
    """
    job = replace(ranks.job, folder=ranks.job.folder / "second", agent=False)
    return Ranks(ranks.testbed, job)


FAULTS = {
    "killed": Fault(_kill, lost=True, mute=True, workloads=("prefill", "training", "decoding", "sharing")),
    "killed while it writes": Fault(_kill_while_writing, lost=True, mute=True, workloads=("saving",)),
    "stopped": Fault(_stop, lost=True, mute=True),
    "cut off": Fault(_cut_off, lost=True, on_hosts=True, whole=True),
    "cut off for a while": Fault(_cut_off_briefly, right=True, on_hosts=True, whole=True),
    "link at 1 %": Fault(_slow_down, right=True, lost=True, on_hosts=True, whole=True, delay=40.0),
    "clock jumps": Fault(_turn_the_clock, right=True),
    "disk is full": Fault(_fill_the_disk, right=True, workloads=("saving",), refused=True),
    "begins late": Fault(_nothing, right=True, late=True),
    "second job on the port": Fault(_start_second_job, right=True),
}


def find_failure(
    fault: Fault, reports: dict[int, Report], affected: tuple[int, ...], expected: int, latest: float
) -> str:
    """Return how the reports break the rules of a fault, or an empty text. Reports are due within `latest` seconds."""
    if len(reports) < expected:
        return "hang"
    kinds = {report.kind for report in reports.values()}
    if "wrong" in kinds:
        return "wrong answer"
    if not kinds <= ({"right"} if fault.right else set()) | ({"RankFailure"} if fault.lost else set()):
        return "another error"
    if fault.refused and (len({report.refused for report in reports.values()}) > 1 or not reports[0].refused):
        return "another error"
    lost = {rank: report.ranks for rank, report in reports.items() if report.kind == "RankFailure"}
    if not all(_names_the_lost(fault, rank in affected, named, affected) for rank, named in lost.items()):
        return "another rank named"
    if any(report.seconds > latest for report in reports.values()):
        return "late"
    return ""


def _names_the_lost(fault: Fault, cut_off: bool, named: tuple[int, ...], affected: tuple[int, ...]) -> bool:
    """Return True if a failure names the affected ranks, or on a rank that is cut off some of the others.

    Under a slow link all ranks are alive, so any name is allowed.
    """
    if fault.right:
        return True
    return bool(named) and not set(named) & set(affected) if cut_off else named == affected
