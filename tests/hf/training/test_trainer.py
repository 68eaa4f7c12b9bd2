"""Trainers on a mesh have the losses, metrics and weights of one process."""

from collections.abc import Iterator
from contextlib import contextmanager
from logging import INFO, NOTSET, getLogger
from logging.handlers import BufferingHandler
from multiprocessing import current_process, get_start_method, set_start_method
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import Trainer, TrainingArguments

import attnmesh.hf as hf
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.models import families
from tests.support.models.families import STOCK, prompt
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.training.trainers import (
    FSDP,
    LENGTH,
    launched,
    mesh_of,
    settings,
    train,
    train_on_rank,
    trainer_class,
)
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.tolerances import FLOAT32_SUMS, TRAINED


def check(pool: Pool, folder: Path, kind: str, family: str, data: int, shape: Shape, **options: Any) -> None:
    """Assert that a trainer on a mesh is that of one process, which gets the batches of all meshes."""
    tolerance = options.pop("tolerance", FLOAT32_SUMS)
    alone = {name: x for name, x in options.items() if "fsdp" not in name and name != "where"}
    alone["per_device_train_batch_size"] = 2 * data
    if kind == "Trainer":  # it weighs tokens over all processes; the evaluation of TRL weighs batches
        alone["per_device_eval_batch_size"] = 2 * data
    trainer, attention = trainer_class(kind), STOCK[family]
    if family == "gpt-oss" and "packing" in options:
        # The eager attention of transformers 5.23 mixes packed documents, so one device of our own is the reference.
        trainer, attention = hf.on_mesh(trainer, None), "attnmesh"
    logged, tokens, weights = train(kind, trainer, family, attention, str(folder / "1"), alone)
    ranks = data * shape.ranks
    answers = pool.run(ranks, train_on_rank, kind, family, data, shape, str(folder / "2"), options, deadline=350)
    for given, _, trained in answers:
        for name, values in logged.items():
            if tolerance > 1e-3 and name == "eval_exact":
                continue  # a rounded logit changes a prediction
            rel = 10 * tolerance if name == "grad_norm" else tolerance
            assert given[name] == pytest.approx(values, rel=rel, abs=tolerance), (name, given[name], values)
        assert all(torch.allclose(trained[name], x, atol=50 * tolerance) for name, x in weights.items())
    shares = [count for _, count, _ in answers]
    assert max(shares) < 1.25 * tokens / ranks or not tokens, "evaluation is not sharded"


MESHES = {"1x2x2": (1, Shape(1, 2, 2)), "2x2x1": (1, Shape(2, 2, 1)), "2 of 1x2x1": (2, Shape(1, 2, 1))}

SHORT = {
    ("Trainer", "gemma3", "2 of 1x2x1", False),
    ("SFTTrainer", "gpt-oss", "2x2x1", True),
}
"""Cases of `make test`. The others are marked long."""


def cases() -> list[Any]:
    """Return both trainers of language models, with and without packing, on each mesh."""
    return [
        pytest.param(*case, marks=[] if case in SHORT else pytest.mark.long)
        for kind, packings in (("Trainer", [False]), ("SFTTrainer", [False, True]))
        for family in ("llama", "gpt-oss", "gemma3", "qwen3")
        for mesh in MESHES
        for packing in packings
        if not (packing and MESHES[mesh][0] == 2)  # packs of one process are of twice as many sequences
        for case in [(kind, family, mesh, packing)]
    ]


@pytest.mark.parametrize(("kind", "family", "mesh", "packing"), cases())
def test_training_on_a_mesh_is_that_of_one_process(
    kind: str, family: str, mesh: str, packing: bool, pool: Pool, tmp_path: Path
) -> None:
    data, shape = MESHES[mesh]
    check(pool, tmp_path, kind, family, data, shape, **({"packing": True} if packing else {}))


