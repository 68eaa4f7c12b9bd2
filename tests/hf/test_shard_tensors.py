"""Shard tensors return results of the whole sequence, or raise, whatever a model or trainer does with them."""

import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.core.mask import Causal
from attnmesh.hf.layer_mask import RecognisedMask
from attnmesh.hf.models import Opaque
from attnmesh.hf.shard_tensors import ShardMask, ShardPositions
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.models import families
from tests.support.models.families import prompt
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.tolerances import FLOAT32_SUMS


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
