"""Online DPO on a mesh: the completions, rewards, losses, metrics and weights of stock TRL."""

import warnings
from pathlib import Path
from typing import Any

import pytest
from transformers import ProcessorMixin

import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.mesh.shapes import Shape
from tests.support.models import families
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.training.rollouts import (
    COMPARED,
    MESHES,
    STOP,
    check,
    check_failed_reward,
    even,
    failing_reward,
    of_trl,
    prompts,
)
from tests.support.training.trainers import FSDP, launched, mesh_of, settings, tokenizer

WIDE = {"hidden_size": 192, "intermediate_size": 256, "initializer_range": 0.02}
"""Changes of a Llama with layers that ranks share, and with small logits all the same."""

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in MESHES},
    "adapter": ("keys", {"lora": True, "missing_eos_penalty": 0.5}),
    "adapter of meshes": ("data x keys", {"lora": True, "loss_type": "ipo"}),
    "square losses": ("queries", {"loss_type": "ipo", "reward_weights": [0.3, 2.0]}),
    "cut prompts": ("three keys", {"max_length": 19}),
    "no prompts": ("keys", {"max_length": 11, "max_new_tokens": 11}),
    "checkpointing": ("keys", {"gradient_checkpointing": True}),
    "warped draws": ("queries", {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1}),
    "one prompt": ("keys", {"per_device_train_batch_size": 1}),
    "windows": ("queries", {"family": "gemma3"}),
    "sharded weights": ("data x keys", {"max_steps": 3, **FSDP}),
    "sharded weights, adapter": ("keys", {"lora": True, **FSDP}),
    "a stop": ("keys", {**STOP, "save_steps": 2, "max_steps": 4}),
    "a stop of meshes": ("data x keys", {**STOP, "save_steps": 1, "max_steps": 2}),
    "a stop with an adapter": ("queries", {**STOP, "lora": True, "save_steps": 2, "max_steps": 4}),
    "shared weights": ("keys", {"shares": True, "lora": True, "changes": WIDE, "max_steps": 3}),
    "batches that are not full": ("data x keys", {"count": 7, "max_steps": 4}),
    "many steps": ("data x keys", {"max_steps": 20}),
}
"""Mesh and settings."""

SHORT = ("data x keys",)
"""Cases of `make test`. The others are marked long: `test_rollouts.py` and `test_preferences.py` have an adapter."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SHORT else pytest.mark.long) for name in CASES]
)
def test_online_dpo_on_a_mesh_is_that_of_stock_trl(name: str, pool: Pool, tmp_path: Path) -> None:
    mesh, options = CASES[name]
    check(pool, tmp_path, "OnlineDPO", *MESHES[mesh], **options)


def trainer(mesh: Any, folder: str, reward: Any = even, words: Any = None, **options: Any) -> Any:
    """Return a trainer on a mesh."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL's own
        given = settings(of_trl("OnlineDPOConfig"), folder, **COMPARED | options)
        return hf.on_mesh(of_trl("OnlineDPOTrainer"), mesh)(
            model=families.model("llama", "attnmesh"), reward_funcs=reward, args=given, train_dataset=prompts(),
            processing_class=words or tokenizer(), reward_processing_classes=[tokenizer()],
        )  # fmt: skip


@on_each_rank
def catch_error_of_bad_reward(folder: str) -> str:
    """Return the error of a reward that raises on the first rank of the second of two meshes."""
    with launched():
        try:
            trainer(mesh_of(2, Shape(1, 1, 2)), folder, failing_reward).train()
        except (OSError, errors.UnforeseenError) as error:
            return f"{type(error).__name__}: {error}"
    return "trained"


def test_a_reward_that_raises_on_one_rank_raises_on_all(pool: Pool, tmp_path: Path) -> None:
    check_failed_reward(pool.run(4, catch_error_of_bad_reward, str(tmp_path)), 2)


class Images(ProcessorMixin):  # type: ignore[misc]
    """A processor of images."""

    def __init__(self) -> None:
        self.tokenizer = tokenizer()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"use_vllm": True, "vllm_mode": "server"}, "use_vllm: expected a trainer without it, given True. Fix: leave"),
        ({"use_vllm": True, "vllm_mode": "colocate"}, "use_vllm: expected a trainer without it, given True. Fix"),
        (
            {"cache_implementation": "static"},
            "cache_implementation: expected a trainer without it, given 'static'. Fix",
        ),
        ({"use_liger_kernel": True}, "use_liger_kernel: expected a trainer without it, given True. Fix: leave"),
        ({"generation_kwargs": {"num_beams": 2}}, "num_beams: expected a trainer without it, given 2. Fix: leave"),
        ({"reward": families.model("llama", "attnmesh")}, "reward_funcs: expected functions, given LlamaFor.* Fix: ca"),
        ({"words": Images()}, "processing_class: expected a tokenizer, given a processor of images. Fix: pass one"),
    ],
)
def test_what_is_not_served_is_refused_by_name(arguments: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(errors.KernelError, match=f"on_mesh {said}"):
        trainer(None, str(tmp_path), **arguments)
