import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import attnmesh_command
from attnmesh import __version__
from attnmesh.cli import bench_kernel as kernel_bench
from attnmesh.cli import bench_prefill as prefill_bench
from attnmesh.cli import output, proofs
from attnmesh.cli.app import app
from attnmesh.cli.timing import CLEAR_REFS, Comparison, Timing, race
from attnmesh.errors import ArgumentError
from attnmesh.kernels.native.build import library

ROW = Comparison("decode", "SDPA", Timing(30.0, 29.0, 31.0), Timing(10.0, 9.0, 11.0), 2.5, 20.0, 0.5)


def run(*arguments: str, command: typer.Typer = app) -> tuple[int, str]:
    result = CliRunner().invoke(command, arguments, env={"COLUMNS": "200"})
    return result.exit_code, result.stdout


def test_check_proves_every_kernel_here() -> None:
    code, text = run("check", "--json")
    report = json.loads(text)
    assert code == 0
    assert report["sound"] is True
    assert report["energy_law_error"] < 1e-13
    here = {(p["kernel"], p["dtype"]) for p in report["proofs"] if p["device"] == "cpu" and p["absent"] is None}
    narrow = ("float32", "bfloat16", "float16")
    found = {(kernel, dtype) for kernel in ("cpu", "reference") for dtype in ("float64", *narrow)}
    assert here == found | {("native", dtype) for dtype in narrow if library().attend is not None}


def test_check_reads_as_a_table_and_says_why_a_kernel_is_absent() -> None:
    code, text = run("check", "-v")
    assert code == 0
    assert "reference" in text
    assert "it runs on CUDA, the tensors are on cpu" in text
    assert "All kernels here are exact, to the rounding of their dtype." in text


def test_check_fails_when_a_kernel_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = proofs.Proof("cpu", "cpu", "float32", None, 1e-2, 1e-2, 1e-6)
    monkeypatch.setattr(proofs, "proofs", lambda: iter([wrong]))
    code, text = run("check")
    assert code == 1
    assert "WRONG" in text
    code, text = run("check", "--json")
    assert code == 1
    assert json.loads(text)["sound"] is False


def test_bench_prints_a_table_and_one_json_object(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernel_bench, "rows", lambda device: iter([ROW]))
    memory = kernel_bench.Memory("window", (10, 20), (1.0, None))
    monkeypatch.setattr(kernel_bench, "memory", lambda device: iter([memory]))
    code, text = run("bench", "kernel", "--json", "--out", str(tmp_path / "bench.json"))
    assert code == 0
    report = json.loads(text)
    assert report == json.loads((tmp_path / "bench.json").read_text())
    assert (report["rows"][0]["ratio"], report["rows"][0]["met"]) == (3.0, True)
    assert report["machine"]["torch"] == torch.__version__
    code, text = run("bench", "kernel", "-v")
    assert code == 0
    assert "30.0" in text
    assert "[29.0, 31.0]" in text
    assert "unknown" in text


def test_bench_cases_compute_what_their_rival_computes() -> None:
    row = kernel_bench._row("tiny", "itself", 0.0, torch.device("cpu"), lambda: None, lambda: None)
    assert row.ratio > 0
    q, k, v = kernel_bench._heads(torch.device("cpu"), torch.float32, 32)
    rows = kernel_bench._beside_causal("tiny", "SDPA", 0.0, (q, k, v), kernel_bench.MASKS["window of 256"])
    assert [r.case for r in rows] == ["tiny, forward", "tiny, forward + backward"]


def test_rivals_take_turns_in_an_order_drawn_anew() -> None:
    calls: list[str] = []
    timings = race({name: partial(calls.append, name) for name in "abc"}, torch.device("cpu"), seconds=0, rounds=6)
    rounds = ["".join(calls[at : at + 3]) for at in range(0, len(calls), 3)]
    assert len(rounds) == 6
    assert {"".join(sorted(each)) for each in rounds} == {"abc"}
    assert len({each[0] for each in rounds}) > 1
    assert all(t.low <= t.median <= t.high for t in timings.values())


