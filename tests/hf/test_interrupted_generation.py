"""After a generation failed on one rank alone, its cache continues there and on the others, with the right tokens."""

from contextlib import nullcontext
from functools import cache as cached
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import LogitsProcessor

import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.models import families
from tests.support.models.families import STOCK, prompt
from tests.support.models.tiny_models import Case, build
from tests.support.ranks.odd_rank import alert
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh

NEW = 6
"""Tokens of each generation. The first pass of a part of the model is in prefill."""

PLACES = [
    ("model.layers.0.input_layernorm", 4),
    ("model.layers.1.mlp", 1),
    ("model.layers.1.mlp", 4),
    ("processor", 3),
    ("processor", NEW),  # after the last pass: the other rank returns its tokens
]
"""A part of the model, and the pass in which it fails."""


class Failing(LogitsProcessor):  # type: ignore[misc]
    """A part of a generation that fails on rank 1 at one of its calls."""

    def __init__(self, at: int) -> None:
        self.left = at if torch.distributed.get_rank() else 0

    def __call__(self, _: Any, scores: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise MemoryError
        return scores


def new_model(family: str, attention: str) -> PreTrainedModel:
    if family in STOCK:
        return families.model(family, attention)
    return build(Case(family, family), attention, torch.float32)


@on_each_rank
def generate_after_failure(family: str, part: str, at: int) -> list[int]:
    """Return the tokens of the turn after one that failed, which begins with all but its last tokens."""
    model = new_model(family, "attnmesh")
    cache = hf.ShardedCache(model.config, named_mesh(Shape(1, 1, 2), AXES))
    options: dict[str, Any] = {"cache": cache, "max_new_tokens": NEW, "do_sample": False}
    failing = Failing(at)
    if part == "processor":
        handle, more = None, {"logits_processor": [failing]}
    else:
        handle = model.get_submodule(part).register_forward_pre_hook(lambda *_: failing(None, None))
        more = {}
    last = part == "processor" and at == NEW
    if torch.distributed.get_rank():
        with pytest.raises(MemoryError):
            hf.generate(model, prompt(40), **options, **more)
    if not last or not torch.distributed.get_rank():
        told = pytest.raises(errors.MeshError) if not last else nullcontext()
        with told, alert():
            hf.generate(model, prompt(40), **options, **more)
    if handle is not None:
        handle.remove()
    return hf.generate(model, second_prompt(), **options).tolist()


def second_prompt() -> Tensor:
    return torch.cat((prompt(40), prompt(20, seed=1)), 1)


@cached
def stock_tokens(family: str) -> list[int]:
    """Return the tokens of the second turn of stock transformers."""
    stock = new_model(family, STOCK.get(family, "sdpa"))
    tokens: list[int] = stock.generate(second_prompt(), max_new_tokens=NEW, do_sample=False).tolist()
    return tokens


CASES = [
    pytest.param(family, *place, marks=[pytest.mark.long] if family == "gemma3" and place != PLACES[2] else [])
    for family in ("llama", "gemma3", "qwen3_next")
    for place in PLACES
]


@pytest.mark.parametrize(("family", "part", "at"), CASES)
def test_a_cache_continues_after_one_rank_failed(family: str, part: str, at: int, pool: Pool) -> None:
    assert pool.run(2, generate_after_failure, family, part, at) == [stock_tokens(family)] * 2


@on_each_rank
def catch_refusal_of_other_caches() -> str:
    """Pass a cache of more tokens on rank 1 than on rank 0, of which no error interrupted any."""
    model, mesh = families.model("llama", "attnmesh"), named_mesh(Shape(1, 1, 2), AXES)
    caches = [hf.ShardedCache(model.config, mesh) for _ in range(2)]
    for cache, length in zip(caches, (20, 30), strict=True):
        hf.prefill(model, prompt(length), cache)
    with pytest.raises(errors.MeshError) as caught:
        hf.generate(model, prompt(40), cache=caches[torch.distributed.get_rank()], max_new_tokens=2)
    assert [cache.get_seq_length() for cache in caches] == [19, 29]
    return str(caught.value)


def test_different_caches_are_refused(pool: Pool) -> None:
    first, second = pool.run(2, catch_refusal_of_other_caches)
    assert first == second
    assert "held\n    0      19\n    1      29" in first, first
