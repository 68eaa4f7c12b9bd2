"""`attnmesh plan`: its table, its JSON, and options that it refuses."""

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

import attnmesh as am
from attnmesh.cli import plan_command
from attnmesh.planner.units import bytes_text, seconds_text
from attnmesh_command import app, show_errors
from tests.support.process.command import run_plan

DECODE = ("--cluster", "dgx-h100:16", "--heads", "32/8", "--head-dim", "128", "--length", "5M", "--decode")


def arguments(cluster: str = "dgx-h100:2", heads: str = "32/8", length: str = "64k", *more: str) -> tuple[str, ...]:
    return "--cluster", cluster, "--heads", heads, "--length", length, *more


def test_the_table_is_best_first_and_explained() -> None:
    code, text = run_plan(*DECODE, "--top", "3", "-v")
    best = am.plan(am.Workload(32, 8, 128, 5_000_000, phase="decode"), am.Cluster.preset("dgx-h100", 16))[0]
    rows = [line.split() for line in text.splitlines() if re.match(r"\d+ +\d+x", line)]
    assert code == 0
    assert [row[0] for row in rows] == ["1", "2", "3"]
    assert rows[0][1] == "x".join(map(str, best.shape))
    assert seconds_text(best.seconds) in " ".join(rows[0])
    assert "of each shape and exchange the best placement on hosts" in text
    assert best.explain().splitlines()[0][:60] in text
    assert "sources of the constants of dgx-h100" in text
    assert "FlashAttention-3" in text
    assert "merging partials" in text
    assert f"mesh = am.init_mesh({tuple(best.shape)})" in text


def test_the_table_fits_a_terminal_of_80() -> None:
    result = CliRunner().invoke(app, ["plan", *DECODE], env={"COLUMNS": "80"})
    assert "…" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_json_is_one_object_that_plans_again() -> None:
    code, text = run_plan(
        *arguments("a100x4:2x2", "16", "32Ki", "--prefill", "--window", "1000", "--layers", "3", "--json")
    )
    report = json.loads(text)
    work = am.Workload(16, 16, 128, 32768, phase="prefill", mask=am.Window(1000), layers=3)
    cluster = am.Cluster.preset("a100x4", 2, 2)
    plans = am.plan(work, cluster)
    assert code == 0
    assert am.Cluster.of_record(report["cluster"]) == cluster
    assert report["workload"] | {"mask": am.Window(1000), "recurrent": ()} == vars(work)
    assert report["explanation"] == plans[0].explain()
    assert report["plans"][0]["seconds"] == plans[0].seconds == pytest.approx(sum(report["plans"][0]["parts"].values()))
    assert len({(*one["shape"], one["exchange"]) for one in report["plans"]}) == len(report["plans"])
    again = json.loads(run_plan(*report["command"].split()[2:], "--json")[1])
    assert again == report


def test_recurrent_layers_are_planned_with_attention() -> None:
    kinds = "--recurrent", "32x128x128:layers=36:conv=8192x4", "--recurrent", "8x64x64:scalar"
    given = *arguments("a100x4:2", "16/2", "64k", "--layers", "12"), *kinds
    report, text = json.loads(run_plan(*given, "--json")[1]), run_plan(*given)[1]
    layers = am.Recurrent(32, 128, 128, layers=36, conv_channels=8192, conv_width=4)
    work = am.Workload(16, 2, 128, 64000, layers=12, recurrent=(layers, am.Recurrent(8, 64, 64, transition="scalar")))
    best = am.plan(work, am.Cluster.preset("a100x4", 2))[0]
    figures = report["plans"][0]["recurrent"]
    for one, name in ((best.recurrent.scan, "scan"), (best.recurrent.halo, "halo")):
        assert figures[name]["seconds"] == report["plans"][0]["parts"][name] == one.seconds > 0
        assert figures[name]["bytes"] == {"inside": one.inside, "between": one.between}
    assert figures["memory"] == work.state_bytes
    assert report["plans"][0]["seconds"] == best.seconds
    assert [am.Recurrent(**kind) for kind in report["workload"]["recurrent"]] == [*work.recurrent_kinds]
    assert json.loads(run_plan(*report["command"].split()[2:], "--json")[1]) == report
    assert (
        f"Recurrent layers (37) are included: scans send {bytes_text(sum(figures['scan']['bytes'].values()))}" in text
    )
    assert json.loads(run_plan(*given[:-4], "--json")[1])["plans"][0]["recurrent"] is None


