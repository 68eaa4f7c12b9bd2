"""Sliding and chunked layers that keep their window alone give the tokens of stock transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.mesh.shapes import Shape
from tests.support.models import families
from tests.support.models.families import STOCK, prompt
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh

AXES = ("heads", "queries", "keys")

WINDOWED = {"gemma3": Shape(1, 2, 2), "gpt-oss": Shape(1, 1, 3), "mistral": Shape(2, 1, 2), "llama4": Shape(1, 1, 2)}


@on_each_rank
def talk_in_windows(family: str, shape: Shape, windows: bool) -> list[list[list[int]]]:
    """Return the tokens of turns on one cache, of which the last two go back."""
    model, mesh = families.model(family, "attnmesh"), named_mesh(shape, AXES) if shape.ranks > 1 else None
    cache = hf.ShardedCache(model.config, mesh, windows=windows)
    turns = []
    generated = [prompt(150)]
    for step in range(4):
        ids = generated[-1]
        if step == 1:
            ids = torch.cat((ids, prompt(40, seed=1)), 1)
        if step in (2, 3):  # a branch early in the conversation, then one at its end
            ids = torch.cat((ids[:, : 60 if step == 2 else -3], prompt(70, seed=step)), 1)
        generated.append(hf.generate(model, ids, cache=cache, max_new_tokens=12, do_sample=False))
        turns.append(generated[-1].tolist())
    return turns


def stock_conversation(family: str) -> list[Any]:
    model = families.model(family, STOCK[family])
    turns = []
    ids = prompt(150)
    for step in range(4):
        if step == 1:
            ids = torch.cat((ids, prompt(40, seed=1)), 1)
        if step in (2, 3):
            ids = torch.cat((ids[:, : 60 if step == 2 else -3], prompt(70, seed=step)), 1)
        ids = model.generate(ids, max_new_tokens=12, do_sample=False)
        turns.append(ids.tolist())
    return turns


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[] if family == "gemma3" else pytest.mark.long) for family in WINDOWED]
)
def test_turns_that_branch_off_are_computed_again(family: str, pool: Pool) -> None:
    expected, shape = stock_conversation(family), WINDOWED[family]
    for windows in (True, False):
        for turns in pool.run(shape.ranks, talk_in_windows, family, shape, windows):
            assert turns == expected


@on_each_rank
def count_tokens_and_slots(family: str, shape: Shape, windows: bool) -> list[tuple[int, int]]:
    """Return per layer the tokens and slots of a rank after a prompt of 1,200 tokens and some new ones."""
    model, mesh = families.model(family, "attnmesh"), named_mesh(shape, AXES)
    cache = hf.ShardedCache(model.config, mesh, windows=windows, block=4)
    hf.generate(model, prompt(1200), cache=cache, max_new_tokens=10, do_sample=False)
    return [(layer.kv_cache.length, layer.kv_cache.keys.shape[2] - 1) for layer in cache.layers]


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
def test_layers_with_a_window_take_its_memory(family: str, pool: Pool) -> None:
    kinds = getattr(families.CONFIGS[family], "layer_types", None) or ["sliding_attention"] * 2
    for layers in pool.run(3, count_tokens_and_slots, family, Shape(1, 1, 3), True):
        for kind, (length, slots) in zip(kinds, layers, strict=True):
            assert length == 1209
            assert slots < 40 if kind == "sliding_attention" else slots >= 403
    for layers in pool.run(3, count_tokens_and_slots, family, Shape(1, 1, 3), False):
        assert all(slots >= 403 for _, slots in layers)


@on_each_rank
def catch_error_of_crop(kind: str) -> str:
    """Return the error of a rank; no layer may have changed."""
    model = families.model("gemma3", "attnmesh")
    mesh = named_mesh(Shape(1, 1, 2), AXES)
    odd = _rank() == 1
    try:
        if kind == "windows":
            hf.ShardedCache(model.config, mesh, windows="yes" if odd else True)
        if kind == "keep":
            hf.ShardedCache(model.config, mesh, keep=-1 if odd else 0)
        if kind == "differ":
            hf.ShardedCache(model.config, mesh, windows=not odd)
        cache = hf.ShardedCache(model.config, mesh, keep=5)
        hf.prefill(model, prompt(100), cache)
        cache.crop(-5)
        assert cache.get_seq_length() == 94
        cache.crop(-30)
    except errors.InputError as error:
        if kind == "crop":
            assert {layer.kv_cache.length for layer in cache.layers} == {94}
        return f"{type(error).__name__}: {error}"
    return "no error"


def _rank() -> int:
    return torch.distributed.get_rank()


CROPS = {
    "crop": "ShapeError: ShardedCache crop: expected tokens that layers with a window still know, given 64 of 94 tok",
    "windows": "KernelError: ShardedCache windows: expected True or False, given 'yes'. Fix: leave it at True.",
    "keep": "ShapeError: ShardedCache keep: expected a whole number, 0 or more, given -1",
    "differ": "MeshError: ShardedCache: expected the same call on every rank",
}


@pytest.mark.parametrize("kind", CROPS)
def test_bad_calls_raise_alike(kind: str, pool: Pool) -> None:
    one, other = pool.run(2, catch_error_of_crop, kind)
    assert one == other
    assert one.startswith(CROPS[kind])


def gapped() -> tuple[Tensor, Tensor]:
    """Return prompts of 50 tokens and their mask, with padding before the first one and between tokens."""
    ids = prompt(50, batch=2)
    mask = torch.ones_like(ids)
    mask[0, :7] = mask[0, 38:44] = mask[1, 20] = 0
    return ids.masked_fill(mask == 0, 0), mask


@on_each_rank
def generate_with_gaps(family: str, shape: Shape) -> dict[str, Any]:
    """Return tokens, or the error, of prompts with padding between tokens."""
    model, mesh = families.model(family, "attnmesh"), named_mesh(shape, AXES) if shape.ranks > 1 else None
    (ids, mask), options = gapped(), {"max_new_tokens": 9, "do_sample": False}
    calls: dict[str, Any] = {
        "generate": lambda: hf.generate(model, ids, mesh=mesh, attention_mask=mask, **options),
        "inferred": lambda: hf.generate(model, ids, mesh=mesh, **options),
        "prefill": lambda: hf.prefill(model, ids, hf.ShardedCache(model.config, mesh), attention_mask=mask),
        "model.generate": lambda: model.generate(
            ids, attention_mask=mask, past_key_values=hf.ShardedCache(model.config, mesh), **options
        ),
    }
    answers = {}
    for name, call in calls.items():
        try:
            tokens = call()
            answers[name] = None if tokens is None else tokens.tolist()
        except errors.InputError as error:
            answers[name] = f"{type(error).__name__}: {error}"
    return answers


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral", "llama4"])
def test_padding_between_tokens_is_right_or_refused(family: str, pool: Pool) -> None:
    (ids, mask), shape = gapped(), Shape(1, 1, 1 if family == "mistral" else 3)
    stock = families.model(family, STOCK[family])
    expected = stock.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False).tolist()
    for answers in pool.run(shape.ranks, generate_with_gaps, family, shape):
        for call, given in answers.items():
            if family == "llama":
                assert given == (None if call == "prefill" else expected)
            else:
                assert "expected padding before the first token of a sequence only, given padding betw" in given, call


@on_each_rank
def generate_after_interruption(shape: Shape) -> list[int]:
    """Return the tokens after a forward pass was interrupted between two layers, and continued."""
    model, mesh = families.model("gemma3", "attnmesh"), named_mesh(shape, AXES)
    cache = hf.ShardedCache(model.config, mesh)
    made = hf.generate(model, prompt(90), cache=cache, max_new_tokens=5, do_sample=False)
    for tokens in (1, 40):  # a step, and a chunk of a prompt
        kv_cache = cache.layers[0].kv_cache
        kv_cache.append(*torch.randn(2, 1, 2, tokens, 8).unbind())
        made = hf.generate(model, made, cache=cache, max_new_tokens=5, do_sample=False)
    return made.tolist()


def test_an_interrupted_pass_is_continued_or_computed_again(pool: Pool) -> None:
    expected = families.model("gemma3", STOCK["gemma3"]).generate(prompt(90), max_new_tokens=15, do_sample=False)
    assert pool.run(2, generate_after_interruption, Shape(1, 1, 2)) == [expected.tolist()] * 2


@on_each_rank
def generate_around_saves(family: str, shape: Shape, folder: Path) -> list[int]:
    model = families.model(family, "attnmesh")
    cache = hf.ShardedCache(model.config, named_mesh(shape, AXES) if shape.ranks > 1 else None)
    if folder.exists():
        cache.restore(folder)
        ids = torch.cat((cache.tokens, prompt(9, seed=4)), 1)
    else:
        ids = hf.generate(model, prompt(120), cache=cache, max_new_tokens=5, do_sample=False)
        cache.save(folder)
        ids = torch.cat((cache.tokens, prompt(9, seed=4)), 1)
    return hf.generate(model, ids, cache=cache, max_new_tokens=20, do_sample=False).tolist()


def test_a_saved_cache_continues_on_other_ranks(pool: Pool, tmp_path: Path) -> None:
    expected = pool.run(2, generate_around_saves, "gemma3", Shape(1, 1, 2), tmp_path / "cache")
    for shape in (Shape(1, 1, 1), Shape(1, 1, 3)):
        assert (
            pool.run(shape.ranks, generate_around_saves, "gemma3", shape, tmp_path / "cache")
            == [expected[0]] * shape.ranks
        )
