"""Training of a transformer on a mesh is training on one device."""

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig
from torch import Tensor, nn

from attnmesh.diffusers import disable, enable
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.models.diffusion import MODELS
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.tolerances import FLOAT32_SUMS, worst

STEPS = 4


def losses(model: nn.Module, on_mesh: bool) -> list[float]:
    """Losses of some steps of training a low-rank adapter on videos of two lengths in turn."""
    learned = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=0.02)
    found = []
    for step in range(STEPS):
        given = MODELS["wan"].given(4 + step % 2, batch=2)
        out = model(**given).sample
        loss = (out - given["hidden_states"]).square().mean()
        loss.backward()
        for parameter in learned:
            assert parameter.grad is not None
            if on_mesh:
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def adapted() -> nn.Module:
    model = MODELS["wan"].model()
    model.requires_grad_(False)
    torch.manual_seed(3)
    model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    return model.train()


@on_each_rank
def train_on_mesh(shape: Shape) -> list[float]:
    model = adapted()
    enable(model, named_mesh(shape, AXES))
    found = losses(model, on_mesh=True)
    disable(model)
    return found


@pytest.mark.parametrize("shape", [Shape(1, 2, 2), pytest.param(Shape(2, 2, 1), marks=pytest.mark.long)], ids=str)
def test_training_of_an_adapter_is_that_on_one_device(pool: Pool, shape: Shape) -> None:
    expected = losses(adapted(), on_mesh=False)
    assert expected[-1] < expected[0]
    for found in pool.run(4, train_on_mesh, shape):
        assert found == pytest.approx(expected, abs=FLOAT32_SUMS)


def gradients(name: str, model: nn.Module) -> list[Tensor]:
    """Gradients of two forward passes of other sizes, whose backward passes come later.

    The second has as many tokens in all as the first: fewer of the image, and more of the text.
    """
    first, second = MODELS[name].given(5, 1, torch.float64), MODELS[name].given(4, 1, torch.float64)
    for key in ("encoder_hidden_states", "encoder_attention_mask", "txt_ids"):
        if key in second:
            dim = 0 if key == "txt_ids" else 1
            text = [second[key], second[key].narrow(dim, 0, 2)] * 2
            second[key] = torch.cat(text, dim).narrow(dim, 0, first[key].shape[dim] + EXTRA[name])
    outs = [model(**given, return_dict=False)[0] for given in (first, second)]
    loss = sum(out.square().sum() for out in outs)
    return list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))


EXTRA = {"flux": 5, "hunyuan-video": 10}
"""Tokens of a row of pixels, in all frames."""


@on_each_rank
def measure_errors_of_checkpointing(name: str) -> float:
    expected = gradients(name, MODELS[name].model(torch.float64))
    model = MODELS[name].model(torch.float64).train()
    model.enable_gradient_checkpointing()
    enable(model, named_mesh(Shape(1, 3, 1), AXES))
    errors = []
    for found, whole in zip(gradients(name, model), expected, strict=True):
        if whole is not None:
            dist.all_reduce(found)
            errors.append(float((found - whole).abs().max() / whole.abs().max().clamp(min=1e-3)))
    disable(model)
    return worst(errors)


@pytest.mark.parametrize("name", EXTRA)
def test_layers_computed_anew_in_the_backward_pass_have_their_own_tokens(pool: Pool, name: str) -> None:
    assert (
        worst(pool.run(3, measure_errors_of_checkpointing, name)) < 1e-9
    )  # float64, as a part of the largest gradient
