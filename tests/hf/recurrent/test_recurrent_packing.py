"""Recurrent layers under packing: each document has the loss and gradients that it has alone in stock transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

import attnmesh as am
import attnmesh.hf as hf
from attnmesh.core.layout import Layout
from attnmesh.mesh.shapes import Shape
from tests.support.models.checks import AXES, DoublePrecision, prompt
from tests.support.models.recurrent import (
    EXCHANGED,
    FAMILIES,
    TOLERANCE,
    check_trained,
    model_of,
    tolerance_of,
    trained,
)
from tests.support.models.tiny_models import Case, build
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.training.trainers import launched, sft, trainer_class
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.tolerances import FLOAT32_SUMS

Documents = tuple[int, ...]
"""Tokens of each document of a row."""

LONG: Documents = (1, 14, 29, 1, 17)
"""Documents of one token, that begin inside a shard and at its edge, and that lie on several ranks."""

PLACES: tuple[tuple[Shape, Layout, Documents], ...] = (
    (Shape(1, 2, 1), am.Zigzag(), LONG),  # parts of 15, 16, 15 and 16 tokens
    (Shape(1, 1, 1), am.Contiguous(), LONG),
    (Shape(1, 3, 1), am.Zigzag(), LONG),  # the document of 29 tokens covers two parts
    (Shape(1, 1, 2), am.Contiguous(), (31, 31)),  # no document is on both ranks
    (Shape(1, 2, 2), am.Zigzag(), (1, 3, 1, 1)),  # parts of 0 and 1 tokens
    (Shape(1, 1, 3), am.Contiguous(), LONG),  # shards of 21, 21 and 20 tokens
)

SHORT = ("qwen3_next", "lfm2", "bamba", "jamba", "kimi_linear", "mamba", "minimax", "recurrent_gemma")
"""A family of each rule, which every run trains at one place. The long run trains all families at all places."""


def places() -> list[Any]:
    """Return each family at each place."""
    short = [(family, PLACES[-number % len(PLACES)]) for number, family in enumerate(SHORT)]
    return [
        pytest.param(family, *place, marks=[] if (family, place) in short else [pytest.mark.long])
        for family in FAMILIES
        for place in PLACES
    ]


def packed(documents: Documents) -> dict[str, Any]:
    """Return a batch of two rows, packed alike. No document learns the first token of the next."""
    ids, positions = prompt(sum(documents), batch=2), torch.cat([torch.arange(n) for n in documents])[None]
    return {"input_ids": ids, "labels": ids.masked_fill(positions == 0, -100), "position_ids": positions}


def trained_alone(model: PreTrainedModel, documents: Documents) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and gradients of stock transformers, which computes the documents one by one."""
    batch, loss = packed(documents), 0.0
    rest = {"num_items_in_batch": (batch["labels"] != -100).sum(), "use_cache": False}
    for ids, labels in zip(*(batch[name].split(documents, 1) for name in ("input_ids", "labels")), strict=True):
        more, gradients = trained(model, {"input_ids": ids, "labels": labels, **rest})
        loss += more
    return loss, gradients


@on_each_rank
def train_on_ranks(family: str, shape: Shape, layout: Layout, documents: Documents) -> tuple[float, dict[str, Tensor]]:
    mesh = named_mesh(shape, AXES) if shape.ranks > 1 else None
    return trained(model_of(family), hf.shard_batch(packed(documents), mesh, layout))


@pytest.mark.parametrize(("family", "shape", "layout", "documents"), places())
def test_loss_and_gradients_are_those_of_each_document_alone(
    family: str, shape: Shape, layout: Layout, documents: Documents, pool: Pool
) -> None:
    expected = trained_alone(model_of(family, "eager"), documents)
    results = pool.run(shape.ranks, train_on_ranks, family, shape, layout, documents)
    check_trained(results, *expected, tolerance_of(family))


@on_each_rank
def train_by_heads(name: str, layout: Layout) -> tuple[float, dict[str, Tensor]]:
    batch = hf.shard_batch(packed(LONG), named_mesh(Shape(1, 2, 1), AXES), layout, exchange="heads")
    return trained(build(EXCHANGED[name], "attnmesh", torch.float64), batch)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen3_next", am.Zigzag()),
        ("bamba", am.Contiguous()),
        pytest.param("kimi_linear", am.Zigzag(), marks=pytest.mark.long),
        ("lfm2", am.Contiguous()),
    ],
)
def test_heads_are_exchanged_for_each_document(name: str, layout: Layout, pool: Pool) -> None:
    expected = trained_alone(build(EXCHANGED[name], "eager", torch.float64), LONG)
    check_trained(pool.run(2, train_by_heads, name, layout), *expected, TOLERANCE)


RECURRENT = {
    "qwen3_5_text": {"layer_types": ["linear_attention"] * 2, "num_hidden_layers": 2},
    "lfm2": {"layer_types": ["conv"] * 2, "num_hidden_layers": 2},
    "recurrent_gemma": {"block_types": ["recurrent"], "num_hidden_layers": 2},
    "mamba": {},
    "mamba2": {},
}
"""Models without attention and experts, which multiply numbers of all documents at once."""


@on_each_rank
def change_a_document(family: str) -> dict[str, bool]:
    """Return whether the third of five documents alone is NaN if its token is, and no bit of the others changes."""
    model, batch = build(Case(family, family, RECURRENT[family]), "attnmesh", torch.float64), packed(LONG)
    mesh, document = named_mesh(Shape(1, 1, 3), AXES), torch.arange(5).repeat_interleave(torch.tensor(LONG))
    batch["input_ids"][:, document == 2] = 0
    right = {}
    for layout in (am.Contiguous(), am.Zigzag()):
        logits = []
        for value in (0.5, float("nan")):
            with torch.no_grad(), DoublePrecision():
                model.get_input_embeddings().weight[0] = value
                logits.append(model(**hf.shard_batch(batch, mesh, layout)).logits[..., 1:])  # the first may be tied
        before, after = logits
        third = (document == 2)[layout.positions(sum(LONG), 3, dist.get_rank())]
        right[f"others, {layout}"] = torch.equal(before[:, ~third], after[:, ~third])
        right[f"third, {layout}"] = bool(after[:, third].isnan().all())
    return right


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[pytest.mark.long] if family == "mamba" else []) for family in RECURRENT]
)
def test_a_document_changes_no_bit_of_another_one(family: str, pool: Pool) -> None:
    for right in pool.run(3, change_a_document, family):
        assert right == dict.fromkeys(right, True)


def losses(trainer: Any, attention: str, folder: Path, **options: Any) -> list[float]:
    """Return the losses of each step of an `SFTTrainer`."""
    model = model_of("olmo_hybrid", attention, torch.float32).train()
    made = sft(trainer, model, str(folder), eval_strategy="no", max_length=None, **options)
    made.train()
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


@on_each_rank
def train_by_trainer(folder: Path) -> list[float]:
    with launched():
        trainer = hf.on_mesh(trainer_class("SFTTrainer"), named_mesh(Shape(1, 1, 2), AXES))
        return losses(trainer, "attnmesh", folder, padding_free=True)


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_packs_what_one_process_pads(pool: Pool, tmp_path: Path) -> None:
    expected = losses(trainer_class("SFTTrainer"), "eager", tmp_path)
    for found in pool.run(2, train_by_trainer, tmp_path):
        assert found == pytest.approx(expected, rel=FLOAT32_SUMS)
