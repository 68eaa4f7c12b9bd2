"""Trainings that are refused: all ranks raise the same error, before or in the first step."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainingArguments

import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.mesh.shapes import AXES, Shape
from tests.support import families
from tests.support.mesh_problems import named_mesh
from tests.support.pool import Pool, on_each_rank
from tests.support.trainers import FSDP, collate, examples, fsdp_on_cpus, launched, settings

Batch = dict[str, Tensor]


def with_unknown_token(batch: list[dict[str, Any]]) -> Batch:
    """Collate a batch whose last token, which one rank alone holds, is not in the vocabulary."""
    collated = collate(batch)
    collated["input_ids"][0, -1] = 999
    return collated


def with_unknown_label(batch: list[dict[str, Any]]) -> Batch:
    """Collate a batch whose last label, which one rank alone holds, is not in the vocabulary."""
    collated = collate(batch)
    collated["labels"][0, -1] = 999
    return collated


def padded_on_the_left(batch: list[dict[str, Any]]) -> Batch:
    """Pad the sequences of a batch on the left."""
    size = max(len(row["input_ids"]) for row in batch)
    ids = torch.stack([torch.nn.functional.pad(x["input_ids"], (size - len(x["input_ids"]), 0)) for x in batch])
    mask = (ids != 0).long()
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


def with_images(batch: list[dict[str, Any]]) -> Batch:
    return {**collate(batch), "pixel_values": torch.zeros(2, 3, 8, 8)}


def with_context_parallelism() -> dict[str, Any]:
    from accelerate import ParallelismConfig

    return {"parallelism_config": ParallelismConfig(cp_size=2)}


def with_tensor_parallelism() -> dict[str, Any]:
    from accelerate import ParallelismConfig

    return {"parallelism_config": ParallelismConfig(tp_size=2)}


def spread_over_devices(model: PreTrainedModel) -> None:
    model.hf_device_map = {"model": 0, "lm_head": 1}


def compile_the_half(model: PreTrainedModel) -> None:
    model.model = torch.compile(model.model, backend="eager")


def evaluate(trainer: Trainer) -> None:
    trainer.evaluate(examples(2))  # type: ignore[arg-type]


def on_the_first_mesh_of_two(rank: int) -> Any:
    mesh = named_mesh(Shape(1, 1, 2), AXES)  # all ranks take part in making it
    return mesh if rank < 2 else None


@dataclass(frozen=True)
class Training:
    """A training of one step on two ranks, but for what is said otherwise, and how the text of its error begins."""

    message: str = ""
    ranks: int = 2
    attention: str = "attnmesh"
    mesh: Callable[[int], Any] = lambda rank: named_mesh(Shape(1, 1, 2), AXES)
    rows: Callable[[int], list[dict[str, Any]]] = lambda rank: examples(20)
    collator: Callable[[list[dict[str, Any]]], Batch] = collate
    options: Callable[[], dict[str, Any]] = dict
    change: Callable[[PreTrainedModel], None] = lambda model: None
    before: Callable[[Trainer], None] = lambda trainer: None

    def loss(self) -> float:
        rank, options = dist.get_rank(), self.options()
        model, mesh = families.model("llama", self.attention), self.mesh(rank)
        self.change(model)
        with launched(), fsdp_on_cpus() if options.get("fsdp") else nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            given = settings(TrainingArguments, "/nonexistent", max_steps=1, **options)
            rows: dict[str, Any] = {"train_dataset": self.rows(rank), "data_collator": self.collator}
            made: Any = hf.on_mesh(Trainer, mesh)
            trainer = made(model=model, args=given, **rows)
            self.before(trainer)
            return float(trainer.train().training_loss)


REFUSED = {
    "uneven meshes": Training(
        "MeshError: on_mesh mesh: expected meshes of one size that cover the 4 ranks, given",
        ranks=4,
        mesh=on_the_first_mesh_of_two,
    ),
    "other batches": Training(
        "MeshError: shard_batch: expected the same call on every rank, given:", rows=lambda rank: examples(first=rank)
    ),
    "unknown token": Training(
        "ArgumentError: attnmesh.hf on_mesh input_ids: expected tokens from 0 to 96, the model's voc",
        collator=with_unknown_token,
    ),
    "unknown label": Training(
        "ArgumentError: attnmesh.hf labels: expected tokens from 0 to 96, or -100, given 999. Fix",
        collator=with_unknown_label,
    ),
    "left padding": Training(
        "MaskError: shard_batch attention_mask: expected padding on the right, if any, given",
        collator=padded_on_the_left,
    ),
    "images": Training(
        "KernelError: train images: expected a model that merges images into the embeddings of its text model, given "
        "LlamaForCausalLM. Fix: leave token_type_ids and images out",
        collator=with_images,
    ),
    "device map": Training(
        "KernelError: on_mesh: expected a model on one device per rank, given a device_map of 2 devices",
        change=spread_over_devices,
    ),
    "context parallelism": Training(
        "KernelError: on_mesh: expected no ParallelismConfig(cp_size=) beside a mesh, given 2",
        options=with_context_parallelism,
    ),
    "tensor parallelism": Training(
        "KernelError: on_mesh: expected no ParallelismConfig(tp_size=) beside a mesh, given 2",
        options=with_tensor_parallelism,
    ),
    "compiled": Training(
        "KernelError: on_mesh torch_compile: expected a model that is not", options=lambda: {"torch_compile": True}
    ),
    "objects": Training(
        "KernelError: on_mesh: expected evaluation that gathers", options=lambda: {"eval_use_gather_object": True}
    ),
    "rebalanced": Training(
        "KernelError: on_mesh train_sampling_strategy: expected batches that all ranks of a mesh get, given",
        options=lambda: {"train_sampling_strategy": "batch_rebalance"},
    ),
    "dispatch": Training(
        "KernelError: on_mesh: expected data that each rank reads, given dispatch_batches or split_batches. Fix",
        options=lambda: {"accelerator_config": {"dispatch_batches": True}},
    ),
    "FSDP1": Training(
        "KernelError: on_mesh: expected DDP, FSDP2 or one process, given FSDP1. Fix: use DDP or FSDP2",
        options=lambda: {"fsdp": True, "fsdp_config": {"version": 1, "sync_module_states": False}},
    ),
    "evaluation first": Training(
        "KernelError: evaluate: expected a model whose weights train() has sharded, given one before train(). Fix: ",
        options=lambda: FSDP,
        before=evaluate,
    ),
    "stock attention": Training(
        "KernelError: on_mesh: expected a model with attn_implementation 'attn", attention="sdpa"
    ),
}

TRAINED = {"plain": Training(), "half compiled": Training(change=compile_the_half)}


@on_each_rank
def error_of(name: str) -> str:
    try:
        REFUSED[name].loss()
    except errors.InputError as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_raises_alike(name: str, pool: Pool) -> None:
    answers = pool.run(REFUSED[name].ranks, error_of, name)
    for answer in answers:
        assert answer.startswith(REFUSED[name].message), answer
    assert len(set(answers)) == 1


@on_each_rank
def loss_of(name: str) -> float:
    return round(TRAINED[name].loss(), 6)


@pytest.mark.long
def test_a_half_compiled_model_trains_like_a_plain_one(pool: Pool) -> None:
    compiled, plain = (set(pool.run(2, loss_of, name)) for name in ("half compiled", "plain"))
    assert [*compiled] == pytest.approx([*plain], abs=2e-6)  # two roundings to six digits, beside those of sums


def test_only_trainers_are_put_on_a_mesh() -> None:
    for kind in (torch.nn.Linear, hf.on_mesh(Trainer, None), "Trainer"):
        with pytest.raises(errors.ArgumentError, match="on_mesh trainer_class: expected a "):
            hf.on_mesh(kind, None)  # type: ignore[arg-type]
    with pytest.raises(errors.ArgumentError, match=r"on_mesh shape: expected None or .auto., given .1x2x2."):
        hf.on_mesh(Trainer, None, shape="1x2x2")
    with pytest.raises(errors.MeshError):
        hf.on_mesh(Trainer, "cp", shape="auto")  # type: ignore[arg-type]
    with pytest.raises(errors.LayoutError, match='on_mesh layout: expected "auto", Contiguous'):
        hf.on_mesh(Trainer, None, "best")
    assert "create_accelerator_and_postprocess" in vars(Trainer)  # its own attributes are as they were
