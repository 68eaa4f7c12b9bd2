"""The benches: what they measure is what they say, and their tables and JSON have all rows."""

import json
import os
import shlex
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import attnmesh as am
import benchmarks.__main__
from attnmesh.cost.cluster import Cluster
from attnmesh.errors import ArgumentError
from benchmarks import bench, decode, gpu_kernels, kernel, peers, prefill
from benchmarks.commands import app
from benchmarks.timing import Comparison, Timing
from tests.support.process import command
from tests.support.process.needs import needs_hosts, needs_smollm2
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.tolerances import FLOAT32_SUMS, assert_near

ROW = Comparison("decode", "SDPA", Timing(30.0, 29.0, 31.0), Timing(10.0, 9.0, 11.0), 2.5, 20.0, 0.5)
run = partial(command.run, command=app)


def test_bench_prints_a_table_and_one_json_object(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernel, "rows", lambda device: iter([ROW]))
    memory = kernel.Memory("window", (10, 20), (1.0, None))
    monkeypatch.setattr(kernel, "memory", lambda device: iter([memory]))
    code, text = run("kernel", "--json", "--out", str(tmp_path / "bench.json"))
    assert code == 0
    report = json.loads(text)
    assert report == json.loads((tmp_path / "bench.json").read_text())
    assert (report["rows"][0]["ratio"], report["rows"][0]["met"]) == (3.0, True)
    assert report["machine"]["torch"] == torch.__version__
    code, text = run("kernel", "-v")
    assert code == 0
    assert "30.0" in text
    assert "[29.0, 31.0]" in text
    assert "unknown" in text


def test_bench_cases_compute_what_their_rival_computes() -> None:
    row = kernel._row("tiny", "itself", 0.0, torch.device("cpu"), lambda: None, lambda: None)
    assert row.ratio > 0
    q, k, v = kernel._heads(torch.device("cpu"), torch.float32, 32)
    rows = kernel._beside_causal("tiny", "SDPA", 0.0, (q, k, v), kernel.MASKS["window of 256"])
    assert [r.case for r in rows] == ["tiny, forward", "tiny, forward + backward"]


def cut_short(device: torch.device) -> Iterator[Comparison]:
    yield ROW
    raise KeyboardInterrupt


def test_a_bench_that_is_cut_short_keeps_its_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernel, "rows", cut_short)
    file = tmp_path / "bench.json"
    code, text = run("kernel", "--json", "--out", str(file))
    assert code == 130
    assert json.loads(text) == json.loads(file.read_text())
    assert [row["case"] for row in json.loads(text)["rows"]] == ["decode"]
    assert json.loads(text)["complete"] is False


def test_rows_are_written_when_they_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, printed = tmp_path / "bench.json", ""
    report = bench.Report("python -m benchmarks kernel", as_json=True, out=file)
    for number in range(3):
        report.add("rows", ROW)
        record = json.loads(file.read_text())
        assert len(record["rows"]) == number + 1
        assert record["complete"] is False
        printed += capsys.readouterr().out
        assert printed.count('"SDPA"') == number + 1
    report.add("memory")
    report.set(note="]}")
    report.close(complete=True)
    printed += capsys.readouterr().out
    assert printed == file.read_text()
    assert json.loads(printed)["complete"] is True


@pytest.mark.parametrize(
    ("option", "said"),
    [("--case", "a part of 'causal, 8/8 heads', "), ("--shape", "one of 1x1x2, 1x2x1, 2x1x1, of 2 ")],
)
def test_cases_and_shapes_that_there_are_not_are_refused(option: str, said: str) -> None:
    done = CliRunner().invoke(app, ["prefill", option, "zzz", "--length", "128", "--ranks", "2"])
    assert isinstance(done.exception, ArgumentError)
    assert f"{option}: expected {said}" in str(done.exception)


