"""Hosts on one machine: network namespaces joined by a bridge, the link of each as slow as asked for, both ways.

        switch ─┬─ rate ─ host 0: ranks 0, 1          what leaves a host and what comes to it wait in `tc tbf`;
                ├─ rate ─ host 1: ranks 2, 3          what stays in a host goes by its loopback, and is not counted
                └─ rate ─ host 2: ranks 4, 5          by the host's interface

All of it lives in one set of namespaces of processes, mounts and networks, whose first process ends with the one that
asked for it. So whatever happens here, the kernel takes down the ranks, the links and the names; and sets of hosts that
stand side by side cannot see each other.
"""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from attnmesh.cli.launch import TIMEOUT, RankError, Say, perform, results, run_on_ranks
from attnmesh.errors import ClusterError

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}

MOST = 250
"""Hosts that can stand on one switch here."""

PROCESSES = 1024
"""Ranks that can be started on one machine: more, by a slip of the hand, would take all that it has."""

LINK = "eth0"
"""A host's interface, as it sees it."""

HEADERS = 66
"""Bytes of Ethernet, IP and TCP (with its timestamps) before what a packet brings."""

TOOLS = ("ip", "tc", "unshare", "setpriv", "mount", "sysctl")


@dataclass(frozen=True)
class Hosts:
    """So many hosts of so many ranks, each host's link of so many bits a second each way.

    >>> Hosts.parse("8x2@250mbit")
    Hosts(hosts=8, ranks=2, rate=250000000.0)
    """

    hosts: int
    ranks: int
    rate: float

    @staticmethod
    def parse(text: str) -> "Hosts":
        """What `--hosts` takes."""
        found = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})@([0-9]{1,9}(?:\.[0-9]{1,9})?)(kbit|mbit|gbit)", text.strip())
        if not found:
            fix = "write hosts x ranks a host @ the rate of a host's link"
            raise ClusterError("--hosts", "as in 8x2@250mbit", repr(text), fix)
        hosts, ranks, number, unit = found.groups()
        made = Hosts(int(hosts), int(ranks), float(number) * UNITS[unit])
        for name, count, most in (("hosts", made.hosts, MOST), ("ranks a host", made.ranks, 64)):
            if not 1 <= count <= most:
                raise ClusterError("--hosts", f"1 to {most} {name}", str(count), "ask for what one machine can run")
        if not 1e5 <= made.rate <= 1e10:
            given = f"{number}{unit}"
            raise ClusterError("--hosts", "a rate from 100kbit to 10gbit", given, "shape links to what can be shaped")
        return made

    def __str__(self) -> str:
        unit, size = next((u, n) for u, n in reversed(UNITS.items()) if self.rate >= n or u == "kbit")
        return f"{self.hosts}x{self.ranks}@{self.rate / size:g}{unit}"

    @property
    def world(self) -> int:
        """All ranks."""
        return self.hosts * self.ranks


World = int | Hosts
"""Ranks on this machine, or on hosts made on it."""


def world_of(ranks: int, hosts: str | None) -> World:
    """What a command's `--ranks` and `--hosts` ask for."""
    if hosts is not None:
        return Hosts.parse(hosts)
    if not 1 <= ranks <= PROCESSES:
        given, fix = f"{ranks:,}", "ask for what one machine can run"
        raise ClusterError("--ranks", f"1 to {PROCESSES:,} ranks on this machine", given, fix)
    return ranks


def ranks_of(world: World) -> int:
    """How many ranks it has."""
    return world if isinstance(world, int) else world.world


def as_asked(world: World) -> str:
    """How a command is asked for it."""
    return f"--ranks {world}" if isinstance(world, int) else f"--hosts {world}"


def run_on(
    world: World, function: Callable[..., Any], *arguments: Any, heard: Say | None = None, threads: int = 1
) -> list[Any]:
    """Each rank's result, from local ranks of so many threads, or from those of made hosts, of one thread each."""
    if isinstance(world, int):
        return run_on_ranks(world, function, *arguments, heard=heard, threads=threads)
    return run_on_hosts(world, function, *arguments, heard=heard)


def run_on_hosts(
    hosts: Hosts, function: Callable[..., Any], *arguments: Any, seconds: float = 3600.0, heard: Say | None = None
) -> list[Any]:
    """Each rank's result, from gloo ranks that torchrun starts on each host; the first error ends all.

    As `run_on_ranks` otherwise. Needs Linux and root; elsewhere it says so.
    """
    check_here()
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="attnmesh-") as name, socket.socket(socket.AF_UNIX) as door:
        folder = Path(name)
        door.bind(str(folder / "door"))  # a path is seen from every network; the folder is ours alone
        door.listen(hosts.world)
        (folder / "script").write_text(script(hosts, folder))
        with (folder / "log").open("wb") as log:
            first = subprocess.Popen([*FIRST, "sh", str(folder / "script")], stdin=-3, stdout=log, stderr=log)
        pipes: list[Connection] = []
        try:
            pipes = _entered(door, first, hosts, folder, end)
            for pipe in pipes:
                pipe.send((function, arguments, heard is not None))
            return results(pipes, lambda rank: _death(rank, folder), heard, end - time.monotonic())
        finally:
            first.kill()  # and with it all that it started
            first.wait()
            for pipe in pipes:
                pipe.close()


