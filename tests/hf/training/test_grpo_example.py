"""The example of rewards: on one mesh it prints the rewards of one process."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.support.process.scripts import run_script

SCRIPT = Path(__file__).parents[3] / "examples" / "grpo.py"

PAGE = SCRIPT.parents[1] / "docs" / "reinforcement.md"


def rewarded(folder: Path, *arguments: object, ranks: int = 1) -> list[float]:
    """Return the first and the last reward that the example prints."""
    run = run_script(SCRIPT, "--folder", folder, *arguments, ranks=ranks)
    assert run.returncode == 0, run.stderr[-2000:]
    assert (folder / "final" / "model.safetensors").exists()
    said = re.search(rf"^reward ([\d.]+), then ([\d.]+) on {ranks} ranks; saved in", run.stdout, re.MULTILINE)
    assert said is not None, run.stdout
    return [*map(float, said.groups())]


def test_rewards_on_a_mesh_are_those_of_one_process(tmp_path: Path) -> None:
    few = ("--steps", 3, "--completions", 16)
    assert rewarded(tmp_path / "2", *few, "--context", 2, ranks=2) == rewarded(tmp_path / "1", *few)


@pytest.mark.long
def test_the_model_learns_to_add(tmp_path: Path) -> None:
    first, last = rewarded(tmp_path, "--context", 2, ranks=4)
    assert last > 2 * first


def test_the_page_has_lines_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    page, script = PAGE.read_text(), runpy.run_path(str(SCRIPT))
    lines = [line for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
    assert lines
    assert not [line for line in lines if line not in SCRIPT.read_text()]
    commands = re.findall(r"^(?:python|torchrun --nproc-per-node (\d)) examples/grpo.py (.*)$", page, re.MULTILINE)
    assert len(commands) == 2
    for ranks, words in commands:
        monkeypatch.setenv("WORLD_SIZE", ranks or "1")
        monkeypatch.setattr(sys, "argv", ["grpo.py", *words.split()])
        script["parse_arguments"]()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--context", "3"), "--context: expected a divisor of the 4 ranks, given 3"),
        (("--completions", "24"), "--completions: expected a multiple of the 4 meshes x 8 completions of a prompt"),
    ],
)
def test_invalid_axes_are_refused(
    arguments: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(sys, "argv", ["grpo.py", *arguments])
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert said in capsys.readouterr().err