@pytest.mark.parametrize(("repeat", "calls_of_a_turn"), [(1, 1), (3, 3), (10, 12)])
def test_a_turn_is_several_calls_in_a_row(repeat: int, calls_of_a_turn: int) -> None:
    calls: list[str] = []
    both = {name: partial(calls.append, name) for name in "ab"}
    race(both, torch.device("cpu"), seconds=0, rounds=2, repeat=repeat)
    turns = ["".join(calls[at : at + calls_of_a_turn]) for at in range(0, len(calls), calls_of_a_turn)]
    assert len(turns) == 6
    assert all(len(set(turn)) == 1 for turn in turns)


MEASURED = """
import torch
from attnmesh.cli.timing import peak_memory
print(peak_memory(lambda: torch.ones(16 * 2**20).amax(), torch.device("cpu")))
"""


def test_peak_memory_sees_what_a_call_holds() -> None:
    """In a process of its own: what this one holds grows and shrinks with the tests before."""
    said = subprocess.run([sys.executable, "-W", "ignore", "-c", MEASURED], capture_output=True, text=True, check=True)
    assert 60e6 < int(said.stdout) < 90e6 if CLEAR_REFS.exists() else said.stdout == "None\n"


FRONT = """
import sys
sys.argv = ["attnmesh", *sys.argv[1:]]
import attnmesh_command
try:
    attnmesh_command.main()
finally:
    assert not {"torch", "rich", "attnmesh"} & set(sys.modules)
"""


def front(*arguments: str, **environment: str) -> str:
    """Output of the installed command, which imports neither the library nor PyTorch here."""
    words = [sys.executable, "-c", FRONT, *arguments]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **environment}, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_version_help_and_completion_import_no_torch(tmp_path: Path) -> None:
    assert front("--version") == f"{__version__}\n"
    text = " ".join(front("--help", COLUMNS="200").split())
    assert all(f"{name} {help}" in text for name, help in attnmesh_command.COMMANDS.items())
    disable = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    assert "completion installed" in front("--install-completion", "bash", HOME=str(tmp_path), **disable)
    assert "_ATTNMESH_COMPLETE=complete_bash" in (tmp_path / ".bash_completions" / "attnmesh.sh").read_text()
    words = {"COMP_WORDS": "attnmesh p", "COMP_CWORD": "1"}
    assert front(_ATTNMESH_COMPLETE="complete_bash", **words).split() == ["probe", "plan"]


SWALLOWED = """
import os, signal, sys, time
import attnmesh_command

def imported(name):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    except BaseException:
        pass

attnmesh_command.import_module = imported
sys.argv = ["attnmesh", "check"]
attnmesh_command.main()
"""


def test_an_interrupt_during_imports_ends_the_command() -> None:
    """Even where an imported package catches `KeyboardInterrupt`."""
    done = subprocess.run([sys.executable, "-c", SWALLOWED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_the_front_has_the_help_of_the_subcommands() -> None:
    groups: list[Any] = [typer.main.get_command(each) for each in (app, attnmesh_command.app)]
    one, other = ({name: each.get_short_help_str(200) for name, each in g.commands.items()} for g in groups)
    assert one == other == attnmesh_command.COMMANDS


def test_a_status_without_a_terminal_prints_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "INTERVAL", 0.05)
    with output.progress.status("one [/] step") as status:
        time.sleep(0.3)
        status.update("two")
        time.sleep(0.3)
    lines = capsys.readouterr().err.splitlines()
    time.sleep(0.2)
    assert capsys.readouterr().err == ""
    assert lines[0].startswith("one [/] step (")
    assert lines[-1].startswith("two (")


def cut_short(device: torch.device) -> Iterator[Comparison]:
    yield ROW
    raise KeyboardInterrupt


def test_a_bench_that_is_cut_short_keeps_its_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernel_bench, "rows", cut_short)
    file = tmp_path / "bench.json"
    code, text = run("bench", "kernel", "--json", "--out", str(file))
    assert code == 130
    assert json.loads(text) == json.loads(file.read_text())
    assert [row["case"] for row in json.loads(text)["rows"]] == ["decode"]
    assert json.loads(text)["complete"] is False


