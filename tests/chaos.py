"""Ranks at work, one of which comes to harm at a random moment; and what the others say of it, how soon."""

import argparse
import json
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from multiprocessing.connection import Connection, wait
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import attnmesh as am
from attnmesh.errors import RankFailure
from attnmesh.mesh import AXES, Shape
from attnmesh.ranks import _leave_with_parent
from tests.mesh_problems import named_mesh

SHAPES = (Shape(1, 1, 2), Shape(1, 2, 2), Shape(1, 1, 4), Shape(1, 4, 1), Shape(2, 1, 2), Shape(1, 1, 3))
AT_ONCE = 3
HARMS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


@dataclass(frozen=True)
class Trouble:
    """One rank's, while all do the same work again and again."""

    seed: int
    shape: Shape
    work: str
    harm: str
    victim: int
    after: float
    deadline: float = 3.0


@dataclass(frozen=True)
class Said:
    """By a survivor: what it raised, about whom, and so many seconds after the harm."""

    kind: str
    ranks: tuple[int, ...]
    step: str
    axis: str
    seconds: float
    text: str


def draw(seed: int) -> Trouble:
    """The trouble of that seed."""
    random = Random(seed)
    shape = random.choice(SHAPES)
    return Trouble(
        seed=seed,
        shape=shape,
        work=random.choice(list(WORKS)),
        harm=random.choice(list(HARMS)),
        victim=random.randrange(shape.ranks),
        after=random.uniform(0.0, 0.6),
    )


def suffer(trouble: Trouble) -> dict[int, Said]:
    """What each survivor says; nothing is left running."""
    context: Any = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.interpreted", "torch._dynamo", "tests.chaos"])
    processes, pipes = [], {}
    with tempfile.TemporaryDirectory(prefix="attnmesh-chaos-") as folder:
        try:
            for rank in range(trouble.shape.ranks):
                ours, theirs = context.Pipe()
                process = context.Process(target=_live, args=(trouble, rank, Path(folder) / "store", theirs))
                process.start()
                theirs.close()
                processes.append(process)
                pipes[ours] = rank
            return _heard(trouble, processes, pipes)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _heard(trouble: Trouble, processes: list[Any], pipes: dict[Connection, int]) -> dict[int, Said]:
    """First that each is at work; then harm is done; then what they say, until all have or the time is over."""
    for pipe in pipes:
        assert pipe.recv() == "at work"
    time.sleep(trouble.after)
    os.kill(processes[trouble.victim].pid, HARMS[trouble.harm])
    start = time.time()
    survivors = {pipe: rank for pipe, rank in pipes.items() if rank != trouble.victim}
    said: dict[int, Said] = {}
    while len(said) < len(survivors) and time.time() - start < trouble.deadline + 15:
        for pipe in wait([p for p, rank in survivors.items() if rank not in said], timeout=1.0):
            rank = survivors[pipe]  # type: ignore[index]
            try:
                kind, ranks, step, axis, when, text = pipe.recv()  # type: ignore[union-attr]
                said[rank] = Said(kind, ranks, step, axis, when - start, text)
            except EOFError:
                said[rank] = Said("died", (), "", "", time.time() - start, "")
    return said


