"""Accelerators whose processes are meshes: the ranks of a mesh get the same batches, and metrics count them once.

A model that such an accelerator prepares computes each batch in shards, see `batch_sharder`. DDP or FSDP2 averages its
gradients over all ranks. Files are saved and loaded by all ranks too: with FSDP2 each rank holds a part of the weights.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.core.layout import Layout, Zigzag, check_layout
from attnmesh.errors import ArgumentError, KernelError, MeshError, short
from attnmesh.guard.agreement import Agreement
from attnmesh.hf.random_numbers import synchronize_all_generators
from attnmesh.hf.training.batch_sharder import BatchSharder
from attnmesh.hf.transformers_names import ACCELERATE
from attnmesh.mesh.axes import axis_of, mesh_of_axis
from attnmesh.runtime.world import cached_per_world
from attnmesh.setup.init_mesh import checked_groups


class Replicas(NamedTuple):
    """Groups of ranks that share their batches."""

    mesh_index: int
    """Number of this rank's group."""
    num_meshes: int
    """Number of groups."""
    ranks_per_mesh: int
    """Ranks in each group."""
    process_group: ProcessGroup | None
    """Ranks with the same place in each group; None if there is one group."""


def prepare(
    accelerator: Any, model: Any, mesh: DeviceMesh | None, layout: Layout | str = Zigzag(), *, exchange: str = "scan"
) -> Any:
    """Return a model that computes whole batches on a mesh, for a training loop with an `Accelerator`.

    Call it before `accelerator.prepare`, which then gives the ranks of a mesh the same batches. Each rank calls the
    model with the whole batch, and gets the loss and the outputs of one device. If the world has more ranks than the
    mesh, they form further meshes with other batches.

    Args:
        accelerator: The accelerator.
        model: A causal language model with `attn_implementation="attnmesh"`.
        mesh: The mesh of this rank; None for one device.
        layout: The tokens that each rank gets. "auto" chooses for the documents of each batch.
        exchange: What ranks exchange in recurrent layers, as in `shard_batch`.

    Returns:
        The model.

    Raises:
        InputError: The meshes do not cover all ranks, an argument is not supported, or accelerate itself shards
            sequences or weights.

    >>> from accelerate import Accelerator
    >>> from transformers import AutoModelForCausalLM, LlamaConfig
    >>> sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> config = LlamaConfig(vocab_size=97, eos_token_id=None, **sizes)
    >>> model = AutoModelForCausalLM.from_config(config, attn_implementation="attnmesh")
    >>> ids = torch.arange(8)[None]
    >>> prepare(Accelerator(cpu=True), model, None)(input_ids=ids, labels=ids).loss.item() > 0
    True
    """
    check_layout("prepare layout", layout, auto=True)
    sharder = _sharder_of(accelerator, mesh, layout, exchange)
    sharder.install(model)
    as_one_process(accelerator, sharder)
    sharder.is_active = True
    return model


def _sharder_of(accelerator: Any, device_mesh: DeviceMesh | None, layout: Layout | str, exchange: str) -> BatchSharder:
    """Return what shards the batches of this accelerator. Raise if it has prepared a model for others."""
    if not isinstance(accelerator, MeshAccelerator):
        return BatchSharder(device_mesh, layout, exchange)
    sharder = accelerator.sharder
    is_same = (sharder.device_mesh, sharder.layout, sharder.exchange) == (device_mesh, layout, exchange)
    if not is_same:
        expected = "the mesh, layout and exchange of the accelerator's first model"
        raise ArgumentError("prepare", expected, "others", "pass the same ones for each model")
    return sharder


def as_one_process(accelerator: Any, sharder: BatchSharder) -> None:
    """Make the ranks of each mesh one process of this accelerator, which installs the sharder on models it prepares."""
    if isinstance(accelerator, MeshAccelerator):
        return
    ACCELERATE.check()
    replicas = _replicas(sharder.device_mesh, accelerator.state.num_processes)
    _check_alone(accelerator)
    _warn_if_weights_are_whole(accelerator)
    accelerator.__class__ = _accelerator_class(type(accelerator))
    accelerator.replicas, accelerator.sharder = replicas, sharder
    if accelerator.dataloader_config.dispatch_batches is None:
        accelerator.dataloader_config.dispatch_batches = False  # each rank reads its batches


