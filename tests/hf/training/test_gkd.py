"""Distillation on answers that are given or drawn, on a mesh: the answers, losses, metrics and weights of stock TRL."""

import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from transformers import TrainerCallback

import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.mesh.shapes import Shape
from tests.support.models import families
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.training.rollouts import COMPARED, MESHES, STOP, chats, check, of_trl
from tests.support.training.trainers import FSDP, launched, mesh_of, settings, tokenizer

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"drawn on {name}": (name, {"lmbda": 1.0}) for name in MESHES if name != "heads"},
    "given": ("keys", {"lmbda": 0.0, "beta": 0.0}),
    "both": ("keys", {"beta": 1.0, "temperature": 0.7}),
    "both on meshes": ("data x keys", {"beta": 0.3, "max_steps": 4}),
    "of the teacher": ("queries", {"lmbda": 0.0, "seq_kd": True}),
    "adapter": ("keys", {"lora": True}),
    "cut rows": ("three keys", {"max_length": 15, "lmbda": 0.0}),
    "checkpointing": ("keys", {"gradient_checkpointing": True}),
    "evaluation": ("keys", {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2}),
    "a stop": ("keys", {**STOP, "save_steps": 2, "max_steps": 4}),
    "sharded weights": ("data x keys", {"lmbda": 1.0, "max_steps": 3, **FSDP}),
    "sharded weights, given and of the teacher": ("keys", {"lmbda": 0.5, "seq_kd": True, "max_steps": 4, **FSDP}),
    "sharded weights, adapter": ("keys", {"lora": True, "lmbda": 1.0, **FSDP}),
    "many steps": ("data x keys", {"max_steps": 20}),
}
"""Mesh and settings."""

SHORT = ("both",)
"""Cases of `make test`. The others are marked long."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SHORT else pytest.mark.long) for name in CASES]
)
def test_gkd_on_a_mesh_is_that_of_stock_trl(name: str, pool: Pool, tmp_path: Path) -> None:
    mesh, options = CASES[name]
    check(pool, tmp_path, "GKD", *MESHES[mesh], **options)


def trainer(mesh: Any, folder: str, **options: Any) -> Any:
    """Return a trainer on a mesh."""
    processing_class = tokenizer()
    processing_class.chat_template = "{% for each in messages %}{{ each.content }} {% endfor %}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL's own
        given = settings(of_trl("GKDConfig"), folder, **COMPARED | options)
        models = [families.model("llama", "attnmesh") for _ in range(2)]
        return hf.on_mesh(of_trl("GKDTrainer"), mesh)(
            *models, args=given, train_dataset=chats(), processing_class=processing_class, callbacks=[Apart()]
        )


class Apart(TrainerCallback):  # type: ignore[misc]
    """Random numbers that differ between ranks, as from a checkpoint of fewer ranks."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Let ranks draw other numbers."""
        random.seed(SEEDS[dist.get_rank()])


SEEDS = (0, 1)
"""Those with which the first rank does not draw an answer at first, and the second does."""


@on_each_rank
def train_apart(folder: str) -> list[float]:
    """Return the losses of ranks whose random numbers differ."""
    with launched():
        made = trainer(mesh_of(1, Shape(1, 1, 2)), folder, max_steps=2)
        made.train()
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


def test_ranks_draw_answers_in_the_same_steps(pool: Pool, tmp_path: Path) -> None:
    first, second = (random.Random(seed).random() for seed in SEEDS)
    assert second <= 0.5 < first  # lmbda
    losses, others = pool.run(2, train_apart, str(tmp_path))
    assert losses == others
    assert len(losses) == 2


def test_kernels_of_others_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(errors.KernelError, match=r"on_mesh use_liger_kernel: expected a trainer without it, given"):
        trainer(None, str(tmp_path), use_liger_kernel=True)
