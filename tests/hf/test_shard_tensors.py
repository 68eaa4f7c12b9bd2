"""Shard tensors return results of the whole sequence, or raise, whatever a model or trainer does with them."""

import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, RwkvConfig

import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.core.mask import Causal
from attnmesh.hf.layer_mask import RecognisedMask
from attnmesh.hf.models import Opaque
from attnmesh.hf.shard_tensors import ShardMask, ShardPositions
from attnmesh.hf.training.labels import ItemCount
from attnmesh.mesh.shapes import Shape
from tests.support.models import families
from tests.support.models.families import prompt
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.tolerances import FLOAT32_SUMS

AXES = ("heads", "queries", "keys")


def batch(**more: Any) -> dict[str, Any]:
    ids = prompt(21, batch=2)
    return hf.shard_batch({"input_ids": ids, "labels": ids, **more}, None)


MASK_METADATA: dict[str, Callable[[Any], Any]] = {
    "shape": lambda mask: mask.shape == (2, 21),
    "size": lambda mask: mask.size(1) == 21 and mask.dim() == mask.ndim == 2 and len(mask) == 2,
    "sum": lambda mask: int(mask.sum()) == 42,
    "to": lambda mask: isinstance(mask.to(torch.bool), ShardMask) and mask.bool().dtype == torch.bool,
    "view": lambda mask: isinstance(mask.view(2, -1), ShardMask),
    "device": lambda mask: mask.device == torch.device("cpu") and not mask.requires_grad,
    "copies": lambda mask: isinstance(mask.clone().contiguous().detach(), ShardMask),
}


@pytest.mark.parametrize("name", MASK_METADATA)
def test_mask_metadata_can_be_read(name: str) -> None:
    assert MASK_METADATA[name](batch()["attention_mask"])


MASK_READS: dict[str, Callable[[Any], Any]] = {
    "index": lambda mask: mask[:, None, None, :],
    "cumsum": lambda mask: mask.long().cumsum(-1) - 1,
    "dim sum": lambda mask: mask.sum(-1),
    "sum of bools": lambda mask: mask.bool().sum(),
    "compare": lambda mask: mask == 0,
    "compared": lambda mask: (mask == 1).sum(),
    "multiply": lambda mask: torch.ones(2, 21) * mask,
    "subtract": lambda mask: 1.0 - mask,
    "all": lambda mask: torch.all(mask),
    "cat": lambda mask: torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], 1),
    "pad": lambda mask: nn.functional.pad(mask, (0, 1)),
    "view": lambda mask: mask.view(-1),
    "unsqueeze": lambda mask: mask.unsqueeze(1),
    "expand": lambda mask: mask.expand(3, 2, 21),
    "where": lambda mask: torch.where(mask.bool(), 0.0, 1.0),
    "masked": lambda mask: torch.ones(2, 21).masked_fill(mask.bool(), 0.0),
    "numbers": lambda mask: mask.tolist(),
    "iterate": lambda mask: list(mask),
    "nonzero": lambda mask: mask.nonzero(),
}


@pytest.mark.parametrize("name", MASK_READS)
def test_reading_a_mask_raises(name: str) -> None:
    class Reader(nn.Module):
        def forward(self, mask: torch.Tensor) -> Any:
            return MASK_READS[name](mask)

    mask = batch()["attention_mask"]
    with pytest.raises(errors.KernelError, match="expected a model whose layers leave attention_mask to attnmesh"):
        Reader()(mask)
    with pytest.raises(
        errors.KernelError, match=r"that of shard_batch as it is, given a call of .* outside of the mod"
    ):
        MASK_READS[name](mask)


def test_some_rows_of_a_batch_are_refused_for_what_they_are() -> None:
    for rows in (0, slice(1), torch.tensor([0])):
        with pytest.raises(errors.ArgumentError, match="attention_mask: expected all rows of the batch, given some"):
            batch()["attention_mask"][rows]


OPAQUE_READS: dict[str, Callable[[Any], Any]] = {
    "index": lambda x: x[:, :, :3],
    "length": len,
    "truth": bool,
    "iterate": list,
    "attribute": lambda x: x.dtype,
    "add": lambda x: torch.ones(2) + x,
    "added": lambda x: x + 1,
    "compare": lambda x: x < 3,
    "multiply": lambda x: 2 * x,
    "invert": lambda x: ~x,
    "function": lambda x: torch.cat([x, torch.ones(2)]),
    "chunk": lambda x: torch.chunk(x, 2),
    "linear": lambda x: nn.functional.linear(x, torch.ones(2, 2)),
}


