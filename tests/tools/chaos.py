"""Ranks at work, one of which comes to harm at a random moment; and what the others say of it, how soon."""

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

from attnmesh.cli import netns
from attnmesh.cli.netns import Hosts, ranks_of
from attnmesh.cli.output import machine
from attnmesh.decode import checkpoint
from attnmesh.errors import ClusterError
from attnmesh.mesh.shapes import Shape
from tests.support.harms import HARMS, LATEST, SECOND, fault
from tests.support.works import LENGTHS, length_of
from tests.support.worlds import START, Ground, Job, Ranks, Said

SHAPES = (Shape(1, 1, 2), Shape(1, 2, 2), Shape(1, 1, 4), Shape(1, 4, 1), Shape(2, 1, 2), Shape(1, 1, 3))
HOSTS = ("2x1", "2x2", "3x1", "4x1")
RATES = ("20mbit", "100mbit")
JUMPS = (-86400.0, -7200.0, 60.0, 10800.0, 1e6)
AT_ONCE = 4


@dataclass(frozen=True)
class Trouble:
    """One rank's, or its host's, while all do the same work again and again."""

    seed: int
    world: int | Hosts
    shape: Shape
    work: str
    harm: str
    victim: int
    after: float
    late: float
    jump: float
    again: int  # ranks that load what was saved
    agent: bool  # a process of its own keeps the store, and not the first rank
    deadline: float = 3.0

    @property
    def harmed(self) -> tuple[int, ...]:
        """The victim, and where its host is harmed all on it."""
        if not (HARMS[self.harm].whole and isinstance(self.world, Hosts)):
            return (self.victim,)
        first = self.victim // self.world.ranks * self.world.ranks
        return tuple(range(first, first + self.world.ranks))


@dataclass(frozen=True)
class Outcome:
    """What came of a trouble: "right answer", "right error in time" or a failure, the slowest seconds, and the rest."""

    verdict: str
    seconds: float
    said: dict[int, Said]
    more: str = ""

    @property
    def failed(self) -> bool:
        """Whether it should not have come."""
        return self.verdict not in ("right answer", "right error in time")


def can(hosts: bool) -> list[str]:
    """The harms that can be done, with or without hosts."""
    return [name for name, harm in HARMS.items() if hosts or not harm.on_hosts]


