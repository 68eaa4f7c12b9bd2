"""Generation over a mesh gives the tokens that stock transformers gives on one process."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import BaseStreamer

import attnmesh.hf as hf
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.models import families
from tests.support.models.families import CONFIGS, FEW, SHAPES, STOCK, families_on_meshes, prompt
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.seeds import some

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
