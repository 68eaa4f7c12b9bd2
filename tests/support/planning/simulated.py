#!/usr/bin/python3
"""Time stages of messages among the ranks of a cluster with SimGrid's fluid network model.

Read a list of jobs (JSON, see `Job`) from standard input. Write the virtual seconds until all ranks of each job are
done, in the same order. Needs Debian's python3-simgrid (3.32).
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections import defaultdict
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypedDict

import simgrid

# Max-min fair sharing of the given rates: no factors on rates or latencies, no TCP window, no acknowledgements on the
# return path. The default optimization, Lazy, is up to 0.2% off where messages with a latency share a link; Full agrees
# with progressive filling. Events closer than `surf/precision` seconds count as simultaneous.
CONFIGURATION = {
    "network/model": "CM02",
    "network/optim": "Full",
    "network/bandwidth-factor": "1",
    "network/latency-factor": "1",
    "network/weight-S": "0",
    "network/TCP-gamma": "1e30",
    "network/crosstraffic": "0",
    "maxmin/precision": "1e-9",
    "surf/precision": "1e-12",
}


class Network(TypedDict):
    """Links inside a host or between hosts: seconds and bytes/s (null: unlimited)."""

    latency: float
    rank_rate: float
    host_rate: float | None


class Stage(TypedDict):
    """Messages [source, destination, bytes], and seconds that each rank computes during or after them."""

    compute: float
    messages: list[tuple[int, int, int]]
    overlap: bool


class Job(TypedDict):
    """Stages on `hosts` x `ranks` ranks; rank number = host * ranks + index."""

    hosts: int
    ranks: int
    inside: Network
    between: Network
    stages: list[Stage]


class Hop(NamedTuple):
    """A link of a route. Equal names denote the same link."""

    name: str
    rate: float
    latency: float


class Step(NamedTuple):
    """The part of a stage that one rank runs."""

    sends: list[tuple[int, int]]  # destination, bytes
    receives: list[int]  # source
    compute: float
    overlap: bool


def check(job: Job) -> None:
    """Raise on messages of unknown ranks and on messages of a rank to itself."""
    count = job["hosts"] * job["ranks"]
    for stage in job["stages"]:
        for source, destination, size in stage["messages"]:
            if not (0 <= source < count and 0 <= destination < count and source != destination and size >= 0):
                raise ValueError(f"no such message among {count} ranks: {[source, destination, size]}")


def route(job: Job, source: int, destination: int) -> list[Hop]:
    """Return the links from one rank to another. The first link has the whole latency."""
    start, end = source // job["ranks"], destination // job["ranks"]
    if start == end:
        network, shared = job["inside"], [f"inside-{start}"]
        up, down = f"inside-up-{source}", f"inside-down-{destination}"
    else:
        network, shared = job["between"], [f"host-up-{start}", f"host-down-{end}"]
        up, down = f"nic-up-{source}", f"nic-down-{destination}"
    host_rate = network["host_rate"]
    middle = [] if host_rate is None else [Hop(name, host_rate, 0.0) for name in shared]
    return [
        Hop(up, network["rank_rate"], network["latency"]),
        *middle,
        Hop(down, network["rank_rate"], 0.0),
    ]


def steps_of(job: Job) -> list[list[Step]]:
    """Return the steps of each rank. A rank that is idle in a stage has no step in it."""
    steps: list[list[Step]] = [[] for _ in range(job["hosts"] * job["ranks"])]
    for stage in job["stages"]:
        sends: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        receives: defaultdict[int, list[int]] = defaultdict(list)
        for source, destination, size in stage["messages"]:
            sends[source].append((destination, round(size)))
            receives[destination].append(source)
        for rank, queue in enumerate(steps):
            step = Step(sends[rank], receives[rank], stage["compute"], stage["overlap"])
            if step.sends or step.receives or step.compute > 0:
                queue.append(step)
    return steps


def build(job: Job) -> list[Any]:
    """Return the SimGrid host of each rank. The platform has only the links and routes that messages use."""
    zone = simgrid.NetZone.create_full_zone("cluster")
    places = [zone.create_host(f"rank-{rank}", 1.0) for rank in range(job["hosts"] * job["ranks"])]
    links: dict[str, simgrid.Link] = {}
    for source, destination in sorted({(message[0], message[1]) for s in job["stages"] for message in s["messages"]}):
        hops = route(job, source, destination)
        for hop in hops:
            if hop.name not in links:
                links[hop.name] = zone.create_link(hop.name, float(hop.rate)).set_latency(float(hop.latency)).seal()
        ends = places[source].netpoint, places[destination].netpoint
        zone.add_route(*ends, None, None, [simgrid.LinkInRoute(links[hop.name]) for hop in hops], False)
    zone.seal()
    return places


def behave(rank: int, steps: list[Step]) -> None:
    """Run the steps of a rank: post, compute and wait. A message starts once both ends have posted it."""

    def box(source: int, destination: int) -> Any:
        return simgrid.Mailbox.by_name(f"{source}-{destination}")

    for step in steps:
        puts = [box(rank, destination).put_async(None, size) for destination, size in step.sends]
        gets = [box(source, rank).get_async() for source in step.receives]  # pairs: the second must outlive the wait
        if step.overlap and step.compute > 0:
            simgrid.this_actor.sleep_for(step.compute)
        simgrid.Comm.wait_all(puts + [comm for comm, _ in gets])
        if not step.overlap and step.compute > 0:
            simgrid.this_actor.sleep_for(step.compute)


def simulate(job: Job) -> float:
    """Return the virtual seconds of a job. SimGrid has one engine per process, so call it once per process."""
    options = [f"--cfg={key}:{value}" for key, value in CONFIGURATION.items()]
    engine = simgrid.Engine([sys.argv[0], "--log=xbt_cfg.thres:warning", *options])
    for rank, (place, steps) in enumerate(zip(build(job), steps_of(job), strict=True)):
        if steps:
            simgrid.Actor.create(f"rank-{rank}", place, behave, rank, steps)
    engine.run()
    return float(engine.clock)


def simulate_apart(job: Job) -> float:
    """Check a job, and return its virtual seconds, simulated in a new process."""
    check(job)

    def work(answer: Connection) -> None:
        answer.send(simulate(job))

    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(sender,))
    process.start()
    sender.close()  # recv raises EOFError once the process ends
    try:
        return float(receiver.recv())
    except EOFError:
        raise RuntimeError("simulation failed: see the error above") from None
    finally:
        receiver.close()
        process.join()


def main() -> None:
    """Simulate the jobs of standard input one at a time, and write the results to standard output."""
    json.dump([simulate_apart(job) for job in json.load(sys.stdin)], sys.stdout)
    print()


if __name__ == "__main__":
    main()
