"""`attnmesh probe` and `python -m benchmarks plan`, from the keyboard to the file."""

import json
import sys
from pathlib import Path

import benchmarks.__main__
import pytest
from benchmarks.commands import app as benchmarks_app

from attnmesh.__main__ import main
from attnmesh.cli.probe import check_master
from attnmesh.errors import ClusterError
from attnmesh.planner.cluster import Cluster
from tests.cli.test_app import run
from tests.cli.test_netns import needs_hosts


def test_what_probe_writes_is_what_plan_reads(tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    code, text = run("probe", "--ranks", "2", "--out", str(file))
    assert code == 0
    assert "1 hosts of 2 ranks" in text
    record = json.loads(file.read_text())
    assert record["command"] == "attnmesh probe --ranks 2"
    assert Cluster.of_record(record["cluster"]).world == 2
    options = ["--heads", "4/2", "--length", "4096", "--dtype", "float32", "--json"]
    assert json.loads(run("plan", "--cluster", str(file), *options)[1])["cluster"] == record["cluster"]


def test_a_host_that_cannot_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    with pytest.raises(ClusterError, match=r"a host that can be found, given 'no-such-host\.invalid'"):
        check_master()


@pytest.mark.parametrize("command", ["probe", "plan", "bench prefill", "bench decode", "model"])
def test_hosts_that_cannot_be_are_one_line(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["attnmesh", *command.split(), "--hosts", "0x2@1gbit"])
    with pytest.raises(SystemExit) as left:
        benchmarks.__main__.main() if command in ("plan", "model") else main()
    assert left.value.code == 1
    assert "1 to 250 hosts, given 0" in " ".join(capsys.readouterr().err.split())


@pytest.mark.long
@pytest.mark.parametrize("world", ["--ranks 2", "--hosts 2x1@1gbit"])
def test_plans_beside_what_is_measured(world: str) -> None:
    if "hosts" in world:
        needs_hosts()
    _, text = run(
        "plan", *world.split(), "--length", "128", "--most", "1", "--rounds", "2", "--json", command=benchmarks_app
    )
    record = json.loads(text)
    assert record["summary"]["workloads"] == 9
    rows = record["worlds"][0]["rows"]
    assert sum(row["picked"] for row in rows) == 9
    assert all((row["between"] is None) == ("ranks" in world) for row in rows)
    assert min(row["beside_best"] for row in rows) == 1.0
