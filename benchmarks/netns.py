"""Hosts on one machine: network namespaces joined by a bridge, each link limited to a rate in both directions.

        switch ─┬─ rate ─ host 0: ranks 0, 1          `tc tbf` limits both directions of each link;
                ├─ rate ─ host 1: ranks 2, 3          traffic inside a host uses its loopback,
                └─ rate ─ host 2: ranks 4, 5          which the counters of the link leave out

Each host keeps its cores, or shares one evenly where there are too few. All hosts live in one set of process, mount and
network namespaces. Its first process ends with the process that started it, and the kernel then removes ranks, links
and names. Sets of hosts that run side by side cannot see each other.
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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from attnmesh.cli.launch import (
    LAUNCH_TIMEOUT,
    LaunchError,
    ProcessDeath,
    RankWork,
    Send,
    collect_results,
    leaving_tidily,
    run_on_ranks,
    run_work,
)
from attnmesh.errors import ClusterError
from attnmesh_command.shared_options import check_ranks

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}

MAX_HOSTS = 250
"""Hosts on one switch at most, each with an address of 10.0.0.0/24."""

LONGEST_RUN = 3600.0
"""Seconds after which a run is given up."""

LINK = "eth0"
"""Name of a host's interface inside the host."""

HEADERS = 66
"""Bytes of the Ethernet, IP and TCP headers (with timestamps) of a packet."""

TOOLS = ("ip", "tc", "unshare", "setpriv", "mount", "sysctl", "taskset")


@dataclass(frozen=True)
class Hosts:
    """A number of hosts, the ranks of each, and the rate of each host's link in bits per second and direction.

    >>> Hosts.parse("8x2@250mbit")
    Hosts(hosts=8, ranks=2, rate=250000000.0)
    """

    hosts: int
    ranks: int
    rate: float

    @staticmethod
    def parse(text: str) -> "Hosts":
        """Return the hosts that `--hosts` describes."""
        match = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})@([0-9]{1,9}(?:\.[0-9]{1,9})?)(kbit|mbit|gbit)", text.strip())
        if not match:
            fix = "write hosts x ranks a host @ the rate of a host's link"
            raise ClusterError("--hosts", "as in 8x2@250mbit", repr(text), fix)
        hosts, ranks, number, unit = match.groups()
        parsed = Hosts(int(hosts), int(ranks), float(number) * UNITS[unit])
        for name, count, limit in (("hosts", parsed.hosts, MAX_HOSTS), ("ranks a host", parsed.ranks, 64)):
            if not 1 <= count <= limit:
                raise ClusterError("--hosts", f"1 to {limit} {name}", str(count), "ask for what one machine can run")
        if not 1e5 <= parsed.rate <= 1e10:
            given = f"{number}{unit}"
            raise ClusterError("--hosts", "a rate from 100kbit to 10gbit", given, "shape links to what can be shaped")
        return parsed

    def __str__(self) -> str:
        unit, size = next((u, n) for u, n in reversed(UNITS.items()) if self.rate >= n or u == "kbit")
        return f"{self.hosts}x{self.ranks}@{self.rate / size:g}{unit}"

    @property
    def world(self) -> int:
        """Number of ranks of all hosts."""
        return self.hosts * self.ranks


World = int | Hosts
"""A number of ranks on this machine, or hosts made on it."""


def world_of(ranks: int, hosts: str | None) -> World:
    """Return the world of a command's `--ranks` and `--hosts`."""
    if hosts is not None:
        return Hosts.parse(hosts)
    check_ranks(ranks)
    return ranks


def ranks_of(world: World) -> int:
    """Return the number of ranks."""
    return world if isinstance(world, int) else world.world


def run_on(
    world: World, function: Callable[..., Any], *arguments: Any, on_message: Send | None = None, threads: int = 1
) -> list[Any]:
    """Return each rank's result; local ranks have `threads` threads, those on hosts have one."""
    if isinstance(world, int):
        return run_on_ranks(world, function, *arguments, on_message=on_message, threads=threads, seconds=LONGEST_RUN)
    return run_on_hosts(world, function, *arguments, on_message=on_message)


def send_rows(send: Send, rows: Callable[..., Iterable[Any]], *arguments: Any) -> None:
    """Send each row from rank 0 when it is measured; every rank measures all rows."""
    for row in rows(*arguments):
        if dist.get_rank() == 0:
            send(row)


def run_on_hosts(
    hosts: Hosts, function: Callable[..., Any], *arguments: Any, on_message: Send | None = None
) -> list[Any]:
    """Return each rank's result, from gloo ranks that torchrun starts on each host; the first error ends all ranks.

    The rest is as in `run_on_ranks`. Raises ClusterError without Linux and root.
    """
    check_here()
    end = time.monotonic() + LONGEST_RUN
    with (
        leaving_tidily(),
        tempfile.TemporaryDirectory(prefix="attnmesh-") as name,
        socket.socket(socket.AF_UNIX) as door,
    ):
        folder = Path(name)
        door.bind(str(folder / "door"))  # a path is visible from every network namespace
        door.listen(hosts.world)
        (folder / "script").write_text(script(hosts, folder))
        with (folder / "log").open("wb") as log:
            init = subprocess.Popen([*FIRST, "sh", str(folder / "script")], stdin=-3, stdout=log, stderr=log)
        pipes: list[Connection] = []
        try:
            pipes = _accept(door, init, hosts, folder, end)
            for pipe in pipes:
                pipe.send(RankWork(function, arguments, sends=on_message is not None))
            return collect_results(pipes, lambda rank: _death(rank, folder), on_message, end - time.monotonic())
        finally:
            init.kill()  # ends all processes of its namespaces
            init.wait()
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
"""Command that starts the first process of new namespaces, which ends when this process ends."""


