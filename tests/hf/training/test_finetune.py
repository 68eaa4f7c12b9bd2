"""The fine-tuning script: losses of one process on a mesh, and after a stop the losses of a run without one."""

import json
import re
import runpy
import shutil
import sys
from math import prod
from pathlib import Path
from pydoc_data.topics import topics
from unittest.mock import patch

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

from tests.support.process.scripts import run_script
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.training.trainers import fsdp_on_cpus, launched
from tests.support.truth.tolerances import FLOAT32, TRAINED

SCRIPT = Path(__file__).parents[3] / "examples" / "finetune.py"

SMALL = ("--steps", 2, "--save-every", 1, "--length", 900, "--packs", 2)

SHARDED = ("--context", 2, "--fsdp")


PAGE = SCRIPT.parents[1] / "docs" / "finetune.md"


def test_the_page_has_lines_and_options_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    page, script = PAGE.read_text(), runpy.run_path(str(SCRIPT))
    lines = [line for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
    assert lines
    assert not [line for line in lines if line not in SCRIPT.read_text()]
    commands = re.findall(r"^(python|torchrun .*) examples/finetune.py (.*)$", page, re.MULTILINE)
    assert len(commands) == 4
    for launch, words in commands:
        counts = map(int, re.findall(r"--(?:nnodes|nproc-per-node) (\d+)", launch))
        monkeypatch.setenv("WORLD_SIZE", str(prod(counts)))
        monkeypatch.setattr(sys, "argv", ["finetune.py", *words.split()])
        script["parse_arguments"]()
    options = re.findall(r"^\| `(--[a-z0-9-]+)", page, re.MULTILINE)
    assert not [option for option in options if f'"{option}"' not in SCRIPT.read_text()]


@pytest.mark.parametrize(
    ("context", "packs", "said"),
    [(3, 8, "--context: expected a divisor of the 4 ranks"), (1, 6, "--packs: expected a multiple of the 4 packs")],
)
def test_invalid_axes_are_refused(
    context: int, packs: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(sys, "argv", ["finetune.py", "--context", str(context), "--packs", str(packs)])
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert said in capsys.readouterr().err


def losses(folder: Path) -> list[float]:
    """Losses of training and of evaluation in the order of the steps."""
    log = json.loads((folder / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
    return [entry[name] for entry in log for name in ("loss", "eval_loss") if name in entry]


@on_each_rank
def stop_and_go_on(folder: str, arguments: tuple[object, ...]) -> None:
    """On a rank: run the script, lose what it wrote after the first checkpoint, and run it again."""
    words = [str(SCRIPT), *map(str, (*SMALL, *arguments)), "--folder"]
    for name in ("whole", "stopped"):
        with launched(), fsdp_on_cpus(), patch.object(dist, "destroy_process_group"):
            with patch.object(sys, "argv", [*words, f"{folder}/{name}"]):
                runpy.run_path(str(SCRIPT), run_name="__main__")
            if name == "whole" and dist.get_rank() == 0:
                shutil.copytree(f"{folder}/whole/checkpoint-1", f"{folder}/stopped/checkpoint-1")
            dist.barrier()


@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        (2, SHARDED),
        *(pytest.param(4, (*SHARDED, *more), marks=pytest.mark.long) for more in ((), ("--bf16",), ("--lora", 4))),
    ],
)
def test_a_run_goes_on_where_it_was_stopped(
    ranks: int, arguments: tuple[object, ...], pool: Pool, tmp_path: Path
) -> None:
    data = tmp_path / "documents.jsonl"
    data.write_text("".join(json.dumps({"text": text[:800]}) + "\n" for text in [*topics.values()][:24]))
    pool.run(ranks, stop_and_go_on, str(tmp_path), ("--data", data, *arguments))
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert losses(stopped) == pytest.approx(losses(whole), abs=FLOAT32)
    name = "adapter_model.safetensors" if "--lora" in arguments else "model.safetensors"
    trained = load_file(whole / "final" / name)
    for key, value in load_file(stopped / "final" / name).items():
        assert value.sub(trained[key]).abs().max() < FLOAT32, key


@pytest.mark.long
@pytest.mark.parametrize("more", [(), ("--lora", 4)])
def test_losses_do_not_depend_on_the_mesh(more: tuple[object, ...], tmp_path: Path) -> None:
    for ranks, context in ((1, 1), (4, 2), (4, 4)):
        run = run_script(SCRIPT, *SMALL, "--folder", tmp_path / str(context), "--context", context, *more, ranks=ranks)
        assert run.returncode == 0, run.stderr[-2000:]
        assert run.stdout.splitlines()[-1].endswith(f" on {ranks} ranks; saved in {tmp_path / str(context) / 'final'}")
        assert losses(tmp_path / str(context)) == pytest.approx(losses(tmp_path / "1"), abs=TRAINED)
        line = r"\battnmesh\.hf\.training\.batch_sharder: [\d,]+ tokens in \d+ documents?: \w+ on \dx\dx\d ranks"
        assert re.search(line, PAGE.read_text())
        assert bool(re.search(line, run.stderr)) == (ranks > 1)  # beside a bar of progress
