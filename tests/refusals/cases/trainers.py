"""Trainings of a step that are refused, before it or in it: each rank has been asked for the same."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainingArguments

import attnmesh.hf as hf
from attnmesh.errors import ArgumentError, KernelError, MaskError, MeshError
from tests.refusals.refusal import Place, Table
from tests.support.models import families
from tests.support.training.trainers import FSDP, collate, examples, fsdp_on_cpus, launched, settings

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


def evaluate(trainer: Trainer) -> None:
    trainer.evaluate(examples(2))  # type: ignore[arg-type]


def nothing(_: object) -> None:
    """Do nothing to a model or a trainer."""


def train(
    at: Place,
    attention: str = "attnmesh",
    rows: Callable[[int], list[dict[str, Any]]] = lambda rank: examples(20),
    collator: Callable[[list[dict[str, Any]]], Batch] = collate,
    options: Callable[[], dict[str, Any]] = dict,
    change: Callable[[PreTrainedModel], None] = nothing,
    before: Callable[[Trainer], None] = nothing,
) -> float:
    """Train for a step, and return the loss."""
    arguments, model = options(), families.model("llama", attention)
    change(model)
    with launched(), fsdp_on_cpus() if arguments.get("fsdp") else nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = settings(TrainingArguments, "/nonexistent", max_steps=1, **arguments)
        made: Any = hf.on_mesh(Trainer, at.mesh)
        trainer = made(model=model, args=given, train_dataset=rows(at.rank), data_collator=collator)
        before(trainer)
        return float(trainer.train().training_loss)


ON_ALL_RANKS: Table = {
    train: [
        (
            {"rows": lambda rank: examples(first=rank)},
            MeshError,
            r"shard_batch: expected the same call on every rank, given:",
        ),
        (
            {"collator": with_unknown_token},
            ArgumentError,
            r"attnmesh.hf on_mesh input_ids: expected tokens from 0 to 96, the model's voc",
        ),
        (
            {"collator": with_unknown_label},
            ArgumentError,
            r"attnmesh.hf labels: expected tokens from 0 to 96, or -100, given 999. Fix",
        ),
        (
            {"collator": padded_on_the_left},
            MaskError,
            r"shard_batch attention_mask: expected padding on the right, if any, given",
        ),
        (
            {"collator": with_images},
            KernelError,
            r"train images: expected a model that merges images into the embeddings of its text model, "
            r"given LlamaForCausalLM. Fix: leave token_type_ids and images out",
        ),
        (
            {"change": spread_over_devices},
            KernelError,
            r"on_mesh: expected a model on one device per rank, given a device_map of 2 devices",
        ),
        (
            {"options": with_context_parallelism},
            KernelError,
            r"on_mesh: expected no ParallelismConfig\(cp_size=\) beside a mesh, given 2",
        ),
        (
            {"options": with_tensor_parallelism},
            KernelError,
            r"on_mesh: expected no ParallelismConfig\(tp_size=\) beside a mesh, given 2",
        ),
        (
            {"options": lambda: {"torch_compile": True}},
            KernelError,
            r"on_mesh torch_compile: expected a model that is not",
        ),
        (
            {"options": lambda: {"eval_use_gather_object": True}},
            KernelError,
            r"on_mesh: expected evaluation that gathers",
        ),
        (
            {"options": lambda: {"train_sampling_strategy": "batch_rebalance"}},
            KernelError,
            r"on_mesh train_sampling_strategy: expected batches that all ranks of a mesh get, given",
        ),
        (
            {"options": lambda: {"accelerator_config": {"dispatch_batches": True}}},
            KernelError,
            r"on_mesh: expected data that each rank reads, given dispatch_batches or split_batches. Fix",
        ),
        (
            {"options": lambda: {"fsdp": True, "fsdp_config": {"version": 1, "sync_module_states": False}}},
            KernelError,
            r"on_mesh: expected DDP, FSDP2 or one process, given FSDP1. Fix: use DDP or FSDP2",
        ),
        (
            {"options": lambda: FSDP, "before": evaluate},
            KernelError,
            r"evaluate: expected a model whose weights train\(\) has sharded, given one before train\(\). Fix: ",
        ),
        ({"attention": "sdpa"}, KernelError, r"on_mesh: expected a model with attn_implementation 'attn"),
    ],
}