FIRST = [
    "setpriv",
    "--pdeathsig",
    "KILL",
    "unshare",
    "--net",
    "--pid",
    "--mount",
    "--ipc",
    "--fork",
    "--kill-child",
    "--mount-proc",
]
"""Starts the first process of namespaces of their own, which ends when this one does."""


SETTINGS = "net.ipv4.tcp_slow_start_after_idle=0 net.ipv4.tcp_congestion_control=reno"
"""Of each host: a link that has rested is still as fast as it is."""


def script(hosts: Hosts, folder: Path) -> str:
    """What the first process does: make switch and hosts, start torchrun on each, and wait."""
    run = f"{shlex.quote(sys.executable)} -m torch.distributed.run"
    run += f" --nnodes {hosts.hosts} --nproc-per-node {hosts.ranks}"
    where = f"--master-addr {address(0)} --master-port 29500"
    lines = [
        f"ip netns exec h{i} {run} --node-rank {i} {where} -m attnmesh.cli.netns {shlex.quote(str(folder / 'door'))} &"
        for i in range(hosts.hosts)
    ]
    return "\n".join([*links(hosts), f"export GLOO_SOCKET_IFNAME={LINK} OMP_NUM_THREADS=1", *lines, "wait", ""])


def links(hosts: Hosts) -> list[str]:
    """Lines of a shell that make switch and hosts: host i is the network h{i}, its line to the switch up{i}."""
    # A burst of 4 ms or more goes at once, in packets as large as they come.
    shape = f"root tbf rate {hosts.rate:.0f}bit burst {max(131072, int(hosts.rate / 8 * 0.004))} limit 16mb"
    lines = [
        "set -e",
        "mkdir -p /run/netns && mount -t tmpfs tmpfs /run/netns",  # names that nobody else sees
        "ip link set lo up",
        "ip link add name switch type bridge && ip link set switch up",
    ]
    for i in range(hosts.hosts):
        lines += [
            f"ip netns add h{i}",
            f"ip link add up{i} type veth peer name {LINK} netns h{i}",
            f"ip link set up{i} master switch up",
            f"ip -n h{i} addr add {address(i)}/16 dev {LINK}",
            f"ip -n h{i} link set {LINK} up && ip -n h{i} link set lo up",
            f"tc -n h{i} qdisc add dev {LINK} {shape}",
            f"tc qdisc add dev up{i} {shape}",
            f"ip netns exec h{i} sysctl -q -w {SETTINGS}",
        ]
    return lines


def address(host: int) -> str:
    """A host's address on the switch."""
    return f"10.0.0.{host + 1}"


def check_here() -> None:
    """Raise unless hosts can be made on this machine."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    given = None
    if sys.platform != "linux":
        given = sys.platform
    elif os.geteuid() != 0:
        given = "a user who is not root"
    elif missing:
        given = f"a machine without {', '.join(missing)}"
    if given is not None:
        fix = "run it as root on Linux with iproute2 and util-linux, or on local ranks with --ranks"
        raise ClusterError("hosts on one machine", "root on Linux, to make network namespaces", given, fix)


def _entered(door: socket.socket, first: subprocess.Popen[bytes], hosts: Hosts, folder: Path, end: float) -> list[Any]:
    """A pipe to each rank, in order of rank, once all have come."""
    door.settimeout(0.2)
    pipes: dict[int, Connection] = {}
    while len(pipes) < hosts.world:
        try:
            pipe = Connection(door.accept()[0].detach())
            pipes[pipe.recv()] = pipe
        except TimeoutError:
            if first.poll() is not None:
                raise RankError(f"the hosts could not be made:\n{_log(folder)}") from None
            if time.monotonic() > end:
                raise RankError(f"ranks did not start in time:\n{_log(folder)}") from None
    return [pipes[rank] for rank in range(hosts.world)]


def _death(rank: int, folder: Path) -> RankError:
    return RankError(f"rank {rank} ended before it was done:\n{_log(folder)}")


def _log(folder: Path) -> str:
    return (folder / "log").read_text(errors="replace")[-2000:]


class Wire(NamedTuple):
    """What has gone through an interface of a host so far, each way, by its own counters."""

    sent: int = 0
    sent_packets: int = 0
    received: int = 0
    received_packets: int = 0

    def __sub__(self, before: "Wire") -> "Wire":
        return Wire(*(now - then for now, then in zip(self, before, strict=True)))

    @property
    def payload(self) -> int:
        """Bytes sent, without the headers of their packets; acknowledgements are headers alone."""
        return self.sent - HEADERS * self.sent_packets


def wires() -> tuple[Wire, Wire]:
    """The counters of this host: of what stays inside it and goes by sockets, and of what leaves it."""
    found = {}
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if numbers:
            received, received_packets, *_, sent, sent_packets = (int(x) for x in numbers.split()[:10])
            found[name.strip()] = Wire(sent, sent_packets, received, received_packets)
    if LINK not in found:
        raise ClusterError("wires", f"a host made here, with an interface {LINK}", "none", "run it by run_on_hosts")
    return found["lo"], found[LINK]


def _rank(door: str) -> None:
    """A rank's life: torchrun has told it where it is, and the one who asked for it what to do."""
    torch.set_num_threads(1)
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(door)
        pipe = Connection(line.detach())
    pipe.send(int(os.environ["RANK"]))
    perform(pipe, lambda: dist.init_process_group("gloo", timeout=TIMEOUT), pipe.recv())


if __name__ == "__main__":
    _rank(sys.argv[1])