def _check_alone(accelerator: Any) -> None:
    """Raise if accelerate deals out batches, sequences or weights in a way that does not know the mesh."""
    check_parallelism(getattr(accelerator, "parallelism_config", None))
    given = str(accelerator.distributed_type).rsplit(".", 1)[-1]
    given = "FSDP1" if given == "FSDP" and not accelerator.is_fsdp2 else given
    supported = given in ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP")
    if not supported:
        raise KernelError("on_mesh", "DDP, FSDP2 or one process", given, "use DDP or FSDP2")
    dispatches = accelerator.dataloader_config.dispatch_batches or accelerator.dataloader_config.split_batches
    if dispatches:
        fix = "leave them out of accelerator_config, or of DataLoaderConfiguration"
        raise KernelError("on_mesh", "data that each rank reads", "dispatch_batches or split_batches", fix)


def _warn_if_weights_are_whole(accelerator: Any) -> None:
    """Warn if FSDP was asked for on CPUs, where accelerate does without it and says nothing."""
    is_requested = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    on_cpus = str(accelerator.distributed_type).endswith("MULTI_CPU")
    if is_requested and on_cpus and accelerator.is_main_process:
        warnings.warn("accelerate ignores FSDP on CPUs: DDP keeps all weights on each rank", stacklevel=2)


def check_parallelism(parallel: Any) -> None:
    """Raise if accelerate itself shards sequences or weights."""
    for name in ("cp_size", "sp_size", "tp_size"):
        size = getattr(parallel, name, 1) or 1
        if size != 1:
            fix = "leave it out: attnmesh shards the sequence" if name != "tp_size" else "use FSDP2 on the other ranks"
            raise KernelError("on_mesh", f"no ParallelismConfig({name}=) beside a mesh", str(size), fix)


