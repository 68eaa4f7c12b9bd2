"""Labels of one rank: losses of shards, divided by the count of the whole batch, are those of one device."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, RwkvConfig

import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.hf.training.labels import ItemCount
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.models import families
from tests.support.models.families import prompt
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.tolerances import FLOAT32_SUMS


def test_counts_keep_their_precision() -> None:
    ids = prompt(21, batch=2)
    count = hf.shard_batch({"input_ids": ids, "labels": ids}, None)["num_items_in_batch"]
    assert isinstance(count.to(torch.bfloat16) * 1, ItemCount)
    assert float((count + 1001).to(torch.bfloat16)) == 1041.0  # bfloat16 has 1040 and 1048


@on_each_rank
def compute_custom_losses() -> list[float]:
    """Return losses computed from logits and shift_labels: sum, mean over the batch, mean over the rank."""
    part = hf.shard_batch({"input_ids": prompt(21), "labels": prompt(21)}, named_mesh(Shape(1, 1, 2), AXES))
    labels = part["shift_labels"]
    with torch.no_grad():
        logits = families.model("llama", "attnmesh")(**part).logits[0]
    label_counts = int((labels != -100).sum())
    total = nn.functional.cross_entropy(logits, labels[0], reduction="sum")
    return [float(total), float(total / float(part["num_items_in_batch"])), float(total / label_counts)]


def test_a_custom_loss_keeps_its_divisor(pool: Pool) -> None:
    whole = families.model("llama", "sdpa")
    with torch.no_grad():
        loss = float(whole(prompt(21), labels=prompt(21)).loss)
    totals, means, rank_means = zip(*pool.run(2, compute_custom_losses), strict=True)
    assert sum(totals) / 20 == pytest.approx(loss, rel=FLOAT32_SUMS)
    assert sum(means) / 2 == pytest.approx(loss, rel=FLOAT32_SUMS)
    assert [total / mean for total, mean in zip(totals, rank_means, strict=True)] == pytest.approx([10, 10])


MEANS = {
    "of all tokens": lambda losses, labels: losses.mean(),
    "of their squares": lambda losses, labels: losses.square().mean(),
    "by the larger one": lambda losses, labels: losses.clamp(min=4.5).mean(),
    "of those with labels": lambda losses, labels: losses[labels != -100].mean(),
}
"""Losses of one's own, which take a mean."""


def mean_loss(model: nn.Module, kind: str, targets: torch.Tensor, **batch: Any) -> torch.Tensor:
    losses = nn.functional.cross_entropy(model(**batch).logits[0], targets, reduction="none")
    return MEANS[kind](losses, targets)


@on_each_rank
def compute_mean_loss(tokens: int, kind: str) -> float | str:
    """Return a mean of this rank's losses, or the error."""
    ids = prompt(tokens)
    part = hf.shard_batch({"input_ids": ids, "labels": ids}, named_mesh(Shape(1, 1, 2), AXES))
    inputs = {name: part[name] for name in ("input_ids", "position_ids", "attention_mask")}
    try:
        return float(mean_loss(families.model("llama", "attnmesh"), kind, part["shift_labels"][0], **inputs).detach())
    except errors.ArgumentError as error:
        return str(error)


@pytest.mark.parametrize("kind", MEANS)
def test_a_mean_weighs_all_tokens_equally_or_is_refused(kind: str, pool: Pool) -> None:
    """Both ranks have 10 labels of 21 tokens, the last of which has none: one has 11 tokens, the other 10."""
    ids = prompt(21)
    labels = nn.functional.pad(ids[0, 1:], (0, 1), value=-100)
    whole = float(mean_loss(families.model("llama", "sdpa"), kind, labels, input_ids=ids).detach())
    found = pool.run(2, compute_mean_loss, 21, kind)
    if kind == "of those with labels":
        assert sum(found) / 2 == pytest.approx(whole, rel=FLOAT32_SUMS)
    else:
        assert all("given a mean over one rank's tokens" in error for error in found), found


@on_each_rank
def compute_loss_with_count(count: Any) -> float | str:
    """Return the loss of a model that is called with another count, or the error."""
    part = hf.shard_batch({"input_ids": prompt(21), "labels": prompt(21)}, named_mesh(Shape(1, 1, 2), AXES))
    try:
        return float(families.model("llama", "attnmesh")(**{**part, "num_items_in_batch": count}).loss.detach())
    except errors.ArgumentError as error:
        return str(error)


