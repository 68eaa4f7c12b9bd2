"""Generation over a mesh gives the tokens that stock transformers gives on one process."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import lru_cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import BaseStreamer

import attnmesh.hf as hf
from attnmesh.mesh.shapes import AXES, Shape
from tests.support import families
from tests.support.families import CONFIGS, FEW, SHAPES, STOCK, families_on_meshes, prompt
from tests.support.mesh_problems import named_mesh
from tests.support.pool import Pool, on_each_rank
from tests.support.seeds import rotated, some

LAYERS = CONFIGS["llama"].num_hidden_layers

Generate = Callable[..., Any]
"""(input_ids, **options) -> sequences."""


class TokenRecorder(BaseStreamer):
    """A streamer that keeps the tokens."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        pass


def greedy(generate: Generate, _: str) -> Tensor:
    return generate(prompt(150), max_new_tokens=12, do_sample=False)


def short(generate: Generate, _: str) -> Tensor:
    """Generate from a prompt shorter than a full round of blocks."""
    return generate(prompt(5), max_new_tokens=70, do_sample=False)


def shortest(generate: Generate, _: str) -> Tensor:
    """Generate from one token, which the first rank alone caches, and from two, of which one is padding."""
    ids, mask = prompt(2, batch=2), torch.tensor([[1, 1], [0, 1]])
    one = generate(prompt(1, batch=2), max_new_tokens=18, do_sample=False)
    two = generate(ids * mask, attention_mask=mask, max_new_tokens=17, do_sample=False)
    return torch.cat((one, two))


def sampled(generate: Generate, _: str) -> Tensor:
    torch.manual_seed(3)
    return generate(prompt(137), max_new_tokens=10, do_sample=True, top_k=20, temperature=0.8, num_return_sequences=2)


def beams(generate: Generate, _: str) -> Tensor:
    return generate(prompt(139, batch=2), max_new_tokens=8, do_sample=False, num_beams=3)


def padded(generate: Generate, _: str) -> Tensor:
    """Generate from a batch padded on the left."""
    ids = prompt(140, batch=3)
    mask = torch.ones_like(ids)
    for row, count in enumerate((0, 70, 133)):
        ids[row, :count], mask[row, :count] = 0, 0
    return generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False)


def padded_beams(generate: Generate, _: str) -> Tensor:
    ids = prompt(80, batch=2)
    mask = torch.ones_like(ids)
    ids[1, :33], mask[1, :33] = 0, 0
    return generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, num_beams=2)


def chunked(generate: Generate, _: str) -> Tensor:
    return generate(prompt(300), max_new_tokens=8, do_sample=False, prefill_chunk_size=70)


def looked_up(generate: Generate, _: str) -> Tensor:
    """Generate with drafts from the prompt."""
    return generate(prompt(20).repeat(1, 6), max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=4)


def assisted(generate: Generate, family: str) -> Tensor:
    draft = families.model(family, STOCK[family])
    return generate(prompt(90), max_new_tokens=10, do_sample=False, assistant_model=draft)


CASES = (greedy, short, shortest, sampled, beams, padded, padded_beams, chunked, looked_up, assisted)


@lru_cache
def stock_tokens(family: str, case: Callable[[Generate, str], Tensor]) -> Tensor:
    """Return the tokens of stock transformers."""
    return case(families.model(family, STOCK[family]).generate, family)


@on_each_rank
def generate_cases(family: str, shape: Shape, cases: Sequence[Callable[[Generate, str], Tensor]]) -> dict[str, Tensor]:
    """Return the tokens of the cases on a rank."""
    model, mesh = families.model(family, "attnmesh"), named_mesh(shape, AXES)

    def generate(ids: Tensor, **options: Any) -> Tensor:
        return hf.generate(model, ids, mesh=mesh, **options)

    return {case.__name__: case(generate, family) for case in cases}


def seventh(family: str) -> list[Callable[[Generate, str], Tensor]]:
    """Return every seventh case, the next ones for each family, so that each case runs on one."""
    return [*CASES[FEW.index(family) :: len(FEW)]]


@pytest.mark.parametrize(("family", "shape"), [x for x in families_on_meshes(long=False) if x.values[0] in FEW])
def test_each_family_gives_some_tokens_of_stock_transformers(family: str, shape: Shape, pool: Pool) -> None:
    check_tokens(family, shape, seventh(family), pool)


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("family", CONFIGS)
def test_each_family_gives_the_tokens_of_stock_transformers(family: str, shape: Shape, pool: Pool) -> None:
    check_tokens(family, shape, CASES, pool)


