"""Steady calls run through few functions: what was settled for a kind of calls is not settled again."""

import pytest

from attnmesh.kernels.native.build import library
from tests.support.pool import Pool
from tests.tools.walk import ALONE, ON_TWO, most_frames, walk, walks_on_two

pytestmark = pytest.mark.skipif(library().attend is None, reason="there is no C++ compiler")


@pytest.mark.parametrize("name", ALONE)
def test_a_call_on_one_rank(name: str) -> None:
    found = walk(ALONE[name]())
    assert 0 < len(found.files) <= most_frames(name), found.files


def _frames() -> dict[str, list[str]]:
    return {name: found.files for name, found in walks_on_two().items()}


def test_calls_on_two_ranks(pool: Pool) -> None:
    for answer in pool.run(2, _frames):
        assert len(answer) == len(ON_TWO)
        for name, files in answer.items():
            assert 0 < len(files) <= most_frames(name), (name, files)
