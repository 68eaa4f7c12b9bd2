"""Trainers that draw completions, on meshes and as stock TRL, of which each step is compared."""

import asyncio
import warnings
from collections import defaultdict
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trl
from datasets import Dataset
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

import attnmesh.hf as hf
from attnmesh.mesh.shapes import Shape
from tests.support.models import families
from tests.support.models.families import STOCK, prompt
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.training.trainers import fsdp_on_cpus, launched, mesh_of, settings, tokenizer
from tests.support.truth.tolerances import FLOAT32, FLOAT32_SUMS

MESHES = {
    "keys": (1, Shape(1, 1, 2)),
    "queries": (1, Shape(1, 2, 1)),
    "data x keys": (2, Shape(1, 1, 2)),
    "heads": (1, Shape(2, 1, 1)),
    "three keys": (1, Shape(1, 1, 3)),
}
"""Numbers of meshes, and the shape of each."""

STOP: dict[str, Any] = {"resumes": True, "save_strategy": "steps", "per_device_train_batch_size": 1}
"""Settings of a run that stops within an epoch: in a later one stock TRL goes on with the order of the first."""

FLAT = {"initializer_range": 0.05}
"""Weights with small logits: rounding in float32 moves log-probabilities of larger ones by 1e-5, in stock TRL too."""


def prompts(count: int = 8, first: int = 0) -> Dataset:
    """Return prompts of several lengths, as text."""
    ids = [prompt(19 - 5 * (number % 3), seed=number)[0] for number in range(first, first + count)]
    return Dataset.from_list([{"prompt": " ".join(f"w{token}" for token in row), "wanted": int(row[0])} for row in ids])


