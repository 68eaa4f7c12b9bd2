"""Distillation on a mesh: the completions, divergences, entropies and weights of stock TRL."""

import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import trl

import attnmesh as am
import attnmesh.hf as hf
from attnmesh import errors
from tests.support.models import families
from tests.support.ranks.pool import Pool
from tests.support.training.rollouts import MESHES, STOP, check, prompts
from tests.support.training.trainers import settings, tokenizer

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in MESHES if name != "heads"},
    "forward": ("keys", {"beta": 0.0}),
    "mixture": ("data x keys", {"beta": 0.4, "log_completions": True, "temperature": 0.7}),
    "adapter": ("keys", {"lora": True, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2}),
    "checkpointing": ("keys", {"activation_checkpointing": True}),
    "one token": ("three keys", {"max_completion_length": 1}),
    "windows": ("queries", {"family": "gemma3"}),
    "stream": ("data x keys", {"stream": True}),
    "a stop": ("keys", {**STOP, "save_steps": 2, "max_steps": 4}),
    "many steps": ("data x keys", {"max_steps": 20}),
}
"""Mesh and settings."""

SHORT = ("mixture",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SHORT else pytest.mark.long) for name in CASES]
)
def test_distillation_on_a_mesh_is_that_of_stock_trl(name: str, pool: Pool, tmp_path: Path) -> None:
    mesh, options = CASES[name]
    check(pool, tmp_path, "Distillation", *MESHES[mesh], **options)


def without_memory(*_: Any) -> None:
    raise MemoryError


def test_a_step_goes_on_in_another_layout_after_one_that_raised(tmp_path: Path) -> None:
    """With `layout="auto"` two batches may have two layouts."""
    student, teacher = (families.model("llama", "attnmesh") for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL's own
        trainer = hf.on_mesh(trl.DistillationTrainer, None, am.Striped(4))(
            model=student, teacher_model=teacher, args=settings(trl.DistillationConfig, str(tmp_path), max_steps=1),
            train_dataset=prompts(), processing_class=tokenizer(),
        )  # fmt: skip
        handle = teacher.model.register_forward_pre_hook(without_memory)
        with pytest.raises(MemoryError):
            trainer.train()
        handle.remove()
        trainer.sharder.layout = am.Zigzag()
        trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"use_vllm": True}, "on_mesh use_vllm: expected a trainer without it, given True. Fix: leave it out: hf.gen"),
        ({"tools": [len]}, "on_mesh tools: expected a trainer without it, given list. Fix: leave it out, or train on"),
        ({"teacher_model": None}, "on_mesh teacher_model: expected a model on the mesh, given None. Fix: pass one"),
        ({"attention": "sdpa"}, "on_mesh: expected a model with attn_implementation 'attnmesh', given 'sdpa'. Fix"),
    ],
)
def test_other_ways_to_draw_and_other_teachers_are_refused_by_name(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    processing_class, options = tokenizer(), dict(options)
    processing_class.chat_template, processing_class.response_schema = "{{ messages }}{{ tools }}", {"type": "object"}
    teacher = families.model("llama", options.pop("attention", "attnmesh"))
    arguments = {name: options.pop(name) for name in ("tools", "teacher_model") if name in options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL's own
        given = settings(trl.DistillationConfig, str(tmp_path), **options)
        with (
            pytest.raises(errors.KernelError, match=said),
            patch("trl.trainer.distillation_trainer.supports_tool_calling", return_value=True),
            patch("trl.trainer.distillation_trainer.is_chat_template_prefix_preserving", return_value=True),
        ):
            hf.on_mesh(trl.DistillationTrainer, None)(
                model=families.model("llama", "attnmesh"), args=given, train_dataset=prompts(),
                processing_class=processing_class, **{"teacher_model": teacher, **arguments},
            )  # fmt: skip
