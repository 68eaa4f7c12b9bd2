"""A ShardedCache: turns, copies and other prompts give the tokens of stock transformers; each rank keeps its share."""

from copy import deepcopy
from typing import NamedTuple

import pytest
import torch

import attnmesh.hf as hf
from attnmesh.errors import ShapeError
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.models import families
from tests.support.models.families import CONFIGS, SHAPES, STOCK, prompt
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.seeds import rotated, some

LAYERS = CONFIGS["llama"].num_hidden_layers


@on_each_rank
def talk_in_turns(shape: Shape) -> list[list[list[int]]]:
    """Return the tokens of four turns on one cache, on a rank. The last turn goes back to an earlier one."""
    model, mesh = families.model("qwen3", "attnmesh"), named_mesh(shape, AXES)
    cache = hf.ShardedCache(model.config, mesh)
    turns = []
    ids = prompt(120)
    for turn in range(3):
        made = hf.generate(model, ids, cache=cache, max_new_tokens=9, do_sample=False)
        turns.append(made.tolist())
        assert cache.layers[0].kv_cache.is_block_cyclic
        ids = torch.cat((made, prompt(1 + 80 * turn, seed=turn + 1)), 1)
    ids = torch.cat((ids[:, :125], prompt(30, seed=9)), 1)
    turns.append(hf.generate(model, ids, cache=cache, max_new_tokens=9, do_sample=False).tolist())
    even = -(-cache.get_seq_length() // (shape.queries * shape.keys))
    assert abs(cache.held - even) <= cache.block
    return turns


@pytest.mark.parametrize("shape", some(SHAPES, Shape(1, 1, 3), Shape(1, 2, 2)))
def test_turns_of_a_conversation_share_the_cache(shape: Shape, pool: Pool) -> None:
    stock = families.model("qwen3", STOCK["qwen3"])
    turns = []
    ids = prompt(120)
    for turn in range(3):
        made = stock.generate(ids, max_new_tokens=9, do_sample=False)
        turns.append(made.tolist())
        ids = torch.cat((made, prompt(1 + 80 * turn, seed=turn + 1)), 1)
    ids = torch.cat((ids[:, :125], prompt(30, seed=9)), 1)
    turns.append(stock.generate(ids, max_new_tokens=9, do_sample=False).tolist())
    assert pool.run(shape.ranks, talk_in_turns, shape) == [turns] * shape.ranks


@on_each_rank
def count_held_after_prefill(shape: Shape, length: int) -> list[tuple[int, int]]:
    """Return the tokens and bytes that a rank holds after a prefill."""
    model, mesh = families.model("llama", "attnmesh"), named_mesh(shape, AXES)
    cache = hf.ShardedCache(model.config, mesh)
    hf.prefill(model, prompt(length), cache)
    return [(layer.kv_cache.used, cache.held_bytes) for layer in cache.layers]


@pytest.mark.parametrize(("shape", "length"), rotated(SHAPES, [33, 257, 1000], every=3))
def test_each_rank_keeps_its_share_within_a_block(shape: Shape, length: int, pool: Pool) -> None:
    answers = pool.run(shape.ranks, count_held_after_prefill, shape, length)
    share = (length - 1) / (shape.queries * shape.keys)
    for layer in range(LAYERS):
        held = [answer[layer][0] for answer in answers]
        assert sum(held) == (length - 1) * shape.heads
        assert all(abs(count - share) <= 16 for count in held)
    for (used, size), *_ in answers:
        assert size == used * LAYERS * 2 * 2 // shape.heads * 8 * 4  # layers, keys and values, heads, width, float32


class Dealt(NamedTuple):
    """The new tokens after a prompt, the block of the cache, and whether its tokens lie in turns of blocks."""

    new_tokens: list[int]
    block: int
    in_turns: bool


@on_each_rank
def generate_after_long_prompt(shape: Shape, length: int, reproducible: bool) -> Dealt:
    model, mesh = families.model("llama", "attnmesh"), named_mesh(shape, AXES)
    cache = hf.ShardedCache(model.config, mesh, reproducible=reproducible)
    made = hf.generate(model, prompt(length), cache=cache, max_new_tokens=4, do_sample=False)
    return Dealt(made[0, length:].tolist(), cache.block, cache.layers[0].kv_cache.is_block_cyclic)


@pytest.mark.parametrize(
    ("shape", "length", "reproducible", "block"),
    [
        (Shape(1, 2, 1), 1537, False, 128),
        (Shape(1, 1, 2), 1600, False, 128),
        (Shape(1, 1, 2), 1536, False, 16),
        (Shape(1, 1, 2), 1600, True, 16),  # bits that do not depend on the number of ranks
    ],
)
def test_long_prompts_are_dealt_in_larger_blocks(
    shape: Shape, length: int, reproducible: bool, block: int, pool: Pool
) -> None:
    made = families.model("llama", "sdpa").generate(prompt(length), max_new_tokens=4, do_sample=False)
    expected = Dealt(made[0, length:].tolist(), block, in_turns=True)
    assert pool.run(shape.ranks, generate_after_long_prompt, shape, length, reproducible) == [expected] * shape.ranks


def test_a_full_cache_says_how_it_would_grow() -> None:
    """A `ShardedCache` has no `reserve`."""
    model = families.small_llama()
    with pytest.raises(ShapeError, match="a ShardedCache grows without capacity="):
        hf.generate(model, prompt(30), cache=hf.ShardedCache(model.config, capacity=20), max_new_tokens=1)
    cache = hf.ShardedCache(model.config)
    assert hf.generate(model, prompt(30), cache=cache, max_new_tokens=1).shape == (1, 31)


def test_a_cache_is_reused_only_for_the_same_tokens() -> None:
    model, stock = families.model("qwen2", "attnmesh"), families.model("qwen2", "sdpa")
    options = {"max_new_tokens": 6, "do_sample": False}
    cache, one, other = hf.ShardedCache(model.config), prompt(70, seed=1), prompt(90, seed=2)
    hf.generate(model, one, cache=cache, **options)
    hf.prefill(model, other, cache)
    assert hf.generate(model, other, cache=cache, **options).equal(stock.generate(other, **options))
    made = model.generate(one, past_key_values=(own := hf.ShardedCache(model.config)), **options)
    assert hf.generate(model, other, cache=own, **options).equal(stock.generate(other, **options))  # unknown: cut
    longer = torch.cat((made, prompt(5, seed=3)), 1)
    assert hf.generate(model, longer, cache=own, **options).equal(stock.generate(longer, **options))
    beamed = hf.ShardedCache(model.config)
    hf.generate(model, one, cache=beamed, num_beams=3, num_return_sequences=3, **options)
    beamed.batch_select_indices(torch.tensor([2]))
    assert hf.generate(model, one, cache=beamed, **options).equal(stock.generate(one, **options))
    pair, both = prompt(60, batch=2), hf.ShardedCache(model.config)
    hf.generate(model, pair, cache=both, **options)
    both.reorder_cache(torch.tensor([1, 0]))
    assert hf.generate(model, pair, cache=both, **options).equal(stock.generate(pair, **options))
    both.crop(-both.get_seq_length())
    assert hf.generate(model, one, cache=both, **options).equal(stock.generate(one, **options))


@on_each_rank
def continue_one_prefix_twice(shape: Shape) -> list[list[list[int]]]:
    """Return two continuations of one prefix on a rank."""
    model, mesh = families.model("gemma3", "attnmesh"), named_mesh(shape, AXES)
    cache = hf.ShardedCache(model.config, mesh)
    hf.prefill(model, prompt(100), cache)
    outputs = []
    for seed in (1, 2):
        ids = torch.cat((prompt(100), prompt(40, seed=seed)), 1)
        for other in (deepcopy(cache), cache.fork()):
            outputs.append(hf.generate(model, ids, cache=other, max_new_tokens=8, do_sample=False).tolist())
    assert cache.get_seq_length() == 99
    return outputs


@pytest.mark.parametrize("shape", [Shape(1, 1, 1), Shape(1, 2, 2)], ids=lambda shape: "x".join(map(str, shape)))
def test_a_copied_cache_is_independent(shape: Shape, pool: Pool) -> None:
    stock = families.model("gemma3", "sdpa")
    expected = []
    for seed in (1, 2):
        ids = torch.cat((prompt(100), prompt(40, seed=seed)), 1)
        expected += [stock.generate(ids, max_new_tokens=8, do_sample=False).tolist()] * 2
    assert pool.run(shape.ranks, continue_one_prefix_twice, shape) == [expected] * shape.ranks
