"""The prefill bench: its figures are those of the exchange, and its contenders solve the same problem."""

import json

import pytest
import torch
import torch.distributed as dist
from benchmarks import gpu_kernels
from benchmarks.commands import app as benchmarks_app

import attnmesh as am
from attnmesh.cli import bench_decode, bench_peers, bench_prefill
from attnmesh.cli.timing import Timing
from tests.cli.test_app import run
from tests.support.pool import Pool


def counted_and_foretold() -> list[tuple[str, int, int]]:
    rows = []
    for case in bench_prefill.cases(64):
        for shape, exchange in bench_prefill.shapes(dist.get_world_size(), case.heads[1]):
            one = bench_prefill.Contender(shape, shape, exchange)
            row = bench_prefill.count_elements(
                case, one, bench_prefill.attention_call(case, bench_peers.inputs(case), one)
            )
            rows.append((row.contender, row.counted, row.predicted))
    return rows


def test_what_is_counted_was_foretold(pool: Pool) -> None:
    for name, counted, foretold in pool.run(2, counted_and_foretold)[0]:
        assert counted == foretold, name


def faults_of_peers() -> dict[str, list[str | None]]:
    faults: dict[str, list[str | None]] = {}
    for case in bench_prefill.cases(64):
        whole = bench_peers.inputs(case)
        for name, make in bench_peers.PEERS.items():
            peer = make(case, whole)
            faults.setdefault(name, []).append(
                peer if isinstance(peer, str) else bench_peers.wrong_gradients(peer, case, whole)
            )
    return faults


def test_the_peers_solve_the_same_problem(pool: Pool) -> None:
    """Or the bench says that they do not: one's backward pass returns dk and dv added up."""
    one, other = pool.run(2, faults_of_peers)
    assert one == other
    assert one["axolotl-ringmaster ring"][0] is None
    assert one["ring-attention-pytorch"][:3] == ["its dk, dv are wrong"] * 3


def test_the_table_and_the_json(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        bench_prefill.Row("causal", "1x2x1 ring", Timing(10.0, 9.0, 11.0), 1.0, 1200, 1200),
        bench_prefill.Row("causal", "peer", note="it has no such mask"),
    ]
    monkeypatch.setattr(bench_prefill, "rows", lambda world, length, selection, add: [add(row) for row in rows])
    memory = bench_prefill.Memory("full", "1x2x1 ring", 3.5, 3.0)
    monkeypatch.setattr(bench_prefill, "memory", lambda ranks, length, add: add(memory))
    code, text = run("bench", "prefill", "--ranks", "2", "--json")
    assert code == 0
    assert json.loads(text)["rows"][0]["counted"] == 1200
    assert json.loads(text)["memory"][0]["foretold"] == 3.0
    code, text = run("bench", "prefill", "-v")
    assert code == 0
    assert "it has no such mask" in text
    assert run("bench", "prefill", "--ranks", "1")[0] == 2


def merges_of_a_step() -> list[str]:
    case = bench_decode.Case("step", (4, 2), 64, repeat=1, rounds=5)
    return [row.contender for row in bench_decode._step(case) if row.timing is not None]


def test_what_is_measured_on_a_gpu_runs_here_in_small() -> None:
    """All of it but the graphs and the kernels: a mistake should not cost an hour of somebody's GPU."""
    small = gpu_kernels.Sizes(decoding=((1, 64), (2, 100)), prefill=(64,), heads=(4, 2), seconds=0.01)
    rows = list(gpu_kernels.rows(torch.device("cpu"), small))
    assert {row.case.split(" ")[0] for row in rows} == {"decode", "causal", "shard"}
    assert len(rows) == 13
    assert all(row.ours.median > 0 and row.theirs.median > 0 for row in rows)


def test_the_contenders_of_a_step_run(pool: Pool) -> None:
    (names, _) = pool.run(2, merges_of_a_step)
    assert {"decode", "ring, overlapped", "ring-attention-pytorch", "three all-reduces"} <= set(names)


def the_ring_is_attention() -> bool:
    case = bench_decode.Case("step", (4, 2), 70)
    cache, q = bench_decode._cache(case), bench_decode._query(case)
    held = [x[:, :, : cache.used].contiguous() for x in (cache.keys, cache.values)]
    counts = [cache.shard.block_cyclic.count(rank, 70) for rank in range(dist.get_world_size())]
    assert len(set(counts)) > 1
    return torch.allclose(bench_decode.ring(q, held, counts).out, am.decode(q, cache), atol=1e-5)


def test_the_ring_beside_which_we_stand_is_right(pool: Pool) -> None:
    assert pool.run(4, the_ring_is_attention) == [True] * 4


def test_the_decode_table_and_its_json(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [bench_decode.Row("step", "decode", Timing(10.0, 9.0, 11.0), 1.0)]
    monkeypatch.setattr(bench_decode, "parts", lambda ranks: {"steps": lambda add: [add(row) for row in rows]})
    monkeypatch.setattr(bench_decode, "memory", lambda ranks, add: add(bench_decode.Memory("32k", "tree", 16.9)))
    code, text = run("bench", "decode", "--json")
    assert code == 0
    assert json.loads(text)["memory"][0]["megabytes"] == 16.9
    code, text = run("bench", "decode", "-v")
    assert code == 0
    assert "16.9" in text
    assert run("bench", "decode", "--ranks", "6")[0] == 2


def test_the_faults_bench_measures_and_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """In small, and without the goals, which are for a machine that does nothing else."""
    small = ("faults", "--ranks", "2", "--tokens", "70", "--max-new-tokens", "8", "--rounds", "2")
    code, text = run(*small, "--json", command=benchmarks_app)
    assert code == 0
    checked, saved, recovered = json.loads(text)["rows"]
    assert checked["rival"] == "checked=False"
    assert saved["theirs"]["median"] > 0 < saved["ours"]["median"]
    assert recovered["goal"] == 5.0
    monkeypatch.setattr("benchmarks.faults.rows", lambda request, threads, add: None)
    code, text = run(*small, "-v", command=benchmarks_app)
    assert code == 0
    assert "A ratio of 0.95 is a cost of 5 %" in text
