"""Training on a mesh that stops and goes on from its files has the losses and weights of one that did not stop."""

import random
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments

import attnmesh.hf as hf
from attnmesh.errors import UnforeseenError
from attnmesh.mesh.shapes import Shape
from tests.support.models import families
from tests.support.models.families import prompt
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.training.trainers import (
    FSDP,
    collate,
    examples,
    fsdp_on_cpus,
    launched,
    mesh_of,
    settings,
    train_on_rank,
)
from tests.support.truth.tolerances import worst

PAIR = Shape(1, 1, 2)

SAVES: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "no", "max_steps": 2}
"""A step after the save has its loss by the weights and its weights by the optimizer's state."""


def saves_of(kind: str) -> dict[str, Any]:
    """Return the settings of a trainer that saves: "DDP", or FSDP2 with this kind of state dict."""
    if kind == "DDP":
        return SAVES
    return {**SAVES, **FSDP, "fsdp_config": {**FSDP["fsdp_config"], "state_dict_type": f"{kind}_STATE_DICT"}}


def check_equal(given: list[Any], expected: list[Any], tolerance: float) -> None:
    """Assert that the ranks of a training logged these losses and hold these weights."""
    logged, _, weights = expected[0]
    for losses, _, trained in given:
        assert losses["loss"] == pytest.approx(logged["loss"], rel=tolerance, abs=0)
        assert all(torch.allclose(trained[name], x, rtol=0, atol=tolerance) for name, x in weights.items())


RESUMED = {
    "DDP": ("Trainer", 1, saves_of("DDP")),
    "DDP, 2 meshes": ("Trainer", 2, saves_of("DDP")),
    "FULL": ("Trainer", 1, saves_of("FULL")),
    "FULL, 2 meshes": ("Trainer", 2, saves_of("FULL")),
    "SHARDED": ("Trainer", 2, saves_of("SHARDED")),
    "adapters, DDP": ("SFTTrainer", 1, {**saves_of("DDP"), "lora": True}),
    "adapters, FULL": ("SFTTrainer", 1, {**saves_of("FULL"), "lora": True}),
    "adapters, SHARDED": ("SFTTrainer", 2, {**saves_of("SHARDED"), "lora": True}),
}
"""Trainer, number of meshes and settings."""

LONG = ("DDP", "DDP, 2 meshes", "FULL", "FULL, 2 meshes", "SHARDED", "adapters, DDP", "adapters, SHARDED")


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.long if x in LONG else []) for x in RESUMED])
def test_a_resumed_training_continues_as_if_it_had_not_stopped(name: str, pool: Pool, tmp_path: Path) -> None:
    kind, data, options = RESUMED[name]
    call = train_on_rank, kind, "llama", data, PAIR
    whole = pool.run(data * 2, *call, str(tmp_path), options)
    resumed = {**options, "resume": str(tmp_path / "checkpoint-1")}
    check_equal(pool.run(data * 2, *call, str(tmp_path / "again"), resumed), whole, 0)


CROSSED = (("meshes", "stock"), ("stock", "pair"))

OTHERS = (("stock", "meshes"), ("meshes", "mesh"), ("stock", "mesh"))
"""Trainings that save, and those that go on."""


@pytest.mark.parametrize(
    ("kind", "passes"),
    [
        ("FULL", CROSSED),
        pytest.param("FULL", OTHERS, marks=pytest.mark.long),
        pytest.param("SHARDED", CROSSED + OTHERS, marks=pytest.mark.long),
    ],
)
def test_checkpoints_pass_between_meshes_and_stock_transformers(
    kind: str, passes: tuple[tuple[str, str], ...], pool: Pool, tmp_path: Path
) -> None:
    """Train on two meshes of two ranks, on two processes of stock transformers, and on one mesh, of two or four ranks.

    All get the same batches.
    """
    options = saves_of(kind)
    runs: dict[str, tuple[int, int, Shape | None, dict[str, Any]]] = {
        "meshes": (4, 2, PAIR, {}),
        "stock": (2, 2, None, {}),
        "pair": (2, 1, PAIR, {"per_device_train_batch_size": 4}),
        "mesh": (4, 1, Shape(1, 2, 2), {"per_device_train_batch_size": 4}),
    }

    def trained(name: str, folder: str, **more: Any) -> list[Any]:
        ranks, data, shape, own = runs[name]
        return pool.run(
            ranks, train_on_rank, "Trainer", "llama", data, shape, str(tmp_path / folder), options | own | more
        )

    whole = trained("stock", "stock")
    check_equal(trained("meshes", "meshes"), whole, 1e-5)
    for saved, name in passes:
        resumed = trained(name, f"{name} from {saved}", resume=str(tmp_path / saved / "checkpoint-1"))
        check_equal(resumed, whole, 1e-5)


