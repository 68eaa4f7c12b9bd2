"""Steady calls run through few functions: what was settled for a kind of calls is not settled again."""

from collections.abc import Iterator

import pytest

from attnmesh.kernels.native.build import library
from tests.support.pool import Pool
from tools.walk import ALONE, FIRST, LAST, MOST_OF_GUARD, ON_TWO, PAGE, drawings, most_frames, walk, walks_on_two

pytestmark = pytest.mark.skipif(library().attend is None, reason="there is no C++ compiler")


@pytest.fixture(scope="module")
def world() -> Iterator[Pool]:
    """Ranks of this file alone: each other mesh of the same ranks adds a frame to their comparison."""
    made = Pool()
    yield made
    made.close()


@pytest.mark.parametrize("name", ALONE)
def test_a_call_on_one_rank(name: str) -> None:
    found = walk(ALONE[name]())
    assert 0 < len(found.files) <= most_frames(name), found.files


def _frames() -> dict[str, tuple[list[str], float]]:
    return {name: (found.files, found.share("guard")) for name, found in walks_on_two().items()}


def test_calls_on_two_ranks(world: Pool) -> None:
    for answer in world.run(2, _frames):
        assert len(answer) == len(ON_TWO)
        for name, (files, guard) in answer.items():
            assert 0 < len(files) <= most_frames(name), (name, files)
            assert guard <= MOST_OF_GUARD, name


def test_the_page_of_the_code_draws_the_walks(world: Pool) -> None:
    drawn = PAGE.read_text().split(FIRST)[1].split(LAST)[0]
    assert world.run(2, drawings)[0] == drawn, "write it anew: python -m tools.walk --draw"