RECIPE = {"bf16": True, "activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}
"""Common settings: float32 weights, autocast to bfloat16, and gradient checkpointing."""

PREFERENCES = 1e-4
"""Their losses are differences of sums of about 300, rounded in float32."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "preferences": ("DPOTrainer", {"tolerance": PREFERENCES}),
    "rewards": ("RewardTrainer", {"tolerance": PREFERENCES}),
    "recipe": ("Trainer", {**RECIPE, "tolerance": 2e-2}),  # three digits are what bfloat16 has
    "three heads": ("Trainer", {"changes": {"num_attention_heads": 3, "num_key_value_heads": 3}}),
    "counts of each rank": ("Trainer", {"average_tokens_across_devices": False}),
    "smooth labels": ("Trainer", {"label_smoothing_factor": 0.1}),
    "adapters": ("SFTTrainer", {"lora": True}),
}

WIDE = {"dtype": torch.float64, "router_aux_loss_coef": 0.9}
"""Rounding in float32 changes the choice of experts."""

VARIANTS["a layout and a shape for each batch"] = (
    "SFTTrainer",
    {"packing": True, "where": {"layout": "auto", "shape": "auto"}},
)
VARIANTS["fsdp"] = "Trainer", FSDP
VARIANTS["fsdp recipe"] = "Trainer", {**FSDP, **RECIPE, "tolerance": 2e-2, "data": 2}
VARIANTS["routers"] = "Trainer", {"family": "gpt-oss", "changes": {**WIDE, "output_router_logits": True}}
VARIANTS["routers of TRL"] = "SFTTrainer", {"family": "gpt-oss", "changes": WIDE, "packing": True}
VARIANTS["evaluation first"] = "Trainer", {"evaluates": True}
VARIANTS["stream"] = "Trainer", {"stream": True, "data": 2}

LONG = (
    "recipe",
    "rewards",
    "three heads",
    "smooth labels",
    "fsdp recipe",
    "routers of TRL",
    "counts of each rank",
    "stream",
    "routers",
    "evaluation first",
    "fsdp",
)
"""FSDP is also compared with stock transformers in test_trainer_checkpoints.py."""


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.long if x in LONG else []) for x in VARIANTS])
def test_variants_of_training_are_those_of_one_process(name: str, pool: Pool, tmp_path: Path) -> None:
    kind, options = VARIANTS[name]
    check(pool, tmp_path, kind, shape=Shape(1, 1, 2), **{"family": "llama", "data": 1, **options})


@on_each_rank
def change_a_packed_document(family: str) -> dict[str, bool]:
    """Change the first of two packed documents. Return whether the logits of each document are as before."""
    model, mesh = families.model(family, "attnmesh"), named_mesh(Shape(1, 1, 2), AXES)
    ids, positions = prompt(61), torch.cat((torch.arange(40), torch.arange(21)))[None]
    changed = ids.clone()
    changed[:, 3] = 96 - ids[:, 3]
    sharder = hf.on_mesh(Trainer, mesh)._make_sharder(None)
    sharder.install(model)
    with sharder.active(), torch.no_grad():
        before, after = (model(input_ids=x, position_ids=positions, use_cache=False).logits for x in (ids, changed))
    documents = {"first": slice(40), "second": slice(40, None)}
    return {name: torch.allclose(before[:, x], after[:, x], atol=FLOAT32_SUMS) for name, x in documents.items()}


@pytest.mark.parametrize("family", ["gpt-oss", "gemma3"])
def test_a_document_does_not_see_another_one_of_its_pack(family: str, pool: Pool) -> None:
    assert pool.run(2, change_a_packed_document, family) == [{"first": False, "second": True}] * 2


@on_each_rank
def put_two_models_on_meshes() -> tuple[list[tuple[int, ...]], list[str]]:
    """Return the shapes of the meshes of a model with many key heads and of one with a single one, and the log."""
    sharder = hf.on_mesh(Trainer, init_device_mesh("cpu", (4,), mesh_dim_names=("cp",)), shape="auto")._make_sharder(
        None
    )
    models = [families.model("llama", "attnmesh", num_attention_heads=24, num_key_value_heads=n) for n in (24, 1)]
    found = []
    logger = getLogger("attnmesh")
    handler = BufferingHandler(100)
    logger.addHandler(handler)
    logger.setLevel(INFO)
    with sharder.active(True, *models), torch.no_grad():
        for model in (*models, models[0]):
            logits = model(input_ids=prompt(1024), use_cache=False).logits
            found.append(tuple(logits.sequence.mesh.mesh.shape))
    logger.removeHandler(handler)
    logger.setLevel(NOTSET)
    return found, [record.getMessage() for record in handler.buffer]


def test_each_model_has_meshes_for_its_heads_and_logs_each_choice_once(pool: Pool) -> None:
    for rank, ((many, one, again), said) in enumerate(pool.run(4, put_two_models_on_meshes)):
        assert (many[0], one[0], again) == (4, 1, many)
        begin, end = "1,024 tokens in 1 document: Zigzag on", "ranks (heads x queries x keys)"
        assert said == [f"{begin} {'x'.join(map(str, shape))} {end}" for shape in (many, one) if rank == 0]


@contextmanager
def loader_workers() -> Iterator[None]:
    """Let a rank of the pool, which is a daemon, fork the workers of a data loader, as a rank of torchrun does.

    By itself it would have them forked by a process that imports PyTorch for each.
    """
    before = get_start_method()
    set_start_method("fork", force=True)
    try:
        with patch.dict(current_process()._config, {"daemon": False}):  # type: ignore[attr-defined]
            yield
    finally:
        set_start_method(before, force=True)


def mask_at_random(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return a batch of one row, some of whose labels the generator of PyTorch removes."""
    ids = rows[0]["input_ids"][None]
    return {"input_ids": ids, "labels": ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)}


