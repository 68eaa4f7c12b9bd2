"""Training on shards of a batch has the loss and gradients of one device."""

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, BloomConfig, LlamaConfig, StableLmConfig

import attnmesh as am
import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.core.layout import Layout
from attnmesh.mesh.shapes import Shape
from tests.support.models import families
from tests.support.models.checks import loss_and_gradients
from tests.support.models.families import FEW, STOCK, Batch, families_on_meshes, plain_batch, prompt
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.tolerances import FLOAT32_MODEL, FLOAT64_LOSS

AXES = ("heads", "queries", "keys")


def masked_labels() -> Batch:
    """Return a batch with a prompt without labels, and padding on the right."""
    ids, mask = prompt(59, batch=2), torch.ones(2, 59, dtype=torch.long)
    mask[1, 40:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :20] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def packed() -> Batch:
    """Return three packed sequences, as from DataCollatorWithFlattening."""
    ids = prompt(64)
    positions = torch.cat([torch.arange(n) for n in (10, 33, 21)])[None]
    labels = ids.masked_fill(positions == 0, -100)
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


BATCHES = {"plain": plain_batch, "masked labels": masked_labels, "packed": packed}


def test_counts_of_labels_do_not_depend_on_the_default_dtype() -> None:
    """A count of 1,001 is none in bfloat16."""
    ids = prompt(1002)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        batch = hf.shard_batch({"input_ids": ids, "labels": ids}, None)
    finally:
        torch.set_default_dtype(before)
    assert float(batch["num_items_in_batch"]) == 1001


def stock_results(family: str, name: str) -> tuple[float, dict[str, Tensor]]:
    """Return the results of stock transformers. It gets packed sequences one by one, because some families mix them."""
    stock = families.model(family, STOCK[family], torch.float64).train()
    batch = {**BATCHES[name](), "use_cache": False}
    if name != "packed":
        return loss_and_gradients(stock, batch)
    count, loss = (batch["labels"] != -100).sum(), 0.0
    for ids, labels in zip(*(batch[x].split((10, 33, 21), 1) for x in ("input_ids", "labels")), strict=True):
        more, gradients = loss_and_gradients(stock, {"input_ids": ids, "labels": labels, "num_items_in_batch": count})
        loss += more
    return loss, gradients


@on_each_rank
def train_on_shards(family: str, shape: Shape, layout: Layout) -> dict[str, tuple[float, dict[str, Tensor]]]:
    mesh = named_mesh(shape, AXES)
    results = {}
    for name, batch in BATCHES.items():
        model = families.model(family, "attnmesh", torch.float64).train()
        results[name] = loss_and_gradients(model, hf.shard_batch(batch(), mesh, layout))
    return results


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        one if one.values[0] in FEW and one.values[0] != "gemma2-low-cap" else one._replace(marks=[pytest.mark.long])
        for one in families_on_meshes()
    ],
)
def test_loss_and_gradients_are_those_of_one_device(family: str, shape: Shape, pool: Pool) -> None:
    layout = am.Zigzag() if len(family) % 2 else am.Striped(4)
    answers = pool.run(shape.ranks, train_on_shards, family, shape, layout)
    for name in BATCHES:
        loss, gradients = stock_results(family, name)
        assert sum(answer[name][0] for answer in answers) / shape.ranks == pytest.approx(loss, rel=FLOAT64_LOSS), name
        for weights, expected in gradients.items():
            given = sum(answer[name][1][weights] for answer in answers) / shape.ranks
            # Losses, norms and rotary angles are float32 in transformers, whatever the model's dtype.
            assert (given - expected).abs().max() <= 1e-5 * max(1, float(expected.abs().max())), (name, weights)


def test_positions_and_labels_are_those_of_the_whole_sequence() -> None:
    part = hf.shard_batch(plain_batch(), None)
    assert part["position_ids"][0].tolist() == list(range(61))
    assert part["shift_labels"][:, :-1].equal(plain_batch()["labels"][:, 1:])
    assert not part["use_cache"]


def test_without_labels_there_is_no_loss() -> None:
    model = families.model("llama", "attnmesh")
    stock = families.model("llama", "sdpa")
    with torch.no_grad():
        given = model(**hf.shard_batch({"input_ids": prompt(30)}, None))
        expected = stock(input_ids=prompt(30))
    assert given.loss is None
    assert torch.allclose(given.logits, expected.logits, atol=FLOAT32_MODEL)


@on_each_rank
def catch_refusal(rank_batch: Batch) -> str:
    try:
        hf.shard_batch(rank_batch, named_mesh(Shape(1, 2, 1), AXES))
    except errors.InputError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _another() -> Batch:
    return {"input_ids": prompt(20, seed=torch.distributed.get_rank())}


def _left() -> Batch:
    return {"input_ids": prompt(20), "attention_mask": torch.arange(20)[None].ge(4).long()}