def test_rows_are_written_when_they_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, printed = tmp_path / "bench.json", ""
    report = output.Report("attnmesh bench kernel", as_json=True, out=file)
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


def test_version_and_unknown_options() -> None:
    assert run("--version") == (0, f"{__version__}\n")
    assert run("check", "--fast")[0] == 2
    assert run("bench", "everything")[0] == 2


@pytest.mark.parametrize(
    ("option", "said"),
    [("--case", "a part of 'causal, 8/8 heads', "), ("--shape", "one of 1x1x2, 1x2x1, 2x1x1, of 2 ")],
)
def test_cases_and_shapes_that_there_are_not_are_refused(option: str, said: str) -> None:
    done = CliRunner().invoke(app, ["bench", "prefill", option, "zzz", "--length", "128", "--ranks", "2"])
    assert isinstance(done.exception, ArgumentError)
    assert f"{option}: expected {said}" in str(done.exception)


def test_what_cannot_be_written_is_known_before_it_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The owner of a file that is not to be written can still say that it was touched."""
    file = tmp_path / "kept.json"
    file.write_text("kept")
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    monkeypatch.setattr(kernel_bench, "rows", lambda device: pytest.fail("it was measured"))
    result = CliRunner().invoke(app, ["bench", "kernel", "--out", str(file)])
    assert "expected a file that can be written" in str(result.exception)
    assert "(Permission denied)" in str(result.exception)
    assert file.read_text() == "kept"


def test_the_command_of_a_report_can_be_typed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_bench, "rows", lambda world, length, selection, add: None)
    case, shape = "'; touch canary; '", "1x4x1 $(touch canary)"
    report = json.loads(run("bench", "prefill", "--case", case, "--shape", shape, "--json")[1])
    words = shlex.split(report["command"])
    assert words[words.index("--case") + 1] == case
    assert words[words.index("--shape") + 1] == shape


@pytest.mark.parametrize("inputs", [300, pytest.param(1200, marks=pytest.mark.long)])
def test_hostile_command_lines_end_as_they_should(inputs: int) -> None:
    """In a process of its own: what hears of all that a process does cannot be taken away again."""
    fuzz = [sys.executable, "-m", "tests.tools.fuzz_command", "--inputs", str(inputs)]
    done = subprocess.run(fuzz, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert f"{inputs:,} inputs" in done.stdout
    assert all(f"'code {code}': " in done.stdout for code in (0, 1, 2)), done.stdout


LONELY = """
import sys, warnings
sys.modules |= dict.fromkeys(("typer", "rich", "numpy", "transformers", "matplotlib", "triton"))
warnings.simplefilter("ignore")  # PyTorch's own, about numpy
"""


def test_the_library_needs_torch_alone_and_the_command_says_what_it_needs() -> None:
    library = "import torch, attnmesh as am; print(am.attention(*torch.ones(3, 1, 1, 2, 4)).sum().item(), flush=True)\n"
    command = "from attnmesh.__main__ import main; main()"
    words = [sys.executable, "-c", LONELY + library + command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.stdout == "8.0\n", done.stderr
    assert done.returncode == 1
    assert done.stderr == "the attnmesh command needs typer: pip install 'attnmesh[cli]'\n"


IMPORTED = """
import sys, threading, torch
before = set(sys.modules)
print("importing")
import attnmesh
print("imported")
assert threading.active_count() == 1
assert not torch.distributed.is_initialized()
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""


def test_importing_prints_nothing_starts_nothing_and_brings_in_no_more_than_torch() -> None:
    """Whatever is slow to import waits until it is needed."""
    words = [sys.executable, "-W", "error", "-c", IMPORTED]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    first, second, modules = done.stdout.splitlines()
    assert (first, second) == ("importing", "imported")
    slow = {"transformers", "safetensors", "typer", "rich", "matplotlib", "triton", "numpy", "sympy"}
    assert not slow & set(modules.split()), modules
