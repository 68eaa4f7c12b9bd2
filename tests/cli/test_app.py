"""The command `attnmesh`: its options and help before PyTorch is imported."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import attnmesh_command
from attnmesh import __version__
from tests.support.process.command import run
from tests.support.process.scripts import run_script

FRONT = """
import json, os, sys
import attnmesh_command
for number, words in enumerate(json.loads(sys.argv[1])):
    if os.fork() == 0:
        for place, name in ((1, "out"), (2, "error")):
            os.dup2(os.open(f"{number}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), place)
        sys.argv = ["attnmesh", *words]
        try:
            attnmesh_command.main()
        finally:
            if {"torch", "transformers", "rich", "attnmesh"} & set(sys.modules):
                os._exit(99)
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)  # else the next one would print it, too
"""
Said = tuple[int, str, str]
"""Exit code, stdout and stderr."""


def fronts(commands: Sequence[Sequence[str]], folder: Path, **environment: str) -> list[Said]:
    """What installed commands say that import neither the library nor PyTorch: forked from one process."""
    words = [sys.executable, "-c", FRONT, json.dumps(commands)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder, env=os.environ | environment, check=True)
    codes = map(int, done.stdout.split())
    read = [[(folder / f"{number}.{name}").read_text() for number in range(len(commands))] for name in ("out", "error")]
    return [*zip(codes, *read, strict=True)]


def front(folder: Path, *arguments: str, **environment: str) -> str:
    """Output of one command."""
    ((code, out, error),) = fronts([arguments], folder, **environment)
    assert (code, error) == (0, "")
    return out


def test_version_help_and_completion_import_no_torch(tmp_path: Path) -> None:
    assert front(tmp_path, "--version") == f"{__version__}\n"
    text = " ".join(front(tmp_path, "--help", COLUMNS="200").split())
    assert all(f"{name} {help}" in text for name, help in attnmesh_command.COMMANDS.items())
    disable = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    assert "completion installed" in front(tmp_path, "--install-completion", "bash", HOME=str(tmp_path), **disable)
    assert "_ATTNMESH_COMPLETE=complete_bash" in (tmp_path / ".bash_completions" / "attnmesh.sh").read_text()
    words = {"COMP_WORDS": "attnmesh p", "COMP_CWORD": "1"}
    assert front(tmp_path, _ATTNMESH_COMPLETE="complete_bash", **words).split() == ["probe", "plan"]


def test_the_help_of_a_subcommand_imports_no_torch(tmp_path: Path) -> None:
    names = [*attnmesh_command.COMMANDS]
    for name, (code, out, error) in zip(names, fronts([(name, "--help") for name in names], tmp_path), strict=True):
        assert (code, error) == (0, ""), name
        assert "--json" in out or name == "serve"


WRONG = {
    ("generate", "--model", "smollm2"): "prompt: expected some text, given none. Fix: pass --prompt TEXT or",
    ("generate", "--model", "smollm2", "--prompt", "a", "--kv", "int3"): "given 'int3'. Fix: write --kv int8.",
    (
        "generate",
        "--model",
        "smollm2",
        "--prompt",
        "a",
        "--mesh",
        "keys=2,foo=3",
    ): "in place of 'foo=3' name one of",
    ("serve", "--model", "smollm2", "--mesh", "kyes=2"): "given 'kyes=2'. Fix: write keys=2.",
    ("serve", "--model", "./nowhere"): "--model: expected a model, given './nowhere', where there is none.",
    ("plan", "--cluster", "locl", "--heads", "8", "--length", "4k"): "given 'locl'. Fix: write --cluster local.",
    (
        "plan",
        "--cluster",
        "local",
        "--heads",
        "32/5",
        "--length",
        "4k",
    ): "given '32/5'. Fix: pass the model's head counts.",
    ("probe", "--ranks", "9999"): "--ranks: expected 1 to 1,024 ranks on this machine, given 9,999.",
    ("check", "--fast"): "No such option: --fast",
}


def test_wrong_options_are_refused_before_torch_is_imported(tmp_path: Path) -> None:
    """They took seconds. The messages of all options are tested with their subcommands."""
    for given, (code, _, error) in zip(WRONG, fronts([*WRONG], tmp_path), strict=True):
        assert code == (2 if given[0] == "check" else 1), given
        assert WRONG[given] in error


def test_an_output_that_has_not_all_characters_shows_escapes() -> None:
    words = [sys.executable, "-c", "import attnmesh_command; attnmesh_command.run(lambda: print('caf\\u00e9 \\u65e5'))"]
    for encoding, text in (("ascii", "caf\\xe9 \\u65e5\n"), ("latin-1", "café \\u65e5\n"), ("utf-8", "café 日\n")):
        environment = os.environ | {"PYTHONIOENCODING": encoding}
        done = subprocess.run(words, capture_output=True, env=environment, check=False)
        assert (done.returncode, done.stdout.decode(encoding)) == (0, text), done.stderr


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


def test_who_types_a_bench_is_told_where_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["attnmesh", "bench", "decode", "--ranks", "2"])
    with pytest.raises(SystemExit) as left:
        attnmesh_command.main()
    shown = capsys.readouterr()
    assert (left.value.code, shown.out) == (2, "")
    assert "Run python -m benchmarks decode in a checkout." in " ".join(shown.err.replace("│", "").split())


def test_the_version_is_printed_and_unknown_options_are_refused() -> None:
    assert run("--version") == (0, f"{__version__}\n")
    assert run("check", "--fast")[0] == 2


@pytest.mark.parametrize("inputs", [40, pytest.param(1200, marks=pytest.mark.long)])
def test_hostile_command_lines_end_as_they_should(inputs: int) -> None:
    """In a process of its own: what hears of all that a process does cannot be taken away again."""
    done = run_script(Path(__file__).parents[2] / "tools" / "fuzz_command.py", "--inputs", inputs)
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
from attnmesh_command import app
app(["plan", "--cluster", "dgx-h100:1", "--heads", "32/8", "--length", "5M", "--decode"], standalone_mode=False)
print(*{"matplotlib", "transformers"} & {*sys.modules})
"""


def test_importing_prints_nothing_starts_nothing_and_brings_in_no_more_than_torch() -> None:
    """Whatever is slow to import waits until it is needed; a plan needs none of it."""
    words = [sys.executable, "-W", "error", "-c", IMPORTED]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    first, second, modules, *_, of_plan = done.stdout.splitlines()
    assert (first, second, of_plan) == ("importing", "imported", "")
    slow = {"transformers", "safetensors", "typer", "rich", "matplotlib", "triton", "numpy", "sympy"}
    assert not slow & set(modules.split()), modules
