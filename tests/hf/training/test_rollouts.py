"""Trainers that draw completions, on a mesh: the completions, rewards, losses and weights of stock TRL."""

import random
import warnings
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import trl
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3MoeConfig

import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.hf.load import PACKAGED, locate
from attnmesh.hf.training.rollouts import generating_on
from attnmesh.mesh.shapes import AXES, Shape
from attnmesh.runtime.counters import count_traffic
from tests.support.models import families
from tests.support.models.families import prompt
from tests.support.process.needs import needs_smollm2
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.training.rollouts import (
    DIFFERENCE,
    FLAT,
    MESHES,
    OPTIONS,
    check,
    check_failed_reward,
    even,
    failing_reward,
    prompts,
)
from tests.support.training.trainers import FSDP, launched, mesh_of, settings, tokenizer
from tests.support.truth.mesh_problems import named_mesh

GREEDY = GenerationConfig(do_sample=False, max_new_tokens=2, temperature=1.0)

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


WIDE = {"hidden_size": 192, "intermediate_size": 256, "initializer_range": 0.02}
"""Changes of a Llama with layers that ranks share, and with small logits all the same."""

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
    "shared weights": ("GRPO", {"shares": True, "changes": WIDE, "max_steps": 3}),
    "sharded weights": ("GRPO", {"mesh": "data x keys", "beta": 0.1, "max_steps": 3, **FSDP}),
    "sharded weights of RLOO": ("RLOO", {"lora": True, "num_iterations": 2, **FSDP}),
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
@needs_smollm2
def test_a_released_model_trains_as_in_stock_trl(pool: Pool, tmp_path: Path) -> None:
    """Its logits are of 20 and more, whose rounding in float32 is 1e-5 of a log-probability."""
    check(pool, tmp_path, "GRPO", *MESHES["keys"], path=locate(PACKAGED), difference=1e-4, num_generations=2)


def test_a_prompt_is_computed_once_for_its_completions() -> None:
    model = families.model("llama", "attnmesh")
    rows = []
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: rows.append(output.shape[:2]))
    ids = torch.cat((prompt(13, seed=1), prompt(13, seed=2))).repeat_interleave(3, 0)
    draws = GenerationConfig(do_sample=True, max_new_tokens=4, temperature=0.9)
    with generating_on(None, model) as logprobs:
        drawn = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=draws)
    assert rows == [(2, 12), *[(6, 1)] * 4]
    expected = (model(drawn).logits[:, 12:-1] / 0.9).log_softmax(-1).gather(2, drawn[:, 13:, None])[..., 0]
    torch.testing.assert_close(torch.cat(logprobs, 1), expected, atol=2e-5, rtol=0)
    assert "generate" not in vars(model)