@pytest.mark.long
def test_the_best_model_is_loaded_at_the_end_and_saved_whole(pool: Pool, tmp_path: Path) -> None:
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}  # the first
    best |= {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "learning_rate": 0.3, "max_steps": 5}
    for kind in ("FULL", "SHARDED"):
        options = {**saves_of(kind), **best, "final": str(tmp_path / kind / "final")}
        answers = pool.run(4, train_on_rank, "Trainer", "llama", 2, PAIR, str(tmp_path / kind), options)
        first, last = (load_file(tmp_path / "FULL" / f"checkpoint-{step}" / "model.safetensors") for step in (2, 5))
        saved = load_file(tmp_path / kind / "final" / "model.safetensors")
        assert worst(float((first[name] - x).abs().max()) for name, x in last.items()) > 0.1
        for _, _, weights in answers:
            assert all(torch.equal(weights[name], x) and torch.equal(saved[name], x) for name, x in first.items())


Numbers = tuple[float, float, float]
"""Numbers that Python, NumPy and PyTorch draw."""


def drawn() -> Numbers:
    """Draw a number of each generator."""
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def mask_by_python(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return a batch of one row, some of whose labels the generators of Python, NumPy and PyTorch remove."""
    ids = rows[0]["input_ids"][None]
    return {"input_ids": ids, "labels": ids.masked_fill(torch.rand(ids.shape) * 3 < sum(drawn()) / 3, -100)}


@on_each_rank
def train_on_masked_labels(data: int, shape: Shape, folder: str, resume: str | None) -> tuple[list[float], Numbers]:
    """Return the losses of four steps, whose collator draws numbers, and what is drawn after them."""
    with launched():
        options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "max_steps": 4}
        given = settings(TrainingArguments, folder, save_strategy="steps", save_steps=2, **options)
        trainer = hf.on_mesh(Trainer, mesh_of(data, shape))(
            model=families.model("llama", "attnmesh", num_hidden_layers=1), args=given, data_collator=mask_by_python,
            train_dataset=[{"input_ids": prompt(17 + 2 * number)[0]} for number in range(9)],
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], drawn()


@pytest.mark.parametrize(
    ("data", "saved", "shape"),
    [(1, PAIR, Shape(1, 1, 3)), pytest.param(2, PAIR, Shape(1, 2, 2), marks=pytest.mark.long)],
    ids=["more ranks", "fewer meshes"],
)
def test_ranks_of_a_mesh_draw_the_same_where_other_ranks_saved(
    data: int, saved: Shape, shape: Shape, pool: Pool, tmp_path: Path
) -> None:
    pool.run(data * saved.ranks, train_on_masked_labels, data, saved, str(tmp_path), None)
    resume = str(tmp_path / "checkpoint-2")
    first, *others = pool.run(shape.ranks, train_on_masked_labels, 1, shape, str(tmp_path / "again"), resume)
    assert others == [first] * (shape.ranks - 1)


# --- accelerate ---


def loop_results(mesh: Any, folder: str, first: int = 0) -> tuple[list[float], Any, Any]:
    """Return the losses of three steps, or of the last one from a saved state, with the accelerator and the model."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="FULL_STATE_DICT")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, mixed_precision="bf16")
    model = hf.prepare(accelerator, families.model("qwen3", "attnmesh").train(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-2)
    loader = torch.utils.data.DataLoader(examples(12), batch_size=2, collate_fn=collate)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if first:
        accelerator.load_state(folder)
    losses = []
    for step, batch in enumerate(loader):
        if step < first:
            continue
        outputs = model(**batch)
        loss = outputs.loss
        gathers = outputs.logits.gathered is not None
        assert not gathers, "FSDP2 gathers logits that nobody reads"
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        if step == 1:
            accelerator.save_state(folder)
    return losses, accelerator, model


class Loops(NamedTuple):
    """The losses of a whole and of a resumed loop, and the weights."""

    losses: list[float]
    resumed_losses: list[float]
    weights: dict[str, Tensor]


@on_each_rank
def save_in_a_loop(folder: str) -> Loops:
    from accelerate.utils import save_fsdp_model

    mesh = mesh_of(2, PAIR)
    with launched(), fsdp_on_cpus():
        whole, accelerator, model = loop_results(mesh, folder)
        assert all(isinstance(x, DTensor) for x in model.parameters())
        save_fsdp_model(accelerator.state.fsdp_plugin, accelerator, model, f"{folder}/by hand")
    with launched(), fsdp_on_cpus():
        resumed, _, model = loop_results(mesh, folder, 2)
    return Loops(whole, resumed, {name: x.full_tensor() for name, x in model.state_dict().items()})


def test_a_loop_with_accelerate_continues_from_its_state(pool: Pool, tmp_path: Path) -> None:
    answers = pool.run(4, save_in_a_loop, str(tmp_path))
    by_hand = torch.load(tmp_path / "by hand" / "pytorch_model_fsdp.bin", weights_only=True)
    for loops in answers:
        assert loops.resumed_losses == loops.losses[2:]
        assert all(torch.equal(by_hand[name], x) for name, x in loops.weights.items())


@on_each_rank
def count_after_loading(shape: Shape, folder: str, saves: bool) -> tuple[int, bool, Numbers]:
    """Return the step in an accumulation, whether the next one steps the optimizer, and what is drawn."""
    from accelerate import Accelerator

    with launched():
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = hf.prepare(accelerator, families.model("llama", "attnmesh", num_hidden_layers=1), mesh_of(1, shape))
        model = accelerator.prepare(model)
        if saves:
            with accelerator.accumulate(model):
                accelerator.save_state(folder)
        else:
            accelerator.load_state(folder)
        with accelerator.accumulate(model):
            return accelerator.step, accelerator.sync_gradients, drawn()


def test_more_ranks_go_on_within_an_accumulation(pool: Pool, tmp_path: Path) -> None:
    """By itself accelerate counts from 0 on the ranks that saved nothing: only some would average gradients."""
    saved = pool.run(2, count_after_loading, PAIR, str(tmp_path), True)
    assert [step for step, *_ in saved] == [2, 2]
    assert pool.run(3, count_after_loading, Shape(1, 1, 3), str(tmp_path), False) == [saved[0]] * 3


@on_each_rank
def catch_error_of_one_rank(folder: str) -> str:
    """Return the error of each rank where rank 1 finds no state."""
    from accelerate import Accelerator

    with launched():
        accelerator = Accelerator(cpu=True)
        model = hf.prepare(accelerator, families.model("llama", "attnmesh", num_hidden_layers=1), mesh_of(1, PAIR))
        accelerator.prepare(model)
        accelerator.save_state(folder)
        with pytest.raises((ValueError, UnforeseenError)) as caught:
            accelerator.load_state(f"{folder}/nothing" if dist.get_rank() == 1 else folder)
        return f"{type(caught.value).__name__}: {caught.value}"


def test_all_ranks_raise_if_one_cannot_load_a_state(pool: Pool, tmp_path: Path) -> None:
    """Rank 0 would go on, and wait for the other in its next exchange."""
    first, second = pool.run(2, catch_error_of_one_rank, str(tmp_path))
    assert second.startswith("ValueError: Tried to find")
    assert first.startswith("UnforeseenError: load_state: expected what each rank can do")
    assert second in first


@on_each_rank
def record_warnings_of_accelerator(asked: bool) -> list[str]:
    """Return the warnings of attnmesh when an accelerator on CPUs is put on a mesh."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if asked else None
    with launched(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hf.prepare(Accelerator(cpu=True, fsdp_plugin=plugin), families.model("qwen3", "attnmesh"), mesh_of(1, PAIR))
    return [str(one.message) for one in caught if "attnmesh" in one.filename or "FSDP" in str(one.message)]


def test_a_user_hears_once_that_weights_are_whole_on_cpus(pool: Pool) -> None:
    message = "accelerate ignores FSDP on CPUs: DDP keeps all weights on each rank"
    assert pool.run(2, record_warnings_of_accelerator, True) == [[message], []]
    assert pool.run(2, record_warnings_of_accelerator, False) == [[], []]
