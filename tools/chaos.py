"""Inject random faults into ranks under a workload, and check their answers or errors and the delay."""

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from attnmesh.errors import ClusterError
from attnmesh.mesh.shapes import Shape
from attnmesh.runtime.machine import machine
from attnmesh.store.manifest import read_manifest
from benchmarks import netns
from benchmarks.netns import Hosts, ranks_of
from tests.support.ranks.faults import FAULTS, MARGIN, SECOND_JOB_TIMEOUT, find_failure
from tests.support.ranks.workloads import LENGTHS, length_of_save
from tests.support.ranks.worlds import START_TIMEOUT, Job, Ranks, Report, Testbed

SHAPES = (Shape(1, 1, 2), Shape(1, 2, 2), Shape(1, 1, 4), Shape(1, 4, 1), Shape(2, 1, 2), Shape(1, 1, 3))
HOSTS = ("2x1", "2x2", "3x1", "4x1")
RATES = ("20mbit", "100mbit")
JUMPS = (-86400.0, -7200.0, 60.0, 10800.0, 1e6)
CONCURRENT = 4
"""Scenarios at a time."""

RIGHT_ANSWER, RIGHT_ERROR = PASSED = "right answer", "right error in time"
"""Verdicts of a scenario that did not fail."""


@dataclass(frozen=True)
class Scenario:
    """A world, its workload, and a fault of one rank or its host."""

    seed: int
    world: int | Hosts
    shape: Shape
    work: str
    harm: str
    victim: int
    after: float  # seconds from the start of the workload to the fault
    late: float
    jump: float
    again: int  # ranks that load the last save
    agent: bool  # an agent process keeps the store, and not the first rank
    deadline: float = 3.0

    @property
    def affected(self) -> tuple[int, ...]:
        """The victim, or all ranks of its host if the fault affects the host."""
        if not (FAULTS[self.harm].whole and isinstance(self.world, Hosts)):
            return (self.victim,)
        first = self.victim // self.world.ranks * self.world.ranks
        return tuple(range(first, first + self.world.ranks))


@dataclass(frozen=True)
class Outcome:
    """Outcome of a scenario: one of `PASSED` or a failure, the slowest rank's seconds, and all reports."""

    verdict: str
    seconds: float
    reports: dict[int, Report]
    details: str = ""

    @property
    def failed(self) -> bool:
        """True if neither the right answer nor the right error came in time."""
        return self.verdict not in PASSED


def possible_faults(*, hosts: bool) -> list[str]:
    """Return the names of the faults that are possible with or without hosts."""
    return [name for name, fault in FAULTS.items() if hosts or not fault.on_hosts]