@on_each_rank
def catch_error_of_bad_reward(folder: str) -> str:
    """Return the error of a reward that raises on the first rank of the second of two meshes."""
    with launched(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL's own
        given = settings(trl.GRPOConfig, folder, **OPTIONS)
        trainer = hf.on_mesh(trl.GRPOTrainer, mesh_of(2, Shape(1, 1, 2)))(
            model=families.model("llama", "attnmesh"), reward_funcs=failing_reward, args=given, train_dataset=prompts(),
            processing_class=tokenizer(),
        )  # fmt: skip
        try:
            trainer.train()
        except (OSError, errors.UnforeseenError) as error:
            return f"{type(error).__name__}: {error}"
    return "trained"


def test_a_reward_that_raises_on_one_rank_raises_on_all(pool: Pool, tmp_path: Path) -> None:
    check_failed_reward(pool.run(4, catch_error_of_bad_reward, str(tmp_path)), 2)


def drawn_reward(completions: list[str], **_: Any) -> list[float]:
    """Return rewards that Python and NumPy draw."""
    return [random.random() + float(np.random.rand()) for _ in completions]


@on_each_rank
def draw_after_rewards(folder: str) -> tuple[float, float]:
    """Return what Python and NumPy draw after a step with rewards that draw numbers, on the first rank of a mesh."""
    with launched(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL's own
        given = settings(trl.GRPOConfig, folder, **OPTIONS | {"max_steps": 1, "gradient_accumulation_steps": 1})
        hf.on_mesh(trl.GRPOTrainer, mesh_of(1, Shape(1, 1, 2)))(
            model=families.model("llama", "attnmesh"), reward_funcs=drawn_reward, args=given, train_dataset=prompts(),
            processing_class=tokenizer(),
        ).train()  # fmt: skip
        return random.random(), float(np.random.rand())


def test_ranks_draw_the_same_after_rewards_that_draw(pool: Pool, tmp_path: Path) -> None:
    one, other = pool.run(2, draw_after_rewards, str(tmp_path))
    assert one == other


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
        ({"options": {"generation_kwargs": {"num_return_sequences": 2}}}, "num_return_sequences"),
        ({"options": {"generation_kwargs": {"stop_strings": ["w5"]}}}, "stop_strings"),
        ({"rollout_func": len}, "rollout_func"),
        ({"tools": [Room.look]}, "tools"),
        ({"environment_factory": Room}, "environment_factory"),
    ],
)
def test_other_ways_to_draw_are_refused_by_name(arguments: dict[str, Any], said: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL's own
        given = settings(trl.GRPOConfig, str(tmp_path), **OPTIONS | arguments.pop("options", {}))
        processing_class = tokenizer()
        processing_class.chat_template, processing_class.response_schema = (
            "{{ messages }}{{ tools }}",
            {"type": "object"},
        )
        with (
            pytest.raises(errors.KernelError, match=f"on_mesh {said}: expected a trainer without it, given .*Fix: le"),
            patch("trl.trainer.grpo_trainer.supports_tool_calling", return_value=True),
        ):
            hf.on_mesh(trl.GRPOTrainer, None)(
                model=families.model("llama", "attnmesh"), reward_funcs=even, args=given, train_dataset=prompts(),
                processing_class=processing_class, **arguments,
            )  # fmt: skip


@on_each_rank
def draw_twice() -> list[bool]:
    """Return whether each of two draws in one context was on the mesh, and has the log-probabilities of its tokens.

    Between them one raises.
    """
    model, ids = families.model("llama", "attnmesh", **FLAT), prompt(13, batch=2)
    options = {"attention_mask": torch.ones_like(ids)}
    options["generation_config"] = GenerationConfig(do_sample=True, max_new_tokens=4, temperature=0.9)
    on_mesh = []
    with generating_on(named_mesh(Shape(1, 1, 2), AXES), model) as logprobs:
        for _ in range(2):
            with count_traffic() as traffic:
                drawn = model.generate(ids, **options)
            expected = (model(drawn).logits[:, 12:-1] / 0.9).log_softmax(-1).gather(2, drawn[:, 13:, None])[..., 0]
            torch.testing.assert_close(torch.cat(logprobs, 1), expected, atol=2e-5, rtol=0)
            on_mesh.append(bool(traffic.merges))
            with pytest.raises(errors.ArgumentError):
                model.generate(ids + 97, **options)
    return on_mesh


def test_each_draw_in_a_context_is_on_the_mesh(pool: Pool) -> None:
    assert pool.run(2, draw_twice) == [[True, True]] * 2


def test_a_model_keeps_a_generate_of_its_own() -> None:
    """As FSDP2 gives it one, which gathers the weights."""
    model = families.model("llama", "attnmesh")
    model.generate = own_method = partial(model.generate)
    with generating_on(None, model):
        model.generate(prompt(13), attention_mask=torch.ones(1, 13), generation_config=GREEDY)
    assert model.generate is own_method


def test_padding_that_may_not_be_drawn_is_in_no_metric(tmp_path: Path) -> None:
    """After the end of a completion stock generation appends padding, whose logits are -inf here."""
    draws = {"suppress_tokens": [0], "num_beams": None, "num_return_sequences": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL's own
        given = settings(trl.GRPOConfig, str(tmp_path), **OPTIONS | {"max_steps": 1, "generation_kwargs": draws})
        trainer = hf.on_mesh(trl.GRPOTrainer, None)(
            model=families.model("llama", "attnmesh", eos_token_id=[*range(20, 60)], **FLAT), reward_funcs=even,
            args=given, train_dataset=prompts(), processing_class=tokenizer(),
        )  # fmt: skip
        trainer.train()
    (log, *_) = trainer.state.log_history
    assert log["completions/min_length"] < log["completions/max_length"]
    assert 0 < log[DIFFERENCE] < 0.1  # without suppressed tokens a distribution is a little flatter


class TwoDraws(trl.GRPOTrainer):  # type: ignore[misc]
    """Draws the completions of each half of the prompts apart."""

    def _generate_single_turn(self, ids: Any, *args: Any, **options: Any) -> Any:
        """Return the completions of both halves."""
        size = len(ids) // 2
        parts = [
            super(TwoDraws, self)._generate_single_turn(part, *args, **options) for part in (ids[:size], ids[size:])
        ]
        return [*parts[0][0], *parts[1][0]], *parts[0][1:]


def test_log_probabilities_of_some_completions_are_refused(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL's own
        given = settings(trl.GRPOConfig, str(tmp_path), **OPTIONS)
        trainer = hf.on_mesh(TwoDraws, None)(
            model=families.model("llama", "attnmesh"), reward_funcs=even, args=given, train_dataset=prompts(),
            processing_class=tokenizer(),
        )  # fmt: skip
        with pytest.raises(errors.ShapeError, match="on_mesh generate: expected 8 completions of one call of generate"):
            trainer.train()
