"""Trainers that learn the probabilities of a teacher in answers that are given or drawn, on a mesh."""

import random
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnmesh.hf.training.batch import per_rank
from attnmesh.hf.training.batch_sharder import ShardedOutput
from attnmesh.hf.training.mean_over_mesh import mean_over_ranks
from attnmesh.hf.training.rollouts import MeshRollouts, raise_other_shards
from attnmesh.hf.transformers_names import GKD, ROLLOUTS


class MeshGKD(MeshRollouts):
    """Base of classes that `on_mesh` returns, before `MeshTrainer`, for trainers that may draw answers."""

    beta: float
    teacher_model: Any
    generalized_jsd_loss: Any
    own_seed = False
    upstream = (ROLLOUTS, GKD)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run a training step. The ranks of a mesh draw answers in the same steps, by the first rank's random state.

        Their own states may differ, as a checkpoint restores one for each rank.
        """
        random.setstate(self._gather_rows([random.getstate()])[self.accelerator.replicas.mesh_index])
        loss: Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]
        return loss

    def generate_on_policy_outputs(self, model: Any, *args: Any) -> Any:
        """Draw answers on the mesh, by the student or the teacher."""
        with self._drawing(model):
            return super().generate_on_policy_outputs(model, *args)  # type: ignore[misc]

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the divergence of two models, computed from this rank's logits."""
        batch = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        labels: Tensor = pad(inputs["labels"][:, 1:], (0, 1), value=-100)
        outputs = model(**batch)
        with torch.no_grad():
            teacher: ShardedOutput = self.teacher_model.eval()(**batch).logits
        student: ShardedOutput = outputs.logits
        is_same = student.sequence == teacher.sequence
        if not is_same:
            raise_other_shards(f"{student.sequence.layout} and {teacher.sequence.layout}")
        count = (labels != -100).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        options = {"beta": self.beta, "num_items_in_batch": per_rank(count, student.sequence.ranks)}
        loss = self.generalized_jsd_loss(student.plain(), teacher.plain(), student.share(labels), **options)
        loss = mean_over_ranks(loss, student.sequence.mesh)
        return (loss, outputs) if return_outputs else loss
