"""Check new random problems against float64 for a given time: `python -m tools.fuzz --seconds 600`.

`--ranks 6` draws attention on a mesh of 6 ranks, and `--caches` draws histories of caches on several meshes.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from attnmesh.core.storage import STORAGES
from tests.support.ranks.pool import SIZES, Pool
from tests.support.truth import histories, mesh_problems, problems


def main() -> None:
    """Check problems until the time is over. A wrong result ends the run and prints its seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--ranks", type=int, choices=SIZES, help="ranks of the mesh; one device by default")
    parser.add_argument("--caches", action="store_true", help="histories of caches, on meshes of any size")
    parser.add_argument("--seed", type=int, help="check only this problem")
    parser.add_argument("--only", default="", help="check only problems whose text contains this, such as Chunks")
    options = parser.parse_args()
    pool = Pool()
    check = _one_device if options.ranks is None else _on_mesh(pool, options.ranks)
    check = _caches(pool) if options.caches else check
    check = partial(check, options.only)
    try:
        _run(check, options)
    finally:
        pool.close()


def _run(check: Callable[[int], bool], options: argparse.Namespace) -> None:
    end, count = time.monotonic() + options.seconds, 0
    kind = "" if options.ranks is None else f" --ranks {options.ranks}"
    kind = " --caches" if options.caches else kind
    while count == 0 or (options.seed is None and time.monotonic() < end):
        seed = random.getrandbits(48) if options.seed is None else options.seed
        try:
            checked = check(seed)
        except BaseException:
            print(f"\nwrong: python -m tools.fuzz{kind} --seed {seed}")
            raise
        count += checked
        if checked and count % 100 == 0:
            print(f"\r{count} problems, none wrong, {max(0, end - time.monotonic()):.0f} s left  ", end="", flush=True)
    print(f"\r{count} problems{kind} against float64: none wrong")


def _one_device(only: str, seed: int) -> bool:
    problem = problems.draw(seed)
    if only in repr(problem):
        problem.check()
    return only in repr(problem)


def _on_mesh(pool: Pool, ranks: int) -> Callable[[str, int], bool]:
    def check(only: str, seed: int) -> bool:
        problem = mesh_problems.draw(seed, ranks)
        if only in repr(problem):
            mesh_problems.check(problem, pool.run(ranks, mesh_problems.run_problem, problem))
        return only in repr(problem)

    return check


def _caches(pool: Pool) -> Callable[[str, int], bool]:
    def check(only: str, seed: int) -> bool:
        history = replace(histories.draw(seed), storage=(None, None, *STORAGES)[seed % 4])
        if only in repr(history):
            with tempfile.TemporaryDirectory() as folder:
                histories.check(history, pool, Path(folder))
        return only in repr(history)

    return check


if __name__ == "__main__":
    main()
