"""Text that sees images through layers of cross-attention (Mllama), beside stock transformers on one device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.images.image_checks import model_of
from tests.support.images.image_inputs import random_pixels
from tests.support.images.image_prompts import OPTIONS, logits
from tests.support.images.image_training import loss_and_gradients_in_place
from tests.support.models.families import prompt
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.tolerances import FLOAT64_LOSS, FLOAT64_MODEL

Batch = dict[str, Any]

IMAGE, DOUBLE = 90, torch.float64


def inputs(*texts: tuple[int, ...], seed: int = 0, side: str = "left") -> Batch:
    """What a processor of Mllama returns for texts with an image before each part but the first, padded on a side."""
    length, most = max(map(sum, texts)), max(len(text) - 1 for text in texts)
    ids, mask = torch.zeros(len(texts), length, dtype=torch.long), torch.zeros(len(texts), length, dtype=torch.long)
    seen = torch.zeros(len(texts), length, most, 4, dtype=torch.long)
    for row, text in enumerate(texts):
        start = length - sum(text) if side == "left" else 0
        stop = start + sum(text)
        ids[row, start:stop], mask[row, start:stop] = prompt(sum(text), seed=row)[0] % 80 + 5, 1
        for number in range(len(text) - 1):
            place = start + sum(text[: number + 1])
            ids[row, place] = IMAGE
            seen[row, place:stop, number, : 2 + number] = 1
    tiles = (torch.arange(4) < torch.arange(2, 2 + most)[:, None]).long().expand(len(texts), -1, -1).clone()
    for row, text in enumerate(texts):
        tiles[row, len(text) - 1 :, 1:] = 0  # padding of images has one tile
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "pixel_values": random_pixels(len(texts), most, 4, 3, 32, 32, dtype=DOUBLE, seed=seed),
        "aspect_ratio_ids": torch.ones(len(texts), most, dtype=torch.long),
        "aspect_ratio_mask": tiles,
        "cross_attention_mask": seen,
    }


def text_of(length: int) -> Batch:
    return {"input_ids": prompt(length) % 80 + 5, "attention_mask": torch.ones(1, length, dtype=torch.long)}


def stock(batch: Batch, **options: Any) -> Tensor:
    return logits(model_of("mllama", None, DOUBLE).generate(**batch, **{**OPTIONS, **options}))


@on_each_rank
def answer_in_turns(shape: Shape, batches: list[Batch], options: dict[str, Any]) -> list[Tensor]:
    """Return on a rank the logits of turns with one cache, of blocks so small that all ranks have some."""
    model = model_of("mllama", "attnmesh", DOUBLE)
    cache = hf.ShardedCache(model.config, named_mesh(shape, AXES), block=4)
    return [logits(hf.generate(model, **batch, cache=cache, **{**OPTIONS, **options})) for batch in batches]


ONE, TWO = (5, 26), (5, 9, 21)
PROMPTS: dict[str, tuple[list[Batch], dict[str, Any]]] = {
    "padded": ([inputs(TWO, ONE)], {}),
    "chunked": ([inputs(TWO)], {"prefill_chunk_size": 8}),
    "sampled": ([inputs(ONE)], {"num_return_sequences": 2, "do_sample": True, "top_k": 1}),
    "turns": ([inputs(ONE), inputs(TWO), inputs(ONE, seed=1), text_of(31), text_of(40), inputs(ONE)], {}),
}
"""Turns of text and images: an image is added, other pixels, the same tokens without images, and the images again."""


@pytest.mark.parametrize(
    ("name", "shape"), [*zip(PROMPTS, (Shape(1, 1, 2), Shape(1, 3, 1), Shape(2, 1, 1), Shape(1, 1, 3)), strict=True)]
)
def test_text_sees_images(name: str, shape: Shape, pool: Pool) -> None:
    batches, options = PROMPTS[name]
    whole = {key: x for key, x in options.items() if key != "prefill_chunk_size"}
    expected = [stock(batch, **whole) for batch in batches]
    for found in pool.run(shape.ranks, answer_in_turns, shape, batches, options):
        for turn, logits_of_stock in zip(found, expected, strict=True):
            assert float((turn - logits_of_stock).abs().max()) < FLOAT64_MODEL


def test_a_restored_text_sees_no_image_of_before(tmp_path: Path) -> None:
    model, text = model_of("mllama", "attnmesh", DOUBLE), text_of(13)
    saved = hf.ShardedCache(model.config, None)
    sequences = hf.generate(model, **text, cache=saved, max_new_tokens=4)
    saved.save(tmp_path / "text")
    cache = hf.ShardedCache(model.config, None)
    hf.generate(model, **inputs(ONE), cache=cache, max_new_tokens=4)
    cache.restore(tmp_path / "text")
    longer = text_of(13)
    longer["input_ids"] = torch.cat((sequences, prompt(9) % 80 + 5), 1)
    longer["attention_mask"] = torch.ones_like(longer["input_ids"])
    found = logits(hf.generate(model, **longer, cache=cache, **OPTIONS))
    assert float((found - stock(longer)).abs().max()) < FLOAT64_MODEL


@on_each_rank
def measure_error_of_next_turn() -> tuple[float, int]:
    """Return how far logits are off after a turn that continues another, and the tokens that it took from the cache."""
    model, first = model_of("mllama", "attnmesh", DOUBLE), inputs(ONE)
    cache = hf.ShardedCache(model.config, named_mesh(Shape(1, 1, 2), AXES), block=4)
    sequences = hf.generate(model, **first, cache=cache, max_new_tokens=4)
    ids = torch.cat((sequences, prompt(9) % 80 + 5), 1)
    more = ids.shape[1] - first["input_ids"].shape[1]
    seen = first["cross_attention_mask"]
    longer = {**first, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    longer["cross_attention_mask"] = torch.cat((seen, seen[:, -1:].expand(-1, more, -1, -1)), 1)
    taken: list[int] = []
    choose_block = cache.choose_block
    cache.choose_block = lambda tokens: (taken.append(cache.get_seq_length()), choose_block(tokens))  # type: ignore[assignment]
    found = logits(hf.generate(model, **longer, cache=cache, **OPTIONS))
    return float((found - stock(longer)).abs().max()), taken[0]


def test_a_turn_continues_a_prompt_with_the_same_images(pool: Pool) -> None:
    for max_error, taken in pool.run(2, measure_error_of_next_turn):
        assert max_error < FLOAT64_MODEL
        assert taken == sum(ONE)


@on_each_rank
def train_on_mesh(shape: Shape, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    return loss_and_gradients_in_place(
        model_of("mllama", "attnmesh", DOUBLE), hf.shard_batch(batch, named_mesh(shape, AXES))
    )


@pytest.mark.parametrize("shape", [Shape(1, 1, 3), Shape(2, 1, 1)], ids=str)
def test_loss_and_gradients_are_those_of_one_device(shape: Shape, pool: Pool) -> None:
    batch = inputs(TWO, ONE, side="right")
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    expected, gradients = loss_and_gradients_in_place(model_of("mllama", None, DOUBLE), {**batch, "use_cache": False})
    losses, found = zip(*pool.run(shape.ranks, train_on_mesh, shape, batch), strict=True)
    assert sum(losses) / shape.ranks == pytest.approx(expected, rel=FLOAT64_LOSS)
    assert sum("vision" in name and bool(x.any()) for name, x in gradients.items()) > 10
    for name, whole in gradients.items():
        given = sum(part[name] for part in found) / shape.ranks
        assert (given - whole).abs().max() <= FLOAT64_MODEL * max(1, float(whole.abs().max())), name


def test_what_would_lose_the_images_is_refused(tmp_path: Path) -> None:
    model = model_of("mllama", "attnmesh", DOUBLE)
    cache = hf.ShardedCache(model.config)
    hf.prefill(model, cache=cache, **inputs(ONE))
    images = cache.held_bytes - sum(kv_cache.own_shard.token_bytes for kv_cache in cache.kv_caches)
    assert images == 2 * 4 * 17 * 16 * 8  # keys and values, tiles, features of a tile, values, bytes
    with pytest.raises(errors.KernelError, match="without images of cross-attention"):
        cache.save(tmp_path)
    with pytest.raises(errors.KernelError, match="without images of cross-attention"):
        hf.ShardedCache.recover(cache, model.config, None)
    for call in (lambda: hf.decode_rows(model, [5], [cache]), lambda: hf.Engine(model, None)):
        with pytest.raises(errors.KernelError, match=r"Fix: call hf\.generate for each request"):
            call()