@pytest.mark.parametrize("count", [20, torch.tensor(20), torch.tensor(20.0)], ids=["int", "long", "float"])
def test_a_count_of_the_whole_batch_may_be_passed_to_the_model(count: Any, pool: Pool) -> None:
    with torch.no_grad():
        loss = float(families.model("llama", "sdpa")(prompt(21), labels=prompt(21)).loss)
    assert sum(pool.run(2, compute_loss_with_count, count)) / 2 == pytest.approx(loss, rel=FLOAT32_SUMS)


@on_each_rank
def compute_chunked_loss() -> list[float]:
    """Return the model's loss, and a loss computed in chunks."""
    part = hf.shard_batch({"input_ids": prompt(21), "labels": prompt(21)}, named_mesh(Shape(1, 1, 2), AXES))
    with torch.no_grad():
        output = families.model("llama", "attnmesh")(**part)
    chunks = zip(output.logits[0].split(4), part["shift_labels"][0].split(4), strict=True)
    total = sum(nn.functional.cross_entropy(logits, labels, reduction="sum") for logits, labels in chunks)
    return [float(output.loss), float(torch.div(total, other=part["num_items_in_batch"]))]


def test_a_loss_can_be_computed_twice(pool: Pool) -> None:
    for loss, chunked in pool.run(2, compute_chunked_loss):
        assert chunked == pytest.approx(loss, rel=FLOAT32_SUMS)


@on_each_rank
def compute_fsdp_loss(count: Any) -> float:
    """Return the loss under FSDP, which copies the arguments of layers whose inputs it casts."""
    model = families.model("llama", "attnmesh").train()
    mesh = named_mesh(Shape(1, 1, 2), AXES)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["keys"], mp_policy=policy)
    fully_shard(model, mesh=mesh["keys"], mp_policy=policy)
    part = hf.shard_batch({"input_ids": prompt(21), "labels": prompt(21)}, mesh)
    loss = model(**(part if count is None else {**part, "num_items_in_batch": count})).loss
    loss.backward()
    return loss.item()


@pytest.mark.parametrize("count", [None, 20])
def test_layers_of_fsdp_in_bfloat16_have_the_loss_of_one_device(count: Any, pool: Pool) -> None:
    with torch.no_grad():
        loss = float(families.model("llama", "sdpa").bfloat16()(prompt(21), labels=prompt(21)).loss)
    assert sum(pool.run(2, compute_fsdp_loss, count)) / 2 == pytest.approx(loss, rel=2e-2)  # bfloat16's rounding


def error_of_model(model: nn.Module, part: dict[str, Any]) -> str:
    """Return the error of a model on a batch."""
    try:
        model(**part)
    except errors.InputError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@on_each_rank
def catch_error_of_second_model() -> str:
    """Return the error of a model without attention, called after another model on the same batch."""
    part = hf.shard_batch({"input_ids": prompt(21), "labels": prompt(21)}, named_mesh(Shape(1, 1, 2), AXES))
    families.model("llama", "attnmesh")(**part)
    torch.manual_seed(0)
    config = RwkvConfig(vocab_size=97, hidden_size=16, num_hidden_layers=2, attention_hidden_size=16)
    return error_of_model(AutoModelForCausalLM.from_config(config), part)


def test_a_second_model_on_the_same_batch_is_checked(pool: Pool) -> None:
    for error in pool.run(2, catch_error_of_second_model):
        assert error.startswith("KernelError: ")
        assert "a model whose layers all call attnmesh for attention, given one in which no layer does" in error


@on_each_rank
def catch_error_of_uneven_mean() -> str:
    """Return the error of a mean loss where one rank has no labels."""
    ids = prompt(21)
    batch = {"input_ids": ids, "labels": ids.masked_fill(torch.arange(21) < 15, -100)}
    part = hf.shard_batch(batch, named_mesh(Shape(1, 1, 2), AXES))
    return error_of_model(families.model("llama", "attnmesh"), {**part, "num_items_in_batch": None})


def test_a_mean_over_one_ranks_tokens_is_refused_if_ranks_have_unequal_labels(pool: Pool) -> None:
    for error in pool.run(2, catch_error_of_uneven_mean):
        assert error.startswith("ArgumentError: ")
        assert (
            "expected a loss that weighs the tokens of all ranks equally, given a mean over one rank's tokens" in error
        )
