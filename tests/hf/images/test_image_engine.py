"""Requests with images in an engine: each text is that of `generate`, whatever else runs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.hf.images.inputs import TOKEN_TYPES
from attnmesh.hf.serving.engine import Engine
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.images import image_prompts as qwen
from tests.support.images import image_spans as spans
from tests.support.images.image_answers import NEW, alike, answer, generated, submit
from tests.support.images.image_prompts import vision_model
from tests.support.models.families import prompt
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.serving.engines import running, started, tokens, until_stored
from tests.support.truth.mesh_problems import named_mesh


def problems(kind: str) -> tuple[Any, list[dict[str, Tensor]]]:
    """Return a model, and prompts: two with other images in the same places, a longer one, and text."""
    types = "token_type_ids" if kind in spans.KINDS else "mm_token_type_ids"  # of text alone, as processors return them
    text = {"input_ids": prompt(21) % 80 + 5, types: torch.zeros(1, 21, dtype=torch.long)}
    if kind in spans.KINDS:
        given = [spans.inputs(kind, 7, 18), spans.inputs(kind, 7, 18, seed=1), spans.inputs(kind, 3, 5, 26)]
        return spans.model_of(kind, "attnmesh"), [*given, text]
    given = [qwen.inputs(qwen.FIRST), qwen.inputs(qwen.FIRST, seed=1), qwen.inputs(qwen.SECOND)]
    return vision_model(kind, "attnmesh"), [*given, text]


@on_each_rank
def stream_with_images(kind: str, shape: Shape) -> None:
    model, batches = problems(kind)
    mesh = named_mesh(shape, AXES)
    wanted = [generated(model, batch, mesh) for batch in batches]
    assert abs(wanted[0][0][1] - wanted[1][0][1]) > 1e-4  # images alone differ
    with running(model, mesh, max_gap=0.01, block=4) as engine:
        if engine is None:
            return
        streams = [submit(engine, batch) for batch in batches]
        assert alike([answer(stream) for stream in streams], wanted)
        again = [submit(engine, batch) for batch in batches]
        assert alike([answer(stream) for stream in again], wanted)
        if kind not in spans.KINDS:  # whose last prompt tokens are computed again
            assert all(stream.cached_tokens > 15 for stream in again)
        replayed = submit(engine, batches[2], replay=[token for token, _ in wanted[2][:3]])
        assert alike([answer(replayed)], [wanted[2][3:]])


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("qwen2_5_vl", Shape(1, 1, 1)),
        ("gemma3", Shape(1, 3, 1)),
        pytest.param("paligemma", Shape(1, 1, 2), marks=pytest.mark.long),
        pytest.param("qwen2_5_vl", Shape(1, 1, 2), marks=pytest.mark.long),
        pytest.param("qwen3_vl", Shape(2, 1, 1), marks=pytest.mark.long),
    ],
)
def test_streams_with_images_are_those_of_generate(kind: str, shape: Shape, pool: Pool) -> None:
    pool.run(shape.ranks, stream_with_images, kind, shape)


def test_images_that_do_not_fit_end_their_request_alone() -> None:
    model, (first, _, _, text) = problems("qwen2_5_vl")
    engine = Engine(model, None)
    with pytest.raises(errors.ArgumentError, match="submit images: expected inputs for images that the model takes"):
        submit(engine, {**text, "pixels": torch.zeros(1)})
    with pytest.raises(errors.ArgumentError, match="expected tensors, numbers and text, given others: pixel_values"):
        submit(engine, {**text, "pixel_values": first["pixel_values"].numpy()})  # type: ignore[dict-item]
    none: Any = dict.fromkeys(("pixel_values_videos", "token_type_ids"))  # as processors return them
    streams = [submit(engine, {**text, "pixel_values": first["pixel_values"]}), submit(engine, first | none)]
    with started(engine):
        with pytest.raises(errors.InputError, match="images that fit the prompt"):
            tokens(streams[0])
        assert len(tokens(streams[1])) == NEW


def later_turn(batch: dict[str, Tensor], answer: list[tuple[int, float]]) -> dict[str, Tensor]:
    """Return a prompt with its answer and 8 further tokens of text."""
    more = torch.tensor([[token for token, _ in answer] + [*range(10, 18)]])
    ids = torch.cat((batch["input_ids"], more), 1)
    types = {name: pad(x, (0, more.shape[1])) for name, x in batch.items() if name in TOKEN_TYPES}
    return {**batch, "input_ids": ids, "attention_mask": torch.ones_like(ids), **types}


@on_each_rank
def read_images_from_a_store(kind: str, cached: list[int], folder: Path) -> None:
    """Ask, each time in a later engine: a prompt, it again, its next turn, and that turn with other images."""
    model, (batch, other, *_) = problems(kind)
    turn = later_turn(batch, generated(model, batch, None))
    store = hf.PrefixStore(folder)
    found = []
    for asked in (batch, batch, turn, turn | {"pixel_values": other["pixel_values"]}):
        with running(model, None, store=store) as engine:
            assert engine is not None
            stream = submit(engine, asked)
            assert alike([answer(stream)], [generated(model, asked, None)])
            found.append(stream.cached_tokens)
            until_stored(engine)
    assert found == cached, found


@pytest.mark.parametrize(
    ("kind", "cached"),
    [
        ("qwen2_5_vl", [0, 48, 48, 0]),  # of 58 tokens, and of 72
        ("gemma3", [0, 0, 46, 0]),  # its window leaves a state at the end of the answer alone
    ],
)
def test_images_are_found_in_a_store_by_their_digest(kind: str, cached: list[int], pool: Pool, tmp_path: Path) -> None:
    pool.run(1, read_images_from_a_store, kind, cached, tmp_path)