def check_tokens(family: str, shape: Shape, cases: Sequence[Callable[[Generate, str], Tensor]], pool: Pool) -> None:
    answers = pool.run(shape.ranks, generate_cases, family, shape, cases)
    for case in cases:
        for answer in answers:
            assert answer[case.__name__].tolist() == stock_tokens(family, case).tolist(), case.__name__


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
        assert cache.layers[0].kv.is_block_cyclic
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


class Generated(NamedTuple):
    """Tokens of `model.generate` with a ShardedCache, of one with large blocks, and those that were streamed."""

    made: list[list[int]]
    of_large_blocks: list[list[int]]
    streamed: list[int]


@on_each_rank
def generate_by_model_and_stream(shape: Shape) -> Generated:
    model, mesh = families.model("llama", "attnmesh"), named_mesh(shape, AXES)
    recorder = TokenRecorder()
    cache = hf.ShardedCache(model.config, mesh, capacity=200)
    made = model.generate(prompt(70), past_key_values=cache, max_new_tokens=10, do_sample=False, streamer=recorder)
    cache = hf.ShardedCache(model.config, mesh, reproducible=shape.ranks in (1, 2, 4), merge="tree", block=128)
    again = hf.generate(model, prompt(70), cache=cache, max_new_tokens=10, do_sample=False)
    return Generated(made.tolist(), again.tolist(), recorder.tokens)


@pytest.mark.parametrize("shape", some(SHAPES, Shape(1, 2, 1), Shape(2, 1, 2)))
def test_model_generate_works_with_the_cache_and_streams(shape: Shape, pool: Pool) -> None:
    expected = families.model("llama", "sdpa").generate(prompt(70), max_new_tokens=10, do_sample=False).tolist()
    for answer in pool.run(shape.ranks, generate_by_model_and_stream, shape):
        assert answer.made == expected
        assert answer.of_large_blocks == expected
        assert answer.streamed == expected[0]


@on_each_rank
def count_held_after_prefill(shape: Shape, length: int) -> list[tuple[int, int]]:
    """Return the tokens and bytes that a rank holds after a prefill."""
    model, mesh = families.model("llama", "attnmesh"), named_mesh(shape, AXES)
    cache = hf.ShardedCache(model.config, mesh)
    hf.prefill(model, prompt(length), cache)
    return [(layer.kv.used, cache.held_bytes) for layer in cache.layers]


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
    return Dealt(made[0, length:].tolist(), cache.block, cache.layers[0].kv.is_block_cyclic)


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


def _by_config(*, on_mesh: bool) -> list[Any]:
    """Return the tokens of generations whose settings come from configurations."""
    model = families.model("llama", "attnmesh" if on_mesh else "sdpa")
    generate = (lambda ids, **more: hf.generate(model, ids, **more)) if on_mesh else model.generate
    outputs = []
    for changes in ({"prompt_lookup_num_tokens": 3}, {"num_beams": 3}, {"num_return_sequences": 2, "num_beams": 2}):
        config = GenerationConfig(max_new_tokens=9, do_sample=False, **changes)
        outputs.append(generate(prompt(20).repeat(1, 6), generation_config=config).tolist())
    if on_mesh:
        model.config.use_cache = model.generation_config.use_cache = False  # as in many checkpoints after training
    outputs.append(generate(prompt(70), max_new_tokens=9, do_sample=False).tolist())
    ids = prompt(70, batch=2)
    ids[1, :20] = 0  # padding without a mask
    outputs.append(generate(ids, max_new_tokens=9, do_sample=False, pad_token_id=0).tolist())
    return outputs


def test_settings_of_configurations_work_like_options() -> None:
    assert _by_config(on_mesh=True) == _by_config(on_mesh=False)


def test_the_cache_that_a_model_asks_for_is_not_needed() -> None:
    model, stock = families.model("gemma3", "attnmesh"), families.model("gemma3", "sdpa")
    model.generation_config.cache_implementation, model.generation_config.use_cache = "hybrid", False
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    assert hf.generate(model, prompt(40), mesh=None, **options).equal(stock.generate(prompt(40), **options))


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
