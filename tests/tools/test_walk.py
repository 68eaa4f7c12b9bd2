"""Steady calls run through few functions: what was settled for a kind of calls is not settled again."""

from collections.abc import Iterator

import pytest

from attnmesh.kernels.native.build import library
from tests.support.process.map_trees import callers_in, check_tree
from tests.support.ranks.pool import Pool, on_each_rank
from tools.walk import ALONE, FIRST, LAST, MOST_OF_GUARD, ON_TWO, PAGE, drawings, most_frames, walk, walks_on_two

pytestmark = pytest.mark.skipif(library().attend is None, reason="there is no C++ compiler")


@pytest.fixture(scope="module")
def world() -> Iterator[Pool]:
    """Ranks of this file alone: each other mesh of the same ranks adds a frame to their comparison."""
    made = Pool()
    yield made
    made.close()


@pytest.mark.parametrize("name", ALONE)
def test_a_call_on_one_rank_walks_through_few_frames(name: str) -> None:
    found = walk(ALONE[name]())
    assert 0 < len(found.files) <= most_frames(name), found.files


@on_each_rank
def count_frames() -> dict[str, tuple[list[str], float]]:
    return {name: (found.files, found.share("guard", "checks")) for name, found in walks_on_two().items()}


def test_calls_on_two_ranks_walk_through_few_frames(world: Pool) -> None:
    for answer in world.run(2, count_frames):
        assert len(answer) == len(ON_TWO)
        for name, (files, guard) in answer.items():
            assert 0 < len(files) <= most_frames(name), (name, files)
            assert guard <= MOST_OF_GUARD, name


def test_the_page_of_walks_draws_them(world: Pool) -> None:
    drawn = PAGE.read_text().split(FIRST)[1].split(LAST)[0]
    assert world.run(2, on_each_rank(drawings))[0] == drawn, "write it anew: python -m tools.walk --draw"
    assert " ..." not in drawn, "begin the docstring of the function with a sentence of 60 characters"


@on_each_rank
def find_callers(name: str) -> dict[str, set[str]]:
    return callers_in(ON_TWO[name]())


@pytest.mark.parametrize(
    ("heading", "name", "lines"),
    [("## A first call", "attention, 2 ranks, keys", 22), ("### A first step", "decode, 2 ranks", 17)],
)
def test_the_map_of_the_code_draws_first_calls(heading: str, name: str, lines: int) -> None:
    fresh = Pool()
    try:
        callers, _ = fresh.run(2, find_callers, name)
    finally:
        fresh.close()
    check_tree(heading, lines, callers)