def draw(seed: int, testbeds: Sequence[str] = ("ranks", "hosts")) -> Scenario:
    """Return the scenario of a seed. Faults and workloads take turns; everything else is random."""
    random, names = Random(seed), possible_faults(hosts="hosts" in testbeds)
    name = names[seed % len(names)]
    fault = FAULTS[name]
    on_hosts = fault.on_hosts or random.choice(testbeds) == "hosts"
    world = Hosts.parse(f"{random.choice(HOSTS)}@{random.choice(RATES)}") if on_hosts else random.choice((2, 3, 4))
    shape = random.choice([shape for shape in SHAPES if shape.ranks == ranks_of(world)])
    return Scenario(
        seed=seed,
        world=world,
        shape=shape,
        work=fault.workloads[(seed + seed // len(names)) % len(fault.workloads)],
        harm=name,
        victim=random.randrange(shape.ranks),
        after=random.uniform(0.0, 0.6),
        late=random.uniform(1.0, 5.0) if fault.late else 0.0,
        jump=random.choice(JUMPS),
        again=random.choice((1, 2, 3, 4)),
        # If the first rank keeps the store, no rank can distinguish a stopped rank 0 from its host being cut off.
        agent=random.random() < 0.7 or (isinstance(world, Hosts) and world.ranks > 1),
    )


def run_scenario(scenario: Scenario) -> Outcome:
    """Run a scenario and return its outcome. All its processes have ended by then."""
    with tempfile.TemporaryDirectory(prefix="attnmesh-chaos-") as name:
        folder = Path(name) / "cache"
        late = scenario.victim, scenario.late
        job = Job(scenario.shape, scenario.work, folder, scenario.deadline, late, scenario.jump, scenario.agent)
        with Testbed(scenario.world, scenario.agent) as testbed:
            outcome = _inject(scenario, Ranks(testbed, job))
        if scenario.work == "saving" and not outcome.failed:
            details = _find_lost_tokens(folder, scenario.again, outcome)
            outcome = replace(outcome, verdict="lost tokens", details=details) if details else outcome
        return outcome


def _inject(scenario: Scenario, ranks: Ranks) -> Outcome:
    """Inject the fault once all ranks run their workload. Return the outcome from the ranks' reports."""
    fault, all_ranks = FAULTS[scenario.harm], range(scenario.shape.ranks)
    began = ranks.receive(all_ranks, START_TIMEOUT)
    if sorted(rank for rank, report in began.items() if report.kind == "at work") != list(all_ranks):
        return Outcome("another error" if began else "hang", START_TIMEOUT, began, "before the fault")
    time.sleep(scenario.after)
    second_job = fault.inject(ranks, scenario.victim)
    injected, latest = time.monotonic(), scenario.deadline + MARGIN + fault.delay
    reporting = [rank for rank in all_ranks if not (fault.mute and rank == scenario.victim)]
    ranks.announce_fault(reporting)
    received = ranks.receive(reporting, latest + 10)
    reports = {rank: replace(report, seconds=report.seconds - injected) for rank, report in received.items()}
    slowest = max((report.seconds for report in reports.values()), default=0.0)
    failure = find_failure(fault, reports, scenario.affected, len(reporting), latest)
    right = all(report.kind == "right" for report in reports.values())
    outcome = Outcome(failure or (RIGHT_ANSWER if right else RIGHT_ERROR), round(slowest, 2), reports)
    return outcome if second_job is None or failure else _check_second_job(outcome, ranks, second_job)


def _check_second_job(outcome: Outcome, ranks: Ranks, second_job: Ranks) -> Outcome:
    """Return a failure unless all ranks of the second job fail in time and the first job continues undisturbed."""
    reports = second_job.receive(range(second_job.job.shape.ranks), SECOND_JOB_TIMEOUT)
    disturbed = ranks.receive(range(ranks.job.shape.ranks), 0.0)
    errors = [report for report in reports.values() if report.kind not in ("at work", "died")]
    if errors and len(errors) == len(reports) and not disturbed:
        return outcome
    return replace(
        outcome,
        verdict="another error" if reports or disturbed else "hang",
        details=f"the second job: {reports}, the first: {disturbed}",
    )


def _find_lost_tokens(folder: Path, ranks: int, outcome: Outcome) -> str:
    """Load the last save on a new world. Return how it is wrong, or an empty text."""
    manifest, last = read_manifest(folder), max(report.saved for report in outcome.reports.values())
    # Without an error, ranks continue to save.
    most = last + 1 if outcome.verdict == RIGHT_ERROR else manifest.save_number
    refused = any(report.refused for report in outcome.reports.values())  # then numbers do not determine lengths
    right = manifest.length in LENGTHS if refused else manifest.length == length_of_save(manifest.save_number)
    if not last <= manifest.save_number <= most or not right:
        return f"{manifest.length} tokens in save {manifest.save_number}, after save {last}"
    with Testbed(ranks) as testbed:
        loading = Ranks(testbed, Job(Shape(1, 1, ranks), "loading", folder, 30.0))
        reports = loading.receive(range(ranks), START_TIMEOUT)
        loading.announce_fault(range(ranks))
        working = [rank for rank, report in reports.items() if report.kind == "at work"]
        reports |= loading.receive(working, START_TIMEOUT)
    kinds = [report.kind for report in reports.values()]
    return "" if kinds == ["right"] * ranks else f"{ranks} ranks loaded: {reports}"


def run_scenarios(scenarios: Iterable[Scenario]) -> Iterator[tuple[Scenario, Outcome]]:
    """Yield scenarios and their outcomes. A few run at a time, since their processes mostly wait."""
    scenarios = list(scenarios)
    with ThreadPoolExecutor(CONCURRENT) as pool:
        yield from zip(scenarios, pool.map(run_scenario, scenarios), strict=True)


def table(records: Sequence[dict[str, Any]]) -> str:
    """Return a table of runs, verdicts and the slowest rank's seconds by workload and fault."""
    lines = [f"{'work':10} {'harm':24} {'runs':>5} {'right answer':>13} {'right error in time':>20} {'slowest, s':>11}"]
    pairs = [(workload, name) for name, fault in FAULTS.items() for workload in fault.workloads]
    for workload, name in sorted(pairs, key=lambda pair: pair[0]):
        some = [record for record in records if (record["work"], record["harm"]) == (workload, name)]
        if some:
            answers, errors = (sum(x["verdict"] == verdict for x in some) for verdict in PASSED)
            slowest = max(x["slowest"] for x in some)
            lines.append(f"{workload:10} {name:24} {len(some):5} {answers:13} {errors:20} {slowest:11}")
    return "\n".join(lines)


def main() -> None:
    """Run many scenarios, and print a table of their outcomes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=240)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--out", type=Path, help="also write a JSON with every run")
    options = parser.parse_args()
    testbeds = ["ranks", "hosts"]
    try:
        netns.check_here()
    except ClusterError as error:
        print(f"without hosts, nor faults of their links: {error}")
        testbeds.remove("hosts")
    start, records = time.monotonic(), []
    seeds = range(options.first, options.first + options.runs)
    for scenario, outcome in run_scenarios(draw(seed, testbeds) for seed in seeds):
        fields = asdict(scenario) | {"world": str(scenario.world)}
        records.append(fields | {"verdict": outcome.verdict, "slowest": outcome.seconds})
        if outcome.failed:
            print(f"\n{scenario}: {outcome}")
        print(f"\r{len(records)} of {options.runs}", end="", file=sys.stderr, flush=True)
    print(f"\n{table(records)}\n{time.monotonic() - start:.0f} seconds")
    if options.out:
        command = shlex.join(["python", "-m", "tools.chaos", *sys.argv[1:]])
        report = {"command": command, "machine": machine(), "seconds": round(time.monotonic() - start), "runs": records}
        options.out.write_text(json.dumps(report, indent=2) + "\n")
    sys.exit(any(record["verdict"] not in PASSED for record in records))


if __name__ == "__main__":
    main()
