"""The diffusion bench: its contenders compute the same layer, and its table and JSON have all rows."""

import json

import pytest

from attnmesh.mesh.shapes import Shape
from benchmarks import diffusion
from benchmarks.commands import app
from benchmarks.netns import Hosts
from tests.support.process.command import run
from tests.support.truth.tolerances import FLOAT32


@pytest.mark.parametrize(("length", "runs"), [(61, False), pytest.param(64, True, marks=pytest.mark.long)])
def test_the_bench_measures_and_is_shown(length: int, runs: bool) -> None:
    ranks = 4 if runs else 5  # 24 heads on 5 ranks are uneven
    small = ("diffusion", "--ranks", str(ranks), "--workload", "flux-1024", "--length", str(length), "--rounds", "2")
    code, text = run(*small, "--json", command=app)
    assert code == 0
    rows = json.loads(text)["rows"]
    names = [row["contender"].split(",")[0] for row in rows]
    assert names == ["ring", "Ulysses", "USP", "2D", diffusion.PEER]
    for row in rows:
        assert row["note"] is None
        assert row["timing"]["median"] > 0
        assert row["error"] < FLOAT32


def test_known_schemes_and_the_plan_are_measured() -> None:
    request = diffusion.Request(("wan-14b-720p",), 16, None, 3, Hosts(8, 2, 1e8))
    work = diffusion.workload_of("wan-14b-720p", request)
    assert (work.length, work.q_heads) == (75_600 // 16, 40)
    found = diffusion.contenders(work, 16, request.hosts)
    assert {name: (one.shape, one.tile) for name, one in found.items() if name != "planned"} == {
        "ring": (Shape(1, 16, 1), Shape(1, 2, 1)),
        "Ulysses": (Shape(16, 1, 1), Shape(2, 1, 1)),
        "USP": (Shape(8, 2, 1), Shape(2, 1, 1)),
        "2D": (Shape(1, 4, 4), Shape(1, 2, 1)),
    }


def test_an_unknown_workload_is_refused() -> None:
    assert run("diffusion", "--workload", "sora", command=app)[0] == 1