def test_what_cannot_be_written_is_known_before_it_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The owner of a file that is not to be written can still say that it was touched."""
    file = tmp_path / "kept.json"
    file.write_text("kept")
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    monkeypatch.setattr(kernel, "rows", lambda device: pytest.fail("it was measured"))
    result = CliRunner().invoke(app, ["kernel", "--out", str(file)])
    assert "expected a file that can be written" in str(result.exception)
    assert "(Permission denied)" in str(result.exception)
    assert file.read_text() == "kept"


def test_the_command_of_a_report_can_be_typed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "rows", lambda world, length, selection, add: None)
    case, shape = "'; touch canary; '", "1x4x1 $(touch canary)"
    report = json.loads(run("prefill", "--case", case, "--shape", shape, "--json")[1])
    words = shlex.split(report["command"])
    assert words[words.index("--case") + 1] == case
    assert words[words.index("--shape") + 1] == shape


@on_each_rank
def count_and_foretell() -> list[tuple[str, int, int]]:
    rows = []
    for case in prefill.cases(64):
        for shape, exchange in prefill.shapes(dist.get_world_size(), case.heads[1]):
            one = prefill.Contender(shape, shape, exchange)
            row = prefill.count_elements(case, one, prefill.attention_call(case, peers.inputs(case), one))
            rows.append((row.contender, row.counted, row.predicted))
    return rows


def test_what_is_counted_was_foretold(pool: Pool) -> None:
    for name, counted, foretold in pool.run(2, count_and_foretell)[0]:
        assert counted == foretold, name


@on_each_rank
def try_faults_of_peers() -> dict[str, list[str | None]]:
    faults: dict[str, list[str | None]] = {}
    for case in prefill.cases(64):
        whole = peers.inputs(case)
        for name, make in peers.PEERS.items():
            peer = make(case, whole)
            faults.setdefault(name, []).append(
                peer if isinstance(peer, str) else peers.wrong_gradients(peer, case, whole)
            )
    return faults


def test_the_peers_solve_the_same_problem(pool: Pool) -> None:
    """Or the bench says that they do not: one's backward pass returns dk and dv added up."""
    one, other = pool.run(2, try_faults_of_peers)
    assert one == other
    assert one["axolotl-ringmaster ring"][0] is None
    assert one["ring-attention-pytorch"][:3] == ["its dk, dv are wrong"] * 3


def test_the_table_and_the_json_have_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        prefill.Row("causal", "1x2x1 ring", Timing(10.0, 9.0, 11.0), 1.0, 1200, 1200),
        prefill.Row("causal", "peer", note="it has no such mask"),
    ]
    monkeypatch.setattr(prefill, "rows", lambda world, length, selection, add: [add(row) for row in rows])
    memory = prefill.Memory("full", "1x2x1 ring", 3.5, 3.0)
    monkeypatch.setattr(prefill, "memory", lambda ranks, length, add: add(memory))
    code, text = run("prefill", "--ranks", "2", "--json")
    assert code == 0
    assert json.loads(text)["rows"][0]["counted"] == 1200
    assert json.loads(text)["memory"][0]["foretold"] == 3.0
    code, text = run("prefill", "-v")
    assert code == 0
    assert "it has no such mask" in text
    assert run("prefill", "--ranks", "1")[0] == 2


@on_each_rank
def time_merges_of_a_step() -> list[str]:
    case = decode.Case("step", (4, 2), 64, repeat=1, rounds=5)
    return [row.contender for row in decode._step(case) if row.timing is not None]


def test_what_is_measured_on_a_gpu_runs_here_in_small() -> None:
    """All of it but the graphs and the kernels: a mistake should not cost an hour of somebody's GPU."""
    decoding = ((1, 64), (2, 100))
    small = gpu_kernels.Sizes(decoding, prefill=(64,), heads=(4, 2), seconds=0.01, layers=1, prompt=20)
    rows = list(gpu_kernels.rows(torch.device("cpu"), small))
    assert {row.case.split(" ")[0] for row in rows} == {"decode", "causal", "shard", "token", "prompt"}
    assert len(rows) == 17
    assert all(row.ours.median > 0 and row.theirs.median > 0 for row in rows)


def test_a_step_is_timed_beside_its_contenders(pool: Pool) -> None:
    (names, _) = pool.run(2, time_merges_of_a_step)
    assert {"decode", "ring, overlapped", "ring-attention-pytorch", "three all-reduces"} <= set(names)


