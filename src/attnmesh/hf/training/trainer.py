"""Trainers of transformers, and of libraries built on it, on a mesh.

To the trainer the ranks of a mesh are one process, see `accelerator`. A model that it calls computes each batch in
shards, see `batch_sharder`.
"""

from collections.abc import Callable
from functools import partial as partial_of
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.core.layout import Layout, Zigzag, check_layout
from attnmesh.errors import ArgumentError, KernelError
from attnmesh.hf.random_numbers import synchronize_all_generators
from attnmesh.hf.training.accelerator import as_one_process, check_parallelism
from attnmesh.hf.training.batch_sharder import BatchSharder
from attnmesh.hf.training.distillation import MeshDistillation
from attnmesh.hf.training.gkd import MeshGKD
from attnmesh.hf.training.mesh_shapes import check_mesh_shape
from attnmesh.hf.training.online_dpo import MeshOnlineDPO
from attnmesh.hf.training.rewards import MeshRewards
from attnmesh.hf.transformers_names import check_trainer
from attnmesh.mesh.axes import RankMesh


def on_mesh(
    trainer_class: type,
    mesh: DeviceMesh | None,
    layout: Layout | str = Zigzag(),
    *,
    exchange: str = "scan",
    shape: str | None = None,
) -> type:
    """Return a subclass of a `transformers.Trainer` that trains and evaluates on a mesh, as it does on one device.

    The stable trainers of TRL work too, and of its experimental ones `OnlineDPOTrainer` and `GKDTrainer`. The mesh
    shares each sequence. If the world has more ranks, they form further meshes with other batches, and DDP or FSDP2
    goes over all ranks. Batch sizes are per mesh.

    Args:
        trainer_class: The class of the trainer.
        mesh: The mesh of this rank.
        layout: The tokens that each rank gets. "auto" chooses for the documents of each batch.
        exchange: What ranks exchange in recurrent layers, as in `shard_batch`.
        shape: None for the mesh as it is. "auto": its ranks form meshes of several shapes, and each batch takes the
            shape that the planner prices lowest for its documents. The mesh then has one axis.

    Returns:
        The subclass, which takes the same arguments. Its model needs `attn_implementation="attnmesh"`.

    Raises:
        InputError: The class is no trainer, or an argument is not supported. The trainer raises it when it is made if
            the meshes do not cover all ranks, or beside another kind of context, sequence or tensor parallelism.

    >>> from transformers import Trainer
    >>> on_mesh(Trainer, None).__name__
    'TrainerOnMesh'
    """
    from transformers import Trainer

    subject = "on_mesh trainer_class"
    is_class = isinstance(trainer_class, type) and issubclass(trainer_class, Trainer)
    if not is_class:
        fix = "pass transformers.Trainer or a subclass of it"
        raise ArgumentError(subject, "a subclass of transformers.Trainer", repr(trainer_class), fix)
    if issubclass(trainer_class, MeshTrainer):
        raise ArgumentError(subject, "a trainer without a mesh", repr(trainer_class), "call on_mesh once")
    check_trainer(trainer_class)
    bases = _bases_of(trainer_class)
    check_layout("on_mesh layout", layout, auto=True)
    RankMesh.of(mesh)
    check_mesh_shape(shape, mesh)

    def sharder(self: Any) -> BatchSharder:
        return BatchSharder(mesh, layout, exchange, shape)

    text = f"`{trainer_class.__name__}` whose batches are computed on a mesh of ranks."
    fields = {"_make_sharder": sharder, "__doc__": text}
    return type(f"{trainer_class.__name__}OnMesh", (*bases, trainer_class), fields)


def _bases_of(trainer_class: type) -> tuple[type, ...]:
    """Return the first bases of a trainer on a mesh. Raise unless the nearest trainer of a known package is served."""
    classes = ((base.__name__, package_of(base)) for base in trainer_class.__mro__)
    name, package = next(pair for pair in classes if pair[1] in SERVED)
    if name not in SERVED[package]:
        expected = f"{', '.join(chain(*SERVED.values()))}, or a subclass of one of them"
        fix = "train with one of these, or in a loop of your own with hf.shard_batch"
        raise KernelError("on_mesh trainer_class", expected, f"{package}.{name}", fix)
    return SERVED[package][name]


def package_of(kind: type) -> str:
    """Return the package of a class. An experimental trainer of TRL may have the name of another trainer."""
    package, *inner = kind.__module__.split(".")
    return f"{package}.experimental" if inner[:1] == ["experimental"] else package