@pytest.mark.parametrize("name", OPAQUE_READS)
@pytest.mark.parametrize("value", [Opaque(), RecognisedMask(Causal(), 4, 0, 0)], ids=["keys", "mask"])
def test_reading_an_opaque_value_raises(name: str, value: Any) -> None:
    with pytest.raises(errors.KernelError, match="passes masks and cached keys to attention unread, given one"):
        OPAQUE_READS[name](value)


def test_a_mask_can_be_cut_to_its_last_rows() -> None:
    whole = RecognisedMask(Causal(), 9, 4, 0)
    assert whole[:, :, slice(0, None), :] == whole
    assert whole[:, :, slice(-2, None), :] == RecognisedMask(Causal(), 2, 11, 0)
    assert whole.contiguous() is whole


def test_positions_have_the_maximum_of_the_whole_sequence_and_return_plain_tensors() -> None:
    positions = ShardPositions.of(torch.tensor([[3, 5]]), sequence=batch()["attention_mask"].sequence, last=40)
    assert int(torch.max(positions)) == int(positions[:, None].long().max()) == 40
    assert positions.max(-1).values.tolist() == [5]
    assert type(positions[:, None, :].float() @ torch.ones(1, 2, 3)) is Tensor
    assert (positions + 2).tolist() == [[5, 7]]


def test_counts_keep_their_precision() -> None:
    count = batch()["num_items_in_batch"]
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


@on_each_rank
def compute_compiled_loss(backend: str) -> list[float]:
    """Return the loss and a gradient norm, without and with torch.compile."""
    part = hf.shard_batch({"input_ids": prompt(21), "labels": prompt(21)}, named_mesh(Shape(1, 1, 2), AXES))
    results = []
    for wrap in (lambda model: model, partial(torch.compile, backend=backend)):
        model = families.model("llama", "attnmesh", num_hidden_layers=1).train()
        loss = wrap(model)(**part).loss
        loss.backward()
        results += [loss.item(), float(model.lm_head.weight.grad.norm())]
    return results


LONG = [pytest.mark.long, pytest.mark.timeout(1500)]  # a busy machine compiles for many minutes


@pytest.mark.parametrize("backend", [pytest.param(backend, marks=LONG) for backend in ("aot_eager", "inductor")])
def test_a_compiled_model_has_the_same_loss_and_gradient(backend: str, pool: Pool) -> None:
    for loss, norm, *compiled_results in pool.run(2, compute_compiled_loss, backend, deadline=1200):
        assert compiled_results == pytest.approx([loss, norm], rel=FLOAT32_SUMS)


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


def test_arguments_can_be_copied() -> None:
    part = deepcopy({name: x for name, x in batch().items() if isinstance(x, Tensor)})
    assert {type(x).__name__ for x in part.values()} >= {"ShardMask", "ShardPositions", "ShardLabels", "ItemCount"}


class Wrapped(nn.Module):
    """A module with the model inside, like DDP."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class Adapters(nn.Module):
    """A module with a model and adapters, like PEFT's."""

    def __init__(self, model: nn.Module, prompts: bool) -> None:
        super().__init__()
        self.model, self.peft_config = model, {"default": type("Config", (), {"is_prompt_learning": prompts})()}

    def get_base_model(self) -> nn.Module:
        return self.model


def test_generate_unwraps_the_model() -> None:
    model, options = families.model("llama", "attnmesh"), {"max_new_tokens": 3, "do_sample": False}
    expected = hf.generate(model, prompt(20), **options).tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns when it imports its compiler
        compiled = torch.compile(model)
    for wrapped in (Wrapped(model), compiled, Wrapped(compiled), Adapters(model, False)):
        assert hf.generate(wrapped, prompt(20), **options).tolist() == expected
    with pytest.raises(errors.KernelError, match="generate: expected adapters without virtual tokens"):
        hf.generate(Adapters(model, True), prompt(20), **options)
    with pytest.raises(errors.KernelError, match="expected a causal language model of transformers, given Line"):
        hf.generate(Wrapped(nn.Linear(2, 2)), prompt(20), **options)
