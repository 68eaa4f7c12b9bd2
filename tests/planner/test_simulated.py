"""Predicted times beside an independent simulation of the same messages by SimGrid, where it is installed.

The messages are those of the executor's schedules; the cost model does not use them. Devices compute and copy in zero
time, so that times are those of latencies and links alone.
"""

import json
import os
import subprocess
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import attnmesh as am
from attnmesh.core.layout import Layout
from attnmesh.core.mask import Mask
from attnmesh.cost.candidate_mesh import CandidateMesh
from attnmesh.cost.cluster import Cluster
from attnmesh.cost.rates import Device, Link
from attnmesh.cost.traffic import tiles
from attnmesh.mesh.reduction_tree import reduction_rounds
from attnmesh.mesh.schedule import EXCHANGE_MODES, GatherStep, Problem, make_schedule
from attnmesh.mesh.shapes import Shape, rank_grid
from attnmesh.planner.workload import Workload
from attnmesh.planner.workload_cost import cost
from tests.support.truth.seeds import some

SCRIPT = Path(__file__).parents[1] / "support" / "planning" / "simulated.py"

PYTHON = "/usr/bin/python3"
"""SimGrid is a system package, not one of the virtual environment."""

INSTANT = Device(1e30, 1e30, 1e30, 1e30)

Message = tuple[int, int, float]


@cache
def has_simgrid() -> bool:
    command = [PYTHON, "-c", "import simgrid"]
    return Path(PYTHON).exists() and subprocess.run(command, capture_output=True).returncode == 0


@pytest.fixture(autouse=True)
def needs_simgrid() -> None:
    if not has_simgrid():
        assert not os.environ.get("CI"), "install python3-simgrid: make packages"
        pytest.skip("SimGrid is not installed: make packages")


def cluster(hosts: int, ranks: int) -> Cluster:
    """Return a cluster with fast links inside hosts, and slow shared links between them."""
    return Cluster("made up", hosts, ranks, INSTANT, Link(5e-6, 100e9, 100e9 * ranks), Link(20e-6, 25e9, 40e9))


def simulated(cluster: Cluster, stages: list[list[Message]]) -> float:
    """Return the seconds until all ranks are done, by SimGrid."""
    links = {
        name: {"latency": link.latency, "rank_rate": link.rate, "host_rate": host_rate}
        for name, link, host_rate in (
            ("inside", cluster.inside, None),
            ("between", cluster.between, cluster.between.host_rate),
        )
    }
    listed = [{"compute": 0.0, "messages": messages, "overlap": True} for messages in stages]
    jobs = [{"hosts": cluster.hosts, "ranks": cluster.ranks, **links, "stages": listed}]
    done = subprocess.run([PYTHON, SCRIPT], input=json.dumps(jobs), capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)[0])


def along(
    candidate: CandidateMesh, keys: bool, steps: dict[tuple[int, int], GatherStep], size: float, *, back: bool
) -> list[Message]:
    """Return the messages of one exchange of keys or queries, from the schedules of all ranks."""
    ranks = rank_grid(candidate.shape, candidate.tile)
    found = []
    for h in range(candidate.shape.heads):
        for (r, c), step in steps.items():
            # Results return to their owners, not to the ranks that passed the tokens on.
            moved = [(peer, len(tokens)) for peer, tokens in step.return_to] if back else list(step.receive)
            for peer, tokens in moved:
                other, rank = int(ranks[h, peer, c] if keys else ranks[h, r, peer]), int(ranks[h, r, c])
                if other != rank:
                    found.append((rank, other, tokens * size) if back else (other, rank, tokens * size))
    return found


