"""The examples of training print the same loss on one rank and on several."""

from pathlib import Path

import pytest

from tests.support.scripts import run_script

EXAMPLES = Path(__file__).parents[2] / "examples"


def loss(name: str, *arguments: str, ranks: int = 1) -> float:
    """Return the loss that an example prints."""
    run = run_script(EXAMPLES / f"{name}.py", *arguments, ranks=ranks)
    assert run.returncode == 0, run.stderr[-2000:]
    return float(run.stdout.split("loss ")[-1].split(" on ")[0])


@pytest.mark.parametrize("name", ["trainer", "sft"])
def test_trainers_do_not_depend_on_the_ranks(name: str) -> None:
    assert loss(name, ranks=2) == pytest.approx(loss(name), abs=2e-4)


@pytest.mark.parametrize("mesh", ["1x2x2", pytest.param("2x2x2", marks=pytest.mark.long)])
def test_plain_pytorch_does_not_depend_on_the_mesh(mesh: str) -> None:
    ranks = 8 if mesh == "2x2x2" else 4
    assert loss("plain", "--mesh", mesh, ranks=ranks) == pytest.approx(loss("plain"), abs=2e-4)
