"""`Trainer` has the losses of one process on a mesh, with `shard_batch` in `compute_loss`."""

import os
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import attnmesh.hf as hf
from attnmesh.mesh.shapes import Shape
from tests.support import families
from tests.support.families import prompt
from tests.support.mesh_problems import named_mesh
from tests.support.pool import Pool

AXES = ("heads", "queries", "keys")
STEPS = 3


class OneLoader(Trainer):
    """A trainer with the same batches on every rank, in order."""

    def get_train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_dataset, batch_size=self.args.train_batch_size, collate_fn=self.data_collator)


class OnMesh(OneLoader):
    """A trainer that shards each batch when it computes the loss."""

    mesh: Any = None

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        return super().compute_loss(model, hf.shard_batch(inputs, self.mesh), *args, **more)


def examples() -> list[dict[str, Any]]:
    """Return sequences with different numbers of labels."""
    sequences = []
    for number in range(4 * STEPS):
        ids = prompt(45, seed=number)[0]
        labels = ids.clone()
        labels[: 3 * number] = -100
        sequences.append({"input_ids": ids, "labels": labels})
    return sequences


def losses(kind: type[Trainer], family: str, attention: str, folder: str, **options: Any) -> list[float]:
    model = families.model(family, attention).train()
    arguments = TrainingArguments(
        output_dir=folder, use_cpu=True, max_steps=STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, learning_rate=1e-3, seed=1, **options,
    )  # fmt: skip
    trainer = kind(model=model, args=arguments, train_dataset=examples())
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


RECIPE = {"bf16": True, "activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}
"""Common settings: float32 weights, autocast to bfloat16, and gradient checkpointing."""

CASES: dict[str, tuple[dict[str, Any], float]] = {
    "plain": ({}, 2e-5),
    "counts of each rank": ({"average_tokens_across_devices": False}, 2e-5),
    "recipe": (RECIPE, 2e-2),  # three digits are what bfloat16 has; both round, in another order
}


def on_rank(shape: Shape, family: str, folder: str, options: dict[str, Any]) -> list[float]:
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    variables = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}
    os.environ.update({name: str(value) for name, value in variables.items()})
    try:
        OnMesh.mesh = named_mesh(shape, AXES)
        return losses(OnMesh, family, "attnmesh", folder, **options)
    finally:
        from accelerate.state import AcceleratorState, PartialState

        AcceleratorState._reset_state()
        PartialState._shared_state.clear()
        for name in variables:
            os.environ.pop(name)


def sampled() -> list[Any]:
    """Return each case on one mesh; the rest is marked long."""
    meshes = {"llama": Shape(1, 2, 2), "gpt-oss": Shape(1, 1, 2)}
    short = {("recipe", "llama"), ("plain", "gpt-oss"), ("counts of each rank", "gpt-oss")}
    return [
        pytest.param(
            name, family, shape, id=f"{name}-{family}", marks=[] if (name, family) in short else pytest.mark.long
        )
        for name in CASES
        for family, shape in meshes.items()
    ]


@pytest.mark.parametrize(("name", "family", "shape"), sampled())
def test_losses_are_those_of_one_process(name: str, family: str, shape: Shape, pool: Pool, tmp_path: Any) -> None:
    options, tolerance = CASES[name]
    expected = losses(OneLoader, family, families.STOCK[family], str(tmp_path), **options)
    answers = pool.run(shape.ranks, on_rank, shape, family, str(tmp_path), options, deadline=350)
    assert all(answer == answers[0] for answer in answers)
    assert answers[0] == pytest.approx(expected, rel=tolerance)