SETTINGS = "net.ipv4.tcp_slow_start_after_idle=0 net.ipv4.tcp_congestion_control=reno"
"""Kernel settings of each host: TCP keeps its rate after an idle link."""


def script(hosts: Hosts, folder: Path) -> str:
    """Return the shell script of the first process: make switch and hosts, start torchrun on each, and wait."""
    run = f"{shlex.quote(sys.executable)} -m torch.distributed.run"
    run += f" --nnodes {hosts.hosts} --nproc-per-node {hosts.ranks}"
    where = f"--master-addr {address(0)} --master-port 29500"
    lines = [
        f"taskset -c {cores_of(i, hosts.hosts)} ip netns exec h{i} {run} --node-rank {i} {where}"
        f" -m benchmarks.netns {shlex.quote(str(folder / 'door'))} &"
        for i in range(hosts.hosts)
    ]
    return "\n".join([*links(hosts), f"export GLOO_SOCKET_IFNAME={LINK} OMP_NUM_THREADS=1", *lines, "wait", ""])


def cores_of(host: int, hosts: int) -> str:
    """Return the cores that a host keeps, as a machine does. Where there are too few, hosts share one evenly."""
    cores = sorted(os.sched_getaffinity(0))
    return ",".join(map(str, cores[host::hosts] or [cores[host % len(cores)]]))


def links(hosts: Hosts) -> list[str]:
    """Return shell lines that make switch and hosts; host i is the namespace h{i}, its link to the switch is up{i}."""
    # The bucket holds 4 ms of traffic and at least two of the largest packets.
    shape = f"root tbf rate {hosts.rate:.0f}bit burst {max(131072, int(hosts.rate / 8 * 0.004))} limit 16mb"
    lines = [
        "set -e",
        "mkdir -p /run/netns && mount -t tmpfs tmpfs /run/netns",  # names inside these namespaces only
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
    """Return a host's address on the switch."""
    return f"10.0.0.{host + 1}"


def check_here() -> None:
    """Raise unless hosts can be made on this machine."""
    missing, given = [tool for tool in TOOLS if shutil.which(tool) is None], None
    if sys.platform != "linux":
        given = sys.platform
    elif os.geteuid() != 0:
        given = "a user who is not root"
    elif missing:
        given = f"a machine without {', '.join(missing)}"
    if given is not None:
        fix = "run it as root on Linux with iproute2 and util-linux, or on local ranks with --ranks"
        raise ClusterError("hosts on one machine", "root on Linux, to make network namespaces", given, fix)


def _accept(door: socket.socket, init: subprocess.Popen[bytes], hosts: Hosts, folder: Path, end: float) -> list[Any]:
    """Return a pipe to each rank, in order of rank, once all ranks have connected."""
    door.settimeout(0.2)
    pipes: dict[int, Connection] = {}
    while len(pipes) < hosts.world:
        try:
            pipe = Connection(door.accept()[0].detach())
            pipes[pipe.recv()] = pipe
        except TimeoutError:
            if init.poll() is not None:
                raise LaunchError(f"the hosts could not be made:\n{_log(folder)}") from None
            if time.monotonic() > end:
                raise LaunchError(f"ranks did not start in time:\n{_log(folder)}") from None
    return [pipes[rank] for rank in range(hosts.world)]


def _death(rank: int, folder: Path) -> ProcessDeath:
    return ProcessDeath(f"rank {rank} ended before it was done:\n{_log(folder)}")


def _log(folder: Path) -> str:
    return (folder / "log").read_text(errors="replace")[-2000:]


class Wire(NamedTuple):
    """Counters of an interface of a host: bytes and packets in each direction."""

    sent: int = 0
    sent_packets: int = 0
    received: int = 0
    received_packets: int = 0

    def __sub__(self, other: "Wire") -> "Wire":
        return Wire(*(x - y for x, y in zip(self, other, strict=True)))

    @property
    def payload(self) -> int:
        """Bytes sent, without packet headers; an acknowledgement has nothing else."""
        return self.sent - HEADERS * self.sent_packets


def wires() -> tuple[Wire, Wire]:
    """Return the counters of this host: of its loopback, and of its link."""
    wire_of = {}
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if numbers:
            received, received_packets, *_, sent, sent_packets = (int(x) for x in numbers.split()[:10])
            wire_of[name.strip()] = Wire(sent, sent_packets, received, received_packets)
    if LINK not in wire_of:
        raise ClusterError("wires", f"a host made here, with an interface {LINK}", "none", "run it by run_on_hosts")
    return wire_of["lo"], wire_of[LINK]


def _rank(door: str) -> None:
    """Run as one rank that torchrun started: receive the work by the socket `door`, do it and send the result."""
    torch.set_num_threads(1)
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(door)
        pipe = Connection(line.detach())
    pipe.send(int(os.environ["RANK"]))
    run_work(pipe, lambda: dist.init_process_group("gloo", timeout=LAUNCH_TIMEOUT), pipe.recv())


if __name__ == "__main__":
    _rank(sys.argv[1])