def test_a_file_of_measured_figures_is_a_cluster(tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    file.write_text(json.dumps({"cluster": am.Cluster.preset("h100x1", 4).record()}))
    code, text = run_plan(*arguments(str(file), "8/2", "128k", "--json", "--batch", "2", "--full"))
    assert code == 0
    assert json.loads(text)["cluster"]["hosts"] == 4
    assert json.loads(run_plan(*arguments(f"{file}:8", "8/2", "128k", "--json"))[1])["cluster"]["hosts"] == 8


def test_local_is_planned_with_the_cores_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    code, text = run_plan(*arguments("local", "8/2", "4k", "--decode"))
    assert code == 0
    assert "local, 1 host of 2 ranks" in text
    assert "1x1x2" in text
    assert plan_command.named_cluster("local:1x4").world == 4


def test_tables_have_no_blank_lines_and_fit_80_columns() -> None:
    _, text = run_plan(*arguments("dgx-h100:2", "32/8", "128k"), columns=80)
    table = text.split("On dgx-h100, 2 hosts")[0].splitlines()
    assert all(line.strip() and len(line) <= 80 for line in table)
    assert "\N{HORIZONTAL ELLIPSIS}" not in text  # a cut word


INVALID = {
    ("dgx-h300",): "--cluster: expected one of local, dgx-h100, dgx-h200,",
    ("dgx-h100:2x9",): "at most 8 ranks a host, given 9 ranks a host. Fix: take more hosts.",
    ("dgx-h100:two",): "expected NAME, NAME:HOSTS or NAME:HOSTSxRANKS, given 'dgx-h100:two'",
    ("dgx-h100:",): "expected NAME, NAME:HOSTS or NAME:HOSTSxRANKS",
    ("dgx-h100:0",): "--cluster: expected 1 host or more of 1 rank or more, given 'dgx-h100:0'",
    ("missing.json",): "--cluster: expected a JSON file that probe wrote, given missing.json:",
    ("garbled.json",): "given garbled.json: Expecting value",
    ("empty.json",): 'expected a JSON object with a "cluster", given empty.json without one',
    ("strange.json",): "--cluster strange.json: expected the fields that probe writes, given 'device'",
    ("one.json:2",): "--cluster one.json: expected 1 of hosts, as in the measurement, given 2 hosts",
    ("dgx-h100", "32:8"): "--heads: expected query heads / key heads, given '32:8'. Fix: write 32/8",
    (
        "dgx-h100",
        "32/5",
    ): "--heads: expected whole groups of query heads / key heads, given '32/5'. Fix: pass the model's",
    ("dgx-h100", "32/0"): "--heads: expected whole groups of query heads / key heads, given '32/0'",
    ("dgx-h100", "32/8", "5G"): "--length: expected tokens, as 4096, 128k, 5M, 128Ki or 1Mi, given '5G'",
    ("dgx-h100", "32/8", "0.3"): "--length: expected tokens",
    ("dgx-h100", "32/8", "0"): "--length: expected tokens, as 4096, 128k, 5M, 128Ki or 1Mi, given '0'",
    ("dgx-h100", "32/8", "9k", "--decode", "--prefill"): "expected one phase, given --prefill and --decode. Fix: plan",
    ("dgx-h100", "32/8", "9k", "--full", "--window", "9"): "expected one mask, given --full and --window 9",
    (
        "dgx-h100",
        "32/8",
        "9k",
        "--dtype",
        "int8",
    ): "--dtype: expected one of float64, float32, bfloat16, float16, given 'int8'",
    ("dgx-h100", "32/8", "9k", "--q-len", "2"): "--q-len: expected --decode beside it, given 2. Fix: add --decode",
    ("dgx-h100", "32/8", "9", "--decode", "--q-len", "10"): (
        "--q-len: expected at most the 9 tokens of --length, of which they are the last, given 10. Fix: raise --length."
    ),
    (
        "dgx-h100",
        "32/8",
        "9k",
        "--recurrent",
        "32x128",
    ): "--recurrent: expected HEADSxROWSxCOLUMNS of a state, given '32x",
    ("dgx-h100", "32/8", "9k", "--recurrent", "4x8x8:dense"): "or conv=CHANNELSxWIDTH after each colon, given 'dense'.",
    (
        "dgx-h100",
        "32/8",
        "9k",
        "--recurrent",
        "4x8x8:layers",
    ): "after each colon, given 'layers'. Fix: write 32x128x128",
    ("dgx-h100", "32/8", "9k", "--recurrent", "4x8x8:scalar:matrix"): "each setting once, given '4x8x8:scalar:matrix'",
    ("dgx-h100", "32/8", "9k", "--recurrent", "4x0x8"): "or 0 in all, given 4 heads of 0 x 8. Fix: pass",
    ("dgx-h100:1", "32/8", "99M"): "plan for training: expected at most 80.0 GB a rank",
    ("dgx-h100", "32/8", "9k", "--report", "plan.txt"): "--report: expected a file named .html, given 'plan.txt'",
    (
        "dgx-h100",
        "32/8",
        "9k",
        "--report",
        "no/such/plan.html",
    ): "expected a file that can be written, given no/such/plan",
    ("deep.json",): "--cluster: expected a JSON file that probe wrote, given deep.json: maximum recursion",
    ("local:" + "9" * 5000,): "expected NAME, NAME:HOSTS or NAME:HOSTSxRANKS",  # int() would refuse it otherwise
    ("x" * 5000,): "--cluster: expected one of local, dgx-h100",  # and the system so long a name
    ("dgx-h100", "9" * 5000): "--heads: expected query heads / key heads",
    ("dgx-h100", "32/8", "\u0661k"): "--length: expected tokens",
    ("dgx-h100", "32/8", "9k", "--report", "no/\x1b[31m\n.html"): r"given no/\x1b[31m\n.html (No such file",
    ("dgx-h100", "32/8", "9k", "--report", "no/:smile:.html"): "given no/:smile:.html (No such file",
}


@pytest.mark.parametrize("given", INVALID, ids=lambda given: " ".join(given)[:80])
def test_invalid_options_are_one_line(
    given: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one = am.Cluster.preset("mi300x").record()
    records = {"garbled": "{", "empty": "{}", "strange": '{"cluster": {}}', "one": json.dumps({"cluster": one})}
    for name, text in records.items():
        Path(f"{name}.json").write_text(text.replace("{", "", len(text) == 1))
    Path("deep.json").write_text("[" * 100_000)
    command = lambda: app(["plan", *arguments(*given)], standalone_mode=False)  # noqa: E731
    assert show_errors(command, verbose=False) == 1
    shown = capsys.readouterr()
    assert INVALID[given] in shown.err
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    assert shown.out == ""
    assert not [*tmp_path.glob("plan.*")]


def test_a_name_is_no_markup(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    record = am.Cluster.preset("mi300x").record() | {"name": "[/red] ours", "sources": {"[b]": "[/b]"}}
    file = tmp_path / "ours.json"
    file.write_text(json.dumps({"cluster": record}))
    app(["plan", *arguments(str(file), "32/8"), "-v"], standalone_mode=False)
    shown = capsys.readouterr().out
    assert "[/red] ours" in shown
    assert "[b]" in shown


def test_names_of_files_are_shown_as_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Brackets in names start no markup, and escapes reach no terminal, in the status and in the table."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan_command, "write_report", lambda file, work, machines, status: status(f"drawing {file}"))
    Path("[").mkdir()
    code, text = run_plan(*arguments("rtx4090", "8/2", "8k", "--report", "[/]\x1b[31m.html"))
    assert code == 0
    assert "Written: [/]\\x1b[31m.html" in text


def test_the_command_in_the_json_can_be_typed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = "ours; touch canary.json"
    Path(name).write_text(json.dumps({"cluster": am.Cluster.preset("mi300x").record()}))
    report = json.loads(run_plan(*arguments(name, "8/2", "8k", "--json"))[1])
    again = shlex.split(report["command"])
    assert again[:4] == ["attnmesh", "plan", "--cluster", name]
    assert json.loads(run_plan(*again[2:], "--json")[1]) == report


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    code, _ = run_plan(*arguments("rtx4090:2", "4/1", "8Ki", "--decode", "--report", str(file), "--json"))
    assert code == 0
    assert file.read_text().startswith("<!DOCTYPE html>")
    assert file.stat().st_size < 2e6
