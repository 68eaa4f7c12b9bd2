"""Models on caches of unequal shares: the tokens of stock transformers, of which each rank computes its share."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.hf.serving.engine import Engine
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.models import families
from tests.support.models.checks import DoublePrecision
from tests.support.models.families import STOCK, prompt
from tests.support.models.recurrent import model_of
from tests.support.models.tiny_models import Case, build
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.serving.engines import ids, running, tokens
from tests.support.truth.mesh_problems import named_mesh


class Conversation(NamedTuple):
    """The tokens after each turn, and how many the last layer holds on this rank and on all after the first."""

    turns: list[list[list[int]]]
    held: int
    held_by_all: int


@on_each_rank
def talk_on_shares(family: str, shape: Shape, shares: tuple[float, ...], folder: Path) -> Conversation:
    """Talk in turns on one cache, which is then loaded with even shares and back."""
    model, mesh = families.model(family, "attnmesh"), named_mesh(shape, AXES)
    cache = hf.ShardedCache(model.config, mesh, shares=shares)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    turns = [hf.generate(model, prompt(150), cache=cache, **options)]
    held = cache.layers[-1].kv_cache.used
    length = cache.get_seq_length()
    turns.append(hf.generate(model, torch.cat((turns[0], prompt(90, seed=1)), 1), cache=cache, **options))
    for number, other in enumerate((None, shares)):
        cache.save(folder / str(number))
        cache = hf.ShardedCache(model.config, mesh, shares=other)
        cache.restore(folder / str(number))
        again = torch.cat((turns[-1], prompt(3, seed=2)), 1)
        turns.append(hf.generate(model, again, cache=cache, prefill_chunk_size=64, **options))
    return Conversation([turn.tolist() for turn in turns], held, length)


@pytest.mark.parametrize(
    ("family", "shape", "shares"),
    [
        ("qwen3", Shape(1, 1, 2), (3, 1)),
        pytest.param("gemma3", Shape(1, 1, 3), (1, 5, 0.2), marks=pytest.mark.long),
        pytest.param("llama", Shape(2, 1, 2), (1, 4), marks=pytest.mark.long),
    ],
)
def test_tokens_on_unequal_shares_are_those_of_stock(
    family: str, shape: Shape, shares: tuple[float, ...], pool: Pool, tmp_path: Path
) -> None:
    stock = families.model(family, STOCK[family])
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    turns = [stock.generate(prompt(150), **options)]
    turns.append(stock.generate(torch.cat((turns[0], prompt(90, seed=1)), 1), **options))
    for _ in range(2):
        turns.append(stock.generate(torch.cat((turns[-1], prompt(3, seed=2)), 1), **options))
    answers = pool.run(shape.ranks, talk_on_shares, family, shape, shares, tmp_path)
    for rank, found in enumerate(answers):
        assert found.turns == [turn.tolist() for turn in turns]
        if family != "gemma3":  # whose last layer keeps a window
            share = shares[rank % len(shares)] / sum(shares)
            assert abs(found.held - found.held_by_all * share) <= 16 * len(shares)


@on_each_rank
def generate_in_blocks_of_one(options: dict[str, Any]) -> list[list[int]]:
    """Return tokens of Gemma 4 after a prompt of which the first rank computes two tokens, and the second one."""
    model, mesh = families.model("gemma4", "attnmesh"), named_mesh(Shape(1, 1, 2), AXES)
    output: torch.Tensor = hf.generate(model, prompt(4), cache=hf.ShardedCache(model.config, mesh, block=1), **options)
    return output.tolist()


def test_a_rank_may_have_one_token_of_a_prompt(pool: Pool) -> None:
    """Of several tokens the model gives layers that share keys the last one alone, whose output nobody reads."""
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    stock = families.model("gemma4", STOCK["gemma4"]).generate(prompt(4), **options)
    assert pool.run(2, generate_in_blocks_of_one, options) == [stock.tolist()] * 2


@on_each_rank
def generate_with_recurrent_layers(shares: tuple[float, ...]) -> tuple[torch.Tensor, list[int]]:
    """Return tokens of a model with recurrent layers, and how many tokens each of its chunks had on this rank."""
    model = model_of("qwen3_next")
    mesh = named_mesh(Shape(1, 1, len(shares)), AXES)
    seen = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    with DoublePrecision():
        cache = hf.ShardedCache(model.config, mesh, shares=shares)
        made = hf.generate(model, prompt(480), cache=cache, max_new_tokens=6, do_sample=False)
    return made, seen


def test_recurrent_layers_compute_runs_of_tokens_as_long_as_the_shares(pool: Pool) -> None:
    stock, given = model_of("qwen3_next", "eager"), prompt(480)
    with DoublePrecision():
        mask = torch.ones_like(given)
        expected = stock.generate(given, attention_mask=mask, max_new_tokens=6, do_sample=False)
    (one, many), (other, few) = pool.run(2, generate_with_recurrent_layers, (3, 1))
    assert torch.equal(one, expected)
    assert torch.equal(other, expected)
    assert (many[0], few[0]) == (14 * 24, 14 * 8)


@on_each_rank
def serve_two_requests(shares: object) -> list[int] | None:
    """Return the tokens of two requests of an engine, one by one, on rank 0."""
    model, mesh = families.model("llama", "attnmesh"), named_mesh(Shape(1, 1, 2), AXES)
    with running(model, mesh, shares=shares, cache_memory=400_000) as engine:
        if engine is None:
            return None
        assert engine.shares is not None
        streams = [engine.submit(ids(length, seed=length), max_new_tokens=5) for length in (130, 40, 90)]
        return [token for stream in streams for token in tokens(stream)]


def test_an_engine_serves_on_unequal_shares(pool: Pool) -> None:
    stock = families.model("llama", STOCK["llama"])
    expected = []
    for length in (130, 40, 90):
        given = torch.tensor([ids(length, seed=length)])
        made = stock.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=5, do_sample=False)
        expected += made[0, length:].tolist()
    assert pool.run(2, serve_two_requests, (1, 4))[0] == expected


@on_each_rank
def check_refusal(kind: str) -> None:
    config, mesh = families.model("llama", "attnmesh").config, named_mesh(Shape(1, 1, 2), AXES)
    match kind:
        case "reproducible":
            hf.ShardedCache(config, mesh, shares=(2, 1), reproducible=True)
        case "count":
            hf.ShardedCache(config, mesh, shares=(2, 1, 1))
        case "others":
            Engine(families.model("llama", "attnmesh"), mesh, shares=(2, 1 + torch.distributed.get_rank()))


REFUSED = {
    "reproducible": r"ShardedCache reproducible: expected even shares, .* given shares=\(2, 1\). Fix: leave shares=",
    "count": r"ShardedCache shares: expected 2 positive numbers, one a rank .*, given \(2, 1, 1\)",
    "others": r"ShardedCache: expected the same call on .*:\n    ranks  shares\n",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_unequal_shares_cannot_do_is_refused_on_all_ranks(kind: str, pool: Pool) -> None:
    found = pool.ask(2, check_refusal, kind)
    assert len({str(error) for error in found}) == 1
    with pytest.raises(errors.InputError, match=REFUSED[kind]):
        raise found[0]


@on_each_rank
def generate_while_selecting(name: str, shares: tuple[float, ...] | None, attention: str) -> list[int]:
    """Return tokens of a model that keeps entries or index keys beside its keys, with a prompt in chunks."""
    model = build(Case(name, name), attention, torch.float64)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    given = prompt(150)
    if shares is None:
        return model.generate(given, attention_mask=torch.ones_like(given), **options)[0].tolist()
    cache = hf.ShardedCache(model.config, named_mesh(Shape(1, 1, len(shares)), AXES), shares=shares)
    return hf.generate(model, given, cache=cache, prefill_chunk_size=64, **options)[0].tolist()


@pytest.mark.long
@pytest.mark.parametrize("name", ["deepseek_v4", "deepseek_v32"])
def test_entries_and_index_keys_lie_on_unequal_shares(name: str, pool: Pool) -> None:
    assert (
        pool.run(3, generate_while_selecting, name, (2, 5, 1), "attnmesh")
        == [generate_while_selecting(name, None, "eager")] * 3
    )
