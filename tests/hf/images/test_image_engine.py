"""Requests with images in an engine: each text is that of `generate`, whatever else runs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.hf.serving.engine import Engine
from attnmesh.mesh.shapes import AXES, Shape
from tests.hf.images import test_image_prompts as qwen
from tests.hf.images import test_image_spans as spans
from tests.hf.images.test_images import vision_model
from tests.hf.serving.test_engine import running, started, tokens
from tests.hf.serving.test_prefix_store import until_stored
from tests.support.families import prompt
from tests.support.mesh_problems import named_mesh
from tests.support.pool import Pool

NEW = 6


def problems(kind: str) -> tuple[Any, list[dict[str, Tensor]]]:
    """Return a model, and prompts: two with other images in the same places, a longer one, and text."""
    types = "token_type_ids" if kind in spans.KINDS else "mm_token_type_ids"  # of text alone, as processors return them
    text = {"input_ids": prompt(21) % 80 + 5, types: torch.zeros(1, 21, dtype=torch.long)}
    if kind in spans.KINDS:
        given = [spans.inputs(kind, 7, 18), spans.inputs(kind, 7, 18, seed=1), spans.inputs(kind, 3, 5, 26)]
        return spans.model_of(kind, "attnmesh"), [*given, *[text] * (kind == "gemma3")]
    given = [qwen.inputs(qwen.FIRST), qwen.inputs(qwen.FIRST, seed=1), qwen.inputs(qwen.SECOND)]
    return vision_model(kind, "attnmesh"), [*given, text]


def submit(engine: Engine, batch: dict[str, Tensor], **options: Any) -> Any:
    images = {name: x for name, x in batch.items() if name not in ("input_ids", "attention_mask")}
    return engine.submit(batch["input_ids"][0].tolist(), max_new_tokens=NEW, images=images, logprobs=1, **options)


def answer(stream: Any) -> list[tuple[int, float]]:
    """Return the tokens of a stream and their log-probabilities."""
    return [(token.id, token.logprob) for token in stream]


def generated(model: Any, batch: dict[str, Tensor], mesh: Any) -> list[tuple[int, float]]:
    """Return the same of `generate`."""
    options = {"max_new_tokens": NEW, "do_sample": False, "suppress_tokens": None}
    found = hf.generate(model, **batch, mesh=mesh, return_dict_in_generate=True, output_logits=True, **options)
    ids = found.sequences[0, batch["input_ids"].shape[1] :].tolist()
    return [(token, float(row[0].log_softmax(-1)[token])) for token, row in zip(ids, found.logits, strict=True)]


def alike(found: list[list[tuple[int, float]]], wanted: list[list[tuple[int, float]]]) -> bool:
    """Return whether answers have the same tokens, with the same log-probabilities but for rounding of ropes."""
    pairs = [
        (one, other)
        for mine, theirs in zip(found, wanted, strict=True)
        for one, other in zip(mine, theirs, strict=True)
    ]
    return all(one[0] == other[0] and abs(one[1] - other[1]) < 1e-5 for one, other in pairs)


def streams_with_images(kind: str, shape: Shape) -> None:
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
    pool.run(shape.ranks, streams_with_images, kind, shape)


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


def images_from_a_store(kind: str, folder: Path) -> None:
    """Ask in a later engine: for the same images, for others in their places, and for text with the same tokens."""
    model, (batch, other, *_) = problems(kind)
    wanted = [generated(model, one, None) for one in (batch, other)]
    store = hf.PrefixStore(folder)
    for cached in (False, True):
        with running(model, None, store=store) as engine:
            assert engine is not None
            stream = submit(engine, batch)
            assert alike([answer(stream)], wanted[:1])
            assert (stream.cached_tokens >= 16) == cached, stream.cached_tokens
            until_stored(engine)
    with running(model, None, store=store) as engine:
        assert engine is not None
        stream = submit(engine, other)
        assert alike([answer(stream)], wanted[1:])
        assert stream.cached_tokens == 0


@pytest.mark.parametrize("kind", ["qwen2_5_vl", pytest.param("gemma3", marks=pytest.mark.long)])
def test_images_are_found_in_a_store_by_their_digest(kind: str, pool: Pool, tmp_path: Path) -> None:
    pool.run(1, images_from_a_store, kind, tmp_path)
