"""Steady calls run through few functions: what was settled for a kind of calls is not settled again."""

from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from attnmesh.kernels.native.build import library
from tests.support.ranks.pool import Pool, on_each_rank
from tools.walk import (
    ALONE,
    FIRST,
    LAST,
    MOST_OF_GUARD,
    ON_TWO,
    PACKAGE,
    PAGE,
    call_watched,
    drawings,
    most_frames,
    walk,
    walks_on_two,
)

CODE_MAP = PAGE.parent / "code.md"

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
    """Return the functions of a first call, each with those that it is called within."""
    call, found = ON_TWO[name](), dict[str, set[str]]()

    def name_of(frame: FrameType) -> str:
        file = Path(frame.f_code.co_filename)
        return f"{file.relative_to(PACKAGE)} {frame.f_code.co_qualname}" if file.is_relative_to(PACKAGE) else ""

    def on_frame(frame: FrameType, event: str, _: Any) -> None:
        above = frame if event == "call" and name_of(frame) else None
        while above is not None:
            found.setdefault(name_of(frame), set()).add(name_of(above))
            above = above.f_back

    call_watched(call, on_frame)
    return found


@pytest.mark.parametrize(
    ("heading", "name", "lines"),
    [("## A first call", "attention, 2 ranks, keys", 19), ("### A first step", "decode, 2 ranks", 17)],
)
def test_the_map_of_the_code_draws_first_calls(heading: str, name: str, lines: int) -> None:
    drawn = CODE_MAP.read_text().split(f"{heading}\n")[1].split("```\n")[1]
    fresh, path = Pool(), list[tuple[int, str]]()
    try:
        found, _ = fresh.run(2, find_callers, name)
    finally:
        fresh.close()
    assert drawn.count("\n") == lines
    for line in drawn.splitlines():
        file, function = line.split()[:2]
        depth = line.index(function, len(file))
        path = [*((above, name) for above, name in path if above < depth), (depth, f"{file} {function}")]
        assert {name for _, name in path} <= found[path[-1][1]], line
