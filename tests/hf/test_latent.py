"""Multi-head latent attention: the tokens of stock transformers, from latents that are cached and attended in place."""

from collections.abc import Callable
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import attnmesh as am
import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.attention import latent
from attnmesh.attention.latent import Projection
from attnmesh.comm.counters import counted
from attnmesh.hf.latent import LatentStates
from attnmesh.kernels.select import choose
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.families import prompt
from tests.support.mesh_problems import named_mesh
from tests.support.pool import Pool
from tests.tools.tiny_models import Case, build

TYPES = ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu")

SHAPES = (Shape(1, 1, 1), Shape(1, 2, 1), Shape(1, 1, 3), Shape(1, 2, 2))

SAMPLED = dict(zip(("minicpm3", "deepseek_v2", "longcat_flash", "deepseek_v3"), SHAPES, strict=True))
"""Each mesh with one type in `make test`."""

RANK, ROTATED, LAYERS = 16, 4, 3
"""Sizes of the tiny models."""

Generate = Callable[..., Tensor]


@lru_cache(maxsize=4)
def model(kind: str, attention: str) -> PreTrainedModel:
    """Return a tiny model in float64."""
    return build(Case(kind, kind), attention, torch.float64)


def plain(generate: Generate) -> list[Tensor]:
    return [generate(prompt(90), max_new_tokens=10)]


def padded(generate: Generate) -> list[Tensor]:
    """Generate from a batch padded on the left."""
    ids = prompt(80, batch=3)
    mask = torch.ones_like(ids)
    for row, count in enumerate((0, 30, 73)):
        ids[row, :count], mask[row, :count] = 0, 0
    return [generate(ids, attention_mask=mask, max_new_tokens=8)]


def chunked(generate: Generate) -> list[Tensor]:
    return [generate(prompt(100), max_new_tokens=6, prefill_chunk_size=40)]


def beams(generate: Generate) -> list[Tensor]:
    return [generate(prompt(71, batch=2), max_new_tokens=7, num_beams=3)]


def turns(generate: Generate) -> list[Tensor]:
    """Generate in three turns, the last of which goes back to an earlier one."""
    first = generate(prompt(70), max_new_tokens=5)
    second = generate(torch.cat((first, prompt(30, seed=1)), 1), max_new_tokens=5)
    return [first, second, generate(torch.cat((second[:, :72], prompt(20, seed=2)), 1), max_new_tokens=5)]


CHECKS = (plain, padded, chunked, beams, turns)


def ours(kind: str, shape: Shape) -> dict[str, Any]:
    """Return the tokens of each check on a rank."""
    small, mesh = model(kind, "attnmesh"), named_mesh(shape, AXES)
    found = {}
    for check in CHECKS:
        cache = hf.ShardedCache(small.config, mesh, block=4)

        def generate(ids: Tensor, cache: hf.ShardedCache = cache, **options: Any) -> Tensor:
            return hf.generate(small, ids, cache=cache, do_sample=False, **options)

        found[check.__name__] = [tokens.tolist() for tokens in check(generate)]
    return found


@lru_cache
def stock(kind: str) -> dict[str, Any]:
    """Return the tokens of stock transformers."""

    def generate(ids: Tensor, **options: Any) -> Tensor:
        options = {"attention_mask": torch.ones_like(ids), **options, "prefill_chunk_size": None}
        return model(kind, "sdpa").generate(ids, do_sample=False, **options)

    return {check.__name__: [tokens.tolist() for tokens in check(generate)] for check in CHECKS}


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in SAMPLED else pytest.mark.long) for kind in TYPES]
)
def test_each_type_gives_the_tokens_of_stock_transformers(kind: str, shape: Shape, pool: Pool) -> None:
    if kind in SAMPLED and SAMPLED[kind] != shape:
        pytest.skip("long")
    for found in pool.run(shape.ranks, ours, kind, shape):
        assert found == stock(kind)
