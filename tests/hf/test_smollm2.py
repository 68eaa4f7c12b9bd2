"""A released language model gives the tokens of stock transformers, on any number of ranks."""

from functools import lru_cache
from itertools import product
from pydoc_data.topics import topics

import pytest
import torch
from transformers import AutoModelForCausalLM

import attnmesh.hf as hf
from attnmesh.cli.launch import run_on_ranks
from attnmesh.core.storage import STORAGES
from attnmesh.hf.load import PACKAGED, locate, open_model, open_tokenizer
from attnmesh.mesh.shapes import mesh_shape
from attnmesh.setup.init_mesh import init_mesh
from tests.support.process.needs import needs_smollm2
from tests.support.ranks.pool import on_each_rank

pytestmark = [needs_smollm2, pytest.mark.long]

NEW = 24

CASES = [(400, 3), *product((600, 4000, 8000), (2, 3, 4))]
"""Tokens of a prompt, and ranks."""

LAYERS, KV_HEADS, WIDTH, BLOCK = 30, 3, 64, 16

ROWS = 2 * KV_HEADS * LAYERS
"""Rows of a token: keys and values of each head of each layer."""


@lru_cache
def text(length: int) -> torch.Tensor:
    """Return the first tokens of Python's documentation."""
    tokenizer = open_tokenizer(locate(PACKAGED))
    ids = tokenizer("\n\n".join(topics[name] for name in ("specialnames", "typesmapping", "assignment")))["input_ids"]
    return torch.tensor([ids[:length]])


@lru_cache
def stock_tokens(length: int) -> list[int]:
    """Return the tokens that stock transformers generates."""
    model = AutoModelForCausalLM.from_pretrained(locate(PACKAGED)).eval()
    output = model.generate(text(length), max_new_tokens=NEW, do_sample=False)
    tokens: list[int] = output[0, length:].tolist()
    return tokens


@on_each_rank
def generate_and_count_bytes(ids: torch.Tensor, folder: str, storage: str | None = None) -> tuple[list[int], int]:
    """Return the tokens that a rank generates, and the bytes of its cache."""
    ranks = torch.distributed.get_world_size()
    mesh = init_mesh("cpu", mesh_shape(ranks, 9, 3), 9, 3)
    model = open_model(folder, "auto", torch.device("cpu"))
    cache = hf.ShardedCache(model.config, mesh, storage=storage)
    output = hf.generate(model, ids, cache=cache, max_new_tokens=NEW, do_sample=False)
    return output[0, ids.shape[1] :].tolist(), cache.held_bytes


@pytest.mark.parametrize(("length", "ranks"), CASES)
def test_the_tokens_are_those_of_stock_transformers(length: int, ranks: int) -> None:
    assert text(length).shape[1] == length
    answers = run_on_ranks(ranks, generate_and_count_bytes, text(length), locate(PACKAGED), seconds=100)
    tokens = stock_tokens(length)
    assert len(set(tokens)) > 3
    token = ROWS * WIDTH * 4  # bytes, in float32
    whole = (length + NEW - 1) * token
    for given, held in answers:
        assert given == tokens
        assert abs(held - whole / ranks) <= BLOCK * token  # ranks hold whole blocks


@pytest.mark.parametrize("storage", STORAGES)
def test_a_cache_in_8_bits_gives_the_same_tokens_on_any_ranks(storage: str) -> None:
    length = 2000
    found = []
    for ranks in (1, 2, 3, 4):
        answers = run_on_ranks(ranks, generate_and_count_bytes, text(length), locate(PACKAGED), storage, seconds=100)
        found += [tokens for tokens, _ in answers]
        assert sum(held for _, held in answers) == (length + NEW - 1) * ROWS * (WIDTH + 2)  # and a scale of 2 bytes
    assert found == [found[0]] * len(found)
    assert len(set(found[0])) > 3