def stages(candidate: CandidateMesh, work: Workload) -> list[list[Message]]:
    """Return the messages of each stage, forward and backward, without the comparison of calls before them."""
    problem = Problem(work.mask, candidate.shape, candidate.layout, candidate.layout, work.length, work.length)
    ring = EXCHANGE_MODES[candidate.exchange_or_merge].ring
    places = [(r, c) for r in range(candidate.shape.queries) for c in range(candidate.shape.keys)]
    plans = {place: make_schedule(problem, *place, ring) for place in places}
    rows = {place: one.query_step for place, one in plans.items()}
    steps = [
        {place: one.key_steps[t] for place, one in plans.items()} for t in range(candidate.shape.queries if ring else 1)
    ]
    heads, width = candidate.shape.heads, work.head_dim
    q, k = work.q_heads / heads, work.kv_heads / heads

    def on_rows(size: float, *, back: bool = False) -> list[Message]:
        return along(candidate, False, rows, size, back=back)

    def on_columns(t: int, size: float, *, back: bool = False) -> list[Message]:
        return along(candidate, True, steps[t], size, back=back)

    def returned(t: int) -> list[Message]:
        """Return the messages of gradients that travel on with their keys, or back to their owners."""
        return on_columns(t, gradients, back=True) + (on_columns(t + 1, gradients) if t + 1 < len(steps) else [])

    wide, columns = 4.0, 2 * k * width
    sent, returned_size = q * width * work.itemsize, q * (width + 1) * wide
    backward, gradients = q * (2 * width * work.itemsize + 2 * wide), columns * wide
    if not ring:
        forward = [on_rows(sent) + on_columns(0, columns * work.itemsize), on_rows(returned_size, back=True)]
        gather = on_rows(backward) + on_columns(0, columns * work.itemsize)
        return [*forward, gather, on_columns(0, gradients, back=True), on_rows(q * width * wide, back=True)]
    found = [on_rows(sent)] + [on_columns(t, columns * work.itemsize) for t in range(1, len(steps))]
    found += [on_rows(returned_size, back=True), on_rows(backward)]
    found += [on_columns(t, columns * work.itemsize) + returned(t) for t in range(1, len(steps))]
    return [*found, on_rows(q * width * wide, back=True)]


CASES = [
    ("ring", Shape(1, 8, 1), (4, 2), am.Full()),
    pytest.param("ring", Shape(1, 16, 1), (16, 1), am.Causal(), marks=pytest.mark.long),
    pytest.param("ring", Shape(1, 64, 1), (16, 4), am.Full(), marks=pytest.mark.long),
    pytest.param("ring", Shape(1, 128, 1), (16, 8), am.Full(), marks=pytest.mark.long),
    ("bulk", Shape(1, 16, 1), (8, 2), am.Causal()),
    ("bulk", Shape(1, 4, 4), (16, 1), am.Full()),
    pytest.param("bulk", Shape(1, 4, 4), (4, 4), am.Causal(), marks=pytest.mark.long),
    pytest.param("bulk", Shape(1, 8, 8), (16, 4), am.Full(), marks=pytest.mark.long),
    pytest.param("bulk", Shape(1, 16, 8), (16, 8), am.Causal(), marks=pytest.mark.long),
    ("ring", Shape(1, 4, 4), (8, 2), am.Full()),
    pytest.param("bulk", Shape(1, 1, 16), (8, 2), am.Full(), marks=pytest.mark.long),
]


@pytest.mark.parametrize(("exchange", "shape", "world", "mask"), CASES)
def test_exchanges_take_as_long_as_simulated(exchange: str, shape: Shape, world: tuple[int, int], mask: Mask) -> None:
    machines, work = cluster(*world), Workload(8, 8, 64, 64 * shape.ranks, mask=mask, batch=64)
    layout: Layout = am.Contiguous() if mask == am.Full() else am.Zigzag()
    for tile in tiles(shape, machines.ranks):
        candidate = CandidateMesh(shape, tile, layout, exchange)
        total = cost(candidate, work, machines)
        messages = [[(a, b, work.batch * size) for a, b, size in stage] for stage in stages(candidate, work)]
        predicted = total.seconds - total.parts["agree"]
        assert predicted == pytest.approx(simulated(machines, messages), rel=0.1), (tile, asdict(total))


@pytest.mark.parametrize(
    "world", some([(1, 8), (4, 2), (8, 2), (16, 1), (16, 8), (3, 2)], (1, 8), (4, 2), (16, 1), (3, 2))
)
def test_a_tree_takes_as_long_as_simulated(world: tuple[int, int]) -> None:
    machines = cluster(*world)
    ranks = machines.world
    work = Workload(64, 8, 128, 16384, phase="decode", q_len=16)
    shape, tile = Shape(1, 1, ranks), Shape(1, 1, machines.ranks)
    size = work.q_heads * 16 * 129 * 4 + 8.0
    whole = reduction_rounds([list(range(start, start + machines.ranks)) for start in range(0, ranks, machines.ranks)])
    rounds: list[list[Message]] = [[] for _ in range(max(map(len, whole.values())))]
    for rank, turns in whole.items():
        for number, turn in enumerate(turns):
            rounds[number] += [(rank, peer, size) for peer in turn.send]
    total: Any = cost(CandidateMesh(shape, tile, am.Striped(16), "tree"), work, machines)
    assert total.parts["merge"] == pytest.approx(simulated(machines, rounds), rel=0.1)
