"""Whole batches of collators and of models of classes, and models that are copied or pickled on a mesh.

Documents of packed batches are those of positions. Lengths that contradict these are refused.
"""

import pickle
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithFlattening,
    JambaConfig,
    PreTrainedConfig,
    Trainer,
)

import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.models import families
from tests.support.models.families import prompt
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.tolerances import FLOAT32_MODEL, FLOAT32_SUMS

SEQUENCES = [{"input_ids": prompt(n, seed=n)[0].tolist()} for n in (10, 33, 21)]


def test_batches_of_padding_free_collators_are_accepted() -> None:
    packed = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(SEQUENCES)
    assert {"cu_seq_lens_q", "max_length_k", "seq_idx", "position_ids"} <= packed.keys()
    part = hf.shard_batch(packed, None)
    assert not {"cu_seq_lens_q", "max_length_k", "seq_idx"} & part.keys()
    assert part["attention_mask"].sequence.documents.ends == (10, 43, 64)
    with torch.no_grad():
        given = families.model("llama", "attnmesh")(**part).loss
        stock = families.model("llama", "eager")
        losses = [stock(torch.tensor([x["input_ids"]]), labels=torch.tensor([x["input_ids"]])).loss for x in SEQUENCES]
    counts = [len(x["input_ids"]) - 1 for x in SEQUENCES]
    expected = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    assert float(given) == pytest.approx(float(expected), rel=FLOAT32_SUMS)


@pytest.mark.parametrize("name", ["cu_seq_lens_q", "cu_seq_lens_k"])
def test_lengths_that_contradict_positions_are_refused(name: str) -> None:
    packed = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(SEQUENCES)
    with pytest.raises(errors.MaskError, match=f"{name}: expected .0, 10, 43, 64., as in position_ids, given .0"):
        hf.shard_batch({**packed, name: torch.tensor([0, 64])}, None)
    del packed["position_ids"]
    with pytest.raises(errors.MaskError, match="expected position_ids and no attention_mask"):
        hf.shard_batch(packed, None)


OTHER_PADDING = 5
"""A token that pads rows, and is not the `pad_token_id` of the configuration."""


def classify(config: PreTrainedConfig, attention: str, mesh: Any) -> tuple[Tensor, Tensor]:
    """Return the logits of two rows with padding, on a mesh or with stock attention, and the gradient of their head."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForSequenceClassification.from_config(config, attn_implementation=attention)
    ids = prompt(33, batch=2)
    mask = torch.ones_like(ids)
    ids[1, -6:], mask[1, -6:] = OTHER_PADDING, 0
    sharder = hf.on_mesh(Trainer, mesh)._make_sharder(None)
    with nullcontext() if mesh is None else sharder.active(True, model):
        output = model(input_ids=ids, attention_mask=mask, labels=torch.tensor([0, 1]))
    output.loss.backward()
    return output.logits.detach(), model.score.weight.grad


@on_each_rank
def classify_on_mesh(config: PreTrainedConfig) -> tuple[Tensor, Tensor] | str:
    try:
        return classify(config, "attnmesh", named_mesh(Shape(1, 1, 2), AXES))
    except errors.InputError as error:
        return str(error)


def test_a_class_that_is_read_at_padding_is_that_of_one_device(pool: Pool) -> None:
    config = families.CONFIGS["llama"]
    logits, grad = classify(config, "sdpa", None)
    answers = pool.run(2, classify_on_mesh, config)
    assert all(torch.allclose(given, logits, atol=FLOAT32_MODEL) for given, _ in answers)
    mean = sum(given for _, given in answers) / 2
    assert torch.allclose(mean, grad, atol=FLOAT32_MODEL)


def test_a_class_that_recurrent_layers_would_compute_from_padding_is_refused(pool: Pool) -> None:
    sizes = {name: families.SIZES[name] for name in ("vocab_size", "hidden_size", "pad_token_id")}
    config = JambaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    first, second = pool.run(2, classify_on_mesh, config)
    assert first == second
    assert "input_ids: expected padding of token 0, given other tokens. Fix: set model.config.pad_token_id" in first


def test_a_model_on_a_mesh_is_copied_and_not_pickled() -> None:
    model = families.model("llama", "attnmesh", num_hidden_layers=1)
    sharder = hf.on_mesh(Trainer, None)._make_sharder(None)
    sharder.install(model)
    with torch.no_grad():
        expected, given = (each(prompt(9)).logits for each in (model, deepcopy(model)))
    assert torch.equal(expected, given)
    with pytest.raises(errors.KernelError, match=r"given torch.save\(model\). Fix: save model.state_dict\(\), or call"):
        pickle.dumps(model)