class MeshTrainer:
    """First base of the classes that `on_mesh` returns."""

    accelerator: Any
    args: Any
    model: Any
    _make_sharder: Callable[[], BatchSharder]

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, to which the ranks of a mesh are one process."""
        self.sharder, arguments = self._make_sharder(), self.args
        check_parallelism(arguments.parallelism_config)
        if self.model is not None:
            self.sharder.install(self.model)
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        if arguments.torch_compile:
            raise KernelError("on_mesh torch_compile", "a model that is not compiled", "True", "leave it out")
        strategy = arguments.train_sampling_strategy
        deals_to_ranks = strategy == "batch_rebalance" and RankMesh.of(self.sharder.device_mesh).ranks > 1
        if deals_to_ranks:
            expected = "batches that all ranks of a mesh get"
            raise KernelError("on_mesh train_sampling_strategy", expected, repr(strategy), 'pass "group_by_length"')
        if arguments.eval_use_gather_object:
            fix = "leave it out: tensors are gathered"
            raise KernelError("on_mesh", "evaluation that gathers tensors", "eval_use_gather_object=True", fix)
        as_one_process(self.accelerator, self.sharder)
        self.gather_function = self.accelerator.gather_for_metrics

    def get_train_dataloader(self) -> Any:
        """Return the batches of this rank's mesh. Workers of all its ranks draw the same numbers, as of one process."""
        loader: Any = super().get_train_dataloader()  # type: ignore[misc]
        read = getattr(loader, "base_dataloader", loader)  # accelerate's loader reads the batches of another one
        seed = getattr(read, "worker_init_fn", None)  # a loader of a subclass may be of any class
        if isinstance(seed, partial_of) and "rank" in seed.keywords:
            read.worker_init_fn = partial_of(seed, rank=self.accelerator.replicas.mesh_index)
        return loader

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore the random numbers of a checkpoint. Ranks of a mesh go on alike where other meshes have saved it."""
        super()._load_rng_state(checkpoint)  # type: ignore[misc]
        if checkpoint is not None:
            synchronize_all_generators(self.sharder.device_mesh, self.accelerator.device)

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Run a training step on shards."""
        with self.sharder.active(True, model, self.model):
            return super().training_step(model, *args, **kwargs)  # type: ignore[misc,no-any-return]

    def prediction_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run an evaluation step on shards."""
        with self.sharder.active(True, model, self.model):
            return super().prediction_step(model, *args, **kwargs)  # type: ignore[misc]

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate on shards. Raise before training with FSDP2, which shards the weights together with an optimizer."""
        fits = not self.accelerator.is_fsdp2 or bool(self.accelerator._models)
        if not fits:
            fix = "train first, or pass eval_on_start=True in the arguments"
            raise KernelError("evaluate", "a model whose weights train() has sharded", "one before train()", fix)
        return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model, as `from_pretrained` loads it.

        transformers would save nothing here, and not say so, if the checkpoints in training are in shards.
        """
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is None or _internal_call:  # for a checkpoint in training
            return super().save_model(output_dir, _internal_call)  # type: ignore[misc,no-any-return]
        kind = plugin.state_dict_type
        plugin.set_state_dict_type("FULL_STATE_DICT")
        try:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        finally:
            plugin.set_state_dict_type(kind)
        return None

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the sequences of an optimizer step."""
        total: int = super().get_total_train_batch_size(args)  # type: ignore[misc]
        return total // RankMesh.of(self.sharder.device_mesh).ranks

    def floating_point_ops(self, inputs: Any) -> float:
        """Return this rank's share of the operations of a batch."""
        operations: float = super().floating_point_ops(inputs)  # type: ignore[misc]
        return operations / RankMesh.of(self.sharder.device_mesh).ranks


class MeshPreferences:
    """Base of classes that `on_mesh` returns, before `MeshTrainer`, for trainers with a reference model."""

    sharder: BatchSharder
    model: Any
    ref_model: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.ref_model is not None:
            self.sharder.install(self.ref_model)  # FSDP2 shards its weights without `accelerator.prepare`

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        """Return a dataset with the log-probabilities of the reference model, computed on shards."""
        with self.sharder.active(True, self.ref_model or self.model):
            return super()._precompute_ref_logps(*args, **kwargs)  # type: ignore[misc]


TRAINS, PREFERS, REWARDS = (MeshTrainer,), (MeshPreferences, MeshTrainer), (MeshRewards, MeshTrainer)
"""First bases of trainers that get batches, of trainers with a reference model, and of trainers that draw rows."""

SERVED: dict[str, dict[str, tuple[type, ...]]] = {
    "transformers": {"Trainer": TRAINS, "Seq2SeqTrainer": TRAINS},
    "trl": {
        "SFTTrainer": TRAINS,
        "RewardTrainer": TRAINS,
        "DPOTrainer": PREFERS,
        "KTOTrainer": PREFERS,
        "GRPOTrainer": REWARDS,
        "RLOOTrainer": REWARDS,
        "DistillationTrainer": (MeshDistillation, MeshTrainer),
    },
    "trl.experimental": {"OnlineDPOTrainer": (MeshOnlineDPO, MeshTrainer), "GKDTrainer": (MeshGKD, MeshTrainer)},
}
"""Trainers that were compared with one process. Others make batches, or losses of whole sequences, themselves."""
