"""Trainers that draw completions, on a mesh: the completions, rewards, losses and weights of stock TRL."""

import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import trl
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.hf.training.trainer import SERVED
from attnmesh.mesh.shapes import Shape
from tests.support import families
from tests.support.families import STOCK, prompt
from tests.support.pool import Pool
from tests.support.trainers import launched, mesh_of, settings, tokenizer

LONGEST = 11
"""Tokens of a completion at most."""


def prompts(count: int = 8, first: int = 0) -> Dataset:
    """Return prompts of several lengths, as text."""
    ids = [prompt(19 - 5 * (number % 3), seed=number)[0] for number in range(first, first + count)]
    return Dataset.from_list([{"prompt": " ".join(f"w{token}" for token in row), "wanted": int(row[0])} for row in ids])


def even(completion_ids: list[list[int]], wanted: list[int], **_: Any) -> list[float]:
    """Reward tokens that are even, or near a number of the prompt's row."""
    return [
        sum((x % 2 == 0) + (abs(x - n) < 9) for x in row) / 9 for row, n in zip(completion_ids, wanted, strict=True)
    ]


def noise(prompts: list[str], log_metric: Any, log_extra: Any, **_: Any) -> list[float]:
    """Return rewards that are drawn, as a judge's may be."""
    drawn = torch.rand(len(prompts)).tolist()
    log_metric("noise", sum(drawn))
    log_extra("noise", drawn)
    return drawn


class Record(TrainerCallback):  # type: ignore[misc]
    """What a trainer has computed in each step."""

    trainer: Any
    model: Any

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Keep completions, advantages and weights."""
        batches = self.trainer._buffered_inputs
        tensors = {name: [x[name].clone() for x in batches] for name in ("completion_ids", "advantages")}
        weights = {name: x.detach().clone() for name, x in self.model.named_parameters() if x.requires_grad}
        self.steps.append({**tensors, "weights": weights})


def trained(kind: str, on_mesh: Any, attention: str, folder: str, options: dict[str, Any]) -> Any:
    """Train, and return the record, the log and the completions that were logged."""
    options = {"path": None, "family": "llama", "changes": {}, "lora": False, **options}
    path, family, changes, lora = (options.pop(name) for name in ("path", "family", "changes", "lora"))
    made = AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention) if path else None
    model = families.model(family, attention, **changes) if made is None else made
    given = settings(getattr(trl, f"{kind}Config"), folder, **OPTIONS | options)
    record, more = Record(), {}
    if lora:
        from peft import LoraConfig

        more["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    if given.eval_strategy != "no":
        more["eval_dataset"] = prompts(4, 50)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL's own
        torch.manual_seed(7)
        record.trainer = on_mesh(getattr(trl, f"{kind}Trainer"))(
            model=model.train(), reward_funcs=[even, noise], args=given, train_dataset=prompts(),
            processing_class=tokenizer(), callbacks=[record], **more,
        )  # fmt: skip
        record.model = record.trainer.model
        record.trainer.train()
    logs = record.trainer._logs
    rows = {name: [*logs[name]] for name in ("prompt", "completion", "advantages")}
    rows |= {name: [*x] for name, x in [*logs["rewards"].items(), *logs["extra"].items()]}
    return record.steps, record.trainer.state.log_history, rows


OPTIONS: dict[str, Any] = {
    "max_steps": 2, "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": LONGEST,
    "gradient_checkpointing": False, "temperature": 0.9,
}  # fmt: skip


def on_rank(kind: str, data: int, shape: Shape | None, folder: str, options: dict[str, Any]) -> Any:
    """Train on a mesh; without a shape on as many ranks by stock TRL."""
    with launched():
        if shape is None:
            return trained(kind, lambda made: made, STOCK["llama"], folder, options)
        mesh = mesh_of(data, shape)
        return trained(kind, lambda made: hf.on_mesh(made, mesh), "attnmesh", folder, options)


TIMES = ("runtime", "per_second", "step_time", "total_flos")
"""Parts of the names of entries of a log that are measured."""


def check(pool: Pool, folder: Path, kind: str, data: int, shape: Shape, **options: Any) -> None:
    """Assert that a trainer on a mesh is stock TRL on as many processes as there are meshes."""
    at = str(folder / "1")
    if data == 1:
        alone = [trained(kind, lambda made: made, STOCK["llama"], at, options)]
    else:
        alone = pool.run(data, on_rank, kind, data, None, at, options)
    together = pool.run(data * shape.ranks, on_rank, kind, data, shape, str(folder / "2"), options, deadline=350)
    for rank, (steps, log, rows) in enumerate(together):
        expected_steps, expected_log, expected_rows = alone[rank // shape.ranks]
        assert len(steps) == len(expected_steps) == {**OPTIONS, **options}["max_steps"]
        for given, expected in zip(steps, expected_steps, strict=True):
            assert list(map(Tensor.tolist, given["completion_ids"])) == list(
                map(Tensor.tolist, expected["completion_ids"])
            )
            for a, b in zip(given["advantages"], expected["advantages"], strict=True):
                torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
            for name, weights in expected["weights"].items():
                torch.testing.assert_close(given["weights"][name], weights, atol=1e-5, rtol=0, msg=name)
        for entry, stock in zip(log, expected_log, strict=True):
            for name in (name for name in stock if not any(part in name for part in TIMES)):
                assert entry[name] == pytest.approx(stock[name], rel=1e-5, abs=1e-6), name
        assert rows == pytest.approx(expected_rows) if rank == 0 else True


MESHES = {"keys": (1, Shape(1, 1, 2)), "queries": (1, Shape(1, 2, 1)), "data x keys": (2, Shape(1, 1, 2))}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_training_on_a_mesh_is_that_of_stock_trl(kind: str, mesh: str, pool: Pool, tmp_path: Path) -> None:
    check(pool, tmp_path, kind, *MESHES[mesh])


# --- what is served ---

REFUSED = {"DistillationTrainer", "KTOTrainer"}
"""Trainers of TRL that are refused by name: they were not compared with one process."""


def test_each_trainer_of_trl_is_served_or_refused_by_name() -> None:
    stable = {name for name in trl._import_structure["trainer"] if name.endswith("Trainer")}
    assert stable == SERVED["trl"].keys() | REFUSED, "compare the new ones with one process, or refuse them here"
    for name in REFUSED:
        with pytest.raises(errors.KernelError, match=f"or a subclass of one of them, given trl.{name}. Fix: train"):
            hf.on_mesh(getattr(trl, name), None)
    folder, found = Path(trl.__file__).parent, 0
    for file in sorted((folder / "experimental").rglob("*_trainer.py")):
        module = import_module(".".join(("trl", *file.relative_to(folder).with_suffix("").parts)))
        for kind in (x for x in vars(module).values() if isinstance(x, type) and x.__module__ == module.__name__):
            if issubclass(kind, Trainer):
                found += 1
                with pytest.raises(errors.KernelError, match=f"given trl.{kind.__name__}. Fix: train"):
                    hf.on_mesh(kind, None)
    assert found > 10


def test_each_trainer_of_transformers_is_served() -> None:
    assert {name for name in dir(transformers) if name.endswith("Trainer")} == SERVED["transformers"].keys()
