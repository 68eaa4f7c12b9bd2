"""Prompts with images, on one to three ranks, beside stock transformers on one device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.hf.images.image_merge import text_arguments
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.images.image_models import build_images, image_case
from tests.support.images.image_prompts import (
    FIRST,
    IMAGES,
    OPTIONS,
    SECOND,
    SHAPES,
    answer,
    compute_answer_logits,
    inputs,
    logits,
    max_error,
    stock,
    vision_model,
)
from tests.support.images.processed_images import processed
from tests.support.models.families import prompt
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.seeds import rotated
from tests.support.truth.tolerances import FLOAT64_MODEL, worst

PROMPTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "one": ((FIRST,), {}),
    "padded": ((FIRST, (31, "large", 4), SECOND), {}),
    "chunked": ((SECOND,), {"prefill_chunk_size": 16}),
    "sampled": ((FIRST, (14, "large", 4)), {"num_return_sequences": 2, "do_sample": True, "top_k": 1}),
}
"""Sequences of text and images, and options. No number of ranks divides the tokens."""


@pytest.mark.parametrize(("kind", "name", "shape"), rotated([*IMAGES], [*PROMPTS], SHAPES, every=len(SHAPES)))
def test_a_prompt_with_images_gives_stock_logits(kind: str, name: str, shape: Shape, pool: Pool) -> None:
    rows, options = PROMPTS[name]
    batch = inputs(*rows)
    whole = {key: value for key, value in options.items() if key != "prefill_chunk_size"}
    expected = stock(kind, batch, **whole)
    for found in pool.run(shape.ranks, compute_answer_logits, kind, shape, batch, options):
        assert float((found - expected).abs().max()) < FLOAT64_MODEL


@pytest.mark.parametrize("kind", IMAGES)
def test_a_chunk_may_begin_in_the_padding_of_the_first_sequence(kind: str) -> None:
    """Positions of padding are 0, as those of a sequence that begins anew."""
    batch, model = inputs(SECOND, (*SECOND, 33)), vision_model(kind, "attnmesh")
    found = hf.generate(model, **batch, mesh=None, prefill_chunk_size=16, **OPTIONS)
    assert max_error(found, stock(kind, batch)) < FLOAT64_MODEL
    text = {"input_ids": prompt(40, batch=2) % 80 + 5, "attention_mask": torch.ones(2, 40, dtype=torch.long)}
    text["attention_mask"][0, :25] = 0
    cache = hf.ShardedCache(model.config, None)
    found = model.generate(**text, past_key_values=cache, prefill_chunk_size=8, **OPTIONS)
    assert max_error(found, stock(kind, text)) < FLOAT64_MODEL


@on_each_rank
def search_by_beams(kind: str) -> float:
    batch, shape = inputs(FIRST, (14, "large", 4)), Shape(1, 1, 3)
    options: dict[str, Any] = {"num_beams": 3, "output_scores": True}
    expected = vision_model(kind, "sdpa").generate(**batch, **{**OPTIONS, **options})
    found = answer(kind, shape, batch, options)
    assert torch.equal(found.sequences, expected.sequences)
    return float((found.sequences_scores - expected.sequences_scores).abs().max())


@pytest.mark.parametrize("kind", IMAGES)
def test_beams_with_images_are_those_of_stock(kind: str, pool: Pool) -> None:
    assert worst(pool.run(3, search_by_beams, kind)) < FLOAT64_MODEL


@on_each_rank
def decode_rows_after_images(kind: str, shape: Shape) -> float:
    """Decode after two prompts with images and one without, in one forward pass, and return how far logits are off."""
    model, mesh = vision_model(kind, "attnmesh"), named_mesh(shape, AXES)
    batches = [inputs(FIRST), inputs(SECOND, seed=1), {"input_ids": prompt(21) % 80 + 5}]
    expected = [logits(hf.generate(model, **batch, mesh=mesh, **OPTIONS))[:, 0] for batch in batches]
    caches, wrong = [hf.ShardedCache(model.config, mesh, block=4) for _ in batches], list[float]()
    for batch, cache in zip(batches, caches, strict=True):
        hf.prefill(model, batch["input_ids"], cache, **{n: x for n, x in batch.items() if n != "input_ids"})
    tokens = [int(batch["input_ids"][0, -1]) for batch in batches]
    for step in range(OPTIONS["max_new_tokens"]):
        found = hf.decode_rows(model, tokens, caches)
        tokens = found.argmax(-1).tolist()
        wrong += [float((row - one[step]).abs().max()) for row, one in zip(found, expected, strict=True)]
    caches[0].crop(-35)
    with pytest.raises(errors.ShapeError, match="caches whose images are whole"):
        hf.decode_rows(model, tokens, caches)
    return worst(wrong)


@pytest.mark.parametrize(("kind", "shape"), rotated([*IMAGES], SHAPES[:2], every=2))
def test_rows_after_images_give_what_each_gives_alone(kind: str, shape: Shape, pool: Pool) -> None:
    assert worst(pool.run(shape.ranks, decode_rows_after_images, kind, shape)) < FLOAT64_MODEL


@on_each_rank
def measure_errors_of_turns(kind: str) -> list[tuple[float, int]]:
    """Return on a rank how far the logits of several turns are off, and the tokens that each took from the cache."""
    model = vision_model(kind, "attnmesh")
    taken = []
    cache = hf.ShardedCache(model.config, named_mesh(Shape(1, 1, 2), AXES), block=4)
    choose_block = cache.choose_block
    cache.choose_block = lambda tokens: (taken.append(cache.get_seq_length()), choose_block(tokens))  # type: ignore[assignment]
    errors = []
    text = {"input_ids": inputs(FIRST)["input_ids"]}
    for batch in (inputs(FIRST), inputs(SECOND), inputs(FIRST), inputs(FIRST, seed=1), text, inputs(FIRST)):
        found = hf.generate(model, **batch, cache=cache, **OPTIONS)
        errors.append(max_error(found, stock(kind, batch)))
    return [*zip(errors, taken, strict=True)]


@pytest.mark.parametrize("kind", IMAGES)
def test_turns_keep_the_images_that_are_the_same(kind: str, pool: Pool) -> None:
    first = inputs(FIRST)["input_ids"].shape[1]
    for found in pool.run(2, measure_errors_of_turns, kind):
        errors, taken = zip(*found, strict=True)
        assert worst(errors) < FLOAT64_MODEL
        # A turn adds an image; one is taken back; other pixels; the placeholders as text; and the images again.
        assert taken == (0, first, first - 1, 6, 6, 6)


@on_each_rank
def measure_error_of_one_text(kind: str) -> float:
    """Return how far logits are off after a turn with one text and two images of which the other was kept."""
    model, one, other = vision_model(kind, "attnmesh"), inputs(FIRST), inputs(FIRST, seed=1)
    cache = hf.ShardedCache(model.config, named_mesh(Shape(1, 1, 2), AXES), block=4)
    hf.generate(model, **{name: torch.cat((x, other[name])) for name, x in one.items()}, cache=cache, **OPTIONS)
    cache.batch_select_indices(torch.tensor([1]))
    return max_error(hf.generate(model, **one, cache=cache, **OPTIONS), stock(kind, one))


def test_a_sequence_kept_of_a_batch_is_not_taken_for_another(pool: Pool) -> None:
    assert worst(pool.run(2, measure_error_of_one_text, "qwen2_5_vl")) < FLOAT64_MODEL


@on_each_rank
def measure_error_after_prefill(kind: str, shape: Shape) -> float:
    model, batch = vision_model(kind, "attnmesh"), inputs(FIRST)
    cache = hf.ShardedCache(model.config, named_mesh(shape, AXES), block=4)
    hf.prefill(model, cache=cache, **batch)
    assert cache.get_seq_length() == batch["input_ids"].shape[1] - 1
    return max_error(hf.generate(model, **batch, cache=cache, **OPTIONS), stock(kind, batch))


@pytest.mark.parametrize("shape", [Shape(2, 1, 1), Shape(1, 3, 1)], ids=str)
def test_a_prefill_with_images_is_continued(shape: Shape, pool: Pool) -> None:
    assert worst(pool.run(shape.ranks, measure_error_after_prefill, "qwen3_vl", shape)) < FLOAT64_MODEL


@on_each_rank
def measure_error_of_processed(shape: Shape) -> float:
    ours, stock = (build_images(image_case("llava"), attention, torch.float64) for attention in ("attnmesh", "sdpa"))
    expected = logits(stock.generate(**processed(), **OPTIONS))
    found = hf.generate(ours, **processed(), mesh=named_mesh(shape, AXES), **OPTIONS)
    return max_error(found, expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_a_processor_returns_is_what_generate_takes(shape: Shape, pool: Pool) -> None:
    assert worst(pool.run(shape.ranks, measure_error_of_processed, shape)) < FLOAT64_MODEL


Prompt = dict[str, Any]


def with_other_pixels(rank: int) -> Prompt:
    batch = inputs(FIRST)
    return batch | {"pixel_values": batch["pixel_values"] + rank}


def with_images_on_one_rank(rank: int) -> Prompt:
    batch = inputs(FIRST)
    return batch if rank else {"input_ids": batch["input_ids"]}


def with_fewer_images(rank: int) -> Prompt:
    batch = inputs(FIRST)
    return batch | {"pixel_values": batch["pixel_values"][:32], "image_grid_thw": batch["image_grid_thw"][:1]}


def that_ends_in_an_image(rank: int) -> Prompt:
    batch = inputs((20, "wide", 1))
    return {name: x[:, :-2] if x.shape == batch["input_ids"].shape else x for name, x in batch.items()}


def with_pixels_of_another_shape(rank: int) -> Prompt:
    return inputs(FIRST) | {"pixel_values": torch.zeros(1, 3, 28, 28)}


def with_guesses(rank: int) -> Prompt:
    return {**inputs(FIRST), "prompt_lookup_num_tokens": 3}


def with_audio(rank: int) -> Prompt:
    return inputs(FIRST) | {"input_features": torch.zeros(1, 8)}


REFUSED: list[tuple[Callable[[int], Prompt], str]] = [
    (with_other_pixels, "pixel_values"),
    (with_images_on_one_rank, "pixel_values"),
    (with_fewer_images, "images that fit the prompt"),
    (that_ends_in_an_image, "1 tokens of text at the end of a prompt"),
    (with_pixels_of_another_shape, "images that fit the prompt"),
    (with_guesses, "prompt_lookup_num_tokens"),
    (with_audio, "input_features"),
]


@on_each_rank
def catch_refusal(prompt_of: Callable[[int], Prompt]) -> str:
    """Return the error of a rank for a prompt that is not right."""
    model, mesh = vision_model("qwen3_vl", "attnmesh"), named_mesh(Shape(1, 1, 2), AXES)
    try:
        hf.generate(model, **prompt_of(torch.distributed.get_rank()), mesh=mesh, max_new_tokens=2)
    except errors.InputError as error:
        assert float(hf.generate(model, prompt(9), mesh=mesh, max_new_tokens=1).sum()) > 0  # ranks are in step
        return str(error)
    return ""


@pytest.mark.parametrize(("prompt_of", "message"), REFUSED)
def test_images_that_do_not_fit_are_refused_on_all_ranks_alike(
    prompt_of: Callable[[int], Prompt], message: str, pool: Pool
) -> None:
    first, second = pool.run(2, catch_refusal, prompt_of)
    assert first == second
    assert message in first


def test_features_without_their_places_are_refused_by_name() -> None:
    arguments = {"inputs_embeds": torch.zeros(1, 3, 8), "deepstack_visual_embeds": [torch.zeros(2, 8)]}
    with pytest.raises(errors.KernelError, match="given Odd, whose text model takes deepstack_visual_embeds"):
        text_arguments("generate images", "Odd", nn.Identity(), arguments)
    places = {"visual_pos_masks": torch.tensor([[True, False, True]])}
    assert (
        text_arguments("generate images", "Odd", nn.Identity(), arguments | places).keys() == arguments.keys() | places
    )
