"""`attnmesh probe`, from the keyboard to the file."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from attnmesh.cli import probe_command
from attnmesh.cli.output import pairs
from attnmesh.cli.probe_command import check_master, described
from attnmesh.cost.cluster import Cluster
from attnmesh.errors import ClusterError
from tests.support.process.command import run
from tests.support.ranks.brief_measures import measuring_briefly
from tests.support.ranks.pool import on_each_rank


@on_each_rank
def measured_briefly() -> Cluster:
    with measuring_briefly():
        return probe_command.measured()


def test_what_probe_writes_is_what_plan_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_command, "measured", measured_briefly)
    file = tmp_path / "here.json"
    code, text = run("probe", "--ranks", "2", "--out", str(file))
    assert code == 0
    assert "1 host of 2 ranks" in text
    record = json.loads(file.read_text())
    assert record["command"] == "attnmesh probe --ranks 2"
    assert Cluster.of_record(record["cluster"]).world == 2
    options = ["--heads", "4/2", "--length", "4096", "--dtype", "float32", "--json"]
    assert json.loads(run("plan", "--cluster", str(file), *options)[1])["cluster"] == record["cluster"]


@pytest.mark.parametrize("name", ["dgx-h100", "local"])
def test_the_table_has_one_line_a_figure_in_80_columns(name: str) -> None:
    rows = described(Cluster.preset(name, 16, 8))
    assert {"message inside a host", "rate between hosts"} < rows.keys()
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(pairs("", rows))
    assert len(console.export_text().splitlines()) == len(rows) + 2  # and a rule above and below


def test_a_host_that_cannot_be_found_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    with pytest.raises(ClusterError, match=r"a host that can be found, given 'no-such-host\.invalid'"):
        check_master()
