"""Images whose tokens see each other both ways, on one to three ranks, beside stock transformers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.hf.family import family_of_class
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.images.image_models import KINDS as TYPES
from tests.support.images.image_models import build_images, image_arguments, image_batch, image_case, image_types
from tests.support.images.image_prompts import OPTIONS, SHAPES, logits
from tests.support.images.image_spans import KINDS, inputs, model_of, paligemma2
from tests.support.images.video_models import video_batch
from tests.support.models.families import prompt
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.seeds import rotated
from tests.support.truth.tolerances import FLOAT64_MODEL


def stock(kind: str, batch: dict[str, Tensor]) -> Tensor:
    """The logits of stock transformers."""
    return logits(model_of(kind, "sdpa").generate(**batch, **OPTIONS))


@on_each_rank
def answer_in_turns(kind: str, shape: Shape, batches: list[dict[str, Tensor]], **options: Any) -> list[Tensor]:
    """Return on a rank the logits of turns with one cache, of blocks so small that all ranks have some."""
    model = model_of(kind, "attnmesh")
    cache = hf.ShardedCache(model.config, named_mesh(shape, AXES), block=4)
    return [logits(hf.generate(model, **batch, cache=cache, **{**OPTIONS, **options})) for batch in batches]


@on_each_rank
def answer_in_chunks(kind: str, shape: Shape, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    return answer_in_turns(kind, shape, batches, prefill_chunk_size=8)


PROMPTS: dict[str, Any] = {
    "one": [((7, 18), {})],
    "several": [((3, 5, 26), {})],
    "alike": [((9, 12), {"rows": 2})],
    "turns": [((7, 18), {}), ((7, 18, 9), {}), ((7, 18), {}), ((7, 18), {"seed": 1})],
}
"""Turns of text with images between. No number of ranks divides the tokens."""


@pytest.mark.parametrize(
    ("kind", "name", "shape", "run"),
    rotated(KINDS, [*PROMPTS], SHAPES, [answer_in_turns, answer_in_chunks], every=2 * len(SHAPES)),
)
def test_image_tokens_see_each_other(kind: str, name: str, shape: Shape, run: Any, pool: Pool) -> None:
    batches = [inputs(kind, *texts, **more) for texts, more in PROMPTS[name]]
    expected = [stock(kind, batch) for batch in batches]
    for found in pool.run(shape.ranks, run, kind, shape, batches):
        for turn, logits_of_stock in zip(found, expected, strict=True):
            assert float((turn - logits_of_stock).abs().max()) < FLOAT64_MODEL


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_generated_from_with_its_types(kind: str, pool: Pool) -> None:
    batch = {name: x for name, x in inputs(kind, 23).items() if name != "pixel_values"}
    expected = stock(kind, batch)
    for (found,) in pool.run(2, answer_in_turns, kind, Shape(1, 1, 2), [batch]):
        assert float((found - expected).abs().max()) < FLOAT64_MODEL


@pytest.mark.parametrize("kind", [kind for kind in image_types() if {*TYPES} & {*image_arguments(kind)}])
def test_the_record_says_whether_text_of_type_0_sees_later_tokens(kind: str) -> None:
    """Of each model type of images with types of tokens, beside stock transformers."""
    try:
        model: Any = build_images(image_case(kind), "sdpa", torch.float64)
    except ImportError as error:
        pytest.skip(str(error))
    ids = prompt(13) % 80 + 3
    types = dict.fromkeys({*TYPES} & {*image_arguments(kind)}, torch.zeros_like(ids))
    other = torch.cat((ids[:, :-1], ids[:, -1:] + 1), 1)
    with torch.no_grad():
        first, changed = (model(input_ids=x, use_cache=False, **types).logits[:, 0] for x in (ids, other))
    assert family_of_class(type(model.config)).prefix_types == (not torch.equal(first, changed))


@on_each_rank
def catch_error_of_rows_that_differ(kind: str) -> str:
    batch = inputs(kind, 7, 18, rows=2)
    batch["input_ids"][1] = batch["input_ids"][1].roll(2)
    batch["token_type_ids"] = (batch["input_ids"] == 90).long()
    with pytest.raises(errors.MaskError) as raised:
        hf.generate(model_of(kind, "attnmesh"), **batch, mesh=named_mesh(Shape(1, 1, 2), AXES), max_new_tokens=2)
    return str(raised.value)


def test_spans_in_other_places_of_each_sequence_are_refused_by_name(pool: Pool) -> None:
    first, second = pool.run(2, catch_error_of_rows_that_differ, "gemma3")
    assert first == second
    assert "spans in the same places of all sequences" in first


OTHER: dict[str, tuple[str, dict[str, Any], Any, str]] = {
    "images": ("molmo2", {}, image_batch, "images whose tokens see those of later images. Fix: "),
    "frames": ("molmo2", {}, video_batch, "images whose tokens see those of later images. Fix: "),
    "long": ("gemma4_unified", {"sliding_window": 3}, image_batch, "a run of 16 image tokens that see each other"),
}


@pytest.mark.parametrize("name", OTHER)
def test_other_masks_of_images_are_refused_by_name(name: str) -> None:
    kind, changes, batch_of, given = OTHER[name]
    case = image_case(kind)
    case = replace(case, changes=case.changes | {"text_config": case.changes["text_config"] | changes})
    model: Any = build_images(case, "attnmesh", torch.float32)
    batch = batch_of(model, torch.float32)
    expected = "earlier tokens in the layer's window, and later ones of their own image alone, given"
    with pytest.raises(errors.MaskError, match=f"{expected} {given}"):
        hf.generate(model, **batch, mesh=None, max_new_tokens=2)
    with pytest.raises(errors.MaskError, match=f"{expected} {given}"):
        model(**hf.shard_batch({**batch, "labels": batch["input_ids"]}, None))


@pytest.mark.parametrize("texts", [(23,), (7, 18)], ids=["text", "image"])
def test_a_prefix_beyond_the_window_of_a_layer_is_refused_by_name(texts: tuple[int, ...]) -> None:
    """PaliGemma 2 has layers with windows, which do not cut a prompt."""
    model = paligemma2("attnmesh", 22)
    batch = inputs("paligemma", *texts)
    batch = {name: x for name, x in batch.items() if len(x)}
    length = batch["input_ids"].shape[1]
    given = f"a run of {length} image tokens that see each other beyond the window of 22"
    with pytest.raises(errors.MaskError, match=given):
        hf.generate(model, **batch, mesh=None, max_new_tokens=2)
    with pytest.raises(errors.MaskError, match=given):
        model(**hf.shard_batch({**batch, "labels": batch["input_ids"]}, None))


@pytest.mark.parametrize("texts", [(23,), (7, 18)], ids=["text", "image"])
def test_a_prefix_within_the_window_of_a_layer(texts: tuple[int, ...]) -> None:
    batch = {name: x for name, x in inputs("paligemma", *texts).items() if len(x)}
    window = batch["input_ids"].shape[1]
    expected = logits(paligemma2("eager", window).generate(**batch, **OPTIONS))
    found = logits(hf.generate(paligemma2("attnmesh", window), **batch, mesh=None, **OPTIONS))
    assert float((found - expected).abs().max()) < FLOAT64_MODEL


@pytest.mark.parametrize("kind", KINDS)
def test_one_device_reads_an_image_as_stock_transformers(kind: str) -> None:
    batch = inputs(kind, 7, 18)
    with torch.no_grad():
        found, expected = (model_of(kind, attention)(**batch).logits for attention in ("attnmesh", "sdpa"))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)  # float64; all but attention is the same code