@on_each_rank
def check_the_ring() -> None:
    case = decode.Case("step", (4, 2), 70)
    cache, q = decode._cache(case), decode._query(case)
    held = [x[:, :, : cache.used].contiguous() for x in (cache.keys, cache.values)]
    counts = [cache.own_shard.block_cyclic.count(rank, 70) for rank in range(dist.get_world_size())]
    assert len(set(counts)) > 1
    assert_near(decode.ring(q, held, counts).out, am.decode(q, cache), FLOAT32_SUMS)


def test_the_ring_that_we_are_compared_with_is_attention(pool: Pool) -> None:
    pool.run(4, check_the_ring)


def test_the_bench_of_decoding_prints_a_table_or_json(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [decode.Row("step", "decode", Timing(10.0, 9.0, 11.0), 1.0)]
    monkeypatch.setattr(decode, "parts", lambda ranks: {"steps": lambda add: [add(row) for row in rows]})
    monkeypatch.setattr(decode, "memory", lambda ranks, add: add(decode.Memory("32k", "tree", 16.9)))
    code, text = run("decode", "--json")
    assert code == 0
    assert json.loads(text)["memory"][0]["megabytes"] == 16.9
    code, text = run("decode", "-v")
    assert code == 0
    assert "16.9" in text
    assert run("decode", "--ranks", "6")[0] == 2


@pytest.mark.long
def test_the_faults_bench_measures_and_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """In small, and without the goals, which are for a machine that does nothing else."""
    small = ("faults", "--ranks", "2", "--tokens", "70", "--max-new-tokens", "8", "--rounds", "2")
    code, text = run(*small, "--json")
    assert code == 0
    checked, saved, recovered = json.loads(text)["rows"]
    assert checked["rival"] == "checked=False"
    assert saved["theirs"]["median"] > 0 < saved["ours"]["median"]
    assert recovered["goal"] == 5.0
    monkeypatch.setattr("benchmarks.faults.rows", lambda request, threads, add: None)
    code, text = run(*small, "-v")
    assert code == 0
    assert "A ratio of 0.95 is a cost of 5 %" in text


@pytest.mark.parametrize("command", ["probe", "plan", "prefill", "decode", "model"])
def test_hosts_that_cannot_be_are_one_line(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", command, "--hosts", "0x2@1gbit"])
    with pytest.raises(SystemExit) as left:
        benchmarks.__main__.main()
    assert left.value.code == 1
    assert "1 to 250 hosts, given 0" in " ".join(capsys.readouterr().err.split())


@pytest.mark.long
@pytest.mark.parametrize("world", ["--ranks 2", "--hosts 2x1@1gbit"])
def test_plans_stand_beside_what_is_measured(world: str) -> None:
    if "hosts" in world:
        needs_hosts()
    _, text = run("plan", *world.split(), "--length", "128", "--most", "1", "--rounds", "2", "--json")
    record = json.loads(text)
    assert record["summary"]["workloads"] == 9
    rows = record["worlds"][0]["rows"]
    assert sum(row["picked"] for row in rows) == 9
    assert all((row["between"] is None) == ("ranks" in world) for row in rows)
    assert min(row["beside_best"] for row in rows) == 1.0


@pytest.mark.long
@needs_smollm2
def test_the_bench_of_a_model_finds_the_same_tokens_by_all_ways() -> None:
    code, text = run(
        "model", "--ranks", "2", "--prompt", "What is a mesh?", "--max-new-tokens", "8", "--chunk", "4", "--json"
    )
    assert code == 0
    report = json.loads(text)
    assert report["same_tokens"]
    ways = ["tree", "three all-reduces", "ring", "tree, read in chunks of 4", "tree, shared weights"]
    names = ["1 process, stock transformers", *(f"2 ranks, {way}" for way in ways)]
    assert [row["contender"] for row in report["rows"]] == names


@pytest.mark.long
def test_what_is_measured_of_hosts_is_a_cluster(tmp_path: Path) -> None:
    needs_hosts()
    file = tmp_path / "hosts.json"
    assert run("probe", "--hosts", "2x1@1gbit", "--out", str(file))[0] == 0
    found = Cluster.of_record(json.loads(file.read_text())["cluster"])
    assert (found.hosts, found.ranks) == (2, 1)
