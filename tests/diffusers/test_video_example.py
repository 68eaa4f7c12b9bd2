"""The video script makes the video of one process on any number of ranks, and its page shows what the planner says."""

import re
import runpy
import sys
from pathlib import Path
from unittest.mock import patch

import numpy
import pytest
import torch.distributed as dist

import attnmesh as am
from attnmesh.planner.units import bytes_text, seconds_text
from attnmesh.planner.workload_presets import workload_preset
from tests.support.process.scripts import run_script
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.training.trainers import launched

ROOT = Path(__file__).parents[2]
SCRIPT, PAGE = ROOT / "examples" / "video.py", ROOT / "docs" / "video.md"


def make(*words: str) -> None:
    """Run the script in this process."""
    with patch.object(sys, "argv", [str(SCRIPT), *words]):
        runpy.run_path(str(SCRIPT), run_name="__main__")


@on_each_rank
def make_on_rank(*words: str) -> None:
    """Run the script on a rank, whose group there is already."""
    with launched(), patch.object(dist, "init_process_group"), patch.object(dist, "destroy_process_group"):
        make(*words)
    dist.barrier()


@pytest.mark.parametrize(
    ("options", "accuracy"),
    [
        (("--offload",), 1e-5),
        pytest.param((), 1e-5, marks=pytest.mark.long),
        pytest.param(("--fp8",), 1e-5, marks=pytest.mark.long),
        pytest.param(("--fp8", "--bf16", "--offload"), 4e-2, marks=pytest.mark.long),
    ],
)
def test_ranks_make_the_video_of_one_process(
    options: tuple[str, ...], accuracy: float, pool: Pool, tmp_path: Path
) -> None:
    pool.run(2, make_on_rank, "--out", f"{tmp_path}/two.npy", *options)
    make("--out", f"{tmp_path}/one.npy", *options)
    one, two = (numpy.load(tmp_path / f"{name}.npy") for name in ("one", "two"))
    assert one.shape == (9, 64, 80, 3)
    assert one.std() > 0.1
    assert abs(one - two).max() < accuracy


@pytest.mark.long
def test_the_script_prints_what_the_page_says(tmp_path: Path) -> None:
    for ranks in (1, 2):
        run = run_script(SCRIPT, "--out", tmp_path / "video.gif", ranks=ranks)
        assert run.returncode == 0, run.stderr[-2000:]
        said = run.stdout.splitlines()[-1].replace(f"{tmp_path}/", "")
        assert f"\n{said}\n" in PAGE.read_text()
        assert (tmp_path / "video.gif").read_bytes().startswith(b"GIF89a")


def test_the_page_has_lines_and_options_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    page, script = PAGE.read_text(), SCRIPT.read_text()
    blocks = re.findall(r"```python\n( .*?)```", page, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    assert lines
    assert not [line for line in lines if line not in script]
    commands = re.findall(r"^(?:python|torchrun .*?) examples/video.py ?(.*)$", page, re.MULTILINE)
    assert len(commands) == 3
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    for words in commands:
        monkeypatch.setattr(sys, "argv", ["video.py", *re.sub('"[^"]*"', "words", words).split()])
        runpy.run_path(str(SCRIPT))["parse_arguments"]()
    assert not [name for name in re.findall(r"`(--[a-z0-9-]+)[ `]", page) if f'"{name}"' not in script]


@pytest.mark.parametrize(
    ("file", "said"), [("a.mp4", ".mp4 needs pip install imageio"), ("a.avi", "expected a file named")]
)
def test_a_file_that_cannot_be_written_is_refused_at_first(
    file: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        make("--out", file)
    assert said in capsys.readouterr().err


def test_the_gain_by_gpus_is_that_of_the_planner() -> None:
    rows = re.findall(r"^\| (\d+) x (\d) \| (.*?) \| (.*?) \| (.*?) \|$", PAGE.read_text(), re.MULTILINE)
    work = workload_preset("wan-14b-720p")
    alone = am.plan(work, am.Cluster.preset("dgx-h100", 1, 1))[0].seconds
    assert len(rows) >= 5
    for hosts, ranks, seconds, gain, memory in rows:
        best = am.plan(work, am.Cluster.preset("dgx-h100", int(hosts), int(ranks)))[0]
        assert (seconds, gain) == (seconds_text(best.seconds), f"{alone / best.seconds:.1f}")
        assert memory == bytes_text(best.memory)
