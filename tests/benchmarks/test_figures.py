"""`make figures` draws what the pages show, and its values are those of the library."""

import re
from pathlib import Path

import pytest
import torch

import attnmesh as am
from attnmesh.mesh.schedule import Problem
from benchmarks.figures import DOCUMENTS, FIGURES, draw_pages
from benchmarks.mesh_figures import pairs_of_ranks
from benchmarks.rank_figures import draw_shards, holders, owners

ROOT = Path(__file__).parents[2]

OTHERS = {"plan-decode", "plan-training", "timelines"}
"""Figures of `python -m benchmarks plot` and of `python -m benchmarks.timelines`."""


def test_one_command_draws_all_figures_of_the_pages(tmp_path: Path) -> None:
    draw_pages(tmp_path)
    assert {file.stem for file in tmp_path.iterdir()} == set(FIGURES)
    for file in tmp_path.iterdir():
        assert file.read_bytes().startswith(b"\x89PNG")
        assert (ROOT / "docs" / "figures" / file.name).stat().st_size < 100_000
    pages = "".join(page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    shown = set(re.findall(r"figures/([a-z0-9-]+)\.png", pages))
    assert shown - OTHERS == set(FIGURES)


@pytest.mark.parametrize("shape", [am.Shape(1, 2, 2), am.Shape(1, 3, 1), am.Shape(1, 1, 4)])
def test_pairs_are_computed_where_the_schedule_says(shape: am.Shape) -> None:
    problem = Problem(am.Full(), shape, am.Zigzag(), am.Zigzag(), 26, 26)
    assert torch.equal(owners(holders(am.Zigzag(), 26, shape.ranks), shape.keys), pairs_of_ranks(problem))


def test_shares_of_the_work_add_up() -> None:
    for axes in draw_shards(DOCUMENTS, am.Shape(1, 2, 2)).axes:
        shares = [int(text.get_text().removesuffix(" %")) for text in axes.texts]
        assert len(shares) == 4
        assert sum(shares) == pytest.approx(100, abs=2)
