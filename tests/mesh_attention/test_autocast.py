"""Under autocast attention takes q, k and v as PyTorch's own attention takes them: all in the lower precision."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import attnmesh as am
import attnmesh.hf as hf
from attnmesh.mesh.shapes import Shape
from tests.support.models import families
from tests.support.models.families import plain_batch, prompt
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh

AXES = ("heads", "queries", "keys")
ROUNDING = 2.0**-7
"""Two roundings of bfloat16, of outputs and gradients of size 1."""


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """As ropes leave them: q and k of float32, v of bfloat16."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 37, 16, generator=generator).unbind()
    return q.requires_grad_(), k.requires_grad_(), v.bfloat16().requires_grad_()


def stock() -> tuple[Tensor, ...]:
    q, k, v = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
    out.float().square().sum().backward()
    return out.detach(), q.grad, k.grad, v.grad


@on_each_rank
def attend_under_autocast(shape: Shape) -> tuple[Tensor, ...]:
    mesh, whole = named_mesh(shape, AXES), inputs()
    shards = [am.shard(x.detach(), mesh, layout=am.Zigzag()).requires_grad_() for x in whole]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = am.attention(*shards, mesh=mesh, layout=am.Zigzag(), length=37)
    out.float().square().sum().backward()
    made = [out.detach(), *(x.grad for x in shards)]
    return tuple(am.unshard(x, mesh, layout=am.Zigzag(), length=37) for x in made)


@pytest.mark.parametrize("shape", [Shape(1, 1, 1), Shape(1, 2, 1), Shape(1, 2, 2), Shape(2, 1, 2)], ids=str)
def test_attention_casts_as_pytorchs_does(shape: Shape, pool: Pool) -> None:
    expected = stock()
    for answer in pool.run(shape.ranks, attend_under_autocast, shape):
        for given, right in zip(answer, expected, strict=True):
            assert given.dtype == right.dtype
            assert (given - right).abs().max() <= ROUNDING * max(1, float(right.abs().max()))


def test_attend_casts_and_float64_stays() -> None:
    q, k, v = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert am.attend(q, k, v, mask=am.Causal()).out.dtype == torch.bfloat16
        assert am.attend(q.double(), k.double(), v.double()).out.dtype == torch.float64


class OfModel(NamedTuple):
    """What a model makes, its loss, and the norm of the gradient of its head."""

    tokens: list[list[int]]
    loss: float
    norm: float


@on_each_rank
def generate_and_train_under_autocast(shape: Shape) -> OfModel:
    model, mesh = families.model("qwen3", "attnmesh"), named_mesh(shape, AXES)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = hf.generate(model, prompt(80), mesh=mesh, max_new_tokens=4, do_sample=False)
        loss = model(**hf.shard_batch(plain_batch(), mesh)).loss
    loss.backward()
    return OfModel(made.tolist(), loss.item(), float(model.lm_head.weight.grad.norm()))


@pytest.mark.parametrize("shape", [Shape(1, 1, 1), Shape(1, 2, 2)], ids=str)
def test_a_model_of_float32_weights_runs_under_autocast(shape: Shape, pool: Pool) -> None:
    model = families.model("qwen3", "sdpa")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(prompt(80)).logits[0, -1].float()
        loss = model(**plain_batch(), use_cache=False).loss
    answers = pool.run(shape.ranks, generate_and_train_under_autocast, shape)
    for answer in answers:
        new_logit = logits[answer.tokens[0][80]]
        assert new_logit >= logits.max() - 0.05 * logits.abs().max()  # a tie of bfloat16 may fall either way
        assert answer.norm > 0
        assert answer.loss > 0
    # Layers round to bfloat16, by 4e-3.
    assert sum(answer.loss for answer in answers) / shape.ranks == pytest.approx(loss.item(), rel=2e-2)
