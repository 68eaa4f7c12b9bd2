"""NEFTune adds to a shard the noise that its tokens have in the whole sequence, and other noise on each rank."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments
from transformers.integrations.neftune import neftune_post_forward_hook

import attnmesh.hf as hf
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.models import families
from tests.support.models.families import SIZES, prompt
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.training.trainers import launched, settings
from tests.support.truth.mesh_problems import named_mesh

LENGTH, STRENGTH = 64, 5.0
LARGEST = STRENGTH / (LENGTH * SIZES["hidden_size"]) ** 0.5


def noisy_model() -> tuple[Any, list[Tensor]]:
    """Return a model whose embeddings are zero, and what its first layer gets: noise."""
    model, seen = families.model("llama", "attnmesh", num_hidden_layers=1).train(), []
    torch.nn.init.zeros_(model.get_input_embeddings().weight)
    model.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
    return model, seen


def add_hook(model: Any) -> Any:
    embedding = model.get_input_embeddings()
    embedding.neftune_noise_alpha = STRENGTH
    return embedding.register_forward_hook(neftune_post_forward_hook)


@on_each_rank
def add_noise(compiles: bool) -> list[Tensor]:
    """Return the noise of a shard, of another call, of a whole sequence and of a shard without the hook."""
    model, seen = noisy_model()
    handle = add_hook(model)
    called = torch.compile(model, backend="eager") if compiles else model
    torch.manual_seed(1)
    batch = {"input_ids": prompt(LENGTH)}
    mesh = named_mesh(Shape(1, 1, 2), AXES)
    for where in (mesh, mesh, None):
        called(**hf.shard_batch(batch, where))
    handle.remove()
    called(**hf.shard_batch(batch, mesh))
    return seen


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.long)])
def test_noise_of_a_hook_has_the_strength_of_the_whole_length(compiles: bool, pool: Pool) -> None:
    (one, again, whole, plain), (other, *_) = pool.run(2, add_noise, compiles)
    for noise in (one, again, whole, other):
        assert 0.95 * LARGEST < noise.abs().max() <= LARGEST
    assert not torch.isclose(one, other).any(dim=-1).all(), "ranks draw the same noise"
    assert not torch.equal(one, again)
    assert len(whole[0]) == LENGTH
    assert not plain.any()


@on_each_rank
def train_with_noise(folder: str) -> list[Tensor]:
    with launched():
        model, seen = noisy_model()
        given = settings(
            TrainingArguments,
            folder,
            max_steps=1,
            gradient_accumulation_steps=1,
            learning_rate=0.0,
            neftune_noise_alpha=STRENGTH,
        )
        rows = [{"input_ids": prompt(LENGTH, seed=n)[0], "labels": prompt(LENGTH, seed=n)[0]} for n in range(2)]
        trainer: Any = hf.on_mesh(Trainer, named_mesh(Shape(1, 1, 2), AXES))
        trainer(model=model, args=given, train_dataset=rows).train()
        return seen


def test_noise_of_a_trainer_has_the_strength_of_the_whole_length(pool: Pool, tmp_path: Any) -> None:
    (one,), (other,) = pool.run(2, train_with_noise, str(tmp_path))
    for noise in (one, other):
        assert 0.95 * LARGEST < noise.abs().max() <= LARGEST
    assert not torch.equal(one, other)
