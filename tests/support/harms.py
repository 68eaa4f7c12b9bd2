"""What harm is done to a rank or to its host while all are at work, and what may come of it."""

import os
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from attnmesh.cli.netns import LINK, Hosts
from tests.support.worlds import Ranks, Said

WHILE = 0.5
"""Seconds for which a link is down that comes back: TCP tries again after 0.2, 0.6, 1.4 and 3, and that is too late."""

SECOND = 6.0
"""Seconds within which a second job on a port has to fail; so long its ranks that still try to join are borne with."""

LATEST = 5.0
"""Seconds after the deadline within which all have to know."""


@dataclass(frozen=True)
class Harm:
    """Something done to a victim; the second thing that it returns, if any, is another job that has to fail."""

    do: Callable[[Ranks, int], Ranks | None]
    right: bool = False  # the right answer may come
    lost: bool = False  # the victim may be given up
    mute: bool = False  # the victim will say no more
    on_hosts: bool = False  # it takes a host's link
    whole: bool = False  # the victim's host is harmed with it
    works: tuple[str, ...] = ("prefill", "training", "decoding", "saving")
    refused: bool = False  # savings are refused, alike on all ranks
    late: bool = False  # the victim begins later
    more: float = 0.0  # seconds by which messages may take longer, each within the deadline


def _nothing(ranks: Ranks, victim: int) -> None:
    """It was late, and that is all."""


def _kill(ranks: Ranks, victim: int) -> None:
    ranks.kill(victim)


def _stop(ranks: Ranks, victim: int) -> None:
    ranks.kill(victim, signal.SIGSTOP)


def _kill_while_writing(ranks: Ranks, victim: int) -> None:
    """Once the folder of the next saving is there, and before what it holds is published."""
    folder = ranks.job.folder
    before, end = set(os.listdir(folder)), time.monotonic() + 5
    while time.monotonic() < end and not any(name.isdigit() for name in set(os.listdir(folder)) - before):
        pass
    time.sleep(Random(victim).uniform(0, 0.004))
    ranks.kill(victim)


def _cut_off(ranks: Ranks, victim: int) -> None:
    """The line between its host and the switch, as if pulled: ranks of the host still hear each other."""
    ranks.ground.shell(f"ip link set up{ranks.ground.host(victim)} down")


def _cut_off_a_while(ranks: Ranks, victim: int) -> None:
    line = f"ip link set up{ranks.ground.host(victim)}"
    ranks.ground.shell(f"{line} down", f"sleep {WHILE}", f"{line} up")


def _slow_down(ranks: Ranks, victim: int) -> None:
    """To one hundredth, both ways."""
    hosts, host = ranks.ground.world, ranks.ground.host(victim)
    assert isinstance(hosts, Hosts)
    shape = f"root tbf rate {hosts.rate / 100:.0f}bit burst 4kb limit 16mb"
    ranks.ground.shell(f"tc -n h{host} qdisc change dev {LINK} {shape}", f"tc qdisc change dev up{host} {shape}")


def _turn_the_clock(ranks: Ranks, victim: int) -> None:
    """Its process hears this and jumps: see `worlds._jump`, which says what is faked."""
    ranks.kill(victim, signal.SIGUSR1)


def _fill_the_disk(ranks: Ranks, victim: int) -> None:
    """No file that its process writes may be longer than 16 kB from now on."""
    process = ranks.processes[victim].pid
    _, hard = resource.prlimit(process, resource.RLIMIT_FSIZE)
    resource.prlimit(process, resource.RLIMIT_FSIZE, (1 << 14, hard))


def _start_another(ranks: Ranks, victim: int) -> Ranks:
    """On the same ground, address and port: its first rank finds the port taken, its others the first job's store.

    A launcher ends all when one fails, and so does this: PyTorch may let the others wait for each other for long.
    """
    job = replace(ranks.job, folder=ranks.job.folder / "second", agent=False)
    return Ranks(ranks.ground, job)


HARMS = {
    "killed": Harm(_kill, lost=True, mute=True, works=("prefill", "training", "decoding")),
    "killed while it writes": Harm(_kill_while_writing, lost=True, mute=True, works=("saving",)),
    "stopped": Harm(_stop, lost=True, mute=True),
    "cut off": Harm(_cut_off, lost=True, on_hosts=True, whole=True),
    "cut off for a while": Harm(_cut_off_a_while, right=True, on_hosts=True, whole=True),
    "link at 1 %": Harm(_slow_down, right=True, lost=True, on_hosts=True, whole=True, more=40.0),
    "clock jumps": Harm(_turn_the_clock, right=True),
    "disk is full": Harm(_fill_the_disk, right=True, works=("saving",), refused=True),
    "begins late": Harm(_nothing, right=True, late=True),
    "second job on the port": Harm(_start_another, right=True),
}


def fault(harm: Harm, said: dict[int, Said], harmed: tuple[int, ...], expected: int, latest: float) -> str:
    """What is wrong with what ranks said of a harm, if anything is; they have `latest` seconds for it."""
    if len(said) < expected:
        return "hang"
    kinds = {what.kind for what in said.values()}
    if "wrong" in kinds:
        return "wrong answer"
    if not kinds <= ({"right"} if harm.right else set()) | ({"RankFailure"} if harm.lost else set()):
        return "another error"
    if harm.refused and ({what.refused for what in said.values()} != {said[0].refused} or not said[0].refused):
        return "another error"
    lost = {rank: what for rank, what in said.items() if what.kind == "RankFailure"}
    if not all(_named_right(harm, rank in harmed, what.ranks, harmed) for rank, what in lost.items()):
        return "another rank named"
    if any(what.seconds > latest for what in said.values()):
        return "late"
    return ""


def _named_right(harm: Harm, cut: bool, named: tuple[int, ...], harmed: tuple[int, ...]) -> bool:
    """Whoever is cut off sees the others lost, of whom it may not know all; of a slow link all ends are alive."""
    if harm.right:
        return True
    return bool(named) and not set(named) & set(harmed) if cut else named == harmed