def chats(count: int = 8, first: int = 0) -> Dataset:
    """Return these prompts with answers of several lengths."""
    answers = [" ".join(f"w{3 + (7 * number + x) % 90}" for x in range(5 + number % 4)) for number in range(count)]
    turns = [
        [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": answer}]
        for row, answer in zip(prompts(count, first), answers, strict=True)
    ]
    return Dataset.from_list([{"messages": each} for each in turns])


def even(completion_ids: list[list[int]], wanted: list[int], **_: Any) -> list[float]:
    """Reward tokens that are even, or near a number of the prompt's row."""
    return [
        sum((x % 2 == 0) + (abs(x - n) < 9) for x in row) / 9 for row, n in zip(completion_ids, wanted, strict=True)
    ]


def noise(prompts: list[str], log_metric: Any = None, log_extra: Any = None, **_: Any) -> list[float]:
    """Return rewards that are drawn, as a judge's may be."""
    drawn = torch.rand(len(prompts)).tolist()
    if log_metric:
        log_metric("noise", sum(drawn))
        log_extra("noise", drawn)
    return drawn


async def slow(prompts: list[str], **given: Any) -> list[float]:
    """Reward as `even` does, once something else has run."""
    await asyncio.sleep(0)
    return even(**given)


IDS = "completion_ids"


class Record(TrainerCallback):  # type: ignore[misc]
    """What a trainer has computed in each step."""

    trainer: Any
    model: Any

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.seen: dict[str, list[Any]] = defaultdict(list)

    def watch(self, name: str, trainer: Any, method: str) -> None:
        """Keep what a method of the trainer returns, and the completions that it is given."""
        stock = getattr(trainer, method)

        def call(*args: Any, **given: Any) -> Any:
            found = stock(*args, **given)
            self.seen[name].append((found[0] if isinstance(found, tuple) else found).clone())
            if "completion_ids_list" in given:
                self.seen[IDS].append(torch.tensor(given["completion_ids_list"]))
            return found

        setattr(trainer, method, call)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Keep completions, advantages if there are any, and weights."""
        if self.seen:
            tensors, self.seen = dict(self.seen), defaultdict(list)
        else:
            batches = self.trainer._buffered_inputs
            names = batches[0].keys() & {"completion_ids", "advantages"}
            tensors = {name: [x[name].clone() for x in batches] for name in names}
        trained = {name: x.detach() for name, x in self.model.named_parameters() if x.requires_grad}
        weights = {name: getattr(x, "full_tensor", x.clone)() for name, x in trained.items()}
        self.steps.append({**tensors, "weights": weights})


def of_trl(name: str) -> Any:
    """Return a class of TRL, experimental ones included."""
    experimental = EXPERIMENTAL.get(name.removesuffix("Config").removesuffix("Trainer"))
    return getattr(trl if experimental is None else import_module(f"trl.experimental.{experimental}"), name)


EXPERIMENTAL = {"OnlineDPO": "online_dpo", "GKD": "gkd"}
"""Experimental trainers, and where they are."""


def trained(
    kind: str, on_mesh: Any, attention: str, folder: str, options: dict[str, Any], share: Any = lambda model: model
) -> Any:
    """Train, and return the record, the log and the completions that were logged."""
    options = dict(options)
    path, lora, resumes = options.pop("path"), options.pop("lora", False), options.pop("resumes", False)
    rows = prompts(options.pop("count", 8))
    rows = rows.to_iterable_dataset() if options.pop("stream", False) else rows
    more: dict[str, Any] = {"reward_funcs": [slow if options.pop("asynchronous", False) else even, noise]}
    if kind in ("Distillation", "GKD"):
        more = {"teacher_model": families.model("llama", attention, **TEACHER)}
    words = AutoTokenizer.from_pretrained(path) if Path(path, "tokenizer.json").exists() else tokenizer()
    if kind == "GKD":
        words.chat_template, rows = "{% for each in messages %}{{ each.content }} {% endfor %}", chats()
    model = share(AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL's own
        common = dict(OPTIONS)
        if kind == "Distillation":  # a completion for each prompt
            common["per_device_train_batch_size"] = 2
            del common["num_generations"]
        if kind in EXPERIMENTAL:
            common = {name: x for name, x in OPTIONS.items() if name in ("max_steps", "temperature")} | COMPARED
        given = settings(of_trl(f"{kind}Config"), folder, **common | options)
    record = Record()
    if lora:
        from peft import LoraConfig

        more["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    if given.eval_strategy != "no":
        more["eval_dataset"] = (chats if kind == "GKD" else prompts)(4, 50)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL's own
        torch.manual_seed(7)
        record.trainer = on_mesh(of_trl(f"{kind}Trainer"))(
            model=model.train(), args=given, train_dataset=rows,
            processing_class=words, callbacks=[record], **more,
        )  # fmt: skip
        record.model = record.trainer.model
        if kind in EXPERIMENTAL:
            scored = kind == "OnlineDPO"
            where = ("rewards", "_calculate_rewards_from_functions") if scored else (IDS, "generate_on_policy_outputs")
            record.watch(where[0], record.trainer, where[1])
            record.watch("losses", record.trainer, "training_step")
        record.trainer.train(given.resume_from_checkpoint)
        assert any(isinstance(x, DTensor) for x in record.model.parameters()) == ("fsdp" in options)
    if resumes:
        options |= {"path": path, "lora": lora, "save_strategy": "no"}
        options["resume_from_checkpoint"] = f"{folder}/checkpoint-{given.max_steps // 2}"
        resumed, *_ = trained(kind, on_mesh, attention, folder, options)
        for given, expected in zip(resumed, record.steps[-len(resumed) :], strict=True):
            assert_equal(given, expected)
    logged: dict[str, list[Any]] = {}
    for name, rows in getattr(record.trainer, "_logs", {}).items():
        logged |= {key: [*x] for key, x in (rows.items() if isinstance(rows, dict) else [(name, rows)])}
    return record.steps, record.trainer.state.log_history, logged


TEACHER = {"hidden_size": 96, "num_hidden_layers": 2, "initializer_range": 0.3}
"""Changes of a Llama that teaches another: it is wider, and its probabilities are far from even."""

OPTIONS: dict[str, Any] = {
    "max_steps": 2, "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 11,
    "activation_checkpointing": False, "temperature": 0.9,
}  # fmt: skip


COMPARED: dict[str, Any] = {"max_new_tokens": 11, "gradient_checkpointing": False}
"""Settings of an experimental trainer, which draws one or two completions of each prompt."""


def assert_equal(given: dict[str, Any], expected: dict[str, Any]) -> None:
    """Assert that two steps have the same completions, advantages, rewards, losses and weights."""
    assert given.keys() == expected.keys()
    assert [x.tolist() for x in given.get(IDS, ())] == [x.tolist() for x in expected.get(IDS, ())]
    for name in expected.keys() - {IDS, "weights"}:
        for a, b in zip(given[name], expected[name], strict=True):
            torch.testing.assert_close(a, b, atol=FLOAT32, rtol=FLOAT32_SUMS, msg=name)
    for name, weights in expected["weights"].items():
        torch.testing.assert_close(given["weights"][name], weights, atol=FLOAT32_SUMS, rtol=0, msg=name)


@on_each_rank
def train_by_rollouts(kind: str, data: int, shape: Shape | None, folder: str, options: dict[str, Any]) -> Any:
    """Train on a mesh; without a shape on as many ranks by stock TRL."""
    with launched(), fsdp_on_cpus() if options.get("fsdp") else nullcontext():
        if shape is None:
            return trained(kind, lambda made: made, STOCK["llama"], folder, options)
        mesh, options = mesh_of(data, shape), dict(options)
        share = (lambda model: hf.share_weights(model, mesh),) if options.pop("shares", False) else ()
        return trained(kind, lambda made: hf.on_mesh(made, mesh), "attnmesh", folder, options, *share)


DIFFERENCE = "sampling/sampling_logp_difference/max"

TIMES = ("runtime", "per_second", "step_time", "total_flos")
"""Parts of the names of entries of a log that are measured."""


def check(
    pool: Pool, folder: Path, kind: str, data: int, shape: Shape, difference: float = FLOAT32, **options: Any
) -> None:
    """Assert that a trainer on a mesh is stock TRL on as many processes as there are meshes.

    `difference` is the largest one between the log-probabilities of rollouts and of training.
    """
    at, family, changes = str(folder / "1"), options.pop("family", "llama"), FLAT | options.pop("changes", {})
    if "path" not in options:
        options["path"] = str(folder / "model")  # a reference model is loaded from there
        families.model(family, "attnmesh", **changes).save_pretrained(options["path"])
    stock = {name: x for name, x in options.items() if name != "shares" and "fsdp" not in name}
    if data == 1:
        alone = [trained(kind, lambda made: made, STOCK["llama"], at, stock)]
    else:
        alone = pool.run(data, train_by_rollouts, kind, data, None, at, stock)
    together = pool.run(
        data * shape.ranks, train_by_rollouts, kind, data, shape, str(folder / "2"), options, deadline=350
    )
    for rank, (steps, log, rows) in enumerate(together):
        expected_steps, expected_log, expected_rows = alone[rank // shape.ranks]
        assert len(steps) == len(expected_steps) == {**OPTIONS, **options}["max_steps"]
        for given, expected in zip(steps, expected_steps, strict=True):
            assert_equal(given, expected)
        for entry, stock in zip(log, expected_log, strict=True):
            assert not [name for name in stock if name not in entry]
            for name in (name for name in stock if not any(part in name for part in TIMES)):
                assert entry[name] == pytest.approx(stock[name], rel=FLOAT32_SUMS, abs=FLOAT32), name
        for name, values in expected_rows.items():
            assert rows[name] == (
                values if isinstance((values or [""])[0], str) else pytest.approx(values, abs=FLOAT32)
            ), name
        assert max(entry.get(DIFFERENCE, 0.0) for entry in log) <= difference


def failing_reward(completions: list[str], **_: Any) -> list[float]:
    """Raise on rank 2."""
    if dist.get_rank() == 2:
        raise OSError("the judge does not answer")
    return [0.0] * len(completions)


def check_failed_reward(answers: list[str], rank: int) -> None:
    """Raise unless the answer of a rank is its own error, and all others say what happened there."""
    assert answers.pop(rank) == "OSError: the judge does not answer"
    expected = "UnforeseenError: reward function: expected a reward for each completion, given OSError: the judge does"
    assert all(answer.startswith(expected) for answer in answers), answers