@on_each_rank
def draw_by_a_worker(folder: str) -> list[list[int]]:
    """Return the labels of batches that a worker of the loader masks."""
    with launched(), loader_workers(), torch.random.fork_rng():
        torch.manual_seed(3)
        options = {"dataloader_num_workers": 1, "per_device_train_batch_size": 1}
        given = settings(TrainingArguments, folder, **options)
        made = hf.on_mesh(Trainer, mesh_of(2, Shape(1, 1, 2)))
        rows = [{"input_ids": prompt(LENGTH)[0]}] * 4
        model = families.model("llama", "attnmesh")
        trainer = made(model=model, args=given, train_dataset=rows, data_collator=mask_at_random)
        return [batch["labels"][0].tolist() for batch in trainer.get_train_dataloader()]


def test_workers_of_the_ranks_of_a_mesh_draw_the_same_numbers(pool: Pool, tmp_path: Path) -> None:
    first, *others = pool.run(4, draw_by_a_worker, str(tmp_path))
    assert others[0] == first
    assert others[1] == others[2] != first


@on_each_rank
def train_with_dropout_on_masked_labels(folder: str, workers: int) -> list[float]:
    """Return the losses of two epochs of odd lengths, whose collator draws numbers, as dropout does."""
    with launched(), loader_workers():
        model = families.model("llama", "attnmesh", num_hidden_layers=1)
        model.model.norm.register_forward_hook(lambda _, args, output: torch.nn.functional.dropout(output, 0.2))
        options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "max_steps": 6}
        given = settings(TrainingArguments, folder, dataloader_num_workers=workers, **options)
        rows = [{"input_ids": prompt(17 + 2 * number)[0]} for number in range(3)]
        made: Any = hf.on_mesh(Trainer, named_mesh(Shape(1, 1, 2), AXES))
        trainer = made(model=model, args=given, train_dataset=rows, data_collator=mask_at_random)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("workers", [0, 1])
def test_ranks_that_drop_unequally_many_values_go_on_with_the_same_batches(
    workers: int, pool: Pool, tmp_path: Path
) -> None:
    one, other = pool.run(2, train_with_dropout_on_masked_labels, str(tmp_path), workers)
    assert len(one) == 6
    assert one == other


@on_each_rank
def draw_around_calls(share: float) -> tuple[list[Tensor], float, bool]:
    """Return what two calls have dropped, a number that is drawn after them, and whether they have drawn any."""
    model, dropped = families.model("llama", "attnmesh", num_hidden_layers=1), []

    def drop(module: Any, args: Any, output: Tensor) -> Tensor:
        output = torch.nn.functional.dropout(output, share)
        dropped.append(output[0, :16] == 0)
        return output

    model.model.norm.register_forward_hook(drop)
    sharder = hf.on_mesh(Trainer, named_mesh(Shape(1, 1, 2), AXES))._make_sharder(None)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        before = torch.get_rng_state()
        with sharder.active(True, model):
            for _ in range(2):
                model(input_ids=prompt(33))
        has_drawn = not torch.equal(torch.get_rng_state(), before)
        return dropped, torch.rand(()).item(), has_drawn


def test_ranks_drop_at_their_own_places_and_then_draw_the_same(pool: Pool) -> None:
    (one, next_one, _), (other, next_other, _) = pool.run(2, draw_around_calls, 0.5)
    assert next_one == next_other
    for first, second in ((one[0], other[0]), (one[0], one[1])):
        assert 0.4 < (first == second).float().mean() < 0.6


def test_a_call_that_draws_no_numbers_leaves_the_generator_as_it_was(pool: Pool) -> None:
    assert [has_drawn for *_, has_drawn in pool.run(2, draw_around_calls, 0.0)] == [False, False]


@on_each_rank
def go_on_after_an_error_of_another_model(shape: Shape) -> tuple[str, float]:
    """Return the logits and the loss of a model after a call of another one that raised in a layer."""
    with launched():
        from accelerate import Accelerator

        accelerator, mesh, ids = Accelerator(cpu=True), named_mesh(shape, AXES), prompt(33)
        first, second = (
            hf.prepare(accelerator, families.model(family, "attnmesh"), mesh) for family in ("llama", "qwen3")
        )
        first.model.layers[1].register_forward_pre_hook(without_memory)
        with pytest.raises(MemoryError):
            first(input_ids=ids)
        assert accelerator.sharder.call is None
        output = second(input_ids=ids, labels=ids)
        return type(output.logits).__name__, output.loss.item()


def without_memory(*_: Any) -> None:
    raise MemoryError


def test_a_call_that_raised_leaves_no_shards_to_another_model(pool: Pool) -> None:
    ids = prompt(33)
    expected = families.model("qwen3", "sdpa")(input_ids=ids, labels=ids).loss.item()
    for given in pool.run(2, go_on_after_an_error_of_another_model, Shape(1, 1, 2)):
        assert given == ("ShardedOutput", pytest.approx(expected, rel=TRAINED))
