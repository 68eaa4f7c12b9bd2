"""The loss and gradients of models with images on a mesh, beside those of one device."""

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import attnmesh as am
import attnmesh.hf as hf
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.images import image_spans
from tests.support.images.image_models import build_images, image_case
from tests.support.images.image_prompts import IMAGES, vision_model
from tests.support.models.checks import loss_and_gradients
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.tolerances import FLOAT64_LOSS, FLOAT64_MODEL

Batch = dict[str, Tensor]

IMAGE_TOKEN_ID = 90

SPANS = ("gemma3", "paligemma")
"""Models whose images see themselves whole, of `image_spans`."""

BUILT = ("llava", "idefics3", "internvl")
"""Models of `image_models`."""


@lru_cache
def model_of(kind: str, attention: str) -> PreTrainedModel:
    if kind in SPANS:
        return image_spans.model_of(kind, attention)
    if kind not in IMAGES:
        return build_images(image_case(kind), attention, torch.float64)
    return vision_model(kind, attention)


def labelled(batch: Batch) -> Batch:
    """Learn the text after the first three tokens."""
    ids = batch["input_ids"]
    unlearned = (ids == IMAGE_TOKEN_ID) | (batch["attention_mask"] == 0) | (torch.arange(ids.shape[1]) < 3)
    return {**batch, "labels": ids.masked_fill(unlearned, -100)}


def loss_and_gradients_in_place(model: PreTrainedModel, batch: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and gradients of a model that is kept for others."""
    model.zero_grad()
    found = loss_and_gradients(model, batch)
    model.eval()
    return found


@on_each_rank
def train_on_images(kind: str, shape: Shape, layout: Any, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    part = hf.shard_batch(batch, named_mesh(shape, AXES), layout)
    return loss_and_gradients_in_place(model_of(kind, "attnmesh"), part)


def check(kind: str, shape: Shape, batch: Batch, pool: Pool) -> dict[str, Tensor]:
    """Compare the loss and gradients of a mesh with those of one device, and return them."""
    expected, gradients = loss_and_gradients_in_place(model_of(kind, "sdpa"), {**batch, "use_cache": False})
    layout = am.Striped(4) if shape.ranks == 3 else am.Zigzag()
    losses, found = zip(*pool.run(shape.ranks, train_on_images, kind, shape, layout, batch), strict=True)
    assert sum(losses) / shape.ranks == pytest.approx(expected, rel=FLOAT64_LOSS)
    for name, whole in gradients.items():
        given = sum(part[name] for part in found) / shape.ranks
        assert (given - whole).abs().max() <= FLOAT64_MODEL * max(1, float(whole.abs().max())), name
    return gradients
