"""The papers' figures are all there, each that the model misses has its reason, and the baselines' formulas hold."""

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import attnmesh as am
from attnmesh.cost.candidate_mesh import CandidateMesh
from attnmesh.cost.rates import Device, Link
from attnmesh.mesh.shapes import Shape
from attnmesh.planner.workload_cost import cost
from benchmarks.papers import attention2d, baselines, llama, tree_attention
from benchmarks.papers.report import Row, one

BOTH = importlib.import_module("benchmarks.papers.__main__")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "papers_model_2026-11-21.json"


def run(main: Any, *options: str) -> str:
    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    return result.output


def figures(rows: tuple[Row, ...]) -> list[tuple[str, float]]:
    return [(row.unit, end) for row in rows if row.published for end in row.published]


@pytest.mark.parametrize("paper", [tree_attention, pytest.param(attention2d, marks=pytest.mark.long)])
def test_a_command_prints_a_table_and_one_json_object(paper: Any) -> None:
    assert "published" in run(paper.main)
    record = json.loads(run(paper.main, "--json"))
    assert record["attnmesh"] == am.__version__
    assert paper.__name__ in record["command"]
    assert [row["case"] for row in record["papers"][0]["rows"]] == [row.case for row in paper.report().rows]


@pytest.mark.long
def test_every_published_figure_is_there() -> None:
    tree = figures(tree_attention.report().rows)
    for figure in [("x", 8), ("s", 0.60), ("s", 2.57), ("s", 1.08), ("s", 4.42), ("MB", 524), ("MB", 1040)]:
        assert figure in tree
    for figure in [("x", 2), ("x", 3), ("x", 4), ("x", 5), ("us", 36), ("us", 100), ("us", 5), ("us", 10)]:
        assert figure in tree
    mesh = figures(attention2d.report().rows)
    for ratio in (5.0, 9.4, 2.3, 3.35, 3.85, 2.5, 3.5, 1.20, 2.43, 4.67, 9.05, 2.45, 1.77, 1.16, 1.40, 1.05, 0.63):
        assert ("x", ratio) in mesh
    assert {(case["model"], case["tokens"]) for case in attention2d.report().details} == {
        (model, 1024 * k) for model in ("760M", "2.7B", "13B") for k in (8, 16, 32, 64, 128)
    }


@pytest.mark.long
def test_every_case_that_is_off_has_a_reason() -> None:
    for row in (*tree_attention.report().rows, *attention2d.report().rows):
        assert row.why or not row.off, row.case
        assert not row.off or len(row.why.split()) > 10, row.case


@pytest.mark.parametrize(("predicted", "off"), [((0.8, 1.2), False), ((0.7, 1.0), True), ((1.0, 1.3), True)])
def test_off_is_by_more_than_a_quarter_at_either_end(predicted: tuple[float, float], off: bool) -> None:
    assert Row("", "x", one(1.0), predicted).off is off
    assert not Row("", "x", None, predicted).off


CLUSTER = am.Cluster(
    "by hand",
    hosts=1,
    ranks=4,
    device=Device(1e12, 1e12, 1e9, 1e12, call=1e-3),
    inside=Link(2e-3, 1e8, 4e8, short=1e-3),
    between=Link(1.0, 1.0, 1.0),
)


def test_a_ring_decode_takes_the_seconds_by_hand() -> None:
    """Of 10 MB a rank: each attention 1 + 10 ms, each of 3 hops 2 + 100 ms; of 100 kB 1.1 ms and 2 + 1 ms."""
    assert baselines.ring_decode(CLUSTER, 10e6) == pytest.approx(11e-3 + 3 * 102e-3)
    assert baselines.ring_decode(CLUSTER, 1e5) == pytest.approx(1.1e-3 + 3 * 3e-3)


def test_a_ring_that_attends_longer_than_it_sends_attends_p_times() -> None:
    slow = replace(CLUSTER, device=replace(CLUSTER.device, memory_rate=1e7))
    assert baselines.ring_decode(slow, 10e6) == pytest.approx(4 * 1.001)


def test_algorithm_3_takes_the_seconds_by_hand() -> None:
    """Two heads of 100 on 4 ranks: 3 calls, 3 times 2 x 3 steps of 1 ms, and 16 + 8 + 800 bytes by 1.5 at 100 MB/s."""
    by_hand = 1e-3 + 10e-3 + 3 * 1e-3 + 18e-3 + 1.5 * 824 / 1e8
    assert baselines.algorithm_3(CLUSTER, 10e6, 2, 100) == pytest.approx(by_hand)


@pytest.mark.parametrize("hosts", [1, 4, 16])
def test_algorithm_3_is_the_librarys_all_reduce(hosts: int) -> None:
    cluster = am.Cluster.preset("dgx-h100", hosts=hosts)
    workload = am.Workload(16, 16, 128, 1_280_000, phase="decode")
    candidate = CandidateMesh(Shape(1, 1, cluster.world), Shape(1, 1, 8), am.Striped(16), "allreduce")
    formula = baselines.algorithm_3(cluster, workload.kept_bytes / cluster.world, 16, 128)
    parts = cost(candidate, workload, cluster).parts
    assert parts["kernel"] + parts["merge"] == pytest.approx(formula)


def test_the_papers_formulas_for_memory_differ_by_a_shard() -> None:
    gap = baselines.ring_memory(1000, 256) - baselines.tree_memory(1000, 256, 2)
    assert gap == 2 * (2 * 1000 * 256 - 2 * 2)


def test_a_ring_in_turn_takes_its_kernels_and_all_that_it_sends() -> None:
    cluster = am.Cluster.preset("h100x1", hosts=4)
    workload = am.Workload(8, 8, 64, 8192)
    candidate = CandidateMesh(Shape(1, 4, 1), Shape(1, 1, 1), am.Zigzag(), "ring")
    overlapped, turns = cost(candidate, workload, cluster), baselines.sequential(candidate, workload, cluster)
    assert overlapped.seconds < turns < overlapped.seconds + overlapped.parts["kernel"]


@pytest.mark.parametrize(("model", "billions"), [(llama.LLAMA_8B, 7.50), (llama.LLAMA_1B, 1.24)])
def test_a_model_has_the_weights_that_the_paper_says(model: llama.Llama, billions: float) -> None:
    assert model.weights / 1e9 == pytest.approx(billions, rel=0.01)  # three digits


@pytest.mark.parametrize(
    ("number", "paper"), [(0, tree_attention), pytest.param(1, attention2d, marks=pytest.mark.long)]
)
def test_the_committed_results_are_what_the_commands_say(number: int, paper: Any) -> None:
    papers, now = json.loads(RESULTS.read_text())["papers"], json.loads(json.dumps(paper.report().record()))
    kept = papers[number]
    assert len(papers) == 2
    assert kept["paper"] == now["paper"]
    assert [row["case"] for row in kept["rows"]] == [row["case"] for row in now["rows"]]
    assert [row["published"] for row in kept["rows"]] == [row["published"] for row in now["rows"]]


def test_the_command_of_both_papers_has_its_help() -> None:
    assert "--out" in run(BOTH.main, "--help")