@cached_per_world(16)
def _replicas(device_mesh: DeviceMesh | None, processes: int) -> Replicas:
    """Return the groups of ranks that share their batches. Raise on all ranks unless they cover the world evenly.

    Collective over the world, once for each mesh.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world != processes:
        fix = "start the script with torchrun or accelerate launch, on CPUs with use_cpu=True"
        raise MeshError("on_mesh", f"accelerate on {world} ranks", str(processes), fix)
    mesh_ranks = [dist.get_rank() if world > 1 else 0] if device_mesh is None else device_mesh.mesh.flatten().tolist()
    if world == 1:
        return Replicas(0, 1, 1, None)
    table: list[list[int]] = [[] for _ in range(world)]
    dist.all_gather_object(table, mesh_ranks)
    groups = checked_groups("on_mesh mesh", table)
    group = None
    if len(groups) > 1:
        group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in zip(*groups, strict=True)])
    index = next(number for number, ranks in enumerate(groups) if dist.get_rank() in ranks)
    return Replicas(index, len(groups), len(mesh_ranks), group)


NOT_LOADED = -1
"""The step of an accelerator for which a state has none."""


class MeshAccelerator:
    """First base of the class of an accelerator whose processes are meshes."""

    replicas: Replicas
    sharder: BatchSharder
    device: torch.device
    step: int
    _deals_batches = False

    @property
    def num_processes(self) -> int:
        """Number of meshes where batches are dealt out and losses weighed; of ranks where files are saved or loaded."""
        ranks: int = super().num_processes  # type: ignore[misc]
        return self.replicas.num_meshes if self._deals_batches or self.sharder.is_active else ranks

    @property
    def process_index(self) -> int:
        """Index of this rank's mesh where batches are dealt out; otherwise of this rank, as one rank writes a file."""
        rank: int = super().process_index  # type: ignore[misc]
        return self.replicas.mesh_index if self._deals_batches else rank

    @contextmanager
    def dealing(self) -> Iterator[None]:
        """Count each mesh as one process in this context, in which batches are dealt out."""
        was_dealing, self._deals_batches = self._deals_batches, True
        try:
            yield
        finally:
            self._deals_batches = was_dealing

    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        """Return a loader that gives the ranks of a mesh the same batches."""
        with self.dealing():
            return super().prepare_data_loader(*args, **kwargs)  # type: ignore[misc]

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Save the state of training, of which each rank holds a part."""
        with self.sharder.active(False):
            return super().save_state(*args, **kwargs)  # type: ignore[misc]

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Load the state of training, of which each rank holds a part. All ranks raise if one of them cannot.

        Where more ranks load it than have saved it, accelerate restores random numbers and the step of an accumulation
        on some ranks. The ranks of each mesh then take the numbers of its first rank, and all take the step of rank 0.
        """
        world = mesh_of_axis(axis_of(dist.group.WORLD if dist.is_initialized() else None, "load_state"))
        before, self.step = self.step, NOT_LOADED
        try:
            with self.sharder.active(False), Agreement(world, "load_state") as agreement:
                super().load_state(*args, **kwargs)  # type: ignore[misc]
                steps = [step for (step,) in agreement.compare(payload=[self.step])]
        finally:
            self.step = before if self.step == NOT_LOADED else self.step
        if NOT_LOADED in steps and steps[0] != NOT_LOADED:
            synchronize_all_generators(self.sharder.device_mesh, self.device)
            self.step = steps[0]

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare as accelerate does. FSDP2 adds hooks to a model."""
        prepared: Any = super().prepare(*args, **kwargs)  # type: ignore[misc]
        for part in prepared if isinstance(prepared, (tuple, list)) else (prepared,):
            if isinstance(part, nn.Module):
                self.sharder.install(part)
        return prepared

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """Wrap the model as accelerate does, over all ranks, and install the sharder on it."""
        prepared: Any = super().prepare_model(model, device_placement, evaluation_mode)  # type: ignore[misc]
        if evaluation_mode:
            # accelerate 1.15 would take a model that was evaluated for one that is wrapped for training, and train it
            # without averaging gradients.
            prepared._is_accelerate_prepared = False
        self.sharder.install(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Return a scheduler that steps once per training step. accelerate would step once per rank."""
        if 1 not in (self.replicas.num_meshes, self.replicas.ranks_per_mesh):
            given = f"{self.replicas.num_meshes} meshes"
            fix = "call scheduler.step() yourself, without accelerator.prepare"
            raise KernelError("prepare", "a scheduler that steps by itself on one mesh", given, fix)
        prepared: Any = super().prepare_scheduler(scheduler)  # type: ignore[misc]
        prepared.split_batches = prepared.split_batches or self.replicas.ranks_per_mesh > 1
        return prepared

    def gather(self, tensor: Any) -> Any:
        """Return the tensors of all meshes, from one rank of each."""
        return _apply(self._gather_one, tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the tensors of all meshes without the samples that fill the last batch."""
        # accelerate gathers what has no tensors from each rank.
        fits = not use_gather_object and _holds_tensors_only(input_data)
        if not fits:
            given = "use_gather_object=True" if use_gather_object else short(input_data)
            raise KernelError("gather_for_metrics", "tensors", given, "gather tensors")
        return super().gather_for_metrics(input_data)  # type: ignore[misc]

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum or mean over meshes. accelerate sums over ranks, and ignores `scale` but on XLA."""
        reduced = super().reduce(tensor, reduction, scale)  # type: ignore[misc]
        return reduced if reduction in ("mean", "max") else _apply(self._per_mesh, reduced)

    def _per_mesh(self, total: Tensor) -> Tensor:
        """Return a sum over meshes, given one over ranks. Ranks of a mesh have equal tensors, so integers are exact."""
        ranks = self.replicas.ranks_per_mesh
        if ranks == 1 or total.dtype == torch.bool:
            return total
        return total / ranks if total.is_floating_point() or total.is_complex() else total // ranks

    def _gather_one(self, tensor: Tensor) -> Tensor:
        tensor = (tensor[None] if not tensor.ndim else tensor).contiguous()
        if self.replicas.process_group is None:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.replicas.num_meshes)]
        dist.all_gather(parts, tensor, group=self.replicas.process_group)
        return torch.cat(parts)


def _apply(function: Callable[[Tensor], Tensor], nested: Any) -> Any:
    """Return nested data with a function of each tensor. Raise TypeError if it holds other things."""
    recursively_apply = ACCELERATE.find("accelerate.utils.operations:recursively_apply")
    return recursively_apply(function, nested, error_on_other_type=True)


def _holds_tensors_only(nested: Any) -> bool:
    try:
        _apply(lambda x: x, nested)
    except TypeError:
        return False
    return True


@cached_per_world(8)
def _accelerator_class(kind: type) -> type:
    return type(f"Mesh{kind.__name__}", (MeshAccelerator, kind), {"__doc__": MeshAccelerator.__doc__})
