"""The training example has the same losses on any mesh, and after it continues from a checkpoint."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.process.scripts import run_script
from tests.support.truth.tolerances import TRAINED

TRAIN = Path(__file__).parents[3] / "examples" / "train.py"

CONTEXT, DATA = "queries=2,keys=2", "data=2,keys=2"
STEPS = 30

SMALL = ("--json", "--length", "200", "--write", "30", "--steps", STEPS)


def train(*arguments: object, ranks: int = 1) -> dict:
    """Return the report of a run."""
    run = run_script(TRAIN, *SMALL, *arguments, ranks=ranks)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def alone() -> dict:
    """Return the report of all steps on one device."""
    return train()


@pytest.mark.long
@pytest.mark.parametrize("mesh", [CONTEXT, DATA])
def test_the_loss_does_not_depend_on_the_mesh(mesh: str, alone: dict) -> None:
    together = train("--mesh", mesh, ranks=4)
    assert len(together["losses"]) == STEPS
    assert together["losses"] == pytest.approx(alone["losses"], abs=TRAINED)
    assert together["text"] == alone["text"]


@pytest.mark.long
@pytest.mark.parametrize(("first", "second"), [(DATA, CONTEXT), (CONTEXT, CONTEXT)])
def test_a_continued_run_has_the_losses_of_an_uninterrupted_one(
    first: str, second: str, alone: dict, tmp_path: Path
) -> None:
    """Continue on another mesh, then on another number of ranks."""
    keep = ("--checkpoint", tmp_path)
    begun = train(*keep, "--until", 8, "--mesh", first, ranks=4)
    on = train(*keep, "--until", 14, "--mesh", second, ranks=4)
    other = train(*keep)
    assert (begun["first_step"], on["first_step"], other["first_step"]) == (0, 8, 14)
    assert begun["losses"] + on["losses"] + other["losses"] == pytest.approx(alone["losses"], abs=TRAINED)
    assert alone["losses"][-1] < 0.7 * alone["losses"][0]
    assert other["text"] == alone["text"]


@pytest.mark.long
def test_torchrun_trains(alone: dict) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--rdzv-backend", "c10d"]
    words = [*launch, "--rdzv-endpoint", "localhost:0", str(TRAIN), *map(str, SMALL), "--mesh", CONTEXT]
    run = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1])["losses"] == pytest.approx(alone["losses"], abs=TRAINED)


def test_it_says_how_far_it_is() -> None:
    run = run_script(TRAIN, "--steps", 2, "--length", 40, "--write", 3)
    assert run.returncode == 0, run.stderr
    said = run.stderr.splitlines()
    assert "mesh data=1,queries=1,keys=1: steps 1 to 2, each of 4 sequences of 40 bytes" in said
    assert [line.split(":")[0] for line in said if line.startswith("step ")] == ["step 1", "step 2"]
    assert run.stdout.startswith("it writes: ")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--mesh", "2x2"), "--mesh: expected axes by name, as data=2,queries=1,keys=2, given '2x2'"),
        (("--mesh", "data=3"), "--batch: expected a multiple of the 3 data ranks, given 4"),
        (("--mesh", CONTEXT), "--mesh needs torchrun --nproc-per-node 4"),
    ],
)
def test_invalid_arguments_are_refused(arguments: tuple[str, ...], error: str) -> None:
    run = run_script(TRAIN, *arguments)
    assert run.returncode != 0
    assert error in run.stderr
    assert "Traceback" not in run.stderr
