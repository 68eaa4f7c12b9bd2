"""Calls on ranks: if one is given a bad argument, all raise the same error, which tells what is wrong, and all go on.

Where a call compares nothing, a bad argument is an error of its rank alone: all ranks are given it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

import attnmesh as am
from attnmesh import errors
from attnmesh.errors import ShapeError
from attnmesh.guard.agreement import Agreement
from attnmesh.mesh.axes import RankMesh
from attnmesh.mesh.shapes import AXES, Shape
from tests.refusals.cases import across, attention, caches, decoding, models, setup, trainers, windows
from tests.refusals.refusal import HEADS, Q_HEADS, SIZES, WIDTH, Place, Refusal, new_cache, refusals
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.problems import numbers
from tests.support.truth.tolerances import FLOAT32_SUMS

ROOMS = (attention, caches, decoding, windows, across, setup)
TWO = (Shape(1, 1, 2), Shape(1, 2, 1), Shape(2, 1, 1))
THREE = (Shape(1, 1, 3), Shape(1, 3, 1), Shape(3, 1, 1))
FOUR = Shape(1, 2, 2)
LAST_TOKENS = {models.prefill_again: models.ON_ONE_RANK[models.prefill_again]}


class Runs(NamedTuple):
    """Rows, the shapes that they take in turn, and whether one rank alone makes the bad call."""

    rows: list[Refusal]
    shapes: Sequence[Shape]
    on_one: bool = True


RUNS = {
    "one rank": Runs(refusals(*(room.ON_ONE_RANK for room in ROOMS)), (*TWO, *THREE)),
    "all ranks": Runs(refusals(*(room.ON_ALL_RANKS for room in ROOMS)), TWO, on_one=False),
    "one rank with a model": Runs(refusals(models.ON_ONE_RANK), TWO),
    "one rank after calls that compare nothing": Runs(refusals(decoding.AFTER_UNCOMPARED_CALLS), TWO),
    "one of four ranks": Runs(refusals(decoding.ON_ONE_OF_FOUR), (FOUR,)),
    "all of three ranks": Runs(refusals(decoding.ON_ALL_OF_THREE), THREE[:2], on_one=False),
    "one of four ranks, whose last tokens are no round of shards": Runs(refusals(LAST_TOKENS), (FOUR,)),
    "all ranks with a model": Runs(refusals(models.ON_ALL_RANKS), (FOUR,), on_one=False),
    "all ranks with a trainer": Runs(refusals(trainers.ON_ALL_RANKS), TWO[:2], on_one=False),
}


@dataclass(frozen=True)
class Case:
    """A row by its number, since its call may not be one that can be sent to ranks."""

    run: str
    number: int

    @property
    def row(self) -> Refusal:
        return RUNS[self.run].rows[self.number]

    @property
    def shape(self) -> Shape:
        return RUNS[self.run].shapes[self.number % len(RUNS[self.run].shapes)]

    @property
    def bad(self) -> range:
        """The ranks that make the bad call: any one of them, or all."""
        ranks, first = self.shape.ranks, self.number // 3 % self.shape.ranks
        return range(first, first + 1) if RUNS[self.run].on_one else range(ranks)

    def __str__(self) -> str:
        return f"{self.row} on {'/'.join(map(str, self.bad))} of {self.shape}"


CASES = [Case(run, number) for run in RUNS for number in range(len(RUNS[run].rows))]


@on_each_rank
def call_and_go_on(case: Case, folder: Path) -> tuple[str, str]:
    """On a rank: what was raised. Attention and decoding go on as if nothing had been."""
    at = Place(named_mesh(case.shape, AXES), folder)
    raised = ("nothing", "")
    try:
        case.row.call(at, **case.row.change if at.rank in case.bad else {})
    except errors.InputError as error:
        raised = type(error).__name__, str(error)
    assert_goes_on(at)
    return raised


def assert_goes_on(at: Place) -> None:
    q, k, v = numbers(1, Q_HEADS, 8, WIDTH, seed=1), *numbers(2, 1, HEADS, 8, WIDTH, seed=2)
    expected = am.attention(q, k, v, mesh=None)
    mine = (am.shard(x, at.mesh, layout=am.Zigzag()) for x in (q, k, v))
    out = am.unshard(am.attention(*mine, mesh=at.mesh, layout=am.Zigzag()), at.mesh, layout=am.Zigzag())
    cache = new_cache(at)
    cache.append(k, v)
    last = am.decode(q[:, :, -2:], cache)
    for found, right in ((out, expected), (last, expected[:, :, -2:])):
        torch.testing.assert_close(found, right, rtol=FLOAT32_SUMS, atol=FLOAT32_SUMS)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_ranks_raise_alike_and_go_on(pool: Pool, tmp_path: Path, case: Case) -> None:
    raised, *others = pool.run(case.shape.ranks, call_and_go_on, case, tmp_path)
    assert others == [raised] * len(others)
    name, said = raised
    assert name == case.row.error.__name__, said
    assert re.search(case.row.text, said), said
    assert re.fullmatch(r"[^:]+: (.|\n)*expected (.|\n)+, given(.|\n)+Fix: .+\.", said), said


@on_each_rank
def call_where_one_refuses() -> str:
    """While the others make a cache whose tokens lie along two axes: they make a group of both, if they are to."""
    mesh = named_mesh(Shape(2, 2, 2), AXES)
    try:
        if dist.get_rank() == 3:
            Agreement(RankMesh.of(mesh), "forward").raise_on_all(ShapeError("forward", "this", "that", "pass this"))
        am.KVCache(mesh, **SIZES)
    except ShapeError as error:
        return str(error)
    return "made"


def test_nobody_makes_groups_that_one_refuses(pool: Pool) -> None:
    answers = pool.run(8, call_where_one_refuses)
    assert answers == ["forward: expected this, given that. Fix: pass this."] * 8


def test_enough_is_tried_on_one_rank_alone() -> None:
    assert sum(len(case.bad) == 1 for case in CASES) >= 240