def _live(trouble: Trouble, rank: int, store: Path, pipe: Connection) -> None:
    """A rank works until something is wrong, and says what."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{store}", rank=rank, world_size=trouble.shape.ranks, timeout=timedelta(minutes=5)
    )
    am.set_deadline(trouble.deadline)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    try:
        step = WORKS[trouble.work](named_mesh(trouble.shape, AXES))
        first = step()
        dist.barrier()
        pipe.send("at work")
        while True:
            if not all(torch.equal(x, y) for x, y in zip(step(), first, strict=True)):
                pipe.send(("wrong", (), "", "", time.time(), "another answer than before"))
                break
    except RankFailure as error:
        pipe.send(("RankFailure", error.ranks, error.step, error.axis, time.time(), str(error)))
    except BaseException as error:
        pipe.send((type(error).__name__, (), "", "", time.time(), str(error)))
    os._exit(0)


def _shards(mesh: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(1, heads, 64, 16, generator=generator) for heads in (4, 2, 2)]


def _prefill(mesh: Any) -> Callable[[], tuple[Tensor, ...]]:
    q, k, v = _shards(mesh)
    return lambda: tuple(am.attention(q, k, v, mesh=mesh, exchange=name) for name in ("bulk", "pipelined", "ring"))


def _training(mesh: Any) -> Callable[[], tuple[Tensor, ...]]:
    heads = [x.requires_grad_() for x in _shards(mesh)]

    def step() -> tuple[Tensor, ...]:
        out = am.attention(*heads, mesh=mesh)
        return out.detach(), *torch.autograd.grad(out.square().sum(), heads)

    return step


def _decoding(mesh: Any) -> Callable[[], tuple[Tensor, ...]]:
    cache = am.KVCache(mesh, batch=1, kv_heads=2, head_dim=16, capacity=100, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    cache.append(*torch.randn(2, 1, 2, 60, 16, generator=generator))
    q = torch.randn(1, 4, 1, 16, generator=generator)
    return lambda: tuple(am.decode(q, cache, merge=merge) for merge in ("tree", "direct", "gather"))


WORKS = {"prefill": _prefill, "training": _training, "decoding": _decoding}


def suffered(seeds: Iterable[int]) -> Iterator[tuple[Trouble, dict[int, Said]]]:
    """The troubles of these seeds, and what came of them: a few at a time, since they wait more than they work."""
    troubles = [draw(seed) for seed in seeds]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from zip(troubles, pool.map(suffer, troubles), strict=True)


def verdict(trouble: Trouble, said: dict[int, Said]) -> str:
    """Whether all survivors said the right thing in time."""
    if len(said) < trouble.shape.ranks - 1:
        return "hang"
    if any(what.kind == "wrong" for what in said.values()):
        return "wrong answer"
    if any(what.kind != "RankFailure" for what in said.values()):
        return "another error"
    if any(what.ranks != (trouble.victim,) for what in said.values()):
        return "another rank named"
    if any(what.seconds > trouble.deadline + 5 for what in said.values()):
        return "late"
    return "named in time"


def main() -> None:
    """Many troubles, and a table of what came of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--out", type=Path, help="also write a JSON with every run")
    asked = parser.parse_args()
    records: list[dict[str, Any]] = []
    for trouble, said in suffered(range(asked.first, asked.first + asked.runs)):
        slowest = max((what.seconds for what in said.values()), default=0.0)
        records.append({**vars(trouble), "verdict": verdict(trouble, said), "slowest": round(slowest, 2)})
        if records[-1]["verdict"] != "named in time":
            print(f"\n{trouble}: {records[-1]['verdict']}: {said}")
        print(f"\r{len(records)} of {asked.runs}", end="", file=sys.stderr, flush=True)
    print(f"\n{'work':10} {'harm':8} {'runs':>5} {'named in time':>14} {'slowest, s':>11}")
    for work, harm in product(WORKS, HARMS):
        some = [record for record in records if (record["work"], record["harm"]) == (work, harm)]
        if some:
            named = sum(record["verdict"] == "named in time" for record in some)
            slowest = max(record["slowest"] for record in some)
            print(f"{work:10} {harm:8} {len(some):5} {named:14} {slowest:11}")
    if asked.out:
        command = f"python -m tests.chaos --runs {asked.runs} --first {asked.first}"
        report = {"command": command, "torch": torch.__version__, "runs": records}
        asked.out.write_text(json.dumps(report, indent=2) + "\n")
    sys.exit(any(record["verdict"] != "named in time" for record in records))


if __name__ == "__main__":
    main()
