"""One rank is given a bad argument: all raise the same error, which tells what is wrong, and all can go on.

A row of the tables in `tests/guard/refusals` is a call, the bad argument, the error, and a pattern of its message.
Where a call compares nothing, a bad argument is an error of its rank alone: in `ALONE` all ranks are given it.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import attnmesh as am
from attnmesh import errors
from attnmesh.errors import ShapeError
from attnmesh.guard.agreement import Agreement
from attnmesh.mesh.axes import Mesh
from attnmesh.mesh.shapes import AXES, Shape
from tests.guard.refusals import across_cases, attention_cases, cache_cases, decode_cases, hf_cases, setup_cases
from tests.support.mesh_problems import named_mesh
from tests.support.pool import Pool, on_each_rank
from tests.support.problems import numbers
from tests.support.refusals import HEADS, Q_HEADS, SIZES, WIDTH, Place, Table, new_cache
from tests.support.tolerances import FLOAT32_SUMS

ROOMS = (attention_cases, cache_cases, decode_cases, across_cases, setup_cases)
ALIKE: Table = {call: rows for room in ROOMS for call, rows in room.ALIKE.items()}
ALONE: Table = {call: rows for room in ROOMS for call, rows in room.ALONE.items()}
"""Errors of one rank, without an agreement."""
TABLES = {"alike": ALIKE, "of transformers": hf_cases.OF_TRANSFORMERS, "alone": ALONE}


@dataclass(frozen=True)
class Case:
    """A row of a table, and on which rank it goes wrong; None for all of them."""

    table: str
    function: str
    row: int
    ranks: int
    bad: int | None
    shape: Shape

    def __str__(self) -> str:
        where = "all ranks" if self.bad is None else f"rank {self.bad} of {self.ranks}"
        return f"{self.function} {self.row}: {', '.join(self.given[0])} on {where}"

    @property
    def given(self) -> tuple[dict[str, Any], type[Exception], str]:
        return next(rows for call, rows in TABLES[self.table].items() if call.__name__ == self.function)[self.row]


def cases() -> list[Case]:
    """On two ranks or three, any of them the one, along any axis; of transformers on two, as each has to import it."""
    found = []
    for table, calls in TABLES.items():
        for call, rows in calls.items():
            for row in range(len(rows)):
                number = len(found)
                ranks = 3 if table == "alike" and number % 3 == 0 else 2
                shape = (Shape(1, 1, ranks), Shape(1, ranks, 1), Shape(ranks, 1, 1))[number // 6 % 3]
                bad = None if table == "alone" else number // 3 % ranks
                found.append(Case(table, call.__name__, row, ranks, bad, shape))
    return found


@on_each_rank
def answer_of_call(case: Case, folder: Path) -> tuple[str, str, bool]:
    """On a rank: what was raised, and whether attention and decoding go on as if nothing had been."""
    at = Place(named_mesh(case.shape, AXES), folder)
    changes = case.given[0] if case.bad in (None, at.rank) else {}
    raised = ("nothing", "")
    try:
        next(call for call in TABLES[case.table] if call.__name__ == case.function)(at, **changes)
    except errors.InputError as error:
        raised = type(error).__name__, str(error)
    return *raised, goes_on(at)


def goes_on(at: Place) -> bool:
    q, k, v = numbers(1, Q_HEADS, 8, WIDTH, seed=1), *numbers(2, 1, HEADS, 8, WIDTH, seed=2)
    expected = am.attention(q, k, v, mesh=None)
    mine = (am.shard(x, at.mesh, layout=am.Zigzag()) for x in (q, k, v))
    out = am.unshard(am.attention(*mine, mesh=at.mesh, layout=am.Zigzag()), at.mesh, layout=am.Zigzag())
    cache = new_cache(at)
    cache.append(k, v)
    last = am.decode(q[:, :, -2:], cache)
    return torch.allclose(out, expected, atol=FLOAT32_SUMS) and torch.allclose(
        last, expected[:, :, -2:], atol=FLOAT32_SUMS
    )


@pytest.mark.parametrize("case", cases(), ids=str)
def test_all_ranks_raise_alike_and_go_on(pool: Pool, tmp_path: Path, case: Case) -> None:
    answers = pool.run(case.ranks, answer_of_call, case, tmp_path)
    assert answers == [answers[0]] * case.ranks
    _, kind, message = case.given
    raised, said, went_on = answers[0]
    assert raised == kind.__name__, said
    assert re.search(message, said), said
    assert re.fullmatch(r"[^:]+: (.|\n)*expected (.|\n)+, given(.|\n)+Fix: .+\.", said), said
    assert went_on


@on_each_rank
def answer_where_one_refuses() -> str:
    """While the others make a cache whose tokens lie along two axes: they make a group of both, if they are to."""
    mesh = named_mesh(Shape(2, 2, 2), AXES)
    try:
        if dist.get_rank() == 3:
            Agreement(Mesh.of(mesh), "forward").raise_on_all(ShapeError("forward", "this", "that", "pass this"))
        am.KVCache(mesh, **SIZES)
    except ShapeError as error:
        return str(error)
    return "made"


def test_nobody_makes_groups_that_one_refuses(pool: Pool) -> None:
    answers = pool.run(8, answer_where_one_refuses)
    assert answers == ["forward: expected this, given that. Fix: pass this."] * 8


def test_enough_is_tried_on_one_rank_alone() -> None:
    assert sum(case.bad is not None for case in cases()) >= 60
