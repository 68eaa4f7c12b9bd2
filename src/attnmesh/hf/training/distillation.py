"""Trainers that learn the probabilities of a teacher, on a mesh: both models and the loss are computed on shards."""

from collections import deque
from collections.abc import Callable
from functools import partial as partial_of
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from attnmesh.errors import KernelError
from attnmesh.hf.models import unwrap
from attnmesh.hf.sharded_sequence import ShardedSequence
from attnmesh.hf.training.batch import per_rank
from attnmesh.hf.training.left_padding import MovedRows
from attnmesh.hf.training.mean_over_mesh import mean_over_ranks
from attnmesh.hf.training.rollouts import SUBJECT, MeshRollouts, raise_other_shards
from attnmesh.hf.transformers_names import DIVERGENCE, ROLLOUTS
from attnmesh.mesh.axes import RankMesh
from attnmesh.mesh_attention.sharding import shard


class MeshDistillation(MeshRollouts):
    """Base of classes that `on_mesh` returns, before `MeshTrainer`, for trainers with a teacher."""

    teacher_model: Any
    _logs: dict[str, deque[str]]
    sequences_by_layout: dict[Any, tuple[ShardedSequence, MovedRows | None]]
    """Sequences of the present loss, by layout and shape, and how their rows have moved."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.teacher_model is None:
            fix = "pass one whose vocabulary is the student's"
            raise KernelError(f"{SUBJECT} teacher_model", "a model on the mesh", "None", fix)
        settings, meshes = self.args, self.accelerator.replicas.num_meshes
        rows = settings.per_device_train_batch_size * meshes * settings.gradient_accumulation_steps
        self._logs = {name: deque(maxlen=rows) for name in self._logs}  # TRL has counted each rank as a process

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, to which the ranks of a mesh are one process."""
        super().create_accelerator_and_postprocess()
        if self.accelerator.is_fsdp2:
            raise KernelError(SUBJECT, "a student and a teacher that each rank has whole", "FSDP2", "use DDP")

    def get_train_dataloader(self) -> Any:
        """Return the prompts of each mesh."""
        with self.accelerator.dealing():
            return super().get_train_dataloader()  # type: ignore[misc]

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss. TRL calls the models with methods of its own, in which `_get_last_hidden_state` shards."""
        self.sequences_by_layout = {}  # a call that raised may have left some
        divergence = partial_of(self._divergence, ROLLOUTS.find(DIVERGENCE))
        replacing = self._replacing(**{DIVERGENCE.split(":")[1]: divergence})
        with self.sharder.active(False), self.accelerator.dealing(), replacing:
            return super().compute_loss(*args, **kwargs)  # type: ignore[misc]

    def _get_last_hidden_state(self, model: Any, input_ids: Tensor, attention_mask: Tensor, *_: Any) -> Tensor:
        """Return the last states of this rank's tokens."""
        layers = unwrap(model).base_model
        with self.sharder.active(True, layers):
            states = layers(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        sequence = states.sequence
        self.sequences_by_layout[sequence.layout, RankMesh.of(sequence.mesh).shape] = sequence, states.moved
        return states.plain()  # type: ignore[no-any-return]

    def _divergence(
        self,
        stock: Callable[..., Any],
        student: Tensor,
        teacher: Tensor,
        *heads: Any,
        num_items_in_batch: Any,
        **options: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, the sum of entropies and the number of tokens, of the whole batch."""
        *heads_of_models, mask, beta = heads
        layouts = [*self.sequences_by_layout]
        (sequence, moved), *others = self.sequences_by_layout.values()
        if others:
            raise_other_shards(" and ".join(map(str, layouts)))
        target_mask = pad(mask, (sequence.length - 1 - mask.shape[1], 1))  # a token is predicted from the one before it
        target_mask = target_mask if moved is None else moved.batch({"mask": target_mask})["mask"]
        own_mask = shard(target_mask, sequence.mesh, layout=sequence.layout, dim=1).bool()
        count = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        options["num_items_in_batch"] = per_rank(count, sequence.ranks)
        parts = (x[own_mask][None] for x in (student, teacher))
        loss, entropy, _ = stock(*parts, *heads_of_models, own_mask[own_mask][None], beta, **options)
        loss, entropy = (mean_over_ranks(x, sequence.mesh) for x in (loss, entropy.detach()))
        return loss, entropy * sequence.ranks, mask.sum()
