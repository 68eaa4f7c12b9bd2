"""Losses of one's own over shards with unequally many labels have the value and the gradients of one device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

import attnmesh as am
import attnmesh.hf as hf
from attnmesh.errors import InputError
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.models import families
from tests.support.models.families import prompt
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.tolerances import FLOAT64_LOSS

IDS = prompt(30, batch=2)
LABELS = IDS.masked_fill(torch.arange(30) < 20, -100)  # the last of three ranks has nearly all labels

Part = dict[str, Any]


def label_counts(part: Part) -> Tensor:
    return part["shift_labels"] != -100


def losses(logits: Tensor, part: Part) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), part["shift_labels"].flatten(), reduction="none").view(2, -1)


def log_probabilities(logits: Tensor, part: Part) -> Tensor:
    targets = part["shift_labels"].clamp(min=0)[..., None]
    return logits.log_softmax(-1).gather(-1, targets)[..., 0]


def divergence(logits: Tensor, part: Part) -> Tensor:
    teacher = (logits.detach() / 3).log_softmax(-1)
    return kl_div(logits.log_softmax(-1), teacher, reduction="none", log_target=True).sum(-1)


LOSSES: dict[str, Callable[[Tensor, Part, Any], Tensor]] = {
    "mean of losses": lambda logits, part, mesh: hf.mean_over_mesh(losses(logits, part), label_counts(part), mesh),
    "mean of chosen losses": lambda logits, part, mesh: hf.mean_over_mesh(
        losses(logits, part)[label_counts(part)], None, mesh
    ),
    "mean of log-probabilities": lambda logits, part, mesh: (
        -hf.mean_over_mesh(log_probabilities(logits, part), label_counts(part), mesh)
    ),
    "mean of divergences": lambda logits, part, mesh: hf.mean_over_mesh(divergence(logits, part), None, mesh),
    "sum over the batch's count": lambda logits, part, mesh: losses(logits, part).sum() / part["num_items_in_batch"],
    "sum over a number": lambda logits, part, mesh: losses(logits, part).sum() / float(part["num_items_in_batch"]),
    "sum of log-probabilities": lambda logits, part, mesh: (
        -(log_probabilities(logits, part) * label_counts(part)).sum() / part["num_items_in_batch"]
    ),
}


def results(mesh: Any) -> dict[str, tuple[float, Tensor]]:
    """Return the value of each loss, and the gradient of a weight."""
    found = {}
    for name, loss_of in LOSSES.items():
        model = families.model("llama", "attnmesh", torch.float64, num_hidden_layers=1).train()
        part = hf.shard_batch({"input_ids": IDS, "labels": LABELS}, mesh, am.Contiguous())
        loss = loss_of(model(**part).logits, part, mesh)
        loss.backward()
        found[name] = loss.item(), model.model.layers[0].self_attn.k_proj.weight.grad
    return found


@on_each_rank
def compute_means() -> dict[str, tuple[float, Tensor]]:
    return results(named_mesh(Shape(1, 3, 1), AXES))


def test_a_loss_of_ones_own_is_that_of_one_device(pool: Pool) -> None:
    answers, expected = pool.run(3, compute_means), results(None)
    for name, (loss, gradient) in expected.items():
        values = [answer[name][0] for answer in answers]
        assert sum(values) / 3 == pytest.approx(loss, rel=FLOAT64_LOSS), name
        assert len({*values}) == 1 or "mean" not in name, name
        mean = torch.stack([answer[name][1] for answer in answers]).mean(0)
        assert torch.allclose(mean, gradient, atol=1e-5), name  # rotary angles are float32


@on_each_rank
def catch_error_of_another_mask_on_rank_1() -> str:
    mesh = named_mesh(Shape(1, 2, 1), AXES)
    values = torch.ones(1, 4)
    with pytest.raises(InputError) as caught:
        hf.mean_over_mesh(values, torch.ones(1, 3 if mesh.get_rank() else 4, dtype=torch.bool), mesh)
    assert float(hf.mean_over_mesh(values, None, mesh)) == 1.0
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_wrong_mask_of_one_rank_raises_on_all(pool: Pool) -> None:
    first, second = pool.run(2, catch_error_of_another_mask_on_rank_1)
    assert first == second
    assert "mean_over_mesh mask: expected a tensor of shape (1, 4), given" in first


def test_a_mean_keeps_its_precision() -> None:
    values = torch.full((1, 1000), 1.0, dtype=torch.bfloat16)
    assert float(hf.mean_over_mesh(values, torch.arange(1000)[None] < 999, None)) == 1.0