def draw(seed: int, grounds: Sequence[str] = ("ranks", "hosts")) -> Trouble:
    """The trouble of that seed: harms and works take turns, all else is random."""
    random, names = Random(seed), can("hosts" in grounds)
    harm = names[seed % len(names)]
    works = HARMS[harm].works
    on_hosts = HARMS[harm].on_hosts or random.choice(grounds) == "hosts"
    world = Hosts.parse(f"{random.choice(HOSTS)}@{random.choice(RATES)}") if on_hosts else random.choice((2, 3, 4))
    shape = random.choice([shape for shape in SHAPES if shape.ranks == ranks_of(world)])
    return Trouble(
        seed=seed,
        world=world,
        shape=shape,
        work=works[(seed + seed // len(names)) % len(works)],
        harm=harm,
        victim=random.randrange(shape.ranks),
        after=random.uniform(0.0, 0.6),
        late=random.uniform(1.0, 5.0) if HARMS[harm].late else 0.0,
        jump=random.choice(JUMPS),
        again=random.choice((1, 2, 3, 4)),
        # Where the first rank keeps it, nobody can tell a rank that is stopped from its host that is cut off.
        agent=random.random() < 0.7 or (isinstance(world, Hosts) and world.ranks > 1),
    )


def suffer(trouble: Trouble) -> Outcome:
    """What comes of a trouble; nothing is left running."""
    with tempfile.TemporaryDirectory(prefix="attnmesh-chaos-") as name:
        folder = Path(name) / "cache"
        late = trouble.victim, trouble.late
        job = Job(trouble.shape, trouble.work, folder, trouble.deadline, late, trouble.jump, trouble.agent)
        with Ground(trouble.world, trouble.agent) as ground:
            outcome = _harmed(trouble, Ranks(ground, job))
        if trouble.work == "saving" and not outcome.failed:
            more = _lost_tokens(folder, trouble.again, outcome)
            outcome = replace(outcome, verdict="lost tokens", more=more) if more else outcome
        return outcome


def _harmed(trouble: Trouble, ranks: Ranks) -> Outcome:
    """Once all are at work harm is done; then what they say, until all have or the time is over."""
    harm, everyone = HARMS[trouble.harm], range(trouble.shape.ranks)
    began = ranks.heard(everyone, START)
    if sorted(rank for rank, what in began.items() if what.kind == "at work") != list(everyone):
        return Outcome("another error" if began else "hang", START, began, "before any harm was done")
    time.sleep(trouble.after)
    others = harm.do(ranks, trouble.victim)
    done, latest = time.monotonic(), trouble.deadline + LATEST + harm.more
    heard = [rank for rank in everyone if not (harm.mute and rank == trouble.victim)]
    ranks.tell(heard)
    said = {rank: replace(what, seconds=what.seconds - done) for rank, what in ranks.heard(heard, latest + 10).items()}
    slowest = max((what.seconds for what in said.values()), default=0.0)
    wrong = fault(harm, said, trouble.harmed, len(heard), latest)
    right = all(what.kind == "right" for what in said.values())
    outcome = Outcome(wrong or ("right answer" if right else "right error in time"), round(slowest, 2), said)
    return outcome if others is None or wrong else _second(outcome, ranks, others)


def _second(outcome: Outcome, ranks: Ranks, others: Ranks) -> Outcome:
    """A second job on the same port has to fail in time, and none of its ranks may get to work or disturb the first."""
    said = others.heard(range(others.job.shape.ranks), SECOND)
    disturbed = ranks.heard(range(ranks.job.shape.ranks), 0.0)
    errors = [what for what in said.values() if what.kind not in ("at work", "died")]
    if errors and len(errors) == len(said) and not disturbed:
        return outcome
    return replace(
        outcome,
        verdict="another error" if said or disturbed else "hang",
        more=f"the second job: {said}, the first: {disturbed}",
    )


def _lost_tokens(folder: Path, ranks: int, outcome: Outcome) -> str:
    """What is wrong with what a new world of so many ranks loads, after the last saving of which the old one knew."""
    header, last = checkpoint.read_manifest(folder), max(what.saved for what in outcome.said.values())
    most = last + 1 if outcome.verdict == "right error in time" else header.saving  # who is right goes on saving
    refused = any(what.refused for what in outcome.said.values())  # then numbers tell no more which length it was
    right = header.length in LENGTHS if refused else header.length == length_of(header.saving)
    if not last <= header.saving <= most or not right:
        return f"{header.length} tokens of saving {header.saving}, after saving {last}"
    with Ground(ranks) as ground:
        again = Ranks(ground, Job(Shape(1, 1, ranks), "loading", folder, 30.0))
        said = again.heard(range(ranks), START)
        again.tell(range(ranks))
        said |= again.heard([rank for rank, what in said.items() if what.kind == "at work"], START)
    return "" if [what.kind for what in said.values()] == ["right"] * ranks else f"{ranks} ranks loaded: {said}"


def suffered(troubles: Iterable[Trouble]) -> Iterator[tuple[Trouble, Outcome]]:
    """The troubles, and what came of them: a few at a time, since they wait more than they work."""
    troubles = list(troubles)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from zip(troubles, pool.map(suffer, troubles), strict=True)


def table(records: Sequence[dict[str, Any]]) -> str:
    """For each work and harm: runs, how many ended in which way, and the slowest seconds of a rank."""
    lines = [f"{'work':10} {'harm':24} {'runs':>5} {'right answer':>13} {'right error in time':>20} {'slowest, s':>11}"]
    pairs = [(work, name) for name, harm in HARMS.items() for work in harm.works]
    for work, harm in sorted(pairs, key=lambda pair: pair[0]):
        some = [record for record in records if (record["work"], record["harm"]) == (work, harm)]
        if some:
            right, told = (
                sum(x["verdict"] == verdict for x in some) for verdict in ("right answer", "right error in time")
            )
            slowest = max(x["slowest"] for x in some)
            lines.append(f"{work:10} {harm:24} {len(some):5} {right:13} {told:20} {slowest:11}")
    return "\n".join(lines)


def main() -> None:
    """Many troubles, and a table of what came of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=240)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--out", type=Path, help="also write a JSON with every run")
    asked = parser.parse_args()
    grounds = ["ranks", "hosts"]
    try:
        netns.check_here()
    except ClusterError as error:
        print(f"without hosts, and what can be done to them alone: {error}")
        grounds.remove("hosts")
    start, records = time.monotonic(), []
    for trouble, outcome in suffered(draw(seed, grounds) for seed in range(asked.first, asked.first + asked.runs)):
        told = asdict(trouble) | {"world": str(trouble.world)}
        records.append(told | {"verdict": outcome.verdict, "slowest": outcome.seconds})
        if outcome.failed:
            print(f"\n{trouble}: {outcome}")
        print(f"\r{len(records)} of {asked.runs}", end="", file=sys.stderr, flush=True)
    print(f"\n{table(records)}\n{time.monotonic() - start:.0f} seconds")
    if asked.out:
        command = shlex.join(["python", "-m", "tests.tools.chaos", *sys.argv[1:]])
        report = {"command": command, "machine": machine(), "seconds": round(time.monotonic() - start), "runs": records}
        asked.out.write_text(json.dumps(report, indent=2) + "\n")
    sys.exit(any(record["verdict"] not in ("right answer", "right error in time") for record in records))


if __name__ == "__main__":
    main()
