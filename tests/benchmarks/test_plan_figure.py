"""The figure of a plan: a curve for each published scheme, and its bytes."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

import attnmesh as am
from attnmesh.cli.scheme_curves import SCHEME_STYLES
from attnmesh.planner.schemes import best_by_scheme
from attnmesh_command import show_errors
from benchmarks.commands import app
from benchmarks.plan_figure import curves, draw_plan, over_lengths, over_sizes, sizes
from tests.support.planning.planned import CLUSTER, SMALL
from tests.support.process.command import run

PLOT = ("plot", "--cluster", "rtx4090", "--heads", "8/2", "--length", "64k", "--phase", "decode", "--plot")


def test_what_does_not_fit_is_left_out_of_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.plan_figure.MIN_DEVICES", 16)
    work = am.Workload(32, 8, 128, 4_000_000)
    cluster = am.Cluster.preset("a100x4", hosts=4)
    devices = {at for curve in curves(over_sizes(work, cluster)).values() for at, _ in curve}
    assert devices
    assert min(devices) > 1
    assert devices < {hosts * ranks for hosts, ranks in sizes(cluster)}


def test_the_figure_has_a_curve_a_scheme_and_its_bytes() -> None:
    pytest.importorskip("matplotlib")
    best = best_by_scheme(SMALL, CLUSTER)
    devices, tokens = curves(over_sizes(SMALL, CLUSTER)), curves(over_lengths(SMALL, CLUSTER))
    times, growth, links = draw_plan(SMALL, CLUSTER, best, devices, tokens).axes
    for axes, expected in ((times, devices), (growth, tokens)):
        drawn = {str(line.get_label()): line for line in axes.lines if str(line.get_label()) in SCHEME_STYLES}
        assert {*drawn} == {*expected}
        for name, curve in expected.items():
            assert [*zip(*drawn[name].get_data(), strict=True)] == curve
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        assert {text.get_text().replace("\n", " ") for text in axes.texts} == {*expected}
    assert dict(devices["USP"])[CLUSTER.world] == best["USP"].seconds
    widths = [bar.get_width() for bar in links.patches]  # type: ignore[attr-defined]
    assert widths == [sent for one in best.values() for sent in (one.bytes.between, one.bytes.inside)]


@pytest.mark.parametrize(("name", "begins"), [("plan.png", b"\x89PNG"), ("plan.svg", b"<?xml")])
def test_the_plot_is_written(name: str, begins: bytes, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code, text = run(*PLOT, str(tmp_path / name), command=app)
    assert code == 0
    assert "Written:" in text
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_a_name_is_drawn_as_text_and_not_as_a_formula(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    named = replace(CLUSTER, name=r"$\frac$")
    draw_plan(SMALL, named, best_by_scheme(SMALL, named), {}, {}).savefig(tmp_path / "plan.svg")
    written = (tmp_path / "plan.svg").read_text()
    assert r"$\frac$" in written  # matplotlib writes the text of each label beside its shapes


def test_without_matplotlib_the_plot_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    command = lambda: app([*PLOT, str(tmp_path / "a.png")], standalone_mode=False)  # noqa: E731
    assert show_errors(command, verbose=False) == 1
    assert "this needs matplotlib: pip install 'attnmesh[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("plan.pdf", "--plot: expected a file named .png or .svg, given 'plan.pdf'"),
        ("no/such/plan.png", "expected a file that can be written, given no/such/plan.png (No such file"),
    ],
)
def test_a_figure_that_cannot_be_written_is_an_error_of_one_line(
    name: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert show_errors(lambda: app([*PLOT, name], standalone_mode=False), verbose=False) == 1
    assert said in capsys.readouterr().err