WRONG: dict[str, tuple[Batch, str]] = {
    "no ids": (
        {"labels": prompt(9)},
        "DtypeError: shard_batch input_ids: expected token ids (batch, length), given Non",
    ),
    "short": (
        {"input_ids": prompt(1)},
        "ShapeError: shard_batch input_ids: expected a sequence, and at least one toke",
    ),
    "unknown": (
        {"input_ids": prompt(9), "pixels": 3},
        "ArgumentError: shard_batch: expected some of input_ids, labels",
    ),
    "labels": (
        {"input_ids": prompt(9), "labels": prompt(8)},
        "ShapeError: shard_batch labels: expected shape (1, 9), gi",
    ),
    "left": (
        _left(),
        "MaskError: shard_batch attention_mask: expected padding on the right, if any, given padding befor",
    ),
    "4D": (
        {"input_ids": prompt(9), "attention_mask": torch.ones(1, 1, 9, 9)},
        "ShapeError: shard_batch attention_mask: expected shape (1, 9), given (1, 1, 9, 9)",
    ),
    "learned padding": (
        {"input_ids": prompt(9), "labels": prompt(9), "attention_mask": torch.arange(9)[None].lt(5).long()},
        "MaskError: shard_batch labels: expected -100 at padding, given labels of padding",
    ),
    "rows": (
        {"input_ids": prompt(9, batch=2), "position_ids": torch.stack((torch.arange(9), torch.arange(9) % 4))},
        "MaskError: shard_batch position_ids: expected the same positions in each row, given rows that differ",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_batch_is_refused_on_all_ranks(name: str, pool: Pool) -> None:
    batch, error = WRONG[name]
    answers = pool.run(2, catch_refusal, batch)
    assert answers[0] == answers[1]
    assert answers[0].startswith(error), answers[0]


@on_each_rank
def count_few_tokens(layout: Any, documents: Sequence[int]) -> int | str:
    """Return the tokens of this rank, or the error."""
    positions = torch.cat([torch.arange(tokens) for tokens in documents])[None]
    batch = {"input_ids": prompt(sum(documents)), "position_ids": positions}
    try:
        return hf.shard_batch(batch, named_mesh(Shape(1, 4, 1), AXES), layout)["input_ids"].shape[1]
    except errors.ShapeError as error:
        return str(error)


def test_each_rank_gets_one_of_few_tokens_or_all_raise(pool: Pool) -> None:
    assert sorted(pool.run(4, count_few_tokens, "auto", (2, 2, 1))) == [
        1,
        1,
        1,
        2,
    ]  # two by two would leave one without
    given, fix = r"5 tokens in Zigzag\(\) on 4 ranks", r"use longer sequences, fewer ranks or layout=am.Striped\(\)"
    answers = pool.run(4, count_few_tokens, "auto", (5,))
    assert len(set(answers)) == 1
    assert re.search(f"at least one token per rank, given {given}. Fix: {fix}", answers[0])
    assert sorted(pool.run(4, count_few_tokens, am.Striped(), (5,))) == [1, 1, 1, 2]


@on_each_rank
def catch_refusal_of_another() -> str:
    return catch_refusal(_another())


def test_ranks_with_different_batches_all_raise(pool: Pool) -> None:
    answers = pool.run(2, catch_refusal_of_another)
    assert answers[0] == answers[1]
    assert answers[0].startswith("MeshError: shard_batch: expected the same call on every rank"), answers[0]


FOREIGN = {
    "stock attention": LlamaConfig(**families.SIZES),
    "custom attention": BloomConfig(vocab_size=97, hidden_size=16, n_layer=1, n_head=2),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_other_attention_raises_on_a_shard(name: str) -> None:
    model = AutoModelForCausalLM.from_config(FOREIGN[name])
    with pytest.raises(errors.KernelError, match="expected a model whose layers leave attention_mask to attnme"):
        model(**hf.shard_batch(plain_batch(), None))


def _stablelm(attention: str) -> Any:
    config = StableLmConfig(
        **{name: value for name, value in families.SIZES.items() if name not in ("head_dim", "initializer_range")}
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).double()


@on_each_rank
def compute_loss_of_stablelm(shape: Shape) -> float:
    return loss_and_gradients(_stablelm("attnmesh"), hf.shard_batch(plain_batch(), named_mesh(shape, AXES)))[0]


def test_layers_that_pass_only_a_mask_are_supported(pool: Pool) -> None:
    loss, _ = loss_and_gradients(_stablelm("sdpa"), plain_batch())
    assert sum(pool.run(4, compute_loss_of_stablelm, Shape(1, 2, 2))) / 4 == pytest.approx(loss, rel=FLOAT64_LOSS)


@on_each_rank
def catch_errors_of_other_weights(name: str) -> list[str]:
    """Return the errors of a first and a second model, after a weight was changed per rank."""
    mesh = named_mesh(Shape(1, 2, 1), AXES)
    rank = torch.distributed.get_rank()
    messages = []
    for changed in (1.0, 1.0 + rank):
        model = families.model("llama", "attnmesh").train()
        with torch.no_grad():
            model.get_parameter(name).mul_(changed)
        try:
            for _ in range(2):
                model(**hf.shard_batch(plain_batch(), mesh))
            messages.append("nothing")
        except errors.MeshError as error:
            messages.append(str(error))
    return messages


WEIGHTS = ("model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight")


@pytest.mark.parametrize("name", WEIGHTS)
def test_ranks_with_different_weights_all_raise(name: str, pool: Pool) -> None:
    first, second = pool.run(2, catch_errors_of_other_weights, name)
    assert first == second
    assert first[0] == "nothing"
    assert first[1].startswith("attnmesh.hf weights: expected the same call on every rank"), first[1]
    assert f"ranks  {name}\n    0      torch.float32" in first[1], first[1]


@on_each_rank
def catch_error_of_routers() -> str:
    model = families.model("gpt-oss", "attnmesh", output_router_logits=True).train()
    try:
        model(**hf.shard_batch(plain_batch(), named_mesh(Shape(1, 2, 1), AXES)))
    except errors.KernelError as error:
        return str(error)
    return "nothing"


def test_a_router_loss_is_refused_on_shards(pool: Pool) -> None:
    for error in pool.run(2, catch_error_of_routers):
        assert error.startswith("attnmesh.hf output_router_logits: expected no router loss on shards")
