"""The examples of trainers print the same loss on one rank and on two."""

from pathlib import Path

import pytest

from tests.support.scripts import run_script

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["trainer", "sft"])
def test_the_loss_does_not_depend_on_the_ranks(name: str) -> None:
    losses = []
    for ranks in (1, 2):
        run = run_script(EXAMPLES / f"{name}.py", ranks=ranks)
        assert run.returncode == 0, run.stderr[-2000:]
        losses.append(float(run.stdout.split("loss ")[-1].split(" on ")[0]))
        assert run.stdout.endswith(f" on {ranks} ranks\n")
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)
