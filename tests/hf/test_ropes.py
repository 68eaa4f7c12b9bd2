"""Length-dependent ropes use the length of the whole sequence on shards, as in stock transformers."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config, PreTrainedModel, RobertaConfig

import attnmesh as am
import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.mesh.shapes import Shape
from tests.support.models.checks import loss_and_gradients
from tests.support.models.families import SIZES, prompt
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.seeds import rotated
from tests.support.truth.tolerances import FLOAT64_LOSS, FLOAT64_MODEL

AXES = ("heads", "queries", "keys")
SWITCH = 64
"""Length at which each rope changes."""

THETA = {"rope_theta": 1e4}
SHORT = {**SIZES, "max_position_embeddings": SWITCH}
CONFIGS: dict[str, Any] = {
    "dynamic": LlamaConfig(**SHORT, rope_parameters={"rope_type": "dynamic", "factor": 4.0, **THETA}),
    "longrope": Phi3Config(
        **{**SIZES, "max_position_embeddings": 4096},
        original_max_position_embeddings=SWITCH,
        rope_parameters={
            "rope_type": "longrope",
            "short_factor": [1.0, 1.1, 1.3, 1.7],
            "long_factor": [2.0, 3.0, 5.0, 9.0],
            "original_max_position_embeddings": SWITCH,
            "factor": 64.0,
            **THETA,
        },
    ),
    "yarn": LlamaConfig(
        **{**SIZES, "max_position_embeddings": 4096},
        rope_parameters={
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": SWITCH,
            **THETA,
        },
    ),
}


def model(name: str, attention: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        result = AutoModelForCausalLM.from_config(deepcopy(CONFIGS[name]), attn_implementation=attention)
    return result.to(dtype).eval()


@on_each_rank
def train_on_mesh(name: str, length: int, shape: Shape, layout: Any) -> tuple[float, dict[str, Tensor]]:
    ids = prompt(length, batch=2)
    batch = hf.shard_batch({"input_ids": ids, "labels": ids}, named_mesh(shape, AXES), layout)
    return loss_and_gradients(model(name, "attnmesh", torch.float64).train(), batch)


LENGTHS = {"short": (SWITCH - 3, am.Zigzag()), "crossed": (SWITCH + 1, am.Contiguous())}
LENGTHS["long"] = 3 * SWITCH - 1, am.Zigzag()


@pytest.mark.parametrize(("name", "kind"), rotated([*CONFIGS], [*LENGTHS], every=2))
def test_training_has_the_rope_of_the_whole_sequence(name: str, kind: str, pool: Pool) -> None:
    length, layout = LENGTHS[kind]
    ids = prompt(length, batch=2)
    loss, gradients = loss_and_gradients(model(name, "sdpa", torch.float64).train(), {"input_ids": ids, "labels": ids})
    answers = pool.run(4, train_on_mesh, name, length, Shape(1, 2, 2), layout)
    assert sum(answer[0] for answer in answers) / 4 == pytest.approx(loss, rel=FLOAT64_LOSS)
    for weights, expected in gradients.items():
        given = sum(answer[1][weights] for answer in answers) / 4
        assert (given - expected).abs().max() <= FLOAT64_MODEL * max(1, float(expected.abs().max())), weights


@on_each_rank
def generate_around_the_switch(name: str, shape: Shape) -> list[list[list[int]]]:
    """Return tokens of prompts on both sides of the switch, each with a new model; then of turns on one cache."""
    mesh = named_mesh(shape, AXES)
    outputs = []
    for length, options in CALLS:
        outputs.append(hf.generate(model(name, "attnmesh"), prompt(length), mesh=mesh, **options).tolist())
    ours = model(name, "attnmesh")
    cache, ids = hf.ShardedCache(ours.config, mesh), prompt(30)
    for more in TURNS:
        ids = hf.generate(ours, ids, cache=cache, do_sample=False, max_new_tokens=8)
        outputs.append(ids.tolist())
        ids = torch.cat((ids, prompt(more, seed=more)), 1)
    return outputs


GREEDY = {"do_sample": False, "max_new_tokens": 12}
CALLS = [(40, GREEDY), (150, GREEDY), (150, {**GREEDY, "prefill_chunk_size": 50})]
TURNS = [15, 60, 40, 1]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param(
            name, Shape(1, 1, ranks), marks=pytest.mark.long if (ranks == 1 and number) or name == "yarn" else []
        )
        for number, name in enumerate(CONFIGS)
        for ranks in (1, 2)
    ],
)
def test_generation_has_the_rope_of_the_whole_sequence(name: str, shape: Shape, pool: Pool) -> None:
    expected = []
    for length, _ in CALLS:
        expected.append(model(name, "sdpa").generate(prompt(length), **GREEDY).tolist())
    ids = prompt(30)
    for more in TURNS:
        ids = model(name, "sdpa").generate(ids, do_sample=False, max_new_tokens=8)
        expected.append(ids.tolist())
        ids = torch.cat((ids, prompt(more, seed=more)), 1)
    assert pool.run(shape.ranks, generate_around_the_switch, name, shape) == [expected] * shape.ranks


def test_keys_of_another_rope_are_recomputed() -> None:
    ours, stock = model("dynamic", "attnmesh"), model("dynamic", "sdpa")
    cache, options = hf.ShardedCache(ours.config), {"do_sample": False, "max_new_tokens": 6}
    for length, kept in ((100, cache), (250, None), (100, cache), (100, cache)):
        given = hf.generate(ours, prompt(length), cache=kept, mesh=None, **options)
        assert given.tolist() == stock.generate(prompt(length), **options).tolist()


def test_keys_of_another_rope_are_not_taken_from_a_folder(tmp_path: Path) -> None:
    """What the cache had before says nothing of the keys that it is given."""
    ours, stock, ids = model("longrope", "attnmesh"), model("longrope", "sdpa"), prompt(150)
    short, cache = hf.ShardedCache(ours.config), hf.ShardedCache(ours.config)
    hf.generate(ours, ids[:, :40], cache=short, **GREEDY)
    short.save(tmp_path)
    hf.generate(ours, ids, cache=cache, **GREEDY)
    cache.restore(tmp_path)
    assert hf.generate(ours, ids, cache=cache, **GREEDY).equal(stock.generate(ids, **GREEDY))


def test_padding_does_not_count_for_the_length() -> None:
    ours, stock = model("longrope", "attnmesh"), model("longrope", "sdpa")
    ids, mask = prompt(SWITCH + 6, batch=2), torch.ones(2, SWITCH + 6, dtype=torch.long)
    ids[:, :14], mask[:, :14] = 0, 0
    cache, options = hf.ShardedCache(ours.config), {"do_sample": False, "max_new_tokens": 4}
    for more in (0, 10):
        ids = torch.cat((ids, prompt(more, batch=2, seed=more)), 1)
        mask = torch.cat((mask, torch.ones(2, ids.shape[1] - mask.shape[1], dtype=torch.long)), 1)
        given = hf.generate(ours, ids, cache=cache, attention_mask=mask, **options)
        assert given.tolist() == stock.generate(ids, attention_mask=mask, **options).tolist()
        ids = given


@on_each_rank
def catch_error_of_crossing() -> str:
    try:
        hf.generate(model("longrope", "attnmesh"), prompt(60), mesh=named_mesh(Shape(1, 1, 2), AXES), max_new_tokens=9)
    except errors.InputError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_generation_across_the_switch_is_refused(pool: Pool) -> None:
    expected = "ShapeError: generate: expected tokens on one side of 64, where the model's longrope changes, given a pr"
    for error in pool.run(2, catch_error_of_crossing):
        assert error.startswith(expected), error


ROBERTA = RobertaConfig(
    vocab_size=97, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, is_decoder=True,
    max_position_embeddings=80, pad_token_id=1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip


def roberta(attention: str) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        result = AutoModelForCausalLM.from_config(deepcopy(ROBERTA), attn_implementation=attention)
    return result.double().train()


@on_each_rank
def compute_roberta_loss(token: int) -> float | str:
    ids = prompt(41)
    ids[0, 17] = token
    batch = hf.shard_batch({"input_ids": ids, "labels": ids}, named_mesh(Shape(1, 1, 2), AXES))
    try:
        return roberta("attnmesh")(**batch).loss.item()
    except errors.KernelError as error:
        return str(error)


def test_positions_that_begin_after_padding_are_those_of_the_whole_sequence(pool: Pool) -> None:
    ids = prompt(41)
    ids[0, 17] = 5
    expected = roberta("eager")(input_ids=ids, labels=ids).loss.item()
    assert sum(pool.run(2, compute_roberta_loss, 5)) / 2 == pytest.approx(expected, rel=1e-6)  # losses are float32
    for error in pool.run(2, compute_roberta_loss, 1):  # positions do not count padding
        assert error.startswith("attnmesh.hf input_ids: expected padding at the end of a sequence, if any")
